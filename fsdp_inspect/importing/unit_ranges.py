"""Find FSDP's profiler ranges in a trace, each with its unit and activity."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.kineto_events import Category, KinetoTrace
from fsdp_inspect.trace.codes import NO_UNIT

# --- Parse the names of FSDP's profiler ranges to a unit and an activity.
#
# FSDP2 names its ranges `FSDP::activity (unit)`. The root has no name, a prefetch has the name
# `FSDP::forward_prefetch for unit`, and a module with several groups adds ` [pg=size]`. The set of
# ranges differs between versions of torch (checked: 2.6 to 2.15), so the import depends on no
# single range. FSDP1's ranges name no unit.
#
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py.

_PREFIX = "FSDP::"
_FSDP1_PREFIX = "FullyShardedDataParallel."
_LABEL = re.compile(
    r"FSDP::(?P<what>\w+)"
    r"(?: for (?P<target>.*?)| \((?P<fqn>.*)\))?"
    r"(?: \[pg=(?P<group>\d+)\])?\s*"
)


class RangeKind(Enum):
    """The activity of a range; it belongs to a unit unless stated otherwise."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    """Accumulating and resharding, after the unit's own backward."""
    ALL_GATHER = "all_gather"
    COPY_OUT = "all_gather_copy_out"
    REDUCE = "post_backward_reduce"
    PREFETCH = "prefetch"
    """Contains the all-gather of the named unit, which another unit issues."""
    ROOT_FORWARD = "root_pre_forward"
    """Belongs to no unit."""
    ROOT_BACKWARD = "root_post_backward_callback"
    """Belongs to no unit."""
    OTHER = "other"


_ACTIVITIES = {
    "pre_forward": RangeKind.PRE_FORWARD,
    "post_forward": RangeKind.POST_FORWARD,
    "pre_backward": RangeKind.PRE_BACKWARD,
    "post_backward_accumulate": RangeKind.POST_BACKWARD,
    "post_backward_reshard": RangeKind.POST_BACKWARD,
    "post_backward_rs_wait": RangeKind.OTHER,
    "all_gather": RangeKind.ALL_GATHER,
    "all_gather_copy_out": RangeKind.COPY_OUT,
    "post_backward_reduce": RangeKind.REDUCE,
    "forward_prefetch": RangeKind.PREFETCH,
    "backward_prefetch": RangeKind.PREFETCH,
    "root_pre_forward": RangeKind.ROOT_FORWARD,
    "root_post_backward_callback": RangeKind.ROOT_BACKWARD,
}
_OF_NO_UNIT = frozenset({RangeKind.ROOT_FORWARD, RangeKind.ROOT_BACKWARD, RangeKind.OTHER})

_FSDP1_ACTIVITIES = {
    "_pre_forward": RangeKind.PRE_FORWARD,
    "_post_forward": RangeKind.POST_FORWARD,
    "_pre_backward_hook": RangeKind.PRE_BACKWARD,
    "_post_backward_hook": RangeKind.REDUCE,
    "_pre_forward_prefetch": RangeKind.PREFETCH,
    "_pre_backward_prefetch": RangeKind.PREFETCH,
    "_post_backward_prefetch": RangeKind.PREFETCH,
    "_root_pre_forward": RangeKind.ROOT_FORWARD,
    "_post_backward_final_callback": RangeKind.ROOT_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class Label:
    """The parsed name of a range."""

    activity: RangeKind
    unit: str | None
    """The unit's fqn, empty for the root, with ` [pg=size]` if several groups share it. None for
    ranges that belong to no unit, and for FSDP1, whose ranges name no unit."""
    is_backward: bool
    is_fsdp1: bool = False


def parse_label(name: str) -> Label | None:
    """Parse the name of a range; None if it is not FSDP's.

    >>> parse_label("FSDP::all_gather (layers.0)").unit
    'layers.0'
    >>> parse_label("FSDP::backward_prefetch for ").unit
    ''
    """
    if name.startswith(_FSDP1_PREFIX):
        return _parse_fsdp1(name.removeprefix(_FSDP1_PREFIX))
    found = _LABEL.fullmatch(name) if name.startswith(_PREFIX) else None
    if found is None:
        return None
    what = found["what"]
    activity = _ACTIVITIES.get(what, RangeKind.OTHER)
    unit = None
    if activity not in _OF_NO_UNIT:
        group = f" [pg={found['group']}]" if found["group"] else ""
        unit = f"{found['target'] or found['fqn'] or ''}{group}"
    return Label(activity, unit, "backward" in what)


def parse_labels(names: Sequence[str]) -> dict[int, Label]:
    """The labels of all names of FSDP ranges, by index."""
    found = {position: parse_label(name) for position, name in enumerate(names)}
    return {position: label for position, label in found.items() if label is not None}


def _parse_fsdp1(what: str) -> Label | None:
    activity = _FSDP1_ACTIVITIES.get(what)
    if activity is None:
        return None
    return Label(activity, None, "backward" in what, is_fsdp1=True)


Int64Array = NDArray[np.int64]

_CODES = {activity: code for code, activity in enumerate(RangeKind)}


@dataclass(frozen=True, slots=True)
class UnitRanges:
    """FSDP's ranges, by start; arrays of shape (n,)."""

    ranges: HostRanges
    activity: Int64Array
    unit: Int64Array
    """Index into `units`; -1: none."""
    is_backward: NDArray[np.bool_]
    """Whether the range's name contains backward."""
    units: tuple[str, ...]
    """Names in the order of the first forward."""
    is_fsdp1: bool

    @classmethod
    def of(cls, trace: KinetoTrace) -> "UnitRanges":
        """Find all FSDP ranges of a trace."""
        annotations = trace.events[Category.ANNOTATION]
        labels = parse_labels(trace.names)
        chosen = np.flatnonzero(np.isin(annotations.name, list(labels)))
        chosen = chosen[np.argsort(annotations.start_ns[chosen], kind="stable")]
        events = annotations.where(chosen)
        used, first = np.unique(events.name, return_index=True)
        in_order = [labels[name] for name in used[np.argsort(first)].tolist()]
        units = _units_in_order(in_order)
        places: dict[str | None, int] = {unit: place for place, unit in enumerate(units)}
        return cls(
            ranges=HostRanges(events.thread, events.start_ns, events.end_ns),
            activity=_by_label(events.name, labels, lambda one: _CODES[one.activity]),
            unit=_by_label(events.name, labels, lambda one: places.get(one.unit, NO_UNIT)),
            is_backward=_by_label(events.name, labels, lambda one: int(one.is_backward)) > 0,
            units=units,
            is_fsdp1=any(label.is_fsdp1 for label in in_order),
        )

    def __len__(self) -> int:
        return len(self.ranges)

    def which(self, *activities: RangeKind) -> Int64Array:
        """Indices of the ranges with one of these activities."""
        return np.flatnonzero(np.isin(self.activity, [_CODES[one] for one in activities]))

    def around(
        self, thread: NDArray[np.int32], time_ns: Int64Array, *activities: RangeKind
    ) -> Int64Array:
        """The innermost range with one of these activities around each moment; -1: none."""
        chosen = self.which(*activities)
        found = self.ranges.where(chosen).innermost(thread, time_ns)
        return _through(chosen, found)

    def before(
        self, thread: NDArray[np.int32], time_ns: Int64Array, *activities: RangeKind
    ) -> Int64Array:
        """The last range with one of these activities, started before each moment; -1: none."""
        chosen = self.which(*activities)
        return _through(chosen, self.ranges.where(chosen).latest(thread, time_ns))

    def unit_of(self, positions: Int64Array) -> Int64Array:
        """The units of ranges; -1 without a range."""
        if len(self) == 0:
            return np.full(len(positions), NO_UNIT, dtype=np.int64)
        return np.where(positions == NOWHERE, NO_UNIT, self.unit[np.maximum(positions, 0)])

    def num_passes(self, time_ns: Int64Array) -> Int64Array:
        """Number of forwards of the whole model that have started at each moment."""
        roots = self.ranges.start_ns[self.which(RangeKind.ROOT_FORWARD)]
        return np.searchsorted(np.sort(roots), time_ns, side="right").astype(np.int64)

    def forwards(self) -> "UnitSpans":
        """The forward of each unit, from its parameters being ready to its output."""
        return self._spans(self.which(RangeKind.PRE_FORWARD), self.which(RangeKind.POST_FORWARD))

    def backwards(self) -> "UnitSpans":
        """The backward of each unit, from its parameters being ready to its complete gradients."""
        return self._spans(
            self.which(RangeKind.PRE_BACKWARD),
            self.which(RangeKind.POST_BACKWARD, RangeKind.REDUCE),
        )

    def _spans(self, opening: Int64Array, closing: Int64Array) -> "UnitSpans":
        """Spans from the end of each opening range to the next closing range of the same unit."""
        threads, starts, ends, units = [], [], [], []
        for unit in range(len(self.units)):
            opens = opening[self.unit[opening] == unit]
            closes = np.sort(self.ranges.start_ns[closing[self.unit[closing] == unit]])
            begin = self.ranges.end_ns[opens]
            place = np.searchsorted(closes, begin, side="left")
            # A unit of several modules has an opening range for each module: the first one counts.
            closing_place, first = np.unique(place, return_index=True)
            first = first[closing_place < len(closes)]
            threads.append(self.ranges.thread[opens][first])
            starts.append(begin[first])
            ends.append(closes[place[first]])
            units.append(np.full(len(first), unit, dtype=np.int64))
        if not units:
            return UnitSpans(HostRanges.empty(), np.empty(0, dtype=np.int64))
        ranges = HostRanges(*(np.concatenate(one) for one in (threads, starts, ends)))
        return UnitSpans(ranges, np.concatenate(units))


@dataclass(frozen=True, slots=True)
class UnitSpans:
    """Spans of host time that belong to units; `unit` has shape (n,)."""

    ranges: HostRanges
    unit: Int64Array

    def unit_around(self, thread: NDArray[np.int32], time_ns: Int64Array) -> Int64Array:
        """The unit of the innermost span around each moment; -1: none."""
        found = self.ranges.innermost(thread, time_ns)
        if len(self.unit) == 0:
            return found
        return np.where(found == NOWHERE, NO_UNIT, self.unit[np.maximum(found, 0)])


def _through(chosen: Int64Array, found: Int64Array) -> Int64Array:
    """Convert indices into a selection to indices into the whole."""
    if len(chosen) == 0:
        return found
    return np.where(found == NOWHERE, NOWHERE, chosen[np.maximum(found, 0)])


def _units_in_order(labels: Collection[Label]) -> tuple[str, ...]:
    """Units by their first forward; units without a forward come last."""
    forwards = [one.unit for one in labels if one.activity is RangeKind.PRE_FORWARD]
    others = [one.unit for one in labels]
    return tuple(dict.fromkeys(unit for unit in (*forwards, *others) if unit is not None))


def _by_label(
    names: NDArray[np.int32], labels: Mapping[int, Label], value: Callable[[Label], int]
) -> Int64Array:
    used, place = np.unique(names, return_inverse=True)
    values = [value(labels[name]) for name in used.tolist()]
    return np.array(values, dtype=np.int64)[place]
