"""Run an analysis on a run whose files may be damaged."""

from collections.abc import Callable
from typing import TypeVar

from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.run import RunSource

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
