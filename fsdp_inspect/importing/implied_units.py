"""Infer units from the sizes and the order of collectives, for traces that name no units.

FSDP1's ranges show the activity of a unit but not its name. Its units are numbered by their first
all-gather. Reductions come in the opposite order and are matched by their size. Without any ranges
(DDP, DeepSpeed), collectives of the same kind, size and group are one unit. If each step of the
trace has the same number of them, their position in the step also distinguishes units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.importing.communications import Communications
from fsdp_inspect.importing.host_ranges import NOWHERE
from fsdp_inspect.importing.messages import GroupKey
from fsdp_inspect.importing.unit_ranges import RangeKind, UnitRanges
from fsdp_inspect.trace.codes import NO_UNIT, EventKind

Int64Array = NDArray[np.int64]

MAX_IMPLIED = 1000
"""Above this number of different collectives, no units are inferred."""

_SHARDING = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class ImpliedUnits:
    """Inferred units."""

    names: tuple[str, ...]
    unit: Int64Array
    """The unit of each collective, shape (n,), as index into `names`; -1: none."""


def imply_by_size(comms: Communications, steps: Int64Array) -> ImpliedUnits:
    """Infer units from kind, size, group and position in the step.

    Args:
        comms: The collectives of a rank.
        steps: Shape (n,): the ProfilerStep that issued each collective; -1: none or unknown.
    """
    members: dict[tuple[int, int, GroupKey | None], list[int]] = {}
    for position, kind in enumerate(comms.kind.tolist()):
        if kind in _SHARDING and comms.bytes[position] > 0:
            key = (kind, int(comms.bytes[position]), comms.group[position])
            members.setdefault(key, []).append(position)
    unit = np.full(len(comms), NO_UNIT, dtype=np.int64)
    names: list[str] = []
    for (kind, size, _), positions in members.items():
        places = _places_in_step(steps[positions])
        several = max(places) > 0
        for place in range(max(places) + 1):
            number = f", {place + 1} of {max(places) + 1} in a step" if several else ""
            name = f"{EventKind(kind).label} {format_bytes(size)}{number}"
            names.append(_distinct(name, names))
            unit[[one for one, at in zip(positions, places, strict=True) if at == place]] = (
                len(names) - 1
            )
    if len(names) > MAX_IMPLIED:
        return ImpliedUnits((), np.full(len(comms), NO_UNIT, dtype=np.int64))
    return ImpliedUnits(tuple(names), unit)


def _places_in_step(steps: Int64Array) -> list[int]:
    """The position of each collective in its step, from 0; all 0 if the steps differ in number."""
    known, counts = np.unique(steps[steps >= 0], return_counts=True)
    if len(known) < 2 or int(counts.sum()) != len(steps) or len(set(counts.tolist())) != 1:
        return [0] * len(steps)
    seen: dict[int, int] = {}
    places = []
    for step in steps.tolist():
        places.append(seen.get(step, 0))
        seen[step] = places[-1] + 1
    return places


def _distinct(name: str, taken: Sequence[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name} ({number})"
    return candidate


def imply_by_order(comms: Communications, ranges: UnitRanges) -> ImpliedUnits:
    """Infer the units of FSDP1 from the order of their forwards.

    Args:
        comms: The collectives of a rank.
        ranges: FSDP1's ranges, which name no units.
    """
    passes = _forward_passes(ranges)
    gathers = np.flatnonzero(comms.kind == EventKind.ALL_GATHER)
    forward_pass = passes.pass_of(comms, gathers)
    elements = _elements(comms)
    units = _units_of_first_pass(gathers, forward_pass, elements)
    unit = np.full(len(comms), NO_UNIT, dtype=np.int64)
    for number in np.unique(forward_pass[forward_pass >= 0]).tolist():
        _assign(unit, gathers[forward_pass == number], elements, units, is_reversed=False)
    for mine in passes.backward_members(comms, gathers[forward_pass < 0]):
        _assign(unit, mine, elements, units, is_reversed=True)
    reductions = np.flatnonzero(comms.kind == EventKind.REDUCE_SCATTER)
    for mine in passes.backward_members(comms, reductions):
        _assign(unit, mine, elements, units, is_reversed=True)
    return ImpliedUnits(tuple(f"unit {place}" for place in range(len(units))), unit)


def _units_of_first_pass(
    gathers: Int64Array, forward_pass: Int64Array, elements: Int64Array
) -> list[int]:
    """The elements of each unit, in the order of the forward with the most all-gathers."""
    numbers, counts = np.unique(forward_pass[forward_pass >= 0], return_counts=True)
    if len(numbers) == 0:
        return []
    fullest = numbers[int(np.argmax(counts))]
    return [int(elements[one]) for one in gathers[forward_pass == fullest]]


def _assign(
    unit: Int64Array,
    members: Int64Array,
    elements: Int64Array,
    units: list[int],
    *,
    is_reversed: bool,
) -> None:
    """Assign the next unit of its size to each member, in order or reversed; each unit once."""
    free = list(range(len(units)))[:: -1 if is_reversed else 1]
    for member in members.tolist():
        found = next((one for one in free if units[one] == elements[member]), None)
        if found is not None:
            unit[member] = found
            free.remove(found)


def _elements(comms: Communications) -> Int64Array:
    """Message sizes in elements, which the all-gathers and reductions of one unit share.

    Bytes are not comparable, because all-gathers and reductions may have different dtypes.
    """
    width = np.array([_WIDTHS.get(int(one), 1) for one in comms.dtype], dtype=np.int64)
    return comms.bytes // np.maximum(width, 1)


_WIDTHS = {1: 4, 2: 2, 3: 2, 4: 8, 7: 2, 8: 4, 9: 8, 15: 8}
"""Bytes of an element by dtype code; 1 for all others."""


@dataclass(frozen=True, slots=True)
class _Passes:
    """The start times of forwards and of backwards; ns, ascending."""

    forwards: Int64Array
    backwards: Int64Array

    def pass_of(self, comms: Communications, members: Int64Array) -> Int64Array:
        """The forward that issued each member; -1 if a backward has started since that forward."""
        issue = comms.issue_ns[members]
        number = np.searchsorted(self.forwards, issue, side="right") - 1
        back = np.searchsorted(self.backwards, issue, side="right") - 1
        began = (
            np.where(back >= 0, self.backwards[np.maximum(back, 0)], -1)
            if len(self.backwards)
            else np.full(len(members), -1)
        )
        at = self.forwards[np.maximum(number, 0)] if len(self.forwards) else issue
        return np.where((number >= 0) & (began < at), number, NOWHERE)

    def backward_members(self, comms: Communications, members: Int64Array) -> list[Int64Array]:
        """The members of each backward, in the order of issue."""
        number = np.searchsorted(self.forwards, comms.issue_ns[members], side="right")
        return [members[number == one] for one in np.unique(number).tolist()]


def _forward_passes(ranges: UnitRanges) -> _Passes:
    roots = ranges.which(RangeKind.ROOT_FORWARD)
    backs = ranges.which(RangeKind.PRE_BACKWARD)
    starts = np.sort(ranges.ranges.start_ns[roots])
    inner = np.sort(ranges.ranges.start_ns[backs])
    if len(starts) == 0:
        return _Passes(starts, inner)
    # FSDP1 marks a root pre-forward in each unit; the first one after a backward starts a pass.
    after = np.searchsorted(inner, starts)
    opens = np.concatenate([[True], after[1:] != after[:-1]])
    return _Passes(starts[opens], inner)
