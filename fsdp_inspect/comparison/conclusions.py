"""How does one side stand to the reference, in words, and what is the reason?

Only what the data proves: whether step times differ beyond noise; which part of the step the
change lies in (parts add up, so the change is theirs); which unit's collectives or compute moved
most in that part; which counts and bytes changed, which no noise can do; and, beside that, the
settings that differ. One setting that differs alone is called the likely reason; of several none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_inspect.comparison.differences import (
    CategoryComparison,
    MetricComparison,
    Movement,
    PartComparison,
    UnitComparison,
    find_movements,
)
from fsdp_inspect.comparison.noise import PROCESS_NOISE_RATIO, RUNS_FOR_A_TEST, Judgement, Telling
from fsdp_inspect.comparison.settings import SettingDifference
from fsdp_inspect.formatting import format_bytes, format_ns, format_signed, format_unit
from fsdp_inspect.metrics import find_metric

_SHARE_OF_A_REASON = 0.25
"""A part explains a change from this share of it on."""
_MOST_SETTINGS = 4
_MOST_PARTS = 4
_IN_UNITS = {
    "exposed_all_gather": "all_gather",
    "exposed_reduce_scatter": "reduce_scatter",
    "exposed_all_reduce": "all_reduce",
    "forward": "forward",
    "backward": "backward",
}
"""Parts of the step that units account for, and the movement that belongs to each."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One side against the reference, in words."""

    label: str
    telling: Telling
    """Of the step time."""
    sentence: str
    """Slower, faster, or not to be told, with the numbers."""
    reasons: tuple[str, ...]
    """What the change is made of, and the settings beside it; best evidence first."""


@dataclass(frozen=True, slots=True)
class ConclusionEvidence:
    """Everything that a conclusion may rest on."""

    labels: tuple[str, ...]
    num_runs: tuple[int, ...]
    settings: tuple[SettingDifference, ...]
    metrics: tuple[MetricComparison, ...]
    parts: tuple[PartComparison, ...]
    causes: tuple[PartComparison, ...]
    units: tuple[UnitComparison, ...]
    memory: tuple[CategoryComparison, ...]


def conclude(evidence: ConclusionEvidence) -> tuple[Conclusion, ...]:
    """What can be said of each side but the first, against the first."""
    return tuple(_conclude(evidence, other) for other in range(1, len(evidence.labels)))


def summarise(conclusions: Sequence[Conclusion], step_time: MetricComparison) -> str:
    """All sides against the reference in one sentence: who is faster, slower, not to be told.

    Args:
        conclusions: One for each side but the first.
        step_time: The step times that they rest on.
    """
    if len(conclusions) == 1:
        return conclusions[0].sentence
    said: dict[str, list[str]] = {}
    for conclusion, judged in zip(conclusions, step_time.judgements, strict=True):
        change = "" if judged.change is None else f" ({format_signed(judged.change)})"
        said.setdefault(_standing(judged), []).append(f"{conclusion.label}{change}")
    listed = "; ".join(f"{words} {', '.join(said[words])}" for words in _STANDINGS if words in said)
    return f"Against A, with {format_ns(step_time.values[0])} a step: {listed}."


_STANDINGS = ("faster", "slower", "no difference in", "not to be told from noise", "not comparable")


def _standing(judged: Judgement) -> str:
    faster, slower, same, untold, missing = _STANDINGS
    match judged.telling:
        case Telling.DIFFERENT:
            return faster if (judged.change or 0) < 0 else slower
        case Telling.SAME | Telling.EQUAL:
            return same
        case Telling.UNKNOWN:
            return untold
        case Telling.MISSING:
            return missing


def _conclude(evidence: ConclusionEvidence, other: int) -> Conclusion:
    step = next(metric for metric in evidence.metrics if metric.name == "step_time_ns")
    judged = step.judgements[other - 1]
    reasons = [*_say_counts(evidence, other), *_say_memory(evidence, other)]
    if judged.telling is Telling.DIFFERENT:
        reasons = [*_say_parts(evidence, other), *reasons]
    is_certain = any(
        metric.is_exact and metric.judgements[other - 1].telling is Telling.DIFFERENT
        for metric in evidence.metrics
    )
    is_told = is_certain or judged.telling is Telling.DIFFERENT
    return Conclusion(
        label=evidence.labels[other],
        telling=judged.telling,
        sentence=_say_step_time(evidence, step, judged, other),
        reasons=(*reasons, *_say_settings(evidence.settings, other, is_told, is_certain)),
    )


def _say_step_time(
    evidence: ConclusionEvidence, step: MetricComparison, judged: Judgement, other: int
) -> str:
    first, label = evidence.labels[0], evidence.labels[other]
    before, after = step.values[0], step.values[other]
    if before is None or after is None or judged.change is None:
        without = " and ".join(
            evidence.labels[side] for side in (0, other) if step.values[side] is None
        )
        return f"{label} cannot be compared with {first} in time: no timed step in {without}."
    times = f"{format_ns(before)} -> {format_ns(after)} a step"
    if judged.telling is Telling.SAME:
        return (
            f"{label} takes as long as {first}: {format_signed(judged.change)} "
            f"({_interval(judged)}), {times}."
        )
    if judged.telling is Telling.UNKNOWN:
        return (
            f"{label} cannot be told from {first} in step time: {format_signed(judged.change)}, "
            f"{times}. {_say_why_unknown(evidence, judged, other)}"
        )
    direction = "slower" if judged.change > 0 else "faster"
    amount = f"{label} is {abs(judged.change):.1%} {direction} than {first}".replace("%", " %")
    if judged.p_value is None:
        limit = f"{PROCESS_NOISE_RATIO:.0%}".replace("%", " %")
        caution = (
            f" More than the {limit} by which identical processes differ on a quiet machine, but "
            f"not tested: {_say_missing_runs(evidence, judged, other)}"
        )
        return f"{amount}: {times}.{caution}"
    return f"{amount} ({_interval(judged)}, p = {judged.p_value:.2g}): {times}."


def _say_why_unknown(evidence: ConclusionEvidence, judged: Judgement, other: int) -> str:
    if judged.p_value is not None:
        return (
            f"Over {evidence.num_runs[0]} and {evidence.num_runs[other]} runs the change lies "
            f"between {_interval(judged)} (p = {judged.p_value:.2g}); more runs narrow that."
        )
    limit = f"{PROCESS_NOISE_RATIO:.0%}".replace("%", " %")
    return (
        f"Identical processes differ by up to {limit}, or as much as the repeats here do; "
        f"{_say_missing_runs(evidence, judged, other)}"
    )


def _say_missing_runs(evidence: ConclusionEvidence, judged: Judgement, other: int) -> str:
    lacking = [
        f"{more} more of {evidence.labels[side]}"
        for side, more in zip((0, other), judged.more_runs, strict=True)
        if more
    ]
    return f"a test needs {RUNS_FOR_A_TEST} runs of each, so {' and '.join(lacking)}."


def _interval(judged: Judgement) -> str:
    return f"{format_signed(judged.low or 0.0)} to {format_signed(judged.high or 0.0)}"


# --- what the change is made of


def _say_parts(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    """The parts of the step in which the change lies, and the unit that moved most there."""
    changes = [
        (part.name, change)
        for part in evidence.parts
        if (change := part.changes_ns[other - 1]) is not None
    ]
    total = sum(change for _, change in changes)
    explaining = sorted(
        (pair for pair in changes if total and pair[1] / total >= _SHARE_OF_A_REASON),
        key=lambda pair: -abs(pair[1]),
    )
    if not explaining:
        return
    listed = ", ".join(
        f"{find_metric(f'{name}_ns').label} {_signed_ns(change)}" for name, change in explaining
    )
    against = "".join(
        f", against {find_metric(f'{name}_ns').label} {_signed_ns(change)}"
        for name, change in sorted(changes, key=lambda pair: -abs(pair[1]))[:_MOST_PARTS]
        if change / total <= -_SHARE_OF_A_REASON
    )
    yield f"Of {_signed_ns(total)} between their typical steps: {listed}{against}."
    if explaining[0][0].startswith("exposed"):
        yield from _say_cause(evidence.causes, other, explaining[0][1])
    movement = _find_mover(evidence, other, *explaining[0])
    if movement is not None:
        units = ", ".join(format_unit(fqn) for fqn in movement.fqns)
        yield (
            f"The unit that moved most in it is {units}: {movement.what.replace('_', '-')} "
            f"{_signed_ns(movement.change_ns)} a step."
        )


def _say_cause(causes: Sequence[PartComparison], other: int, change: int) -> Iterator[str]:
    """The cause of waits that moved most in the direction of the change."""
    moved = [
        (moved_ns, cause.name)
        for cause in causes
        if (moved_ns := cause.changes_ns[other - 1]) is not None and moved_ns * change > 0
    ]
    if moved:
        most, name = max(moved, key=lambda pair: abs(pair[0]))
        cause = name.replace("_", " ")
        yield f"Over all waits, the cause that moved most is {cause}: {_signed_ns(most)}."


def _find_mover(
    evidence: ConclusionEvidence, other: int, part: str, part_change: int
) -> Movement | None:
    """The unit that moved most in that part, in the same direction; the root holds all others."""
    for movement in find_movements(evidence.units, other):
        is_whole_model = movement.fqns == ("",) and movement.what in ("forward", "backward")
        same_direction = movement.change_ns * part_change > 0
        if movement.what == _IN_UNITS.get(part) and same_direction and not is_whole_model:
            return movement
    return None


def _signed_ns(change: int) -> str:
    return f"{'+' if change >= 0 else '-'}{format_ns(abs(change))}"


def _say_counts(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    """Counts and bytes of collectives, which no noise can change."""
    said = []
    for metric in evidence.metrics:
        judged = metric.judgements[other - 1]
        if metric.name not in _COMMUNICATED or judged.telling is not Telling.DIFFERENT:
            continue
        before, after = metric.values[0], metric.values[other]
        say = format_bytes if metric.name == "communication_bytes" else str
        said.append(f"{_COMMUNICATED[metric.name]} {say(before)} -> {say(after)}")
    if said:
        yield f"It communicates differently in every step: {', '.join(said)}."


_COMMUNICATED = {"collectives_per_step": "collectives", "communication_bytes": "messages of"}


def _say_memory(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    peak = next(metric for metric in evidence.metrics if metric.name == "peak_allocated_bytes")
    before, after = peak.values[0], peak.values[other]
    if before is None or after is None:
        return
    if peak.judgements[other - 1].telling is not Telling.DIFFERENT:
        return
    more = "higher" if after > before else "lower"
    said = f"Its peak allocated is {format_bytes(abs(after - before))} {more}"
    moved = [
        (row.category.replace("_", " "), change)
        for row in evidence.memory
        if (change := row.changes[other - 1])
    ]
    moved = sorted(moved, key=lambda pair: -abs(pair[1]))[:2]
    listed = ", ".join(f"{name} {_signed_bytes(change)}" for name, change in moved)
    yield f"{said} ({listed} at the peak)." if moved else f"{said}."


def _signed_bytes(change: int) -> str:
    return f"{'+' if change >= 0 else '-'}{format_bytes(abs(change))}"


# --- beside which settings


def _say_settings(
    settings: Sequence[SettingDifference], other: int, is_told: bool, is_certain: bool
) -> Iterator[str]:
    """The settings beside the change.

    Args:
        settings: What differs between any sides.
        other: Which side.
        is_told: Some number differs beyond noise, so that there is something to explain.
        is_certain: Counts or bytes differ, which noise cannot do.
    """
    differing = [one for one in settings if one.values[0] != one.values[other]]
    names = list(dict.fromkeys(one.name for one in differing))
    if not names:
        cause = "the cause" if is_certain else "what differs is noise, or"
        yield f"Their recorded settings are the same: {cause} was not recorded."
    elif len(names) == 1:
        reason = ""
        if is_certain:
            reason = ", and so the likely reason"
        elif is_told:
            reason = ": the likely reason, unless the machine was busier in one of the runs"
        yield f"The only setting that differs is {names[0]}{reason}."
    else:
        more = f" and {len(names) - _MOST_SETTINGS} more" if len(names) > _MOST_SETTINGS else ""
        listed = f"{len(names)} settings differ ({', '.join(names[:_MOST_SETTINGS])}{more})"
        reason = ": which of them is the reason cannot be told from these runs" if is_told else ""
        yield f"{listed}{reason}."
