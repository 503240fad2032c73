"""Build the work of a candidate's step: units, compute, messages and memory, without a run.

The work has the form of a recorded run's work (`simulation.workload`). So the simulator's schedule
of FSDP2 gives the step time, and its memory ledger gives the peak.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.hardware import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    LAUNCH_NS,
    TENSOR_PARALLEL_RATIO,
    Gpu,
)
from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.parameters import padded_numel
from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.estimates import UnreusedBytes
from fsdp_inspect.simulation.policies import microbatches_of
from fsdp_inspect.simulation.workload import (
    Pass,
    Piece,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    tape_of,
)
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.links import Preset
from fsdp_inspect.trace.plan import (
    ROOT,
    Accumulation,
    Checkpointing,
    Plan,
    UnitPlan,
)

_MASTER, _STATES, _REDUCE = 4, 8, 4
"""Bytes of a parameter's float32 weight, of AdamW's two states, and of the reduced gradient."""
OPTIMIZER_TRAFFIC = 4 * 9
"""Bytes that clipping and a fused AdamW read and write for each parameter."""
LAUNCH_OF_COLLECTIVE_NS = 150_000
"""Host time of torch's hooks and of the issue of one collective."""

# --- Predict the duration of collectives in the groups of a mesh, from a link preset.
#
# A ring of N ranks carries message x (N-1)/N, and twice that for an all-reduce. A group within a
# node uses the link within nodes. For a group that crosses nodes, the bandwidths of the network
# cards of its ranks in one node add up, but they never exceed the link within nodes. The latency
# grows with the ring (`trace.links`).


@dataclass(frozen=True, slots=True)
class Ring:
    """The link of one group."""

    num_ranks: int
    bytes_per_s: float
    latency_ns: float

    def gather_ns(self, message_bytes: float) -> int:
        """Duration of an all-gather or a reduce-scatter of a full message."""
        return self._duration_ns(message_bytes * (self.num_ranks - 1) / self.num_ranks)

    def all_reduce_ns(self, message_bytes: float) -> int:
        """Duration of an all-reduce."""
        return self._duration_ns(2 * message_bytes * (self.num_ranks - 1) / self.num_ranks)

    def _duration_ns(self, bus_bytes: float) -> int:
        if self.num_ranks < 2:
            return 0
        return round(self.latency_ns + bus_bytes / self.bytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a machine."""

    preset: Preset
    gpus_per_node: int
    bandwidth_ratio: float = 1.0
    """The bandwidth as a fraction of the preset's."""

    def ring(self, num_ranks: int, stride: int) -> Ring:
        """The link of a group of ranks.

        Args:
            num_ranks: Ranks of the group.
            stride: Distance between neighbouring ranks: 1 for consecutive ones.

        Raises:
            ConfigError: The group crosses nodes, and the preset has no network.
        """
        per_node = max(min(num_ranks, self.gpus_per_node // stride), 1)
        nodes = -(-num_ranks // per_node)
        rate = self.preset.intra[0]
        if nodes > 1:
            if self.preset.inter is None:
                raise ConfigError(
                    f"The preset {self.preset.name!r} is one node of {self.gpus_per_node} GPUs, "
                    f"and the plan needs {nodes} nodes. Expected a preset with a network, such as "
                    "h200-ib400, or fewer GPUs. Change --preset or --gpus."
                )
            rate = min(self.preset.inter[0] * per_node, rate)
        latency = self.preset.ring_latency_ns(num_ranks, nodes)
        return Ring(num_ranks, rate * self.bandwidth_ratio, latency)


@dataclass(frozen=True, slots=True)
class Speed:
    """The rates of the machine at one end, or in the middle, of their intervals."""

    gpu: Gpu
    links: Links
    efficiency: float
    """Fraction of the peak rate that operations reach."""
    host_optimizer_s: float
    """Seconds of a host for AdamW of a billion parameters."""
    launch_ratio: float = 1.0
    """Host time of a kernel as a fraction of `LAUNCH_NS`."""

    def flops(self, candidate: Candidate) -> float:
        """Operations per second."""
        is_split = candidate.tensor_parallel > 1
        rate = self.rate(is_half=candidate.param_dtype == "bfloat16")
        return rate * (TENSOR_PARALLEL_RATIO if is_split else 1.0)

    def rate(self, *, is_half: bool) -> float:
        """Operations per second without tensor parallelism, in bfloat16 or in float32."""
        return (self.gpu.bf16_flops if is_half else self.gpu.fp32_flops) * self.efficiency


@dataclass(frozen=True, slots=True)
class _Part:
    """A unit with its parameters and the pieces that run in it."""

    name: str
    modules: tuple[str, ...]
    shapes: Sequence[tuple[int, ...]]


def plan_of(job: Job, candidate: Candidate) -> Plan:
    """The plan file's form of a candidate, with the names of the model's modules."""
    names = job.model.module_names
    blocks = [f"{names.blocks}.{number}" for number in range(job.model.num_layers)]
    size = candidate.blocks_per_unit
    groups: list[tuple[str, ...]] = [
        tuple(blocks[first : first + size]) for first in range(0, len(blocks), size)
    ]
    reshard: dict[tuple[str, ...], bool | None] = dict.fromkeys(
        groups, candidate.reshard_after_forward
    )
    order = list(groups)
    if not job.model.tie_embeddings:
        embedding, head = (names.embedding,), (names.norm, names.head)
        order = [embedding, *groups, head]
        reshard |= {embedding: candidate.reshard_after_forward, head: False}
    is_half = candidate.param_dtype == "bfloat16"
    units = [
        UnitPlan.model_validate(
            {
                "modules": modules,
                "reshard_after_forward": reshard.get(modules),
                "param_dtype": "bfloat16" if is_half else None,
                "reduce_dtype": "float32" if is_half else None,
                "offload": "cpu_pinned" if candidate.offload else "none",
            }
        )
        for modules in [*order, (ROOT,)]
    ]
    mode = candidate.checkpointing
    shard = job.gpus // candidate.tensor_parallel // candidate.replicas
    replicate = {"replicate": candidate.replicas} if candidate.replicas > 1 else {}
    return Plan.from_dict(
        {
            "units": tuple(units),
            "world_size": job.gpus,
            "mesh": {**replicate, "shard": shard},
            "forward_prefetch": candidate.prefetch,
            "backward_prefetch": candidate.prefetch,
            "accumulation": Accumulation(microbatches=candidate.microbatches),
            "checkpointing": Checkpointing(
                full=tuple(blocks) if mode == "full" else (),
                selective=tuple(blocks) if mode == "selective" else (),
            ),
        }
    )


def build_workload(job: Job, candidate: Candidate, speed: Speed) -> Workload:
    """The work of one step of a rank."""
    return _Builder(job, candidate, speed).build()


class _Builder:
    def __init__(self, job: Job, candidate: Candidate, speed: Speed) -> None:
        self._job, self._candidate, self._speed = job, candidate, speed
        self._model = job.model
        self._tokens = candidate.batch_size * job.seq_len
        self._ways = candidate.tensor_parallel
        self._width = ITEMSIZE[candidate.param_dtype]
        self._shard = job.gpus // self._ways // candidate.replicas
        self._shard_ring = speed.links.ring(self._shard, self._ways)
        self._replica_ring = speed.links.ring(candidate.replicas, self._ways * self._shard)
        self._tensor_ring = speed.links.ring(self._ways, 1)

    def build(self) -> Workload:
        """The work, with one unit for each unit of the plan that has parameters."""
        parts = self._parts()
        pieces, memories = self._pieces(parts)
        names = [part.name for part in parts]
        root = names.index(ROOT) if ROOT in names else None
        count = self._candidate.microbatches
        passes = passes_of(tape_of(pieces, root), microbatches_of(Accumulation(microbatches=count)))
        loss = PieceMemory(
            kept=round(self._per_token(self._model.loss_kept_bytes())),
            forward_rise=round(self._per_token(self._model.loss_rise_bytes())),
        )
        return Workload(
            units=[self._unit_work(part) for part in parts],
            policies=self._policies(parts),
            pieces=pieces,
            passes=[_after_loss(each, loss) for each in passes],
            after_ns=self._optimizer_ns(parts),
            memory=MemoryWork(
                pieces=memories,
                units=[self._unit_memory(part) for part in parts],
                rest=self._rest_bytes(),
            ),
        )

    def unreused_bytes(self) -> UnreusedBytes:
        """The reserved memory beyond the peak.

        With offload, the largest input of a reduce-scatter takes the place of the gradients.
        """
        units = [self._unit_memory(part) for part in self._parts()]
        gradients = sum(unit.sharded_gradients for unit in units)
        reduce_input = max(unit.reduce_input for unit in units)
        if self._candidate.offload:
            gradients = reduce_input
        full = max(unit.unsharded for unit in units)
        scores = self._model.score_bytes(self._width, self._job.seq_len)
        return UnreusedBytes(
            parts=gradients + 2 * full + self._per_token(self._model.loss_kept_bytes()),
            split=2 * (full + reduce_input + self._per_token(scores)),
        )

    # --- units

    def _policies(self, parts: Sequence[_Part]) -> list[UnitPolicy]:
        """The policies of `plan_of`, without building the plan: a search needs thousands."""
        depth, last = self._candidate.prefetch, len(parts) - 1
        is_tied = self._model.tie_embeddings
        order = [last, *range(last)] if is_tied else list(range(last + 1))
        backward = [last, *reversed(range(last))] if is_tied else list(reversed(order))
        forward_of, backward_of = _next(order, depth), _next(backward, depth)
        return [
            UnitPolicy(
                reshard_after_forward=self._candidate.reshard_after_forward and at != last,
                forward_prefetch=forward_of[at],
                backward_prefetch=backward_of[at] or None,
            )
            for at in range(len(parts))
        ]

    def _parts(self) -> list[_Part]:
        """The units with parameters; a group of blocks is one unit."""
        model, names = self._model, self._model.module_names
        size = self._candidate.blocks_per_unit
        parts = [
            _Part(", ".join(modules), modules, model.block_shapes() * len(modules))
            for first in range(0, model.num_layers, size)
            for modules in [
                tuple(
                    f"{names.blocks}.{number}"
                    for number in range(first, min(first + size, model.num_layers))
                )
            ]
        ]
        if model.tie_embeddings:
            return [*parts, _Part(ROOT, (ROOT,), model.embedding_shapes() + model.head_shapes())]
        head = (names.norm, names.head)
        embedding = _Part(names.embedding, (names.embedding,), model.embedding_shapes())
        return [embedding, *parts, _Part(", ".join(head), head, model.head_shapes())]

    def _split(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shapes on a rank of tensor parallelism: matrices are split, norms are not."""
        if self._ways == 1:
            return list(shapes)
        return [(-(-first // self._ways), *rest) if rest else (first,) for first, *rest in shapes]

    def _padded(self, part: _Part) -> int:
        return sum(padded_numel(shape, self._shard) for shape in self._split(part.shapes))

    def _unit_memory(self, part: _Part) -> UnitMemory:
        padded = self._padded(part)
        own = padded // self._shard
        *_, last = self._split(part.shapes)
        is_on_host = self._candidate.offload
        return UnitMemory(
            unsharded=padded * self._width,
            reduce_input=padded * _REDUCE,
            sharded_gradients=0 if is_on_host else own * _MASTER,
            resting=0 if is_on_host else own * (_MASTER + _STATES),
            last_gradient=math.prod(last) * self._width,
        )

    def _unit_work(self, part: _Part) -> UnitWork:
        padded, gpu = self._padded(part), self._speed.gpu
        own = padded / self._shard
        rate = gpu.memory_bytes_per_s
        on_host = own * _MASTER / gpu.host_bytes_per_s if self._candidate.offload else 0.0
        launch = round(LAUNCH_OF_COLLECTIVE_NS * self._speed.launch_ratio)
        names = self._model.module_names
        return UnitWork(
            gather_ns=self._shard_ring.gather_ns(padded * self._width),
            reduce_ns=self._shard_ring.gather_ns(padded * _REDUCE) + _ns(on_host),
            all_reduce_ns=self._replica_ring.all_reduce_ns(own * _REDUCE),
            copy_in_ns=_ns(own * (_MASTER + self._width) / rate + on_host),
            copy_out_ns=_ns(padded * 2 * self._width / rate),
            reduce_copy_in_ns=_ns(padded * (self._width + _REDUCE) / rate),
            gather_launch_ns=launch,
            reduce_launch_ns=launch,
            ends_with_backward=part.modules in ((names.embedding,), (ROOT,)),
        )

    # --- compute

    def _pieces(self, parts: Sequence[_Part]) -> tuple[list[Piece], list[PieceMemory]]:
        index = {part.name: at for at, part in enumerate(parts)}
        names = self._model.module_names
        first = index.get(names.embedding, index.get(ROOT, 0))
        last = index.get(", ".join((names.norm, names.head)), index.get(ROOT, 0))
        pieces, memories = [Piece(first, 0, 0)], [self._embedding_memory()]
        for at, part in enumerate(parts):
            for _ in range(len(part.modules) if part.modules[0].startswith(names.blocks) else 0):
                pieces.append(self._block(at))
                memories.append(self._block_memory())
        rate = self._speed.flops(self._candidate)
        head = self._model.head_flops(self._tokens) / self._ways / rate
        pieces.append(Piece(last, _ns(head), _ns(2 * head)))
        memories.append(self._head_memory())
        return pieces, memories

    def _block(self, unit: int) -> Piece:
        model, candidate, rate = self._model, self._candidate, self._speed.flops(self._candidate)
        forward = model.block_flops(self._tokens, self._job.seq_len) / self._ways / rate
        again = model.repeated_flops(self._tokens, self._job.seq_len, candidate.checkpointing)
        messages = 4 * self._tensor_ring.gather_ns(self._tokens * model.dim * self._width)
        repeated = {"none": 0.0, "selective": 0.5, "full": 1.0}[candidate.checkpointing]
        kernel_ns = LAUNCH_NS * self._speed.launch_ratio
        backward_kernels = BACKWARD_KERNELS + (FORWARD_KERNELS if repeated else 0)
        return Piece(
            unit,
            forward_ns=_ns(forward) + messages,
            backward_ns=_ns(2 * forward) + messages,
            recompute_ns=_ns(again / self._ways / rate)
            + self._repeated_traffic_ns()
            + round(repeated * messages),
            forward_launch_ns=round(FORWARD_KERNELS * kernel_ns),
            backward_launch_ns=round(backward_kernels * kernel_ns),
        )

    def _repeated_traffic_ns(self) -> int:
        """Selective checkpointing repeats elementwise operations: each tensor is read and written.

        The operations are those of `backward_rise_bytes`, with two tensors moved for each.
        """
        if self._candidate.checkpointing != "selective":
            return 0
        model = self._model
        elements = 3 * model.dim + model.query_dim + model.kv_dim + 2 * model.ffn_dim
        moved = 3 * self._width * elements * self._tokens / self._ways
        return _ns(moved / self._speed.gpu.memory_bytes_per_s)

    def _optimizer_ns(self, parts: Sequence[_Part]) -> int:
        own = sum(self._padded(part) for part in parts) / self._shard
        if self._candidate.offload:
            of_node = own * min(self._job.gpus_per_node, self._job.gpus)
            return _ns(of_node / 1e9 * self._speed.host_optimizer_s)
        return _ns(own * OPTIMIZER_TRAFFIC / self._speed.gpu.memory_bytes_per_s)

    # --- memory

    def _per_token(self, size: float) -> float:
        """Bytes of all tokens; sequence parallelism splits them over the tensor-parallel ranks."""
        return size * self._tokens / self._ways

    def _gathered(self) -> float:
        """The inputs of both branches, which tensor parallelism gathers and saves whole."""
        return 2 * self._width * self._model.dim * self._tokens * (1 - 1 / self._ways)

    def _embedding_memory(self) -> PieceMemory:
        kept = round(self._per_token(self._width * self._model.dim))
        numel = sum(math.prod(shape) for shape in self._split(self._model.embedding_shapes()))
        gradient = numel * self._width
        if self._model.tie_embeddings:
            # The head's gradient waits for the embedding's. Autograd allocates their sum.
            return PieceMemory(kept, kept, 2 * gradient, 0)
        return PieceMemory(kept, kept, gradient, gradient)

    def _block_memory(self) -> PieceMemory:
        model, mode = self._model, self._candidate.checkpointing
        sizes = self._width, self._job.seq_len
        kept = self._per_token(model.kept_bytes(mode, *sizes))
        whole = self._per_token(model.forward_rise_bytes(*sizes))
        recomputed = self._per_token(model.recomputed_rise_bytes(self._width))
        attention = self._per_token(model.attention_rise_bytes(*sizes))
        gathered = self._gathered()
        forward = {
            "none": whole + gathered,
            "selective": max(kept + recomputed, attention),
            "full": max(recomputed, attention),
        }[mode]
        numel = sum(math.prod(shape) for shape in self._split(model.block_shapes()))
        gradients = numel * self._width
        again = self._per_token(model.repeated_bytes(mode, *sizes))
        again += 0 if mode == "none" else gathered
        peak = again + model.backward_rise_bytes(
            self._width,
            num_tokens=self._tokens / self._ways,
            ways=self._ways,
            gradients=gradients,
            kept=kept + again,
        )
        unfused = model.attention_backward_rise_bytes(
            *sizes, num_tokens=self._tokens / self._ways, ways=self._ways
        )
        peak = max(peak, again + unfused)
        positions = 2 * _FLOAT_BYTES * (model.head_dim // 2) * self._job.seq_len
        held = kept + (gathered + positions if mode == "none" else 0)
        return PieceMemory(
            kept=round(held),
            forward_rise=round(max(forward, held)),
            backward_rise=round(max(peak, 0)),
            gradients=gradients,
        )

    def _head_memory(self) -> PieceMemory:
        model = self._model
        normed = self._width * model.dim + _FLOAT_BYTES + model.norm_bytes * model.dim
        kept = self._per_token(normed)
        logits = self._per_token(self._width * model.vocab_size)
        gradient = math.prod(self._split([(model.vocab_size, model.dim)])[0]) * self._width
        loss = self._per_token(model.loss_kept_bytes())
        return PieceMemory(
            kept=round(kept),
            forward_rise=round(kept + logits),
            backward_rise=round(
                max(logits - loss + gradient + self._per_token(self._width * model.dim), 0)
            ),
            gradients=gradient,
            left=-round(loss),
        )

    def _rest_bytes(self) -> int:
        """Token ids and targets, and the positions of each block."""
        ids = 2 * 8 * self._tokens
        return ids + self._model.num_layers * _FLOAT_BYTES * (self._model.head_dim // 2)


_FLOAT_BYTES = 4


def _next(order: Sequence[int], depth: int) -> dict[int, tuple[int, ...]]:
    """The units that each unit prefetches."""
    return {unit: tuple(order[at + 1 : at + 1 + depth]) for at, unit in enumerate(order)}


def _after_loss(one: Pass, loss: PieceMemory) -> Pass:
    """The pass with the loss before it, if it is a backward."""
    return one if one.is_forward else replace(one, before_memory=loss)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def host_bytes(job: Job, candidate: Candidate) -> int:
    """Host memory of the parameters, gradients and states of one node's ranks under offload."""
    if not candidate.offload:
        return 0
    ranks = min(job.gpus_per_node, job.gpus)
    shard = job.gpus // candidate.replicas
    return round(job.model.num_parameters * (2 * _MASTER + _STATES) * ranks / shard)


def unreused_bytes(job: Job, candidate: Candidate, speed: Speed) -> UnreusedBytes:
    """The memory of which other streams or other sizes reuse no block: see `planning.reserved`."""
    return _Builder(job, candidate, speed).unreused_bytes()


_EXACT_MICROBATCHES = 3


def steady_step_ns(simulated: Callable[[int], int], microbatches: int) -> int:
    """The time of a step; beyond three microbatches, each one takes as long as the third.

    Args:
        simulated: The simulated step of a number of microbatches.
        microbatches: The microbatches of the step.
    """
    if microbatches <= _EXACT_MICROBATCHES:
        return simulated(microbatches)
    two, three = simulated(2), simulated(3)
    return two + (microbatches - 2) * (three - two)
