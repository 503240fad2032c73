"""Find the phase of a step in which the host issued an event, from the ranges of the trace.

* backward: inside the autograd engine's operators, or inside FSDP's backward ranges. A forward that
  activation checkpointing repeats inside backward is backward.
* forward: inside a range named forward, or inside a unit's forward.
* optimizer: inside the optimizer's own range.

Other events have an unknown phase.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.fsdp_ranges import RangeKind
from fsdp_inspect.importing.host_ranges import HostRanges
from fsdp_inspect.importing.kineto_events import Category, KinetoTrace
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.trace.codes import Phase

Int64Array = NDArray[np.int64]

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
