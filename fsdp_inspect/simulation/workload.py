"""Define the work of a step independent of its schedule: units, pieces of compute, their order.

A *piece* is compute of one unit without another unit's boundary in it. A *tape* is the forward of a
model in the order of its code: units are entered and left, and pieces run in between. The backward
is the tape in reverse. All times are ns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from fsdp_inspect.simulation.memory import MemoryWork


class Op(IntEnum):
    """The operation of a tape entry."""

    ENTER = 0
    """The unit's pre-forward: its parameters are gathered, unless they are unsharded already."""
    RUN = 1
    """A piece of compute runs."""
    LEAVE = 2
    """The unit's post-forward: its parameters are resharded if its policy requires it."""


Tape = tuple[tuple[Op, int], ...]
"""Entries `(op, index)`: the index of a unit for ENTER and LEAVE, of a piece for RUN."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Compute of one unit between two boundaries."""

    unit: int
    forward_ns: int
    """Time on the compute stream (CPU: the main thread)."""
    backward_ns: int
    """Without recomputation."""
    recompute_ns: int = 0
    """Forward that activation checkpointing repeats before the piece's backward."""
    forward_launch_ns: int = 0
    """Host time to issue the forward; 0 in the `host` model, where it is the forward itself."""
    backward_launch_ns: int = 0


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The costs of a unit's communication, for one of each."""

    gather_ns: int
    """All-gather over the shard group."""
    reduce_ns: int
    """Reduce-scatter over the shard group; 0 without trainable parameters."""
    gather_backward_ns: int | None = None
    """All-gather in backward if a smaller group runs it; None: as in forward."""
    all_reduce_ns: int = 0
    """HSDP's all-reduce; 0: none."""
    copy_in_ns: int = 0
    """Copy of shards into the all-gather's input."""
    copy_in_backward_ns: int | None = None
    """Copy-in in backward, where a smaller group has larger shards; None: as in forward."""
    copy_out_ns: int = 0
    """Copy of the all-gather's output into the unsharded parameters, on the compute stream."""
    reduce_copy_in_ns: int = 0
    """Copy of gradients into the reduce-scatter's input, on the compute stream."""
    reshard_ns: int = 0
    """Copy of the share that a smaller group keeps after forward, on the compute stream."""
    gather_launch_ns: int = 0
    """Host time around an all-gather: torch's hooks and the issue."""
    gather_backward_launch_ns: int | None = None
    """Host time around an all-gather in backward; None: as in forward."""
    reduce_launch_ns: int = 0
    """Host time around a reduction."""
    is_trainable: bool = True
    ends_with_backward: bool = False
    """Its inputs need no gradient, so torch runs its post-backward after the whole backward."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The settings of a unit that the schedule follows."""

    reshard_after_forward: bool = True
    """Its parameters are freed after forward and gathered again in backward."""
    smaller_group: int | None = None
    """Ranks of the group that keeps the parameters until backward, on the unit's own communicator
    (an integer `reshard_after_forward`); None: the whole shard group."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: tuple[int, ...] = ()
    """Units whose all-gathers are issued in this unit's pre-forward, in this order."""
    backward_prefetch: tuple[int, ...] | None = None
    """The same in pre-backward; None: the previous unit in forward order."""
    is_async: bool = False
    """`_set_unshard_async_op(True)`: the all-gather is issued from the compute stream."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward of a step."""

    reduces: bool = True
    """Gradients are reduced; False: accumulated unsharded (`set_requires_gradient_sync(False)`)."""
    all_reduces: bool = True
    """HSDP: gradients are also reduced over the replicas."""
    finishes: bool = True
    """Its backward waits for every reduction (torch's `set_is_last_backward`)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step of one rank."""

    units: Sequence[UnitWork]
    policies: Sequence[UnitPolicy]
    """One per unit."""
    pieces: Sequence[Piece]
    tape: Tape
    """The tape of one forward."""
    microbatches: Sequence[Microbatch] = (Microbatch(),)
    final_order: Sequence[int] = field(default_factory=tuple)
    """The order in which torch visits the units after the backward: that of `named_modules`."""
    before_forward_ns: int = 0
    """Time on the main thread or compute stream before each forward: data, moving inputs."""
    after_forward_ns: int = 0
    """Time between forward and backward: the loss."""
    after_backward_ns: int = 0
    """Time after the last backward: clipping, optimizer, zeroing, the rest of the step."""
    host_ahead_ns: int | None = None
    """The highest lead of the host over the device when a step's forward begins; None: no limit.
    It has no effect if the host does the work."""
    max_reduce_buffers: int = 1
    """`set_reduce_scatter_max_input_buffers`."""
    separate_reduce_group: bool = False
    """`set_separate_reduce_scatter_group`: reductions do not queue behind all-gathers."""
    memory: MemoryWork | None = None
    """None: unknown."""

    def __post_init__(self) -> None:
        if len(self.units) != len(self.policies):
            raise ValueError(
                f"Invalid number of policies: {len(self.policies)}. Expected one for each of the "
                f"{len(self.units)} units."
            )
        if not self.final_order:
            object.__setattr__(self, "final_order", tuple(range(len(self.units))))


def tape_of(pieces: Sequence[Piece], root: int | None = None) -> Tape:
    """The tape of pieces, with each unit from its first to its last piece.

    Args:
        pieces: The pieces in forward order.
        root: The unit around all pieces; None: there is none.
    """
    spans: dict[int, tuple[int, int]] = {}
    for at, piece in enumerate(pieces):
        first, _ = spans.get(piece.unit, (at, at))
        spans[piece.unit] = (first, at)
    if root is not None:
        spans[root] = (-1, len(pieces))
    tape: list[tuple[Op, int]] = []
    for at in range(-1, len(pieces) + 1):
        opening = [unit for unit, span in spans.items() if span[0] == at]
        tape.extend((Op.ENTER, unit) for unit in sorted(opening, key=lambda u: -spans[u][1]))
        if 0 <= at < len(pieces):
            tape.append((Op.RUN, at))
        closing = [unit for unit, span in spans.items() if span[1] == at]
        tape.extend((Op.LEAVE, unit) for unit in sorted(closing, key=lambda u: -spans[u][0]))
    return tuple(tape)
