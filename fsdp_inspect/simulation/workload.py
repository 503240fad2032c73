"""Define the work of a step independent of its schedule: units, pieces of compute, their order.

A *piece* is compute of one unit without another unit's boundary in it. A *pass* is a forward or a
backward: units are entered and left, and pieces run in between, in the order of its *tape*. A step
is any sequence of passes, as the training loop ran them: forwards without a backward, several
backwards of one forward, two forwards before two backwards. All times are ns.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum

from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.plan import Fsdp1Settings


class Op(IntEnum):
    """The operation of a tape entry."""

    ENTER = 0
    """The unit's pre-forward or pre-backward: its parameters are gathered, unless they are
    unsharded already."""
    RUN = 1
    """A piece of compute runs."""
    LEAVE = 2
    """The unit's post-forward or post-backward: its parameters are resharded if its policy
    requires it, and a backward reduces its gradients."""


Tape = tuple[tuple[Op, int], ...]
"""Entries `(op, index)`: the index of a unit for ENTER and LEAVE, of a piece for RUN."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Compute of one unit between two boundaries."""

    unit: int
    forward_ns: int
    """Time on the compute stream (CPU: the main thread)."""
    backward_ns: int
    """Time of the backward without recomputation."""
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
    """Whether its inputs need no gradient, so torch runs its post-backward after the whole
    backward. The last LEAVE of a backward's tape then has no effect."""


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """The settings of a unit that the schedule follows."""

    reshard_after_forward: bool = True
    """Whether its parameters are freed after forward and gathered again in backward."""
    smaller_group: int | None = None
    """Ranks of the group that keeps the parameters until backward, on the unit's own communicator
    (an integer `reshard_after_forward`); None: the whole shard group."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: tuple[int, ...] = ()
    """Units whose all-gathers are issued in this unit's pre-forward, in this order."""
    backward_prefetch: tuple[int, ...] | None = None
    """The same in pre-backward; None or empty: the previous unit in forward order, as in torch."""
    is_async: bool = False
    """`_set_unshard_async_op(True)`: the all-gather is issued from the compute stream."""
    root: int = 0
    """Units of one FSDP root have the same number. They share prefetch order and reductions."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward of a step.

    A forward begins and ends with the hooks that torch runs for the outermost FSDP module: usually
    the root, or a unit that the loop calls directly.
    """

    phase: Phase
    """FORWARD or BACKWARD."""
    tape: Tape
    microbatch: int = 0
    """The number of backwards before it in the step, as in recorded events."""
    before_ns: int = 0
    """Time on the main thread or compute stream before it: data, or the loss."""
    before_memory: PieceMemory = field(default_factory=PieceMemory)
    """The memory of the code before it, in the fields of a forward."""
    keeps_graph: bool = True
    """A forward without it (`no_grad`) has no backward."""
    reduces: Set[int] | None = None
    """The units whose gradients a backward reduces; None: all that are trainable."""
    all_reduces: bool = True
    """HSDP: a backward also reduces over the replicas."""
    finishes: bool = True
    """A backward waits for every reduction (torch's `set_is_last_backward`)."""

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward."""
        return self.phase is Phase.FORWARD


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward of a step with gradient accumulation."""

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
    passes: Sequence[Pass]
    """The passes in the order in which they run."""
    final_order: Sequence[int] = field(default_factory=tuple)
    """The order in which torch visits the units after a backward: the order of `named_modules`."""
    after_ns: int = 0
    """Time after the last pass: clipping, optimizer, zeroing, the rest of the step."""
    host_ahead_ns: int | None = None
    """The highest lead of the host over the device when a step's first forward begins; None: no
    limit. It has no effect if the host does the work."""
    max_reduce_buffers: int = 1
    """`set_reduce_scatter_max_input_buffers`."""
    separate_reduce_group: bool = False
    """`set_separate_reduce_scatter_group`: reductions do not queue behind all-gathers."""
    fsdp1: Fsdp1Settings | None = None
    """The settings of FSDP1, whose schedule has other waits; None: FSDP2."""
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

    @property
    def forwards(self) -> Iterator[Pass]:
        """The forwards, in order."""
        return (each for each in self.passes if each.is_forward)


def reversed_tape(tape: Tape) -> Tape:
    """The backward of a tape: the reversed tape, with ENTER and LEAVE exchanged."""
    opposite = {Op.ENTER: Op.LEAVE, Op.RUN: Op.RUN, Op.LEAVE: Op.ENTER}
    return tuple((opposite[op], index) for op, index in reversed(tape))


def passes_of(
    tape: Tape,
    microbatches: Sequence[Microbatch] = (Microbatch(),),
    *,
    before_forward_ns: int = 0,
    after_forward_ns: int = 0,
) -> tuple[Pass, ...]:
    """The passes of a plain training loop: a forward and its backward for each microbatch.

    Args:
        tape: The tape of the forward.
        microbatches: The settings of each microbatch.
        before_forward_ns: Time before each forward.
        after_forward_ns: Time between a forward and its backward: the loss.
    """
    backward = reversed_tape(tape)
    return tuple(
        each
        for number, microbatch in enumerate(microbatches)
        for each in (
            Pass(Phase.FORWARD, tape, number, before_forward_ns),
            Pass(
                Phase.BACKWARD,
                backward,
                number,
                after_forward_ns,
                reduces=None if microbatch.reduces else frozenset(),
                all_reduces=microbatch.all_reduces,
                finishes=microbatch.finishes,
            ),
        )
    )


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
