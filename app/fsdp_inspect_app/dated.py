"""Cache values that are computed again after some seconds.

Streamlit's own `ttl` can raise a KeyError for a value that expires between its two look-ups
(streamlit 1.67, `cache_resource_api.read_result`), and the page then fails. `validate` is called
once for each look-up.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

_LONGEST_LIFE_S = 30.0


@dataclass(frozen=True, slots=True)
class Dated(Generic[T]):
    """A value and the time at which it was computed."""

    value: T
    at_s: float = field(default_factory=lambda: time.monotonic())
    took_s: float = 0.0
    """The time that computing it took."""


def dated(compute: Callable[[], T]) -> Dated[T]:
    """Compute a value, and measure the time that it takes."""
    begun_s = time.monotonic()
    value = compute()
    return Dated(value, took_s=time.monotonic() - begun_s)


def is_younger_than(seconds: float) -> Callable[[Dated[T]], bool]:
    """Make the option `validate` of `st.cache_resource` from an age limit.

    A value that takes long to compute lives longer: see `prolong`.
    """
    return lambda dated: time.monotonic() - dated.at_s < prolong(seconds, dated.took_s)


def prolong(seconds: float, took_s: float) -> float:
    """The life of a value that took so long to compute: computing it takes about 5% of the time.

    The life is never prolonged beyond `_LONGEST_LIFE_S`.
    """
    return max(seconds, min(20 * took_s, _LONGEST_LIFE_S))
