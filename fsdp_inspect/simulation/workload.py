"""What has to be done in a step, whatever the schedule? Units, pieces of compute, their order.

A *piece* is compute that belongs to one unit and runs without meeting another unit's boundary; a
*tape* is the forward of a model in the order of its code: units are entered and left, pieces run
in between. The backward is the tape read backwards. All times are ns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from fsdp_inspect.simulation.memory import MemoryWork


class Op(IntEnum):
    """What an entry of a tape does."""

    ENTER = 0
    """The unit's pre-forward: its parameters are gathered, if they are not here."""
    RUN = 1
    """A piece of compute runs."""
    LEAVE = 2
    """The unit's post-forward: its parameters are resharded, if its policy says so."""


Tape = tuple[tuple[Op, int], ...]
"""Entries `(op, index)`: the index of a unit for ENTER and LEAVE, of a piece for RUN."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Compute of one unit between two boundaries."""

    unit: int
    forward_ns: int
    """On the compute stream (CPU: the main thread)."""
    backward_ns: int
    """Without recomputation."""
    recompute_ns: int = 0
    """What activation checkpointing repeats before the piece's backward."""
    forward_launch_ns: int = 0
    """Host time to issue the forward; 0 under the `host` model, where it is the forward itself."""
    backward_launch_ns: int = 0


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What a unit's communication costs, once each."""

    gather_ns: int
    """All-gather over the shard group."""
    reduce_ns: int
    """Reduce-scatter over the shard group; 0 with nothing trainable."""
    gather_backward_ns: int | None = None
    """All-gather in backward where it runs in a smaller group; None: as in forward."""
    all_reduce_ns: int = 0
    """HSDP's all-reduce; 0: none."""
    copy_in_ns: int = 0
    """Shards into the all-gather's input."""
    copy_in_backward_ns: int | None = None
    """The same in backward, where a smaller group has larger shards; None: as in forward."""
    copy_out_ns: int = 0
    """The all-gather's output into the unsharded parameters, on the compute stream."""
    reduce_copy_in_ns: int = 0
    """Gradients into the reduce-scatter's input, on the compute stream."""
    reshard_ns: int = 0
    """What a smaller group keeps after forward, copied on the compute stream."""
    gather_launch_ns: int = 0
    """Host time around an all-gather: torch's hooks, issuing it."""
    gather_backward_launch_ns: int | None = None
    """The same in backward; None: as in forward."""
    reduce_launch_ns: int = 0
    """Host time around a reduction."""
    is_trainable: bool = True
    ends_with_backward: bool = False
    """Its inputs need no gradient, so torch runs its post-backward behind the whole backward."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """How a unit is sharded in time: the part of a plan that the schedule follows."""

    reshard_after_forward: bool = True
    """Its parameters are dropped after forward and gathered again in backward."""
    smaller_group: int | None = None
    """Ranks that keep them together until then, on a communicator of the unit's own (an integer
    `reshard_after_forward`); None: all that shard it."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: tuple[int, ...] = ()
    """Units whose all-gathers are issued in this unit's pre-forward, in this order."""
    backward_prefetch: tuple[int, ...] | None = None
    """The same in pre-backward; None: the unit before it in the order of the forward."""
    is_async: bool = False
    """`_set_unshard_async_op(True)`: the all-gather is issued from the compute stream."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward of a step."""

    reduces: bool = True
    """Gradients are reduced; False: accumulated unsharded (`set_requires_gradient_sync(False)`)."""
    all_reduces: bool = True
    """HSDP: also over the replicas."""
    finishes: bool = True
    """Its backward waits for every reduction (torch's `set_is_last_backward`)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step of one rank."""

    units: Sequence[UnitWork]
    policies: Sequence[UnitPolicy]
    """One a unit."""
    pieces: Sequence[Piece]
    tape: Tape
    """Of one forward."""
    microbatches: Sequence[Microbatch] = (Microbatch(),)
    final_order: Sequence[int] = field(default_factory=tuple)
    """The order in which torch visits the units behind the backward: that of `named_modules`."""
    before_forward_ns: int = 0
    """On the main thread or compute stream before each forward: data, moving inputs."""
    after_forward_ns: int = 0
    """Between forward and backward: the loss."""
    after_backward_ns: int = 0
    """Behind the last backward: clipping, optimizer, zeroing, the rest of the step."""
    host_ahead_ns: int | None = None
    """How far ahead of the device the host is when a step's forward begins, at most; None: as far
    as it comes. Of no account where the host does the work."""
    max_reduce_buffers: int = 1
    """`set_reduce_scatter_max_input_buffers`."""
    separate_reduce_group: bool = False
    """`set_separate_reduce_scatter_group`: reductions do not queue behind all-gathers."""
    memory: MemoryWork | None = None
    """None: not known."""

    def __post_init__(self) -> None:
        if len(self.units) != len(self.policies):
            raise ValueError(f"{len(self.units)} units have {len(self.policies)} policies.")
        if not self.final_order:
            object.__setattr__(self, "final_order", tuple(range(len(self.units))))


def tape_of(pieces: Sequence[Piece], root: int | None = None) -> Tape:
    """The tape of pieces whose units reach from their first to their last piece.

    Args:
        pieces: In the order of the forward.
        root: The unit around all; None: there is none.
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
