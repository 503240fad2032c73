"""Split the waits for late ranks by dimension of the device mesh, and name the late ranks.

At a collective, a rank waits from its own arrival to that of the last rank. A late rank makes its
TP group wait at a TP collective. After that, its whole TP group is late at the collectives of FSDP,
so other TP groups wait along `shard`. So each dimension has late ranks of its own.

[Note: late ranks] A rank causes the waits at the collectives at which it arrives last. The late
ranks of a dimension are those that cause the most, up to the first rank that causes less than a
third of the rank before it. They are named if they cause at least half of the waits along the
dimension and are at most half of its ranks. Otherwise the ranks are late in turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.mesh_dimensions import group_dimensions, rank_coordinates
from fsdp_inspect.analysis.stragglers.arrivals import NEVER, Arrivals
from fsdp_inspect.columns import TableSpec, number_column, text_column, value_column
from fsdp_inspect.formatting import format_numbers
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.trace.run import RunSource

LEAST_CAUSED_RATIO = 0.5
LEAST_DROP = 3
"""Waits that the least of the late ranks causes / waits that the next rank causes."""
LEAST_WAIT_RATIO = 0.1
"""Wait / longest wait for a straggler along a dimension below which the wait is not named."""


@dataclass(frozen=True, slots=True)
class DimensionWait:
    """The waits for late ranks along one dimension of the mesh, per step."""

    dimension: str
    """The label of the dimension; `world` and `other` are groups without a dimension."""
    late_wait_ns: int
    """Wait per step of the rank that waits longest."""
    waiting_rank: int
    """The rank that waits longest."""
    late_ranks: tuple[int, ...]
    """The ranks of [Note: late ranks]. Empty if ranks are late in turns, or if nothing waits."""
    late_place: str
    """The coordinates that only the late ranks have, such as `shard 0, tp 1`; empty if unknown."""
    caused_ratio: float
    """Fraction of the waits along the dimension that the late ranks cause, 0 to 1."""
    num_collectives: int
    """Number of sampled collectives along the dimension."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Waits for late ranks by mesh dimension",
        (
            text_column("dimension", "The dimension of the mesh."),
            value_column(
                "late_wait_ns",
                MetricUnit.NS,
                "Wait per step for the last rank to arrive, on the rank that waits longest.",
                label="wait per step",
            ),
            number_column("waiting_rank", "The rank that waits longest.", label="on rank"),
            text_column(
                "late_ranks",
                "The ranks that cause most of the waits along the dimension. Missing: the ranks "
                "take turns in arriving last.",
                lambda row: format_numbers(row.late_ranks) if row.late_ranks else None,
            ),
            text_column(
                "late_place", "The position of the late ranks in the mesh.", label="position"
            ),
            value_column(
                "caused_ratio",
                MetricUnit.RATIO,
                "Fraction of the waits along the dimension that the late ranks cause.",
                lambda row: row.caused_ratio if row.late_ranks else None,
                label="cause",
            ),
            number_column("num_collectives", "Sampled collectives.", label="collectives"),
        ),
    )


def measure_dimension_waits(
    run: RunSource, arrivals: Arrivals, uncertainty_ns: int
) -> tuple[DimensionWait, ...]:
    """Split the waits for late ranks by dimension of the mesh.

    Args:
        run: A recorded run.
        arrivals: The arrivals at all sampled collectives.
        uncertainty_ns: The uncertainty of the clocks. A shorter wait counts as none.

    Returns:
        Ordered as the dimensions are. Empty without aligned clocks, and for a mesh of one
        dimension.
    """
    aligned = arrivals.aligned()
    places = {rank: rank_coordinates(run, rank) for rank in aligned.ranks}
    if len(aligned) == 0 or not any(len(place) > 1 for place in places.values()):
        return ()
    last, waits = aligned.last(), _waits(aligned, uncertainty_ns)
    num_steps = len(np.unique(aligned.rows.step))
    by_label = group_dimensions(run, aligned.ranks[0]).by_label(aligned.rows.group)
    found = []
    for label, rows in by_label.items():
        took_part = (aligned.arrival_ns[rows] != NEVER).any(axis=0)
        caused = np.zeros(len(aligned.ranks))
        np.add.at(caused, last[rows], waits[rows].sum(axis=1))
        late, ratio = _find_late(aligned.ranks, caused, int(np.count_nonzero(took_part)))
        waited = waits[rows].sum(axis=0)
        longest = int(np.argmax(waited))
        found.append(
            DimensionWait(
                dimension=label,
                late_wait_ns=int(waited[longest]) // num_steps,
                waiting_rank=aligned.ranks[longest],
                late_ranks=late,
                late_place=_common_place(late, places),
                caused_ratio=ratio,
                num_collectives=len(rows),
            )
        )
    return tuple(found)


def waits_for(run: RunSource, arrivals: Arrivals, rank: int, uncertainty_ns: int) -> dict[str, int]:
    """Measure how long other ranks wait for one rank, per step.

    Returns:
        By dimension, the wait of the rank that waits longest, at the collectives at which `rank`
        arrives last, longest first. Dimensions with less than a tenth of the longest wait are
        absent. Empty for a mesh of one dimension.
    """
    aligned = arrivals.aligned()
    if rank not in aligned.ranks or len(rank_coordinates(run, rank)) < 2:
        return {}
    num_steps = len(np.unique(aligned.rows.step))
    own = aligned.where(aligned.last() == aligned.ranks.index(rank))
    waits = _waits(own, uncertainty_ns)
    by_label = group_dimensions(run, rank).by_label(own.rows.group)
    longest = {
        label: int(waits[rows].sum(axis=0).max()) // num_steps for label, rows in by_label.items()
    }
    ordered = sorted(longest, key=lambda label: -longest[label])
    least = LEAST_WAIT_RATIO * max(longest.values(), default=0)
    return {label: longest[label] for label in ordered if longest[label] > least}


def _waits(aligned: Arrivals, uncertainty_ns: int) -> NDArray[np.int64]:
    """Return the time from each arrival to the last arrival, shape (C, R); 0 if unknown."""
    last_ns = aligned.arrival_ns.max(axis=1, initial=NEVER)[:, np.newaxis]
    known = aligned.arrival_ns != NEVER
    waits = np.where(known, last_ns - np.where(known, aligned.arrival_ns, 0), 0)
    waits[waits <= uncertainty_ns] = 0
    return waits


def _find_late(
    ranks: Sequence[int], caused: NDArray[np.float64], num_members: int
) -> tuple[tuple[int, ...], float]:
    """Return the late ranks and the fraction of the waits that they cause."""
    total = float(caused.sum())
    if total <= 0:
        return (), 0.0
    order = np.argsort(-caused, kind="stable")
    ordered = np.append(caused[order], 0.0)
    drops = np.flatnonzero(ordered[:-1] > LEAST_DROP * ordered[1:])
    num_late = int(drops[0]) + 1 if len(drops) else len(order)
    ratio = float(ordered[:num_late].sum()) / total
    if 2 * num_late > num_members or ratio < LEAST_CAUSED_RATIO:
        return (), 0.0
    return tuple(sorted(ranks[place] for place in order[:num_late].tolist())), ratio


def _common_place(late: Sequence[int], places: Mapping[int, Mapping[str, int]]) -> str:
    """Return the coordinates that all late ranks have and no other rank has."""
    if not late:
        return ""
    common = dict(places[late[0]])
    for rank in late[1:]:
        common = {axis: at for axis, at in common.items() if places[rank].get(axis) == at}
    alike = [
        rank
        for rank, place in places.items()
        if all(place.get(axis) == at for axis, at in common.items())
    ]
    if not common or sorted(alike) != sorted(late):
        return ""
    return ", ".join(f"{axis} {at}" for axis, at in common.items())
