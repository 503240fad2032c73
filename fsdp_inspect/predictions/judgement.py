"""Did a prediction hold? Predicted numbers against measured ones, as far as noise lets one tell.

Steps of one process are not independent (`comparison.noise`), so a run of a plan gives one number,
and times are judged as changes against the baseline's runs: what the machine does to both cancels.

[Note: compute stays] A plan moves waiting, not compute, and a busy machine moves compute: its own
processes are slowed, an emulated link or another rank is not, so the change of the step that a plan
brings is another one there. What compute differs by between the sides is noise of the machine,
but for what the plan is predicted to pay for hiding communication (`advice.slowdown`).

With `RUNS_FOR_A_TEST` processes or more on both sides the change has a 95 % interval. The
prediction did not hold if that lies wholly outside of its own interval, `WORTH_NAMING_RATIO` of the
step aside. It held if the estimated change lies inside, and either the whole interval does, or the
change is told from none and goes the predicted way. With fewer processes noise is the largest of 10
% of the step, what runs of one plan differ by, and what compute differs by: it did not hold if it
is off by that much; it held if predicted and measured change are both at least as large, and go
the same way. All else cannot be told.

Memory is counted, not timed: it held if the peak is within its interval and 2 % of it.
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
from fsdp_inspect.predictions.records import Estimate, Ruling
from fsdp_inspect.statistics import median


@dataclass(frozen=True, slots=True)
class JudgedTime:
    """A predicted time beside the measured one."""

    ruling: Ruling
    measured_ns: int
    """The median over the plan's runs."""
    baseline_ns: int
    """The median over the baseline's runs."""
    shift_ns: float
    """Measured, plan against baseline: the difference of the medians; with enough runs the
    Hodges-Lehmann estimate."""
    shift_low_ns: float
    """95 % interval with enough runs, else less the noise."""
    shift_high_ns: float
    noise_ns: float
    """What is taken for noise: 2 % of the step where it was tested, 10 % or more where not."""
    is_tested: bool
    """Both sides have enough runs for a test."""


@dataclass(frozen=True, slots=True)
class Sides:
    """One time, measured under the plan and under the baseline's; ns, one number a run."""

    runs: Sequence[int]
    """Of the plan; not empty."""
    baselines: Sequence[int]
    """Not empty."""
    moved_ns: int = 0
    """What compute differs by between them; see [Note: compute stays]."""


def judge_time(
    estimate: Estimate,
    replayed_ns: int,
    sides: Sides,
    *,
    step_ns: int,
    scale: float = 1.0,
) -> JudgedTime:
    """Whether a predicted time holds.

    Args:
        estimate: Predicted, of the plan.
        replayed_ns: The same of the baseline's plan, played: a prediction is a change against it.
        sides: Measured.
        step_ns: The baseline's measured step, which the time is a part of.
        scale: How many times as long as the replayed step it is: a prediction is a share of it.
    """
    bounds = (estimate.value, estimate.low, estimate.high)
    predicted = Shift(*(scale * (bound - replayed_ns) for bound in bounds))
    runs, baselines = sides.runs, sides.baselines
    measured_ns, baseline_ns = median(list(runs)) or 0, median(list(baselines)) or 0
    is_tested = min(len(runs), len(baselines)) >= RUNS_FOR_A_TEST
    if is_tested:
        noise = WORTH_NAMING_RATIO * step_ns
        measured = Shift(*estimate_shift(baselines, runs))
        is_told = rank_test(baselines, runs) < SIGNIFICANCE
        ruling = _rule_tested(predicted, measured, noise, is_told=is_told)
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
    """Whether a predicted peak of memory holds."""
    is_near = estimate.distance(measured) <= WORTH_NAMING_RATIO * estimate.value
    return Ruling.HELD if is_near else Ruling.DID_NOT_HOLD


def judge_together(step: Ruling, peak: Ruling | None) -> Ruling:
    """The whole prediction: one of the two that did not hold is enough; the step decides else."""
    return Ruling.DID_NOT_HOLD if Ruling.DID_NOT_HOLD in (step, peak) else step


@dataclass(frozen=True, slots=True)
class Shift:
    """A change in ns with its interval."""

    value: float
    low: float
    high: float

    def distance(self, value: float) -> float:
        """How far a number lies outside, from 0."""
        return max(self.low - value, value - self.high, 0)


def _rule_tested(predicted: Shift, measured: Shift, noise: float, *, is_told: bool) -> Ruling:
    wide = Shift(predicted.value, predicted.low - noise, predicted.high + noise)
    if measured.high < wide.low or measured.low > wide.high:
        return Ruling.DID_NOT_HOLD
    is_inside = wide.low <= measured.low and measured.high <= wide.high
    goes_its_way = is_told and abs(measured.value) >= noise and _agree(predicted, measured.value)
    is_near = wide.distance(measured.value) == 0
    return Ruling.HELD if is_near and (is_inside or goes_its_way) else Ruling.CANNOT_BE_TOLD


def _rule_few(predicted: Shift, shift: float, noise: float) -> Ruling:
    if predicted.distance(shift) >= noise:
        return Ruling.DID_NOT_HOLD
    is_told = min(abs(predicted.value), abs(shift)) >= noise
    return Ruling.HELD if is_told and _agree(predicted, shift) else Ruling.CANNOT_BE_TOLD


def _agree(predicted: Shift, shift: float) -> bool:
    """Whether both go the same way."""
    return predicted.value * shift > 0
