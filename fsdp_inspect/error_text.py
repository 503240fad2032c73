"""Phrase messages about invalid values: the invalid value, the expected form, and the remedy.

`errors` defines the form of these messages.
"""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError

_MAX_SHOWN = 3
_MAX_LETTERS = 120
"""Longest value or place that a message shows."""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The known names most similar to an unknown name, best first; dissimilar ones are excluded."""
    scored = [(SequenceMatcher(None, name, other).ratio(), other) for other in dict.fromkeys(names)]
    ranked = sorted(scored, key=lambda pair: -pair[0])
    worst = max(0.5, 0.75 * ranked[0][0]) if ranked else 0.5
    return [other for score, other in ranked[:_MAX_SHOWN] if score >= worst]


def suggest(name: str, names: Sequence[str], *, what: str = "names") -> str:
    """One sentence that suggests known names for an unknown name."""
    close = nearest(name[:_MAX_LETTERS], names)
    if close:
        return f"Nearest: {quote_all(close)}."
    if not names:
        return f"There are no {what}."
    shown = quote_all(names[:8])
    return f"The {what} are {shown}{', ...' if len(names) > 8 else ''}."


def quote_all(values: Iterable[object]) -> str:
    """`'a', 'b'`: values in quotes, with commas."""
    return ", ".join(repr(value) for value in values)


def shorten(text: str, most: int = _MAX_LETTERS) -> str:
    """A text that is short enough for one line of a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, and the exceptions that led to it, the latest first. Each comes once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def describe_validation_error(
    error: ValidationError, *, legal_keys: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Describe pydantic's errors, at most three, each with its location and its value.

    Args:
        error: The error that pydantic raised.
        legal_keys: The legal keys of each table, for suggestions. A table's name is its dotted
            location without list positions; the name of the top table is empty.
    """
    complaints = error.errors(include_url=False)
    texts = [_describe(complaint, legal_keys or {}) for complaint in complaints[:_MAX_SHOWN]]
    if len(complaints) > _MAX_SHOWN:
        texts.append(f"And {len(complaints) - _MAX_SHOWN} more.")
    return " ".join(dict.fromkeys(texts))


def _describe(complaint: Any, legal_keys: Mapping[str, Sequence[str]]) -> str:
    place = [shorten(str(part)) for part in complaint["loc"]]
    if complaint["type"] == "extra_forbidden":
        table = ".".join(part for part in place[:-1] if not part.isdigit())
        return f"There is no key {place[-1]!r}{_inside(place)}. " + suggest(
            place[-1], list(legal_keys.get(table, ())), what="keys"
        )
    if complaint["type"] == "missing":
        return f"{'.'.join(place)} is missing."
    if complaint["type"] == "value_error":
        return _sentence(str(complaint["ctx"]["error"]))
    expected = _lower_first(complaint["msg"].removeprefix("Input should be "))
    return _sentence(f"{'.'.join(place)} is {_show(complaint['input'])}. Expected {expected}")


def _show(value: object) -> str:
    """A value in a message: without the contents of long texts and tables."""
    return shorten(reprlib.repr(value))


def _inside(place: Sequence[str]) -> str:
    return f" in {'.'.join(place[:-1])}" if len(place) > 1 else ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
