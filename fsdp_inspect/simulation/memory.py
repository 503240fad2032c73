"""How high does memory rise under a plan? A ledger of what a step allocates and frees.

The allocator works in the order in which the host issues, so the ledger is kept by the schedule
as it plays, whatever runs when. Units: their unsharded parameters, all-gather outputs, gradients
and reduce-scatter buffers follow from the plan, by FSDP2's rules (2.13): in forward an all-gather's
output lives until the next unit's copy-out, in backward until its own; a reduce-scatter's input
until compute waits for it. Pieces: what a forward keeps for backward, and how far memory rises
above its start while a piece runs, are those of the recorded memory step. So is the loss: what it
leaves goes with the first backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from fsdp_inspect.simulation.parameters import NO_SHARE, Share
from fsdp_inspect.simulation.parts import Course
from fsdp_inspect.trace.codes import NO_UNIT


@dataclass(frozen=True, slots=True)
class PieceMemory:
    """What a piece of compute holds, bytes."""

    kept: int = 0
    """Activations that its forward leaves for backward."""
    forward_rise: int = 0
    """The highest moment of its forward above its start."""
    backward_rise: int = 0
    """The same of its backward, gradients included."""
    gradients: int = 0
    """Unsharded gradients that its backward leaves."""
    output: int = 0
    """What of `kept` is the unit's output, as far as its gradient tells; 0: not known."""
    forward: Course | None = None
    """How memory goes in its forward; None: not known, or not its own any more."""
    backward: Course | None = None
    used: frozenset[str] = frozenset()
    """The parameters that it is known to use; empty: not known, or none."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """What a unit's parameters and communication hold, bytes."""

    unsharded: int
    """Parameters after copy-out; also the all-gather's output."""
    reduce_input: int
    sharded_gradients: int
    """What a reduction leaves, in the parameters' own dtype."""
    resting: int
    """Sharded parameters and optimizer state."""
    last_gradient: int = 0
    """Of its last parameter: torch (2.13) holds it until the reduction is issued."""
    share: Share = NO_SHARE
    """What a smaller group keeps of it between forward and backward."""


@dataclass(frozen=True, slots=True)
class MemoryWork:
    """The memory of a workload's pieces and units, by their index."""

    pieces: Sequence[PieceMemory]
    units: Sequence[UnitMemory]
    rest: int
    """What a step starts with besides the units' own: inputs, buffers, what is not attributed."""
    copies_reduce_input: bool = False
    """The backend works on a copy of a reduce-scatter's input, as gloo does."""
    loss: PieceMemory = PieceMemory()
    """What runs between forward and backward: as a forward."""

    @classmethod
    def unknown(cls, num_pieces: int, num_units: int) -> "MemoryWork":
        """Where memory is not known: everything holds nothing."""
        return cls([PieceMemory()] * num_pieces, [UnitMemory(0, 0, 0, 0)] * num_units, 0)

    @property
    def resting(self) -> int:
        """Allocated between steps."""
        return self.rest + sum(unit.resting for unit in self.units)


class Held(IntEnum):
    """What a byte of a played step is held for."""

    RESTING = 0
    """Sharded parameters and optimizer state."""
    REST = 1
    """Inputs, buffers, what was not attributed."""
    UNSHARDED_PARAMETER = 2
    ALL_GATHER_BUFFER = 3
    ACTIVATION = 4
    TEMPORARY = 5
    """Of a piece while it runs: its activations in the making, too."""
    UNSHARDED_GRADIENT = 6
    REDUCE_SCATTER_BUFFER = 7
    SHARDED_GRADIENT = 8
    SHARDED_PARAMETER = 9
    """What smaller groups keep between forward and backward."""

    @property
    def label(self) -> str:
        """The name in data, as of a memory category where it is one."""
        return self.name.lower()


class MemoryLedger:
    """Keeps account while steps are played."""

    def __init__(self, work: MemoryWork) -> None:
        self._work = work
        self.allocated = work.resting
        self._amounts = [0] * len(Held)
        self._amounts[Held.RESTING] = work.resting - work.rest
        self._amounts[Held.REST] = work.rest
        self.peak = self.allocated
        self.peak_unit = NO_UNIT
        """The unit that ran or gathered at the highest moment; -1: none did, as in the loss."""
        self.peak_amounts = tuple(self._amounts)
        """What was held then, by `Held`; adds up to `peak`."""
        self._held: int | None = None  # whose all-gather output waits for the next copy-out
        self._piece_gradients: dict[int, int] = {}
        self._sharded_gradients: dict[int, int] = {}
        self._shares: set[int] = set()
        self._of_loss = 0

    def begin(self) -> None:
        """A step begins: gradients are gone, parameters that stayed unsharded are still there."""
        self._free(Held.SHARDED_GRADIENT, sum(self._sharded_gradients.values()))
        self._sharded_gradients.clear()
        self.peak, self.peak_unit = self.allocated, NO_UNIT
        self.peak_amounts = tuple(self._amounts)

    def gather(self, unit: int) -> None:
        """An all-gather's output is allocated."""
        self._add(Held.ALL_GATHER_BUFFER, self._work.units[unit].unsharded, unit)

    def copy_out(self, unit: int, *, keeps_output: bool) -> None:
        """The unsharded parameters are allocated; the output is freed unless it is kept.

        In forward, torch keeps it for the next unit's copy-out, and behind the copy frees that of
        the unit before.
        """
        self._add(Held.UNSHARDED_PARAMETER, self._work.units[unit].unsharded, unit)
        if keeps_output:
            self.free_held()
            self._held = unit
        else:
            self.drop_output(unit)

    def free_held(self) -> None:
        """The output that forward kept is not needed any more."""
        if self._held is not None:
            self.drop_output(self._held)
            self._held = None

    def drop_output(self, unit: int) -> None:
        """An all-gather's output is freed."""
        self._free(Held.ALL_GATHER_BUFFER, self._work.units[unit].unsharded)

    def free_unsharded(self, unit: int) -> None:
        """Parameters are resharded."""
        self._free(Held.UNSHARDED_PARAMETER, self._work.units[unit].unsharded)

    def keep_share(self, unit: int) -> None:
        """A smaller group copies its share of the parameters, and the rest of them goes.

        The copies of the step before are still there if no backward gathered them.
        """
        memory = self._work.units[unit]
        self._rise(Held.SHARDED_PARAMETER, memory.share.rise, unit)
        self.free_unsharded(unit)
        if unit not in self._shares:
            self._shares.add(unit)
            self._add(Held.SHARDED_PARAMETER, memory.share.kept, unit)

    def free_share(self, unit: int) -> None:
        """A smaller group has gathered the parameters again: its share goes."""
        if unit in self._shares:
            self._shares.remove(unit)
            self._free(Held.SHARDED_PARAMETER, self._work.units[unit].share.kept)

    def forward(self, piece: int, unit: int) -> None:
        """A piece runs forward."""
        memory = self._work.pieces[piece]
        self._rise(Held.TEMPORARY, memory.forward_rise, unit)
        self._add(Held.ACTIVATION, memory.kept, unit)

    def loss(self) -> None:
        """The loss is computed, and its own backward."""
        self._rise(Held.TEMPORARY, self._work.loss.forward_rise, NO_UNIT)
        self._of_loss = self._work.loss.kept
        self._add(Held.ACTIVATION, self._of_loss, NO_UNIT)

    def backward(self, piece: int, unit: int) -> None:
        """A piece runs backward: its activations go; its gradients come, or are added to."""
        memory = self._work.pieces[piece]
        self._rise(Held.TEMPORARY, memory.backward_rise, unit)
        new = 0 if piece in self._piece_gradients else memory.gradients
        self._piece_gradients[piece] = memory.gradients
        self._free(Held.ACTIVATION, memory.kept)
        if memory.backward_rise:
            self._free(Held.ACTIVATION, self._of_loss)
            self._of_loss = 0
        self._add(Held.UNSHARDED_GRADIENT, new, unit)

    def reduce(self, unit: int, pieces: Sequence[int]) -> None:
        """Gradients go into a reduce-scatter's input, and its output is allocated."""
        memory = self._work.units[unit]
        self._add(Held.REDUCE_SCATTER_BUFFER, memory.reduce_input, unit)
        gradients = sum(self._piece_gradients.pop(piece, 0) for piece in pieces)
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
        """A reduce-scatter's input is freed."""
        self._free(Held.REDUCE_SCATTER_BUFFER, self._work.units[unit].reduce_input)

    def _free(self, what: Held, amount: int) -> None:
        self._amounts[what] -= amount
        self.allocated -= amount

    def _add(self, what: Held, amount: int, unit: int) -> None:
        self._amounts[what] += amount
        self.allocated += amount
        self._rise(what, 0, unit)

    def _rise(self, what: Held, amount: int, unit: int) -> None:
        """Memory rises by an amount for a moment."""
        if self.allocated + amount > self.peak:
            self.peak, self.peak_unit = self.allocated + amount, unit
            amounts = self._amounts.copy()
            amounts[what] += amount
            self.peak_amounts = tuple(amounts)
