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
    """Fewest of `WORLD_SIZES` that fit as asked for; 0: not even the most do; None: not known."""
    largest_batch_size: int | None
    """Sequences on a rank that fit on `world_size` ranks; 0: not even one; None: not known."""
    remedies: tuple[Remedy, ...]
    """Tried in order until one fitted; empty if it fits as asked for."""
    unknown: tuple[str, ...]
    """What could not be found out, one sentence each, with the reason and what to do."""

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
    search = _Search(peak, limit_bytes, world_size, accepted, fits=asked <= limit_bytes)
    return Fit(
        limit_bytes=limit_bytes,
        world_size=world_size,
        peak_bytes=asked,
        fits=search.fits,
        smallest_world_size=search.smallest_world_size(),
        largest_batch_size=search.largest_batch(),
        remedies=() if search.fits else search.remedies(),
        unknown=tuple(search.unknown),
    )


class _Search:
    """The three questions; what cannot be forecast leaves its question open, and the others not."""

    def __init__(
        self,
        peak: Peak,
        limit: int,
        world_size: int,
        accepted: Sequence[str] | None,
        *,
        fits: bool,
    ) -> None:
        self._peak = peak
        self._limit = limit
        self._world_size = world_size
        self._accepted = accepted
        self.fits = fits
        self.unknown: list[str] = []

    def smallest_world_size(self) -> int | None:
        """Memory falls as ranks are added: halve the range until the first that fits is known."""
        known, fits = self._world_size, self.fits
        candidates = [size for size in WORLD_SIZES if (size < known if fits else size > known)]
        low, high = 0, len(candidates)
        try:
            while low < high:
                middle = (low + high) // 2
                if self._peak(candidates[middle], {}) <= self._limit:
                    high = middle
                else:
                    low = middle + 1
        except FsdpInspectError as error:
            self.unknown.append(
                f"The fewest ranks are not known: {candidates[middle]} cannot be forecast. {error}"
            )
            return None
        if low < len(candidates):
            return candidates[low]
        return known if fits else 0

    def largest_batch(self) -> int | None:
        """Between a batch that fits and one that does not, guess by the line through both."""
        if not self._can_set({"batch_size": 1}):
            self.unknown.append(
                "The largest batch is not known: the builder takes no batch_size. Expected that "
                "keyword. Add it to the function."
            )
            return None
        try:
            return self._search_batch()
        except FsdpInspectError as error:
            self.unknown.append(f"The largest batch is not known. {error}")
            return None

    def _search_batch(self) -> int:
        def peak_with(batch_size: int) -> int:
            return self._peak(self._world_size, {"batch_size": batch_size})

        held: dict[int, int] = {1: peak_with(1)}
        if held[1] > self._limit:
            return 0
        held[2] = peak_with(2)
        while True:
            low = max(size for size in held if held[size] <= self._limit)
            high = min(
                (size for size in held if held[size] > self._limit), default=MOST_SEQUENCES + 1
            )
            if high - low <= 1:
                return low
            guess = _line(held, self._limit)
            # If the guess is known to fit, the next one is asked; never outside of what is open.
            size = min(max(guess if guess > low else guess + 1, low + 1), high - 1)
            held[size] = peak_with(size)

    def remedies(self) -> tuple[Remedy, ...]:
        """From the cheapest to the dearest, until one fits."""
        tried: list[Remedy] = []
        for settings in filter(self._can_set, REMEDIES):
            try:
                found = self._peak(self._world_size, settings)
            except FsdpInspectError as error:
                tried.append(Remedy(settings, None, fits=False, problem=str(error)))
                continue
            tried.append(Remedy(settings, found, fits=found <= self._limit, problem=None))
            if tried[-1].fits:
                break
        if not tried:
            names = sorted({name for settings in REMEDIES for name in settings})
            self.unknown.append(
                "What would make it fit was not tried: the builder takes none of "
                f"{', '.join(names)}. Expected at least one of these keywords. Add it to the "
                "function."
            )
        return tuple(tried)

    def _can_set(self, settings: Mapping[str, Any]) -> bool:
        return self._accepted is None or all(name in self._accepted for name in settings)


def _line(held: Mapping[int, int], limit: int) -> int:
    """Where the line through the largest two batches reaches the limit."""
    first, second = sorted(held)[-2:]
    slope = (held[second] - held[first]) / (second - first)
    return MOST_SEQUENCES if slope <= 0 else int(first + (limit - held[first]) / slope)
