"""Check a run against its baseline and budget: judge each gated metric, then all together.

Memory of forecasts and of emulated ranks is deterministic. It is compared to the byte, unless a
limit is set. Memory of recorded runs may grow by 1% and the largest rounding of the allocator. A
baseline of several runs replaces the 1% by what it learned from them. Times are judged as in
`comparison.noise`. A difference that is not significant does not pass the gate.

[Note: learned tolerance] A baseline of at least `baseline.RUNS_TO_LEARN` runs keeps the range of
each metric over them. The next run may be `TIMES_THE_RANGE` times that range above the highest one:
of n runs, the next one exceeds the highest with a probability of 1 / (n + 1), and mostly by less
than the range. At least `LEAST_LEARNED` of the baseline is allowed, because equal repeats do not
prove that no repeat will ever differ.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdp_inspect.analysis.trust import find_run_delay_difference
from fsdp_inspect.comparison.causes import find_causes, parts_of
from fsdp_inspect.comparison.gate.baseline import Baseline, torch_release
from fsdp_inspect.comparison.gate.limits import MEMORY_METRICS, PHASES, TIME_METRICS, GateLimit
from fsdp_inspect.comparison.gate.measurements import GateMeasurements
from fsdp_inspect.comparison.increases import (
    AllocatingLine,
    Increase,
    find_increases,
    find_increases_by_unit,
    find_lines,
    find_longer,
    moved_by,
)
from fsdp_inspect.comparison.noise import (
    PROCESS_NOISE_RATIO,
    RUNS_FOR_A_TEST,
    WORTH_NAMING_RATIO,
    Judgement,
    NoiseVerdict,
    judge_times,
)
from fsdp_inspect.comparison.settings import SettingDifference, compare_settings
from fsdp_inspect.formatting import plural
from fsdp_inspect.results import Result
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import MemoryCategory
from fsdp_inspect.trace.live_memory import RESTING
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN
from fsdp_inspect.trace.run import RunManifest

_TEMPORARY = MemoryCategory.TEMPORARY.label
SIGNIFICANCE = 0.01
"""The p-value below which a time is a regression.

It is stricter than in a comparison, because the gate stops a merge. With five runs on each side,
the two sides must not overlap.
"""
EXACT = GateLimit("to the byte", beyond=0)
DEFAULT_RATIO = 0.01
"""Allowed growth of the memory of a recorded run, in addition to the rounding."""
ROUNDING_BYTES = 512
RESERVED_ROUNDING_BYTES = 20 << 20
"""The CUDA allocator rounds a block up to 512 bytes, and reserves segments of up to 20 MiB for
blocks below 10 MiB (`c10/cuda/CUDACachingAllocator.cpp`, torch 2.13)."""
_OTHER_RATIO = 0.2
"""A failed metric is explained separately if more than this fraction of its increase is not in the
first one's increase."""
TIMES_THE_RANGE = 2
LEAST_LEARNED = 0.001
ALWAYS = tuple(name for name in MEMORY_METRICS if name != "step_adds_bytes")
"""Memory metrics that are gated if the baseline has them. `step_adds_bytes` is not included,
because it also rises when resting memory falls."""
DECLARED = tuple(name for name in DECIDED_BY_PLAN if name != "mesh")
"""Settings of a run's configuration that declare its plan. The mesh is compared as observed."""


class CheckOutcome(StrEnum):
    """The outcome of a metric, or of the whole check."""

    PASSES = "passes"
    REGRESSION = "regression"
    UNTOLD = "cannot be judged"


EXIT_CODES = {CheckOutcome.PASSES: 0, CheckOutcome.REGRESSION: 1, CheckOutcome.UNTOLD: 2}


@dataclass(frozen=True, slots=True)
class MetricCheck:
    """One gated metric."""

    name: str
    outcome: CheckOutcome
    before: int | None
    """The baseline's value, bytes or ns (median of its runs); None without a baseline."""
    after: int | None
    """The run's value; the median of several runs."""
    allowed: int | None
    """The highest allowed value; None if only the noise decides."""
    limit: str
    """The written limit, or the default."""
    reason: str
    """The reason in one sentence; empty if the metric simply passes."""

    @property
    def change(self) -> int | None:
        """After minus before."""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class PhaseGrowth:
    """The increases at the peak of another phase, or after the step."""

    metric: str
    phase: str
    increase: int
    """Bytes by which the metric rose."""
    growth: tuple[Increase, ...]
    """The increases, largest first."""
    causes: tuple[str, ...]
    """Likely causes; empty: unknown."""
    lines: tuple[AllocatingLine, ...]
    """The lines that allocate the memory of `growth`; empty: not recorded."""


@dataclass(frozen=True, slots=True)
class CheckResult(Result):
    """The verdict on a run."""

    outcome: CheckOutcome
    exit_code: int
    """0 passes, 1 regression, 2 cannot be judged."""
    name: str
    run_ids: tuple[str, ...]
    source: str
    """`recorded`, `emulated`, `imported` or `predicted`."""
    method: str
    """The method that counted the memory."""
    metrics: tuple[MetricCheck, ...]
    growth: tuple[Increase, ...]
    """Increases at the peak by category and units, largest first, also within the limits."""
    longer: tuple[Increase, ...]
    """Increases of time, ns: parts of the step, then waits by collective, phase and units, each
    longest first."""
    phase: str | None
    """The phase whose peak increased (`resting`: after the step). If the run passes, the phase of
    its peak. None: the composition was not recorded."""
    unit: str | None
    """Position of that peak: the innermost unit on the host's stack."""
    causes: tuple[str, ...]
    """Likely causes of the increase, best evidence first."""
    lines: tuple[AllocatingLine, ...]
    """The lines that allocate the memory of `growth`, in its order; empty: not recorded."""
    others: tuple[PhaseGrowth, ...]
    """Other failed metrics, whose increases come from other memory."""
    settings: tuple[SettingDifference, ...]
    """Settings in which the run differs from the baseline."""
    reasons: tuple[str, ...]
    """The reasons why the run cannot be judged, each with a remedy; empty if it can."""
    improved: tuple[str, ...]
    """Metrics that decreased significantly."""


def check_run(
    reading: GateMeasurements,
    baseline: Baseline | None,
    budget: Mapping[str, GateLimit] | None = None,
) -> CheckResult:
    """Check a run against its baseline, a budget, or both.

    Args:
        reading: The measurements of the run, or of its repeats.
        baseline: The baseline.
        budget: Limits by metric. They override the baseline's own limits.

    Raises:
        CheckError: A limit of the baseline is invalid.
    """
    limits = {**(baseline.parsed_limits() if baseline else {}), **(budget or {})}
    before = baseline.manifest if baseline else None
    settings = compare_settings([before, _comparable(reading.manifest, before)]) if before else ()
    reasons = [*reading.problems, *_other_measurement(baseline, reading)]
    metrics = () if reasons else tuple(_judge_all(reading, baseline, limits))
    reasons += [one.reason for one in metrics if one.outcome is CheckOutcome.UNTOLD]
    if not metrics and not reasons:
        reasons.append(
            "Nothing is gated: neither the baseline nor the budget has a metric of the run. "
            "Expected at least one. Write a baseline with --update from a run that recorded memory."
        )
    outcome = _altogether(metrics, reasons)
    failed = [one.name for one in metrics if one.outcome is CheckOutcome.REGRESSION]
    of_memory = [name for name in failed if name not in TIME_METRICS]
    of_time = [name for name in failed if name in TIME_METRICS]
    phase = _phase_to_explain(reading, failed or [one.name for one in find_risen(metrics)])
    grown = _grown(reading, baseline, phase)
    longer = _longer(reading, baseline, of_time)
    causes: tuple[str, ...] = ()
    others: tuple[PhaseGrowth, ...] = ()
    has_risen = any(one.name in failed and (one.change or 0) > 0 for one in metrics)
    if baseline and has_risen:
        causes = _causes_of(
            *(reading, baseline, phase),
            of_memory=bool(of_memory),
            longer=parts_of(longer) if of_time else None,
        )
        others = tuple(_explain_others(reading, baseline, phase, of_memory))
        if not causes:  # the increase can follow from another plan, and nothing shows it
            of_plan = list(_other_plan(baseline, reading))
            reasons += of_plan
            outcome = CheckOutcome.UNTOLD if of_plan else outcome
    return CheckResult(
        outcome=outcome,
        exit_code=EXIT_CODES[outcome],
        name=reading.manifest.name or reading.run_ids[0],
        run_ids=reading.run_ids,
        source=reading.manifest.source,
        method=reading.method,
        metrics=metrics,
        growth=grown,
        longer=longer,
        phase=phase,
        unit=reading.moments[phase].unit if phase in reading.moments else None,
        causes=causes,
        lines=_lines_of(reading, baseline, phase, grown),
        others=others,
        settings=settings,
        reasons=tuple(reasons),
        improved=tuple(one.name for one in metrics if _is_improved(one)),
    )


def find_risen(metrics: Sequence[MetricCheck]) -> list[MetricCheck]:
    """The metrics of memory that rose, the largest increase first."""
    rose = [one for one in metrics if one.name not in TIME_METRICS and (one.change or 0) > 0]
    return sorted(rose, key=lambda one: -(one.change or 0))


def _phase_to_explain(reading: GateMeasurements, failed: Sequence[str]) -> str | None:
    """The phase of the first failed metric. Several failures usually have one cause."""
    for name in failed:
        if name == "resting_bytes":
            return RESTING
        phase = name.removeprefix("peak_").removesuffix("_bytes")
        if phase in reading.moments:
            return phase
        if name in ("peak_allocated_bytes", "peak_reserved_bytes") and reading.phase:
            return reading.phase
    return reading.phase


def _grown(
    reading: GateMeasurements, baseline: Baseline | None, phase: str | None
) -> tuple[Increase, ...]:
    """Increases at the same moment of the step."""
    if baseline is None or phase not in baseline.moments or phase not in reading.moments:
        return ()
    return find_increases(baseline.moments[phase].moment.held, reading.moments[phase].held)


def _lines_of(
    reading: GateMeasurements,
    baseline: Baseline | None,
    phase: str | None,
    grown: Iterable[Increase],
) -> tuple[AllocatingLine, ...]:
    """The lines that allocate the increased memory at the peak of a phase."""
    if baseline is None or phase is None:
        return ()
    before = baseline.moments.get(phase)
    moment = None if before is None else before.moment
    return tuple(find_lines(grown, moment, reading.moments.get(phase)))


def _causes_of(
    reading: GateMeasurements,
    baseline: Baseline,
    phase: str | None,
    *,
    of_memory: bool,
    longer: frozenset[str] | None = None,
) -> tuple[str, ...]:
    """The likely causes of the increase at the peak of a phase."""
    moved = None
    if phase in baseline.moments and phase in reading.moments:
        moved = moved_by(baseline.moments[phase].moment, reading.moments[phase])
    return find_causes(
        baseline.manifest,
        reading.manifest,
        _grown_by_unit(reading, baseline, phase),
        of_memory=of_memory,
        longer=longer,
        phase=phase,
        moved_by=moved,
    )


def _explain_others(
    reading: GateMeasurements, baseline: Baseline, phase: str | None, failed: Sequence[str]
) -> Iterator[PhaseGrowth]:
    """Explain failed metrics with another increase than the first one.

    Args:
        reading: The measurements of the run.
        baseline: The baseline.
        phase: The phase that is already explained.
        failed: The failed metrics of memory, in order.
    """
    first = _grown_by_unit(reading, baseline, phase)
    known = {(one.category, one.units): one.increase for one in first}
    causes = _causes_of(reading, baseline, phase, of_memory=True)
    seen = {phase}
    for metric in sorted(failed[1:], key=lambda name: name != "resting_bytes"):
        other = _phase_to_explain(reading, [metric])
        if other is None or other in seen:
            continue
        seen.add(other)
        increase = _increase_of(reading, baseline, metric)
        growth = _grown_by_unit(reading, baseline, other)
        total = sum(one.increase for one in growth)
        # A step frees what is temporary at its peak, so this is not the memory that is left.
        new = sum(
            one.increase
            if other == RESTING and one.category == _TEMPORARY
            else max(0, one.increase - known.get((one.category, one.units), 0))
            for one in growth
        )
        is_new = new > _OTHER_RATIO * total
        is_larger = increase > _increase_of(reading, baseline, failed[0])
        # The cause of a peak does not explain memory that is left after the step.
        is_left = other == RESTING and (is_new or bool(causes))
        if not growth or not (is_left or (is_new and is_larger)):
            continue
        found = _causes_of(reading, baseline, other, of_memory=True)
        if not found or found != causes:
            grown = _grown(reading, baseline, other)
            lines = _lines_of(reading, baseline, other, grown)
            yield PhaseGrowth(metric, other, increase, grown, found, lines)
            known |= {(one.category, one.units): one.increase for one in growth}


def _increase_of(reading: GateMeasurements, baseline: Baseline, metric: str) -> int:
    return (reading.value(metric) or 0) - (_memory_before(baseline, metric) or 0)


def _grown_by_unit(
    reading: GateMeasurements, baseline: Baseline, phase: str | None
) -> tuple[Increase, ...]:
    if phase not in baseline.moments or phase not in reading.moments:
        return ()
    before = baseline.moments[phase].moment.held
    return find_increases_by_unit(before, reading.moments[phase].held)


def _longer(
    reading: GateMeasurements, baseline: Baseline | None, failed: Sequence[str]
) -> tuple[Increase, ...]:
    """Parts of the step that take longer; only waits if only exposed communication increased."""
    if baseline is None or not failed:
        return ()
    is_of_step = "step_time_ns" in failed
    return find_longer(
        baseline.parts if is_of_step else {},
        reading.parts if is_of_step else {},
        baseline.waited,
        reading.waits,
    )


def _altogether(metrics: Sequence[MetricCheck], reasons: Sequence[str]) -> CheckOutcome:
    """A regression overrides metrics that cannot be judged."""
    if any(one.outcome is CheckOutcome.REGRESSION for one in metrics):
        return CheckOutcome.REGRESSION
    return CheckOutcome.UNTOLD if reasons else CheckOutcome.PASSES


def _is_improved(one: MetricCheck) -> bool:
    if one.outcome is not CheckOutcome.PASSES or one.change is None or one.change >= 0:
        return False
    return one.name not in TIME_METRICS or one.reason != ""  # such a change exceeds the noise


# --- required equality of settings


def _other_measurement(baseline: Baseline | None, reading: GateMeasurements) -> Iterator[str]:
    """The reasons why the numbers of the baseline and the run are no comparison."""
    if baseline is None:
        return
    before = baseline.manifest
    after = _comparable(reading.manifest, before)
    pairs = {name: (value_of(before), value_of(after)) for name, value_of in _MEASURED_BY.items()}
    if baseline.method and reading.method:
        pairs["memory counter"] = (baseline.method, reading.method)
    yield from _differing(pairs)


def _other_plan(baseline: Baseline, reading: GateMeasurements) -> Iterator[str]:
    """The differences of the plan, whose effect the check explains if it can (`causes`)."""
    before, after = baseline.manifest, reading.manifest
    meshes = (" x ".join(map(str, each.mesh.values())) for each in (before, after))
    yield from _differing(
        {"world size": (str(before.world_size), str(after.world_size)), "mesh": (*meshes,)}
    )
    was, now = before.config, after.config
    for name in DECLARED:
        if name in was and name in now and was[name] != now[name]:
            yield (
                f"The declared plan changed: {name} is {was[name]!r} in the baseline and "
                f"{now[name]!r} in the run. {_OTHER_BASELINE}"
            )


def _differing(pairs: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """One sentence with a remedy for each setting whose two values differ."""
    for name, (was, now) in pairs.items():
        if was != now:
            yield f"The baseline has {name} {was}, and the run has {now}. {_OTHER_BASELINE}"


_OTHER_BASELINE = "Write a new baseline with --update, or check a run with the baseline's settings."
_MEASURED_BY: Mapping[str, Callable[[RunManifest], str]] = {
    "torch": torch_release,
    "device": lambda manifest: f"{manifest.device_type} {manifest.device_name}".strip(),
    "source": lambda manifest: manifest.source,
    "emulated network": lambda manifest: json.dumps(manifest.emulation, sort_keys=True),
}


def _comparable(manifest: RunManifest, before: RunManifest) -> RunManifest:
    """The manifest without settings that the baseline does not contain."""
    kept: dict[str, Any] = {
        "versions": {"torch": torch_release(manifest)},
        "device_name": manifest.device_name if before.device_name else "",
        "emulation": manifest.emulation if before.emulation else {},
        "environment": {},
        "git_commit": None,
    }
    return manifest.model_copy(update=kept)


# --- one metric


def _judge_all(
    reading: GateMeasurements, baseline: Baseline | None, limits: Mapping[str, GateLimit]
) -> Iterator[MetricCheck]:
    gated = [name for name in ALWAYS if baseline and name in baseline.memory]
    gated += [name for name in TIME_METRICS if baseline and name in baseline.times]
    for name in dict.fromkeys([*gated, *limits]):
        if _has_no_peak(name, reading):
            continue
        if baseline is None and limits[name].absolute is None:
            yield _without_baseline(name, reading, limits[name].text)
        elif name in TIME_METRICS:
            yield _judge_time(name, reading, baseline, limits.get(name))
        else:
            yield _judge_memory(name, reading, baseline, limits.get(name))


def _without_baseline(name: str, reading: GateMeasurements, limit: str) -> MetricCheck:
    """A metric with a relative limit, without anything that it is relative to."""
    after = median(reading.times.get(name, ())) if name in TIME_METRICS else reading.value(name)
    reason = (
        f"{name} cannot be judged: its limit {limit} is relative, and there is no baseline. Pass "
        "--baseline FILE, or set an absolute limit."
    )
    return MetricCheck(name, CheckOutcome.UNTOLD, None, after, None, limit, reason)


def _has_no_peak(name: str, reading: GateMeasurements) -> bool:
    """Whether the metric is the peak of a phase in which nothing was allocated or freed.

    Its peak equals that of its neighbours. A thread of gloo may free a buffer during the phase or
    later, by chance.
    """
    is_of_phase = name in {f"peak_{phase}_bytes" for phase in PHASES}
    return is_of_phase and bool(reading.moments) and name not in reading.memory


def _judge_memory(
    name: str, reading: GateMeasurements, baseline: Baseline | None, limit: GateLimit | None
) -> MetricCheck:
    before, after = _memory_before(baseline, name), reading.value(name)
    limit = limit or _default_limit(name, reading, baseline)
    allowed = limit.allowed(before)
    if after is None or allowed is None:
        what = (
            "the run did not record it in a step after warm-up"
            if after is None
            else "the baseline does not contain it"
        )
        reason = (
            f"{name} cannot be judged: {what}. Record memory (memory_steps on CPU), or remove it "
            "from the limits."
        )
        return MetricCheck(name, CheckOutcome.UNTOLD, before, after, allowed, limit.text, reason)
    outcome = CheckOutcome.REGRESSION if after > allowed else CheckOutcome.PASSES
    return MetricCheck(name, outcome, before, after, allowed, limit.text, "")


def _memory_before(baseline: Baseline | None, name: str) -> int | None:
    if baseline is None:
        return None
    if name.startswith("category."):
        label = name.removeprefix("category.")
        peak = baseline.moments.get(baseline.phase or "")
        return None if peak is None else sum(held.get(label, 0) for held in peak.held.values())
    return baseline.memory.get(name)


def _default_limit(name: str, reading: GateMeasurements, baseline: Baseline | None) -> GateLimit:
    """The limit of a metric without a written one. See [Note: learned tolerance]."""
    if reading.manifest.source in ("predicted", "emulated"):
        return EXACT
    is_reserved = name == "peak_reserved_bytes"
    rounding = RESERVED_ROUNDING_BYTES if is_reserved else ROUNDING_BYTES
    learned = baseline.learned_range(name) if baseline else None
    before = _memory_before(baseline, name)
    if learned is None or not before or baseline is None:
        return GateLimit(f"+{DEFAULT_RATIO:.0%}", beyond=rounding, beyond_ratio=DEFAULT_RATIO)
    ratio = max(TIMES_THE_RANGE * learned / before, LEAST_LEARNED)
    return GateLimit(
        f"+{100 * ratio:.2g}% ({plural(baseline.num_memory_runs, 'run')})",
        beyond=rounding,
        beyond_ratio=ratio,
    )


def _judge_time(
    name: str, reading: GateMeasurements, baseline: Baseline | None, limit: GateLimit | None
) -> MetricCheck:
    first = tuple(baseline.times.get(name, ())) if baseline else ()
    second = reading.times.get(name, ())
    before, after = median(first), median(second)
    text = limit.text if limit else "within noise"
    allowed = limit.allowed(before) if limit else None
    if after is None or ((limit is None or limit.absolute is None) and before is None):
        of_baseline = baseline.times if baseline else {}
        what, times = ("run", reading.times) if after is None else ("baseline", of_baseline)
        lacks = "timed steps. Record timed steps."
        if times.get("step_time_ns"):
            lacks = "communication. Record the training with fsdp_inspect.Recorder."
        reason = f"{name} cannot be judged: the {what} shows no {lacks}"
        return MetricCheck(name, CheckOutcome.UNTOLD, before, after, allowed, text, reason)
    if limit is not None and limit.absolute is not None:
        outcome, reason = _judge_absolute(name, second, after, limit.absolute)
        hindered = _hindrance(name, outcome, (), reading.run_delays)
    else:
        whole = median(tuple(baseline.times.get("step_time_ns", ()))) if baseline else None
        least = WORTH_NAMING_RATIO * (whole or before or 0)
        judgement = judge_times(first, second, whole=whole, significance=SIGNIFICANCE)
        room = max(_room(allowed, before, after), least / before if before else 0.0)
        outcome, reason = _judge_change(name, judgement, room)
        delays = baseline.run_delays if baseline else ()
        hindered = _hindrance(name, outcome, delays, reading.run_delays)
    if reading.longer_plain_steps and outcome is CheckOutcome.PASSES:
        hindered = (
            f"{name} cannot be judged. {reading.longer_plain_steps} Record all steps in detail: "
            "Recorder(overhead=None)."
        )
    if hindered:
        outcome, reason = CheckOutcome.UNTOLD, hindered
    return MetricCheck(name, outcome, before, after, allowed, text, reason)


def _hindrance(
    name: str, outcome: CheckOutcome, before: Sequence[float], after: Sequence[float]
) -> str | None:
    """The reason why other work on the machine may explain an outcome; None: it does not.

    Args:
        name: The metric.
        outcome: The outcome from the times alone.
        before: Run delays of the baseline's runs; empty: unknown, or the limit is absolute.
        after: Run delays of the runs.
    """
    difference = find_run_delay_difference(before, after)
    if difference is None or outcome is CheckOutcome.UNTOLD:
        return None
    was, now = difference
    is_slower = outcome is CheckOutcome.REGRESSION
    if (now > was) is not is_slower:
        return None
    delay = f"a training thread was ready but had no core for {now:.0%} of the time"
    in_baseline = f" ({was:.0%} in the baseline's runs)" if before else ""
    remedy = (
        "Stop other work on the machine, or give each rank its own cores, and record again."
        if is_slower
        else "Write the baseline's times again with --update, on a machine as free as this one."
    )
    return f"{name} cannot be judged: {delay}{in_baseline}. {remedy}"


def _room(allowed: int | None, before: int | None, after: int) -> float:
    """The increase that a limit allows, as a fraction of the value before."""
    if allowed is None:
        return 0.0
    if not before:
        return math.inf if after <= allowed else 0.0
    return allowed / before - 1


def _judge_absolute(
    name: str, times: Sequence[int], after: int, allowed: int
) -> tuple[CheckOutcome, str]:
    """Judge times against an absolute limit.

    With few runs, a value near its limit may be above or below it by chance.
    """
    is_few = len(times) < RUNS_FOR_A_TEST
    if is_few and abs(after - allowed) < PROCESS_NOISE_RATIO * allowed:
        return CheckOutcome.UNTOLD, (
            f"{name} is within {PROCESS_NOISE_RATIO:.0%} of its limit. With {len(times)} of "
            f"{RUNS_FOR_A_TEST} runs this is not significant. {_more(len(times))}"
        )
    return (CheckOutcome.REGRESSION if after > allowed else CheckOutcome.PASSES), ""


def _judge_change(name: str, judgement: Judgement, room: float) -> tuple[CheckOutcome, str]:
    """Judge a change. Only an increase counts; a possible decrease needs no further runs.

    Args:
        name: The metric.
        judgement: The judgement of its change.
        room: The allowed increase, as a fraction.
    """
    change = math.inf if judgement.change is None else judgement.change
    amount = "from nothing" if judgement.change is None else f"by {change:+.1%}"
    if judgement.verdict is NoiseVerdict.DIFFERENT:
        is_over = change > room
        return (CheckOutcome.REGRESSION if is_over else CheckOutcome.PASSES), f"changed {amount}"
    is_bounded = judgement.high is not None and judgement.high < room
    if judgement.verdict is NoiseVerdict.SAME or is_bounded:
        return CheckOutcome.PASSES, ""
    lacking = max(judgement.more_runs)
    sentence = f"{name} changed {amount}, which is not significant"
    return CheckOutcome.UNTOLD, f"{sentence}. {_more(RUNS_FOR_A_TEST - lacking)}"


def _more(num_runs: int) -> str:
    if num_runs < RUNS_FOR_A_TEST:
        return (
            f"Pass at least {RUNS_FOR_A_TEST} runs: check RUN RUN ..., or --record 'COMMAND' "
            f"--repeat {RUNS_FOR_A_TEST}."
        )
    return "Record more runs, or use a quieter machine."
