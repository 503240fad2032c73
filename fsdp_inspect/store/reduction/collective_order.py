"""Find the first collective in which the ranks of a communicator differ.

FSDP2 pairs collectives by their position in a communicator, not by unit. A rank that leaves one out
therefore computes with the parameters of another unit, without an error while the sizes agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.black_box import BlackBox, CodePlace
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase


class Issued(NamedTuple):
    """One collective as a rank issued it."""

    kind: EventKind
    unit: int
    """-1: not issued by FSDP."""
    bytes: int
    dtype: int
    step: int
    phase: Phase
    sequence: int
    """Position in the communicator, from 0."""
    place: CodePlace | None
    has_finished: bool
    is_background: bool = False
    """Whether a thread next to the training issued it."""

    @property
    def signature(self) -> tuple[int, int, int, int]:
        """The fields that must be equal on all ranks; the sizes of an all-to-all may differ."""
        size = 0 if self.kind == EventKind.ALL_TO_ALL else self.bytes
        return int(self.kind), self.unit, size, self.dtype


class Difference(StrEnum):
    """The difference between the order of the culprits and that of the other ranks."""

    SKIPPED = "skipped"
    """They left out a collective that the others issued."""
    EXTRA = "extra"
    """They issued a collective that the others did not."""
    SWAPPED = "swapped"
    """They issued two collectives in the other order."""
    SIZE = "size"
    """The same collective with another message size."""
    DTYPE = "dtype"
    """The same collective in another dtype."""
    STEP = "step"
    """The same collective in another step: they did more or fewer backward passes or updates."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class OrderDifference:
    """The first collective in which the ranks of a communicator differ."""

    communicator: str
    sequence: int
    """Its position in the communicator, from 0."""
    is_first: bool
    """False: the ranks already differed before the oldest recorded collective."""
    issued: tuple[tuple[tuple[int, ...], Issued], ...]
    """The collective that each set of ranks issued at this position; the largest set first. One
    set: see `is_unknown`."""
    culprits: tuple[int, ...]
    """The ranks that differ from the others; empty: unknown."""
    is_majority: bool
    """True: the culprits differ from most ranks. False: the culprits differ from their own previous
    step, and the others do not."""
    difference: Difference
    """Seen from the culprits; without culprits SIZE, DTYPE or OTHER."""
    num_since: int
    """Collectives that have finished on some rank since this position. Their results are wrong."""
    is_race: bool = False
    """Whether two threads of a rank issue collectives on this communicator, so that chance decides
    their order. Then no rank is a culprit."""
    branch: str = ""
    """The line of the training loop, `file:line`, that only the culprits reached, or that only they
    left out in this step; empty: they took the same lines."""

    @property
    def location(self) -> str:
        """The user's line where the culprits left the path of the others; empty if unknown."""
        mine = None if self.deviant is None else self.deviant.place
        places = [mine, self.usual.place]
        if self.difference is Difference.SKIPPED:  # the line of the next collective tells nothing
            places.reverse()
        known = [str(place) for place in places if place is not None]
        return self.branch or next(iter(known), "")

    @property
    def is_unknown(self) -> bool:
        """Whether the ranks agree again: only the digests show that they differed earlier."""
        return len(self.issued) == 1

    @property
    def step(self) -> int:
        """The step of the difference: the earliest in which a rank issued this position.

        A rank that leaves out the end of a step is a step ahead. A rank that adds a collective
        at the end of a step is a step behind.
        """
        return min(issued.step for _, issued in self.issued)

    @property
    def usual(self) -> Issued:
        """The collective of the other ranks; without culprits, of the largest set."""
        return next(
            (each for ranks, each in self.issued if not set(ranks) <= set(self.culprits)),
            self.issued[0][1],
        )

    @property
    def deviant(self) -> Issued | None:
        """The collective of the first culprit; None without culprits."""
        first = self.culprits[:1]
        return next((each for ranks, each in self.issued if {*first} & {*ranks}), None)


def find_order_differences(boxes: Mapping[int, BlackBox]) -> list[OrderDifference]:
    """Find the first difference of each communicator that has one; the oldest step first.

    Args:
        boxes: Black boxes by rank; ranks may be missing.
    """
    found = [find_difference(boxes, name) for name in members_by_communicator(boxes)]
    return sorted(
        (each for each in found if each is not None),
        key=lambda each: each.step,
    )


def members_by_communicator(boxes: Mapping[int, BlackBox]) -> dict[str, tuple[int, ...]]:
    """The ranks of each communicator that any black box lists."""
    groups = (group for box in boxes.values() for group in box.groups.values())
    return {group.name: group.ranks for group in groups}


def find_difference(boxes: Mapping[int, BlackBox], name: str) -> OrderDifference | None:
    """Find the first difference of a communicator; None if the recorded collectives agree.

    Args:
        boxes: Black boxes by rank; ranks may be missing.
        name: The communicator.
    """
    rows = {rank: box.of_group(name) for rank, box in boxes.items()}
    rows = {rank: each for rank, each in rows.items() if len(each)}
    if len(rows) < 2:
        return None
    position, is_first = _first_position(list(rows.values()))
    if position is None:
        return None
    num_ranks = len(rows)
    rows = {rank: each for rank, each in rows.items() if _last(each) >= position}
    reader = _Reader(boxes, rows)
    sets = reader.sets_at(position)
    is_step = len(sets) == 1
    if is_step:
        sets = reader.sets_at(position, by_step=True)
    if len(sets) == 1 and is_first:
        return None
    is_race = any(_is_race(each, position) for each in rows.values())
    is_open = is_race or len(sets) == 1
    culprits, is_majority = ([], False) if is_open else _culprits(sets, reader, position, num_ranks)
    others = [rank for rank in rows if rank not in culprits]
    difference = Difference.OTHER
    if is_step and len(sets) > 1:
        difference = Difference.STEP
    elif culprits and others:
        difference = _classify(reader, culprits[0], others[0], position)
    elif not is_open:
        classified = _classify(reader, sets[0][0], sets[1][0], position)
        if classified in (Difference.SIZE, Difference.DTYPE):
            difference = classified
    return OrderDifference(
        communicator=name,
        sequence=position,
        is_first=is_first,
        issued=tuple((tuple(ranks), reader.at(ranks[0], position)) for ranks in sets),
        culprits=tuple(culprits),
        is_majority=is_majority,
        difference=difference,
        num_since=max(_num_finished(each, position) for each in rows.values()),
        is_race=is_race,
        branch=_find_branch(boxes, reader, culprits, others, position),
    )


def _find_branch(
    boxes: Mapping[int, BlackBox],
    reader: _Reader,
    culprits: Sequence[int],
    others: Sequence[int],
    position: int,
) -> str:
    """See `OrderDifference.branch`."""
    if not culprits or not others:
        return ""
    here, usual = reader.at(culprits[0], position), reader.at(others[0], position)
    if here.place is None or usual.place is None:
        return ""
    theirs = {line for rank in others for line in _loop_lines(boxes[rank])}
    for earlier in reader.places_since(culprits[0], here.step - 1, position):
        # The collectives of an extra pass may pair with equal ones of the next step at first.
        if earlier.loop_line not in theirs:
            return earlier.loop_line
    is_left_out = _classify(reader, culprits[0], others[0], position) in _LEFT_OUT
    if is_left_out and usual.place.loop_line not in _loop_lines(boxes[culprits[0]], here.step):
        return usual.place.loop_line
    return ""


_LEFT_OUT = (Difference.SKIPPED, Difference.OTHER)
"""Differences in which the culprits may have left out what the others did."""


def _loop_lines(box: BlackBox, step: int | None = None) -> set[str]:
    """The lines of the loop that led to the collectives of a step; None: of all steps."""
    rows = box.entries if step is None else box.entries[box.entries["step"] == step]
    places = (box.places.get(number) for number in set(rows["place"].tolist()))
    return {place.loop_line for place in places if place is not None}


def are_equal(boxes: Mapping[int, BlackBox], name: str) -> bool:
    """Whether all ranks issued the same collectives up to the newest position that all recorded.

    The digest of a position covers all positions before it. False also means: cannot tell.

    Args:
        boxes: Black boxes by rank.
        name: The communicator.
    """
    rows = [box.of_group(name) for box in boxes.values()]
    if not rows or not all(map(len, rows)):
        return False
    newest = min(int(each["sequence"][-1]) for each in rows)
    digests = [each["digest"][each["sequence"] == newest] for each in rows]
    return all(len(each) == 1 and each[0] == digests[0][0] for each in digests)


def find_race(rows: NDArray[np.void], step: int) -> NDArray[np.void]:
    """The collectives of background threads around a step; empty without those of the training.

    Args:
        rows: The entries of one communicator in a black box.
        step: The step.
    """
    near = rows[np.abs(rows["step"] - step) <= 1]
    background: NDArray[np.void] = near[near["state"] == 1]
    return background[:0] if len(background) == len(near) else background


def _is_race(rows: NDArray[np.void], position: int) -> bool:
    """Whether the training thread and another thread issued collectives around a position."""
    steps = rows["step"][rows["sequence"] == position]
    return len(find_race(rows, steps.max(initial=-2))) > 0


def _first_position(rows: Sequence[NDArray[np.void]]) -> tuple[int | None, bool]:
    """The first position with different digests, and whether all earlier ones are equal.

    Ranks that have not reached a position are not compared there.
    """
    ranks = [(each["sequence"].copy(), each["digest"]) for each in rows]
    first = low = max(int(numbers[0]) for numbers, _ in ranks)
    for high in sorted({int(numbers[-1]) for numbers, _ in ranks}):
        ranks = [each for each in ranks if each[0][-1] >= high]
        if high < low or len(ranks) < 2:
            continue
        digests = [
            digest[slice(*np.searchsorted(numbers, (low, high + 1)))] for numbers, digest in ranks
        ]
        shortest = min(map(len, digests))
        table = np.stack([each[:shortest] for each in digests])
        differs = np.flatnonzero((table != table[0]).any(axis=0))
        if len(differs):
            position = low + int(differs[0])
            return position, position > first or first == 0
        low = high + 1
    return None, False


def _last(rows: NDArray[np.void]) -> int:
    return int(rows["sequence"][-1])


def _num_finished(rows: NDArray[np.void], position: int) -> int:
    return int(((rows["sequence"] >= position) & (rows["finished_ns"] != 0)).sum())


class _Reader:
    """Rows of several ranks, by rank and position."""

    def __init__(self, boxes: Mapping[int, BlackBox], rows: Mapping[int, NDArray[np.void]]) -> None:
        self._boxes = boxes
        self._rows = rows

    def at(self, rank: int, position: int) -> Issued:
        """The collective of a rank at a position that it has reached."""
        found = self.maybe_at(rank, position)
        assert found is not None
        return found

    def maybe_at(self, rank: int, position: int) -> Issued | None:
        """The collective of a rank at a position; None: not reached, or overwritten."""
        return find_issued(self._boxes[rank], self._rows[rank], position)

    def sets_at(self, position: int, *, by_step: bool = False) -> list[list[int]]:
        """The ranks with equal collectives at a position, the largest set first.

        Args:
            position: Position in the communicator, from 0.
            by_step: Whether the step must be equal too.
        """
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self._rows):
            issued = self.maybe_at(rank, position)
            if issued is not None:
                step = (issued.step,) if by_step else ()
                sets.setdefault((*issued.signature, *step), []).append(rank)
        return sorted(sets.values(), key=lambda ranks: (-len(ranks), ranks[0]))

    def departs(self, rank: int, position: int) -> bool | None:
        """Whether a rank's order up to a position differs from its own previous step.

        None: the previous step is overwritten.
        """
        here = self.maybe_at(rank, position)
        if here is None:
            return None
        before = self._signatures(rank, here.step - 1)
        now = self._signatures(rank, here.step, last=position)
        if not before or len(now) > len(before):
            return None if not before else True
        return now != before[: len(now)]

    def places_since(self, rank: int, step: int, position: int) -> list[CodePlace]:
        """The places of a rank's collectives from a step to a position, in order."""
        rows = self._rows[rank]
        numbers = rows["place"][(rows["step"] >= step) & (rows["sequence"] <= position)]
        places = self._boxes[rank].places
        return [places[number] for number in dict.fromkeys(numbers.tolist()) if number in places]

    def _signatures(self, rank: int, step: int, last: int | None = None) -> list[tuple[int, ...]]:
        rows = self._rows[rank]
        rows = rows[rows["step"] == step]
        if last is not None:
            rows = rows[rows["sequence"] <= last]
        return [read_entry(self._boxes[rank], row).signature for row in rows]


def find_issued(box: BlackBox, rows: NDArray[np.void], position: int) -> Issued | None:
    """Find the collective at a position of a communicator; None: not reached, or overwritten.

    Args:
        box: The black box of the rank.
        rows: Its entries of the communicator, in the order of issue.
        position: Position in the communicator, from 0.
    """
    place = np.searchsorted(rows["sequence"], position)
    if place >= len(rows) or int(rows["sequence"][place]) != position:
        return None
    return read_entry(box, rows[place])


def find_usual_place(box: BlackBox, kind: EventKind) -> str:
    """The line that issues most collectives of a kind without a unit; empty: no line does."""
    entries = box.entries
    own = entries["place"][(entries["unit"] == NO_UNIT) & (entries["kind"] == kind)]
    if not len(own):
        return ""
    numbers, counts = np.unique(own, return_counts=True)
    place = box.places.get(int(numbers[counts.argmax()]))
    return str(place) if place is not None and 2 * counts.max() > len(own) else ""


def read_entry(box: BlackBox, row: np.void) -> Issued:
    """An entry of a black box as a record."""
    return Issued(
        kind=_KINDS.get(int(row["kind"]), EventKind.OTHER_COLLECTIVE),
        unit=int(row["unit"]),
        bytes=int(row["bytes"]),
        dtype=int(row["dtype"]),
        step=int(row["step"]),
        phase=phase_of(int(row["phase"])),
        sequence=int(row["sequence"]),
        place=box.places.get(int(row["place"])),
        has_finished=int(row["finished_ns"]) != 0,
        is_background=int(row["state"]) == 1,
    )


_KINDS = {int(kind): kind for kind in EventKind}
_PHASES = {int(phase): phase for phase in Phase}


def phase_of(code: int) -> Phase:
    """The phase of a code in a black box; `outside` for an unknown code of another version."""
    return _PHASES.get(code, Phase.OUTSIDE)


def _culprits(
    sets: list[list[int]], reader: _Reader, position: int, num_ranks: int
) -> tuple[list[int], bool]:
    """The ranks that differ from most ranks, or else those that differ from their previous step."""
    if len(sets[0]) * 2 > num_ranks:
        return sorted(rank for ranks in sets[1:] for rank in ranks), True
    departed = [reader.departs(ranks[0], position) for ranks in sets]
    if Counter(departed)[True] == 1 and Counter(departed)[False] == len(sets) - 1:
        return sets[departed.index(True)], False
    return [], False


def _classify(reader: _Reader, culprit: int, other: int, position: int) -> Difference:
    here, usual = reader.at(culprit, position), reader.at(other, position)
    if (of_one_unit := _size_or_dtype(here, usual)) is not None:
        return of_one_unit
    next_here, next_usual = _after(reader, culprit, position), _after(reader, other, position)
    is_skip = _starts_like([here, *next_here], next_usual)
    is_extra = _starts_like([usual, *next_usual], next_here)
    if _are_swapped(here, usual, next_here, next_usual):
        return Difference.SWAPPED
    if is_skip and not is_extra:
        return Difference.SKIPPED
    if is_extra and not is_skip:
        return Difference.EXTRA
    is_same_call = here.place is not None and here.place == usual.place
    if here.kind == usual.kind and here.unit == usual.unit and is_same_call:
        return Difference.DTYPE if here.dtype != usual.dtype else Difference.SIZE
    return Difference.OTHER


def _size_or_dtype(one: Issued, other: Issued) -> Difference | None:
    """The difference of two messages of one unit; None: they are not the same collective."""
    if (one.kind, one.unit) != (other.kind, other.unit) or one.unit == NO_UNIT:
        return None
    return Difference.DTYPE if one.dtype != other.dtype else Difference.SIZE


_AHEAD = 3


def _after(reader: _Reader, rank: int, position: int) -> list[Issued]:
    found = (reader.maybe_at(rank, position + ahead) for ahead in range(1, _AHEAD + 1))
    return [each for each in found if each is not None]


def _starts_like(one: Sequence[Issued], other: Sequence[Issued]) -> bool:
    """Whether two sequences begin with the same collectives, as far as both are recorded."""
    pairs = list(zip(_signatures(one), _signatures(other), strict=False))
    return bool(pairs) and all(mine == theirs for mine, theirs in pairs)


def _signatures(issued: Iterable[Issued]) -> list[tuple[int, ...]]:
    return [each.signature for each in issued]


def _are_swapped(
    here: Issued, usual: Issued, next_here: Sequence[Issued], next_usual: Sequence[Issued]
) -> bool:
    if not next_here or not next_usual:
        return False
    return here.signature == next_usual[0].signature and usual.signature == next_here[0].signature
