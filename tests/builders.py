"""Build runs by hand for tests: exact integers, no files, no torch.

    builder = RunBuilder(units=("", "layers.0"), world_size=2, warmup_steps=1)
    rank = builder.rank(0)
    rank.step(0, start=0, end=100)
    rank.data(0, 10)
    rank.all_gather("layers.0", 10, 30, need=15)
    rank.forward("layers.0", 30, 60)
    run = builder.build()             # a RunSource, as the analyses take it

Rows that are added after `rank.step(n, ...)` belong to step n. `steady_run()` is a complete run of
equal steps. The drawing at `add_steady_step` shows the expected result of every analysis.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reduction.run_statistics import condense_run, summarise_rank
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.allocations import AllocationHistory
from fsdp_inspect.trace.black_box import BlackBox
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryPoint,
    Method,
    Phase,
    Source,
    Stream,
)
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.live_memory import LiveHistory, LiveMoment, OutOfMemoryRecord
from fsdp_inspect.trace.network_probe import NetworkProbe
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
    MISSING_INT,
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    StatisticsTable,
    SummaryTable,
    Table,
    limit_summary,
)

MIB = 1 << 20
MESSAGE_BYTES = 64
"""The message of every all-gather and reduce-scatter, unless a test sets another message."""


@dataclass(frozen=True)
class InMemoryRun:
    """A `RunSource` in memory."""

    manifest: RunManifest
    ranks: Sequence[RankRecord]
    event_tables: Mapping[int, EventTable]
    memory_tables: Mapping[int, MemoryTable] = field(default_factory=dict)
    scalar_tables: Mapping[int, ScalarTable] = field(default_factory=dict)
    device_tables: Mapping[int, DeviceTable] = field(default_factory=dict)
    status: RunStatus = RunStatus.COMPLETE
    notes: Sequence[str] = ()
    earlier_attempts: Sequence["InMemoryRun"] = ()
    starts: Sequence["InMemoryRun"] = ()
    run_of_start: "InMemoryRun | None" = None
    network_probe: NetworkProbe | None = None
    black_boxes: Mapping[int, BlackBox] = field(default_factory=dict)
    desync_boxes: Mapping[int, BlackBox] = field(default_factory=dict)
    dumps: Mapping[int, Sequence[StackDump]] = field(default_factory=dict)
    numerics_steps: dict[int, Sequence[NumericsStep]] = field(default_factory=dict)
    moments: Mapping[int, Sequence[LiveMoment]] = field(default_factory=dict)
    histories: Mapping[int, LiveHistory] = field(default_factory=dict)
    failed_allocations: Mapping[int, OutOfMemoryRecord] = field(default_factory=dict)
    allocation_histories: Mapping[int, AllocationHistory] = field(default_factory=dict)
    kernel_records: Mapping[int, KernelRecord] = field(default_factory=dict)

    def black_box(self, rank: int, *, at_desync: bool = False) -> BlackBox | None:
        return (self.desync_boxes if at_desync else self.black_boxes).get(rank)

    def numerics(self, rank: int) -> Sequence[NumericsStep]:
        return self.numerics_steps.get(rank, ())

    def stack_dumps(self, rank: int) -> Sequence[StackDump]:
        return self.dumps.get(rank, ())

    def live_moments(self, rank: int) -> Sequence[LiveMoment]:
        return self.moments.get(rank, ())

    def allocations(self, rank: int) -> AllocationHistory | None:
        return self.allocation_histories.get(rank)

    def live_history(self, rank: int) -> LiveHistory | None:
        return self.histories.get(rank)

    def kernels(self, rank: int) -> KernelRecord | None:
        return self.kernel_records.get(rank)

    def profile(self, rank: int) -> bytes | None:
        return None

    def out_of_memory(self, rank: int) -> OutOfMemoryRecord | None:
        return self.failed_allocations.get(rank)

    def events(
        self,
        rank: int,
        *,
        steps: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> EventTable:
        table = self.event_tables.get(rank, EventTable.empty())
        mask = np.ones(len(table), dtype=bool)
        if steps is not None:
            mask &= np.isin(table.step, list(steps))
        if kinds is not None:
            mask &= np.isin(table.kind, list(kinds))
        chosen = table.where(mask)
        return chosen.where(np.argsort(chosen.start_ns, kind="stable"))

    def memory(self, rank: int) -> MemoryTable:
        return self.memory_tables.get(rank, MemoryTable.empty())

    def devices(self, rank: int) -> DeviceTable:
        return self.device_tables.get(rank, DeviceTable.empty())

    def scalars(self, rank: int) -> ScalarTable:
        return self.scalar_tables.get(rank, ScalarTable.empty())

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
        steps: Collection[int] | None = None,
    ) -> SummaryTable:
        rows = limit_summary(self._summary, ranks=ranks, kinds=kinds)
        return rows if steps is None else rows.where(np.isin(rows.step, list(steps)))

    def statistics(self) -> StatisticsTable:
        return self._statistics

    @cached_property
    def _statistics(self) -> StatisticsTable:
        return condense_run(lambda kind: self.summary(kinds=[kind]), StepRules.of(self.manifest))

    @cached_property
    def _summary(self) -> SummaryTable:
        counted_by = {record.rank: record.memory_from for record in self.ranks}
        return SummaryTable.concat(
            [
                summarise_rank(
                    table,
                    self.memory_tables.get(rank, MemoryTable.empty()),
                    memory_from=counted_by.get(rank, ""),
                    rank=rank,
                )
                for rank, table in sorted(self.event_tables.items())
            ]
        )


def write_run(run: InMemoryRun, folder: Path, *, is_identified: bool = False) -> Path:
    """Write a run to the disk with the store's own writer, compacted; returns its folder.

    Args:
        run: The run.
        folder: A new folder.
        is_identified: Whether the records and tables state their run, as those of a recorder do.
    """
    attempt = create_run(folder, run.manifest)
    for record in run.ranks:
        known = record.of_run(run.manifest) if is_identified else record
        writer = RankWriter(folder, known.model_copy(update={"attempt": attempt}))
        writer.events.extend(_row_tuples(run.events(record.rank)))
        writer.memory.extend(_row_tuples(run.memory(record.rank)))
        writer.devices.extend(_row_tuples(run.devices(record.rank)))
        writer.scalars.extend(_row_tuples(run.scalars(record.rank)))
        writer.update(num_steps=len(run.events(record.rank, kinds=[EventKind.STEP])))
        writer.close(run.status)
    return folder


def _row_tuples(table: Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.tolist() for column in table.columns().values()), strict=True))


class RankBuilder:
    """One rank's rows, added in any order."""

    def __init__(self, rank: int, unit_indices: Mapping[str, int]):
        self.rank = rank
        self.events: list[dict[str, int]] = []
        self.samples: list[dict[str, int]] = []
        self.logged: list[dict[str, float]] = []
        self.record: dict[str, Any] = {}
        self._units = unit_indices
        self._step = 0

    def step(
        self,
        number: int,
        start: int,
        end: int,
        *,
        is_memory_step: bool = False,
        is_plain: bool = False,
    ) -> None:
        self._step = number
        flags = EventFlag.MEMORY_STEP * is_memory_step | EventFlag.PLAIN_STEP * is_plain
        self.add(EventKind.STEP, start, end, flags=flags)

    def add(
        self,
        kind: EventKind,
        start: int,
        end: int,
        *,
        unit: str | None = None,
        phase: Phase = Phase.OUTSIDE,
        **columns: int,
    ) -> None:
        """Add any event; `columns` are those of `EventTable`. Without `unit` it is not FSDP's."""
        index = NO_UNIT if unit is None else self._units[unit]
        blank = {
            "step": self._step,
            "microbatch": 0,
            "issued_by": index,
            "stream": Stream.HOST,
            "group": -1,
            "dtype": 1,
            "source": Source.RECORDED,
            "method": Method.MEASURED,
            "flags": 0,
            "sequence": MISSING_INT,
            "collective": MISSING_INT,
            "bytes": MISSING_INT,
            "issue_ns": start,
            "need_ns": MISSING_INT,
        }
        row = {"kind": kind, "unit": index, "phase": phase, "start_ns": start, "end_ns": end}
        self.events.append({**blank, **row, **columns})

    def data(self, start: int, end: int) -> None:
        self.add(EventKind.DATA, start, end, phase=Phase.DATA)

    def optimizer(self, start: int, end: int) -> None:
        self.add(EventKind.OPTIMIZER, start, end, phase=Phase.OPTIMIZER)

    def forward(self, unit: str, start: int, end: int, **columns: int) -> None:
        self.add(EventKind.FORWARD, start, end, unit=unit, phase=Phase.FORWARD, **columns)

    def backward(self, unit: str, start: int, end: int, **columns: int) -> None:
        self.add(EventKind.BACKWARD, start, end, unit=unit, phase=Phase.BACKWARD, **columns)

    def copy_out(self, unit: str, start: int, end: int) -> None:
        kind = EventKind.ALL_GATHER_COPY_OUT
        self.add(kind, start, end, unit=unit, phase=Phase.FORWARD)

    def all_gather(
        self,
        unit: str,
        start: int,
        end: int,
        *,
        need: int = MISSING_INT,
        phase: Phase = Phase.FORWARD,
        **columns: int,
    ) -> None:
        """Add an all-gather; `need` is the time at which the rank began to wait, if it waited."""
        columns = {"bytes": MESSAGE_BYTES, "stream": Stream.ALL_GATHER, "group": 0, **columns}
        kind = EventKind.ALL_GATHER
        self.add(kind, start, end, unit=unit, phase=phase, need_ns=need, **columns)

    def reduce_scatter(
        self, unit: str, start: int, end: int, *, need: int = MISSING_INT, **columns: int
    ) -> None:
        columns = {"bytes": MESSAGE_BYTES, "stream": Stream.REDUCE_SCATTER, "group": 0, **columns}
        kind, phase = EventKind.REDUCE_SCATTER, Phase.BACKWARD
        self.add(kind, start, end, unit=unit, phase=phase, need_ns=need, **columns)

    def all_reduce(
        self, unit: str | None, start: int, end: int, *, need: int = MISSING_INT, **columns: int
    ) -> None:
        """Add an all-reduce of an HSDP unit, or with None one that FSDP did not issue."""
        columns = {"bytes": 4, "stream": Stream.ALL_REDUCE, "group": 1, **columns}
        kind, phase = EventKind.ALL_REDUCE, Phase.BACKWARD
        self.add(kind, start, end, unit=unit, phase=phase, need_ns=need, **columns)

    def memory(
        self, point: MemoryPoint, allocated: int, *, unit: str | None = None, **columns: int
    ) -> None:
        """Add a sample; `columns` are those of `MemoryTable`, including categories."""
        blank = {
            **dict.fromkeys(MemoryTable.DTYPES, MISSING_INT),
            "step": self._step,
            "microbatch": 0,
            "phase": Phase.OUTSIDE,
            "method": Method.MEASURED,
            "time_ns": len(self.samples),
            "peak_allocated": allocated,
        }
        index = NO_UNIT if unit is None else self._units[unit]
        row = {"point": point, "unit": index, "allocated": allocated}
        self.samples.append({**blank, **row, **columns})

    def loss(self, value: float) -> None:
        self.logged.append({"step": self._step, "name": 0, "time_ns": 0, "value": value})


class RunBuilder:
    """A run of some ranks and units. Every unit has 100 parameters by default."""

    def __init__(
        self,
        units: Sequence[str] = ("layers.0", "layers.1"),
        *,
        world_size: int = 2,
        **manifest: Any,
    ):
        self.world_size = world_size
        self.units = {fqn: self._unit(index, fqn) for index, fqn in enumerate(units)}
        self.manifest = {
            "run_id": "hand-made",
            "created": "2026-01-01T00:00:00+00:00",
            "created_unix_ns": 0,
            "backend": "gloo",
            "device_type": "cpu",
            "model": ModelInfo(class_name="Decoder", num_parameters=100 * len(units)),
            "process_groups": [
                ProcessGroup(index=0, name="shard", ranks=list(range(world_size)), role="shard")
            ],
            **manifest,
        }
        self._ranks: dict[int, RankBuilder] = {}

    def rank(self, rank: int) -> RankBuilder:
        indices = {fqn: unit.index for fqn, unit in self.units.items()}
        return self._ranks.setdefault(rank, RankBuilder(rank, indices))

    def unit(self, fqn: str, **changes: Any) -> None:
        """Change the manifest's fields of a unit."""
        self.units[fqn] = self.units[fqn].model_copy(update=changes)

    def build(self, **run: Any) -> InMemoryRun:
        """Build the run; `run` sets `status` or `notes`."""
        members = sorted(self._ranks.items())
        return InMemoryRun(
            manifest=RunManifest(
                units=list(self.units.values()), world_size=self.world_size, **self.manifest
            ),
            ranks=[self._record(builder) for _, builder in members],
            event_tables={rank: EventTable.from_rows(one.events) for rank, one in members},
            memory_tables={rank: MemoryTable.from_rows(one.samples) for rank, one in members},
            scalar_tables={rank: ScalarTable.from_rows(one.logged) for rank, one in members},
            **run,
        )

    def _record(self, builder: RankBuilder) -> RankRecord:
        clock = ClockPair(monotonic_ns=0, unix_ns=0, uncertainty_ns=0)
        known = {
            "rank": builder.rank,
            "world_size": self.world_size,
            "clock_start": clock,
            "memory_from": "storage_tracker" if builder.samples else "",
            "scalar_names": ["loss"] if builder.logged else [],
        }
        return RankRecord(**{**known, **builder.record})

    def _unit(self, index: int, fqn: str) -> Unit:
        return Unit(
            index=index,
            fqn=fqn,
            modules=[fqn],
            module_class="Block",
            num_parameters=100,
            num_trainable_parameters=100,
            num_tensors=2,
            unsharded_bytes=MESSAGE_BYTES,
            sharded_bytes=400 // self.world_size,
            reduce_bytes=MESSAGE_BYTES,
            param_dtype="float32",
            reduce_dtype="float32",
            reshard_after_forward=True,
            shard_group=0,
            is_root=fqn == "",
            execution_index=index,
        )


STEADY_STEP_NS = 1000
STEADY_PARTS = {
    "forward": 200,
    "backward": 320,
    "fsdp_copies": 20,
    "exposed_all_gather": 130,
    "exposed_reduce_scatter": 100,
    "exposed_all_reduce": 0,
    "exposed_other": 20,
    "host_bound": 0,
    "optimizer": 100,
    "data": 50,
    "other": 60,
}
STEADY_COMMUNICATION_NS = 500
STEADY_EXPOSED_NS = 250
STEADY_FLOOR_NS = 150


def run_on(hosts: Sequence[str], **manifest: Any) -> InMemoryRun:
    """A run with one step of a rank on each host, in the order of ranks."""
    builder = RunBuilder(world_size=len(hosts), **manifest)
    for rank, host in enumerate(hosts):
        member = builder.rank(rank)
        member.record["host"] = host
        member.step(0, 0, 1)
    return builder.build()


def add_steady_step(rank: RankBuilder, number: int, *, start: int, **step: bool) -> None:
    """One step of 1000 ns over the units layers.0 and layers.1.

    0    50   110        270       370 400       560        720     840  940  1000
    data |    f(0)       f(1)          backward 1 backward 0        opt
         AG0  AG1 (prefetched)     AG1                      RS0  AR
         ^^   ....^^^^^ 210-260    ^^^  AG0 hidden RS1 hidden^^^ ^^ exposed
    """
    rank.step(number, start, start + STEADY_STEP_NS, **step)
    at = start.__add__
    rank.data(at(0), at(50))
    rank.all_gather("layers.0", at(50), at(100), need=at(50))
    rank.copy_out("layers.0", at(100), at(110))
    rank.forward("layers.0", at(110), at(210))
    prefetched = int(EventFlag.PREFETCHED)
    rank.all_gather("layers.1", at(110), at(260), need=at(210), flags=prefetched)
    rank.copy_out("layers.1", at(260), at(270))
    rank.forward("layers.1", at(270), at(370))
    in_backward = Phase.BACKWARD
    rank.all_gather("layers.1", at(370), at(400), need=at(370), phase=in_backward)
    rank.backward("layers.1", at(400), at(560))
    rank.all_gather("layers.0", at(450), at(520), need=at(560), phase=in_backward, flags=prefetched)
    rank.backward("layers.0", at(560), at(720))
    rank.reduce_scatter("layers.1", at(560), at(640), need=at(720))
    rank.reduce_scatter("layers.0", at(720), at(820), need=at(720))
    rank.all_reduce(None, at(820), at(840), need=at(820))
    rank.optimizer(at(840), at(940))


def steady_run(
    *, world_size: int = 2, num_steps: int = 4, warmup_steps: int = 1, **manifest: Any
) -> InMemoryRun:
    """Equal steps on every rank with a falling loss; each rank has a separate clock."""
    builder = RunBuilder(world_size=world_size, warmup_steps=warmup_steps, **manifest)
    for rank in range(world_size):
        for number in range(num_steps):
            start = 10_000 * rank + STEADY_STEP_NS * number
            add_steady_step(builder.rank(rank), number, start=start)
            builder.rank(rank).loss(4.0 - number)
    return builder.build()
