"""What does a rank's recording hold? Column tables as numpy arrays, one attribute a column.

Every table is immutable by convention and cheap to filter: `table.where(mask)`. Times are ns on
the recording rank's monotonic clock; `rank.json` maps them to wall time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

MISSING_INT = -1
"""An integer that was not measured (bytes, times, counters). Shown as missing, never as a value."""


def positions_by_value(values: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each value of a column with the positions that hold it, both ascending.

    One sort in the place of a comparison for each value: for columns with thousands of them.
    """
    order = np.argsort(values, kind="stable")
    distinct, firsts = np.unique(values[order], return_index=True)
    bounds = [*firsts.tolist(), len(order)]
    for place, value in enumerate(distinct.tolist()):
        yield value, order[bounds[place] : bounds[place + 1]]


def is_any_of(codes: NDArray[np.int8], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Where a column of codes holds one of these: `np.isin` by a table, many times as quick.

    Args:
        codes: Shape (n,).
        wanted: Any codes; those that the column cannot hold are in none of its rows.
    """
    limits = np.iinfo(np.int8)
    table = np.zeros(256, dtype=bool)
    table[[int(code) & 0xFF for code in wanted if limits.min <= code <= limits.max]] = True
    found: NDArray[np.bool_] = table[np.ascontiguousarray(codes, dtype=np.int8).view(np.uint8)]
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """Base of the column tables: equal-length one-dimensional arrays."""

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {}
    """Column name to numpy dtype, in the order of the file."""

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.DTYPES))))

    @property
    def num_bytes(self) -> int:
        """Memory that its columns take."""
        return sum(column.nbytes for column in self.columns().values())

    @classmethod
    def from_columns(cls, columns: Mapping[str, NDArray[np.generic]]) -> Self:
        """Build from arrays by name; dtypes are converted, other names are ignored.

        Raises:
            KeyError: A column is missing.
        """
        return cls(**{name: np.asarray(columns[name], dtype) for name, dtype in cls.DTYPES.items()})

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, float]]) -> Self:
        """Build from dictionaries; for tests and small tables."""
        return cls(
            **{
                name: np.array([row[name] for row in rows], dtype=dtype)
                for name, dtype in cls.DTYPES.items()
            }
        )

    @classmethod
    def empty(cls) -> Self:
        """The table without rows."""
        return cls.from_rows([])

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """One table of all rows, in the given order."""
        if not tables:
            return cls.empty()
        return cls(
            **{
                name: np.concatenate([getattr(table, name) for table in tables])
                for name in cls.DTYPES
            }
        )

    def columns(self) -> dict[str, NDArray[np.generic]]:
        """Arrays by column name, in the order of the file."""
        return {name: getattr(self, name) for name in self.DTYPES}

    def where(self, mask: NDArray[np.generic]) -> Self:
        """The rows that a boolean mask or an index array selects; itself if that is all of them."""
        rows = mask
        if mask.dtype == bool:
            assert len(mask) == len(self), f"a mask of {len(mask)} for {len(self)} rows"
            rows = np.flatnonzero(mask)  # once, and not once a column
            if len(rows) == len(self):
                return self
        return type(self)(**{name: getattr(self, name)[rows] for name in self.DTYPES})

    def between(self, low: int, high: int) -> Self:
        """The rows from `low` up to but not including `high`, without copying them."""
        return type(self)(**{name: getattr(self, name)[low:high] for name in self.DTYPES})


@dataclass(frozen=True, slots=True)
class EventTable(Table):
    """Everything with a duration, one row each. Codes: `trace.codes`."""

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {
        "step": np.int32,
        "microbatch": np.int16,
        "phase": np.int8,
        "kind": np.int8,
        "unit": np.int16,
        "issued_by": np.int16,
        "stream": np.int8,
        "group": np.int16,
        "dtype": np.int8,
        "source": np.int8,
        "method": np.int8,
        "flags": np.int16,
        "sequence": np.int64,
        "collective": np.int64,
        "bytes": np.int64,
        "issue_ns": np.int64,
        "start_ns": np.int64,
        "end_ns": np.int64,
        "need_ns": np.int64,
    }

    step: NDArray[np.int32]
    """The step the event belongs to, from 0."""
    microbatch: NDArray[np.int16]
    """Forward and backward passes of one step, counted from 0."""
    phase: NDArray[np.int8]
    """A `Phase`."""
    kind: NDArray[np.int8]
    """An `EventKind`."""
    unit: NDArray[np.int16]
    """Index into the manifest's units; -1: no FSDP unit."""
    issued_by: NDArray[np.int16]
    """The unit whose hook issued the collective (prefetch), or where a wait happened; -1: none."""
    stream: NDArray[np.int8]
    """A `Stream`."""
    group: NDArray[np.int16]
    """Index into the manifest's process groups; -1: none."""
    dtype: NDArray[np.int8]
    """Index into `codes.DTYPES`."""
    source: NDArray[np.int8]
    """A `Source`."""
    method: NDArray[np.int8]
    """A `Method`."""
    flags: NDArray[np.int16]
    """Bits of `EventFlag`."""
    sequence: NDArray[np.int64]
    """The collective's number in its process group on this rank, from 0: equal numbers on two
    ranks of a group are the same collective. -1: not a collective."""
    collective: NDArray[np.int64]
    """Ties the copy-in, collective, wait and copy-out of one communication; -1: none."""
    bytes: NDArray[np.int64]
    """Full padded message of a collective (all-gather output, reduce-scatter input); -1: none."""
    issue_ns: NDArray[np.int64]
    """When the host issued it."""
    start_ns: NDArray[np.int64]
    """When it began on its stream."""
    end_ns: NDArray[np.int64]
    """When it ended on its stream."""
    need_ns: NDArray[np.int64]
    """When the compute stream (CPU: the main thread) began to wait for it; -1: nobody did."""


@dataclass(frozen=True, slots=True)
class MemoryTable(Table):
    """Memory at the unit boundaries; one row a sample, bytes. -1: not known at that sample."""

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {
        "step": np.int32,
        "microbatch": np.int16,
        "phase": np.int8,
        "point": np.int8,
        "unit": np.int16,
        "parameter": np.int16,
        "method": np.int8,
        "time_ns": np.int64,
        "allocated": np.int64,
        "reserved": np.int64,
        "active": np.int64,
        "peak_allocated": np.int64,
        "peak_reserved": np.int64,
        "inactive_split": np.int64,
        "num_alloc_retries": np.int32,
        "num_ooms": np.int32,
        "peak_compute": np.int64,
        "sharded_parameter": np.int64,
        "unsharded_parameter": np.int64,
        "sharded_gradient": np.int64,
        "unsharded_gradient": np.int64,
        "optimizer_state": np.int64,
        "activation": np.int64,
        "all_gather_buffer": np.int64,
        "reduce_scatter_buffer": np.int64,
        "buffer": np.int64,
        "input": np.int64,
        "temporary": np.int64,
        "outside_allocator": np.int64,
    }

    step: NDArray[np.int32]
    microbatch: NDArray[np.int16]
    phase: NDArray[np.int8]
    """A `Phase`."""
    point: NDArray[np.int8]
    """A `MemoryPoint`."""
    unit: NDArray[np.int16]
    """Position: the innermost unit on the host's stack (PEAK_BY_OWNER: the owner); -1: none."""
    parameter: NDArray[np.int16]
    """PARAMETER_USE: which of the unit's parameters, by its place in `Unit.parameters`."""
    method: NDArray[np.int8]
    """`Method.MEASURED`: allocator counters or the storage tracker, by the rank's `memory_from`."""
    time_ns: NDArray[np.int64]
    """Host time of the sample."""
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    active: NDArray[np.int64]
    peak_allocated: NDArray[np.int64]
    """Highest `allocated` since the previous sample (storage tracker), or since the user's own
    last reset (CUDA counters, which the recorder never resets). PARAMETER_USE: until the next use
    in the same pass, or the next sample."""
    peak_reserved: NDArray[np.int64]
    inactive_split: NDArray[np.int64]
    """Free blocks in segments that are also in use, which the allocator cannot give back."""
    num_alloc_retries: NDArray[np.int32]
    """Since the process began: how often the allocator emptied its cache and tried again."""
    num_ooms: NDArray[np.int32]
    """Since the process began: requests that failed in the end."""
    peak_compute: NDArray[np.int64]
    """The most of `allocated` less `codes.OF_COMMUNICATION`, over the same time as
    `peak_allocated`; from the storage tracker."""
    sharded_parameter: NDArray[np.int64]
    unsharded_parameter: NDArray[np.int64]
    sharded_gradient: NDArray[np.int64]
    unsharded_gradient: NDArray[np.int64]
    optimizer_state: NDArray[np.int64]
    activation: NDArray[np.int64]
    all_gather_buffer: NDArray[np.int64]
    reduce_scatter_buffer: NDArray[np.int64]
    buffer: NDArray[np.int64]
    input: NDArray[np.int64]
    temporary: NDArray[np.int64]
    outside_allocator: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceTable(Table):
    """What the machine did, sampled by a background thread. -1: not available here."""

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {
        "time_ns": np.int64,
        "gpu_utilisation_pct": np.int16,
        "gpu_memory_used": np.int64,
        "gpu_power_mw": np.int64,
        "gpu_sm_clock_mhz": np.int32,
        "nvlink_tx_bytes": np.int64,
        "nvlink_rx_bytes": np.int64,
        "pcie_tx_bytes_per_s": np.int64,
        "pcie_rx_bytes_per_s": np.int64,
        "process_rss": np.int64,
        "process_cpu_pct": np.int32,
        "host_memory_used": np.int64,
        "host_memory_total": np.int64,
        "run_delay_ns": np.int64,
    }

    time_ns: NDArray[np.int64]
    """Host monotonic time."""
    gpu_utilisation_pct: NDArray[np.int16]
    gpu_memory_used: NDArray[np.int64]
    """Bytes in use on the whole device (NVML), by every process."""
    gpu_power_mw: NDArray[np.int64]
    gpu_sm_clock_mhz: NDArray[np.int32]
    nvlink_tx_bytes: NDArray[np.int64]
    """Counter since an arbitrary origin: use differences."""
    nvlink_rx_bytes: NDArray[np.int64]
    pcie_tx_bytes_per_s: NDArray[np.int64]
    pcie_rx_bytes_per_s: NDArray[np.int64]
    process_rss: NDArray[np.int64]
    process_cpu_pct: NDArray[np.int32]
    """Percent of one core: 200 means two cores busy."""
    host_memory_used: NDArray[np.int64]
    host_memory_total: NDArray[np.int64]
    run_delay_ns: NDArray[np.int64]
    """Time for which the training thread was ready to run and had no core (Linux's scheduler); a
    counter since the thread began: use differences."""


@dataclass(frozen=True, slots=True)
class ScalarTable(Table):
    """Numbers that the training loop logged (loss, learning rate), by step."""

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {
        "step": np.int32,
        "name": np.int16,
        "time_ns": np.int64,
        "value": np.float64,
    }

    step: NDArray[np.int32]
    name: NDArray[np.int16]
    """Index into the rank record's `scalar_names`."""
    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SummaryTable(Table):
    """The run in small: one row per rank, step, unit, phase and kind. See `reduction.step_parts`.

    Rows with kind STEP carry the step itself, with the number and the bytes of its collectives
    (those of evaluation passes are left out); the other rows with kind below 100 are sums over
    events; kinds from 100 on are `reduction.StepPart`s: the parts of the step's breakdown, which
    add up to the step's duration exactly, and from 130 on its memory (`memory_reduction`).
    """

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {
        "attempt": np.int16,
        "rank": np.int32,
        "step": np.int32,
        "unit": np.int16,
        "phase": np.int8,
        "kind": np.int16,
        "flags": np.int16,
        "count": np.int32,
        "bytes": np.int64,
        "duration_ns": np.int64,
        "median_ns": np.int64,
        "exposed_ns": np.int64,
    }

    attempt: NDArray[np.int16]
    rank: NDArray[np.int32]
    step: NDArray[np.int32]
    unit: NDArray[np.int16]
    phase: NDArray[np.int8]
    kind: NDArray[np.int16]
    """An `EventKind`, or a `reduction.StepPart` (from 100 on)."""
    flags: NDArray[np.int16]
    """On STEP rows: bits of `reduction.StepFlag`."""
    count: NDArray[np.int32]
    bytes: NDArray[np.int64]
    """Sum of the messages; 0 where nothing travels. On memory rows the amount of memory."""
    duration_ns: NDArray[np.int64]
    """Sum of the durations (may overlap each other: never a share of the step)."""
    median_ns: NDArray[np.int64]
    """Median duration of the row's events."""
    exposed_ns: NDArray[np.int64]
    """Exposed communication owned by the row's collectives."""


_FEW_KINDS = 4
"""Quicker compared one by one."""


def limit_summary(
    rows: SummaryTable,
    *,
    ranks: Collection[int] | None = None,
    kinds: Collection[int] | None = None,
) -> SummaryTable:
    """The rows of some ranks and of some kinds; None leaves a limit out."""
    if ranks is not None:
        rows = rows.where(np.isin(rows.rank, list(ranks)))
    return rows if kinds is None else rows_of(rows, kinds=kinds)


def rows_of(rows: SummaryTable, *, kinds: Collection[int]) -> SummaryTable:
    """The rows of some kinds."""
    if len(kinds) > _FEW_KINDS:
        return rows.where(np.isin(rows.kind, [int(kind) for kind in kinds]))
    chosen = np.zeros(len(rows), dtype=bool)
    for kind in kinds:
        chosen |= rows.kind == int(kind)
    return rows.where(chosen)
