"""Measure how long the training threads are ready to run but have no CPU core.

Other programs on the machine, too many data loader workers and a too small CPU quota show only
here: on the host's clock, a thread without a core looks like a thread that works slowly.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_ratio
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import MISSING_INT

MOST_DIFFERENCE = 0.05
"""The largest difference of run delay between comparable sides. A larger one shows that other
programs used the cores of one side."""

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class RunDelay:
    """The rank whose training thread waits longest for a core."""

    rank: int
    run_delay_ratio: float
    """Fraction of the recording in which the thread is ready but has no core, as the Linux
    scheduler measures it."""


def measure_run_delay(run: RunSource, ranks: Sequence[int] | None = None) -> RunDelay | None:
    """Measure how long training threads wait for a core, from the first to the last sample.

    Args:
        run: The run.
        ranks: The ranks to look at; None: all.

    Returns:
        None if no rank has scheduler samples: imports, predictions, systems other than Linux.
    """
    chosen = [record.rank for record in run.ranks] if ranks is None else ranks
    ratios = {rank: run_delay_of(run, rank) for rank in chosen}
    known = {rank: ratio for rank, ratio in ratios.items() if ratio is not None}
    if not known:
        return None
    rank = max(known, key=lambda rank: known[rank])
    return RunDelay(rank, known[rank])


def measure_run_delay_of_hosts(run: RunSource) -> RunDelay | None:
    """As `measure_run_delay`, for a few ranks of each host, so that large jobs read few files."""
    by_host: dict[str, list[int]] = {}
    for record in run.ranks:
        by_host.setdefault(record.host, []).append(record.rank)
    most = max(1, _MOST_RANKS // max(len(by_host), 1))
    chosen = [rank for ranks in by_host.values() for rank in ranks[:most]]
    return measure_run_delay(run, chosen[:_MOST_RANKS])


def find_run_delay_difference(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float] | None:
    """The typical run delays of two sides, if their times are not comparable; else None.

    Args:
        before: `run_delay_ratio` of each run of the first side; empty counts as a quiet machine.
        after: The same for the second side; empty: unknown, so there is no difference.
    """
    if not after:
        return None
    was, now = statistics.median(before or (0.0,)), statistics.median(after)
    return (was, now) if abs(now - was) > MOST_DIFFERENCE else None


def busy_ratio(run_delay_ratio: float) -> float:
    """The fraction of a step by which a predicted gain is uncertain, because cores were missing.

    A run delay up to `MOST_DIFFERENCE` counts as a quiet machine.
    """
    return max(run_delay_ratio - MOST_DIFFERENCE, 0.0)


def caveat_of_cores(run_delay_ratio: float) -> str | None:
    """The sentence that every time of a run needs at this run delay; None if it is small."""
    if run_delay_ratio <= MOST_DIFFERENCE:
        return None
    return (
        f"The training thread had no CPU core for {format_ratio(run_delay_ratio)} of the "
        "recording. Measured times are too long by an unknown part of it, and a late rank or a "
        "wait may be a missing core. Record the run again on free cores."
    )


def run_delay_of(run: RunSource, rank: int) -> float | None:
    """The `run_delay_ratio` of one rank; None if it is unknown."""
    return remember(run, ("run delay", rank), partial(_measure, run, rank))


def _measure(run: RunSource, rank: int) -> float | None:
    try:
        samples = run.devices(rank)
    except StoreError:
        return None
    known = np.flatnonzero(samples.run_delay_ns != MISSING_INT)
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    passed = int(samples.time_ns[last] - samples.time_ns[first])
    waited = int(samples.run_delay_ns[last] - samples.run_delay_ns[first])
    return waited / passed if passed > 0 and waited >= 0 else None
