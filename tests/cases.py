"""Choose the cases of a test that guard a change; the others are marked `slow`."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.errors import InvalidArgument


def mark_slow(cases: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """The cases as parameters: all are marked `slow`, except those named in `but`."""
    found = list(cases)
    unknown = [case for case in but if case not in found]
    assert not unknown, f"no such case: {unknown}"
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in but)) for case in found]


def mark_others(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Like `mark_slow`, for a test whose cases do not include all of `quick`."""
    found = list(cases)
    return mark_slow(found, but=[case for case in found if case in quick])


def chosen_cases(request: pytest.FixtureRequest, argument: str) -> Callable[[Any], bool]:
    """Whether a selected test of the file has a case as the value of that argument.

    A fixture that prepares all cases at once leaves out those that no test of this session needs.
    """
    wanted = set()
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            call = getattr(item, "callspec", None)
            if call is not None and argument in call.params:
                wanted.add(call.params[argument])
    return lambda case: case in wanted


def wants_slow(request: pytest.FixtureRequest) -> bool:
    """Whether this session runs a slow test of the file. A fixture then prepares all its cases."""
    items = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("slow") for item in items)


def examples(most: int) -> int:
    """The number of examples of a property: `most` at night, and at most the default otherwise.

    A program of `tests.studies` that imports a test module has no session, and no default.
    """
    try:
        default: int = settings.get_profile("guard").max_examples
    except InvalidArgument:
        return most
    is_guard = settings.default is not None and settings.default.max_examples == default
    return min(most, default) if is_guard else most
