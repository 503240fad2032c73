"""Compute median ratios of paired measurements, each with a bootstrap interval.

A round measures every mode once, within a short time. Ratios are taken within a round, so a slow
phase of the machine affects both sides. The interval is the percentile bootstrap over rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
_CONFIDENCE_PCT = 95
_CHUNK = 500
"""The number of resamples drawn together, which limits the memory for many rounds."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic and its 95% interval; infinite if unbounded."""

    value: float
    low: float
    high: float


def median_ratio(measured: Sequence[float], reference: Sequence[float], seed: int = 0) -> Estimate:
    """The median over rounds of measured / reference. Arrays of shape (rounds,)."""
    ratios = _ratios(measured, reference)
    return _estimate([ratios], lambda samples: np.median(samples[0], axis=-1), seed)


def overhead_ratio(
    peer: Sequence[float], ours: Sequence[float], reference: Sequence[float], seed: int = 0
) -> Estimate:
    """The peer's overhead relative to ours: (median peer ratio - 1) / (median ours - 1).

    Infinite if ours is not distinguishable from zero and the peer's is.
    """
    both = [_ratios(peer, reference), _ratios(ours, reference)]

    def quotient(samples: list[Values]) -> Values:
        above, below = (np.median(sample, axis=-1) - 1 for sample in samples)
        safe = np.where(below > 0, below, 1.0)
        return np.where(below > 0, above / safe, np.where(above > 0, math.inf, 0.0))

    return _estimate(both, quotient, seed)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a fraction of the values is; `share` is from 0 to 1."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def _ratios(measured: Sequence[float], reference: Sequence[float]) -> Values:
    if len(measured) != len(reference) or not measured:
        raise ValueError(
            f"Pairs need one or more rounds of both sides, got {len(measured)} and "
            f"{len(reference)}."
        )
    return np.asarray(measured, dtype=np.float64) / np.asarray(reference, dtype=np.float64)


def _estimate(
    values: list[Values], statistic: Callable[[list[Values]], Values], seed: int
) -> Estimate:
    """The statistic of the values, and its interval over resampled rounds (last axis)."""
    generator = np.random.default_rng(seed)
    rounds = len(values[0])
    found = []
    for _ in range(RESAMPLES // _CHUNK):
        chosen = generator.integers(0, rounds, (_CHUNK, rounds))
        found.append(statistic([value[chosen] for value in values]))
    tail = (100 - _CONFIDENCE_PCT) / 2
    # "lower" and "higher" return existing values; interpolation between infinities would fail.
    low = np.percentile(np.concatenate(found), tail, method="lower")
    high = np.percentile(np.concatenate(found), 100 - tail, method="higher")
    return Estimate(float(statistic(values)), float(low), float(high))
