"""What stands for units where no range names them? Collectives of one size, in their order.

FSDP1's ranges say when a unit does something and not which one: units are numbered by their first
gather, and reductions, which come in the opposite order, are matched by their size. Without any
ranges (DDP, DeepSpeed) collectives of the same kind, size and group are one; where a trace has
steps, and each has the same number of them, the first of every step are one, the second another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.importing.communications import Communications
from fsdp_inspect.importing.fsdp_ranges import Activity
from fsdp_inspect.importing.host_ranges import NOWHERE
from fsdp_inspect.importing.messages import GroupKey
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.trace.codes import NO_UNIT, EventKind

Int64Array = NDArray[np.int64]

MAX_IMPLIED = 1000
"""With more kinds of collectives than this, they stand for nothing."""

_SHARDING = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class ImpliedUnits:
    """Units that we made up."""

    names: tuple[str, ...]
    unit: Int64Array
    """Of each collective, shape (n,): position in `names`; -1: of none."""


def imply_by_size(comms: Communications, steps: Int64Array) -> ImpliedUnits:
    """Units by kind, size, group and place in the step.

    Args:
        comms: The collectives of a rank.
        steps: Shape (n,): the ProfilerStep in which each was issued; -1 in none, or not known.
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
    """0 for the first of each step, 1 for the second, ...; all 0 if steps differ in number."""
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
    """Units of FSDP1, by the order of their forwards.

    Args:
        comms: The collectives of a rank.
        ranges: FSDP1's ranges, which have no units.
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
    """The number of elements of each unit, in the order of the fullest forward."""
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
    """Give each member the next unit of its size, forwards or backwards; none twice."""
    free = list(range(len(units)))[:: -1 if is_reversed else 1]
    for member in members.tolist():
        found = next((one for one in free if units[one] == elements[member]), None)
        if found is not None:
            unit[member] = found
            free.remove(found)


def _elements(comms: Communications) -> Int64Array:
    """Sizes that gathers and reductions of one unit have in common, in bytes of one width.

    Gathers may be in another dtype than reductions.
    """
    width = np.array([_WIDTHS.get(int(one), 1) for one in comms.dtype], dtype=np.int64)
    return comms.bytes // np.maximum(width, 1)


_WIDTHS = {1: 4, 2: 2, 3: 2, 4: 8, 7: 2, 8: 4, 9: 8, 15: 8}
"""Bytes of an element by dtype code; 1 for all others."""


@dataclass(frozen=True, slots=True)
class _Passes:
    """When forwards begin, and when backwards do; ns, ascending."""

    forwards: Int64Array
    backwards: Int64Array

    def pass_of(self, comms: Communications, members: Int64Array) -> Int64Array:
        """The forward in which each was issued; -1 if a backward has begun since."""
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
    roots = ranges.which(Activity.ROOT_FORWARD)
    backs = ranges.which(Activity.PRE_BACKWARD)
    starts = np.sort(ranges.ranges.start_ns[roots])
    inner = np.sort(ranges.ranges.start_ns[backs])
    if len(starts) == 0:
        return _Passes(starts, inner)
    # FSDP1 marks a root pre-forward in every unit; a pass begins with the first after a backward.
    after = np.searchsorted(inner, starts)
    opens = np.concatenate([[True], after[1:] != after[:-1]])
    return _Passes(starts[opens], inner)
