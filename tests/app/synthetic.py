"""Make a realistic FSDP run: two ranks, ten units, streams as on a GPU.

The run is a small schedule, not a recording. Each unit's all-gather is issued one unit ahead, and
its reduce-scatter follows its backward. The step waits for `norm, lm_head`, which is large.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reduction.run_statistics import condense_run, summarise_rank
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    WAIT_OF,
    EventFlag,
    EventKind,
    MemoryPoint,
    Method,
    Phase,
    Stream,
)
from fsdp_inspect.trace.live_memory import LiveMoment
from fsdp_inspect.trace.numerics import NumericsStep
from fsdp_inspect.trace.run import (
    ClockPair,
    ModelInfo,
    ProcessGroup,
    RankRecord,
    RunManifest,
    RunStatus,
    Unit,
)
from fsdp_inspect.trace.stack_dumps import StackDump
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    StatisticsTable,
    SummaryTable,
    limit_summary,
)

MS = 1_000_000
FIRST_NS = 50_000 * MS
UNIT_FQNS = ("", *(f"layers.{layer}" for layer in range(8)), "norm, lm_head")
MESSAGE_BYTES = (96 << 20, *(64 << 20 for _ in range(8)), 160 << 20)
FORWARD_NS = (1 * MS, *(12 * MS for _ in range(8)), 9 * MS)
BYTES_PER_NS = 12.0
ROOT = 0


def make_manifest(
    *,
    run_id: str = "synthetic",
    fqns: Sequence[str] = UNIT_FQNS,
    tags: Sequence[str] = (),
    world_size: int = 2,
    created: str = "2025-06-01T12:00:00Z",
) -> RunManifest:
    return RunManifest(
        run_id=run_id,
        name=run_id,
        created=created,
        created_unix_ns=1_748_779_200_000_000_000,
        command=["torchrun", "train.py"],
        model=ModelInfo(
            class_name="Decoder", num_parameters=320_000_000, num_trainable_parameters=320_000_000
        ),
        units=[_make_unit(index, fqn) for index, fqn in enumerate(fqns)],
        process_groups=[
            ProcessGroup(index=0, name="shard", ranks=list(range(world_size)), role="shard")
        ],
        world_size=world_size,
        mesh={"shard": world_size},
        backend="nccl",
        device_type="cuda",
        device_name="Synthetic GPU",
        warmup_steps=2,
        versions={"torch": "2.13.0"},
        tags=list(tags),
    )


def _make_unit(index: int, fqn: str) -> Unit:
    return Unit(
        index=index,
        fqn=fqn,
        modules=fqn.split(", "),
        module_class="Block" if "layers" in fqn else "Decoder",
        num_parameters=MESSAGE_BYTES[index] // 2,
        num_trainable_parameters=MESSAGE_BYTES[index] // 2,
        num_tensors=9,
        unsharded_bytes=MESSAGE_BYTES[index],
        sharded_bytes=MESSAGE_BYTES[index] // 2,
        reduce_bytes=MESSAGE_BYTES[index],
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        reshard_after_forward=index != ROOT,
        shard_group=0,
        is_root=index == ROOT,
        execution_index=index,
    )


def make_rank(
    rank: int,
    *,
    num_steps: int,
    status: RunStatus = RunStatus.COMPLETE,
    host: str = "node-0",
    world_size: int = 2,
) -> RankRecord:
    return RankRecord(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        host=host,
        pid=100 + rank,
        device=f"cuda:{rank}",
        device_memory_bytes=80 << 30,
        clock="cuda_event",
        clock_start=ClockPair(
            monotonic_ns=FIRST_NS, unix_ns=1_748_779_200_000_000_000, uncertainty_ns=200
        ),
        clock_uncertainty_ns=1_500,
        status=status,
        num_steps=num_steps,
        memory_from="cuda_allocator",
        scalar_names=["loss"],
    )


@dataclass
class _Clock:
    """The queues of one rank while its events are generated."""

    now: int
    step: int
    gather_free: int = 0
    reduce_free: int = 0
    rows: list[dict[str, int]] = field(default_factory=list)
    sequence: int = 0

    def add(self, kind: EventKind, start: int, end: int, **values: int) -> None:
        row = {
            "step": self.step,
            "microbatch": 0,
            "phase": Phase.OUTSIDE,
            "kind": kind,
            "unit": NO_UNIT,
            "issued_by": NO_UNIT,
            "stream": Stream.COMPUTE,
            "group": -1,
            "dtype": 2,
            "source": 0,
            "method": Method.MEASURED,
            "flags": 0,
            "sequence": -1,
            "collective": -1,
            "bytes": -1,
            "issue_ns": start,
            "start_ns": start,
            "end_ns": end,
            "need_ns": -1,
        }
        self.rows.append({**row, **{name: int(value) for name, value in values.items()}})


def make_events(rank: int, *, num_steps: int, jitter: float = 0.02) -> EventTable:
    """All events of one rank, sorted by start."""
    noise = np.random.default_rng(rank)
    clock = _Clock(now=FIRST_NS, step=0)
    for step in range(num_steps):
        slowdown = (3.0 if step == 0 else 1.0) * (1 + jitter * noise.random())
        _add_step(clock, step, slowdown)
    events = EventTable.from_rows(clock.rows)
    return events.where(np.argsort(events.start_ns, kind="stable"))


def _add_step(clock: _Clock, step: int, slowdown: float) -> None:
    begin, clock.step = clock.now, step
    clock.add(EventKind.DATA, begin, begin + 2 * MS, phase=Phase.DATA, stream=Stream.HOST)
    clock.now = begin + 2 * MS
    _add_forward(clock, slowdown)
    _add_backward(clock, slowdown)
    end = clock.now + int(11 * MS * slowdown)
    clock.add(EventKind.OPTIMIZER, clock.now, end, phase=Phase.OPTIMIZER)
    clock.now = end + MS
    clock.add(EventKind.STEP, begin, clock.now, stream=Stream.HOST)


def _add_forward(clock: _Clock, slowdown: float) -> None:
    root_begin = clock.now
    issued = {ROOT: clock.now, 1: clock.now}
    for unit in range(len(UNIT_FQNS)):
        issued.setdefault(unit + 1, clock.now)
        _add_gather(clock, unit, issued[unit], Phase.FORWARD)
        end = clock.now + int(FORWARD_NS[unit] * slowdown)
        if unit != ROOT:
            clock.add(EventKind.FORWARD, clock.now, end, unit=unit, phase=Phase.FORWARD)
        clock.now = end
    clock.add(EventKind.FORWARD, root_begin, clock.now, unit=ROOT, phase=Phase.FORWARD)


def _add_backward(clock: _Clock, slowdown: float) -> None:
    root_begin, issue = clock.now, clock.now
    for unit in reversed(range(len(UNIT_FQNS))):
        if unit != ROOT:
            _add_gather(clock, unit, issue, Phase.BACKWARD)
        issue, begin = clock.now, clock.now
        clock.now = begin + int(2 * FORWARD_NS[unit] * slowdown)
        if unit != ROOT:
            clock.add(EventKind.BACKWARD, begin, clock.now, unit=unit, phase=Phase.BACKWARD)
        _add_reduction(clock, unit)
    last = next(row for row in reversed(clock.rows) if row["kind"] == EventKind.REDUCE_SCATTER)
    last["need_ns"] = clock.now
    clock.now = max(clock.now, last["end_ns"])
    clock.add(EventKind.BACKWARD, root_begin, clock.now, unit=ROOT, phase=Phase.BACKWARD)


def _add_gather(clock: _Clock, unit: int, issue: int, phase: Phase) -> None:
    start = max(issue + 40_000, clock.gather_free)
    end = start + 80_000 + int(MESSAGE_BYTES[unit] / BYTES_PER_NS)
    clock.gather_free = end
    _add_collective(clock, EventKind.ALL_GATHER, unit, (issue, start, end), phase)
    clock.rows[-1]["need_ns"] = clock.now
    clock.rows[-1]["flags"] = int(EventFlag.ASYNC | EventFlag.PREFETCHED)
    if end > clock.now:
        wait = WAIT_OF[EventKind.ALL_GATHER]
        clock.add(wait, clock.now, end, unit=unit, issued_by=unit, phase=phase)
        clock.now = end
    copied = clock.now + 150_000
    clock.add(EventKind.ALL_GATHER_COPY_OUT, clock.now, copied, unit=unit, phase=phase)
    clock.now = copied


def _add_reduction(clock: _Clock, unit: int) -> None:
    start = max(clock.now + 30_000, clock.reduce_free)
    end = start + 90_000 + int(MESSAGE_BYTES[unit] / BYTES_PER_NS)
    clock.reduce_free = end
    times = (clock.now, start, end)
    _add_collective(clock, EventKind.REDUCE_SCATTER, unit, times, Phase.BACKWARD)


def _add_collective(
    clock: _Clock, kind: EventKind, unit: int, times: tuple[int, int, int], phase: Phase
) -> None:
    issue, start, end = times
    clock.add(
        kind,
        start,
        end,
        unit=unit,
        phase=phase,
        stream=Stream.ALL_GATHER if kind == EventKind.ALL_GATHER else Stream.REDUCE_SCATTER,
        group=0,
        issued_by=max(unit - 1, 0),
        sequence=clock.sequence,
        collective=clock.sequence,
        bytes=MESSAGE_BYTES[unit],
        issue_ns=issue,
    )
    clock.sequence += 1


def make_memory(rank: int, events: EventTable) -> MemoryTable:
    """Four readings in each of the rank's steps."""
    steps = events.where(events.kind == EventKind.STEP)
    spans = zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)
    rows = [
        row
        for step, (start, end) in enumerate(spans)
        for row in _memory_rows(rank, step, start, end)
    ]
    return MemoryTable.from_rows(rows)


def _memory_rows(rank: int, step: int, start: int, end: int) -> Iterator[dict[str, int]]:
    resting = (5 << 30) + (rank << 20)
    points = (
        (MemoryPoint.FORWARD_START, Phase.FORWARD, 0, 0.01),
        (MemoryPoint.FORWARD_END, Phase.FORWARD, 7 << 30, 0.4),
        (MemoryPoint.BACKWARD_END, Phase.BACKWARD, 4 << 30, 0.9),
        (MemoryPoint.STEP_END, Phase.OUTSIDE, 0, 1.0),
    )
    for point, phase, added, part in points:
        row = dict.fromkeys(MemoryTable.DTYPES, -1)
        row.update(
            step=step,
            microbatch=0,
            phase=int(phase),
            point=int(point),
            method=int(Method.MEASURED),
            time_ns=start + int(part * (end - start)),
            allocated=resting + added,
            reserved=(14 << 30) + (rank << 20),
            sharded_parameter=2 << 30,
            optimizer_state=3 << 30,
        )
        yield row


def make_scalars(*, num_steps: int) -> ScalarTable:
    return ScalarTable.from_rows(
        [
            {
                "step": step,
                "name": 0,
                "time_ns": FIRST_NS + 300 * MS * step,
                "value": 2.0 + 3.5 * float(np.exp(-step / 4)),
            }
            for step in range(num_steps)
        ]
    )


@dataclass(frozen=True)
class SyntheticRun:
    """A `RunSource` in memory."""

    manifest: RunManifest
    ranks: Sequence[RankRecord]
    tables: dict[int, EventTable]
    num_steps: int
    status: RunStatus = RunStatus.COMPLETE
    notes: Sequence[str] = ()
    network_probe: None = None

    def black_box(self, rank: int, *, at_desync: bool = False) -> None:
        return None

    def numerics(self, rank: int) -> Sequence[NumericsStep]:
        return ()

    def stack_dumps(self, rank: int) -> Sequence[StackDump]:
        return ()

    def live_moments(self, rank: int) -> Sequence[LiveMoment]:
        return ()

    def allocations(self, rank: int) -> None:
        return None

    def live_history(self, rank: int) -> None:
        return None

    def kernels(self, rank: int) -> None:
        return None

    def profile(self, rank: int) -> None:
        return None

    def out_of_memory(self, rank: int) -> None:
        return None

    def events(
        self,
        rank: int,
        *,
        steps: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> EventTable:
        events = self.tables[rank]
        if steps is not None:
            events = events.where(np.isin(events.step, list(steps)))
        if kinds is not None:
            events = events.where(np.isin(events.kind, [int(kind) for kind in kinds]))
        return events

    def memory(self, rank: int) -> MemoryTable:
        return make_memory(rank, self.tables[rank])

    def devices(self, rank: int) -> DeviceTable:
        return DeviceTable.empty()

    def scalars(self, rank: int) -> ScalarTable:
        return make_scalars(num_steps=self.num_steps)

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
        steps: Collection[int] | None = None,
    ) -> SummaryTable:
        tables = [
            summarise_rank(
                self.tables[record.rank],
                self.memory(record.rank),
                memory_from=record.memory_from,
                rank=record.rank,
            )
            for record in self.ranks
        ]
        rows = limit_summary(SummaryTable.concat(tables), ranks=ranks, kinds=kinds)
        return rows if steps is None else rows.where(np.isin(rows.step, list(steps)))

    def statistics(self) -> StatisticsTable:
        return self._statistics

    @cached_property
    def _statistics(self) -> StatisticsTable:
        rows = self.summary()
        return condense_run(
            lambda kind: limit_summary(rows, kinds=[kind]), StepRules.of(self.manifest)
        )


def make_run(*, num_ranks: int = 2, num_steps: int = 6) -> SyntheticRun:
    """A run in memory; it has two hosts if it has more than two ranks."""
    ranks = range(num_ranks)
    return SyntheticRun(
        manifest=make_manifest(world_size=num_ranks),
        ranks=[
            make_rank(rank, num_steps=num_steps, host=f"node-{rank // 2}", world_size=num_ranks)
            for rank in ranks
        ],
        tables={rank: make_events(rank, num_steps=num_steps) for rank in ranks},
        num_steps=num_steps,
    )


def write_run(
    folder: Path,
    run: SyntheticRun,
    *,
    failures: Mapping[int, str] | None = None,
) -> Path:
    """Write a run with the real writer; ranks without a failure end normally."""
    failed = failures or {}
    create_run(folder, run.manifest)
    for record in run.ranks:
        writer = RankWriter(folder, record.model_copy(update={"status": RunStatus.RUNNING}))
        for rows, table in (
            (writer.events, run.events(record.rank)),
            (writer.memory, run.memory(record.rank)),
            (writer.scalars, run.scalars(record.rank)),
        ):
            rows.extend(zip(*(column.tolist() for column in table.columns().values()), strict=True))
        failure = failed.get(record.rank)
        writer.close(RunStatus.FAILED if failure else RunStatus.COMPLETE, failure)
    return folder
