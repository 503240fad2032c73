"""Phrase the difference between a side and the reference, and its likely reasons.

A conclusion states only results that the data supports:

- whether step times differ beyond noise;
- the parts of the step that explain the change (parts add up, so do their changes);
- the unit whose collectives or compute change most in the largest of these parts;
- counts and bytes that differ, because noise cannot change them;
- the settings that explain more bytes, or that can lengthen the parts that became longer
  (`causes`), and the number of those that differ. A single one is called the likely reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from fsdp_inspect.analysis.run_heading import identify
from fsdp_inspect.analysis.trust import find_run_delay_difference
from fsdp_inspect.comparison.causes import find_causes, parts_of
from fsdp_inspect.comparison.differences import (
    CategoryComparison,
    MetricComparison,
    PartComparison,
    UnitComparison,
    UnitSide,
)
from fsdp_inspect.comparison.increases import (
    find_increases_by_unit,
    find_longer,
    moment_of,
    moved_by,
)
from fsdp_inspect.comparison.noise import CONFIDENCE, PROCESS_NOISE_RATIO, Judgement, NoiseVerdict
from fsdp_inspect.comparison.settings import SCRIPT, SettingDifference, compare_settings
from fsdp_inspect.comparison.sides import MeasuredRun
from fsdp_inspect.formatting import (
    format_bytes,
    format_category,
    format_cause,
    format_ns,
    format_ratio,
    format_signed,
    format_times,
    format_unit,
    listed,
    plural,
)
from fsdp_inspect.metrics import find_metric

_SHARE_OF_A_REASON = 0.25
"""A part explains a change if it makes up at least this fraction of it."""
_AS_FAST = 0.5
"""From this fraction of saved step time on, a difference is a factor: 2 times as fast."""
_SAME_MODEL = 0.05
"""Models whose numbers of parameters differ by a larger fraction are different, also in name."""
_MOST_SETTINGS = 4
_MOST_PARTS = 4
_IN_UNITS: dict[str, Callable[[UnitSide], int | None]] = {
    "exposed_all_gather": attrgetter("all_gather.exposed_ns"),
    "exposed_reduce_scatter": attrgetter("reduce_scatter.exposed_ns"),
    "exposed_all_reduce": attrgetter("all_reduce.exposed_ns"),
    "forward": attrgetter("forward_ns"),
    "backward": attrgetter("backward_ns"),
}
"""Parts of the step that belong to units, with their time in a unit."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A sentence about one side compared with the reference, and the reasons."""

    label: str
    verdict: NoiseVerdict
    """The judgement on the step time."""
    headline: str
    """Whether the side is faster, slower or not significantly different."""
    sentence: str
    """The headline, followed by a sentence with the details."""
    reasons: tuple[str, ...]
    """The parts of the change and the settings that differ, strongest evidence first."""
    is_of_other_model: bool = False
    """Whether the sides train models of different sizes, so that neither is faster."""


@dataclass(frozen=True, slots=True)
class ConclusionEvidence:
    """All measurements that a conclusion can use."""

    labels: tuple[str, ...]
    num_runs: tuple[int, ...]
    metrics: tuple[MetricComparison, ...]
    parts: tuple[PartComparison, ...]
    causes: tuple[PartComparison, ...]
    units: tuple[UnitComparison, ...]
    memory: tuple[CategoryComparison, ...]
    runs: tuple[MeasuredRun, ...]
    """The median run of each side."""


def conclude(evidence: ConclusionEvidence) -> tuple[Conclusion, ...]:
    """Phrase the difference between each other side and the first side."""
    return tuple(_conclude(evidence, other) for other in range(1, len(evidence.labels)))


def head_comparison(
    conclusions: Sequence[Conclusion], step_time: MetricComparison, reference: str
) -> str:
    """The result of the comparison in a few words; arguments as for `summarise`."""
    if len(conclusions) == 1:
        return conclusions[0].headline
    standings = [*map(_standing, conclusions, step_time.judgements)]
    for standing in _STANDINGS[:2]:
        if standing in standings:
            count, word = standings.count(standing), standing.lower()
            verb = "is" if count == 1 else "are"
            return f"{count} of {len(standings)} {verb} {word} than {reference}."
    return f"No step time differs significantly from {reference}."


def summarise(
    conclusions: Sequence[Conclusion], step_time: MetricComparison, reference: str
) -> str:
    """Summarise the comparison of all sides with the reference: faster, slower, not significant.

    Args:
        conclusions: One for each side but the first.
        step_time: The step times behind the conclusions.
        reference: The label of the first side.
    """
    if len(conclusions) == 1:
        return conclusions[0].sentence
    labels: dict[str, list[str]] = {}
    for conclusion, judged in zip(conclusions, step_time.judgements, strict=True):
        change = "" if judged.change is None else f" ({format_signed(judged.change)})"
        standing = _standing(conclusion, judged)
        labels.setdefault(standing, []).append(f"{conclusion.label}{change}")
    groups = [
        f"{standing}: {', '.join(labels[standing])}."
        for standing in _STANDINGS
        if standing in labels
    ]
    before = format_ns(step_time.values[0])
    return " ".join([f"Step time compared with {reference} ({before}).", *groups])


_STANDINGS = ("Faster", "Slower", "No difference", "Not significant", "Not comparable")


def _standing(conclusion: Conclusion, judged: Judgement) -> str:
    faster, slower, same, not_significant, missing = _STANDINGS
    if conclusion.is_of_other_model:
        return missing
    match judged.verdict:
        case NoiseVerdict.DIFFERENT:
            return faster if (judged.change or 0) < 0 else slower
        case NoiseVerdict.SAME | NoiseVerdict.EQUAL:
            return same
        case NoiseVerdict.UNKNOWN:
            return not_significant
        case NoiseVerdict.MISSING:
            return missing


def _conclude(evidence: ConclusionEvidence, other: int) -> Conclusion:
    step = next(metric for metric in evidence.metrics if metric.name == "step_time_ns")
    judged = step.judgements[other - 1]
    reasons = [*_phrase_counts(evidence, other), *_phrase_memory(evidence, other)]
    if judged.verdict is NoiseVerdict.DIFFERENT:
        reasons = [*_phrase_parts(evidence, other), *reasons]
    if judged.verdict is NoiseVerdict.UNKNOWN:
        reasons = [*_phrase_moved_parts(evidence, step, other), *reasons]
    is_certain = any(
        metric.is_exact and metric.judgements[other - 1].verdict is NoiseVerdict.DIFFERENT
        for metric in evidence.metrics
    )
    is_different = is_certain or judged.verdict is NoiseVerdict.DIFFERENT
    headline, details = _phrase_step_time(evidence, step, judged, other)
    causes = [*_explain_peak(evidence, other), *_explain_time(evidence, other, judged)]
    # Of the pair: a value that one side of it does not record is no difference.
    settings = compare_settings([evidence.runs[side].manifest for side in (0, other)])
    return Conclusion(
        label=evidence.labels[other],
        verdict=judged.verdict,
        headline=headline,
        sentence=f"{headline} {details}",
        reasons=(
            *reasons,
            *causes,
            *_phrase_settings(settings, is_different, is_certain, are_causes_known=bool(causes)),
            *_phrase_arguments(evidence, other),
        ),
        is_of_other_model=_are_of_other_models(evidence, other),
    )


def _phrase_step_time(
    evidence: ConclusionEvidence, step: MetricComparison, judged: Judgement, other: int
) -> tuple[str, str]:
    """The headline and the details."""
    first, label = evidence.labels[0], evidence.labels[other]
    before, after = step.values[0], step.values[other]
    if before is None or after is None or judged.change is None:
        without = " and ".join(
            evidence.labels[side] for side in (0, other) if step.values[side] is None
        )
        return (
            f"The times of {label} and {first} cannot be compared.",
            f"No timed step in {without}.",
        )
    times = f"The step takes {format_ns(after)} instead of {format_ns(before)}"
    if _are_of_other_models(evidence, other):
        return (
            f"{label} trains another model than {first}.",
            f"{times}. Only runs of one model show which one is faster.",
        )
    if judged.verdict is NoiseVerdict.SAME:
        change = f"{format_signed(judged.change)} ({_interval(judged)})"
        return f"{label} is as fast as {first}.", f"{times}: {change}."
    if judged.verdict is NoiseVerdict.UNKNOWN:
        return (
            f"{label} and {first} do not differ significantly in step time.",
            f"{times}: {format_signed(judged.change)}. "
            f"{_phrase_why_unknown(evidence, judged, other)}",
        )
    cores = _phrase_cores(evidence, other)
    doubt = ", perhaps because of the machine" if cores else ""
    headline = f"{label} {_phrase_speed(judged.change)} {first}{doubt}."
    if judged.p_value is None:
        missing = _phrase_missing_runs(evidence, judged, other)
        return headline, f"{times}.{cores} To test the difference, {missing}."
    return headline, f"{times} ({_interval(judged)}, p = {judged.p_value:.2g}).{cores}"


def _phrase_cores(evidence: ConclusionEvidence, other: int) -> str:
    """A sentence about a machine that was busy, as another reason for the difference."""
    trusts = [evidence.runs[side].trust for side in (0, other)]
    before, after = (trust.run_delay_ratio for trust in trusts)
    is_busy = any(trust.are_cores_first() for trust in trusts)
    if not is_busy and find_run_delay_difference([before], [after]) is None:
        return ""
    return (
        " The difference, or a part of it, may come from the machine: training threads had no CPU "
        f"core for {format_ratio(before)} of the time in {evidence.labels[0]}, and for "
        f"{format_ratio(after)} in {evidence.labels[other]}."
    )


def _are_of_other_models(evidence: ConclusionEvidence, other: int) -> bool:
    models = [identify(evidence.runs[side].manifest) for side in (0, other)]
    sizes = [model.num_parameters for model in models]
    if len({model.is_stage for model in models}) > 1 or not min(sizes):
        return False  # the size of the whole model is unknown on one side
    return max(sizes) / min(sizes) - 1 > _SAME_MODEL


def _phrase_speed(change: float) -> str:
    """`takes 14.9% less time than`, `is 12.9 times as fast as`: the change of the step time."""
    if change >= 1:
        return f"takes {format_times(1 + change, ' times')} as long as"
    if -1 < change <= -_AS_FAST:
        return f"is {format_times(1 / (1 + change), ' times')} as fast as"
    return f"takes {format_ratio(abs(change))} {'more' if change > 0 else 'less'} time than"


def _phrase_why_unknown(evidence: ConclusionEvidence, judged: Judgement, other: int) -> str:
    if judged.p_value is not None:
        return (
            f"With {evidence.num_runs[0]} and {evidence.num_runs[other]} runs, the "
            f"{_interval(judged)} (p = {judged.p_value:.2g}). Record more runs to narrow it."
        )
    return (
        f"Identical processes differ by up to {PROCESS_NOISE_RATIO:.0%}, or by as much as the "
        f"repeats here. To test the difference, {_phrase_missing_runs(evidence, judged, other)}."
    )


def _phrase_missing_runs(evidence: ConclusionEvidence, judged: Judgement, other: int) -> str:
    """`record 4 more runs of A and 4 more of B`."""
    missing = [
        (more, evidence.labels[side])
        for side, more in zip((0, other), judged.more_runs, strict=True)
        if more
    ]
    (first_more, first_label), *rest = missing
    others = "".join(f" and {more} more of {label}" for more, label in rest)
    return f"record {plural(first_more, 'more run')} of {first_label}{others}"


def _interval(judged: Judgement) -> str:
    low, high = format_signed(judged.low or 0.0), format_signed(judged.high or 0.0)
    return f"{CONFIDENCE:.0%} interval {low} to {high}"


# --- parts of the change


def _phrase_parts(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    """Name the parts of the step that explain the change, and the unit that changes most there."""
    changes = _changes_of_parts(evidence, other)
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
    opposite = [
        f"{find_metric(f'{name}_ns').label} {_signed_ns(change)}"
        for name, change in sorted(changes, key=lambda pair: -abs(pair[1]))[:_MOST_PARTS]
        if change / total <= -_SHARE_OF_A_REASON
    ]
    offset = f"; in the other direction: {', '.join(opposite)}" if opposite else ""
    yield f"The typical step changes by {_signed_ns(total)}: {listed}{offset}."
    if explaining[0][0].startswith("exposed"):
        yield from _phrase_cause(evidence.causes, other, explaining[0][1])
    moved = _find_mover(evidence, other, *explaining[0])
    if moved is not None:
        units = ", ".join(format_unit(fqn) for fqn in moved[1])
        part = find_metric(f"{explaining[0][0]}_ns").label
        yield (
            f"The unit with the largest change in {part} is {units}: "
            f"{_signed_ns(moved[0])} per step."
        )


def _changes_of_parts(evidence: ConclusionEvidence, other: int) -> list[tuple[str, int]]:
    """The parts of the step with their changes in ns."""
    changes = ((part.name, part.changes_ns[other - 1]) for part in evidence.parts)
    return [(name, change) for name, change in changes if change is not None]


def _phrase_moved_parts(
    evidence: ConclusionEvidence, step: MetricComparison, other: int
) -> Iterator[str]:
    """Name parts that change by more than equal processes differ, although the step does not."""
    least = PROCESS_NOISE_RATIO * (step.values[0] or 0)
    moved = [pair for pair in _changes_of_parts(evidence, other) if abs(pair[1]) > least > 0]
    if moved:
        named = ", ".join(
            f"{find_metric(f'{name}_ns').label} {_signed_ns(change)}"
            for name, change in sorted(moved, key=lambda pair: -abs(pair[1]))
        )
        yield (
            f"Parts of the typical step change by more than {PROCESS_NOISE_RATIO:.0%} of it: "
            f"{named}."
        )


def _phrase_cause(causes: Sequence[PartComparison], other: int, change: int) -> Iterator[str]:
    """Name the cause of waits that changes most in the direction of the change."""
    changes = [
        (cause_change, cause.name)
        for cause in causes
        if (cause_change := cause.changes_ns[other - 1]) is not None and cause_change * change > 0
    ]
    if changes:
        most, name = max(changes, key=lambda pair: abs(pair[0]))
        yield f"The cause of waits that changes most is {format_cause(name)}: {_signed_ns(most)}."


def _find_mover(
    evidence: ConclusionEvidence, other: int, part: str, part_change: int
) -> tuple[int, tuple[str, ...]] | None:
    """Return the largest change of a unit in a part, in the direction of the part's change.

    The forward and backward of the root contain all other units, so they are left out.
    """
    if part not in _IN_UNITS:
        return None
    moved = []
    for row in evidence.units:
        sides = (row.sides[0], row.sides[other])
        before, after = (_IN_UNITS[part](side) if side else None for side in sides)
        is_whole_model = row.fqns == ("",) and part in ("forward", "backward")
        if before is not None and after is not None and not is_whole_model:
            moved.append((after - before, row.fqns))
    same_direction = [pair for pair in moved if pair[0] * part_change > 0]
    return max(same_direction, key=lambda pair: abs(pair[0]), default=None)


def _signed_ns(change: int) -> str:
    return f"{'+' if change >= 0 else '-'}{format_ns(abs(change))}"


def _phrase_counts(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    """Name counts and bytes of collectives that differ; noise cannot change them."""
    listed = []
    for metric in evidence.metrics:
        judged = metric.judgements[other - 1]
        if metric.name not in _COMMUNICATED or judged.verdict is not NoiseVerdict.DIFFERENT:
            continue
        before, after = metric.values[0], metric.values[other]
        form = format_bytes if metric.name == "communication_bytes" else str
        texts = form(before), form(after)
        if texts[0] == texts[1]:  # they differ by less than is shown
            texts = f"{before:,}", f"{after:,}"
        listed.append(f"{find_metric(metric.name).label} {texts[0]} -> {texts[1]}")
    if listed:
        yield f"Communication per step differs: {', '.join(listed)}."


_COMMUNICATED = frozenset({"collectives_per_step", "communication_bytes"})


def _phrase_memory(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    peak = next(metric for metric in evidence.metrics if metric.name == "peak_allocated_bytes")
    before, after = peak.values[0], peak.values[other]
    if before is None or after is None:
        return
    if peak.judgements[other - 1].verdict is not NoiseVerdict.DIFFERENT:
        return
    more = "higher" if after > before else "lower"
    peak_change = f"Peak allocated is {format_bytes(abs(after - before))} {more}"
    changes = [
        (format_category(row.category), change)
        for row in evidence.memory
        if (change := row.changes[other - 1])
    ]
    largest = sorted(changes, key=lambda pair: -abs(pair[1]))[:2]
    listed = ", ".join(f"{name} {_signed_bytes(change)}" for name, change in largest)
    yield f"{peak_change} (at the peak: {listed})." if largest else f"{peak_change}."


def _signed_bytes(change: int) -> str:
    return f"{'+' if change >= 0 else '-'}{format_bytes(abs(change))}"


# --- settings that differ


def _explain_peak(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    """Name the settings of the side with the higher peak that explain its bytes."""
    peak = next(metric for metric in evidence.metrics if metric.name == "peak_allocated_bytes")
    if peak.judgements[other - 1].verdict is not NoiseVerdict.DIFFERENT:
        return
    lower, higher = sorted((0, other), key=lambda side: peak.values[side] or 0)
    before, after = (evidence.runs[side] for side in (lower, higher))
    peaks = before.summary.memory.peak, after.summary.memory.peak
    if peaks[0] is None or peaks[1] is None:
        return
    old, new = moment_of(peaks[0]), moment_of(peaks[1])
    causes = find_causes(
        before.manifest,
        after.manifest,
        find_increases_by_unit(old.held, new.held),
        of_memory=True,
        phase=peaks[1].phase,
        moved_by=moved_by(old, new),
    )
    if causes:
        label = evidence.labels[higher]
        yield f"The likely reason for the higher peak of {label}: {_join(causes)}."


def _explain_time(evidence: ConclusionEvidence, other: int, judged: Judgement) -> Iterator[str]:
    """Name the settings of the slower side that can lengthen the parts that are longer there."""
    if judged.verdict is not NoiseVerdict.DIFFERENT:
        return
    faster, slower = (0, other) if (judged.change or 0) > 0 else (other, 0)
    parts = [
        {part.name: part.values_ns[side] or 0 for part in evidence.parts}
        for side in (faster, slower)
    ]
    longer = parts_of(find_longer(parts[0], parts[1], {}, {}))
    before, after = (evidence.runs[side].manifest for side in (faster, slower))
    by_causes: dict[tuple[str, ...], list[str]] = {}
    for name in (name for name in parts[1] if name in longer):
        causes = find_causes(before, after, (), of_memory=False, longer=frozenset({name}))
        by_causes.setdefault(causes, []).append(find_metric(f"{name}_ns").label)
    for causes, names in by_causes.items():
        if causes:
            settings = f"Settings of {evidence.labels[slower]} that can lengthen"
            yield f"{settings} {', '.join(names)}: {_join(causes)}."


def _join(causes: Sequence[str]) -> str:
    """The causes in one sentence, without the marks of code for Markdown."""
    return "; ".join(causes).replace("`", "")


def _phrase_arguments(evidence: ConclusionEvidence, other: int) -> Iterator[str]:
    """Name arguments of the script in which two runs differ: no setting tells what they change."""
    sides = (0, other)
    given = [_arguments_of(evidence.runs[side].manifest.command) for side in sides]
    own = [
        [each for each in words if each not in without]
        for words, without in zip(given, reversed(given), strict=True)
    ]
    if any(own):
        texts = (
            f"{evidence.labels[side]} has {listed(list(map(repr, words)) or ['none'], 4)}"
            for side, words in zip(sides, own, strict=True)
        )
        yield f"The arguments of the script differ: {', '.join(texts)}."


def _arguments_of(command: Sequence[str]) -> Sequence[str]:
    """The words after the script; empty if no word of the command is one."""
    places = [place for place, word in enumerate(command) if word.endswith(".py")]
    return command[places[0] + 1 :] if places else ()


def _phrase_settings(
    settings: Sequence[SettingDifference],
    is_different: bool,
    is_certain: bool,
    *,
    are_causes_known: bool,
) -> Iterator[str]:
    """Name the settings that differ, and whether they are the likely reason.

    Args:
        settings: The settings that differ between the first side and the other.
        is_different: Whether a number differs beyond noise, so that the difference needs a reason.
        is_certain: Whether counts or bytes differ, which noise cannot change.
        are_causes_known: Whether a setting was named that can have this effect.
    """
    names = list(dict.fromkeys(each.name for each in settings if each.name != SCRIPT))
    scripts = [setting for setting in settings if setting.name == SCRIPT]
    if scripts:
        was, now = scripts[0].values
        also = f" Settings also differ: {listed(names, _MOST_SETTINGS)}." if names else ""
        yield f"The scripts differ ({was} and {now}), and what they do is not recorded.{also}"
    elif not names:
        noise = "" if is_certain else "the difference is noise, or "
        yield f"All recorded settings are the same: {noise}no recorded setting explains it."
    elif len(names) == 1:
        reason = ""
        if is_certain:
            reason = ", so it is the likely reason for the other counts or bytes"
            if not are_causes_known:
                reason += ". Whether it changes the step time is not known"
        elif is_different:
            reason = ": the likely reason, unless the machine was busier in one of the runs"
        yield f"The only setting that differs is {names[0]}{reason}."
    else:
        differ = f"{len(names)} settings differ ({listed(names, _MOST_SETTINGS)})"
        is_unknown = is_different and not are_causes_known
        reason = " These runs do not show which setting is the reason." if is_unknown else ""
        yield f"{differ}.{reason}"
