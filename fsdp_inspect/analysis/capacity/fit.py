"""Find the fewest ranks, the largest batch, and the changes that fit into a device's memory.

Every result is a real forecast. Interpolation only chooses the next forecast.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.errors import FsdpInspectError

WORLD_SIZES: tuple[int, ...] = tuple(1 << power for power in range(13))
"""1 to 4096: the world sizes in the search for the fewest ranks."""
MOST_SEQUENCES = 4096
"""Upper limit of the search for the largest batch."""
REMEDIES: tuple[Mapping[str, Any], ...] = (
    {"reshard_after_forward": "true"},
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "reshard_after_forward": "true", "wrap": "block"},
    {"checkpointing": "full", "batch_size": 1},
    {"checkpointing": "full", "batch_size": 1, "offload": "cpu"},
)
"""Changes to try if a step does not fit, sorted by their cost in step time."""

Peak = Callable[[int, Mapping[str, Any]], int]
"""Returns the peak in bytes, overhead included, for a world size and changed settings."""


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A change of settings and its forecast."""

    settings: Mapping[str, Any]
    peak_bytes: int | None
    """Forecast peak; None: the forecast failed."""
    fits: bool
    problem: str | None
    """The reason why the forecast failed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The configurations that fit into a device's memory."""

    limit_bytes: int
    world_size: int
    """World size of the batch and of the remedies."""
    peak_bytes: int
    """Peak of the given configuration on `world_size` ranks."""
    fits: bool
    smallest_world_size: int | None
    """Smallest of `WORLD_SIZES` that fits the given configuration; 0: none fits; None: unknown."""
    largest_batch_size: int | None
    """Largest batch per rank that fits on `world_size` ranks; 0: none fits; None: unknown."""
    remedies: tuple[FittingChange, ...]
    """Remedies, tried in order until one fits; empty if the given configuration fits."""
    unknown: tuple[str, ...]
    """Unknown results, one sentence each, with the reason and a remedy."""

    @property
    def spare_bytes(self) -> int:
        """Memory limit - peak; negative if the memory is too small."""
        return self.limit_bytes - self.peak_bytes


def find_fit(
    peak: Peak, limit_bytes: int, *, world_size: int, accepted: Sequence[str] | None
) -> Fit:
    """Make forecasts until the configurations that fit are known.

    Args:
        peak: Makes a forecast.
        limit_bytes: Memory of the device.
        world_size: World size of the batch and of the remedies.
        accepted: The settings that can be changed; None: all.

    Raises:
        FsdpInspectError: The forecast of the given configuration fails.
    """
    given_peak = peak(world_size, {})
    search = _Search(peak, limit_bytes, world_size, accepted, fits=given_peak <= limit_bytes)
    return Fit(
        limit_bytes=limit_bytes,
        world_size=world_size,
        peak_bytes=given_peak,
        fits=search.fits,
        smallest_world_size=search.smallest_world_size(),
        largest_batch_size=search.largest_batch(),
        remedies=() if search.fits else search.remedies(),
        unknown=tuple(search.unknown),
    )


class _Search:
    """The three searches. If a forecast fails, only the result of its own search is unknown."""

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
        """Find the smallest world size that fits, by bisection: memory falls with more ranks."""
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
                f"The fewest ranks are unknown: the forecast for {candidates[middle]} ranks "
                f"failed. {error}"
            )
            return None
        if low < len(candidates):
            return candidates[low]
        return known if fits else 0

    def largest_batch(self) -> int | None:
        """Find the largest batch that fits. A line through two forecasts gives the next guess."""
        if not self._can_set({"batch_size": 1}):
            self.unknown.append(
                "The largest batch is unknown: the builder has no keyword batch_size. Add it to "
                "the function."
            )
            return None
        try:
            return self._search_batch()
        except FsdpInspectError as error:
            self.unknown.append(f"The largest batch is unknown. {error}")
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
            # If the guess is known to fit, try the next size, but stay inside the open interval.
            size = min(max(guess if guess > low else guess + 1, low + 1), high - 1)
            held[size] = peak_with(size)

    def remedies(self) -> tuple[FittingChange, ...]:
        """Try the remedies by cost until one fits."""
        tried: list[FittingChange] = []
        for settings in filter(self._can_set, REMEDIES):
            try:
                found = self._peak(self._world_size, settings)
            except FsdpInspectError as error:
                tried.append(FittingChange(settings, None, fits=False, problem=str(error)))
                continue
            tried.append(FittingChange(settings, found, fits=found <= self._limit, problem=None))
            if tried[-1].fits:
                break
        if not tried:
            names = sorted({name for settings in REMEDIES for name in settings})
            self.unknown.append(
                f"No change was tried: the builder has none of the keywords {', '.join(names)}. "
                "Expected at least one of them. Add it to the function."
            )
        return tuple(tried)

    def _can_set(self, settings: Mapping[str, Any]) -> bool:
        return self._accepted is None or all(name in self._accepted for name in settings)


def _line(held: Mapping[int, int], limit: int) -> int:
    """Return where the line through the largest two batches reaches the limit."""
    first, second = sorted(held)[-2:]
    slope = (held[second] - held[first]) / (second - first)
    return MOST_SEQUENCES if slope <= 0 else int(first + (limit - held[first]) / slope)
