"""Align the units of several runs, even if the wrap policy differs.

Units with the same name are the same unit. The other units are aligned by modules: a unit that
contains (or is part of) a module of another side's unit shares a row with it. So the unit
`layers.0, layers.1` of one run is aligned with `layers.0` and `layers.1` of another, and a block
with its two halves. The root owns the parameters of no other unit, so it is aligned with roots
only.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_inspect.trace.run import Unit


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One row of aligned units."""

    members: tuple[tuple[Unit, ...], ...]
    """The units of each side; empty if a side has none in this row."""

    @property
    def is_regrouped(self) -> bool:
        """Whether the sides wrap the same modules into different units."""
        return any(len(own) > 1 for own in self.members) or self._has_several_names

    @property
    def _has_several_names(self) -> bool:
        return len({unit.fqn for own in self.members for unit in own}) > 1


def align_units(sides: Sequence[Sequence[Unit]]) -> tuple[UnitRow, ...]:
    """Align the units of several runs.

    Args:
        sides: The units of each run.

    Returns:
        Rows in the execution order of the first side that has them; every unit is in one row.
    """
    nodes = [(side, unit) for side, units in enumerate(sides) for unit in units]
    held_by = Counter(unit.fqn for _, unit in nodes)
    parents = list(range(len(nodes)))
    first_of: dict[str, int] = {}
    for position, (_, unit) in enumerate(nodes):
        parents[position] = first_of.setdefault(unit.fqn, position)
    loose = [position for fqn, position in first_of.items() if held_by[fqn] < len(sides)]
    for place, second in enumerate(loose):
        for first in loose[:place]:
            if _overlap(nodes[first][1], nodes[second][1]):
                parents[_root(parents, second)] = _root(parents, first)
    groups: dict[int, list[tuple[int, Unit]]] = {}
    for position, node in enumerate(nodes):
        groups.setdefault(_root(parents, position), []).append(node)
    rows = [_row(members, len(sides)) for members in groups.values()]
    return tuple(sorted(rows, key=_order))


def _row(members: Sequence[tuple[int, Unit]], num_sides: int) -> UnitRow:
    return UnitRow(
        tuple(
            tuple(unit for side, unit in members if side == wanted) for wanted in range(num_sides)
        )
    )


def _order(row: UnitRow) -> tuple[float, int]:
    return min((_position(unit), side) for side, own in enumerate(row.members) for unit in own)


def _position(unit: Unit) -> float:
    return float("inf") if unit.execution_index < 0 else unit.execution_index


def _overlap(unit: Unit, other: Unit) -> bool:
    """Return whether one unit contains a module of the other, or a part of one."""
    return any(
        _contains(outer, inner) or _contains(inner, outer)
        for outer in _modules(unit)
        for inner in _modules(other)
    )


def _modules(unit: Unit) -> Iterator[str]:
    yield from (module for module in unit.modules if module)


def _contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def _root(parents: list[int], position: int) -> int:
    while parents[position] != position:
        parents[position] = parents[parents[position]]
        position = parents[position]
    return position
