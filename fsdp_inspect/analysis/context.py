"""Cache the data that several analyses derive from one run, so that it is derived once.

`RunContext` is a run like any other (`RunSource`) that also remembers derived values: the step
selection, the timed ranks with the median rank, and the clock alignment. An analysis takes a run
and calls `remember`; with a plain run the value is computed at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Self, TypeVar

from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.allocations import AllocationHistory
from fsdp_inspect.trace.black_box import BlackBox
from fsdp_inspect.trace.live_memory import LiveHistory, LiveMoment, OutOfMemoryRecord
from fsdp_inspect.trace.network_probe import NetworkProbe
from fsdp_inspect.trace.numerics import NumericsStep
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource, RunStatus
from fsdp_inspect.trace.stack_dumps import StackDump
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    StatisticsTable,
    SummaryTable,
)

T = TypeVar("T")


class RunContext:
    """A run with the values that its analyses share.

    A value is computed once, when it is first needed, also if several threads share the context. To
    see new data of a run that is still being recorded, open the run again.
    """

    @classmethod
    def of(cls, run: RunSource) -> Self:
        """The run itself if it is a context, else a new context of it."""
        return run if isinstance(run, cls) else cls(run)

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._values: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def remember(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value of a key. It is computed in the first call."""
        with self._lock:
            if key not in self._values:
                self._values[key] = compute()
            value: T = self._values[key]
        return value

    @property
    def manifest(self) -> RunManifest:
        """See `RunSource`, also for the members below."""
        return self.source.manifest

    @property
    def status(self) -> RunStatus:
        """See `RunSource`."""
        return self.source.status

    @property
    def notes(self) -> Sequence[str]:
        """See `RunSource`."""
        return self.source.notes

    @property
    def ranks(self) -> Sequence[RankRecord]:
        """See `RunSource`."""
        return self.source.ranks

    @property
    def earlier_attempts(self) -> Sequence[RunSource]:
        """See `RunSource`."""
        return self.source.earlier_attempts

    @property
    def network_probe(self) -> NetworkProbe | None:
        """See `RunSource`."""
        return self.source.network_probe

    def black_box(self, rank: int, *, at_desync: bool = False) -> BlackBox | None:
        """See `RunSource`."""
        return self.source.black_box(rank, at_desync=at_desync)

    def numerics(self, rank: int) -> Sequence[NumericsStep]:
        """See `RunSource`."""
        return self.source.numerics(rank)

    def stack_dumps(self, rank: int) -> Sequence[StackDump]:
        """See `RunSource`."""
        return self.source.stack_dumps(rank)

    def live_moments(self, rank: int) -> Sequence[LiveMoment]:
        """See `RunSource`."""
        return self.source.live_moments(rank)

    def allocations(self, rank: int) -> AllocationHistory | None:
        """See `RunSource`."""
        return self.source.allocations(rank)

    def live_history(self, rank: int) -> LiveHistory | None:
        """See `RunSource`."""
        return self.source.live_history(rank)

    def out_of_memory(self, rank: int) -> OutOfMemoryRecord | None:
        """See `RunSource`."""
        return self.source.out_of_memory(rank)

    def events(
        self,
        rank: int,
        *,
        steps: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> EventTable:
        """See `RunSource`."""
        return self.source.events(rank, steps=steps, kinds=kinds)

    def memory(self, rank: int) -> MemoryTable:
        """See `RunSource`."""
        return self.source.memory(rank)

    def devices(self, rank: int) -> DeviceTable:
        """See `RunSource`."""
        return self.source.devices(rank)

    def scalars(self, rank: int) -> ScalarTable:
        """See `RunSource`."""
        return self.source.scalars(rank)

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
        steps: Collection[int] | None = None,
    ) -> SummaryTable:
        """See `RunSource`."""
        return self.source.summary(ranks=ranks, kinds=kinds, steps=steps)

    def statistics(self) -> StatisticsTable:
        """See `RunSource`."""
        return self.remember("statistics", self.source.statistics)


def remember(run: RunSource, key: Hashable, compute: Callable[[], T]) -> T:
    """The value that a context keeps for a key. For any other run, it is computed in each call."""
    return run.remember(key, compute) if isinstance(run, RunContext) else compute()


# --- Run an analysis on a run whose files may be damaged.

_AnswerT = TypeVar("_AnswerT")


def try_measure(
    measure: Callable[[RunSource], _AnswerT], run: RunSource, damage: list[str]
) -> _AnswerT | None:
    """Return the result of an analysis, or None if a file that it needs is damaged.

    Args:
        measure: The analysis.
        run: The run.
        damage: Receives the error message if a file is damaged.
    """
    try:
        return measure(run)
    except StoreError as error:
        damage.append(str(error))
        return None
