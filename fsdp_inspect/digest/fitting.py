"""What fits into a memory? The fewest ranks, the largest batch, and what to change if nothing does.

Every answer is a forecast that was made, none is interpolated: interpolation only chooses what to
forecast next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.errors import FsdpInspectError

WORLD_SIZES: tuple[int, ...] = tuple(1 << power for power in range(13))
"""1 to 4096: where the fewest ranks are looked for."""
MOST_SEQUENCES = 4096
"""Where the search for the largest batch ends."""
REMEDIES: tuple[Mapping[str, Any], ...] = (
    {"reshard_after_forward": "true"},
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "reshard_after_forward": "true", "wrap": "block"},
    {"checkpointing": "full", "batch_size": 1},
    {"checkpointing": "full", "batch_size": 1, "offload": "cpu"},
)
"""What is tried where a step does not fit, from the cheapest in time to the dearest."""

Peak = Callable[[int, Mapping[str, Any]], int]
"""World size and changed settings to bytes at the peak, the allowance included."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of settings, and what came of it."""

    settings: Mapping[str, Any]
    peak_bytes: int | None
    """None: it could not be tried."""
    fits: bool
    problem: str | None
    """Why it could not be tried."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into a memory."""

    limit_bytes: int
    world_size: int
    """Ranks that the batch and the remedies are for."""
    peak_bytes: int
    """As asked for, on that many ranks."""
    fits: bool
    smallest_world_size: int | None
    """Fewest of `WORLD_SIZES` that fit as asked for; None: not even the most do."""
    largest_batch_size: int | None
    """Sequences on a rank that fit on `world_size` ranks; None: not even one, or not to be set."""
    remedies: tuple[Remedy, ...]
    """Tried in order until one fitted; empty if it fits as asked for."""

    @property
    def spare_bytes(self) -> int:
        """What is left of the memory; negative: what is missing."""
        return self.limit_bytes - self.peak_bytes


def find_fit(
    peak: Peak, limit_bytes: int, *, world_size: int, accepted: Sequence[str] | None
) -> Fit:
    """Forecast until it is known what fits.

    Args:
        peak: Makes a forecast.
        limit_bytes: The memory.
        world_size: Ranks that the batch and the remedies are for.
        accepted: The settings that can be changed; None: any.

    Raises:
        FsdpInspectError: What was asked for cannot be forecast.
    """
    asked = peak(world_size, {})
    fits = asked <= limit_bytes
    return Fit(
        limit_bytes=limit_bytes,
        world_size=world_size,
        peak_bytes=asked,
        fits=fits,
        smallest_world_size=_smallest_world_size(peak, limit_bytes, world_size, fits),
        largest_batch_size=_largest_batch(peak, limit_bytes, world_size, accepted),
        remedies=() if fits else _find_remedies(peak, limit_bytes, world_size, accepted),
    )


def _smallest_world_size(peak: Peak, limit: int, known: int, known_fits: bool) -> int | None:
    """Memory falls as ranks are added: halve the range until the first that fits is known."""
    candidates = [size for size in WORLD_SIZES if size < known or not known_fits]
    candidates = [size for size in candidates if size > known or known_fits]
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if peak(candidates[middle], {}) <= limit:
            high = middle
        else:
            low = middle + 1
    if low < len(candidates):
        return candidates[low]
    return known if known_fits else None


def _largest_batch(
    peak: Peak, limit: int, world_size: int, accepted: Sequence[str] | None
) -> int | None:
    """Between a batch that fits and one that does not, guess by the line through both."""
    if not _can_set(accepted, {"batch_size": 1}):
        return None
    held: dict[int, int] = {n: peak(world_size, {"batch_size": n}) for n in (1, 2)}
    if held[1] > limit:
        return None
    while True:
        low = max(size for size in held if held[size] <= limit)
        high = min((size for size in held if held[size] > limit), default=MOST_SEQUENCES + 1)
        if high - low <= 1:
            return low
        guess = _line(held, limit)
        # If the guess is known to fit, the next one is asked; never outside of what is open.
        size = min(max(guess if guess > low else guess + 1, low + 1), high - 1)
        held[size] = peak(world_size, {"batch_size": size})


def _line(held: Mapping[int, int], limit: int) -> int:
    """Where the line through the largest two batches reaches the limit."""
    first, second = sorted(held)[-2:]
    slope = (held[second] - held[first]) / (second - first)
    return MOST_SEQUENCES if slope <= 0 else int(first + (limit - held[first]) / slope)


def _find_remedies(
    peak: Peak, limit: int, world_size: int, accepted: Sequence[str] | None
) -> tuple[Remedy, ...]:
    tried: list[Remedy] = []
    for settings in REMEDIES:
        if not _can_set(accepted, settings):
            continue
        try:
            found = peak(world_size, settings)
        except FsdpInspectError as error:
            tried.append(Remedy(settings, None, fits=False, problem=str(error)))
            continue
        tried.append(Remedy(settings, found, fits=found <= limit, problem=None))
        if found <= limit:
            break
    return tuple(tried)


def _can_set(accepted: Sequence[str] | None, settings: Mapping[str, Any]) -> bool:
    return accepted is None or all(name in accepted for name in settings)
