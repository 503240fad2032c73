"""How does a baseline say only once what many units share?

Units that follow each other and have the same settings, or hold the same at a moment, are one row:
a model of 80 blocks takes as many lines as one of two, and a block that differs stands out.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

_NUMBER = re.compile(r"\d+")


def fold(named: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Neighbours that are alike as one row: `each` is what each of its `units` has.

    Args:
        named: The units by name, in order.
    """
    together = groupby(named, key=lambda pair: pair[1])
    return [{"each": dict(each), "units": [name for name, _ in group]} for each, group in together]


def unfold(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """What was folded, in its order.

    Raises:
        ValueError: A row is none.
    """
    try:
        return [(str(name), dict(row["each"])) for row in rows for name in row["units"]]
    except (KeyError, TypeError) as error:
        raise ValueError("a row of units lacks `each` or `units`") from error


def in_words_and_numbers(name: str) -> list[tuple[str, int]]:
    """Sorts `layers.2` before `layers.10`."""
    numbers = [int(number) for number in _NUMBER.findall(name)] or [-1]
    return list(zip(_NUMBER.split(name), [*numbers, -1], strict=False))
