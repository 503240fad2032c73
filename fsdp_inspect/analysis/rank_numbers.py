"""Measure the numbers of a rank that a monitor shows, by unit.

They are the numbers of the typical step of the given steps: the timed steps of a completed run, or
the last steps of a live run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Phase, StepPart
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.tables import rows_of


@dataclass(frozen=True, slots=True)
class UnitNumbers:
    """One unit's communication, per step."""

    name: str
    """The fqn, `(root)` for the root, with the index if several units have the same fqn."""
    exposed_ns: int
    """Exposed time of all its collectives."""
    all_gather_ns: int
    """Time in flight of its all-gathers, exposed or not."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """The typical step of one rank."""

    last_step: int
    num_steps: int
    """The number of given steps."""
    step_time_ns: int
    exposed_ns: int
    communication_ns: int
    data_ns: int
    """The time of waiting for the next batch."""
    units: tuple[UnitNumbers, ...]


def measure_rank_numbers(member: RankSteps, units: Sequence[Unit]) -> RankNumbers:
    """Measure the typical step of a rank.

    Args:
        member: The steps of the rank, at least one.
        units: The units of the model.
    """
    inspected = member.inspected
    data = rows_of(inspected.rows, kinds=[StepPart.DATA])
    trained = inspected.rows.where(inspected.rows.phase != Phase.EVALUATION)
    collectives = rows_of(trained, kinds=sorted(COLLECTIVES))
    gathers = rows_of(trained, kinds=[EventKind.ALL_GATHER])
    num_units = Counter(unit.fqn for unit in units)
    return RankNumbers(
        last_step=int(member.steps[-1]),
        num_steps=len(member.steps),
        step_time_ns=member.typical(member.step_time_ns),
        exposed_ns=member.typical(member.exposed_ns),
        communication_ns=member.typical(member.communication_ns),
        data_ns=inspected.typical_per_step(data, "duration_ns"),
        units=tuple(
            UnitNumbers(
                name=_name(unit, is_unique=num_units[unit.fqn] == 1),
                exposed_ns=inspected.typical_per_step(
                    collectives.where(collectives.unit == unit.index), "exposed_ns"
                ),
                all_gather_ns=inspected.typical_per_step(
                    gathers.where(gathers.unit == unit.index), "duration_ns"
                ),
            )
            for unit in units
        ),
    )


def _name(unit: Unit, *, is_unique: bool) -> str:
    name = format_unit(unit.fqn)
    return name if is_unique else f"{name} [{unit.index}]"
