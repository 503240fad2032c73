"""Fit latency and bandwidth to the durations of a run's collectives.

    duration = latency + message x factor / bus bandwidth

The factor is that of nccl-tests (`trace.links`), so the bandwidth is comparable with the
bandwidth of the link. Both results are non-negative. The fit minimises the relative error (of the
logarithm). Large errors count linearly and not squared, because some collectives are delayed by
ten times their duration. A latency requires messages of different sizes. Without them, the result
has the bandwidth only, and the reason.

[Note: error of the line] Messages of one size share their error (the link was slower, or the buffer
lay elsewhere), so each size counts as one observation with the error `residual_ratio`. The standard
errors are those of weighted least squares through these observations: 1 / sum w of the duration at
the weighted mean size, and 1 / sum w (size - mean)^2 of the slope.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_bytes

MIN_SIZE_RATIO = 1.5
"""Smallest ratio of the largest to the smallest message that allows the fit of a latency."""
MIN_EXPLAINED_RATIO = 0.05
"""A line that explains a smaller fraction of the differences is no better than a constant
duration."""
MIN_GROWTH_RATIO = 0.01
"""Smallest fraction of the longest predicted duration that must depend on the bytes."""
_OUTLIER_RATIO = 0.1
"""Relative error above which a duration counts linearly."""
_SPREAD_PERCENT = (10, 90)

_Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinkFit:
    """The time of one kind of collective on one process group, as a function of its message."""

    latency_ns: float
    """Latency; 0 if it is unknown."""
    bus_bytes_per_s: float
    bus_factor: float
    """Bus bytes per byte of a message."""
    num_events: int
    num_sizes: int
    """Number of distinct message sizes."""
    smallest_bytes: int
    largest_bytes: int
    residual_ratio: float
    """Median of |duration - predicted| / predicted."""
    explained_ratio: float
    """1 - sum of the errors / sum of the errors of a constant, both of the logarithm. 1 is perfect,
    and 0 is no better than a constant duration. It is like R squared, without squares."""
    low_ratio: float
    """Tenth percentile of duration / predicted."""
    high_ratio: float
    """Ninetieth percentile of duration / predicted."""
    refusal: str | None
    """The reason why no latency was fitted, as a sentence; None if both values were fitted."""
    is_constant: bool
    """Whether messages of different sizes take equally long. The latency is then the whole
    duration."""
    typical_ns: float
    """Median duration."""
    middle_bytes: float
    """The message whose duration the line predicts best."""
    middle_error_ns: float
    """Standard error of that duration. See [Note: error of the line]."""
    slope_error_ns_per_byte: float
    """Standard error of the slope; 0 without a latency."""

    def predict_ns(self, message_bytes: float) -> float:
        """Return the typical duration of a message."""
        return self.latency_ns + message_bytes * self.bus_factor / self.bus_bytes_per_s * 1e9

    def error_ns(self, message_bytes: float) -> float:
        """Return the standard error of a predicted duration. It grows outside the fitted sizes."""
        distance = message_bytes - self.middle_bytes
        return math.hypot(self.middle_error_ns, self.slope_error_ns_per_byte * distance)

    def predict_bus_bytes_per_s(self, message_bytes: float) -> float | None:
        """Return the bus bandwidth of a message, latency included; None if it takes no time."""
        typical = self.predict_ns(message_bytes)
        return message_bytes * self.bus_factor / typical * 1e9 if typical else None


def fit_link(
    message_bytes: NDArray[np.int64],
    duration_ns: NDArray[np.int64],
    bus_factor: float,
    *,
    full_bytes: NDArray[np.int64] | None = None,
) -> LinkFit | None:
    """Fit latency and bandwidth to the durations of some collectives of one kind and group.

    Args:
        message_bytes: Full messages, shape (n,).
        duration_ns: Durations of the transfers if known, else of the collectives, shape (n,).
        bus_factor: Bus bytes per byte of a message, above 0.
        full_bytes: The full messages, if `message_bytes` are bus bytes: a refusal names these.

    Returns:
        None if no message has both bytes and a duration.
    """
    usable = (message_bytes > 0) & (duration_ns > 0)
    if not usable.any():
        return None
    sample = _Sample(message_bytes[usable], duration_ns[usable], bus_factor)
    refusal = sample.refusal((message_bytes if full_bytes is None else full_bytes)[usable])
    if refusal is not None:
        return sample.bandwidth_only(refusal)
    latency, slope = sample.solve()
    if slope * sample.sizes.max() < MIN_GROWTH_RATIO * (latency + slope * sample.sizes.max()):
        constant = sample.bandwidth_only("The duration does not grow with the message.")
        return replace(constant, is_constant=True)
    fit = sample.describe(latency, slope, None)
    if fit.explained_ratio < MIN_EXPLAINED_RATIO:
        return sample.bandwidth_only(
            f"The size of a message explains only {_below(fit.explained_ratio)} of the "
            f"differences between durations, and at least {MIN_EXPLAINED_RATIO:.0%} are required. "
            f"The durations differ from the fitted line by {fit.residual_ratio:.0%} (median)."
        )
    return fit


def _below(ratio: float) -> str:
    """A ratio below the required one, with the digits that show the difference."""
    shown = (f"{max(ratio, 0):.{digits}%}" for digits in range(4))
    required = f"{MIN_EXPLAINED_RATIO:.0%}"
    return next((each for each in shown if float(each[:-1]) < float(required[:-1])), "less")


class _Sample:
    """Messages and their durations. A line is `latency + slope x bytes`, ns."""

    def __init__(
        self, sizes: NDArray[np.int64], durations: NDArray[np.int64], bus_factor: float
    ) -> None:
        self.sizes: _Float64 = sizes.astype(np.float64)
        self.durations: _Float64 = durations.astype(np.float64)
        self.bus_factor = bus_factor

    def refusal(self, full_bytes: NDArray[np.int64]) -> str | None:
        """Return the reason why these messages give no latency; None if they give one."""
        smallest, largest = (format_bytes(each) for each in (full_bytes.min(), full_bytes.max()))
        if self.sizes.min() == self.sizes.max():
            if len(self.sizes) == 1:
                return f"There is one message only, of {smallest}."
            return f"All {len(self.sizes)} messages have the same size, {smallest}."
        if self.sizes.max() < MIN_SIZE_RATIO * self.sizes.min():
            return (
                f"The message sizes are too similar: {smallest} to {largest}. The largest "
                f"must be at least {MIN_SIZE_RATIO} times the smallest."
            )
        return None

    def solve(self) -> tuple[float, float]:
        """Fit latency and slope by least squares of the logarithm. Large errors count linearly."""
        from scipy.optimize import least_squares  # slow to import, and needed only here

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
        """Return the line without latency through the median rate."""
        return self.describe(0.0, float(np.median(self.durations / self.sizes)), refusal)

    def describe(self, latency: float, slope: float, refusal: str | None) -> LinkFit:
        """Return a line and the quality of its fit."""
        predicted = latency + slope * self.sizes
        ratios = self.durations / predicted
        logs = np.log(self.durations)
        constant = np.abs(logs - np.median(logs)).sum()
        explained = 1 - np.abs(np.log(ratios)).sum() / constant if constant else 0.0
        low, high = np.percentile(ratios, _SPREAD_PERCENT)
        residual = float(np.median(np.abs(ratios - 1)))
        middle, middle_error, slope_error = self._errors(latency, slope, residual)
        return LinkFit(
            latency_ns=latency,
            bus_bytes_per_s=self.bus_factor / slope * 1e9,
            bus_factor=self.bus_factor,
            num_events=len(self.sizes),
            num_sizes=len(np.unique(self.sizes)),
            smallest_bytes=int(self.sizes.min()),
            largest_bytes=int(self.sizes.max()),
            residual_ratio=residual,
            explained_ratio=round(float(explained), 9),
            low_ratio=float(low),
            high_ratio=float(high),
            refusal=refusal,
            is_constant=False,
            typical_ns=float(np.median(self.durations)),
            middle_bytes=middle,
            middle_error_ns=middle_error,
            slope_error_ns_per_byte=0.0 if refusal else slope_error,
        )

    def _errors(self, latency: float, slope: float, residual: float) -> tuple[float, float, float]:
        """Return the middle size and the errors there; see [Note: error of the line]."""
        sizes = np.unique(self.sizes)
        weights = 1 / (latency + slope * sizes) ** 2  # the squared residual is a common factor
        middle = float(np.average(sizes, weights=weights))
        spread = float((weights * (sizes - middle) ** 2).sum())
        slope_error = residual / math.sqrt(spread) if spread else 0.0
        return middle, residual / math.sqrt(float(weights.sum())), slope_error
