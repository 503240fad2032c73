"""Judge a prediction: compare predicted numbers with measured ones, given the process noise.

Steps of one process are not independent (`comparison.noise`), so each run gives one number. Times
are judged as changes against the baseline's runs, because an effect of the machine on both sides
cancels.

[Note: compute stays] A plan changes waits, not compute. A busy machine changes compute: it slows
its processes, but not an emulated link or another rank. On a busy machine, the same plan therefore
changes the step differently. A difference in compute between the sides counts as noise of the
machine, except for the predicted cost of hiding communication (`advice.slowdown`). So do
differences in FSDP's copies and in the optimizer.

With at least `RUNS_FOR_A_TEST` runs on both sides, the measured change has a 95% interval.

- It did not hold if this interval lies outside the predicted interval, which is first widened by
  `WORTH_NAMING_RATIO` of the step on both sides.
- It held if the estimated change lies inside, and one of two conditions is met: the whole measured
  interval lies inside, or the change is significant and has the predicted sign.

With fewer runs, the noise is the largest of 10% of the step, the spread of the runs of each side,
and the difference in compute.

- It did not hold if the measured change misses the predicted interval by at least the noise.
- It held if the predicted and the measured change are both at least the noise, with the same sign.

Otherwise the outcome is not significant. The same applies if other programs took the cores of one
side, or if compute differs by more than `PROCESS_NOISE_RATIO`.

Memory is counted, not timed. It held if the peak misses its interval by at most 2% of the predicted
peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.comparison.noise import (
    PROCESS_NOISE_RATIO,
    RUNS_FOR_A_TEST,
    SIGNIFICANCE,
    WORTH_NAMING_RATIO,
    estimate_shift,
    rank_test,
)
from fsdp_inspect.simulation.predictions.records import Estimate, Ruling
from fsdp_inspect.statistics import median


@dataclass(frozen=True, slots=True)
class JudgedTime:
    """A predicted time with the measured one."""

    ruling: Ruling
    measured_ns: int
    """The median over the plan's runs."""
    baseline_ns: int
    """The median over the baseline's runs."""
    shift_ns: float
    """Measured change, plan minus baseline: the difference of the medians, or with enough runs the
    Hodges-Lehmann estimate."""
    shift_low_ns: float
    """With enough runs the 95% interval, else the change minus the noise."""
    shift_high_ns: float
    noise_ns: float
    """2% of the step with enough runs for a test, at least 10% without."""
    is_tested: bool
    """True if both sides have enough runs for a test."""


@dataclass(frozen=True, slots=True)
class Sides:
    """One time, measured under the plan and under the baseline's plan; ns, one number per run."""

    runs: Sequence[int]
    """Runs of the plan; not empty."""
    baselines: Sequence[int]
    """Runs of the baseline; not empty."""
    moved_ns: int = 0
    """The difference in compute, copies and optimizer; see [Note: compute stays]."""


def judge_time(
    estimate: Estimate,
    replayed_ns: int,
    sides: Sides,
    *,
    step_ns: int,
    scale: float = 1.0,
) -> JudgedTime:
    """Judge a predicted time.

    Args:
        estimate: The predicted time of the plan.
        replayed_ns: The simulated time of the baseline's plan. A prediction is a change against it.
        sides: The measured times.
        step_ns: The baseline's measured step, which contains the time.
        scale: Measured / simulated step of the baseline. It scales the predicted change.
    """
    bounds = (estimate.value, estimate.low, estimate.high)
    predicted = Shift(*(scale * (bound - replayed_ns) for bound in bounds))
    runs, baselines = sides.runs, sides.baselines
    measured_ns, baseline_ns = median(list(runs)) or 0, median(list(baselines)) or 0
    is_tested = min(len(runs), len(baselines)) >= RUNS_FOR_A_TEST
    if is_tested:
        noise = WORTH_NAMING_RATIO * step_ns
        measured = Shift(*estimate_shift(baselines, runs))
        is_significant = rank_test(baselines, runs) < SIGNIFICANCE
        ruling = _rule_tested(predicted, measured, noise, is_significant=is_significant)
    else:
        spread = max(max(side) - min(side) for side in (runs, baselines))
        noise = max(PROCESS_NOISE_RATIO * step_ns, spread, abs(sides.moved_ns))
        shift = measured_ns - baseline_ns
        measured = Shift(shift, shift - noise, shift + noise)
        ruling = _rule_few(predicted, shift, noise)
    return JudgedTime(
        ruling=ruling,
        measured_ns=measured_ns,
        baseline_ns=baseline_ns,
        shift_ns=measured.value,
        shift_low_ns=measured.low,
        shift_high_ns=measured.high,
        noise_ns=noise,
        is_tested=is_tested,
    )


def judge_peak(estimate: Estimate, measured: int) -> Ruling:
    """Judge a predicted peak of memory."""
    is_near = estimate.distance(measured) <= WORTH_NAMING_RATIO * estimate.value
    return Ruling.HELD if is_near else Ruling.DID_NOT_HOLD


def judge_together(step: Ruling, peak: Ruling | None) -> Ruling:
    """The outcome of the whole prediction: did not hold if either part did not, else the step's."""
    return Ruling.DID_NOT_HOLD if Ruling.DID_NOT_HOLD in (step, peak) else step


@dataclass(frozen=True, slots=True)
class Shift:
    """A change in ns with its interval."""

    value: float
    low: float
    high: float

    def distance(self, value: float) -> float:
        """The distance of a number to the interval; 0 inside."""
        return max(self.low - value, value - self.high, 0)


def _rule_tested(
    predicted: Shift, measured: Shift, noise: float, *, is_significant: bool
) -> Ruling:
    wide = Shift(predicted.value, predicted.low - noise, predicted.high + noise)
    if measured.high < wide.low or measured.low > wide.high:
        return Ruling.DID_NOT_HOLD
    is_inside = wide.low <= measured.low and measured.high <= wide.high
    has_predicted_sign = (
        is_significant and abs(measured.value) >= noise and _agree(predicted, measured.value)
    )
    is_near = wide.distance(measured.value) == 0
    return Ruling.HELD if is_near and (is_inside or has_predicted_sign) else Ruling.CANNOT_BE_TOLD


def _rule_few(predicted: Shift, shift: float, noise: float) -> Ruling:
    if predicted.distance(shift) >= noise:
        return Ruling.DID_NOT_HOLD
    is_significant = min(abs(predicted.value), abs(shift)) >= noise
    return Ruling.HELD if is_significant and _agree(predicted, shift) else Ruling.CANNOT_BE_TOLD


def _agree(predicted: Shift, shift: float) -> bool:
    """Whether both changes have the same sign."""
    return predicted.value * shift > 0
