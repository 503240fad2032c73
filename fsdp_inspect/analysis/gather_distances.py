"""Measure how far ahead ZeRO-3 gathers parameters, and which parameters it keeps gathered.

DeepSpeed counts both distances in parameters: `prefetch_bucket_size` limits how many it gathers
ahead, and a parameter that is used again within `max_reuse_distance` stays gathered. The settings
are limits. This analysis measures the distances of the gathers and uses that happened:

    prefetch distance   parameters of the units that begin between the issue of a gather and its use
    reuse distance      parameters of the units that begin between a forward of a unit and the next
                        use of it: its backward, or a forward that checkpointing repeats

The distances can exceed the settings. DeepSpeed prefetches at every module, also at those without
parameters, and keeps a parameter that is still gathered when it would prefetch it again.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import RankSteps
from fsdp_inspect.columns import (
    TableSpec,
    metric_column,
    number_column,
    unit_column,
    value_column,
)
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.sharders import ZERO3
from fsdp_inspect.trace.tables import EventTable

_Int64 = NDArray[np.int64]
_USES = (EventKind.FORWARD, EventKind.BACKWARD)


@dataclass(frozen=True, slots=True)
class GatherDistance:
    """One unit's distances, over all timed steps of a rank."""

    fqn: str
    num_parameters: int
    num_prefetched: int
    """Number of prefetched all-gathers that this unit waited for first."""
    prefetch_distance: int | None
    """Median prefetch distance in parameters; None without a prefetched all-gather."""
    reuse_distance: int | None
    """Median reuse distance in parameters; None if the unit has no backward."""
    kept_ratio: float | None
    """Fraction of these later uses for which the parameters were still gathered."""


@dataclass(frozen=True, slots=True)
class GatherDistances:
    """The distances of all units on one rank."""

    units: tuple[GatherDistance, ...]
    longest_prefetch: int | None
    """The longest prefetch distance in parameters; None without a prefetched all-gather."""
    longest_kept: int | None
    """The longest reuse distance after which a unit was still gathered; None: no unit was. Units
    with persistent parameters, which are always gathered, do not count."""
    shortest_released: int | None
    """The shortest reuse distance after which a unit was gathered again; None: no unit was."""
    settings: dict[str, str]
    """DeepSpeed's limits by name; empty if the run does not have them."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Prefetch and reuse distances",
        (
            unit_column("The unit."),
            metric_column("num_parameters", label="params"),
            number_column(
                "num_prefetched",
                "Prefetched all-gathers that this unit waited for first.",
                label="prefetched",
            ),
            number_column(
                "prefetch_distance",
                "Parameters of the units that begin between the issue of a gather and its use.",
                label="ahead",
            ),
            number_column(
                "reuse_distance",
                "Parameters of the units that begin between two uses of this unit.",
                label="until reuse",
            ),
            value_column(
                "kept_ratio",
                MetricUnit.RATIO,
                "Fraction of the later uses for which the parameters were still gathered.",
                label="kept",
            ),
        ),
    )


def measure_gather_distances(run: RunSource, member: RankSteps | None) -> GatherDistances | None:
    """Measure the distances of a rank; None without timed steps, and for other sharders."""
    if member is None or run.manifest.sharder != ZERO3:
        return None
    events = run.events(
        member.rank, steps=member.steps.tolist(), kinds=[*_USES, EventKind.ALL_GATHER]
    )
    uses = events.where(np.isin(events.kind, _USES) & (events.unit != NO_UNIT))
    uses = uses.where(np.argsort(uses.start_ns, kind="stable"))
    sizes = {unit.index: unit.num_parameters for unit in run.manifest.units}
    prefetched = _prefetch_distances(events, uses, sizes)
    reuses = _reuse_distances(uses, sizes)
    shared = [unit.index for unit in run.manifest.units if unit.reshard_after_forward]
    kept = [each for unit in shared for each, is_kept in reuses[unit] if is_kept]
    released = [each for unit in shared for each, is_kept in reuses[unit] if not is_kept]
    settings = ("prefetch_bucket_size", "max_reuse_distance")
    return GatherDistances(
        units=tuple(
            GatherDistance(
                fqn=unit.fqn,
                num_parameters=unit.num_parameters,
                num_prefetched=len(prefetched[unit.index]),
                prefetch_distance=median(prefetched[unit.index]),
                reuse_distance=median([each for each, _ in reuses[unit.index]]),
                kept_ratio=_ratio([is_kept for _, is_kept in reuses[unit.index]]),
            )
            for unit in sorted(run.manifest.units, key=lambda unit: unit.execution_index)
        ),
        longest_prefetch=max((max(own) for own in prefetched.values() if own), default=None),
        longest_kept=max(kept, default=None),
        shortest_released=min(released, default=None),
        settings={
            name: run.manifest.observed[name] for name in settings if name in run.manifest.observed
        },
    )


def _prefetch_distances(
    events: EventTable, uses: EventTable, sizes: Mapping[int, int]
) -> defaultdict[int, list[int]]:
    """Return the prefetch distances by unit."""
    gathers = events.where((events.kind == EventKind.ALL_GATHER) & (events.unit != NO_UNIT))
    gathers = gathers.where(((gathers.flags & EventFlag.PREFETCHED) != 0) & (gathers.need_ns >= 0))
    before = _sizes_before(uses, sizes)
    issued = before[np.searchsorted(uses.start_ns, gathers.issue_ns)]
    needed = before[np.searchsorted(uses.start_ns, gathers.need_ns)]
    found: defaultdict[int, list[int]] = defaultdict(list)
    for unit, distance in zip(gathers.unit.tolist(), (needed - issued).tolist(), strict=True):
        found[unit].append(distance)
    return found


def _reuse_distances(
    uses: EventTable, sizes: Mapping[int, int]
) -> defaultdict[int, list[tuple[int, bool]]]:
    """Return, by unit, each reuse distance, and whether the unit was still gathered."""
    before = _sizes_before(uses, sizes)
    last: dict[tuple[int, int], int] = {}
    found: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    for place, key in enumerate(zip(uses.step.tolist(), uses.unit.tolist(), strict=True)):
        if key in last:
            is_kept = bool(uses.flags[place] & EventFlag.STILL_GATHERED)
            found[key[1]].append((int(before[place] - before[last.pop(key) + 1]), is_kept))
        if uses.kind[place] == EventKind.FORWARD:
            last[key] = place
    return found


def _sizes_before(uses: EventTable, sizes: Mapping[int, int]) -> _Int64:
    """Return the total parameters of the uses before each use, and of all, shape (uses + 1,)."""
    return np.cumsum([0, *(sizes.get(unit, 0) for unit in uses.unit.tolist())])


def _ratio(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
