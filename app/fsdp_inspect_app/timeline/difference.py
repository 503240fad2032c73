"""Compare the units of two steps on one rank each, for a strip of the timeline.

The time of a unit in a pass is its time on the compute stream: compute, copies and exposed waits.
The difference is drawn where the unit's longest unbroken stretch in the pass is. Units are aligned
by name, so runs of different plans are comparable; units of one run only are listed.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np

from fsdp_inspect.columns import TableSpec, text_column, value_column
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.trace.codes import NO_UNIT, Phase
from fsdp_inspect_app.timeline.rank_layout import Track
from fsdp_inspect_app.timeline.track_set import TrackSet
from fsdp_inspect_app.timeline.tracks import DrawnRank


@dataclass(frozen=True, slots=True)
class UnitChange:
    """The difference of one unit in one pass."""

    name: str
    phase: str
    start_ns: int
    """Start of the longest stretch of the unit in this run, on the axis."""
    end_ns: int
    own_ns: int
    """The whole time in this run."""
    other_ns: int

    @property
    def delta_ns(self) -> int:
        """This run - the other run; positive: this run is slower."""
        return self.own_ns - self.other_ns

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Difference by unit",
        (
            text_column("unit", "The unit.", lambda change: change.name),
            text_column("phase", "The pass."),
            value_column("own_ns", MetricUnit.NS, "Compute stream, this run.", label="this run"),
            value_column("other_ns", MetricUnit.NS, "Compute stream, run B.", label="B"),
            value_column(
                "delta_ns", MetricUnit.NS, "Positive: this run is slower.", label="difference"
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of the units of one rank."""

    block: int
    """The position of the rank in the drawing."""
    changes: tuple[UnitChange, ...]
    """In the order of this run's step."""
    only_here: tuple[str, ...]
    """Units that the other step does not have."""
    only_there: tuple[str, ...]
    has_same_order: bool
    """Whether the shared units run in the same order."""


class _Pass(NamedTuple):
    name: str
    phase: int


@dataclass(slots=True)
class _Stretch:
    start_ns: int
    end_ns: int


def compare_units(own: TrackSet, rank: int, other: TrackSet) -> Difference | None:
    """Compare a drawn rank with the first rank of another step; None if the rank is not drawn."""
    drawn = own.timeline.find_rank(rank)
    if drawn is None:
        return None
    here, there = _passes(own, drawn), _passes(other, other.timeline.ranks[0])
    totals, others = _totals(here), _totals(there)
    shared = [one for one in totals if one in others]
    longest: dict[_Pass, _Stretch] = {}
    for one, stretch in here:
        known = longest.get(one)
        if known is None or _length(stretch) > _length(known):
            longest[one] = stretch
    names, other_names = {one.name for one in totals}, {one.name for one in others}
    return Difference(
        block=own.timeline.ranks.index(drawn),
        changes=tuple(
            UnitChange(
                name=one.name,
                phase=Phase(one.phase).label,
                start_ns=longest[one].start_ns + drawn.shift_ns,
                end_ns=longest[one].end_ns + drawn.shift_ns,
                own_ns=totals[one],
                other_ns=others[one],
            )
            for one in shared
        ),
        only_here=tuple(dict.fromkeys(one.name for one in totals if one.name not in other_names)),
        only_there=tuple(dict.fromkeys(one.name for one in others if one.name not in names)),
        has_same_order=shared == [one for one in others if one in totals],
    )


def _passes(tracks: TrackSet, drawn: DrawnRank) -> list[tuple[_Pass, _Stretch]]:
    """The unbroken stretches of units on the compute stream, by start."""
    return [
        (one, _Stretch(own[0][1], own[-1][2]))
        for one, members in groupby(_spans(tracks, drawn), key=lambda span: span[0])
        for own in ([*members],)
        if one is not None
    ]


def _spans(tracks: TrackSet, drawn: DrawnRank) -> Iterator[tuple[_Pass | None, int, int]]:
    names = tracks.names
    lanes = np.array([lane.track for lane in drawn.layout.lanes])
    spans = drawn.layout.timed_spans
    spans = spans.where(lanes[spans.lane] == Track.CLOCK)
    units, phases = drawn.events.unit[spans.event], drawn.events.phase[spans.event]
    columns = (units, phases, spans.start_ns, spans.end_ns)
    for unit, phase, start, end in zip(*(column.tolist() for column in columns), strict=True):
        is_known = unit != NO_UNIT and phase in (Phase.FORWARD, Phase.BACKWARD)
        yield _Pass(names[unit], phase) if is_known else None, start, end


def _totals(passes: list[tuple[_Pass, _Stretch]]) -> Counter[_Pass]:
    """The time of each unit in each pass, in the order of their starts."""
    totals: Counter[_Pass] = Counter()
    for one, stretch in passes:
        totals[one] += _length(stretch)
    return totals


def _length(stretch: _Stretch) -> int:
    return stretch.end_ns - stretch.start_ns
