"""Read the summary of some ranks and kinds from as few files as possible.

Rows of whole steps come from the run's summary, one kind at a time. Rows of units come from the
summary of each rank. A summary without a current file is computed from the rank's tables: of a run
that has not ended, from those of all ranks.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.files import RunFiles
from fsdp_inspect.store.notes import noting
from fsdp_inspect.store.records import ExpectedOrigin
from fsdp_inspect.store.reduction.run_statistics import (
    WHOLE_STEP_KINDS,
    condense_run,
    is_of_whole_step,
)
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.store.schema import EVENTS, MEMORY, ROW_GROUP_ROWS
from fsdp_inspect.store.summary_files import (
    Place,
    SummaryFile,
    folder_of,
    read_rank_summary,
    read_run_summary,
    read_statistics,
)
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.tables import (
    StatisticsTable,
    SummaryTable,
    limit_summary,
    positions_by_value,
    rows_of,
)

_MAX_CACHED_RANKS = 16
_OFTEN_READ = (EventKind.STEP, StepPart.COMMUNICATION, StepPart.PEAK_ALLOCATED)
"""Kinds that several analyses of all ranks read."""


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """The rows of whole steps of one rank, with the notes about its files."""

    rank: int
    rows: SummaryTable
    notes: tuple[str, ...]


class SummaryReader:
    """The summary of one attempt, with a cache of whole steps and of the units of a few ranks."""

    def __init__(  # noqa: PLR0913 - the run, and functions of its reader
        self,
        files: RunFiles,
        attempt: int,
        ranks: Sequence[int],
        *,
        running: Collection[int],
        found: dict[str, None],
        origin_of: Callable[[int | None], ExpectedOrigin],
        summarise: Callable[[int], SummaryTable],
        read_together: Callable[[Sequence[int]], Iterator[WholeSteps]] | None = None,
    ) -> None:
        """Prepare to read; this reads no file.

        Args:
            files: The run.
            attempt: The number of the attempt.
            ranks: The ranks that have a folder, ascending.
            running: The ranks that still record; the run's summary is out of date for them.
            found: Receives the notes about damaged and foreign files, as keys.
            origin_of: The origin that the files of a rank must have; None: those of the run.
            summarise: Computes the summary of a rank from its tables.
            read_together: Reads whole steps of many ranks; None: one rank after the other.
        """
        self._files = files
        self._attempt = attempt
        self._ranks = ranks
        self._running = frozenset(running)
        self._found = found
        self._origin_of = origin_of
        self._summarise = summarise
        self._read_together = read_together
        self._by_kind: dict[int, SummaryTable] = {}
        self._by_rank: dict[int, SummaryTable] = {}
        """All rows of the most recently used ranks."""
        self._run_rows: dict[int, SummaryTable] = {}
        """Rows of the run's summary, by kind."""
        self._whole_by_rank: dict[int, SummaryTable] = {}
        """Rows of whole steps of ranks, from their own files."""
        self._statistics: StatisticsTable | None = None

    def rows(
        self,
        ranks: Collection[int] | None,
        kinds: Collection[int] | None,
        steps: Collection[int] | None = None,
    ) -> SummaryTable:
        """The rows of the given ranks, kinds and steps, by rank and step; None selects all.

        A rank with damaged files has no rows.
        """
        wanted = self._ranks if ranks is None else sorted({*self._ranks}.intersection(ranks))
        if kinds is not None and WHOLE_STEP_KINDS.issuperset(kinds):
            rows = self._whole_steps(wanted, [int(kind) for kind in kinds])
        else:
            parts = (self._rows_of_rank(rank, steps) for rank in wanted)
            rows = SummaryTable.concat([limit_summary(part, kinds=kinds) for part in parts])
        return rows if steps is None else rows.where(np.isin(rows.step, list(steps)))

    def statistics(self, rules: StepRules) -> StatisticsTable:
        """The statistics of all ranks, from their file if it is current, else from the summary.

        Args:
            rules: The settings of the run.
        """
        if self._statistics is None:
            self._statistics = self._stored_statistics(rules)
        if self._statistics is None:
            self._statistics = condense_run(self._read_once, rules, attempt=self._attempt)
        return self._statistics

    def _stored_statistics(self, rules: StepRules) -> StatisticsTable | None:
        """The rows of this attempt; None unless the file describes these ranks as they are."""
        summary = self._run_summary
        listed = {rank for attempt, rank in summary.places if attempt == self._attempt}
        if not listed or not (listed == {*self._ranks} == self._covered):
            return None
        with noting(self._found):
            rows = read_statistics(
                self._files,
                of_summary=summary.checksum,
                rules=rules,
                origin=self._origin_of(None),
            )
            return None if rows is None else rows.where(rows.attempt == self._attempt)
        return None

    def _read_once(self, kind: int) -> SummaryTable:
        """The rows of one kind of all ranks, which are kept only if they are few."""
        rows = self._of_kind(kind)
        if len(rows) > ROW_GROUP_ROWS and kind not in _OFTEN_READ:
            self._by_kind.pop(kind)
            self._run_rows.pop(kind, None)
        return rows

    def _whole_steps(self, ranks: Sequence[int], kinds: Collection[int]) -> SummaryTable:
        chosen = sorted({*kinds})
        if len(ranks) == len(self._ranks):
            return _in_order([self._of_kind(kind) for kind in chosen])
        alone = [rank for rank in ranks if self._has_own_rows(rank, len(ranks))]
        together = [rank for rank in ranks if rank not in alone]
        parts = [limit_summary(self._from_run(kind), ranks=together) for kind in chosen if together]
        others = [self._whole_steps_of(rank) for rank in alone]
        return _in_order([*parts, *(rows_of(part, kinds=chosen) for part in others)])

    def _has_own_rows(self, rank: int, num_ranks: int) -> bool:
        """Whether the whole steps of a rank come from its own files, not from the run's summary.

        The own summary of a few ranks is smaller than the summary of the run.
        """
        if rank not in self._covered or rank in self._whole_by_rank:
            return True
        if num_ranks > _MAX_CACHED_RANKS or self._run_rows:
            return False
        with contextlib.suppress(StoreError):
            place = self._attempt, rank
            origin = self._origin_of(rank)
            rows = read_rank_summary(self._files, place, origin=origin, kinds=WHOLE_STEP_KINDS)
            if rows is not None:
                self._whole_by_rank[rank] = rows.where(is_of_whole_step(rows))
                return True
        return False

    def _of_kind(self, kind: int) -> SummaryTable:
        """The rows of one kind of all ranks."""
        if kind not in self._by_kind:
            from_run = self._from_run(kind)
            others = [rank for rank in self._ranks if rank not in self._covered]
            self._read_ahead([rank for rank in others if rank not in self._whole_by_rank])
            parts = [rows_of(self._whole_steps_of(rank), kinds=[kind]) for rank in others]
            self._by_kind[kind] = _in_order([from_run, *parts])
        return self._by_kind[kind]

    @cached_property
    def _covered(self) -> frozenset[int]:
        """The ranks whose rows of whole steps come from the run's summary."""
        return self._covered_by(self._run_summary.places)

    @cached_property
    def _run_summary(self) -> SummaryFile:
        """The run's summary without its rows; it covers no rank if it is damaged."""
        with noting(self._found):
            return read_run_summary(self._files, origin=self._origin_of(None), kinds=())
        return SummaryFile(SummaryTable.empty(), frozenset(), is_whole=True)

    def _covered_by(self, places: Iterable[Place]) -> frozenset[int]:
        listed = {rank for attempt, rank in places if attempt == self._attempt}
        return frozenset(listed.intersection(self._ranks) - self._running)

    def _from_run(self, kind: int) -> SummaryTable:
        """The rows of one kind of the covered ranks, from the run's summary."""
        if kind not in self._run_rows and self._covered:
            self._load(kind)
        return self._run_rows.get(kind, SummaryTable.empty())

    def _load(self, kind: int) -> None:
        """Read one kind, or all kinds of a small file with one row group.

        If the summary is damaged or gone, it covers no rank from now on.
        """
        with noting(self._found):
            summary = read_run_summary(self._files, origin=self._origin_of(None), kinds=[kind])
            if self._covered <= self._covered_by(summary.places):
                kinds = {kind, *WHOLE_STEP_KINDS} if summary.is_whole else {kind}
                found = _split_by_kind(self._mine(summary.rows))
                self._run_rows |= {one: found.get(one, SummaryTable.empty()) for one in kinds}
                return
        self._run_rows.clear()
        self._covered = frozenset()

    def _mine(self, rows: SummaryTable) -> SummaryTable:
        is_of_attempt = rows.attempt == self._attempt
        return rows.where(is_of_attempt & np.isin(rows.rank, list(self._covered)))

    def _read_ahead(self, ranks: Sequence[int]) -> None:
        """Read the whole steps of many ranks together, if that is possible."""
        if self._read_together is not None and len(ranks) > 1:
            for read in self._read_together(ranks):
                self._whole_by_rank[read.rank] = read.rows
                self._found |= dict.fromkeys(read.notes)

    def _whole_steps_of(self, rank: int) -> SummaryTable:
        """All rows of whole steps of a rank, from its own files."""
        if rank not in self._whole_by_rank:
            if rank in self._by_rank or self._grows(rank):
                rows = self._rows_of_rank(rank)  # a summary computed now has all kinds
            else:
                rows = self._read_rank(rank, WHOLE_STEP_KINDS)
            self._whole_by_rank[rank] = rows.where(is_of_whole_step(rows))
        return self._whole_by_rank[rank]

    def _rows_of_rank(self, rank: int, steps: Collection[int] | None = None) -> SummaryTable:
        """All rows of a rank, or at least those of some steps, which are not kept."""
        rows = self._by_rank.pop(rank, None)
        if rows is None:
            if steps is not None and rank in self._covered:
                return self._read_rank(rank, None, steps)
            rows = self._read_rank(rank, None)  # possibly computed from the events
        self._by_rank[rank] = rows  # the most recently used rank comes last
        if len(self._by_rank) > _MAX_CACHED_RANKS:
            del self._by_rank[next(iter(self._by_rank))]
        return rows

    def _read_rank(
        self, rank: int, kinds: Collection[int] | None, steps: Collection[int] | None = None
    ) -> SummaryTable:
        """A rank's rows with at least these kinds and steps; no rows if its files are damaged."""
        rows = None
        if not self._grows(rank):
            with noting(self._found):
                place = self._attempt, rank
                origin = self._origin_of(rank)
                rows = read_rank_summary(
                    self._files, place, origin=origin, kinds=kinds, steps=steps
                )
        if rows is None:  # missing, out of date or damaged: the events still have all of it
            with noting(self._found):
                rows = self._summarise(rank)
        if not rows and rank in self._covered:
            kinds = sorted(WHOLE_STEP_KINDS)
            return limit_summary(_in_order([self._from_run(kind) for kind in kinds]), ranks=[rank])
        return SummaryTable.empty() if rows is None else rows

    def _grows(self, rank: int) -> bool:
        """Whether the rank has streams that its summary does not cover."""
        folder = folder_of((self._attempt, rank))
        return any(self._files.exists(f"{folder}/{file.live_name}") for file in (EVENTS, MEMORY))


def _split_by_kind(rows: SummaryTable) -> dict[int, SummaryTable]:
    return {kind: rows.where(positions) for kind, positions in positions_by_value(rows.kind)}


def _in_order(parts: Sequence[SummaryTable]) -> SummaryTable:
    """Join sorted parts to rows by rank and step, in each step by kind."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    rows = SummaryTable.concat(filled)
    return rows.where(np.lexsort((rows.kind, rows.step, rows.rank)))
