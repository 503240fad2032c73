"""Find the program's position over time from a snapshot's annotations: step, phase, unit, activity.

The annotations are torch's `record_function` ranges of FSDP2 (names in `_fsdp_param_group.py`,
torch 2.6 to 2.15: the unit's name in parentheses, none for the root; `FSDP::forward_prefetch for
NAME`), of optimizers (`Optimizer.step#AdamW.step`), of data loaders (`enumerate(DataLoader)#...`)
and of the profiler's steps (`ProfilerStep#3`).

Without `global_record_annotations=True`, only the thread that started the recording has
annotations. A backward, which runs in a separate thread, then has no ranges.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.snapshot_contents import Annotation
from fsdp_inspect.trace.codes import NO_UNIT, NamedCode, Phase

_FSDP_RANGE = re.compile(r"FSDP::(\w+)(?: for .*| \((?P<unit>.*)\))?")
_GROUP_SUFFIX = re.compile(r" \[pg=\d+\]$")
_PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_OPTIMIZER_STEP = "Optimizer.step#"
_MAX_OPEN = 256
"""Limit of open nested ranges; above it, the ends of older ranges count as lost."""
_DATA_LOADER = "enumerate(DataLoader)#"

_OF_A_UNIT = frozenset(
    {
        "pre_forward",
        "post_forward",
        "pre_backward",
        "all_gather",
        "all_gather_copy_out",
        "post_backward_accumulate",
        "post_backward_reshard",
        "post_backward_rs_wait",
        "post_backward_reduce",
    }
)
_UNIT_DONE = {"post_forward": Phase.FORWARD, "post_backward_reshard": Phase.BACKWARD}


class FsdpActivity(NamedCode):
    """FSDP's activity at a moment."""

    NONE = 0
    """Unknown, or outside all units."""
    COMPUTE = 1
    """The unit's own forward or backward runs."""
    ALL_GATHER = 2
    COPY_OUT = 3
    REDUCE = 4
    OTHER = 5
    """Inside another FSDP range."""


_ACTIVITIES = {
    "all_gather": FsdpActivity.ALL_GATHER,
    "all_gather_copy_out": FsdpActivity.COPY_OUT,
    "post_backward_reduce": FsdpActivity.REDUCE,
}


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of the program; arrays of shape (moments,), by time."""

    units: tuple[str, ...]
    """Names of the units, in the order of their first occurrence."""
    time_us: NDArray[np.int64]
    """The time from which the position applies."""
    step: NDArray[np.int64]
    phase: NDArray[np.int64]
    """A `Phase`."""
    unit: NDArray[np.int64]
    """Index into `units`; -1: none."""
    activity: NDArray[np.int64]
    """An `FsdpActivity`."""
    step_ends_us: tuple[int, ...]
    """The end of each step, from step 0; empty without optimizer or profiler ranges."""
    has_backward: bool
    """Whether the annotations include a backward."""

    def at(self, time_us: NDArray[np.int64]) -> NDArray[np.int64]:
        """The moment to which each time belongs, as index into the arrays.

        A range that starts or ends in the same microsecond has already started or ended.
        """
        return np.searchsorted(self.time_us, time_us, side="right") - 1


def follow_annotations(annotations: Sequence[Annotation]) -> Positions:
    """Compute the positions from the annotations, in order of time."""
    walk = _Walk()
    for annotation in annotations:
        walk.pass_by(annotation)
    rows = np.array(walk.rows, dtype=np.int64)
    time_us, step, phase, unit, activity = rows.T.copy()
    return Positions(
        units=tuple(walk.units),
        time_us=time_us,
        step=step,
        phase=phase,
        unit=unit,
        activity=activity,
        step_ends_us=tuple(walk.step_ends_us),
        has_backward=bool(np.any(phase == Phase.BACKWARD)),
    )


@dataclass(slots=True)
class _Walk:
    units: dict[str, int] = field(default_factory=dict)
    step: int = 0
    phase: Phase = Phase.OUTSIDE
    ranges: list[tuple[str, int, FsdpActivity]] = field(default_factory=list)
    """Open FSDP ranges: name, unit and activity; innermost last."""
    running: list[tuple[int, Phase]] = field(default_factory=list)
    """Units whose forward or backward runs; innermost last."""
    step_ends_us: list[int] = field(default_factory=list)
    profiler_steps: bool = False
    rows: list[tuple[int, int, int, int, int]] = field(
        default_factory=lambda: [(-2, 0, Phase.OUTSIDE, NO_UNIT, FsdpActivity.NONE)]
    )

    def pass_by(self, annotation: Annotation) -> None:
        name = annotation.name
        if name.startswith("FSDP::"):
            self._fsdp(name, annotation.is_start)
        elif name.startswith(_OPTIMIZER_STEP):
            self._optimizer(annotation)
        elif name.startswith(_DATA_LOADER):
            self.phase = Phase.DATA if annotation.is_start else Phase.OUTSIDE
        elif not self._profiler_step(annotation):
            return
        unit, activity = self._position()
        self.rows.append((annotation.time_us, self.step, self.phase, unit, activity))

    def _position(self) -> tuple[int, FsdpActivity]:
        for _, unit, activity in reversed(self.ranges):
            if unit != NO_UNIT:
                return unit, activity
        if self.running and self.phase in (Phase.FORWARD, Phase.BACKWARD):
            return self.running[-1][0], FsdpActivity.COMPUTE
        return NO_UNIT, FsdpActivity.OTHER if self.ranges else FsdpActivity.NONE

    def _fsdp(self, name: str, is_start: bool) -> None:
        found = _FSDP_RANGE.fullmatch(_GROUP_SUFFIX.sub("", name))
        if found is None:
            return
        kind = found[1]
        unit = self._unit(found["unit"] or "") if kind in _OF_A_UNIT else NO_UNIT
        if is_start:
            self._begin(name, kind, unit)
        else:
            self._end(name, kind, unit)

    def _begin(self, name: str, kind: str, unit: int) -> None:
        if kind == "pre_backward":
            self.phase = Phase.BACKWARD
        elif kind in ("pre_forward", "root_pre_forward") and self.phase != Phase.BACKWARD:
            self.phase = Phase.FORWARD
        self.ranges.append((name, unit, _ACTIVITIES.get(kind, FsdpActivity.OTHER)))
        del self.ranges[:-_MAX_OPEN]

    def _end(self, name: str, kind: str, unit: int) -> None:
        open_names = [one for one, _, _ in self.ranges]
        if name in open_names:
            del self.ranges[len(open_names) - 1 - open_names[::-1].index(name) :]
        if kind in ("pre_forward", "pre_backward"):
            self.running.append((unit, self.phase))
            del self.running[:-_MAX_OPEN]
        elif kind in _UNIT_DONE:
            self._leave(unit, _UNIT_DONE[kind])
        elif kind == "root_post_backward_callback":
            self.phase = Phase.OUTSIDE
            self.running.clear()

    def _leave(self, unit: int, phase: Phase) -> None:
        if (unit, phase) in self.running:
            last = len(self.running) - 1 - self.running[::-1].index((unit, phase))
            del self.running[last]

    def _unit(self, name: str) -> int:
        return self.units.setdefault(name, len(self.units))

    def _optimizer(self, annotation: Annotation) -> None:
        self.phase = Phase.OPTIMIZER if annotation.is_start else Phase.OUTSIDE
        if not annotation.is_start and not self.profiler_steps:
            self._finish_step(annotation.time_us)

    def _profiler_step(self, annotation: Annotation) -> bool:
        if _PROFILER_STEP.fullmatch(annotation.name) is None:
            return False
        if annotation.is_start and not self.profiler_steps:
            self.profiler_steps, self.step = True, 0
            self.step_ends_us.clear()
        elif not annotation.is_start:
            self._finish_step(annotation.time_us)
        return True

    def _finish_step(self, time_us: int) -> None:
        self.step_ends_us.append(time_us)
        self.step += 1
        self.running.clear()


def unit_names(positions: Iterable[Positions]) -> tuple[str, ...]:
    """All units of several ranks, in the order of the first rank that has them."""
    return tuple(dict.fromkeys(name for one in positions for name in one.units))
