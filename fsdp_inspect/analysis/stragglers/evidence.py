"""Collect the evidence that some ranks delay the others: their arrivals and their extra work.

The ranks are one rank (a straggler) or the ranks of one place (a slow group).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.stragglers.arrivals import NEVER, Arrivals
from fsdp_inspect.analysis.stragglers.rank_pricing import RankPricing
from fsdp_inspect.analysis.stragglers.rank_work import RankWork
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import EXPOSED_PART_CODES, PARTS_OF_STEP, Phase

LEAST_COST_RATIO = 0.02
LEAST_BUSIEST_RATIO = 0.75
MAX_ERROR_RATIO = 0.05
"""The largest accepted error of a replay in its own steps. With a larger error, there is no
cost."""
OWN_PARTS = tuple(part for part in PARTS_OF_STEP if part not in EXPOSED_PART_CODES)
"""The parts of a step in which a rank does not wait for other ranks."""


@dataclass(frozen=True, slots=True)
class StragglerEvidence:
    """The measurements behind the search for a straggler or a slow group."""

    ranks: tuple[int, ...]
    """The compared ranks, ascending."""
    work: RankWork
    arrivals: Arrivals
    """The sampled collectives."""
    aligned: Arrivals
    """Those at which at least two ranks with aligned clocks arrive."""
    are_clocks_aligned: bool
    """Whether the clocks of all sampled ranks are aligned."""
    pricing: RankPricing
    uncertainty_ns: int
    step_time_ns: int
    """The typical step of the median rank."""
    parts_ns: NDArray[np.float64]
    """Each of `OWN_PARTS` in the typical step of each rank, shape (ranks, parts)."""
    read_message_waits: Callable[[], Mapping[int, int]]
    """Reads `message_waits_ns`, which needs a file of each rank, when it is needed."""

    @property
    def message_waits_ns(self) -> Mapping[int, int]:
        """Exposed sends and receives in the typical step, by rank; empty without sends.

        The replay does not connect the two sides of a message.
        """
        return self.read_message_waits()

    @property
    def least_cost_ns(self) -> float:
        """The smallest cost that matters."""
        return LEAST_COST_RATIO * self.step_time_ns

    def works_longest(self, ranks: Collection[int]) -> bool:
        """Return whether each of these ranks works longer than all others in most steps."""
        return self.work.num_longest(*ranks) >= LEAST_BUSIEST_RATIO * self.work.num_steps

    def are_waited_for(self, ranks: Collection[int]) -> bool:
        """Return whether these ranks cause most of the skew, beyond the uncertainty of clocks."""
        shared = self._shared(ranks)
        even = shared.skew_ns * shared.even_ratio
        if not shared.is_last_own.any():
            return False
        caused = shared.skew_ns[shared.is_last_own].sum()
        if caused < (even.sum() + shared.skew_ns.sum()) / 2:
            return False
        return not self.are_clocks_aligned or self.how_late(ranks)[0] > self.uncertainty_ns

    def last_ratio(self, ranks: Collection[int]) -> float:
        """Return the fraction of the collectives with other ranks at which one of these is last."""
        is_last_own = self._shared(ranks).is_last_own
        return float(is_last_own.mean()) if len(is_last_own) else 0.0

    def how_late(self, ranks: Collection[int]) -> tuple[int, str]:
        """Return the median delay when one of these ranks is last, and the phase with most delay.

        The delay is the last arrival - the median arrival of the other ranks. Without aligned
        clocks, it is the skew.
        """
        shared = self._shared(ranks)
        late, phase = shared.late_ns[shared.is_last_own], shared.phase[shared.is_last_own]
        if len(late) == 0:
            return 0, ""
        total = {one: int(late[phase == one].sum()) for one in np.unique(phase).tolist()}
        worst = max(total, key=lambda one: total[one])
        return median(late) or 0, Phase(worst).label

    def longest_part(self, ranks: Collection[int]) -> tuple[str, int]:
        """Return the part of the step that exceeds that of the other ranks most, and its excess."""
        is_own = np.isin(self.ranks, list(ranks))
        own, others = self.parts_ns[is_own], self.parts_ns[~is_own]
        extra = np.median(own, axis=0) - np.median(others, axis=0)
        longest = int(np.argmax(extra))
        return OWN_PARTS[longest].label, round(float(extra[longest]))

    def _shared(self, ranks: Collection[int]) -> "_Shared":
        """Return the collectives that these ranks share with other ranks."""
        if not self.are_clocks_aligned:
            return _read_durations(self.arrivals, ranks)
        is_own = np.isin(self.aligned.ranks, list(ranks))
        known = self.aligned.arrival_ns != NEVER
        both = known[:, is_own].any(axis=1) & known[:, ~is_own].any(axis=1)
        rows, known = self.aligned.where(both), known[both]
        others = np.sort(rows.arrival_ns[:, ~is_own], axis=1)
        unknown = (others == NEVER).sum(axis=1)
        middle = unknown + (others.shape[1] - unknown - 1) // 2
        return _Shared(
            is_last_own=is_own[rows.last()],
            skew_ns=rows.skew_ns(),
            even_ratio=known[:, is_own].sum(axis=1) / known.sum(axis=1),
            late_ns=rows.arrival_ns.max(axis=1, initial=NEVER)
            - others[np.arange(len(rows)), middle],
            phase=rows.rows.phase,
        )


@dataclass(frozen=True, slots=True)
class _Shared:
    """The C collectives that some ranks share with other ranks."""

    is_last_own: NDArray[np.bool_]
    """Whether one of these ranks arrives last, shape (C,)."""
    skew_ns: NDArray[np.int64]
    even_ratio: NDArray[np.float64]
    """The fraction of the participants that are these ranks, shape (C,)."""
    late_ns: NDArray[np.int64]
    """Last arrival - median arrival of the other ranks, shape (C,)."""
    phase: NDArray[np.int8]


def _read_durations(arrivals: Arrivals, ranks: Collection[int]) -> _Shared:
    """Read the last rank and the skew from durations, which need no aligned clocks.

    All ranks leave a collective together, so the last rank to arrive has the shortest one.
    """
    is_own = np.isin(arrivals.ranks, list(ranks))
    took_part = arrivals.took_part
    both = np.flatnonzero(took_part[:, is_own].any(axis=1) & took_part[:, ~is_own].any(axis=1))
    rows, took_part = arrivals.where(both), took_part[both]
    return _Shared(
        is_last_own=is_own[rows.shortest],
        skew_ns=rows.spread_ns,
        even_ratio=took_part[:, is_own].sum(axis=1) / took_part.sum(axis=1),
        late_ns=rows.spread_ns,
        phase=rows.rows.phase,
    )
