"""Change the activation checkpointing of the recorded work: repeat forwards in backward, or not.

Under full activation checkpointing torch (2.13, the non-reentrant kind) keeps the input of a unit
and drops the activations of its forward. Backward repeats the forward before it begins. The
repeated forward is therefore added to backward, where it also hides communication. The output of
the unit stays. The other activations exist only while its own backward runs.

A recorded memory step shows the activations that a forward keeps, the rise of memory in it, and the
size of its output. No recorded data shows the activations that a checkpointed unit would keep
without checkpointing.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.errors import MissingDataError, PlanError
from fsdp_inspect.formatting import format_unit, listed
from fsdp_inspect.simulation.memory import MemoryWork, PieceMemory
from fsdp_inspect.simulation.parameters import parameters_of
from fsdp_inspect.simulation.recorded import RecordedWork
from fsdp_inspect.simulation.workload import Op, Piece, Workload
from fsdp_inspect.trace.plan import (
    ROOT,
    Checkpointing,
    Plan,
    modules_around,
    owned_parameters,
)
from fsdp_inspect.trace.run import Unit

_REPEATED = (
    "A repeated forward takes as long as the recorded one. Torch stops it after the last tensor "
    "that it needs, so it may take less."
)
_OUTPUT_STAYS = (
    "Of a checkpointed unit's activations, the output stays, and the rest exists in its backward."
)
_FORECAST = (
    "`fsdp-inspect plan memory --help` shows how to compute it for your model without a run "
    "(--set checkpointing={})."
)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The recorded work with other units checkpointed."""

    work: RecordedWork
    assumptions: tuple[str, ...] = ()
    memory_refusal: str | None = None
    """The reason why the memory of this work is unknown; None: it is known, or the run's was
    unknown."""


def recompute(work: RecordedWork, recorded: Plan, wanted: Plan) -> Recomputation:
    """Change the checkpointing of the recorded work to that of another plan.

    Args:
        work: The recorded work of the run.
        recorded: The plan that ran.
        wanted: The other plan, resolved.

    Raises:
        MissingDataError: The change affects a part of a unit, selective checkpointing, or units
            whose forward the script itself repeats.
        PlanError: The other plan newly checkpoints the model itself.
    """
    before, after = recorded.checkpointing, wanted.checkpointing
    if set(before.selective) != set(after.selective):
        raise _refuse_selective(before, after)
    changed = set(before.full) ^ set(after.full)
    kept = describe_own_repetition(work, recorded)
    if not changed:
        return Recomputation(work, (kept,) if kept else ())
    if kept:
        raise MissingDataError(
            f"Unsupported change of checkpointing: {kept[0].lower()}{kept[1:]} Expected a run "
            "without such calls. Change them in the script, and record again."
        )
    _check_whole(work, wanted, changed)
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


def describe_own_repetition(work: RecordedWork, recorded: Plan) -> str:
    """A sentence about forwards that the script repeats and the plan does not; empty: none."""
    if recorded.checkpointing.full or recorded.checkpointing.selective:
        return ""
    own = {piece.unit for piece in work.workload.pieces if piece.recompute_ns}
    if not own:
        return ""
    names = listed([format_unit(work.units[at].fqn) for at in sorted(own)], 3)
    return (
        f"The script itself repeats the forward of {names} in backward (calls of "
        "torch.utils.checkpoint), and plans keep this."
    )


def _refuse_selective(before: Checkpointing, after: Checkpointing) -> MissingDataError:
    return MissingDataError(
        f"Unsupported change of selective checkpointing: the plan has {len(after.selective)} "
        f"modules, the run {len(before.selective)}, and the run does not show their memory and "
        "repeated work. Expected full checkpointing of whole units, or none. Record a run of the "
        "plan, or forecast its memory: fsdp-inspect plan memory --set checkpointing=selective."
    )


def _check_whole(work: RecordedWork, wanted: Plan, changed: Collection[str]) -> None:
    """Check that each checkpointed module is a unit of the run and the plan, or one of its modules.

    Raises:
        MissingDataError: A module is not a unit.
        PlanError: The plan names the model itself, which `apply_plan` rejects too.
    """
    ran = _inside_modules(
        ((at, name) for at, unit in enumerate(work.units) for name in parameters_of(unit)), changed
    )
    names = [name for unit in work.units for name in parameters_of(unit)]
    owned = owned_parameters(wanted.units, names)
    planned = _inside_modules(
        ((at, name) for at, own in enumerate(owned.values()) for name in own), changed
    )
    for module in sorted(changed):
        if module == ROOT and module in wanted.checkpointing.full:
            raise PlanError(
                "Invalid checkpointing of the model itself. Expected modules with a parent that "
                "can hold torch's wrapper. Name its blocks instead, such as 'layers.*'."
            )
        inside = [work.units[at] for at in ran[module]]
        if len(planned[module]) > 1 or len(inside) > 1:
            raise MissingDataError(
                f"Unsupported change of the checkpointing of {module!r}: several units gather in "
                "it, and their all-gathers would move into the repeated forward. Expected whole "
                "units. Make the module one unit, or checkpoint its parts."
            )
        for unit in inside:
            if not all(_is_around(each, changed) for each in unit.modules):
                raise MissingDataError(
                    f"Unsupported change of the checkpointing of {module!r}: it ran as a part of "
                    f"the unit {format_unit(unit.fqn)}, and the run does not show the part's time "
                    "and memory. Expected whole units. Record a run in which it is a separate unit."
                )


def _inside_modules(
    parameters: Iterable[tuple[int, str]], modules: Collection[str]
) -> dict[str, dict[int, None]]:
    """By module, the units that own parameters inside it, in order.

    Args:
        parameters: The unit of each parameter, by index, and its name.
        modules: The modules.
    """
    found: dict[str, dict[int, None]] = {module: {} for module in modules}
    for unit, parameter in parameters:
        for module in modules_around(parameter):
            if module in found:
                found[module][unit] = None
    return found


def _covered(units: Sequence[Unit], modules: Collection[str]) -> set[int]:
    """The units, by index in the workload, that are inside some modules."""
    return {
        at
        for at, unit in enumerate(units)
        if all(_is_around(module, modules) for module in unit.modules)
    }


def _is_around(module: str, others: Collection[str]) -> bool:
    return module in others or any(each in others for each in modules_around(module))


# --- time


def _repeated(workload: Workload, added: Collection[int], removed: Collection[int]) -> list[Piece]:
    """The pieces, with added or removed repetition for the pieces inside some units."""
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
    for one in workload.forwards:
        entered: list[int] = []
        for op, index in one.tape:
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
    """Repetition without a recorded time counts as long as the forward."""
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
    """The reason why the memory is unknown; None: it is known."""
    if removed:
        return (
            "Memory is unknown: a run with checkpointing does not show the activations of a "
            "forward without it. " + _FORECAST.format("none")
        )
    pairs = zip(work.workload.pieces, memory.pieces, strict=True)
    kept = [(piece.unit, each) for piece, each in pairs if piece.unit in added and each.kept]
    is_known = all(len(work.units[unit].modules) == 1 and 0 < each.output <= each.kept
                  for unit, each in kept)  # fmt: skip
    if is_known:
        return None
    return (
        "Memory is unknown: the run does not show the output's part of the activations of each "
        "checkpointed module. " + _FORECAST.format("full")
    )


def _forgetting(memory: MemoryWork, pieces: Sequence[Piece], added: Collection[int]) -> MemoryWork:
    """The memory of the workload if some units drop their activations in forward.

    A stretch of backward can have a piece of its own, which keeps nothing in forward.
    """
    return replace(
        memory,
        pieces=[
            _forgotten(each) if piece.unit in added and each.kept else each
            for piece, each in zip(pieces, memory.pieces, strict=True)
        ],
    )


def _forgotten(piece: PieceMemory) -> PieceMemory:
    """The memory of a piece that keeps only its output in forward and recomputes the rest."""
    saved = piece.kept - piece.output
    return replace(
        piece,
        kept=piece.output,
        forward=None,
        backward=None,
        backward_rise=max(piece.forward_rise, saved + piece.backward_rise),
    )
