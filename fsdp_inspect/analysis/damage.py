"""What does an analysis say of a run, a part of which may be damaged?"""

from collections.abc import Callable
from typing import TypeVar

from fsdp_inspect.errors import StoreError
from fsdp_inspect.trace.run import RunSource

_AnswerT = TypeVar("_AnswerT")


def try_measure(
    question: Callable[[RunSource], _AnswerT], run: RunSource, damage: list[str]
) -> _AnswerT | None:
    """The answer, or None where the files that it needs are damaged; `damage` says so."""
    try:
        return question(run)
    except StoreError as error:
        damage.append(str(error))
        return None
