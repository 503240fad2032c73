"""Compare a plan with the plan that ran.

A setting that the plan leaves to torch (None) never differs. The exception is
`reshard_after_forward`, for which torch's rule for the root applies.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.plan import SETTINGS, Plan, UnitPlan

UNITS = "units"
"""The name of a difference in the units themselves."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """One setting of a plan that differs from the plan that ran."""

    name: str
    where: str
    """A description of the units with this difference; empty for the whole plan."""
    asked: Any
    ran: Any


def find_plan_differences(
    asked: Plan, ran: Plan, *, with_parameters: Collection[str]
) -> tuple[PlanDifference, ...]:
    """Return the differences between a plan and the plan that ran.

    Args:
        asked: The requested plan, resolved.
        ran: The observed plan, resolved.
        with_parameters: Names of the units that manage parameters. Prefetch skips other units, and
            their settings cannot be observed.
    """
    return (
        *_cut_otherwise(asked, ran),
        *_unit_settings(asked, ran, with_parameters),
        *_prefetch(asked, ran, with_parameters),
        *_of_the_whole(asked, ran),
    )


def _cut_otherwise(asked: Plan, ran: Plan) -> Iterator[PlanDifference]:
    first, second = set(asked.unit_names), set(ran.unit_names)
    if first != second:
        only_asked = [name for name in asked.unit_names if name not in second]
        only_ran = [name for name in ran.unit_names if name not in first]
        yield PlanDifference(UNITS, "", _name_units(only_asked), _name_units(only_ran))


def _unit_settings(
    asked: Plan, ran: Plan, with_parameters: Collection[str]
) -> Iterator[PlanDifference]:
    ran_units = {unit.name: unit for unit in ran.units if unit.name in with_parameters}
    pairs = [(unit, ran_units[unit.name]) for unit in asked.units if unit.name in ran_units]
    roots = asked.fsdp_roots, ran.fsdp_roots
    for setting in SETTINGS:
        found: dict[tuple[Any, Any], list[str]] = {}
        for first, second in pairs:
            values = (
                _value(first, setting, is_root=first.name in roots[0]),
                _value(second, setting, is_root=second.name in roots[1]),
            )
            if values[0] is not None and values[0] != values[1]:
                found.setdefault(values, []).append(first.name)
        for (wanted, got), names in found.items():
            where = f"all {len(names)} units" if len(names) == len(pairs) else _name_units(names)
            yield PlanDifference(setting, where, wanted, got)


def _value(unit: UnitPlan, setting: str, *, is_root: bool) -> Any:
    value = getattr(unit, setting)
    if setting == "reshard_after_forward" and value is None:
        return not is_root
    return value


def _prefetch(asked: Plan, ran: Plan, with_parameters: Collection[str]) -> Iterator[PlanDifference]:
    directions: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    for direction in directions:
        first, second = (
            plan.prefetch_lists(direction, without=set(plan.unit_names) - set(with_parameters))
            for plan in (asked, ran)
        )
        if first != second:
            name = f"{direction}_prefetch"
            yield PlanDifference(name, "", getattr(asked, name), getattr(ran, name))


def _of_the_whole(asked: Plan, ran: Plan) -> Iterator[PlanDifference]:
    for name in ("world_size", "mesh", "accumulation", "checkpointing"):
        wanted, got = getattr(asked, name), getattr(ran, name)
        if wanted and wanted != got:
            yield PlanDifference(name, "", _plain(wanted), _plain(got))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _name_units(names: list[str]) -> str:
    if not names:
        return "none"
    shown = "; ".join(format_unit(name) for name in names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown
