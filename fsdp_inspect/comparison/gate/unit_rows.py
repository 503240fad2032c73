"""Store units with equal settings in one row of a baseline.

Consecutive units with the same settings, or the same memory at a moment, share a row. A model of 80
blocks then takes as many lines as one of two, and a different block is easy to see.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

_NUMBER = re.compile(r"\d+")


def fold(named: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge equal neighbours into one row: `each` is the value of each of its `units`.

    Args:
        named: The units by name, in order.
    """
    together = groupby(named, key=lambda pair: pair[1])
    return [{"each": dict(each), "units": [name for name, _ in group]} for each, group in together]


def unfold(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Expand the rows of `fold` in their order.

    Raises:
        ValueError: A row is invalid.
    """
    try:
        return [(str(name), dict(row["each"])) for row in rows for name in row["units"]]
    except (KeyError, TypeError) as error:
        raise ValueError("Invalid row of units: `each` or `units` is missing") from error


def in_words_and_numbers(name: str) -> list[tuple[str, int]]:
    """A sort key that puts `layers.2` before `layers.10`."""
    numbers = [int(number) for number in _NUMBER.findall(name)] or [-1]
    return list(zip(_NUMBER.split(name), [*numbers, -1], strict=False))
