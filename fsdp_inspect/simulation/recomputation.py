"""What changes where a plan checkpoints other units? Backward repeats their forwards, or does not.

Under full activation checkpointing torch (2.13, the non-reentrant kind) keeps what goes into a unit
and forgets what its forward saved; backward repeats the forward before it begins. So that forward
is added to backward, where it hides communication, too; of the unit's activations the output
stays, and the others are there only while its own backward runs.

A recorded memory step tells what a forward keeps, how high memory rises in it, and how large the
gradient is that its backward begins with: as large as the output. What the forward of a unit that
is checkpointed would keep without is told by nothing that is recorded.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory
from fsdp_inspect.simulation.parameters import is_inside, parameters_of
from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.simulation.workload import Op, Piece, Workload
from fsdp_inspect.trace.plan import ROOT, Checkpointing, Plan, owned_parameters
from fsdp_inspect.trace.run import Unit

_REPEATED = (
    "A repeated forward takes as long as the forward did; torch stops it behind the last tensor "
    "that it needs, so it may take less."
)
_OUTPUT_STAYS = (
    "Of a checkpointed unit's activations its output stays, as large as the gradient that its "
    "backward began with."
)
_FORECAST = "`fsdp-inspect forecast` tells it without a run: --set checkpointing={}."


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The recorded work with other units checkpointed."""

    work: RecordedWork
    assumptions: tuple[str, ...] = ()
    memory_refusal: str | None = None
    """Why the memory of this work is not known, in words; None: it is, or the run's was not."""


def recompute(work: RecordedWork, recorded: Plan, wanted: Plan) -> Recomputation:
    """The recorded work, checkpointed as another plan wants it.

    Args:
        work: Of the run.
        recorded: The plan that ran.
        wanted: Resolved.

    Raises:
        MissingDataError: What is checkpointed otherwise is no whole unit, or is so selectively.
        PlanError: The other plan newly checkpoints the model itself.
    """
    before, after = recorded.checkpointing, wanted.checkpointing
    if set(before.selective) != set(after.selective):
        raise _refuse_selective(before, after)
    changed = set(before.full) ^ set(after.full)
    if not changed:
        return Recomputation(work)
    for module in sorted(changed):
        _check_whole(module, work, wanted, changed)
    added = _covered(work.units, changed & set(after.full))
    removed = _covered(work.units, changed & set(before.full))
    workload = replace(work.workload, pieces=_repeated(work.workload, added, removed))
    refusal = None
    if workload.memory is not None:
        refusal = _refuse_memory(work, workload.memory, added, removed)
        memory = None if refusal else _forgetting(workload.memory, workload.pieces, added)
        workload = replace(workload, memory=memory)
    assumptions = [_REPEATED] if added else []
    if added and workload.memory is not None:
        assumptions.append(_OUTPUT_STAYS)
    return Recomputation(replace(work, workload=workload), tuple(assumptions), refusal)


def _refuse_selective(before: Checkpointing, after: Checkpointing) -> MissingDataError:
    return MissingDataError(
        f"The plan checkpoints {len(after.selective)} modules selectively, the run did "
        f"{len(before.selective)}: what that keeps and what it repeats the run does not tell. "
        "Expected full checkpointing of whole units, or none. Record a run of the plan; for its "
        "memory alone: fsdp-inspect forecast --set checkpointing=selective."
    )


def _check_whole(module: str, work: RecordedWork, wanted: Plan, changed: Collection[str]) -> None:
    """See to it that a checkpointed module is a unit, or one of its modules, in run and plan.

    Raises:
        MissingDataError: It is not.
        PlanError: The plan names the model itself, as `apply_plan` refuses it.
    """
    if module == ROOT and module in wanted.checkpointing.full:
        raise PlanError(
            "The plan checkpoints the model itself. Expected parts of it, whose parent can hold "
            "torch's wrapper. Name its blocks instead, such as 'layers.*'."
        )
    names = [name for unit in work.units for name in parameters_of(unit)]
    planned = owned_parameters(wanted.units, [name for name in names if is_inside(name, module)])
    inside = [unit for unit in work.units if any(is_inside(p, module) for p in parameters_of(unit))]
    if sum(bool(owned) for owned in planned.values()) > 1 or len(inside) > 1:
        raise MissingDataError(
            f"The plan checkpoints {module!r} otherwise, in which several units gather: their "
            "all-gathers would move into the repeated forward, which is not played. Expected "
            "whole units. Make it one unit, or checkpoint its parts."
        )
    for unit in inside:
        if not all(_is_around(each, changed) for each in unit.modules):
            raise MissingDataError(
                f"The plan checkpoints {module!r} otherwise, which ran as a part of the unit "
                f"{format_unit(unit.fqn)}: what that part takes and keeps the run does not tell. "
                "Expected whole units. Record a run in which it is a unit by itself."
            )


def _covered(units: Sequence[Unit], modules: Collection[str]) -> set[int]:
    """The units, by index in the workload, that lie within some modules."""
    return {
        at
        for at, unit in enumerate(units)
        if all(_is_around(module, modules) for module in unit.modules)
    }


def _is_around(module: str, others: Collection[str]) -> bool:
    return any(module == other or is_inside(module, other) for other in others)


# --- time


def _repeated(workload: Workload, added: Collection[int], removed: Collection[int]) -> list[Piece]:
    """The pieces, of which those inside some units are repeated in backward, or are no more."""
    inside = set(_inside(workload))
    return [
        _repeating(piece)
        if at in inside and piece.unit in added
        else _not_repeating(piece)
        if at in inside and piece.unit in removed
        else piece
        for at, piece in enumerate(workload.pieces)
    ]


def _inside(workload: Workload) -> Iterator[int]:
    """The pieces that run between their unit's entry and its end."""
    entered: list[int] = []
    for op, index in workload.tape:
        if op is Op.ENTER:
            entered.append(index)
        elif op is Op.LEAVE:
            entered.remove(index)
        elif workload.pieces[index].unit in entered:
            yield index


def _repeating(piece: Piece) -> Piece:
    return replace(
        piece,
        recompute_ns=piece.forward_ns,
        backward_launch_ns=piece.backward_launch_ns + piece.forward_launch_ns,
    )


def _not_repeating(piece: Piece) -> Piece:
    """Where the run does not tell what was repeated, that is the forward."""
    unknown = 0 if piece.recompute_ns else piece.forward_ns
    return replace(
        piece,
        recompute_ns=0,
        backward_ns=max(piece.backward_ns - unknown, 0),
        backward_launch_ns=max(piece.backward_launch_ns - piece.forward_launch_ns, 0),
    )


# --- memory


def _refuse_memory(
    work: RecordedWork, memory: MemoryWork, added: Collection[int], removed: Collection[int]
) -> str | None:
    """Why the memory is not known; None: it is."""
    if removed:
        return (
            "Memory cannot be told: what a forward keeps without checkpointing is not seen in a "
            "run with it. " + _FORECAST.format("none")
        )
    pairs = zip(work.workload.pieces, memory.pieces, strict=True)
    kept = [(piece.unit, each) for piece, each in pairs if piece.unit in added and each.kept]
    is_told = all(len(work.units[unit].modules) == 1 and 0 < each.output <= each.kept
                  for unit, each in kept)  # fmt: skip
    if is_told:
        return None
    return (
        "Memory cannot be told: the run does not tell how much of the activations of each "
        "checkpointed module is its output. " + _FORECAST.format("full")
    )


def _forgetting(memory: MemoryWork, pieces: Sequence[Piece], added: Collection[int]) -> MemoryWork:
    """The memory with some units' activations forgotten in forward."""
    return replace(
        memory,
        pieces=[
            _forgotten(each) if piece.unit in added else each
            for piece, each in zip(pieces, memory.pieces, strict=True)
        ],
    )


def _forgotten(piece: PieceMemory) -> PieceMemory:
    """In forward the output stays; in backward the rest comes back before anything else does."""
    saved = piece.kept - piece.output
    return replace(
        piece,
        kept=piece.output,
        forward=None,
        backward=None,
        backward_rise=max(piece.forward_rise, saved + piece.backward_rise),
    )
