"""Move the boundaries of a recorded pass to the units of another plan.

A unit that the plan does not change keeps its recorded boundaries. A changed unit opens before the
first compute that needs its parameters or those of a unit inside it, and closes after the last. A
part of a recorded unit does so in each execution of that unit: a layer that runs four times in a
forward has four executions, and so has each of its parts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.simulation.workload import Op, Pass, Tape

_Span = tuple[int, int]
"""A unit of the plan, and its execution."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """The pieces and units of a recording, mapped to those of a plan. Units are indices."""

    unit_of_cut: Sequence[int]
    """The plan's unit of each piece of the plan."""
    cuts_of: Mapping[int, Sequence[int]]
    """The plan's pieces of each recorded piece, in forward order."""
    unchanged: Mapping[int, int]
    """By recorded unit, the plan's unit with the same parameters."""
    around: Sequence[Sequence[int]]
    """By unit of the plan, the units whose modules are around it."""
    is_part: Sequence[bool]
    """By unit of the plan, whether one recorded unit owned all its parameters."""
    pieces: Sequence[int]
    """The recorded unit of each recorded piece."""

    def tape(self, one: Pass) -> Tape:
        """The tape of a recorded pass in units of the plan."""
        entries = self._entries(one)
        kept = set(self.unchanged.values())
        first: dict[_Span, int] = {}
        last: dict[_Span, int] = {}
        for at, (_, _, spans) in enumerate(entries):
            for span in spans:
                if span[0] not in kept:
                    first.setdefault(span, at)
                    last[span] = at
        opening: dict[int, list[_Span]] = {}
        closing: dict[int, list[_Span]] = {}
        for span in sorted(first, key=lambda each: (-(last[each] - first[each]), each)):
            opening.setdefault(first[span], []).append(span)
            closing.setdefault(last[span], []).insert(0, span)
        tape: list[tuple[Op, int]] = []
        for at, (op, index, _) in enumerate(entries):
            tape.extend((Op.ENTER, unit) for unit, _ in opening.get(at, ()))
            tape.append((op, index))
            tape.extend((Op.LEAVE, unit) for unit, _ in closing.get(at, ()))
        return tuple(tape)

    def _entries(self, one: Pass) -> list[tuple[Op, int, list[_Span]]]:
        """The kept boundaries and the compute, each with the executions that are around it."""
        executions = Counter[int]()
        open_units: list[int] = []
        entries: list[tuple[Op, int, list[_Span]]] = []
        for op, index in one.tape:
            if op is Op.RUN:
                cuts, owner = self.cuts_of.get(index, ()), self.pieces[index]
                number = executions[owner]
                if owner not in open_units and (one.is_forward or not number):
                    number += 1  # code before a unit belongs to it
                for cut in cuts if one.is_forward else reversed(cuts):
                    entries.append((Op.RUN, cut, self._spans(self.unit_of_cut[cut], number)))
                continue
            if op is Op.ENTER:
                executions[index] += 1
                open_units.append(index)
            elif index in open_units:
                open_units.remove(index)
            if index in self.unchanged:
                unit = self.unchanged[index]
                entries.append((op, unit, self._spans(unit, executions[index])))
        return entries

    def _spans(self, unit: int, number: int) -> list[_Span]:
        """The executions around a moment in an execution of a recorded unit."""
        return [(each, number if self.is_part[each] else 0) for each in (unit, *self.around[unit])]
