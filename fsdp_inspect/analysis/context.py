"""Cache the data that several analyses derive from one run, so that it is derived once.

`RunContext` is a run like any other (`RunSource`) that also remembers derived values: the step
selection, the timed ranks with the median rank, and the clock alignment. An analysis takes a run
and calls `remember`; with a plain run the value is computed at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import StatisticsTable

if TYPE_CHECKING:  # `RunContext.__getattr__` forwards the members of a `RunSource`
    _HasSource = RunSource
else:
    _HasSource = object

T = TypeVar("T")


class RunContext(_HasSource):
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

    def __getattr__(self, name: str) -> Any:
        """Every other member is that of the source."""
        if name == "source":  # not yet set
            raise AttributeError(name)
        return getattr(self.source, name)

    def statistics(self) -> StatisticsTable:
        """See `RunSource`. It is computed once."""
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
