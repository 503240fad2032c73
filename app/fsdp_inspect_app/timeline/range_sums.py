"""Sum the times of one rank in a range of the timeline, by kind and by unit.

The compute stream is split into disjoint parts, so the kinds on it and the rest add up to the
range. Collectives overlap each other and compute, so their times are the time in which at least one
of the kind, or of the unit, is in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.columns import TableSpec, text_column, value_column
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.report import palette
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect_app.timeline.rank_layout import LOOKS, Track
from fsdp_inspect_app.timeline.spans import Spans
from fsdp_inspect_app.timeline.track_set import SummedRange, TrackSet
from fsdp_inspect_app.timeline.tracks import DrawnRank

_LABELS = (*(look.label for look in LOOKS), palette.OTHER.label)
_OTHER = len(LOOKS)
_EXPOSED = [at for at, look in enumerate(LOOKS) if look.label.startswith("exposed")]
_COMPUTE = [LOOKS.index(look) for look in (palette.FORWARD, palette.BACKWARD, palette.OPTIMIZER)]


@dataclass(frozen=True, slots=True)
class KindSum:
    """The time of one kind in the range."""

    label: str
    duration_ns: int
    is_on_clock: bool
    """Whether it is part of the compute stream; else it is in flight and overlaps it."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Times in the range by kind",
        (
            text_column("kind", "The kind of time.", lambda kind: kind.label),
            text_column(
                "where",
                "The kinds on the compute stream add up to the range. In flight: at least one "
                "collective of the kind is running, beside compute.",
                lambda kind: "compute stream" if kind.is_on_clock else "in flight",
            ),
            value_column("duration_ns", MetricUnit.NS, "The time in the range.", label="time"),
        ),
    )


@dataclass(frozen=True, slots=True)
class UnitSum:
    """The times of one unit in the range."""

    name: str | None
    """None: everything outside all units."""
    compute_ns: int
    exposed_ns: int
    in_flight_ns: int
    """The time in which at least one collective of the unit is in flight."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Times in the range by unit",
        (
            text_column("unit", "The unit.", lambda unit: unit.name or "(no unit)"),
            value_column(
                "exposed_ns",
                MetricUnit.NS,
                "Exposed waits for collectives of the unit.",
                label="exposed",
            ),
            value_column(
                "compute_ns", MetricUnit.NS, "Forward, backward and optimizer.", label="compute"
            ),
            value_column(
                "in_flight_ns",
                MetricUnit.NS,
                "At least one collective of the unit is running.",
                label="in flight",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class RangeSums:
    """The times of one rank in a range."""

    rank: int
    start_ns: int
    end_ns: int
    exposed_ns: int
    kinds: tuple[KindSum, ...]
    """First those of the compute stream, which add up to the range; each group largest first."""
    units: tuple[UnitSum, ...]
    """The longest exposed time first, then the longest compute."""

    @property
    def length_ns(self) -> int:
        """The length of the range."""
        return self.end_ns - self.start_ns


def sum_range(tracks: TrackSet, asked: SummedRange) -> RangeSums | None:
    """Sum the times in a range; None if its rank is not drawn."""
    drawn = tracks.timeline.find_rank(asked.rank)
    if drawn is None:
        return None
    window = drawn.window
    start_ns, end_ns = max(asked.start_ns, window.start_ns), min(asked.end_ns, window.end_ns)
    spans = _clip(drawn.layout.timed_spans, start_ns - drawn.shift_ns, end_ns - drawn.shift_ns)
    lanes = np.array([lane.track for lane in drawn.layout.lanes])
    is_on_clock = lanes[spans.lane] == Track.CLOCK
    on_clock, in_flight = spans.where(is_on_clock), spans.where(~is_on_clock)
    by_look = _total_by(on_clock.look, on_clock, len(_LABELS))
    rest_ns = max(end_ns - start_ns, 0) - int(by_look.sum())
    by_look[_OTHER] += rest_ns
    return RangeSums(
        rank=asked.rank,
        start_ns=start_ns,
        end_ns=max(end_ns, start_ns),
        exposed_ns=int(by_look[_EXPOSED].sum()),
        kinds=(
            *_kinds(dict(enumerate(by_look.tolist())), is_on_clock=True),
            *_kinds(
                {
                    look: _covered_ns(in_flight.where(in_flight.look == look))
                    for look in np.unique(in_flight.look).tolist()
                },
                is_on_clock=False,
            ),
        ),
        units=_sum_units(tracks, drawn, on_clock, in_flight),
    )


def _clip(spans: Spans, start_ns: int, end_ns: int) -> Spans:
    """The parts of the spans inside a range."""
    starts, ends = np.maximum(spans.start_ns, start_ns), np.minimum(spans.end_ns, end_ns)
    return replace(spans, start_ns=starts, end_ns=ends).where(ends > starts)


def _total_by(keys: NDArray[np.int8], spans: Spans, num_keys: int) -> NDArray[np.int64]:
    """The durations of the spans, summed by key; shape (num_keys,)."""
    totals = np.zeros(num_keys, dtype=np.int64)
    np.add.at(totals, keys, spans.end_ns - spans.start_ns)
    return totals


def _total_ns(spans: Spans) -> int:
    return int((spans.end_ns - spans.start_ns).sum())


def _covered_ns(spans: Spans) -> int:
    return Intervals.of(spans.start_ns, spans.end_ns).duration_ns


def _kinds(by_look: Mapping[int, int], *, is_on_clock: bool) -> list[KindSum]:
    kinds = [
        KindSum(_LABELS[look], duration_ns, is_on_clock)
        for look, duration_ns in by_look.items()
        if duration_ns
    ]
    return sorted(kinds, key=lambda kind: -kind.duration_ns)


def _sum_units(
    tracks: TrackSet, drawn: DrawnRank, on_clock: Spans, in_flight: Spans
) -> tuple[UnitSum, ...]:
    names = tracks.names
    owners, travelling = drawn.events.unit[on_clock.event], drawn.events.unit[in_flight.event]
    is_compute, is_exposed = np.isin(on_clock.look, _COMPUTE), np.isin(on_clock.look, _EXPOSED)
    rows = [
        UnitSum(
            names.get(unit),
            _total_ns(on_clock.where(is_compute & (owners == unit))),
            _total_ns(on_clock.where(is_exposed & (owners == unit))),
            _covered_ns(in_flight.where(travelling == unit)),
        )
        for unit in np.union1d(owners, travelling).tolist()
    ]
    timed = [row for row in rows if row.compute_ns or row.exposed_ns or row.in_flight_ns]
    return tuple(sorted(timed, key=lambda row: (-row.exposed_ns, -row.compute_ns)))
