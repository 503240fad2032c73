"""Assign the events of a trace to steps: one step for the whole trace, or one per ProfilerStep.

On a device, a step ends when the last event that was issued in it has ended, as in a recorded run.
Events that the host issues ahead for the next step belong to the next step.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.host_ranges import HostRanges
from fsdp_inspect.importing.kineto_events import Category, KinetoTrace
from fsdp_inspect.importing.unit_ranges import RangeKind, UnitRanges
from fsdp_inspect.trace.codes import Phase
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

    @staticmethod
    def has_any(trace: KinetoTrace) -> bool:
        """Whether the trace has ProfilerStep marks."""
        numbers = [number for number, name in enumerate(trace.names) if _MARK.fullmatch(name)]
        return bool(np.isin(trace.events[Category.ANNOTATION].name, numbers).any())

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
                "profile(schedule=...) with prof.step() writes them, or an NVTX or ROCTx range "
                "such as 'step 5'. Import with --whole-trace to get the whole trace as one step."
            )
        _, order = np.unique(marks.start_ns, return_index=True)  # the first mark of each start
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


# --- Find the phase of a step in which the host issued an event, from the ranges of the trace.
#
# * backward: inside the autograd engine's operators, or inside FSDP's backward ranges. A forward
# that activation checkpointing repeats inside backward is backward. * forward: inside a range named
# forward, or inside a unit's forward. * optimizer: inside the optimizer's own range.
#
# Other events have an unknown phase.

_OPTIMIZER = re.compile(r"Optimizer\.step\b|(?<![\w.])optimizer(?![\w.])", re.IGNORECASE)
_BACKWARD = re.compile(r"(?<![a-z])backward(?![a-z])", re.IGNORECASE)
_FORWARD = re.compile(r"(?<![a-z])forward(?![a-z])", re.IGNORECASE)
_AUTOGRAD = "autograd::engine::evaluate_function"
_DATA = "enumerate(DataLoader)"


@dataclass(frozen=True, slots=True)
class PhaseRanges:
    """The host's ranges by phase."""

    forward: HostRanges
    backward: HostRanges
    optimizer: HostRanges
    data: HostRanges

    @classmethod
    def of(cls, trace: KinetoTrace, units: UnitRanges) -> "PhaseRanges":
        """Find the ranges of a trace, given the ranges of its FSDP units."""
        forwards = units.which(
            RangeKind.PRE_FORWARD, RangeKind.ROOT_FORWARD, RangeKind.POST_FORWARD
        )
        says_backward = np.flatnonzero(units.is_backward)
        return cls(
            forward=_join(
                units.ranges.where(forwards),
                units.forwards().ranges,
                _named(trace, Category.ANNOTATION, _is_forward),
            ),
            backward=_join(
                units.ranges.where(says_backward),
                units.backwards().ranges,
                _named(trace, Category.ANNOTATION, _is_backward),
                _named(trace, Category.OPERATOR, lambda name: name.startswith(_AUTOGRAD)),
            ),
            optimizer=_named(trace, Category.ANNOTATION, is_optimizer),
            data=_named(trace, Category.ANNOTATION, lambda name: name.startswith(_DATA)),
        )

    def phase_of(self, thread: NDArray[np.int32], time_ns: Int64Array) -> NDArray[np.int8]:
        """The phase of each moment; OUTSIDE if it is unknown. Shape (q,)."""
        phase = np.full(len(thread), Phase.OUTSIDE, dtype=np.int8)
        for ranges, code in (
            (self.data, Phase.DATA),
            (self.forward, Phase.FORWARD),
            (self.backward, Phase.BACKWARD),
            (self.optimizer, Phase.OPTIMIZER),
        ):
            phase[ranges.covers(thread, time_ns)] = code
        return phase


def is_optimizer(name: str) -> bool:
    """Whether a range is an optimizer's step: `Optimizer.step#AdamW.step`, `## optimizer ##`."""
    return _OPTIMIZER.search(name) is not None and "zero_grad" not in name


def _is_forward(name: str) -> bool:
    return not name.startswith("FSDP::") and _FORWARD.search(name) is not None


def _is_backward(name: str) -> bool:
    return not name.startswith("FSDP::") and _BACKWARD.search(name) is not None


def _named(trace: KinetoTrace, category: Category, test: Callable[[str], bool]) -> HostRanges:
    events = trace.events[category]
    known = np.fromiter(map(test, trace.names), dtype=bool, count=len(trace.names))
    chosen = events.where(known[events.name])
    return HostRanges(chosen.thread, chosen.start_ns, chosen.end_ns)


def _join(*parts: HostRanges) -> HostRanges:
    """Join ranges; ranges of one thread may then overlap, because only their union is used."""
    return HostRanges(
        np.concatenate([part.thread for part in parts]),
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.end_ns for part in parts]),
    )
