"""Place the ranks of one step on one axis, each with its own lanes.

Times on the axis are ns from the start of the earliest rank's step, on the clock of the first rank
drawn. A rank whose clock cannot be aligned begins at 0. The data of a rank is not copied. Lanes and
events have one sequence of numbers over the ranks.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.analysis.mesh_dimensions import group_dimensions
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.formatting import format_ranks
from fsdp_inspect.report.perfetto.axes import place_ranks
from fsdp_inspect.result_types import Alignment, LinearClock, RankClock, RankRecord, RunSource
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import EventTable
from fsdp_inspect_app.timeline.memory import find_sampled_ranks, read_curve
from fsdp_inspect_app.timeline.rank_layout import Lane, RankLayout, RankWindow, lay_out_rank

_RANKS_AT_ONCE = min(4, os.cpu_count() or 1)
"""The number of threads for the layout; decoding and sorting release the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class DrawnRank:
    """One rank of a drawing."""

    layout: RankLayout
    shift_ns: int
    """The shift from its times to the axis of the drawing."""
    first_lane: int
    """The number of lanes of the ranks above it."""
    first_event: int
    """The number of events of the ranks above it."""

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.layout.rank

    @property
    def window(self) -> RankWindow:
        """The step of the rank on the drawing's axis."""
        return self.layout.window.moved(self.shift_ns)

    @property
    def events(self) -> EventTable:
        """All events of the step, on the rank's own clock."""
        return self.layout.events


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One step of some ranks, prepared for drawing."""

    step: int
    ranks: tuple[DrawnRank, ...]
    """The ranks from the top; at least one."""
    clock_uncertainty_ns: int
    """The uncertainty of the positions of different ranks relative to each other."""
    refusals: Mapping[int, str]
    """By rank, the reason why its clock cannot be aligned. Its step then begins at 0 on a separate
    axis."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of all ranks, from the top."""
        return tuple(lane for one in self.ranks for lane in one.layout.lanes)

    @property
    def windows(self) -> tuple[RankWindow, ...]:
        """The ranks' steps, on the drawing's axis."""
        return tuple(one.window for one in self.ranks)

    @property
    def end_ns(self) -> int:
        """The end of the latest rank's step; the axis starts at 0."""
        return max(window.end_ns for window in self.windows)

    @property
    def num_events(self) -> int:
        """The number of events of all ranks."""
        return self.ranks[-1].first_event + len(self.ranks[-1].events)

    @property
    def num_timed_spans(self) -> int:
        """The number of spans except the marks, which have no duration."""
        return sum(one.layout.num_timed_spans for one in self.ranks)

    @property
    def looks(self) -> set[int]:
        """The drawn looks, as indices into `LOOKS`."""
        return {look for one in self.ranks for look in one.layout.index.looks}

    @property
    def has_memory(self) -> bool:
        """Whether any rank read its memory in the step."""
        return any(one.layout.memory is not None for one in self.ranks)

    @property
    def num_bytes(self) -> int:
        """The memory of the timeline."""
        return sum(one.layout.num_bytes for one in self.ranks)

    def rank_of(self, event: int) -> DrawnRank:
        """The rank of an event, by the event's number over all ranks."""
        firsts = [one.first_event for one in self.ranks]
        return self.ranks[int(np.searchsorted(firsts, event, side="right")) - 1]

    def find_rank(self, rank: int) -> DrawnRank | None:
        """The rank with that number; None if it is not drawn."""
        return next((one for one in self.ranks if one.rank == rank), None)


def build_timeline(
    run: RunSource, *, step: int, ranks: Sequence[int], is_narrow: bool = False
) -> StepTimeline:
    """Lay out one step of the given ranks, in their order from the top.

    Args:
        run: The run.
        step: The number of the step.
        ranks: The ranks to draw.
        is_narrow: One lane for each rank, as `lay_out_rank`.

    Raises:
        IncompleteRunError: None of the ranks finished that step.
    """
    recorded = {one.rank: one for one in run.ranks}
    asked = [recorded[rank] for rank in ranks if rank in recorded]
    sampled = () if is_narrow else find_sampled_ranks(run, step, ranks)
    lay_out = partial(_lay_out_recorded, run, step, sampled, is_narrow)
    with ThreadPoolExecutor(_RANKS_AT_ONCE) as pool:
        layouts = [layout for layout in pool.map(lay_out, asked) if layout is not None]
    if not layouts:
        raise IncompleteRunError(
            f"Step {step} is not finished on {format_ranks(sorted(ranks))} of run "
            f"{run.manifest.run_id!r}. A step is drawn once it has ended. Choose another step "
            "or other ranks."
        )
    return _join(step, layouts, align_clocks(run, [layout.rank for layout in layouts]))


def draw_events(events: EventTable, *, rank: int, step: int | None = None) -> StepTimeline:
    """Lay out a step of one rank from its events alone, such as those of a prediction.

    Args:
        events: The events of one rank.
        rank: The number of the rank to show.
        step: The step to draw; None: the last one among the events.

    Raises:
        IncompleteRunError: The events have no finished step with that number.
    """
    finished = events.step[events.kind == EventKind.STEP]
    chosen = int(finished[-1]) if step is None and len(finished) else step
    own = events.where(events.step == (-1 if chosen is None else chosen))
    if chosen is None or not _has_step(own):
        raise IncompleteRunError(
            f"The events hold no finished step {'' if chosen is None else chosen} to draw. "
            f"Finished: {finished.tolist() or 'none'}. Choose one of them."
        )
    alone = Alignment(rank, {rank: RankClock(LinearClock(), "", 0, 0)}, {})
    return _join(chosen, [lay_out_rank(rank, own, None)], alone)


def _has_step(events: EventTable) -> bool:
    return bool(np.any(events.kind == EventKind.STEP))


def _lay_out_recorded(
    run: RunSource, step: int, sampled: Collection[int], is_narrow: bool, record: RankRecord
) -> RankLayout | None:
    """Lay out the step of a rank with its memory, if it was read; None if it is unfinished."""
    events = run.events(record.rank, steps=[step])
    if not _has_step(events):
        return None
    if is_narrow:
        return lay_out_rank(record.rank, events, None, is_narrow=True)
    memory = read_curve(run, record, step, sampled)
    return lay_out_rank(record.rank, events, memory, group_dimensions(run, record.rank))


def _join(step: int, layouts: Sequence[RankLayout], alignment: Alignment) -> StepTimeline:
    starts = {layout.rank: layout.window.start_ns for layout in layouts}
    axes = place_ranks(alignment, starts)
    drawn: list[DrawnRank] = []
    first_lane, first_event = 0, 0
    for layout in layouts:
        start = starts[layout.rank]
        shift = int(axes[layout.rank].move(np.array([start]))[0]) - start
        drawn.append(DrawnRank(layout, shift, first_lane, first_event))
        first_lane += len(layout.lanes)
        first_event += len(layout.events)
    return StepTimeline(
        step=step,
        ranks=tuple(drawn),
        clock_uncertainty_ns=alignment.uncertainty_ns,
        refusals=dict(alignment.refusals),
    )
