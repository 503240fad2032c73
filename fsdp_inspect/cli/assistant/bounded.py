"""Shorten a result to a size that an assistant can read, and list the parts that are left out."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_inspect.error_text import suggest

MAX_CHARACTERS = 24_000
"""The most characters of a result as JSON, about 8,000 tokens."""
_LIMITS = ((200, 12), (50, 10), (20, 8), (10, 7), (8, 6), (5, 5), (3, 4), (2, 3), (0, 2), (0, 1))
"""Items of a list and levels of nesting to keep, in the order in which they are tried."""
_MOST_NAMED = 30
"""The most parts that are named as left out."""
_MOST_LETTERS = 2_000
"""The most characters of one text."""
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class BoundedResult:
    """A result within the limit."""

    result: Any
    left_out: tuple[str, ...]
    """The parts that are shortened, each with its path and the number of items."""


def limit_result(value: Any, *, part: str = "", most: int = MAX_CHARACTERS) -> BoundedResult:
    """Shorten lists, texts and deep tables until the value fits; numbers stay exact.

    Args:
        value: JSON values.
        part: The path of the value, which begins the paths of the parts left out.
        most: The most characters as JSON.
    """
    for most_items, most_levels in _LIMITS:
        pruning = _Pruning(most_items, most_levels)
        pruned = pruning.prune(value, part, 0)
        if len(json.dumps(pruned)) <= most:
            return BoundedResult(pruned, pruning.named())
    # Thousands of keys at the top level: no result of `Run` has them.
    return BoundedResult(None, (f"{part or 'the whole result'} is too large",))


def take_part(value: Any, part: str) -> Any:
    """The part of a result at a path such as `units[0].passes`; the empty path is the result.

    Raises:
        ValueError: There is no such part.
    """
    reached = ""
    for key, position in _STEP.findall(part):
        if position:
            if not isinstance(value, list) or int(position) >= len(value):
                raise ValueError(_no_part(part, reached, f"[{position}]", value))
            value, reached = value[int(position)], f"{reached}[{position}]"
        else:
            if not isinstance(value, dict) or key not in value:
                raise ValueError(_no_part(part, reached, key, value))
            value, reached = value[key], f"{reached}.{key}" if reached else key
    return value


def _no_part(part: str, reached: str, step: str, value: Any) -> str:
    where = f"{reached!r}" if reached else "The result"
    if isinstance(value, Mapping):
        known = suggest(step, list(value), what="keys")
    elif isinstance(value, list):
        known = f"It is a list of {len(value)} items."
    else:
        known = "It has no parts."
    return (
        f"Invalid part {part[:200]!r}: {where} has no {step[:100]!r}. Expected a path such as "
        f"'units[0].fqn'. {known}"
    )


@dataclass(slots=True)
class _Pruning:
    most_items: int
    most_levels: int
    left_out: list[str] = field(default_factory=list)

    def named(self) -> tuple[str, ...]:
        rest = len(self.left_out) - _MOST_NAMED
        more = (f"and {rest} more parts",) if rest > 0 else ()
        return (*self.left_out[:_MOST_NAMED], *more)

    def prune(self, value: Any, path: str, level: int) -> Any:
        if isinstance(value, str) and len(value) > _MOST_LETTERS:
            self.left_out.append(f"{path}: {_MOST_LETTERS:,} of {len(value):,} characters")
            return value[:_MOST_LETTERS]
        if not isinstance(value, dict | list) or not value:
            return value
        if level >= self.most_levels:
            self.left_out.append(f"{path}: {_count(value)}")
            return f"left out: {_count(value)}"
        if isinstance(value, dict):
            return {
                key: self.prune(item, f"{path}.{key}" if path else key, level + 1)
                for key, item in value.items()
            }
        if len(value) > self.most_items:
            self.left_out.append(f"{path}: {self.most_items} of {len(value)} items")
        return [
            self.prune(item, f"{path}[{at}]", level + 1)
            for at, item in enumerate(value[: self.most_items])
        ]


def _count(value: dict[str, Any] | list[Any]) -> str:
    return f"{len(value)} {'items' if isinstance(value, list) else 'keys'}"
