"""How do the ranks compare? As tables, one row a rank, a collective or a step."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fsdp_inspect.metrics import MetricUnit, find_metric
from fsdp_inspect.report.values import format_kind
from fsdp_inspect.result_types import CollectiveSkew, RankGrid, RankRow
from fsdp_inspect_app.frames.values import BYTES_PER_MIB, NS_PER_MS, gb_per_s, mib, ms


def frame_ranks(rows: Sequence[RankRow]) -> pd.DataFrame:
    """One row a rank."""
    return pd.DataFrame(
        [
            {
                "rank": row.rank,
                "host": row.host,
                "step time (ms)": ms(row.step_time_ns),
                "own work (ms)": ms(row.own_work_ns),
                "exposed (ms)": ms(row.exposed_ns),
                "overlap": row.overlap_ratio,
                "arrives last": row.last_ratio,
                "after the first (ms)": ms(row.lateness_ns),
                "works longest": row.busiest_ratio,
                "peak allocated (MiB)": mib(row.peak_allocated_bytes),
            }
            for row in rows
        ]
    )


def frame_skews(skews: Sequence[CollectiveSkew]) -> pd.DataFrame:
    """How far apart ranks arrive, one row a sort of collective."""
    return pd.DataFrame(
        [
            {
                "collective": format_kind(row.kind),
                "message (MiB)": mib(row.bytes) if row.bytes >= 0 else None,
                "ranks": row.num_ranks,
                "how many": row.num_collectives,
                "skew (ms)": ms(row.skew_ns),
                "skew, p90 (ms)": ms(row.skew_p90_ns),
                "transfer alone (ms)": ms(row.pure_transfer_ns),
                "bus bandwidth (GB/s)": gb_per_s(row.bus_bytes_per_s),
            }
            for row in skews
        ]
    )


def unit_of_grid(measure: str) -> tuple[float, str]:
    """The size and name of the unit in which a grid is shown."""
    if find_metric(measure).unit is MetricUnit.BYTES:
        return BYTES_PER_MIB, "MiB"
    return NS_PER_MS, "ms"


def frame_grid(grid: RankGrid) -> pd.DataFrame:
    """Ranks down, steps across."""
    size, suffix = unit_of_grid(grid.metric)
    columns = [f"step {step} ({suffix})" for step in grid.steps]
    frame = pd.DataFrame(grid.values / size, columns=columns)
    frame.insert(0, "rank", grid.ranks)
    return frame


def frame_rank_steps(grid: RankGrid, rank: int) -> pd.DataFrame:
    """One rank beside the middle of all ranks, step by step."""
    size, suffix = unit_of_grid(grid.metric)
    label = find_metric(grid.metric).label
    own = grid.of_rank(rank)
    values = np.full(len(grid.steps), np.nan) if own is None else own
    return pd.DataFrame(
        {
            "step": grid.steps,
            f"{label} ({suffix})": values / size,
            f"{label}, median of ranks ({suffix})": grid.middle / size,
            "counts": [step not in grid.left_out for step in grid.steps],
        }
    )
