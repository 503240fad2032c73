"""Describe a run and format its values in words that all reports share.

The text is plain: each report escapes it for its format.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan
from typing import Protocol

from rich.console import RenderableType

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.exposed import CAUSES, ExposedOwner, list_causes
from fsdp_inspect.analysis.memory.peak import Memory
from fsdp_inspect.analysis.provenance import Provenance
from fsdp_inspect.analysis.run_heading import RunHeading
from fsdp_inspect.analysis.summary import Summary
from fsdp_inspect.analysis.trust import Trust
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.columns import format_value
from fsdp_inspect.comparison.noise import Judgement, NoiseVerdict
from fsdp_inspect.formatting import (
    MISSING,
    capitalize,
    format_cause,
    format_count,
    format_ns,
    format_owner,
    format_ratio,
    format_signed,
    plural,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.layout import render_table
from fsdp_inspect.trace.codes import StepPart
from fsdp_inspect.trace.sharders import UNKNOWN

NO_COMMUNICATION = "the import shows no communication."
_NO_NETWORK = "fake"
"""The backend of torch that an emulated run uses; its collectives transfer no data."""


class Owned(Protocol):
    """Communication, which may belong to a unit; its attributes are those of `format_owner`."""

    @property
    def fqn(self) -> str | None:
        """None if it belongs to no unit."""

    @property
    def is_fsdp(self) -> bool | None:
        """None if the source does not record it."""

    @property
    def dimension(self) -> str:
        """The dimension of the device mesh."""


def name_owner(owner: Owned) -> str:
    """The name of the unit that owns communication, or a substitute."""
    return format_owner(owner.fqn, owner.is_fsdp, owner.dimension)


def describe_run(heading: RunHeading) -> str:
    """Describe ranks, sharder, backend, device, model and loop: `2 ranks · DDP · gloo · cpu`.

    A summary of a run with several attempts adds them, with their completed and lost steps.
    """
    identity, ranks, loop = heading.identity, plural(heading.world_size, "rank"), ""
    restarts = None
    if isinstance(heading, Summary):
        restarts = heading.restarts
        if heading.num_ranks != heading.world_size:
            ranks += f" ({heading.num_ranks} recorded)"
        checked = heading.plan_check.loop if heading.plan_check is not None else None
        if checked is not None and checked.microbatches > 1:
            what = "microbatches" if checked.adds_up else "backwards"
            loop = f"{checked.microbatches} {what} a step"
    model = identity.model
    if model and identity.num_parameters:
        model += f", {format_count(identity.num_parameters)} parameters"
        if 0 < identity.num_trainable_parameters < identity.num_parameters:
            first = " at the start" if _unfreezes(heading) else ""
            model += f" ({format_count(identity.num_trainable_parameters)} trained{first})"
        if identity.is_stage:
            model += " on one pipeline rank"
    device = identity.device_name or identity.device_type
    facts = [ranks, identity.sharder, name_backend(heading.backend), device, model, loop, restarts]
    return " · ".join(fact for fact in facts if fact and fact != UNKNOWN)


def _unfreezes(heading: RunHeading) -> bool:
    """Whether units that were frozen when the recording began have gradients later."""
    return isinstance(heading, Summary) and any(
        unit.num_trainable_parameters == 0 and unit.reduce_scatter.count_per_step
        for unit in heading.units
    )


def name_backend(backend: str | None) -> str:
    """The backend as text: `nccl`, `emulated`; empty if it is unknown."""
    if backend == _NO_NETWORK:
        return "emulated"
    return "" if backend in (None, UNKNOWN) else str(backend)


def describe_provenance(provenance: Provenance | None, *groups: str) -> str:
    """Describe how the numbers of these groups were obtained, such as `Recorded, measured`."""
    if provenance is None:
        return "The source of these numbers is unknown: their files are damaged."
    source = " and ".join(provenance.sources).capitalize()
    by_method: dict[str, list[str]] = {}
    for group in groups:
        if group in provenance.methods:
            words = describe_methods(provenance.methods[group])
            by_method.setdefault(words, []).append(format_kind(group))
    if len(by_method) == 1:
        return f"{source}, {next(iter(by_method))}."
    methods = [f"{words}: {', '.join(named)}" for words, named in by_method.items()]
    return f"{'; '.join([source, *methods])}."


def describe_trust(
    trust: Trust, summary: Summary, error: float | None
) -> list[tuple[str, str, str]]:
    """The evidence behind every number of a run: the metric, its value, and a detail.

    Args:
        trust: The evidence.
        summary: The summary of the run.
        error: `simulate.measure_self_check`; None: it is not known yet.
    """
    check = "being measured" if error is None else "not possible"
    if error is not None and not isnan(error):
        check = format_error(error)
    cores = MISSING if trust.run_delay is None else format_ratio(trust.run_delay_ratio)
    spread = f"±{format_ratio(trust.spread_ratio)}" if trust.num_steps > 1 else MISSING
    ranks = f"{summary.num_ranks} of {plural(summary.world_size, 'rank')}"
    return [
        ("spread_ratio", spread, f"{plural(trust.num_steps, 'typical step')}, {ranks}"),
        ("run_delay_ratio", cores, "of the recording" if trust.run_delay else "not recorded"),
        ("self_check_ratio", check, "error of the simulated step"),
    ]


_WORDS = {
    **{format_cause(cause.label): find_metric(f"{cause.label}_ns").definition for cause in Cause},
    "(no unit)": "a collective that no unit or bucket owns: of the training loop, such as the mean "
    "of a loss, or of the sharder, such as the norm of the gradients or buffers",
    "(not FSDP)": find_metric("exposed_other_ns").definition,
}
"""Words for waits that a reader may not know, with their definitions."""


_TERMS = {
    **{
        find_metric(name).label: find_metric(name).definition
        for name in ("fsdp_copies_ns", "own_work_ns", "lateness_ns", "kept_ns")
    },
    "plain step": "a step whose units and collectives are not recorded, to bound the recorder's "
    "cost",
    "storage tracker": "it adds up the bytes of all live tensors in memory steps, where there is "
    "no CUDA allocator",
}
"""Other words of ours, with their definitions."""


def define_words(text: str) -> str:
    """Define the words for waits in a text, one sentence each; empty without such words."""
    return _define(text, _WORDS)


def define_terms(text: str) -> str:
    """Define our other words in a text, as `define_words`; a card does so for its texts."""
    return _define(text, _TERMS)


def _define(text: str, glossary: Mapping[str, str]) -> str:
    """Skip words whose definition the text has."""
    lower = text.lower()
    found = (
        word for word, meaning in glossary.items() if word.lower() in lower and meaning not in text
    )
    return " ".join(f"{capitalize(word)}: {glossary[word]}." for word in found)


def describe_cut(amounts: Sequence[float], most: int, show: Callable[[float], str]) -> str:
    """State which part of a sum the first amounts are; empty if there are no others.

    Args:
        amounts: All amounts, the largest first.
        most: The number of shown ones.
        show: Formats an amount.
    """
    if len(amounts) <= most:
        return ""
    return (
        f"The largest {most} of {len(amounts)}: {show(sum(amounts[:most]))} of "
        f"{show(sum(amounts))}. The table has all."
    )


def describe_typical(summary: Summary) -> str:
    """The steps behind the typical step: `mean over the middle 14 of 28 timed steps`."""
    number = len(summary.breakdown.steps) if summary.breakdown else 0
    waits = f"; it{waits_for}" if (waits_for := describe_late_rank(summary)) else ""
    if number == summary.num_timed_steps:
        return f"mean over {plural(number, 'timed step')}{waits}"
    steps = plural(summary.num_timed_steps, "timed step")
    return f"mean over the middle {number} of {steps}{waits}"


def describe_late_rank(summary: Summary) -> str:
    """` waits for rank 3`, of the rank that represents a run with a straggler; else empty."""
    speed = summary.verdict.of_speed
    late = speed.numbers.get("straggler_rank")
    is_late = speed.limit is Limit.STRAGGLER and late != summary.median_rank
    return f" waits for rank {late}" if is_late else ""


def describe_memory_method(memory: Memory) -> str:
    """The tool that counted memory on the rank with the highest peak: `storage tracker`."""
    methods = {row.rank: row.method for row in memory.ranks}
    return format_method(methods.get(memory.peak_rank or 0, ""))


def describe_methods(methods: str) -> str:
    """Format comma-separated methods: `measured and host-blocking`."""
    return " and ".join(format_method(method) for method in methods.split(", "))


def describe_step(breakdown: StepBreakdown) -> str:
    """Describe the time of a step and its exposed part."""
    total = format_ns(breakdown.step_time_ns)
    place = f"Step {breakdown.closest_step}, rank {breakdown.rank}"
    if breakdown.exposed_ns is None:
        return f"{place}: {total}. Exposed communication is unknown."
    if breakdown.exposed_ns == 0:
        return f"{place}: {total}, no exposed communication."
    return f"{place}: {format_ns(breakdown.exposed_ns)} of {total} exposed."


def format_change(change: float | None) -> str:
    """Format a relative change with its sign: `-22.7%`; no change is `=`."""
    if change is None:
        return MISSING
    return "=" if change == 0 else format_signed(change)


def format_error(error: float | None) -> str:
    """Format a relative error with its sign: `+0.2%`; no error is `0%`."""
    return MISSING if error is None else format_signed(error)


def describe_judgement(judgement: Judgement) -> str:
    """Describe in short whether a difference is beyond noise."""
    if judgement.low is not None and judgement.high is not None:
        interval = f"{format_change(judgement.low)} to {format_change(judgement.high)}"
        return f"{_NOISE_WORDS[judgement.verdict]} ({interval})"
    if judgement.verdict is NoiseVerdict.DIFFERENT and any(judgement.more_runs):
        return "above noise, not tested"
    return _NOISE_WORDS[judgement.verdict]


def note_judgement(judgement: Judgement) -> str:
    """The note beside a difference in a table; empty where the values state the answer."""
    is_stated = judgement.verdict in (NoiseVerdict.DIFFERENT, NoiseVerdict.MISSING)
    return "" if is_stated else _NOISE_WORDS[judgement.verdict]


_NOISE_WORDS = {
    NoiseVerdict.EQUAL: "equal",
    NoiseVerdict.DIFFERENT: "different",
    NoiseVerdict.SAME: "no difference",
    NoiseVerdict.UNKNOWN: "within noise",
    NoiseVerdict.MISSING: "not recorded on both sides",
}


# --- Format the value of a metric, a collective's kind and a method as short text.


def format_metric(name: str, value: float | None) -> str:
    """Format the value of the metric `name` with its unit; a missing value is an en dash.

    Raises:
        KeyError: No metric has that name.
    """
    return format_value(find_metric(name).unit, value)


def describe_contents(
    step: StepBreakdown, stops: Mapping[str, float], *, in_kernel_trace: bool
) -> str:
    """What a large part `other` holds, and what stops the host within the parts; may be empty.

    Args:
        step: The parts of the step.
        stops: `HostStops.ratios`; those below a thousandth of the step are left out.
        in_kernel_trace: Whether the step is of an imported kernel trace, whose part `other` is
            kernels.
    """
    split = " To split it, record with --profile-steps 20:23."
    other = find_metric("other_ns").definition
    if not step.duration_ns(StepPart.FORWARD) + step.duration_ns(StepPart.BACKWARD):
        other = "it contains forward and backward, if any, which the run does not show apart"
        split = ""
    lines = [
        f"Other ({format_ns(part.duration_ns)}): {other}."
        + (split if 2 * sum(stops.values()) < part.ratio else "")  # else the stops may explain it
        for part in step.parts
        if part.name == "other" and part.ratio >= _LEAST_OTHER_RATIO and not in_kernel_trace
    ]
    named = [f"{what} {format_ratio(ratio)}" for what, ratio in stops.items() if ratio >= 0.001]
    if named:
        lines.append(f"Within the parts, on average over all timed steps: {', '.join(named)}.")
    return " ".join(lines)


_LEAST_OTHER_RATIO = 0.05
"""The part `other` is explained from this fraction of the step."""


def format_kind(kind: str) -> str:
    """Format the kind of a collective: `all-gather`."""
    return kind.replace("_", "-")


_METHODS = {
    "host_blocking": "host-blocking",
    "storage_tracker": "storage tracker",
    "cuda_allocator": "CUDA allocator",
    "memory_snapshot": "memory snapshot",
}


def format_method(method: str) -> str:
    """Format how a number was obtained: `host-blocking`, `storage tracker`.

    Args:
        method: One method, or several with `, ` between them.
    """
    return ", ".join(_METHODS.get(name, name) for name in method.split(", "))


# --- Describe the causes of a wait.


def describe_main_cause(waits: Iterable[ExposedOwner], *, is_headline: bool = False) -> str:
    """The causes that take most of a wait: `mostly late issue`, `mostly floor, then late issue`.

    The first one that is not the floor is the cause that the verdict names.

    Args:
        waits: The waits together, such as those of one unit.
        is_headline: Whether there is only room for one cause. The floor is then left out, because
            it cannot be hidden.
    """
    sums = sum((Counter(each.causes_ns) for each in waits), Counter[str]())
    if not sums:
        return ""
    causes = [cause for cause, _ in sums.most_common(2)]
    is_most = 2 * sums[causes[0]] > sums.total()
    named = [format_cause(cause) for cause in causes]
    if is_headline:
        return f"mostly {named[0]}" if is_most and causes[0] != Cause.FLOOR.label else ""
    if not is_most:
        return " and ".join(named)
    return ", then ".join([f"mostly {named[0]}", *named[1 : 1 + (causes[0] == Cause.FLOOR.label)]])


def causes_table(causes_ns: Mapping[str, int]) -> RenderableType:
    """Causes of an exposed time, each with its fraction of that time and its definition."""
    return render_table(CAUSES, list_causes(causes_ns))
