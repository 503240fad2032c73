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


@dataclass(frozen=True, slots=True)
class Dated(Generic[T]):
    """A value and the time at which it was computed."""

    value: T
    at_s: float = field(default_factory=lambda: time.monotonic())
    took_s: float = 0.0
    """The time that computing it took."""


def is_younger_than(seconds: float) -> Callable[[Dated[T]], bool]:
    """Make the option `validate` of `st.cache_resource` from an age limit.

    A value that takes long to compute lives longer, so that it takes at most 5% of the time.
    """
    return lambda dated: time.monotonic() - dated.at_s < max(seconds, 20 * dated.took_s)
