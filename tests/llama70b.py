"""Make a synthetic run in the shape of a published run: Llama-70B under FSDP on eight MI300.

The published figures are exact: parameters of the units, messages, dtypes, counts over two steps,
the time of a transfer, the spread of the arrivals, and how often each rank arrives last. The rest
is made up: no collective overlaps with compute, and units compute for round times.

    step    all-reduce, root gathers, 80 x (gather, forward), then 80 x (gather, backward,
            reduce-scatter), root backward and reduce-scatter, 2 x all-reduce, optimizer
    keeps   the root, and the last block (nothing gathers it in backward): 80 + 79 gathers a step
    late    rank 4 arrives last at 420 of 488 collectives (86.1 %), the others in turn at the rest

Source: TraceLens, tests/traces/mi300/llama_70b_fsdp/nccl_analysis_report_csvs (MIT), the file
nccl_summary_implicit_sync.csv; block and root as in the Llama-3 70B configuration.
"""

from dataclasses import dataclass

from fsdp_inspect.trace.codes import DTYPES, EventKind, Phase, Stream
from fsdp_inspect.trace.run import ModelInfo
from tests.builders import InMemoryRun, RankBuilder, RunBuilder

WORLD_SIZE = 8
NUM_STEPS = 2
NUM_BLOCKS = 80
BLOCK_PARAMETERS = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
ROOT_PARAMETERS = 2 * 128256 * 8192 + 8192
STRAGGLER = 4
NUM_COLLECTIVES = 488
NUM_LAST = 420
"""Collectives at which the straggler is the last to arrive."""

_BACKWARD_NS, _FORWARD_NS, _OPTIMIZER_NS = 40_000_000, 20_000_000, 50_000_000
_COLLECTIVES_PER_STEP = NUM_COLLECTIVES // NUM_STEPS
_OTHERS_PER_STEP = (NUM_COLLECTIVES - NUM_LAST) // NUM_STEPS
_BLOCKS = tuple(f"layers.{number}" for number in range(NUM_BLOCKS))
_PASSES = (EventKind.FORWARD, EventKind.BACKWARD)
_STREAMS = {
    EventKind.ALL_GATHER: Stream.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.OTHER,
}


@dataclass(frozen=True)
class Published:
    """One row of the published table."""

    kind: EventKind
    dtype: str
    bytes: int
    """Bytes of the full message."""
    count: int
    """The count over the two steps."""
    transfer_ns: int
    """Mean communication latency: the shortest duration over the ranks."""
    skew_ns: int
    """Mean start skew from the first to the last arrival."""


_GATHER, _SCATTER = EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER
BLOCK_GATHER = Published(_GATHER, "bfloat16", 2 * BLOCK_PARAMETERS, 318, 6_041_880, 11_779_000)
BLOCK_SCATTER = Published(_SCATTER, "float32", 4 * BLOCK_PARAMETERS, 160, 11_662_770, 60_239_000)
ROOT_GATHER = Published(_GATHER, "bfloat16", 2 * ROOT_PARAMETERS, 2, 11_920_840, 15_405_000)
ROOT_SCATTER = Published(_SCATTER, "float32", 4 * ROOT_PARAMETERS, 2, 22_988_500, 146_000)
ALL_REDUCE = Published(EventKind.ALL_REDUCE, "float32", 4, 6, 18_580, 937_000)
PUBLISHED = (BLOCK_GATHER, BLOCK_SCATTER, ROOT_GATHER, ROOT_SCATTER, ALL_REDUCE)


def llama_70b_run(num_steps: int = NUM_STEPS) -> InMemoryRun:
    """The run: eight ranks of one host and two timed steps, or more equal steps.

    Its manifest declares that every block reshards after forward, the last one too.
    """
    builder = RunBuilder(
        ("", *_BLOCKS),
        world_size=WORLD_SIZE,
        run_id="llama-70b",
        backend="nccl",
        device_type="cuda",
        device_name="AMD Instinct MI300X",
        model=ModelInfo(
            class_name="Transformer",
            num_parameters=NUM_BLOCKS * BLOCK_PARAMETERS + ROOT_PARAMETERS,
            num_trainable_parameters=NUM_BLOCKS * BLOCK_PARAMETERS + ROOT_PARAMETERS,
        ),
    )
    for fqn in builder.units:
        _describe_unit(builder, fqn, ROOT_PARAMETERS if fqn == "" else BLOCK_PARAMETERS)
    job = _Job([builder.rank(rank) for rank in range(WORLD_SIZE)])
    for rank in job.ranks:
        rank.record = {"host": "mi300-node", "local_rank": rank.rank, "device": "MI300X"}
    for _ in range(num_steps):
        _add_step(job)
    return builder.build()


def _describe_unit(builder: RunBuilder, fqn: str, num_parameters: int) -> None:
    builder.unit(
        fqn,
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters,
        unsharded_bytes=2 * num_parameters,
        sharded_bytes=4 * num_parameters // WORLD_SIZE,
        reduce_bytes=4 * num_parameters,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        reshard_after_forward=fqn != "",
    )


class _Job:
    """All ranks together, each with its own time."""

    def __init__(self, ranks: list[RankBuilder]):
        self.ranks = ranks
        self.now = [0] * len(ranks)
        self.step = 0
        self._num_collectives = 0

    def end_step(self, starts: list[int]) -> None:
        for rank, start, end in zip(self.ranks, starts, self.now, strict=True):
            rank.step(self.step, start, end)
        self.step += 1

    def compute(self, kind: EventKind, duration_ns: int, *, unit: str | None, phase: Phase) -> None:
        """Compute the same work on every rank; the next collective adds lateness."""
        for rank, start in zip(self.ranks, self.now, strict=True):
            columns = {"stream": Stream.COMPUTE, "step": self.step}
            rank.add(kind, start, start + duration_ns, unit=unit, phase=phase, **columns)
        self.now = [start + duration_ns for start in self.now]

    def communicate(self, row: Published, *, unit: str | None, phase: Phase) -> None:
        """Run a collective that every rank awaits immediately; earlier work lasts until then."""
        sequence = self._num_collectives
        self._num_collectives += 1
        late = _late_rank(sequence)
        first = max(self.now)
        lateness = [(rank * row.skew_ns) // 40 for rank in range(WORLD_SIZE)]
        lateness[0 if late else 1] = 0
        lateness[late] = row.skew_ns
        end = first + row.skew_ns + row.transfer_ns
        for rank, late_ns in zip(self.ranks, lateness, strict=True):
            arrival = first + late_ns
            if rank.events and rank.events[-1]["kind"] in _PASSES:
                rank.events[-1]["end_ns"] = arrival
            rank.add(
                row.kind,
                arrival,
                end,
                unit=unit,
                phase=phase,
                step=self.step,
                stream=_STREAMS[row.kind],
                group=0,
                sequence=sequence,
                collective=sequence,
                bytes=row.bytes,
                dtype=DTYPES.index(row.dtype),
                need_ns=arrival,
            )
        self.now = [end] * WORLD_SIZE


def _late_rank(sequence: int) -> int:
    """The last rank: the straggler, or at `_OTHERS_PER_STEP` collectives of a step another rank."""
    place = sequence % _COLLECTIVES_PER_STEP
    turn = place * _OTHERS_PER_STEP // _COLLECTIVES_PER_STEP
    is_other = turn != (place + 1) * _OTHERS_PER_STEP // _COLLECTIVES_PER_STEP
    others = [rank for rank in range(WORLD_SIZE) if rank != STRAGGLER]
    return others[turn % len(others)] if is_other else STRAGGLER


def _add_step(job: _Job) -> None:
    starts = list(job.now)
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    job.communicate(ALL_REDUCE, unit=None, phase=forward)
    job.communicate(ROOT_GATHER, unit="", phase=forward)
    for fqn in _BLOCKS:
        job.communicate(BLOCK_GATHER, unit=fqn, phase=forward)
        job.compute(EventKind.FORWARD, _FORWARD_NS, unit=fqn, phase=forward)
    for fqn in reversed(_BLOCKS):
        if fqn != _BLOCKS[-1]:
            job.communicate(BLOCK_GATHER, unit=fqn, phase=backward)
        job.compute(EventKind.BACKWARD, _BACKWARD_NS, unit=fqn, phase=backward)
        job.communicate(BLOCK_SCATTER, unit=fqn, phase=backward)
    job.compute(EventKind.BACKWARD, _BACKWARD_NS, unit="", phase=backward)
    job.communicate(ROOT_SCATTER, unit="", phase=backward)
    for _ in range(2):
        job.communicate(ALL_REDUCE, unit=None, phase=Phase.OPTIMIZER)
    job.compute(EventKind.OPTIMIZER, _OPTIMIZER_NS, unit=None, phase=Phase.OPTIMIZER)
    job.end_step(starts)
