"""What does the run in small say about these ranks and kinds? Reads no more files than that needs.

Rows of whole steps come from the run's summary, kind by kind; rows of units from each rank's own.
Whatever has no current file is summed up from the rank's tables.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property

import numpy as np

from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.notes import noting
from fsdp_inspect.store.schema import EVENTS, MEMORY
from fsdp_inspect.store.summary_files import folder_of, read_rank_summary, read_run_summary
from fsdp_inspect.trace.rank_summary import WHOLE_STEP_KINDS
from fsdp_inspect.trace.steps import limit_summary, rows_of
from fsdp_inspect.trace.tables import SummaryTable

_MAX_CACHED_RANKS = 16


class SummaryReader:
    """The summary of one attempt; what was read once is kept, the rows of units of a few ranks."""

    def __init__(
        self,
        files: RunFiles,
        attempt: int,
        ranks: Sequence[int],
        *,
        running: Collection[int],
        found: dict[str, None],
        summarise: Callable[[int], SummaryTable],
    ) -> None:
        """Read nothing yet.

        Args:
            files: The run.
            attempt: Which start of the job.
            ranks: The ranks that have a folder, ascending.
            running: Those that still record: the run's summary is too old for them.
            found: Where sentences about damaged files go, as keys.
            summarise: Sums up a rank from its tables.
        """
        self._files = files
        self._attempt = attempt
        self._ranks = ranks
        self._running = frozenset(running)
        self._found = found
        self._summarise = summarise
        self._by_kind: dict[int, SummaryTable] = {}
        self._by_rank: dict[int, SummaryTable] = {}

    def rows(self, ranks: Collection[int] | None, kinds: Collection[int] | None) -> SummaryTable:
        """The rows of some ranks and kinds, by rank and step; None leaves a limit out.

        A rank whose files are damaged has no rows.
        """
        wanted = self._ranks if ranks is None else sorted({*self._ranks}.intersection(ranks))
        if kinds is not None and WHOLE_STEP_KINDS.issuperset(kinds):
            return self._whole_steps(wanted, [int(kind) for kind in kinds])
        return SummaryTable.concat(
            [limit_summary(self._rows_of_rank(rank), kinds=kinds) for rank in wanted]
        )

    def _whole_steps(self, ranks: Sequence[int], kinds: Collection[int]) -> SummaryTable:
        parts = [self._of_kind(kind) for kind in sorted({*kinds})]
        covered = self._covered
        if len(ranks) < len(self._ranks):
            parts = [limit_summary(part, ranks=ranks) for part in parts]
        others = [rank for rank in ranks if rank not in covered]
        parts += [rows_of(self._rows_of_rank(rank), kinds=kinds) for rank in others]
        if len(parts) == 1:
            return parts[0]
        joined = SummaryTable.concat(parts)
        return joined.where(np.lexsort((joined.kind, joined.step, joined.rank)))

    @cached_property
    def _covered(self) -> frozenset[int]:
        """The ranks whose whole steps are taken from the run's summary."""
        with noting(self._found):
            return self._covered_of(read_run_summary(self._files, kinds=()).places)
        return frozenset()

    def _covered_of(self, places: Iterable[tuple[int, int]]) -> frozenset[int]:
        listed = {rank for attempt, rank in places if attempt == self._attempt}
        return frozenset(listed.intersection(self._ranks) - self._running)

    def _of_kind(self, kind: int) -> SummaryTable:
        """The rows of one kind of the covered ranks, by rank and step."""
        if kind not in self._by_kind and self._covered:
            self._load(kind)
        return self._by_kind.get(kind, SummaryTable.empty())

    def _load(self, kind: int) -> None:
        """Read one kind; a summary that is damaged or gone covers no rank from now on."""
        with noting(self._found):
            summary = read_run_summary(self._files, kinds=[kind])
            if self._covered <= self._covered_of(summary.places):
                self._by_kind[kind] = self._mine(summary.rows, kind)
                return
        self._by_kind.clear()
        self._covered = frozenset()

    def _mine(self, rows: SummaryTable, kind: int) -> SummaryTable:
        mine = (rows.kind == kind) & (rows.attempt == self._attempt)
        mine &= np.isin(rows.rank, list(self._covered))
        return rows.where(mine)

    def _rows_of_rank(self, rank: int) -> SummaryTable:
        rows = self._by_rank.pop(rank, None)
        if rows is None:
            rows = self._read_rank(rank)
        self._by_rank[rank] = rows  # the last one is the one used last
        if len(self._by_rank) > _MAX_CACHED_RANKS:
            del self._by_rank[next(iter(self._by_rank))]
        return rows

    def _read_rank(self, rank: int) -> SummaryTable:
        with noting(self._found):
            place = (self._attempt, rank)
            rows = None if self._grows(rank) else read_rank_summary(self._files, place)
            if rows is None:
                rows = self._summarise(rank)
            if len(rows) == 0 and rank in self._covered:
                return self._whole_steps([rank], WHOLE_STEP_KINDS)
            return rows
        return SummaryTable.empty()

    def _grows(self, rank: int) -> bool:
        """Whether there are streams that the rank's summary does not know."""
        folder = folder_of((self._attempt, rank))
        return any(self._files.exists(f"{folder}/{file.live_name}") for file in (EVENTS, MEMORY))
