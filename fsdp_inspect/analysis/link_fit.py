"""How long does a message of so many bytes take here? Latency plus bandwidth, fitted to a run.

    duration = latency + message x factor / bus bandwidth

with the factor of nccl-tests (`trace.bus_bandwidth`), so that the bandwidth compares with the
link's. Both are non-negative. The fit minimises the relative error (of the logarithm), and large
errors count linearly, not squared: collectives are delayed now and then by ten times their
duration. A latency can only be told from messages of different sizes; where that fails, the object
says why and holds the bandwidth alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SIZE_RATIO = 1.5
"""The largest message must be so many times the smallest for a latency to be told."""
MIN_EXPLAINED_RATIO = 0.05
"""A line that explains less of how durations differ is no better than one duration for all."""
MIN_GROWTH_RATIO = 0.01
"""The share of the longest predicted duration that must come from the bytes."""
_OUTLIER_RATIO = 0.1
"""From this relative error on a duration counts linearly."""
_SPREAD_PERCENT = (10, 90)

_Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinkFit:
    """The time of one kind of collective on one process group, as a function of its message."""

    latency_ns: float
    """0 where it could not be told."""
    bus_bytes_per_s: float
    bus_factor: float
    """Bus bytes for each byte of a message."""
    num_events: int
    num_sizes: int
    """Distinct messages."""
    smallest_bytes: int
    largest_bytes: int
    residual_ratio: float
    """Median of |duration - predicted| / predicted."""
    explained_ratio: float
    """1 - the sum of the errors / that of a single constant, both of the logarithm: 1 is perfect,
    0 no better than one duration for every message (as R squared, without squares)."""
    low_ratio: float
    """Tenth percentile of duration / predicted."""
    high_ratio: float
    """Ninetieth percentile of duration / predicted."""
    refusal: str | None
    """Why there is no latency, in words; None where both were fitted."""

    def predict_ns(self, message_bytes: float) -> float:
        """The typical duration of a message."""
        return self.latency_ns + message_bytes * self.bus_factor / self.bus_bytes_per_s * 1e9

    def predict_bus_bytes_per_s(self, message_bytes: float) -> float | None:
        """The bus bandwidth of a typical message, latency included; None if it takes no time."""
        typical = self.predict_ns(message_bytes)
        return message_bytes * self.bus_factor / typical * 1e9 if typical else None


def fit_link(
    message_bytes: NDArray[np.int64], duration_ns: NDArray[np.int64], bus_factor: float
) -> LinkFit | None:
    """Fit latency and bandwidth to the durations of some collectives of one kind and group.

    Args:
        message_bytes: Shape (n,), full messages.
        duration_ns: Shape (n,); of the transfer, where that is known.
        bus_factor: Bus bytes for each byte of a message, above 0.

    Returns:
        None if no message has both bytes and a duration.
    """
    usable = (message_bytes > 0) & (duration_ns > 0)
    if not usable.any():
        return None
    sample = _Sample(message_bytes[usable], duration_ns[usable], bus_factor)
    refusal = sample.refusal()
    if refusal is not None:
        return sample.bandwidth_only(refusal)
    latency, slope = sample.solve()
    if slope * sample.sizes.max() < MIN_GROWTH_RATIO * (latency + slope * sample.sizes.max()):
        return sample.bandwidth_only("The duration does not grow with the message.")
    fit = sample.describe(latency, slope, None)
    if fit.explained_ratio < MIN_EXPLAINED_RATIO:
        return sample.bandwidth_only(
            f"Size explains {max(fit.explained_ratio, 0):.0%} of how the durations differ, less "
            f"than {MIN_EXPLAINED_RATIO:.0%}: they scatter by {fit.residual_ratio:.0%} around the "
            "best line."
        )
    return fit


class _Sample:
    """Messages and their durations; a line is `latency + slope x bytes`, ns."""

    def __init__(
        self, sizes: NDArray[np.int64], durations: NDArray[np.int64], bus_factor: float
    ) -> None:
        self.sizes: _Float64 = sizes.astype(np.float64)
        self.durations: _Float64 = durations.astype(np.float64)
        self.bus_factor = bus_factor

    def refusal(self) -> str | None:
        """Why these messages cannot tell a latency, if so."""
        smallest, largest = int(self.sizes.min()), int(self.sizes.max())
        if smallest == largest:
            return f"All {len(self.sizes)} messages have the same size, {smallest} bytes."
        if largest < MIN_SIZE_RATIO * smallest:
            return (
                f"The messages differ too little: {smallest} to {largest} bytes, "
                f"less than {MIN_SIZE_RATIO} x."
            )
        return None

    def solve(self) -> tuple[float, float]:
        """Latency and slope by least squares of the logarithm, large errors counted linearly."""
        from scipy.optimize import least_squares  # slow to import, and only needed here

        size, duration = float(self.sizes.max()), float(np.median(self.durations))
        sizes, logs = self.sizes / size, np.log(self.durations / duration)
        solved = least_squares(
            lambda line: np.log(line[0] + line[1] * sizes) - logs,
            x0=(0.5, 0.5),
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=_OUTLIER_RATIO,
            xtol=1e-12,
            ftol=1e-12,
            gtol=1e-12,
        )
        latency, slope = solved.x
        return float(latency) * duration, float(slope) * duration / size

    def bandwidth_only(self, refusal: str) -> LinkFit:
        """The line without latency through the median rate."""
        return self.describe(0.0, float(np.median(self.durations / self.sizes)), refusal)

    def describe(self, latency: float, slope: float, refusal: str | None) -> LinkFit:
        """A line and how well it fits."""
        ratios = self.durations / (latency + slope * self.sizes)
        logs = np.log(self.durations)
        constant = np.abs(logs - np.median(logs)).sum()
        explained = 1 - np.abs(np.log(ratios)).sum() / constant if constant else 0.0
        low, high = np.percentile(ratios, _SPREAD_PERCENT)
        return LinkFit(
            latency_ns=latency,
            bus_bytes_per_s=self.bus_factor / slope * 1e9,
            bus_factor=self.bus_factor,
            num_events=len(self.sizes),
            num_sizes=len(np.unique(self.sizes)),
            smallest_bytes=int(self.sizes.min()),
            largest_bytes=int(self.sizes.max()),
            residual_ratio=float(np.median(np.abs(ratios - 1))),
            explained_ratio=round(float(explained), 9),
            low_ratio=float(low),
            high_ratio=float(high),
            refusal=refusal,
        )
