"""Assign the events of a trace to steps: one step for the whole trace, or one per ProfilerStep.

On a device, a step ends when the last event that was issued in it has ended, as in a recorded run.
Events that the host issues ahead for the next step belong to the next step.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.kineto_events import Category, KinetoTrace
from fsdp_inspect.trace.intervals import Intervals

Int64Array = NDArray[np.int64]

_MARK = re.compile(r"ProfilerStep#(\d{1,9})")
_EVER = np.iinfo(np.int64)
_MAX_MICROBATCH = np.iinfo(np.int16).max


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The steps on the host; arrays of shape (S,), ascending, not overlapping."""

    number: tuple[int, ...]
    start_ns: Int64Array
    end_ns: Int64Array
    is_whole_trace: bool

    @classmethod
    def whole(cls) -> "StepMarks":
        """Build one window over the whole trace, as step 0."""
        return cls((0,), np.array([_EVER.min]), np.array([_EVER.max]), True)

    @classmethod
    def of(cls, trace: KinetoTrace) -> "StepMarks":
        """Find the trace's ProfilerStep marks; a step lasts until the start of the next one.

        Raises:
            ImportingError: The trace has no such marks.
        """
        annotations = trace.events[Category.ANNOTATION]
        numbers = {
            name: int(found[1])
            for name, text in enumerate(trace.names)
            if (found := _MARK.fullmatch(text))
        }
        marks = annotations.where(np.isin(annotations.name, list(numbers)))
        if len(marks) == 0:
            raise ImportingError(
                f"{trace.name} has no ProfilerStep marks. Expected one mark for each step, as "
                "profile(schedule=...) with prof.step() writes them. Import without --by-step to "
                "get the whole trace as one step."
            )
        order = np.argsort(marks.start_ns, kind="stable")
        start_ns, end_ns = marks.start_ns[order], marks.end_ns[order]
        said = [numbers[name] for name in marks.name[order].tolist()]
        is_ascending = all(low < high for low, high in pairwise(said))
        return cls(
            tuple(said if is_ascending else range(len(said))),
            start_ns,
            np.append(start_ns[1:], max(int(end_ns[-1]), int(start_ns[-1]))),
            False,
        )

    def of_issue(self, issue_ns: Int64Array) -> Int64Array:
        """Index of the step that contains each issue; -1: none."""
        place = np.searchsorted(self.start_ns, issue_ns, side="right") - 1
        inside = (place >= 0) & (issue_ns < self.end_ns[np.maximum(place, 0)])
        return np.where(inside, place, -1)

    def count_within(
        self, steps: Int64Array, count: Int64Array, at_start: Int64Array
    ) -> Int64Array:
        """Convert a running count over the trace to a count from 0 in each step.

        Args:
            steps: Shape (n,): indices of steps.
            count: Shape (n,): the running count at each moment.
            at_start: Shape (S,): the running count at the start of each step.
        """
        within = count - at_start[np.maximum(steps, 0)] - 1
        return np.asarray(np.clip(within, 0, _MAX_MICROBATCH), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The steps on the device (CPU: the host); shape (S + 1,), ascending."""

    bounds_ns: Int64Array

    @classmethod
    def on_device(
        cls, steps: Int64Array, start_ns: Int64Array, end_ns: Int64Array
    ) -> "StepWindows":
        """Build the windows from the events issued in each step.

        Args:
            steps: Shape (n,): indices of steps; -1 is left out.
            start_ns: Shape (n,).
            end_ns: Shape (n,).
        """
        known = steps >= 0
        steps, start_ns, end_ns = steps[known], start_ns[known], end_ns[known]
        num_steps = int(steps.max(initial=-1)) + 1
        ends = np.full(num_steps, _EVER.min)
        np.maximum.at(ends, steps, end_ns)
        first = start_ns[steps == 0].min(initial=_EVER.max)
        first = min(int(first), int(ends.max(initial=int(first))))
        return cls(np.maximum.accumulate(np.concatenate([[first], ends])))

    def __len__(self) -> int:
        return len(self.bounds_ns) - 1

    def cut(self, spans: Intervals) -> tuple[Int64Array, Intervals]:
        """Cut spans at the bounds, each with the index of its step; times outside are left out.

        Neighbouring windows touch, so the pieces of different steps are returned separately.
        """
        pieces = [spans.clip(low, high) for low, high in pairwise(self.bounds_ns.tolist())]
        steps = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        return steps.astype(np.int64), Intervals(
            np.concatenate([piece.starts for piece in pieces] or [self.bounds_ns[:0]]),
            np.concatenate([piece.ends for piece in pieces] or [self.bounds_ns[:0]]),
        )
