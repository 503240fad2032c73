"""Look up the units and parameters of a run for `scenario`, which derives the work of many plans.

Everything here depends on the run only. `parameters_of` names the parameters of a unit. A parameter
that several units name belongs to the last one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fsdp_inspect.simulation.parameters import (
    Parameter,
    describe_parameters,
    parameters_of,
    sharded_gradient_bytes,
)
from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.simulation.workload import Op, Pass, Tape, UnitWork
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import Unit

# --- Fit the costs of copies and hooks in a run to the bytes and tensors of its units.


def copy_of_share(work: UnitWork, group: int, shard: int) -> int:
    """Duration of the copy of the share that a smaller group keeps on each rank, ns.

    Copy-in copies the shards of all ranks, and copy-out copies all parameters. The share is between
    the two.
    """
    weight = (1 / group - 1 / shard) / (1 - 1 / shard)
    return round(work.copy_in_ns + weight * max(work.copy_out_ns - work.copy_in_ns, 0))


class Rates:
    """Lines of the costs of copies and hooks over the bytes and tensors of the run's units."""

    def __init__(self, work: RecordedWork) -> None:
        works = work.workload.units
        gathered = [unit.unsharded_bytes for unit in work.units]
        reduced = [unit.reduce_bytes for unit in work.units]
        self._copy_in = _Line(gathered, [each.copy_in_ns for each in works], in_proportion=True)
        self._copy_out = _Line(gathered, [each.copy_out_ns for each in works], in_proportion=True)
        self._reduce_copy_in = _Line(
            reduced, [each.reduce_copy_in_ns for each in works], in_proportion=True
        )
        # The hooks of the first unit are before the forward, mixed with those of the loop.
        first = next(index for op, index in work.workload.passes[0].tape if op is Op.ENTER)
        others = [at for at in range(len(works)) if at != first] or [first]
        tensors = [unit.num_tensors or len(unit.parameters) for unit in work.units]
        self._gather = _Line(
            [tensors[at] for at in others], [works[at].gather_launch_ns for at in others]
        )
        self._backward = _Line(tensors, [each.gather_backward_launch_ns or 0 for each in works])
        self._reduce = _Line(tensors, [each.reduce_launch_ns for each in works])

    def copies(self, work: UnitWork, unit: Unit) -> UnitWork:
        """The work with the copies of a unit's messages."""
        return replace(
            work,
            copy_in_ns=self._copy_in.at(unit.unsharded_bytes),
            copy_out_ns=self._copy_out.at(unit.unsharded_bytes),
            reduce_copy_in_ns=self._reduce_copy_in.at(unit.reduce_bytes),
        )

    def hooks(self, num_tensors: int) -> UnitWork:
        """The hooks of a unit with that many tensors, without other work."""
        return UnitWork(
            gather_ns=0,
            reduce_ns=0,
            gather_launch_ns=self._gather.at(num_tensors),
            gather_backward_launch_ns=self._backward.at(num_tensors),
            reduce_launch_ns=self._reduce.at(num_tensors),
        )


class _Line:
    """A constant and a slope, both at least 0, by least squares; units of size 0 do not count.

    Units of a single size cannot separate the two. Bytes then cost in proportion (the device is
    bound by them), and tensors cost nothing besides the hook itself.
    """

    def __init__(
        self, sizes: Sequence[int], durations: Sequence[int], *, in_proportion: bool = False
    ) -> None:
        pairs = [(size, ns) for size, ns in zip(sizes, durations, strict=True) if size]
        is_one_size = len({size for size, _ in pairs}) == 1
        columns = np.array([(1.0, size) for size, _ in pairs]).reshape(-1, 2)
        scale = columns.max(axis=0, initial=1.0)
        columns = columns / scale
        if is_one_size:
            columns[:, 0 if in_proportion else 1] = 0
        from scipy.optimize import nnls  # takes half a second to load

        found, _ = nnls(columns, np.array([float(ns) for _, ns in pairs]))
        self._constant, self._slope = found / scale

    def at(self, size: int) -> int:
        """The duration for a size, ns; 0 for size 0."""
        return round(float(self._constant + self._slope * size)) if size else 0


class RecordedUnits:
    """The units of a recorded work, by parameter."""

    def __init__(self, work: RecordedWork, ran: Plan, shard: int) -> None:
        """Index the units.

        Args:
            work: The recorded work of the run.
            ran: The plan that ran.
            shard: The number of ranks that sharded the units without a separate mesh.
        """
        self._work = work
        self._shard = shard
        self.planned = {unit.name: unit for unit in ran.units}
        """The units of the plan that ran, by name."""
        self.shapes: dict[str, list[int]] = {}
        """The shape of each parameter."""
        self.parameters: dict[str, Parameter] = {}
        """Each parameter with its settings."""
        self._owners: dict[str, list[int]] = defaultdict(list)
        self._by_parameters: dict[frozenset[str], Unit] = {}
        self._positions: dict[int, int] = {}
        for position, unit in enumerate(work.units):
            parameters = parameters_of(unit)
            self.shapes |= parameters
            self.parameters |= describe_parameters(unit, self._shard_of(unit))
            for name in parameters:
                self._owners[name].append(position)
            self._by_parameters.setdefault(frozenset(parameters), unit)
            self._positions.setdefault(unit.index, position)
        self.numels = {name: math.prod(shape) for name, shape in self.shapes.items()}
        """The number of elements of each parameter."""
        self.pieces_of: dict[int, list[int]] = defaultdict(list)
        """The pieces of each unit, by position."""
        for at, piece in enumerate(work.workload.pieces):
            self.pieces_of[piece.unit].append(at)
        self.sharded_bytes = sum(unit.sharded_bytes for unit in work.units)
        self.gradient_bytes = sum(
            sharded_gradient_bytes(unit, self._shard_of(unit)) for unit in work.units
        )
        """Sharded gradients of all units, bytes of one rank."""

    @cached_property
    def rates(self) -> Rates:
        """Fitted only if a unit or its messages changed."""
        return Rates(self._work)

    def position(self, unit: Unit) -> int:
        """The index of a unit in the workload."""
        return self._positions[unit.index]

    def with_parameters(self, parameters: Collection[str]) -> Unit | None:
        """The unit with exactly these parameters."""
        return self._by_parameters.get(frozenset(parameters))

    def owners(self, parameters: Collection[str]) -> list[int]:
        """The units that own some of these parameters, by position, in order."""
        return sorted({each for name in parameters for each in self._owners[name]})

    def _shard_of(self, unit: Unit) -> int:
        recorded = self.planned.get(unit.fqn)
        return recorded.num_shards(self._shard) if recorded else self._shard


# --- Move the boundaries of a recorded pass to the units of another plan.
#
# A unit that the plan does not change keeps its recorded boundaries. A changed unit opens before
# the first compute that needs its parameters or those of a unit inside it, and closes after the
# last. A part of a recorded unit does so in each execution of that unit: a layer that runs four
# times in a forward has four executions, and so has each of its parts.

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
    ends_alone: bool = False
    """Backward leaves a unit after the last compute of its own, before the end of units in it: a
    flat parameter of FSDP1 has its gradient then."""

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
                    last.setdefault(span, at)
                    if one.is_forward or not self.ends_alone or span is spans[0]:
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


# --- Move the ends of backwards of FSDP1.
#
# Autograd runs the nodes that forward created last first. An unshard creates the views of the flat
# parameter, and their backward ends that of the unit. With `forward_prefetch`, the unit before
# creates them, before its own compute. So its compute runs before the end.


def end_in_order(backward: Tape, forward: Tape, *, is_delayed: bool) -> Tape:
    """A backward in which each unit ends after its compute, or after the unit before it.

    Args:
        backward: The tape of a backward.
        forward: The tape of its forward.
        is_delayed: The next unit in forward was prefetched, so its backward ends later.
    """
    order = list(dict.fromkeys(unit for op, unit in forward if op is Op.ENTER))
    tape = list(backward)
    for before, unit in pairwise(order):
        leave = (Op.LEAVE, unit)
        if leave not in tape or (Op.ENTER, before) not in tape:
            continue
        at = tape.index(leave)
        entered, began = tape.index((Op.ENTER, before)), forward.index((Op.ENTER, before))
        between = forward[began : forward.index((Op.ENTER, unit))]
        last = max((tape.index(each) for each in between if each in tape and each[0] is Op.RUN),
                   default=at)  # fmt: skip
        if is_delayed and last > at:
            tape.insert(last, tape.pop(at))
        elif not is_delayed and tape.index((Op.ENTER, unit)) < entered < at:
            tape.insert(entered, tape.pop(at))
    return tuple(tape)
