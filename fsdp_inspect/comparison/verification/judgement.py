"""Judge a prediction: compare predicted numbers with measured ones, given the process noise.

Steps of one process are not independent (`comparison.noise`), so each run gives one number. Times
are judged as changes against the baseline's runs, because an effect of the machine on both sides
cancels.

[Note: compute stays] A plan changes waits, not compute. A busy machine changes compute: it slows
its processes, but not an emulated link or another rank. On a busy machine, the same plan therefore
changes the step differently. A difference in compute between the sides counts as noise of the
machine, except for the predicted cost of hiding communication (`advice.plan_simulator`). So do
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

Memory is counted, not timed. It held if the peak is in its interval, or within
`LEAST_MEMORY_MARGIN` of the prediction: earlier files state intervals without width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.analysis.trust import LEAST_MEMORY_MARGIN
from fsdp_inspect.comparison.noise import (
    PROCESS_NOISE_RATIO,
    RUNS_FOR_A_TEST,
    SIGNIFICANCE,
    WORTH_NAMING_RATIO,
    estimate_shift,
    rank_test,
)
from fsdp_inspect.comparison.settings import (
    NAMES_AND_PLACES,
    PlanDifference,
    decides_shape,
    find_plan_differences,
)
from fsdp_inspect.errors import MissingDataError, StoreError
from fsdp_inspect.simulation.parameters import describe_parameters, effective_dtypes
from fsdp_inspect.simulation.predictions.records import Circumstances, Estimate, Prediction, Ruling
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN, Plan
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus


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
    is_near = abs(measured - estimate.value) <= LEAST_MEMORY_MARGIN * estimate.value
    is_inside = is_near or estimate.distance(measured) == 0
    return Ruling.HELD if is_inside else Ruling.DID_NOT_HOLD


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


# --- Decide whether a run is comparable with a prediction.
#
# A difference in the compute or the messages of a step makes a run incomparable. A difference that
# may only shift times a little is a caveat.


_DTYPES = ("param_dtype", "reduce_dtype")


def differences_of(
    plan: Mapping[str, Any], run: RunSource, *, recorded: Mapping[str, Any]
) -> tuple[PlanDifference, ...]:
    """Differences between a plan of a prediction and the plan that ran; empty if none was observed.

    Args:
        plan: The predicted plan, or that of the baseline.
        run: The run.
        recorded: The plan of the baseline, whose dtypes a prediction keeps where its plan has none.
    """
    manifest = run.manifest
    if not manifest.plan:
        return ()
    try:
        ran = observed_plan(run)
    except (MissingDataError, StoreError):  # no readable step: only the model's part is known
        ran = Plan.from_dict(manifest.plan)
    asked, ran = _spell_out_dtypes(Plan.from_dict(plan), ran, Plan.from_dict(recorded), manifest)
    return find_plan_differences(asked, ran, with_parameters={unit.fqn for unit in manifest.units})


def _spell_out_dtypes(
    asked: Plan, ran: Plan, recorded: Plan, manifest: RunManifest
) -> tuple[Plan, Plan]:
    """Both plans with the dtypes that torch uses, where one of them leaves them to torch.

    A dtype that equals torch's default is no difference to a plan without one.
    """
    sizes = {group.index: len(group.ranks) for group in manifest.process_groups}
    units, others, sources = (
        {unit.name: unit for unit in plan.units} for plan in (asked, ran, recorded)
    )
    for unit in manifest.units:
        first, second, source = (each.get(unit.fqn) for each in (units, others, sources))
        if first is None or second is None:
            continue
        meant: tuple[str | None, str | None] = (None, None)
        if first.param_dtype or source is None or not source.param_dtype:
            parameters = describe_parameters(unit, sizes.get(unit.shard_group, 1)).values()
            meant = effective_dtypes(parameters, first, manifest.torch_release)
        used = unit.param_dtype, unit.reduce_dtype
        for name, of_asked, of_ran in zip(_DTYPES, meant, used, strict=True):
            if getattr(first, name) != getattr(second, name):
                first = first.model_copy(update={name: getattr(first, name) or of_asked})
                second = second.model_copy(update={name: getattr(second, name) or of_ran})
        units[unit.fqn], others[unit.fqn] = first, second
    return (
        asked.model_copy(update={"units": tuple(units.values())}),
        ran.model_copy(update={"units": tuple(others.values())}),
    )


def _ran_otherwise(manifest: RunManifest, first: RunManifest) -> bool:
    """Whether two runs ran different plans."""
    if manifest.plan == first.plan or not (manifest.plan and first.plan):
        return manifest.plan != first.plan
    plan = Plan.from_dict(first.plan)
    one, other = _spell_out_dtypes(plan, Plan.from_dict(manifest.plan), plan, manifest)
    return one != other


def find_obstacles(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource]
) -> Iterator[str]:
    """The reasons why the prediction cannot be judged, one sentence each.

    Args:
        prediction: The prediction.
        runs: Runs of the predicted plan.
        baselines: Runs of the plan that the prediction was made from.
    """
    for run in runs:
        manifest = run.manifest
        if manifest.has_id(prediction.run_id):
            yield (
                f"Run {manifest.run_id} is the baseline of the prediction. "
                "Expected a run of the predicted plan."
            )
        elif not manifest.plan:
            yield f"Run {manifest.run_id} has no observed plan, so its plan is unknown."
        yield from _other_circumstances(_expected(prediction), manifest)
        if _ran_otherwise(manifest, runs[0].manifest):
            yield f"Runs {runs[0].manifest.run_id} and {manifest.run_id} ran different plans."
    if differences_of(prediction.plan, runs[0], recorded=prediction.baseline_plan):
        yield "The plan of the run differs from the predicted plan."
    for run in baselines:
        for sentence in _other_circumstances(prediction.circumstances, run.manifest):
            yield f"Baseline: {sentence}"
        plan = prediction.baseline_plan
        if differences_of(plan, run, recorded=plan):
            yield f"Baseline: {run.manifest.run_id} ran a plan other than the predicted baseline."


def _expected(prediction: Prediction) -> Circumstances:
    """The baseline's circumstances, with the ranks and the network of the prediction."""
    there = prediction.circumstances
    world_size = prediction.plan.get("world_size") or there.world_size
    emulation = dict(there.emulation)
    if emulation:
        emulation["world_size"] = world_size
        changed = _given(prediction.bus_bytes_per_s, prediction.latency_ns)
        inside = _given(prediction.node_bus_bytes_per_s, prediction.node_latency_ns)
        for link, values in (("intra", {**changed, **inside}), ("inter", changed)):
            if emulation.get(link) is not None:
                emulation[link] = {**emulation[link], **values}
        if changed or inside:
            emulation["preset"] = None
    return there.model_copy(update={"world_size": world_size, "emulation": emulation})


def _given(bytes_per_s: float | None, latency_ns: float | None) -> dict[str, float]:
    """The requested values of a link, with the names that an emulation uses."""
    asked = {"bandwidth_bytes_per_s": bytes_per_s, "latency_ns": latency_ns}
    return {name: value for name, value in asked.items() if value is not None}


_NAMES = {
    "model": "model",
    "num_parameters": "number of parameters",
    "world_size": "world size",
    "backend": "backend",
    "device": "device",
    "source": "source",
    "torch": "torch version",
}


def _other_circumstances(expected: Circumstances, manifest: RunManifest) -> Iterator[str]:
    ran = Circumstances.of(manifest)
    for field, name in _NAMES.items():
        wanted, got = getattr(expected, field), getattr(ran, field)
        if wanted != got:
            yield f"The {name} is {got!r} in {manifest.run_id}. Expected {wanted!r}."
    for name in dict.fromkeys([*expected.emulation, *ran.emulation]):
        if expected.emulation.get(name) != ran.emulation.get(name) and not _is_implied(name, ran):
            yield (
                f"The emulated {name.replace('_', ' ')} is {ran.emulation.get(name)!r} in "
                f"{manifest.run_id}. Expected {expected.emulation.get(name)!r}."
            )
    for name in _other_settings(expected.config, ran.config):
        if decides_shape(name):
            yield (
                f"{name} is {ran.config.get(name)!r} in {manifest.run_id}. Expected "
                f"{expected.config.get(name)!r}."
            )


def _is_implied(name: str, ran: Circumstances) -> bool:
    """Whether a value follows from the world size and is not set explicitly."""
    return name == "gpus_per_node" and ran.emulation.get("inter") is None


def _other_settings(expected: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    shared = [name for name in expected if name in ran and name not in DECIDED_BY_PLAN]
    return [name for name in shared if expected[name] != ran[name]]


_HARMLESS = NAMES_AND_PLACES | {"steps", "emulate", "fixed_compute"}
"""Settings of the trainer that do not change a step, or whose effect is compared elsewhere."""


def find_prediction_caveats(
    prediction: Prediction, runs: Sequence[RunSource], baselines: Sequence[RunSource]
) -> Iterator[str]:
    """Caveats of the comparison, one sentence each."""
    for run in (*runs, *baselines):
        if run.status not in (RunStatus.COMPLETE, RunStatus.IMPORTED):
            yield f"Run {run.manifest.run_id} is {run.status.value}: steps may be missing."
    before, after = prediction.circumstances.config, runs[0].manifest.config
    for name in _other_settings(before, after):
        if name not in _HARMLESS and not decides_shape(name):
            yield f"{name} is {after[name]!r}; the baseline has {before[name]!r}."
    if not baselines:
        yield (
            "No run of the baseline is given, so the comparison uses the prediction's numbers of "
            "one process. Pass one or, better, several runs: --baseline RUN."
        )
