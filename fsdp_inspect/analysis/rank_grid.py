"""Lay out one metric as a grid of ranks and steps.

Metrics of a whole step come from the run's summary, so a thousand ranks and a hundred steps are
fast. Lateness comes from events: it is read for a sample of ranks and steps, and only if clocks
are aligned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.analysis.memory.peak import memory_parts
from fsdp_inspect.analysis.step_selection import select_steps, timed_ranks
from fsdp_inspect.analysis.stragglers.arrivals import NEVER, Arrivals, find_arrivals
from fsdp_inspect.analysis.stragglers.rank_work import common_steps, sample_ranks, spread
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import SummaryTable, rows_of

MAX_LATE_RANKS = 48
MAX_LATE_STEPS = 24
_LOW_PERCENTILE, _HIGH_PERCENTILE = 1, 99

_Grid = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GridCell:
    """One value of a grid."""

    rank: int
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class RankGrid:
    """One metric of R ranks in S steps."""

    metric: str
    """A metric of `GRID_METRICS`."""
    ranks: tuple[int, ...]
    """The ranks, ascending."""
    steps: tuple[int, ...]
    """The steps, ascending."""
    values: _Grid
    """Shape (R, S), ns or bytes; NaN if unknown."""
    middle: _Grid
    """Median over the ranks with a known value, shape (S,)."""
    left_out: tuple[int, ...]
    """The steps whose times do not count: warm-up, memory and plain steps; empty for memory."""
    low: float
    """The 1st percentile of the values in the other steps, for the colour scale."""
    high: float
    """The 99th percentile of these values."""
    highest: GridCell | None
    """The highest of these values; None without any."""
    num_all_ranks: int
    """Number of ranks in the run. It is larger than R if a sample was read."""
    refusals: tuple[str, ...]
    """The reasons why ranks have no value, one sentence each."""

    def of_rank(self, rank: int) -> _Grid | None:
        """Return the values of one rank, shape (S,); None if it is not in the grid."""
        return self.values[self.ranks.index(rank)] if rank in self.ranks else None


def measure_rank_grid(run: RunSource, *, metric: str) -> RankGrid:
    """Lay out a metric by rank and step.

    Args:
        run: A recorded or imported run.
        metric: One of `GRID_METRICS`.

    Returns:
        A grid of all ranks and completed steps. The grid of `lateness_ns` has a sample of both.

    Raises:
        ValueError: The metric is unsupported.
    """
    if metric not in GRID_METRICS:
        raise ValueError(
            f"Unsupported metric {metric!r}. Expected one of {', '.join(GRID_METRICS)}."
        )
    return GRID_METRICS[metric](run)


def _step_times(run: RunSource) -> RankGrid:
    rows = run.summary(kinds=[EventKind.STEP])
    return _lay_out(run, "step_time_ns", rows, rows.duration_ns)


def _exposed(run: RunSource) -> RankGrid:
    rows = run.summary(kinds=[EventKind.STEP])
    return _lay_out(run, "exposed_ns", rows, _known_in_detail(run, rows, rows.exposed_ns))


def _own_work(run: RunSource) -> RankGrid:
    rows = run.summary(kinds=[EventKind.STEP])
    own = rows.duration_ns - rows.exposed_ns
    return _lay_out(run, "own_work_ns", rows, _known_in_detail(run, rows, own))


def _known_in_detail(run: RunSource, rows: SummaryTable, amounts: NDArray[np.int64]) -> _Grid:
    """Amounts that need the waits of a step; NaN in plain steps and imports without collectives."""
    is_unknown = timed_ranks(run).lacks_communication | np.isin(rows.step, select_steps(run).plain)
    return np.where(is_unknown, np.nan, amounts)


def _peaks(run: RunSource) -> RankGrid:
    rows = rows_of(memory_parts(run), kinds=[StepPart.PEAK_ALLOCATED])
    return _lay_out(run, "peak_allocated_bytes", rows, rows.bytes)


def _lateness(run: RunSource) -> RankGrid:
    """Lay out the median time from the first arrival to the rank's arrival, for each step."""
    timed = timed_ranks(run)
    sample = sample_ranks(timed.typical, [record.rank for record in run.ranks], MAX_LATE_RANKS)
    members = [member for member in timed.members if member.rank in sample]
    steps = spread(common_steps(members), MAX_LATE_STEPS)
    alignment = align_clocks(run, sample)
    arrivals = find_arrivals(run, sample, steps, alignment).aligned()
    values = np.full((len(sample), len(steps)), np.nan)
    if len(arrivals):
        for column, step in enumerate(steps):
            values[:, column] = _typical_lateness(arrivals.where(arrivals.rows.step == step))
    return _describe(
        run, "lateness_ns", sample, steps, values, tuple(dict.fromkeys(alignment.refusals.values()))
    )


def _typical_lateness(arrivals: Arrivals) -> _Grid:
    """Return the median lateness, shape (ranks,); NaN for a rank without a known arrival."""
    typical = np.full(len(arrivals.ranks), np.nan)
    if len(arrivals) == 0:
        return typical
    late = arrivals.arrival_ns - arrivals.first_ns()[:, np.newaxis]
    for place in range(len(arrivals.ranks)):
        known = arrivals.arrival_ns[:, place] != NEVER
        if known.any():
            typical[place] = np.median(late[known, place])
    return typical


GRID_METRICS: dict[str, Callable[[RunSource], RankGrid]] = {
    "step_time_ns": _step_times,
    "exposed_ns": _exposed,
    "own_work_ns": _own_work,
    "peak_allocated_bytes": _peaks,
    "lateness_ns": _lateness,
}
"""The supported metrics, each with the function that lays it out."""


def _lay_out(
    run: RunSource, metric: str, rows: SummaryTable, amounts: NDArray[np.int64] | _Grid
) -> RankGrid:
    ranks, steps = np.unique(rows.rank), np.unique(rows.step)
    values = np.full((len(ranks), len(steps)), np.nan)
    values[np.searchsorted(ranks, rows.rank), np.searchsorted(steps, rows.step)] = amounts
    return _describe(run, metric, ranks.tolist(), steps.tolist(), values, ())


def _describe(
    run: RunSource,
    metric: str,
    ranks: list[int],
    steps: list[int],
    values: _Grid,
    refusals: tuple[str, ...],
) -> RankGrid:
    selection = select_steps(run)
    # A peak is one of all steps, as in the summary. So are values of steps that no time uses only.
    is_time = metric != "peak_allocated_bytes"
    untimed = {*selection.finished} - {*selection.timed}
    skipped = untimed if is_time else set[int]()
    left_out = tuple(step for step in steps if step in skipped)
    counts = np.array([step not in skipped for step in steps], dtype=bool)
    if not counts.any():
        left_out, counts = (), np.ones(len(steps), dtype=bool)
    counted = np.where(counts, values, np.nan)
    known = counted[~np.isnan(counted)]
    low, high = np.percentile(known, [_LOW_PERCENTILE, _HIGH_PERCENTILE]) if len(known) else (0, 0)
    return RankGrid(
        metric=metric,
        ranks=tuple(ranks),
        steps=tuple(steps),
        values=values,
        middle=_medians(values),
        left_out=left_out,
        low=float(low),
        high=float(high),
        highest=_find_highest(counted, ranks, steps) if len(known) else None,
        num_all_ranks=len(run.ranks),
        refusals=refusals,
    )


def _medians(values: _Grid) -> _Grid:
    medians = np.full(values.shape[1], np.nan)
    known = ~np.isnan(values).all(axis=0)
    if known.any():
        medians[known] = np.nanmedian(values[:, known], axis=0)
    return medians


def _find_highest(counted: _Grid, ranks: list[int], steps: list[int]) -> GridCell:
    row, column = np.unravel_index(int(np.nanargmax(counted)), counted.shape)
    return GridCell(ranks[int(row)], steps[int(column)], float(counted[row, column]))
