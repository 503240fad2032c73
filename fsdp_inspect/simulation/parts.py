"""Compute the memory and time of a part of a recorded unit that a plan makes a separate unit.

A memory step records the first use of each parameter in each pass of a unit, the memory at that
moment, and the peak until the next use. A part owns the moments from the first use of its own
parameter to the first use of another part's parameter. The moments before the first use belong to
the first part, and those after the last use belong to the last part.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class FirstUse:
    """The first use of a parameter in a pass; bytes above the pass's start, no communication."""

    parameter: str
    level: int
    """Allocated bytes at that moment."""
    high: int
    """The peak from then until the next use, or until the pass's end."""
    time_ns: int = 0
    """Time in the memory step, whose operations take longer than in other steps."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of memory in a pass of a unit."""

    uses: tuple[FirstUse, ...]
    """The first uses, in order."""
    end: int
    """Level at the pass's end."""
    high: int
    """The peak of the whole pass."""
    end_ns: int = 0


@dataclass(frozen=True, slots=True)
class PartMoments:
    """Consecutive moments of a part; bytes above the pass's start."""

    start: int
    end: int
    high: int
    duration_ns: int
    """From its first use on: waits for communication come before."""


def change_of(course: Course, own: Collection[str]) -> int:
    """Bytes that a part leaves; over all parts they add up to the course's end."""
    return sum(stretch.end - stretch.start for stretch in _stretches(course, own))


def rise_of(course: Course, own: Collection[str], *, unused: int = 0) -> int:
    """The rise of memory above a part's own start, bytes.

    Args:
        course: The course of the whole unit.
        own: The part's parameters.
        unused: The result if the pass uses none of them, as in the backward of an embedding.
    """
    rises = (stretch.high - stretch.start for stretch in _stretches(course, own))
    return max(rises, default=unused)


def time_share_of(course: Course, own: Collection[str]) -> float | None:
    """The fraction of a pass's time that a part takes; None if the pass took no time."""
    total = course.end_ns - course.uses[0].time_ns if course.uses else 0
    if total <= 0:
        return None
    return sum(stretch.duration_ns for stretch in _stretches(course, own)) / total


def _stretches(course: Course, own: Collection[str]) -> Iterator[PartMoments]:
    """The moments of the part that owns the given parameters."""
    uses = course.uses
    levels = [0, *(use.level for use in uses[1:]), course.end]
    times = [*(use.time_ns for use in uses), course.end_ns]
    highs = _highs(course)
    places = range(len(uses))
    for is_own, several in groupby(places, key=lambda place: uses[place].parameter in own):
        run: Sequence[int] = list(several)
        if is_own:
            start, end = levels[run[0]], levels[run[-1] + 1]
            high = max(start, end, *(highs[place] for place in run))
            yield PartMoments(start, end, high, times[run[-1] + 1] - times[run[0]])


def _highs(course: Course) -> list[int]:
    """The peak between each use and the next; the time before the first use belongs to it."""
    highs = [use.high for use in course.uses]
    if highs and course.high > max(highs):
        highs[0] = course.high
    return highs
