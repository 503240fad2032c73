"""Parse quantities such as `20us`, `50GB/s` and `38 GiB`.

A function returns None for an invalid text, and the caller reports the expected form, unless its
docstring states an error. `formatting` converts in the other direction.
"""

import re
from collections.abc import Sequence

_RATES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_RATE = re.compile(r"([0-9.]+(?:e[0-9]+)?) *([kmgt]?i?)(b/s|bit/s|bps)", re.IGNORECASE)
_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_TIME = re.compile(r"([0-9.]+(?:e-?[0-9]+)?) *(ns|us|µs|ms|s)")
_AMOUNTS: dict[str, int] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_MOST = 1e280
"""Larger values overflow with the largest prefix, and are rejected."""
_AMOUNT = re.compile(r"([0-9.]+(?:e[0-9]+)?) *([kmgtp]?)(i?)b?", re.IGNORECASE)


def parse_time_ns(text: str) -> float | None:
    """Parse a duration such as `20us` to ns."""
    found = _TIME.fullmatch(text.strip())
    number = None if found is None else _number(found[1])
    return None if found is None or number is None else number * _TIMES[found[2]]


def parse_bytes_per_s(text: str) -> float | None:
    """Parse a bandwidth such as `50GB/s` or `400Gbit/s` to bytes per second."""
    found = _RATE.fullmatch(text.strip())
    number = None if found is None else _number(found[1])
    if found is None or number is None or found[2].lower() not in _RATES:
        return None
    # The usual notation: GB/s are bytes, Gb/s and Gbit/s are bits.
    is_bits = found[3].lower() in ("bit/s", "bps") or found[3].startswith("b/")
    return number * _RATES[found[2].lower()] / (8 if is_bits else 1)


def parse_bytes(text: str, *, needs_unit: bool = False) -> int | None:
    """Parse an amount of memory such as `38 GiB` (powers of 1024) or `38 GB` (powers of 1000).

    Args:
        text: The amount. A number without a unit is bytes.
        needs_unit: Reject a number without a unit.
    """
    found = _AMOUNT.fullmatch(text.strip())
    number = None if found is None else _number(found[1])
    if found is None or number is None or (needs_unit and not text.strip()[-1].isalpha()):
        return None
    base = 1024.0 if found[3] else 1000.0
    return round(number * base ** _AMOUNTS[found[2].lower()])


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number < _MOST else None


MOST_PROFILED = 50
"""The most profiled steps: each one may take hundreds of megabytes of memory."""


def parse_profile_steps(steps: str | Sequence[int]) -> tuple[int, ...]:
    """The steps of `profile_steps`, ascending.

    Args:
        steps: Step numbers, or a range as text: "20:23" is 20, 21 and 22, and "20" is one step.

    Raises:
        ValueError: The form is invalid, or there are too many steps.
    """
    try:
        if isinstance(steps, str):
            first, colon, end = steps.partition(":")
            numbers = list(range(int(first), int(end) if colon else int(first) + 1))
        else:
            numbers = [step for step in steps if type(step) is int]
            if len(numbers) < len(steps):
                raise ValueError
    except (TypeError, ValueError):
        numbers = [-1]
    if min(numbers, default=0) < 0 or (not numbers and steps) or len(numbers) > MOST_PROFILED:
        raise ValueError(
            f"invalid profile_steps: {steps!r}. Expected step numbers from 0, such as '20:23' for "
            f"20, 21 and 22, or [20, 21], at most {MOST_PROFILED} steps."
        )
    return tuple(sorted(set(numbers)))
