"""Measure the few numbers of a rank that a monitor shows, by unit.

They are those of the typical step among the given ones: of a finished run the timed steps, of a
live one the last ones.
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
    """Its fqn; the root's is `(root)`; with its index where several units have one name."""
    exposed_ns: int
    """Of all its collectives."""
    all_gather_ns: int
    """Time that its all-gathers are in flight, exposed or not."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """One rank's steps."""

    last_step: int
    num_steps: int
    """Steps that were given."""
    step_time_ns: int
    exposed_ns: int
    communication_ns: int
    data_ns: int
    """Waiting for the next batch."""
    units: tuple[UnitNumbers, ...]


def measure_rank_numbers(member: RankSteps, units: Sequence[Unit]) -> RankNumbers:
    """The numbers of a rank's typical step.

    Args:
        member: Its steps, at least one.
        units: Those of the model.
    """
    data = rows_of(member.rows, kinds=[StepPart.DATA])
    trained = member.rows.where(member.rows.phase != Phase.EVALUATION)
    collectives = rows_of(trained, kinds=sorted(COLLECTIVES))
    gathers = rows_of(trained, kinds=[EventKind.ALL_GATHER])
    times = Counter(unit.fqn for unit in units)
    return RankNumbers(
        last_step=int(member.steps[-1]),
        num_steps=len(member.steps),
        step_time_ns=member.typical(member.step_time_ns),
        exposed_ns=member.typical(member.exposed_ns),
        communication_ns=member.typical(member.communication_ns),
        data_ns=member.typical_per_step(data, "duration_ns"),
        units=tuple(
            UnitNumbers(
                name=_name(unit, is_alone=times[unit.fqn] == 1),
                exposed_ns=member.typical_per_step(
                    collectives.where(collectives.unit == unit.index), "exposed_ns"
                ),
                all_gather_ns=member.typical_per_step(
                    gathers.where(gathers.unit == unit.index), "duration_ns"
                ),
            )
            for unit in units
        ),
    )


def _name(unit: Unit, *, is_alone: bool) -> str:
    name = format_unit(unit.fqn)
    return name if is_alone else f"{name} [{unit.index}]"
