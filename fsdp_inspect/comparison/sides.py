"""Group runs into the sides of a comparison, and select the median run of each side."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from fsdp_inspect.analysis.kernels import Kernels, find_profile
from fsdp_inspect.analysis.scalars import ScalarSeries, measure_loss
from fsdp_inspect.analysis.summary import Summary, measure_summary
from fsdp_inspect.analysis.trust import Trust, measure_trust
from fsdp_inspect.comparison.increases import LineBytes, lines_at
from fsdp_inspect.comparison.settings import are_repeats
from fsdp_inspect.trace.run import RunManifest, RunSource, TableOrigin, Unit


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a side, with the results of all analyses."""

    manifest: RunManifest
    summary: Summary
    trust: Trust
    lines: tuple[LineBytes, ...] = ()
    """The lines that allocated the memory at the peak of the memory steps; empty: not recorded."""
    loss: ScalarSeries | None = None
    """The logged loss of the training; None: none was logged."""

    @property
    def step_time_ns(self) -> int | None:
        """Duration of the run's typical step; None without a timed step."""
        times = self.summary.step_time_ns
        return times.typical if times else None


@dataclass(frozen=True, slots=True)
class MeasuredSide:
    """One side: a run, or several repeats of it."""

    label: str
    """`A` for the reference, then `B`, `C`, ...; or the name of the median run."""
    runs: tuple[MeasuredRun, ...]
    median_run: MeasuredRun
    """The run with the side's median step time (the lower one of two). Its breakdown and units
    represent the side. Runs without a timed step come last."""
    kernels: Kernels | None = None
    """The kernels of the median run's profiled steps; None: no step was profiled."""


def form_sides(
    given: Sequence[RunSource | Sequence[RunSource]],
    *,
    summary: Callable[[RunSource], Summary] = measure_summary,
    names: Mapping[TableOrigin, str] | None = None,
) -> tuple[MeasuredSide, ...]:
    """Group runs into sides, in their order.

    Args:
        given: Runs, or lists of runs. A list is one side. Single runs with the same settings form
            one side. If that leaves one side only, each run is its own side: the comparison of
            runs of one configuration shows the noise.
        summary: Returns the summary of a run, so that a caller can pass a cached one; called once
            per run.
        names: Different names by the origin of the run. Each side has the name of its median run as
            its label.

    Raises:
        ValueError: There are fewer than two sides, or one of them is empty.
    """
    if len(given) < 2 or any(isinstance(side, Sequence) and not side for side in given):
        raise ValueError(
            f"A comparison needs at least two runs or non-empty lists of runs, got {len(given)}. "
            "Add a run to compare with."
        )
    listed = [list(side) if isinstance(side, Sequence) else [side] for side in given]
    groups = listed
    if all(len(members) == 1 for members in listed):
        joined = _join_repeats([members[0] for members in listed])
        groups = joined if len(joined) > 1 else listed
    sides = (_side(label_of(place), members, summary) for place, members in enumerate(groups))
    return tuple(_named(side, names or {}) for side in sides)


def label_of(place: int) -> str:
    """Return `A` to `Z`, then `A1` to `Z1`, and so on."""
    number, letter = divmod(place, len(ascii_uppercase))
    return f"{ascii_uppercase[letter]}{number or ''}"


def _join_repeats(runs: Sequence[RunSource]) -> list[list[RunSource]]:
    groups: list[list[RunSource]] = []
    for run in runs:
        for group in groups:
            if are_repeats(group[0].manifest, run.manifest):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _side(
    label: str, runs: Sequence[RunSource], summary: Callable[[RunSource], Summary]
) -> MeasuredSide:
    measured = tuple(_measure(run, summary(run)) for run in runs)
    ordered = sorted(measured, key=lambda run: (run.step_time_ns is None, run.step_time_ns or 0))
    timed = [run for run in ordered if run.step_time_ns is not None]
    candidates = timed or ordered
    middle = candidates[(len(candidates) - 1) // 2]
    source = runs[next(place for place, run in enumerate(measured) if run is middle)]
    return MeasuredSide(label, measured, middle, find_profile(source))


def _measure(run: RunSource, summary: Summary) -> MeasuredRun:
    peak = summary.memory.peak
    return MeasuredRun(
        run.manifest,
        summary,
        measure_trust(run),
        () if peak is None else lines_at(run, peak),
        measure_loss(run),
    )


def _named(side: MeasuredSide, names: Mapping[TableOrigin, str]) -> MeasuredSide:
    return replace(side, label=names.get(side.median_run.manifest.origin(), side.label))


# --- Align the units of several runs, even if the wrap policy differs.
#
# Units with the same name are the same unit. The other units are aligned by modules: a unit that
# contains (or is part of) a module of another side's unit shares a row with it. So the unit
# `layers.0, layers.1` of one run is aligned with `layers.0` and `layers.1` of another, and a block
# with its two halves. The root owns the parameters of no other unit, so it is aligned with roots
# only.


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
    return min((unit.order, side) for side, own in enumerate(row.members) for unit in own)


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
