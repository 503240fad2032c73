"""What does a part of a recorded unit hold, if a plan makes it a unit by itself?

A memory step tells when each pass of a unit first used each of its parameters, what was alive
then, and how high memory rose before the next one. A part's own moments are those from the first
use of a parameter of its own to the first use of another part's; what came before the first use of
all belongs to the part that it leads to, what comes behind the last one to the part that it ends.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class FirstUse:
    """A pass of a unit first uses a parameter; bytes above the pass's start, no communication."""

    parameter: str
    level: int
    """Alive at that moment."""
    high: int
    """The most that was alive from then until the next use, or the pass's end."""
    time_ns: int = 0
    """Of the memory step, whose operations take longer than those of other steps."""


@dataclass(frozen=True, slots=True)
class Course:
    """How memory goes up and down in a pass of a unit."""

    uses: tuple[FirstUse, ...]
    """In order."""
    end: int
    """Level at the pass's end."""
    high: int
    """The most in the whole pass."""
    end_ns: int = 0


@dataclass(frozen=True, slots=True)
class PartMoments:
    """The moments of a part that follow on each other; bytes above the pass's start."""

    start: int
    end: int
    high: int
    duration_ns: int
    """From its first use on: communication that is waited for comes before."""


def change_of(course: Course, own: Collection[str]) -> int:
    """What a part leaves behind, bytes; those of all parts add up to the course's end."""
    return sum(stretch.end - stretch.start for stretch in _stretches(course, own))


def rise_of(course: Course, own: Collection[str], *, unused: int = 0) -> int:
    """How far memory rises above a part's own start, bytes.

    Args:
        course: Of the whole unit.
        own: The part's parameters.
        unused: The answer where the pass uses none of them, as a backward does an embedding's.
    """
    rises = (stretch.high - stretch.start for stretch in _stretches(course, own))
    return max(rises, default=unused)


def time_share_of(course: Course, own: Collection[str]) -> float | None:
    """The share of a part in the time that a pass took; None where it took none."""
    total = course.end_ns - course.uses[0].time_ns if course.uses else 0
    if total <= 0:
        return None
    return sum(stretch.duration_ns for stretch in _stretches(course, own)) / total


def _stretches(course: Course, own: Collection[str]) -> Iterator[PartMoments]:
    """The moments of the part that has some of the parameters."""
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
    """The most between each use and the next; what came before the first goes with it."""
    highs = [use.high for use in course.uses]
    if highs and course.high > max(highs):
        highs[0] = course.high
    return highs
