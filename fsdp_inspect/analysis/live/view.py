"""Collect the last steps, the memory and the machine samples of one rank of a live run.

The input is the rows that the rank appended since the last update. Only the shown data is kept: the
numbers of the last steps, the events of the newest steps (rows of a step can arrive after the row
that ends it), and the last samples of the machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.provenance import name_methods
from fsdp_inspect.columns import (
    TableSpec,
    metric_column,
    number_column,
    text_column,
    value_column,
)
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.store.reduction.memory_parts import samples_of
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import EventKind, StepFlag, StepPart
from fsdp_inspect.trace.tables import (
    MISSING_INT,
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    SummaryTable,
)

MAX_STEPS = 200
"""The number of steps to keep."""
MAX_DEVICE_SAMPLES = 240
TYPICAL_STEPS = 20
"""The number of last steps behind the current step time."""
STALL_STEPS = 10
"""The number of median step times without a completed step after which a run is stalled."""
LEAST_STALL_NS = 20_000_000_000
"""The time before which a run is never stalled, because compilation and checkpoints make single
steps long."""
_ALLOCATOR_COUNTERS = ("num_alloc_retries", "num_ooms")
_KEPT_STEPS = 2
"""The number of completed steps whose events are kept, because more events can arrive."""


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One completed step of the followed rank."""

    step: int
    end_ns: int
    """End of the step, on the rank's clock."""
    step_time_ns: int
    exposed_ns: int | None
    """None in a plain step, whose collectives have no rows."""
    communication_ns: int | None
    is_memory_step: bool
    """Whether the recorder slows it: a memory step, a profiled one, one with a look at values."""

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed / step time, 0 to 1; None for a plain step and a step without duration."""
        if self.exposed_ns is None or not self.step_time_ns:
            return None
        return self.exposed_ns / self.step_time_ns

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Last steps",
        (
            number_column("step", "The step."),
            metric_column("step_time_ns"),
            metric_column("exposed_ns", label="exposed"),
            metric_column("communication_ns"),
            text_column(
                "is_memory_step",
                "True if the recorder slows the step, as the storage tracker or a profiler does.",
                label="slowed",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class LiveMemory:
    """The highest memory readings of one step of the followed rank."""

    step: int
    allocated_bytes: int
    reserved_bytes: int | None
    """None on CPU."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Memory of the last steps",
        (
            number_column("step", "The step."),
            value_column(
                "allocated_bytes",
                MetricUnit.BYTES,
                "The highest reading of allocated memory in the step.",
                label="allocated",
            ),
            value_column(
                "reserved_bytes",
                MetricUnit.BYTES,
                "The highest reading of reserved memory in the step.",
                label="reserved",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class DeviceSeries:
    """One metric of the machine over the last minutes."""

    name: str
    """A column of `DeviceTable`. Counters are converted to rates."""
    label: str
    unit: str
    """`%`, `bytes`, `bytes/s`, `W` or `MHz`."""
    seconds: tuple[float, ...]
    """Time relative to the newest sample, at most 0."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LiveScalar:
    """The last value of a number that the training loop logged."""

    name: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class LiveView:
    """The current data of the followed rank."""

    steps: tuple[LiveStep, ...]
    """The last steps, by number."""
    typical_step_ns: int | None
    """The mean over the middle half of the last `TYPICAL_STEPS`, without memory steps; None before
    the first step."""
    memory: tuple[LiveMemory, ...]
    """Memory by step."""
    devices: tuple[DeviceSeries, ...]
    """The metrics that the machine provides."""
    scalars: tuple[LiveScalar, ...]
    last_event_ns: int | None
    """End of the newest event, on the rank's clock."""
    recent: SummaryTable
    """Summary rows of the last `TYPICAL_STEPS` without memory steps."""
    detailed: SummaryTable
    """The same of the last `TYPICAL_STEPS` that are also no plain steps."""
    methods: Mapping[str, str]
    """Methods of the times of the newest step that has them, by group of numbers."""
    num_alloc_retries: int | None
    """Allocation retries since the first sample of the feed; None without an allocator, like
    `num_ooms`."""
    num_ooms: int | None

    def is_stalled(self, now_ns: int) -> bool:
        """Return whether the time since the last step is much longer than a step.

        Args:
            now_ns: The current time on the rank's clock.
        """
        if not self.steps or self.typical_step_ns is None:
            return False
        longest = max(STALL_STEPS * self.typical_step_ns, LEAST_STALL_NS)
        return now_ns - self.steps[-1].end_ns > longest


class LiveRank:
    """Collects the data of one rank for a view."""

    def __init__(self, *, memory_from: str = "", scalar_names: Sequence[str] = ()) -> None:
        self.memory_from = memory_from
        """Source of the rank's memory readings, from its record. It may be set later."""
        self.scalar_names = tuple(scalar_names)
        """Names from the record, which grow during the run."""
        self._events = EventTable.empty()
        self._steps: dict[int, LiveStep] = {}
        self._memory: dict[int, LiveMemory] = {}
        self._devices = DeviceTable.empty()
        self._scalars: dict[int, tuple[int, float]] = {}
        self._last_event_ns: int | None = None
        self._recent = self._detailed = SummaryTable.empty()
        self._methods: dict[str, str] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        """First and last reading of each counter of the allocator."""

    def add(
        self,
        events: EventTable,
        memory: MemoryTable,
        devices: DeviceTable,
        scalars: ScalarTable,
    ) -> None:
        """Add new rows."""
        if len(events):
            self._add_events(events)
        if len(memory):
            self._add_memory(samples_of(memory, self.memory_from))
        if len(devices):
            self._devices = DeviceTable.concat([self._devices, devices])
            self._devices = self._devices.between(
                max(len(self._devices) - MAX_DEVICE_SAMPLES, 0), len(self._devices)
            )
        for name, step, value in zip(scalars.name, scalars.step, scalars.value, strict=True):
            self._scalars[int(name)] = (int(step), float(value))

    def view(self) -> LiveView:
        """Return the current view."""
        steps = tuple(self._steps[step] for step in sorted(self._steps))
        typical = [one.step_time_ns for one in steps if not one.is_memory_step][-TYPICAL_STEPS:]
        spread = Distribution.of(typical)
        return LiveView(
            steps=steps,
            typical_step_ns=spread.typical if spread else None,
            memory=tuple(self._memory[step] for step in sorted(self._memory)),
            devices=_series_of(self._devices),
            scalars=tuple(
                LiveScalar(self.scalar_names[name], step, value)
                for name, (step, value) in sorted(self._scalars.items())
                if name < len(self.scalar_names)
            ),
            last_event_ns=self._last_event_ns,
            recent=self._recent,
            detailed=self._detailed,
            methods=dict(self._methods),
            num_alloc_retries=self._risen("num_alloc_retries"),
            num_ooms=self._risen("num_ooms"),
        )

    def _add_events(self, events: EventTable) -> None:
        self._last_event_ns = max(self._last_event_ns or 0, int(events.end_ns.max()))
        newest = int(events.step.max())
        events = events.where(
            events.step > newest - MAX_STEPS
        )  # the first update can add thousands
        self._events = EventTable.concat([self._events, events])
        self._methods |= name_methods(self._events)
        finished = np.unique(self._events.step[self._events.kind == EventKind.STEP])
        if len(finished) == 0:
            return
        ends = self._events.where(self._events.kind == EventKind.STEP)
        end_of = dict(zip(ends.step.tolist(), ends.end_ns.tolist(), strict=True))
        rows = reduce_rank(self._events, rank=0)
        for step in _measure_steps(rows, end_of):
            self._steps[step.step] = step
        self._recent = _join_recent(self._recent, rows, StepFlag.MEMORY_STEP)
        self._detailed = _join_recent(self._detailed, rows, StepFlag.MEMORY_STEP | StepFlag.PLAIN)
        oldest_kept = int(finished[-min(_KEPT_STEPS, len(finished))])
        self._events = self._events.where(self._events.step >= oldest_kept)
        _forget_oldest(self._steps)

    def _add_memory(self, readings: MemoryTable) -> None:
        for step in np.unique(readings.step).tolist():
            own = readings.where(readings.step == step)
            allocated, reserved = int(own.allocated.max()), int(own.reserved.max())
            before = self._memory.get(step)
            if before is not None:
                allocated = max(allocated, before.allocated_bytes)
                reserved = max(reserved, before.reserved_bytes or MISSING_INT)
            if allocated != MISSING_INT:
                known = None if reserved == MISSING_INT else reserved
                self._memory[step] = LiveMemory(step, allocated, known)
        for counter in _ALLOCATOR_COUNTERS:
            column = getattr(readings, counter)
            counted = column[column != MISSING_INT]
            if len(counted):
                first = self._counts.get(counter, (int(counted[0]), 0))[0]
                self._counts[counter] = (first, int(counted[-1]))
        _forget_oldest(self._memory)

    def _risen(self, counter: str) -> int | None:
        first, last = self._counts.get(counter, (None, None))
        return None if first is None or last is None else last - first


def _forget_oldest(kept: dict[int, LiveStep] | dict[int, LiveMemory]) -> None:
    for step in sorted(kept)[:-MAX_STEPS]:
        del kept[step]


def _join_recent(before: SummaryTable, rows: SummaryTable, flags: int) -> SummaryTable:
    """Return the rows of the last steps without these flags. Newly reduced rows replace others."""
    is_step = rows.kind == EventKind.STEP
    left_out = rows.step[is_step & ((rows.flags & flags) != 0)]
    kept = [
        before.where(~np.isin(before.step, rows.step)),
        rows.where(~np.isin(rows.step, left_out)),
    ]
    joined = SummaryTable.concat(kept)
    return joined.where(np.isin(joined.step, np.unique(joined.step)[-TYPICAL_STEPS:]))


def _measure_steps(rows: SummaryTable, end_of: dict[int, int]) -> list[LiveStep]:
    together = rows.where(rows.kind == StepPart.COMMUNICATION)
    communication = dict(zip(together.step.tolist(), together.duration_ns.tolist(), strict=True))
    ended = rows.where(rows.kind == EventKind.STEP)
    is_plain = (ended.flags & StepFlag.PLAIN) != 0
    return [
        LiveStep(
            step=step,
            end_ns=end_of[step],
            step_time_ns=int(ended.duration_ns[place]),
            exposed_ns=None if is_plain[place] else int(ended.exposed_ns[place]),
            communication_ns=None if is_plain[place] else communication.get(step, 0),
            is_memory_step=bool(ended.flags[place] & StepFlag.MEMORY_STEP),
        )
        for place, step in enumerate(ended.step.tolist())
    ]


# --- the machine

_LEVELS = (
    ("gpu_utilisation_pct", "GPU utilisation", "%", 1.0),
    ("gpu_power_mw", "GPU power", "W", 1e-3),
    ("gpu_memory_used", "memory in use on the device", "bytes", 1.0),
    ("gpu_sm_clock_mhz", "SM clock", "MHz", 1.0),
    ("gpu_temperature_c", "GPU temperature", "°C", 1.0),
    ("pcie_tx_bytes_per_s", "PCIe, sent", "bytes/s", 1.0),
    ("pcie_rx_bytes_per_s", "PCIe, received", "bytes/s", 1.0),
    ("process_cpu_pct", "CPU of the process", "%", 1.0),
    ("process_rss", "memory of the process", "bytes", 1.0),
    ("process_swap", "memory of the process in swap", "bytes", 1.0),
    ("host_memory_used", "host memory in use", "bytes", 1.0),
)
"""Column, label, unit, and the factor from the column to the unit."""
_COUNTERS = (
    ("nvlink_tx_bytes", "NVLink, sent", "bytes/s", 1.0),
    ("nvlink_rx_bytes", "NVLink, received", "bytes/s", 1.0),
    ("run_delay_ns", "training thread waits for a core", "%", 1e-7),
    ("major_faults", "pages read from a disk", "per s", 1.0),
    ("package_energy_uj", "power of the host's CPUs", "W", 1e-6),
)
"""Column, label, unit, and the factor from a rate of the column per second to the unit."""


def _series_of(devices: DeviceTable) -> tuple[DeviceSeries, ...]:
    if len(devices) == 0:
        return ()
    seconds = (devices.time_ns - devices.time_ns[-1]) / 1e9
    series = []
    for name, label, unit, factor in _LEVELS:
        column: NDArray[np.int64] = getattr(devices, name).astype(np.int64)
        known = column != MISSING_INT
        if known.any():
            values = column[known] * factor
            series.append(
                DeviceSeries(
                    name, label, unit, tuple(seconds[known].tolist()), tuple(values.tolist())
                )
            )
    for name, label, unit, factor in _COUNTERS:
        column = getattr(devices, name)
        known = column != MISSING_INT
        if np.count_nonzero(known) > 1:
            times, rates = _rates_of(seconds[known], column[known] * factor)
            series.append(DeviceSeries(name, label, unit, times, rates))
    return tuple(series)


def _rates_of(
    seconds: NDArray[np.float64], counter: NDArray[np.float64]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return times and rates per second between samples, without intervals of a counter reset."""
    elapsed, increase = np.diff(seconds), np.diff(counter)
    is_valid = (elapsed > 0) & (increase >= 0)
    rates = increase[is_valid] / elapsed[is_valid]
    return tuple(seconds[1:][is_valid].tolist()), tuple(rates.tolist())
