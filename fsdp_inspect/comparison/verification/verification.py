"""Verify a prediction: compare it with the runs of its plan.

The plan, the machine and the network of the runs must be those of the prediction, else the outcome
is "cannot be judged". Step time and peak memory are judged (`predictions.judgement`). Exposed time
is only shown, since it is part of the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.contention import measure_contention
from fsdp_inspect.analysis.memory.peak import highest_peak_bytes
from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.analysis.scalars import measure_loss
from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.analysis.trust import (
    REGROUPING_RATIO,
    RunDelay,
    find_run_delay_difference,
    measure_trust,
)
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.comparison.losses import compare_losses
from fsdp_inspect.comparison.noise import PROCESS_NOISE_RATIO, RUNS_FOR_A_TEST
from fsdp_inspect.comparison.settings import UNITS, PlanDifference
from fsdp_inspect.comparison.verification.judgement import (
    JudgedTime,
    Sides,
    differences_of,
    find_obstacles,
    find_prediction_caveats,
    judge_peak,
    judge_time,
    judge_together,
)
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_signed
from fsdp_inspect.results import Result
from fsdp_inspect.simulation.predictions.records import Estimate, Outcome, Prediction, Ruling, now
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.version import __version__


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number: predicted and measured."""

    name: str
    """A metric's name: `step_time_ns`, `exposed_ns`, `peak_allocated_bytes`."""
    predicted: Estimate | None
    measured: int | None
    """The median over the plan's runs."""
    measured_low: int | None
    """The lowest value over the plan's runs; `measured_high` is the highest."""
    measured_high: int | None
    baseline: int | None
    """Measured: the median over the baseline's runs."""
    method: str
    """The method of the measurement."""
    error: float | None
    """measured / predicted - 1, without a correction for the machine."""
    ruling: Ruling | None
    """None: not judged alone, or a value is missing."""


@dataclass(frozen=True, slots=True)
class VerifiedUnit:
    """The exposed time of a step for one unit, predicted and measured."""

    fqn: str
    predicted_ns: int | None
    """None: the plan has no such unit."""
    measured_ns: int | None
    """The time in the run with the median step time; None: the run has no such unit."""
    difference_ns: int | None


@dataclass(frozen=True, slots=True)
class Verification(Result):
    """The result of a verification."""

    prediction: Prediction
    ruling: Ruling
    answer: str
    """One sentence with the numbers."""
    obstacles: tuple[str, ...]
    """The reasons why the prediction cannot be judged; empty: it can be."""
    plan_differences: tuple[PlanDifference, ...]
    """Differences between the predicted plan and the plan that ran."""
    caveats: tuple[str, ...]
    source: str
    """Source of the runs: `recorded` or `emulated`."""
    run_ids: tuple[str, ...]
    baseline_run_ids: tuple[str, ...]
    """Empty: the baseline's numbers come from the prediction."""
    predicted_change: float
    """Change of the step: simulated plan / simulated baseline - 1."""
    predicted_change_low: float
    predicted_change_high: float
    measured_change: float | None
    """Change of the step against the baseline's runs."""
    measured_change_low: float | None
    """With enough runs the 95% interval, else plus and minus the noise."""
    measured_change_high: float | None
    step_error: float | None
    """(1 + measured change) / (1 + predicted change) - 1. An equal effect of the machine on both
    sides cancels."""
    is_tested: bool
    """True if both sides have enough runs for a test."""
    compute_change: float | None
    """Change of forward and backward against the baseline's runs, without the predicted cost of
    hiding communication. It shows the effect of the machine. None: no run of the baseline, or the
    plan changes the computation."""
    has_other_cause: bool
    """True if something other than the plan may have changed the times: a caveat names it. Without
    a difference in memory, the ruling is then `CANNOT_BE_TOLD`."""
    quantities: tuple[Quantity, ...]
    units: tuple[VerifiedUnit, ...]
    """Longest waits first."""

    def outcome(self) -> Outcome:
        """The outcome as stored in the prediction history."""
        by_name = {quantity.name: quantity for quantity in self.quantities}
        return Outcome(
            prediction_id=self.prediction.prediction_id,
            tool_version=__version__,
            **now(),
            ruling=self.ruling,
            sentence=self.answer,
            run_ids=list(self.run_ids),
            baseline_run_ids=list(self.baseline_run_ids),
            step_time_ns=by_name["step_time_ns"].measured,
            measured_change=self.measured_change,
            step_error=self.step_error,
            exposed_ns=by_name["exposed_ns"].measured,
            peak_bytes=by_name["peak_allocated_bytes"].measured,
            memory_error=by_name["peak_allocated_bytes"].error,
            has_other_cause=self.has_other_cause,
        )


def verify_prediction(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource] = ()
) -> Verification:
    """Compare a prediction with the runs of its plan.

    Args:
        prediction: The prediction.
        runs: Runs of the plan; not empty.
        baselines: Runs of the baseline's plan. If empty, the prediction's own numbers of the
            baseline are used.
    """
    measured = [_measure(run, prediction) for run in runs]
    before = [_measure(run, prediction) for run in baselines]
    plan, recorded = prediction.plan, prediction.baseline_plan
    differences = differences_of(plan, runs[0], recorded=recorded)
    obstacles = tuple(find_obstacles(prediction, runs, baselines))
    timed = [each for each in measured if each.step_ns is not None]
    untimed = [each.run_id for each in measured if each.step_ns is None]
    obstacles += tuple(f"Run {run_id} has no timed step." for run_id in untimed)
    moved = _moved_compute(prediction, timed, before)
    busier = _busier(timed, before, prediction.run_delay_ratio)
    step, exposed = _judge_times(prediction, timed, before, moved)
    about_compute = list[str]()
    other_cause = "The machine may have changed the times, not the plan."
    if moved and step and abs(moved.shift_ns) >= PROCESS_NOISE_RATIO * step.baseline_ns:
        slowdown = _find_slowdown(moved, timed, before)
        about_compute.append(_say_compute(moved, slowdown))
        if slowdown is not None:
            other_cause = "Communication that slows compute may be the cause, or the machine."
    has_other_cause = bool(busier or about_compute)
    if has_other_cause:
        step, exposed = (each and replace(each, ruling=_UNTOLD) for each in (step, exposed))
    peak = _peak(prediction, measured, before)
    quantities = (
        _time_quantity("step_time_ns", prediction.step_time_ns, timed, step),
        _time_quantity("exposed_ns", prediction.exposed_ns, timed, exposed),
        peak,
    )
    is_judged = step is not None and not obstacles
    ruling = judge_together(step.ruling, peak.ruling) if is_judged and step else None
    change = _changes(prediction, step)
    return Verification(
        prediction=prediction,
        ruling=ruling or Ruling.NOT_COMPARABLE,
        answer=_answer(
            prediction,
            ruling,
            obstacles,
            step,
            quantities,
            other_cause=other_cause if has_other_cause else "",
        ),
        obstacles=obstacles,
        plan_differences=differences,
        caveats=(
            *find_prediction_caveats(prediction, runs, baselines),
            *busier,
            *about_compute,
            *_about_memory(prediction, peak),
            *compare_losses(
                [*map(measure_loss, baselines)],
                [*map(measure_loss, runs)],
                ("the baseline", "the run"),
            ),
        ),
        source=runs[0].manifest.source,
        run_ids=tuple(run.manifest.run_id for run in runs),
        baseline_run_ids=tuple(run.manifest.run_id for run in baselines),
        predicted_change=prediction.change,
        predicted_change_low=prediction.step_time_ns.low / prediction.replayed_step_ns - 1,
        predicted_change_high=prediction.step_time_ns.high / prediction.replayed_step_ns - 1,
        measured_change=change[0],
        measured_change_low=change[1],
        measured_change_high=change[2],
        step_error=None if change[0] is None else (1 + change[0]) / (1 + prediction.change) - 1,
        is_tested=step.is_tested if step else False,
        compute_change=moved.change if moved else None,
        has_other_cause=has_other_cause,
        quantities=quantities
        if is_judged
        else tuple(replace(each, ruling=None) for each in quantities),
        units=_units(prediction, timed),
    )


# --- measurements


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements of one run; None if the run has no value."""

    source: RunSource
    run_id: str
    step_ns: int | None
    exposed_ns: int | None
    hidden_ns: int
    """Communication during which the rank does not wait; 0: none, or unknown."""
    compute_ns: int | None
    """Forward and backward of the typical step."""
    host_ns: int | None
    """FSDP's copies and the optimizer in that step."""
    run_delay: RunDelay | None
    peak_bytes: int | None
    methods: Mapping[str, str]
    memory: str
    """The method that counted the memory."""


def _measure(run: RunSource, prediction: Prediction) -> _Measured:
    """Measure the median rank; memory is that of the prediction's rank."""
    middle = measure_overlap(run).run
    step = measure_breakdown(run).headline
    provenance = measure_provenance(run)
    return _Measured(
        source=run,
        run_id=run.manifest.run_id,
        step_ns=middle.step_time_ns if middle else None,
        exposed_ns=middle.exposed_ns if middle else None,
        hidden_ns=middle.hidden_ns if middle else 0,
        compute_ns=sum(step.duration_ns(part) for part in _COMPUTE) if step else None,
        host_ns=sum(step.duration_ns(part) for part in _BESIDE_COMPUTE) if step else None,
        run_delay=measure_trust(run).run_delay,
        peak_bytes=highest_peak_bytes(run, prediction.rank),
        methods=provenance.methods,
        memory=provenance.memory or "",
    )


_UNTOLD = Ruling.CANNOT_BE_TOLD
_COMPUTE = (StepPart.FORWARD, StepPart.BACKWARD)
_BESIDE_COMPUTE = (StepPart.FSDP_COPIES, StepPart.OPTIMIZER)
"""A plan changes the copies, but its prediction does not state them separately."""
_CHANGING_COMPUTE = frozenset(
    {"accumulation", "checkpointing", "mesh", "offload", "param_dtype", "world_size"}
)
"""Settings of a plan that may change the computation or its duration."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """Compute on both sides; see [Note: compute stays] in `judgement`."""

    before_ns: int
    after_ns: int
    paid_ns: int
    """Part of `after_ns`: the predicted cost of hiding communication."""
    is_regrouped: bool
    """Whether the plan has other units than the baseline."""

    @property
    def shift_ns(self) -> int:
        """The effect of the machine on compute, ns."""
        return self.after_ns - self.paid_ns - self.before_ns

    @property
    def change(self) -> float:
        return self.shift_ns / self.before_ns


def _moved_compute(
    prediction: Prediction, runs: Sequence[_Measured], baselines: Sequence[_Measured]
) -> _Moved | None:
    """Compute on both sides; None if it is unknown, or if the plan may change it."""
    before = median([each.compute_ns for each in baselines if each.compute_ns])
    after = median([each.compute_ns for each in runs if each.compute_ns])
    if not before or not after or _CHANGING_COMPUTE.intersection(prediction.changes):
        return None
    steps = [each.step_ns for each in baselines if each.step_ns]
    step_ns = median(steps) or prediction.recorded_step_ns
    paid_ns = round(prediction.paid_ns * step_ns / prediction.replayed_step_ns)
    return _Moved(before, after, paid_ns, is_regrouped=UNITS in prediction.changes)


def _find_slowdown(
    moved: _Moved, runs: Sequence[_Measured], baselines: Sequence[_Measured]
) -> float | None:
    """The slowdown of compute during communication, if it may be what the prediction lacks.

    None if compute does not take longer, if the prediction contains a slowdown, if the runs hide no
    more communication than the baseline, or if no clear slowdown was measured.
    """
    hidden, was_hidden = (median([each.hidden_ns for each in side]) for side in (runs, baselines))
    if moved.shift_ns < 0 or moved.paid_ns or (hidden or 0) <= (was_hidden or 0):
        return None
    found = [measure_contention(each.source) for each in runs]
    clear = [one.slowdown for one in found if one and one.is_clear and one.slowdown]
    return min((each for each in clear if each > 1), default=None)


def _busier(
    runs: Sequence[_Measured], baselines: Sequence[_Measured], predicted_from: float | None
) -> tuple[str, ...]:
    """Add a caveat if other programs took the cores of one side: its times do not show the plan.

    Args:
        runs: The runs of the plan.
        baselines: Runs of the baseline beside them.
        predicted_from: The run delay of the baseline of the prediction, if `baselines` have none.
            If it is unknown, too, that machine counts as quiet.
    """
    after, before = (
        [each.run_delay.ratio for each in side if each.run_delay is not None]
        for side in (runs, baselines)
    )
    before = before or ([] if predicted_from is None else [predicted_from])
    difference = find_run_delay_difference(before, after)
    if difference is None:
        return ()
    was, now_ = difference
    known = (
        f", and for {was:.0%} in the baseline. The machine was busier in one of them, so"
        if before
        else ". That of the baseline is unknown, so"
    )
    return (
        f"A training thread was ready but had no core for {now_:.0%} of the time{known} the times "
        "do not show the effect of the plan. Repeat both in turn on a quiet machine.",
    )


def _judge_times(
    prediction: Prediction,
    runs: Sequence[_Measured],
    baselines: Sequence[_Measured],
    moved: _Moved | None,
) -> tuple[JudgedTime | None, JudgedTime | None]:
    """Step and exposed time; None without a timed step."""
    steps = [each.step_ns for each in baselines if each.step_ns is not None]
    exposed = [each.exposed_ns for each in baselines if each.exposed_ns is not None]
    steps, exposed = (
        steps or [prediction.recorded_step_ns],
        exposed or [prediction.replayed_exposed_ns],
    )
    if not runs:
        return None, None
    step_ns = median(steps) or prediction.recorded_step_ns
    scale = step_ns / prediction.replayed_step_ns
    moved_ns = abs(moved.shift_ns) if moved else 0
    host = [[each.host_ns for each in side if each.host_ns] for side in (baselines, runs)]
    if all(host):
        moved_ns += abs((median(host[1]) or 0) - (median(host[0]) or 0))
    return (
        judge_time(
            prediction.step_time_ns,
            prediction.replayed_step_ns,
            Sides([each.step_ns or 0 for each in runs], steps, moved_ns),
            step_ns=step_ns,
            scale=scale,
        ),
        judge_time(
            prediction.exposed_ns,
            prediction.replayed_exposed_ns,
            Sides([each.exposed_ns or 0 for each in runs], exposed, moved_ns),
            step_ns=step_ns,
            scale=scale,
        ),
    )


def _changes(
    prediction: Prediction, step: JudgedTime | None
) -> tuple[float | None, float | None, float | None]:
    """The measured change of the step with its interval."""
    if step is None or not step.baseline_ns:
        return None, None, None
    shifts = (step.shift_ns, step.shift_low_ns, step.shift_high_ns)
    value, low, high = (shift / step.baseline_ns for shift in shifts)
    return value, low, high


def _time_quantity(
    name: str, estimate: Estimate, runs: Sequence[_Measured], judged: JudgedTime | None
) -> Quantity:
    group = "step" if name == "step_time_ns" else "all_gather"
    field = "step_ns" if name == "step_time_ns" else "exposed_ns"
    values = [value for run in runs if (value := getattr(run, field)) is not None]
    measured = judged.measured_ns if judged else None
    return Quantity(
        name=name,
        predicted=estimate,
        measured=measured,
        measured_low=min(values, default=None),
        measured_high=max(values, default=None),
        baseline=judged.baseline_ns if judged else None,
        method=next((run.methods[group] for run in runs if group in run.methods), ""),
        error=_error(measured, estimate),
        ruling=judged.ruling if judged else None,
    )


def _peak(
    prediction: Prediction, runs: Sequence[_Measured], baselines: Sequence[_Measured]
) -> Quantity:
    values = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    before = [run.peak_bytes for run in baselines if run.peak_bytes is not None]
    measured, estimate = median(values), prediction.peak_bytes
    is_known = measured is not None and estimate is not None
    return Quantity(
        name="peak_allocated_bytes",
        predicted=estimate,
        measured=measured,
        measured_low=min(values, default=None),
        measured_high=max(values, default=None),
        baseline=median(before) if before else prediction.recorded_peak_bytes,
        method=next((run.memory for run in runs if run.memory), ""),
        error=_error(measured, estimate) if is_known else None,
        ruling=judge_peak(estimate, measured) if measured is not None and estimate else None,
    )


def _say_compute(moved: _Moved, slowdown: float | None) -> str:
    """A caveat: compute changed the step by more than the noise."""
    longer = "more" if moved.change > 0 else "less"
    numbers = f"baseline {format_ns(moved.before_ns)}, run {format_ns(moved.after_ns)}"
    reason = "the plan does not change compute"
    cause = "The machine was probably busier in one of them."
    if moved.is_regrouped:
        reason = f"other units usually change it by less than {format_ratio(REGROUPING_RATIO)}"
    if slowdown is not None:
        reason = "the prediction assumes equal compute"
        cause = (
            f"In the run, compute takes {slowdown:.2f} times as long during communication, and "
            "more communication is hidden than in the baseline. This is a possible cause. A busier "
            "machine is another one."
        )
    if moved.paid_ns:
        numbers = f"{numbers}, including {format_ns(moved.paid_ns)} for hiding communication"
        reason = "the plan does not explain the rest"
    return (
        f"Compute takes {format_ratio(abs(moved.change))} {longer} time than in the baseline "
        f"({numbers}), and {reason}. {cause} Record both again, in turn."
    )


def _about_memory(prediction: Prediction, peak: Quantity) -> tuple[str, ...]:
    if prediction.peak_bytes is None and prediction.recorded_peak_bytes is not None:
        return ("Memory is not predicted: the baseline does not show that of this plan.",)
    if prediction.peak_bytes is None:
        return ("Memory is not predicted: the baseline has no memory step.",)
    if peak.measured is None:
        return ("Memory is not measured: record a memory step, Recorder(..., memory_steps=[3]).",)
    return ()


def _error(measured: int | None, estimate: Estimate | None) -> float | None:
    if measured is None or estimate is None or not estimate.value:
        return None
    return measured / estimate.value - 1


def _units(prediction: Prediction, timed: Sequence[_Measured]) -> tuple[VerifiedUnit, ...]:
    """The units of the run with the median step; of two runs, the faster one."""
    if not timed:
        return ()
    ordered = sorted(timed, key=lambda each: each.step_ns or 0)
    run = ordered[(len(ordered) - 1) // 2].source
    measured = {
        unit.fqn: sum(
            kind.exposed_ns for kind in (unit.all_gather, unit.reduce_scatter, unit.all_reduce)
        )
        for unit in measure_units(run).units
    }
    predicted = {unit.fqn: unit.exposed_ns for unit in prediction.units}
    rows = [
        _unit(fqn, predicted.get(fqn), measured.get(fqn))
        for fqn in dict.fromkeys([*predicted, *measured])
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.predicted_ns or 0, row.measured_ns or 0)))


def _unit(fqn: str, predicted: int | None, measured: int | None) -> VerifiedUnit:
    is_known = predicted is not None and measured is not None
    return VerifiedUnit(
        fqn, predicted, measured, (measured or 0) - (predicted or 0) if is_known else None
    )


# --- texts


def _answer(
    prediction: Prediction,
    ruling: Ruling | None,
    obstacles: Sequence[str],
    step: JudgedTime | None,
    quantities: Sequence[Quantity],
    *,
    other_cause: str,
) -> str:
    if ruling is None or step is None:
        return f"Cannot be judged: {obstacles[0] if obstacles else 'no step is timed.'}"
    shift = step.shift_ns / step.baseline_ns
    numbers = (
        f"predicted {format_signed(prediction.change)} a step, measured {format_signed(shift)} "
        f"({format_ns(step.measured_ns)}, baseline {format_ns(step.baseline_ns)})"
    )
    peak = quantities[-1]
    if peak.ruling is Ruling.DID_NOT_HOLD and peak.predicted is not None:
        numbers += (
            f"; peak {format_bytes(peak.predicted.value)} predicted, "
            f"{format_bytes(peak.measured)} measured"
        )
    if ruling is Ruling.CANNOT_BE_TOLD and other_cause:
        return f"Cannot tell: {numbers}. {other_cause}"
    beginning = {
        Ruling.HELD: "Held",
        Ruling.DID_NOT_HOLD: "Did not hold",
        Ruling.CANNOT_BE_TOLD: "Not significant",
    }[ruling]
    noise = "" if step.is_tested else _say_noise(ruling, step)
    return f"{beginning}: {numbers}.{noise}{_say_outside(prediction, ruling, step)}"


def _say_outside(prediction: Prediction, ruling: Ruling, step: JudgedTime) -> str:
    """A sentence about a step outside the predicted interval by less than the noise."""
    predicted = prediction.step_time_ns
    if ruling is not Ruling.HELD or not 0 < predicted.distance(step.measured_ns) < step.noise_ns:
        return ""
    interval = f"{format_ns(predicted.low)} to {format_ns(predicted.high)}"
    return f" The step is outside the predicted {interval}, by less than the noise."


def _say_noise(ruling: Ruling, step: JudgedTime) -> str:
    """The resolution of fewer runs than a test needs."""
    noise = format_ns(step.noise_ns)
    if ruling is Ruling.CANNOT_BE_TOLD:
        return (
            f" With fewer than {RUNS_FOR_A_TEST} runs on each side, only changes above {noise} "
            "are significant."
        )
    return f" With fewer than {RUNS_FOR_A_TEST} runs on each side, the noise is {noise}."
