"""Combine the steps of one drawing; each is a block of lanes on the shared axis.

Every step begins at 0, so steps of different runs are aligned at their starts. Events and units
have one sequence of numbers over all sets of a drawing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.memory.peak import memory_parts
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.result_types import RunManifest, RunSource
from fsdp_inspect.trace.codes import COPIES, EventFlag, EventKind, StepPart
from fsdp_inspect.trace.tables import is_any_of
from fsdp_inspect_app.timeline.rank_layout import LOOKS
from fsdp_inspect_app.timeline.tracks import DrawnRank, StepTimeline

# --- Parse a search of the timeline: ranks, kinds of time and units, in one text.
#
# A search names any of a rank, a kind and a unit, in this order, and all must match:
#
# layers.3                        the units of that name, or else those that contain it
# all-gather                      the kinds whose names contain it: `exposed` finds all waits
# rank 2                          everything on rank 2
# rank 2 all-gather layers.3

_RANK = re.compile(r"rank\s+([0-9]{1,9})(?:\s+|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Search:
    """What a search asks for; None: anything."""

    rank: int | None
    looks: frozenset[int] | None
    """Indices of kinds of time."""
    units: frozenset[int] | None
    """Positions among the names of units."""

    @property
    def is_empty(self) -> bool:
        """Whether the search has a text that nothing is named by."""
        return self.looks == frozenset() or self.units == frozenset()


def parse_search(text: str, labels: Sequence[str], names: Sequence[str]) -> Search | None:
    """Parse a search.

    Args:
        text: What the user typed.
        labels: The names of the kinds of time.
        names: The names of the units.

    Returns:
        None for an empty text.
    """
    rest = text.strip()
    if not rest:
        return None
    rank, match = None, _RANK.match(rest)
    if match is not None:
        rank, rest = int(match[1]), rest[match.end() :].strip()
    if not rest:
        return Search(rank, None, None)
    units = matching(names, rest)
    if units:
        return Search(rank, None, units)
    looks = matching(labels, rest)
    if looks:
        return Search(rank, looks, None)
    return _split(rank, rest, labels, names)


def _split(rank: int | None, rest: str, labels: Sequence[str], names: Sequence[str]) -> Search:
    """A kind, then a unit; of all places to split, the last one with both."""
    words = rest.split()
    for place in range(len(words) - 1, 0, -1):
        looks = matching(labels, " ".join(words[:place]))
        units = matching(names, " ".join(words[place:]))
        if looks and units:
            return Search(rank, looks, units)
    return Search(rank, None, frozenset())


def matching(names: Sequence[str], query: str) -> frozenset[int]:
    """The positions of that name, or else of those that contain it, in any case."""
    wanted = query.strip().lower()
    lowered = [name.lower() for name in names]
    exact = frozenset(at for at, name in enumerate(lowered) if name == wanted)
    if exact or not wanted:
        return exact
    return frozenset(at for at, name in enumerate(lowered) if wanted in name)


_EVENT_NAME = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class TrackSet:
    """One step of one run, prepared for drawing. Callers cache it."""

    timeline: StepTimeline
    manifest: RunManifest
    """The manifest with the names of units and groups."""
    title: str = ""
    """The title above its lanes; required if a drawing has several sets."""

    @property
    def num_bytes(self) -> int:
        """The memory of the set."""
        return self.timeline.num_bytes

    @property
    def key(self) -> str:
        """The identity of the drawn step."""
        ranks = ",".join(str(one.rank) for one in self.timeline.ranks)
        return f"{self.manifest.run_id}/{self.timeline.step}/{ranks}/{self.title}"

    @property
    def unit_names(self) -> list[str]:
        """The names in the order of the manifest's units."""
        return [format_unit(unit.fqn) for unit in self.manifest.units]

    @property
    def names(self) -> dict[int, str]:
        """The names of the units by their indices in the run."""
        return dict(zip((unit.index for unit in self.manifest.units), self.unit_names, strict=True))

    def parse(self, query: str) -> Search | None:
        """Parse a search; None for an empty text."""
        return parse_search(query, [look.label for look in LOOKS], self.unit_names)

    def name_of_event(self, event: int) -> str:
        """The name of an event in an address: its rank, and its number among the rank's events."""
        drawn = self.timeline.rank_of(event)
        return f"{drawn.rank}-{event - drawn.first_event}"

    def find_event(self, name: str) -> "Place | None":
        """The event with such a name; None if it is not drawn."""
        match = _EVENT_NAME.fullmatch(name)
        if match is None:
            return None
        drawn, number = self.timeline.find_rank(int(match[1])), int(match[2])
        if drawn is None or number >= len(drawn.events):
            return None
        return Place(0, drawn.first_event + number)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an event in a drawing."""

    member: int
    """Index of its set."""
    event: int
    """Index of its event in the set's timeline."""


@dataclass(frozen=True, slots=True)
class SummedRange:
    """A range of the axis whose times are summed, on one rank of a set."""

    member: int
    rank: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Matches:
    """The result of a search."""

    place: Place | None
    """The place of the match; None: there is none."""
    number: int
    """The number of the match among those on its rank by time, from 1; 0: none."""
    total: int
    reason: str = ""
    """Without a match, the reason."""


@dataclass(frozen=True)
class Tracks:
    """The sets of one drawing."""

    members: Sequence[TrackSet]
    first_event: tuple[int, ...] = field(init=False)
    """The number of events before each set, then the number of all events."""
    first_lane: tuple[int, ...] = field(init=False)
    """The number of lanes above each set."""
    first_unit: tuple[int, ...] = field(init=False)
    """The number of units before each set."""

    def __post_init__(self) -> None:
        events = [member.timeline.num_events for member in self.members]
        lanes = [len(member.timeline.lanes) for member in self.members]
        units = [len(member.manifest.units) for member in self.members]
        object.__setattr__(self, "first_event", tuple(np.cumsum([0, *events]).tolist()))
        object.__setattr__(self, "first_lane", tuple(np.cumsum([0, *lanes]).tolist()))
        object.__setattr__(self, "first_unit", tuple(np.cumsum([0, *units]).tolist()))

    @property
    def key(self) -> str:
        """The identity of the drawing; the browser keeps its zoom while it stays the same."""
        return " | ".join(member.key for member in self.members)

    @property
    def end_ns(self) -> int:
        """The end of the longest step; the axis starts at 0."""
        return max(member.timeline.end_ns for member in self.members)

    @property
    def shown_ranks(self) -> list[tuple[int, DrawnRank]]:
        """The index of a set and one of its ranks, for all ranks of all sets, from the top."""
        return [
            (position, drawn)
            for position, member in enumerate(self.members)
            for drawn in member.timeline.ranks
        ]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """All blocks of the drawing, as set and rank; a request names a block by its position."""
        return [(position, drawn.rank) for position, drawn in self.shown_ranks]

    @property
    def num_events(self) -> int:
        """The number of events of all sets."""
        return self.first_event[-1]

    def place(self, number: int) -> Place:
        """The place of the event with that number in the drawing."""
        member = int(np.searchsorted(self.first_event, number, side="right")) - 1
        return Place(member, number - self.first_event[member])

    def number(self, place: Place) -> int:
        """The number of an event in the drawing."""
        return self.first_event[place.member] + place.event

    def find(self, query: str, *, after: Place | None, direction: int) -> Matches:
        """Find the next event that matches a search, by time.

        Without a rank in the search, only the rank of the start is searched.

        Args:
            query: See `search`.
            after: The start; None: the beginning of the first rank.
            direction: 1 forwards, -1 backwards, 0: the first event from the start.
        """
        reasons = []
        for offset in range(len(self.members)):
            place = after if offset == 0 else None
            start = after.member if after else 0
            member = (start + offset) % len(self.members)
            found = self._find_in(member, query, place, direction)
            if found.place is not None:
                return found
            reasons.append(found.reason)
        return Matches(None, 0, 0, reasons[0])

    def _find_in(self, member: int, query: str, after: Place | None, direction: int) -> Matches:
        tracks = self.members[member]
        search = tracks.parse(query)
        if search is None or search.is_empty:
            return Matches(None, 0, 0, "no such name")
        own_rank = tracks.timeline.rank_of(0 if after is None else after.event)
        drawn = own_rank if search.rank is None else tracks.timeline.find_rank(search.rank)
        if drawn is None:
            return Matches(None, 0, 0, f"rank {search.rank} is not shown")
        matches = _matching_events(tracks, search, drawn)
        if len(matches) == 0:
            return Matches(None, 0, 0, "nothing drawn")
        chosen = 0
        if after is not None and drawn is own_rank:
            own = after.event - drawn.first_event
            exact = np.flatnonzero(matches == own)
            if len(exact):
                chosen = int(exact[0]) + direction
            else:
                starts = drawn.events.start_ns
                later = int(np.searchsorted(starts[matches], starts[own]))
                chosen = later - 1 if direction < 0 else later
        chosen %= len(matches)
        place = Place(member, drawn.first_event + int(matches[chosen]))
        return Matches(place, chosen + 1, len(matches))


def _matching_events(tracks: TrackSet, search: Search, drawn: DrawnRank) -> NDArray[np.int64]:
    """The drawn events of a search on a rank, by start, without copies."""
    events, spans = drawn.events, drawn.layout.index.spans
    if search.looks is not None:
        spans = spans.where(np.isin(spans.look, list(search.looks)))
    is_drawn = np.zeros(len(events), dtype=bool)
    is_drawn[spans.event] = True
    wanted = is_drawn & ~is_any_of(events.kind, COPIES)
    if search.units is not None:
        indices = [tracks.manifest.units[position].index for position in search.units]
        wanted &= np.isin(events.unit, indices)
    matches = np.flatnonzero(wanted)
    return matches[np.argsort(events.start_ns[matches], kind="stable")]


# --- Find the steps of a rank that have events, and those with memory readings.
#
# Long runs keep the events of only some steps, and on CPU memory is read in memory steps only.


def find_drawable_steps(run: RunSource, *, rank: int) -> tuple[int, ...]:
    """The finished steps with recorded events of units, ascending."""
    events = run.events(rank, kinds=[EventKind.STEP])
    steps = events.step[(events.flags & EventFlag.PLAIN_STEP) == 0]
    return tuple(int(step) for step in np.unique(steps))


def find_sampled_steps(run: RunSource) -> tuple[int, ...]:
    """The steps in which any rank read its memory, ascending."""
    rows = memory_parts(run)
    return tuple(np.unique(rows.step[rows.kind == StepPart.PEAK_ALLOCATED]).tolist())
