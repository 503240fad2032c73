"""Build the work of a candidate's step: units, compute, messages and memory, without a run.

The work has the form of a recorded run's work (`simulation.workload`). So the simulator's schedule
of FSDP2 gives the step time, and its memory ledger gives the peak.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.hardware import (
    BACKWARD_KERNELS,
    BANDWIDTH_RATIO,
    COMPILED_KERNELS,
    FORWARD_KERNELS,
    LAUNCH_NS,
    OVERLAP_SLOWDOWN,
    Gpu,
)
from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory, UnitMemory
from fsdp_inspect.simulation.parameters import padded_numel
from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.compute import ComputeModel, ComputeTimes
from fsdp_inspect.simulation.planning.estimates import UnreusedBytes
from fsdp_inspect.simulation.planning.transformer import Checkpoint
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

OPTIMIZER_TRAFFIC = 4 * 9
"""Bytes that clipping and a fused AdamW in float32 read and write for each parameter."""
QUANTIZED_BYTES = 0.55
"""Bytes of an element of a 4-bit matrix (NF4), its scales included."""
_BYTES_8BIT = 1
_EXPOSED_ASYNC = 0.35
"""Exposed fraction of the messages of asynchronous tensor parallelism, an assumption."""
WHOLE_RATIO = 0.54
"""The rate of all operations of a training, as a fraction of that of large matrix products: the
median of 117 published trainings in bfloat16 (docs/planning_accuracy.md). 80% of them are between
38% and 74%."""
WHOLE_ENDS = (0.70, 1.37)
"""These ends, as fractions of the median."""
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
                    "h200-ib400, or fewer GPUs. Change --preset or --gpus. If all GPUs are in one "
                    "node, set --gpus-per-node."
                )
            rate = min(self.preset.inter[0] * per_node, rate)
        latency = self.preset.ring_latency_ns(num_ranks, nodes)
        return Ring(num_ranks, rate * self.bandwidth_ratio, latency)


@dataclass(frozen=True, slots=True)
class Speed:
    """The rates of the machine at one end, or in the middle, of their intervals."""

    gpu: Gpu
    links: Links
    efficiency: float | None
    """Fraction of the peak rate that all operations reach, as measured; None: see `compute`."""
    host_optimizer_s: float
    """Seconds of a host for AdamW of a billion parameters."""
    launch_ratio: float = 1.0
    """Host time of a kernel as a fraction of `LAUNCH_NS`."""
    whole_ratio: float = 1.0
    """The rate of all operations together, as a fraction of its typical value."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the device's memory, as copies reach it."""
        return self.gpu.memory_bytes_per_s * BANDWIDTH_RATIO

    def rate(self, *, is_half: bool) -> float:
        """Operations per second in bfloat16 or in float32, elementwise operations included."""
        peak = self.gpu.bf16_flops if is_half else self.gpu.fp32_flops
        if self.efficiency is not None:
            return peak * self.efficiency
        return peak * self.gpu.products * WHOLE_RATIO * self.whole_ratio


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
                "reduce_dtype": candidate.reduce_dtype if is_half else None,
                "offload": "cpu_pinned" if candidate.offload else "none",
            }
        )
        for modules in [*order, (ROOT,)]
    ]
    mode, every = candidate.checkpointing, candidate.checkpoint_every
    shard = shard_size(job, candidate)
    replicate = {"replicate": candidate.replicas} if candidate.replicas > 1 else {}
    return Plan.from_dict(
        {
            "units": tuple(units),
            "world_size": job.gpus,
            "mesh": {**replicate, "shard": shard},
            "forward_prefetch": candidate.prefetch,
            "backward_prefetch": candidate.prefetch,
            "accumulation": Accumulation(
                microbatches=candidate.microbatches, sync=candidate.accumulation_sync
            ),
            "checkpointing": Checkpointing(
                full=tuple(blocks[::every]) if mode == "full" else (),
                selective=tuple(blocks[::every]) if mode in ("selective", "alternate") else (),
            ),
        }
    )


def shard_size(job: Job, candidate: Candidate) -> int:
    """The ranks of a shard group; those of context parallelism shard, too."""
    ways = candidate.tensor_parallel * candidate.pipeline_parallel * candidate.replicas
    return job.gpus // ways


def build_workload(job: Job, candidate: Candidate, speed: Speed) -> Workload:
    """The work of one step of a rank."""
    return _Builder(job, candidate, speed).build()


class _Builder:
    def __init__(self, job: Job, candidate: Candidate, speed: Speed) -> None:
        stages = candidate.pipeline_parallel
        model = replace(job.model, num_layers=-(-job.model.num_layers // stages))
        self._job, self._candidate, self._speed = replace(job, model=model), candidate, speed
        self._model = model
        # An interleaved pipeline has up to two sequences of each stage in flight.
        sequences = candidate.batch_size if stages == 1 else min(candidate.batch_size, 2 * stages)
        self._tokens = sequences * job.seq_len / candidate.context_parallel
        """Tokens of a rank whose activations exist at once."""
        self._ways = candidate.tensor_parallel
        self._width = ITEMSIZE[candidate.param_dtype]
        self._master = ITEMSIZE[candidate.master_dtype]
        self._reduce = ITEMSIZE[candidate.reduce_dtype]
        self._states = 2 * (
            _BYTES_8BIT if candidate.optimizer == "adamw_8bit" else ITEMSIZE[candidate.master_dtype]
        )
        self._shard = shard_size(job, candidate)
        self._shard_ring = speed.links.ring(self._shard, self._ways)
        self._replica_ring = speed.links.ring(candidate.replicas, self._ways * self._shard)
        self._tensor_ring = speed.links.ring(self._ways, 1)
        self._context_ring = speed.links.ring(candidate.context_parallel, self._ways)
        self._expert_ring = speed.links.ring(candidate.expert_parallel, 1)
        self._compute = ComputeModel(model, candidate, speed.gpu, job.seq_len)

    def build(self) -> Workload:
        """The work, with one unit for each unit of the plan that has parameters."""
        parts = self._parts()
        pieces, memories = self._pieces(parts)
        names = [part.name for part in parts]
        root = names.index(ROOT) if ROOT in names else None
        count = self._candidate.microbatches
        accumulation = Accumulation(microbatches=count, sync=self._candidate.accumulation_sync)
        passes = passes_of(tape_of(pieces, root), microbatches_of(accumulation))
        kept, rise = self._model.loss_bytes(self._candidate.loss, self._width)
        # A loss fused with the output projection sums its weight gradient in float32.
        is_linear = self._candidate.loss == "linear" and not self._candidate.adapter_rank
        summed = 4 * self._model.vocab_size * self._model.dim / self._ways if is_linear else 0
        loss = PieceMemory(
            kept=round(self._per_token(kept)),
            forward_rise=round(self._per_token(rise) + summed),
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
            parts=gradients
            + 2 * full
            + self._per_token(self._model.loss_bytes(self._candidate.loss, self._width)[0]),
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

    def _adapter_numel(self, part: _Part) -> int:
        """Parameters of LoRA's matrices beside those of a unit."""
        rank = self._candidate.adapter_rank
        return sum(rank * sum(shape) for shape in self._split(part.shapes) if len(shape) > 1)

    def _trained_numel(self, part: _Part) -> int:
        """Parameters with a gradient."""
        frozen = self._candidate.adapter_rank > 0
        return self._adapter_numel(part) if frozen else self._padded(part)

    def _gathered_bytes(self, part: _Part) -> float:
        """Bytes of a unit's all-gather."""
        candidate = self._candidate
        if candidate.is_quantized:
            return self._padded(part) * QUANTIZED_BYTES
        narrow = candidate.float8_gather and len(part.modules[0].split(".")) > 1
        return self._padded(part) * (1 if narrow else self._width)

    def _unit_memory(self, part: _Part) -> UnitMemory:
        padded, trained = self._padded(part), self._trained_numel(part)
        own = trained // self._shard
        *_, last = self._split(part.shapes)
        candidate, is_on_host = self._candidate, self._candidate.offload
        frees = is_on_host or candidate.optimizer == "in_backward"
        # Without shards, compute uses the parameters in place, and the optimizer the gradients.
        resting = own * (self._master + self._states)
        if not candidate.is_sharded:
            frozen = 0 if candidate.adapter_rank == 0 else round(self._gathered_bytes(part))
            return UnitMemory(
                unsharded=0,
                reduce_input=0,
                sharded_gradients=0 if frees else own * self._master,
                resting=resting + frozen,
            )
        if candidate.adapter_rank:
            width = QUANTIZED_BYTES if candidate.is_quantized else self._width
            resting += round(padded // self._shard * width)
        return UnitMemory(
            unsharded=round(self._gathered_bytes(part)),
            reduce_input=trained * self._reduce,
            sharded_gradients=0 if frees else own * self._master,
            resting=0 if is_on_host else resting,
            last_gradient=0 if candidate.adapter_rank else math.prod(last) * self._width,
        )

    def _unit_work(self, part: _Part) -> UnitWork:
        padded, gpu = self._padded(part), self._speed.gpu
        trained, gathered = self._trained_numel(part), self._gathered_bytes(part)
        if not self._candidate.is_sharded:
            gathered = 0.0
        rate = self._speed.bandwidth
        own = trained / self._shard
        held = gathered / self._shard
        is_offloaded = self._candidate.offload
        to_device = padded / self._shard * self._master / gpu.host_bytes_per_s
        to_host = own * self._master / gpu.host_bytes_per_s
        launch = round(LAUNCH_OF_COLLECTIVE_NS * self._speed.launch_ratio)
        names = self._model.module_names
        return UnitWork(
            gather_ns=self._shard_ring.gather_ns(gathered),
            reduce_ns=self._shard_ring.gather_ns(trained * self._reduce)
            + _ns(to_host * is_offloaded),
            all_reduce_ns=self._replica_ring.all_reduce_ns(own * self._reduce),
            copy_in_ns=_ns(
                self._candidate.is_sharded * (padded / self._shard * self._master + held) / rate
                + to_device * is_offloaded
            ),
            copy_out_ns=_ns(2 * gathered / rate),
            reduce_copy_in_ns=_ns(trained * (self._width + self._reduce) / rate),
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
        modes = {self._mode(number) for number in range(self._model.num_layers)}
        one = {mode: self._block(0, mode) for mode in modes}
        kept = {mode: self._block_memory(mode) for mode in modes}
        for at, part in enumerate(parts):
            for _ in range(len(part.modules) if part.modules[0].startswith(names.blocks) else 0):
                mode = self._mode(len(pieces) - 1)
                pieces.append(replace(one[mode], unit=at))
                memories.append(kept[mode])
        head = self._times(self._compute.head(), self._model.head_flops(self._all_tokens))
        pieces.append(Piece(last, _ns(head.forward), _ns(head.backward)))
        memories.append(self._head_memory())
        return self._slowed(pieces, parts), memories

    @property
    def _all_tokens(self) -> float:
        """Tokens of a rank in one microbatch."""
        candidate = self._candidate
        return candidate.batch_size * self._job.seq_len / candidate.context_parallel

    def _times(self, modelled: ComputeTimes, flops: float) -> ComputeTimes:
        """Compute times, from a measured rate if there is one; with the bubbles of a pipeline.

        A pipeline of p stages and m sequences takes m + p - 1 turns for m sequences.
        """
        if self._speed.efficiency is not None:
            is_half = self._candidate.param_dtype == "bfloat16"
            forward = flops / self._ways / self._speed.rate(is_half=is_half)
            repeated = modelled.repeated / modelled.forward * forward
            modelled = ComputeTimes(forward, 2 * forward, repeated)
        turns = self._candidate.batch_size
        ratio = (turns + self._candidate.pipeline_parallel - 1) / turns
        return ComputeTimes(
            modelled.forward * ratio, modelled.backward * ratio, modelled.repeated * ratio
        )

    def _mode(self, number: int) -> Checkpoint:
        """The activation checkpointing of a block."""
        is_chosen = number % self._candidate.checkpoint_every == 0
        return self._candidate.checkpointing if is_chosen else "none"

    def _block(self, unit: int, mode: Checkpoint) -> Piece:
        model, candidate = self._model, self._candidate
        flops = model.block_flops(self._all_tokens, self._job.seq_len)
        times = self._times(self._compute.block(mode), flops)
        one = self._tensor_ring.gather_ns(self._all_tokens * model.dim * self._width)
        # Two all-gathers and two reduce-scatters; float8 inputs are gathered in float8.
        messages = 3 * one if candidate.products == "float8" else 4 * one
        if candidate.async_tensor_parallel:
            messages = round(messages * _EXPOSED_ASYNC)
        messages += self._context_ring.gather_ns(
            2 * self._all_tokens * candidate.context_parallel * model.kv_dim * self._width
        )
        # Each token goes to the ranks of its experts and back; a ring's all-gather has that cost.
        routed = 2 * self._all_tokens * model.active_experts * model.dim * self._width
        messages += self._expert_ring.gather_ns(routed) if model.experts else 0
        repeats = {"none": 0.0, "selective": 0.5, "alternate": 0.5, "full": 1.0}[mode]
        kernel_ns = LAUNCH_NS * self._speed.launch_ratio
        kernel_ns *= COMPILED_KERNELS if candidate.compiled else 1.0
        backward_kernels = BACKWARD_KERNELS + (FORWARD_KERNELS if repeats else 0)
        return Piece(
            unit,
            forward_ns=_ns(times.forward) + messages,
            backward_ns=_ns(times.backward) + messages,
            recompute_ns=_ns(times.repeated) + round(repeats * messages),
            forward_launch_ns=round(FORWARD_KERNELS * kernel_ns),
            backward_launch_ns=round(backward_kernels * kernel_ns),
        )

    def _slowed(self, pieces: Sequence[Piece], parts: Sequence[_Part]) -> list[Piece]:
        """The pieces with the slowdown by the collectives that run beside them."""
        if self._speed.efficiency is not None or self._shard < 2:
            return list(pieces)
        counts = Counter(piece.unit for piece in pieces)
        works = [self._unit_work(part) for part in parts]
        # A collective over one network card for each rank occupies the device less than NVLink.
        links = self._speed.links
        rate = self._shard_ring.bytes_per_s / (links.preset.intra[0] * links.bandwidth_ratio)
        slowdown = OVERLAP_SLOWDOWN * min(rate, 1.0)
        slowed = []
        for piece in pieces:
            work, count = works[piece.unit], counts[piece.unit]
            gather = slowdown * work.gather_ns / count
            reduce = slowdown * (work.reduce_ns + work.all_reduce_ns) / count
            if self._candidate.accumulation_sync == "last":
                reduce /= self._candidate.microbatches
            again = gather if self._candidate.reshard_after_forward else 0.0
            forward, backward = piece.forward_ns, piece.backward_ns + piece.recompute_ns
            slowed.append(
                replace(
                    piece,
                    forward_ns=forward + round(min(gather, OVERLAP_SLOWDOWN * forward)),
                    backward_ns=piece.backward_ns
                    + round(min(again + reduce, OVERLAP_SLOWDOWN * backward)),
                )
            )
        return slowed

    def _optimizer_ns(self, parts: Sequence[_Part]) -> int:
        own = sum(self._trained_numel(part) for part in parts) / self._shard
        if self._candidate.offload:
            of_node = own * min(self._job.gpus_per_node, self._job.gpus)
            return _ns(of_node / 1e9 * self._speed.host_optimizer_s)
        return _ns(own * OPTIMIZER_TRAFFIC * self._master / 4 / self._speed.bandwidth)

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

    def _block_memory(self, mode: Checkpoint) -> PieceMemory:
        model = self._model
        sizes = self._width, self._job.seq_len
        kept = self._per_token(model.kept_bytes(mode, *sizes))
        whole = self._per_token(model.forward_rise_bytes(*sizes))
        recomputed = self._per_token(model.recomputed_rise_bytes(self._width))
        attention = self._per_token(model.attention_rise_bytes(*sizes))
        gathered = self._gathered()
        forward = {
            "none": whole + gathered,
            "selective": max(kept + recomputed, attention),
            "alternate": max(kept + recomputed, attention),
            "full": max(recomputed, attention),
        }[mode]
        numel = sum(math.prod(shape) for shape in self._split(model.block_shapes()))
        gradients = 0 if self._candidate.adapter_rank else numel * self._width
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
        mode = self._candidate.loss
        logits = self._per_token(self._width * model.logits)
        gradient = math.prod(self._split([(model.vocab_size, model.dim)])[0]) * self._width
        loss = self._per_token(model.loss_bytes(mode, self._width)[0])
        if mode == "linear":
            logits = 0.0
        if self._candidate.adapter_rank:
            gradient = 0
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
        ids = round(2 * 8 * self._tokens)
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
    numel = job.model.num_parameters * ranks / (job.gpus // candidate.replicas)
    master = ITEMSIZE[candidate.master_dtype]
    if candidate.is_quantized:
        return round(numel * QUANTIZED_BYTES)
    if candidate.adapter_rank:
        return round(numel * ITEMSIZE[candidate.param_dtype])
    return round(numel * 4 * master)


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
