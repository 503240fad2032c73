"""Simulate the memory of a step: account for all bytes that it allocates and frees.

The allocator follows the order in which the host issues work. So the schedule updates the account
in this order, independent of the execution times. The unsharded parameters, all-gather outputs,
gradients and reduce-scatter buffers of units follow from the plan, by FSDP2's rules (2.13). FSDP1
has no output of an all-gather, and frees gradients and buffers when it has issued a reduction. In
forward, the output of an all-gather lives until the end of the next unit's copy-out (since torch
2.15 until its begin), and in backward until its own. The input of a reduce-scatter lives until
compute waits for it. The recorded memory step gives the activations that a forward keeps, the
memory that a backward leaves, and the rise of memory while a piece runs. It also gives the memory
of the code between two passes, such as the loss.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

from fsdp_inspect.simulation.parameters import NO_SHARE, Share
from fsdp_inspect.trace.codes import NO_UNIT

# --- Compute the memory and time of a part of a recorded unit that a plan makes a separate unit.
#
# A memory step records the first use of each parameter in each pass of a unit, the memory at that
# moment, and the peak until the next use. A part owns the moments from the first use of its own
# parameter to the first use of another part's parameter. The moments before the first use belong
# to the first part, and those after the last use belong to the last part.


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


@dataclass(frozen=True, slots=True)
class PieceMemory:
    """The memory of a piece of compute, bytes."""

    kept: int = 0
    """Activations that its forward keeps for backward."""
    forward_rise: int = 0
    """The peak of its forward above its start."""
    backward_rise: int = 0
    """The peak of its backward above its start, including gradients."""
    gradients: int = 0
    """Unsharded gradients after its backward."""
    left: int = 0
    """Memory that its backward allocates and leaves beyond its gradients, minus the memory that it
    frees beyond `kept`. Gradients of a parameter that is used twice wait in this way for the second
    use."""
    output: int = 0
    """The unit's output within `kept`; 0: unknown."""
    forward: Course | None = None
    """The course of memory in its forward; None: unknown, or no longer valid."""
    backward: Course | None = None
    used: frozenset[str] = frozenset()
    """The parameters that it is known to use; empty: unknown, or none."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """The memory of a unit's parameters and communication, bytes."""

    unsharded: int
    """Parameters after copy-out; also the all-gather's output."""
    reduce_input: int
    sharded_gradients: int
    """Gradients after a reduction, in the parameters' own dtype."""
    resting: int
    """Sharded parameters and optimizer state."""
    flat_gradient: int = 0
    """FSDP1: its gradients as one tensor, if no recorded backward contains their copy."""
    last_gradient: int = 0
    """The gradient of its last parameter: torch (2.13) keeps it until the reduction is issued."""
    share: Share = NO_SHARE
    """The share that a smaller group keeps between forward and backward."""


@dataclass(frozen=True, slots=True)
class MemoryWork:
    """The memory of a workload's pieces and units, by their index."""

    pieces: Sequence[PieceMemory]
    units: Sequence[UnitMemory]
    rest: int
    """Other memory at the start of a step: inputs, buffers and unattributed bytes."""
    copies_reduce_input: bool = False
    """The backend works on a copy of a reduce-scatter's input, as gloo does."""
    frees_before_copy: bool = False
    """In forward, the output of an all-gather is freed before the next copy-out: torch 2.15."""
    gathers_in_place: bool = False
    """The output of an all-gather is the unsharded parameters, as in FSDP1."""

    @property
    def resting(self) -> int:
        """Allocated bytes between steps."""
        return self.rest + sum(unit.resting for unit in self.units)


class Held(IntEnum):
    """The use of a byte in a simulated step."""

    RESTING = 0
    """Sharded parameters and optimizer state."""
    REST = 1
    """Inputs, buffers and unattributed bytes."""
    UNSHARDED_PARAMETER = 2
    ALL_GATHER_BUFFER = 3
    ACTIVATION = 4
    TEMPORARY = 5
    """Memory of a running piece, including its future activations."""
    UNSHARDED_GRADIENT = 6
    REDUCE_SCATTER_BUFFER = 7
    SHARDED_GRADIENT = 8
    SHARDED_PARAMETER = 9
    """Shares that smaller groups keep between forward and backward."""

    @property
    def label(self) -> str:
        """The name in data; equal to the memory category if there is one."""
        return self.name.lower()


class MemoryLedger:
    """Accounts for memory while steps are simulated."""

    def __init__(self, work: MemoryWork) -> None:
        self._work = work
        self.allocated = work.resting
        self._amounts = [0] * len(Held)
        self._amounts[Held.RESTING] = work.resting - work.rest
        self._amounts[Held.REST] = work.rest
        self.peak = self.allocated
        self.peak_unit = NO_UNIT
        """The unit that ran or gathered at the peak; -1: none, as in the loss."""
        self.peak_amounts = tuple(self._amounts)
        """Bytes at the peak by `Held`; they add up to `peak`."""
        self._held: int | None = None  # the unit whose output is kept until the next copy-out
        self._gradients: list[dict[int, int]] = [{} for _ in work.units]
        """By unit, the unsharded gradients of each piece."""
        self._sharded_gradients: dict[int, int] = {}
        self._shares: set[int] = set()

    def begin(self) -> None:
        """Start a step: gradients and the activations of discarded forwards are freed."""
        self._free(Held.ACTIVATION, self._amounts[Held.ACTIVATION])
        self._free(Held.SHARDED_GRADIENT, sum(self._sharded_gradients.values()))
        self._sharded_gradients.clear()
        self.peak, self.peak_unit = self.allocated, NO_UNIT
        self.peak_amounts = tuple(self._amounts)

    def gather(self, unit: int) -> None:
        """Allocate the output of an all-gather."""
        in_place = self._work.gathers_in_place
        what = Held.UNSHARDED_PARAMETER if in_place else Held.ALL_GATHER_BUFFER
        self._add(what, self._work.units[unit].unsharded, unit)

    def copy_out(self, unit: int, *, keeps_output: bool) -> None:
        """Allocate the unsharded parameters, and free the output unless it is kept.

        In forward, torch keeps the output until the next unit's copy-out, which frees the output of
        the previous unit.
        """
        if keeps_output and self._work.frees_before_copy:
            self.free_held()
        self._add(Held.UNSHARDED_PARAMETER, self._work.units[unit].unsharded, unit)
        if keeps_output:
            self.free_held()
            self._held = unit
        else:
            self.drop_output(unit)

    def free_held(self) -> None:
        """Free the output that forward kept."""
        if self._held is not None:
            self.drop_output(self._held)
            self._held = None

    def drop_output(self, unit: int) -> None:
        """Free the output of an all-gather."""
        self._free(Held.ALL_GATHER_BUFFER, self._work.units[unit].unsharded)

    def free_unsharded(self, unit: int) -> None:
        """Free the unsharded parameters of a resharded unit."""
        self._free(Held.UNSHARDED_PARAMETER, self._work.units[unit].unsharded)

    def keep_share(self, unit: int) -> None:
        """Copy a smaller group's share of the parameters, and free the other parameters.

        The copies of the previous step still exist if no backward gathered them.
        """
        memory = self._work.units[unit]
        self._rise(Held.SHARDED_PARAMETER, memory.share.rise, unit)
        self.free_unsharded(unit)
        if unit not in self._shares:
            self._shares.add(unit)
            self._add(Held.SHARDED_PARAMETER, memory.share.kept, unit)

    def free_share(self, unit: int) -> None:
        """Free the share of a smaller group after it gathered the parameters again."""
        if unit in self._shares:
            self._shares.remove(unit)
            self._free(Held.SHARDED_PARAMETER, self._work.units[unit].share.kept)

    def forward(self, piece: int, unit: int) -> None:
        """Run the forward of a piece."""
        memory = self._work.pieces[piece]
        self._rise(Held.TEMPORARY, memory.forward_rise, unit)
        self._add(Held.ACTIVATION, memory.kept, unit)

    def between(self, code: PieceMemory) -> None:
        """Run the code before a pass, such as the loss and its own backward."""
        self._rise(Held.TEMPORARY, code.forward_rise, NO_UNIT)
        self._add(Held.ACTIVATION, code.kept, NO_UNIT)

    def backward(self, piece: int, unit: int) -> None:
        """Run the backward of a piece: free activations, and add or accumulate gradients."""
        memory, gradients = self._work.pieces[piece], self._gradients[unit]
        self._rise(Held.TEMPORARY, memory.backward_rise, unit)
        self._add(Held.ACTIVATION, memory.left - memory.kept, unit)
        if piece not in gradients:
            gradients[piece] = memory.gradients
            self._add(Held.UNSHARDED_GRADIENT, memory.gradients, unit)

    def flatten(self, unit: int) -> None:
        """FSDP1: copy gradients into one tensor, at the end of a backward."""
        self._rise(Held.UNSHARDED_GRADIENT, self._work.units[unit].flat_gradient, unit)

    def reduce(self, unit: int) -> None:
        """Copy gradients into a reduce-scatter's input, and allocate its output."""
        memory = self._work.units[unit]
        self._add(Held.REDUCE_SCATTER_BUFFER, memory.reduce_input, unit)
        gradients = sum(self._gradients[unit].values())
        self._gradients[unit].clear()
        last = min(memory.last_gradient, gradients)
        copy = memory.reduce_input if self._work.copies_reduce_input else 0
        self._free(Held.UNSHARDED_GRADIENT, gradients - last)
        self._add(Held.TEMPORARY, copy, unit)
        self._rise(Held.SHARDED_GRADIENT, memory.sharded_gradients, unit)
        self._free(Held.TEMPORARY, copy)
        self._free(Held.UNSHARDED_GRADIENT, last)
        if unit not in self._sharded_gradients:
            self._sharded_gradients[unit] = memory.sharded_gradients
            self._add(Held.SHARDED_GRADIENT, memory.sharded_gradients, unit)

    def reduced(self, unit: int) -> None:
        """Free the input of a reduce-scatter."""
        self._free(Held.REDUCE_SCATTER_BUFFER, self._work.units[unit].reduce_input)

    def _free(self, what: Held, amount: int) -> None:
        self._amounts[what] -= amount
        self.allocated -= amount

    def _add(self, what: Held, amount: int, unit: int) -> None:
        self._amounts[what] += amount
        self.allocated += amount
        if self.allocated > self.peak:
            self._rise(what, 0, unit)

    def _rise(self, what: Held, amount: int, unit: int) -> None:
        """Raise memory by an amount for a moment, and update the peak."""
        if self.allocated + amount > self.peak:
            self.peak, self.peak_unit = self.allocated + amount, unit
            amounts = self._amounts.copy()
            amounts[what] += amount
            self.peak_amounts = tuple(amounts)


class NoLedger(MemoryLedger):
    """Takes the place of a ledger if the memory is unknown, and accounts for nothing."""

    def __init__(self) -> None:
        super().__init__(MemoryWork((), (), 0))

    def begin(self) -> None:
        """Do nothing."""

    def gather(self, unit: int) -> None:
        """Do nothing."""

    def copy_out(self, unit: int, *, keeps_output: bool) -> None:
        """Do nothing."""

    def free_held(self) -> None:
        """Do nothing."""

    def drop_output(self, unit: int) -> None:
        """Do nothing."""

    def free_unsharded(self, unit: int) -> None:
        """Do nothing."""

    def keep_share(self, unit: int) -> None:
        """Do nothing."""

    def free_share(self, unit: int) -> None:
        """Do nothing."""

    def forward(self, piece: int, unit: int) -> None:
        """Do nothing."""

    def between(self, code: PieceMemory) -> None:
        """Do nothing."""

    def backward(self, piece: int, unit: int) -> None:
        """Do nothing."""

    def flatten(self, unit: int) -> None:
        """Do nothing."""

    def reduce(self, unit: int) -> None:
        """Do nothing."""

    def reduced(self, unit: int) -> None:
        """Do nothing."""
