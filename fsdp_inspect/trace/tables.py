"""Define the tables of a recording as numpy columns, one attribute for each column.

Tables are immutable by convention and cheap to filter: `table.where(mask)`. Times are ns on the
recording rank's monotonic clock; `rank.json` maps them to wall time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from inspect import get_annotations
from typing import Any, ClassVar, Self, get_args

import numpy as np
from numpy.typing import NDArray

MISSING_INT = -1
"""An integer that was not measured (bytes, times, counters). Always shown as missing."""


def positions_by_value(values: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each distinct value of a column with its positions, both ascending.

    It sorts once instead of comparing once for each value: for columns with thousands of values.
    """
    order = np.argsort(values, kind="stable")
    distinct, firsts = np.unique(values[order], return_index=True)
    bounds = [*firsts.tolist(), len(order)]
    for place, value in enumerate(distinct.tolist()):
        yield value, order[bounds[place] : bounds[place + 1]]


def is_any_of(codes: NDArray[np.int8], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Mask of the rows with one of the wanted codes: a faster `np.isin` with a lookup table.

    Args:
        codes: Shape (n,).
        wanted: Any codes; codes outside int8 match no row.
    """
    limits = np.iinfo(np.int8)
    table = np.zeros(256, dtype=bool)
    table[[int(code) & 0xFF for code in wanted if limits.min <= code <= limits.max]] = True
    found: NDArray[np.bool_] = table[np.ascontiguousarray(codes, dtype=np.int8).view(np.uint8)]
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """Base of the tables: one-dimensional arrays of equal length."""

    DTYPES: ClassVar[Mapping[str, type[np.generic]]] = {}
    """Column name to numpy dtype, in the order of the fields, which is that of the file."""

    def __init_subclass__(cls) -> None:
        """Read the columns from the fields, such as `step: NDArray[np.int32]`."""
        if "DTYPES" not in vars(cls):  # `slots=True` makes the class a second time
            cls.DTYPES = {
                name: get_args(get_args(annotation)[1])[0]
                for name, annotation in get_annotations(cls).items()
            }

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.DTYPES))))

    @property
    def num_bytes(self) -> int:
        """Memory of the columns, in bytes."""
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
        """Build from one dictionary for each row; for tests and small tables."""
        return cls(
            **{
                name: np.array([row[name] for row in rows], dtype=dtype)
                for name, dtype in cls.DTYPES.items()
            }
        )

    @classmethod
    def empty(cls) -> Self:
        """Build the table without rows."""
        return cls.from_rows([])

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """Join tables to one, in the given order."""
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
        """Select rows by a boolean mask or an index array; returns self if a mask selects all."""
        rows = mask
        if mask.dtype == bool:
            assert len(mask) == len(self), f"a mask of {len(mask)} for {len(self)} rows"
            rows = np.flatnonzero(mask)  # once, not once for each column
            if len(rows) == len(self):
                return self
        return type(self)(**{name: getattr(self, name)[rows] for name in self.DTYPES})

    def between(self, low: int, high: int) -> Self:
        """The rows from `low` up to but not including `high`, as views without a copy."""
        return type(self)(**{name: getattr(self, name)[low:high] for name in self.DTYPES})


class Rows:
    """Base of data classes of arrays and tables of equal length; other fields describe all rows."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def where(self, mask: NDArray[np.generic]) -> Self:
        """Select rows by a boolean mask or an index array."""
        rows = np.flatnonzero(mask) if mask.dtype == bool else mask  # once, not for each column
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(
            self,
            **{
                name: value.where(rows) if isinstance(value, Table) else value[rows]
                for name, value in values.items()
                if isinstance(value, Table | np.ndarray)
            },
        )


@dataclass(frozen=True, slots=True)
class EventTable(Table):
    """All events of a rank, one row for each. Codes: `trace.codes`."""

    step: NDArray[np.int32]
    """The step the event belongs to, from 0."""
    microbatch: NDArray[np.int16]
    """The microbatch of the step, from 0."""
    phase: NDArray[np.int8]
    """A `Phase`."""
    kind: NDArray[np.int8]
    """An `EventKind`."""
    unit: NDArray[np.int16]
    """Index into the manifest's units; -1: no FSDP unit."""
    issued_by: NDArray[np.int16]
    """The unit whose hook issued the collective, or in which a wait happened; -1: none."""
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
    """The collective's number in its process group on this rank, from 0. Equal numbers on two
    ranks of a group identify the same collective. -1: not a collective."""
    collective: NDArray[np.int64]
    """Shared id of the copy-in, collective, wait and copy-out of one communication; -1: none."""
    bytes: NDArray[np.int64]
    """Full padded message of a collective (all-gather output, reduce-scatter input); -1: none."""
    issue_ns: NDArray[np.int64]
    """The time at which the host issued the event."""
    start_ns: NDArray[np.int64]
    """The start on its stream."""
    end_ns: NDArray[np.int64]
    """The end on its stream."""
    need_ns: NDArray[np.int64]
    """The time at which the compute stream (CPU: the main thread) began to wait for it; -1: never.
    """


@dataclass(frozen=True, slots=True)
class MemoryTable(Table):
    """Memory at the unit boundaries, in bytes, one row for each sample. -1: unknown."""

    step: NDArray[np.int32]
    microbatch: NDArray[np.int16]
    phase: NDArray[np.int8]
    """A `Phase`."""
    point: NDArray[np.int8]
    """A `MemoryPoint`."""
    unit: NDArray[np.int16]
    """Position: the innermost running unit on the host (PEAK_BY_OWNER: the owner); -1: none."""
    parameter: NDArray[np.int16]
    """PARAMETER_USE: index of the parameter in `Unit.parameters`."""
    method: NDArray[np.int8]
    """`Method.MEASURED`: allocator counters or the storage tracker, see `RankRecord.memory_from`.
    """
    time_ns: NDArray[np.int64]
    """Host time of the sample."""
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    active: NDArray[np.int64]
    peak_allocated: NDArray[np.int64]
    """Highest `allocated` since the previous sample (storage tracker), or since the last reset by
    the training script (CUDA counters, which the recorder never resets). PARAMETER_USE: until the
    next use in the same pass, or the next sample."""
    peak_reserved: NDArray[np.int64]
    inactive_split: NDArray[np.int64]
    """Free blocks in partly used segments, which the allocator cannot return to the device."""
    num_alloc_retries: NDArray[np.int32]
    """Allocation retries since the process started."""
    num_ooms: NDArray[np.int32]
    """Out-of-memory errors since the process started."""
    peak_compute: NDArray[np.int64]
    """Highest `allocated` minus `codes.OF_COMMUNICATION`, over the same time as
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
    """Load of the device and the host, sampled by a background thread. -1: not available."""

    time_ns: NDArray[np.int64]
    """Host monotonic time."""
    gpu_utilisation_pct: NDArray[np.int16]
    gpu_memory_used: NDArray[np.int64]
    """Bytes in use on the whole device by all processes (NVML)."""
    gpu_power_mw: NDArray[np.int64]
    gpu_sm_clock_mhz: NDArray[np.int32]
    nvlink_tx_bytes: NDArray[np.int64]
    """Counter since an arbitrary origin: use differences."""
    nvlink_rx_bytes: NDArray[np.int64]
    pcie_tx_bytes_per_s: NDArray[np.int64]
    pcie_rx_bytes_per_s: NDArray[np.int64]
    process_rss: NDArray[np.int64]
    process_cpu_pct: NDArray[np.int32]
    """Percent of one core: 200 means two busy cores."""
    host_memory_used: NDArray[np.int64]
    host_memory_total: NDArray[np.int64]
    run_delay_ns: NDArray[np.int64]
    """Time in which the training thread was ready to run without a core (Linux scheduler). A
    counter since the start of the thread: use differences."""
    gpu_temperature_c: NDArray[np.int16]
    gpu_clock_limits: NDArray[np.int64]
    """The reason why the GPU's clocks are not higher: bits of `nvmlClocksEventReason` (NVML)."""
    major_faults: NDArray[np.int64]
    """Pages that this process had to read from a disk. A counter: use differences."""
    process_swap: NDArray[np.int64]
    """Bytes of this process that are swapped out (Linux)."""
    package_energy_uj: NDArray[np.int64]
    """Energy of all CPU packages of the host (RAPL). A counter: use differences."""


@dataclass(frozen=True, slots=True)
class ScalarTable(Table):
    """Numbers that the training loop logs (loss, learning rate), by step."""

    step: NDArray[np.int32]
    name: NDArray[np.int16]
    """Index into the rank record's `scalar_names`."""
    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SummaryTable(Table):
    """The summary of a run: one row per rank, step, unit, phase, kind and process group.

    * Kind STEP: the step itself, with the number and bytes of its collectives (without those of
      evaluation passes).
    * Other kinds below 100: sums over events.
    * Kinds from 100 (`codes.StepPart`): the parts of the breakdown, which add up to the step's
      duration exactly. See `store.reduction.step_parts`.
    * Kinds from 130: the memory of the step. See `store.reduction.memory_parts`.
    * Kind 140: the collectives of one process group.
    """

    attempt: NDArray[np.int16]
    rank: NDArray[np.int32]
    step: NDArray[np.int32]
    unit: NDArray[np.int16]
    phase: NDArray[np.int8]
    kind: NDArray[np.int16]
    """An `EventKind`, or a `codes.StepPart` (from 100)."""
    group: NDArray[np.int16]
    """For collectives, the index into the process groups of the rank; -1: none, or several."""
    flags: NDArray[np.int16]
    """On STEP rows: bits of `codes.StepFlag`."""
    count: NDArray[np.int32]
    bytes: NDArray[np.int64]
    """Sum of the messages; 0 for events that are not collectives. On memory rows: the memory."""
    duration_ns: NDArray[np.int64]
    """Sum of the durations. Events may overlap, so this is not a fraction of the step. On GROUP
    rows: the union of the group's running collectives."""
    median_ns: NDArray[np.int64]
    """Median duration of the row's events."""
    exposed_ns: NDArray[np.int64]
    """Exposed communication owned by the row's collectives."""


@dataclass(frozen=True, slots=True)
class StatisticsTable(Table):
    """The statistics of a run: few rows for each rank, however many steps it has.

    `store.reduction.run_statistics` computes them from the rows of whole steps. Sums are over the
    typical steps of the rank.
    """

    attempt: NDArray[np.int16]
    rank: NDArray[np.int32]
    """-1: a row of the whole attempt."""
    statistic: NDArray[np.int8]
    """A `Statistic`."""
    kind: NDArray[np.int16]
    """The kind of the summary rows behind the statistic."""
    group: NDArray[np.int16]
    """Their process group on GROUP rows; -1 on all others."""
    step: NDArray[np.int32]
    """The step of the value; -1: none."""
    flags: NDArray[np.int16]
    """On FINISHED rows: bits of `codes.StepFlag`, of any rank."""
    num_steps: NDArray[np.int32]
    """The number of summed steps."""
    out_of: NDArray[np.int32]
    """The number of steps from which they were chosen."""
    count: NDArray[np.int64]
    bytes: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    exposed_ns: NDArray[np.int64]


_FEW_KINDS = 4
"""Up to this number of kinds, separate comparisons are faster than `np.isin`."""


def limit_summary(
    rows: SummaryTable,
    *,
    ranks: Collection[int] | None = None,
    kinds: Collection[int] | None = None,
) -> SummaryTable:
    """The rows of the given ranks and kinds; None selects all."""
    if ranks is not None:
        rows = rows.where(np.isin(rows.rank, list(ranks)))
    return rows if kinds is None else rows_of(rows, kinds=kinds)


def if_known(value: int) -> int | None:
    """The value; None if it is missing."""
    return None if value == MISSING_INT else value


def rows_of(rows: SummaryTable, *, kinds: Collection[int]) -> SummaryTable:
    """The rows of the given kinds."""
    if len(kinds) > _FEW_KINDS:
        return rows.where(np.isin(rows.kind, [int(kind) for kind in kinds]))
    chosen = np.zeros(len(rows), dtype=bool)
    for kind in kinds:
        chosen |= rows.kind == int(kind)
    return rows.where(chosen)
