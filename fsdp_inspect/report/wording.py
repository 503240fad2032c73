"""Describe a run in sentences and facts that all reports share.

The text is plain: each report escapes it for its format.
"""

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.memory.peak import Memory
from fsdp_inspect.analysis.provenance import Provenance
from fsdp_inspect.analysis.run_heading import Heading
from fsdp_inspect.comparison.noise import Judgement, Telling
from fsdp_inspect.formatting import MISSING, format_count, format_ns, format_signed
from fsdp_inspect.report.values import format_kind, format_method

_NO_NETWORK = "fake"
"""The backend of torch that an emulated run uses; its collectives transfer no data."""


def describe_run(heading: Heading) -> str:
    """Describe ranks, backend, device and model: `2 ranks · gloo · cpu · Decoder`."""
    identity = heading.identity
    ranks = f"{heading.world_size} {'rank' if heading.world_size == 1 else 'ranks'}"
    model = identity.model
    if model and identity.num_parameters:
        model += f", {format_count(identity.num_parameters)} parameters"
    device = identity.device_name or identity.device_type
    facts = [ranks, name_backend(heading.backend), device, model]
    return " · ".join(fact for fact in facts if fact)


def name_backend(backend: str | None) -> str:
    """The backend as text: `nccl`, `emulated`; empty if it is unknown."""
    return "emulated" if backend == _NO_NETWORK else backend or ""


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
        return f"{_TELLINGS[judgement.telling]} ({interval})"
    if judgement.telling is Telling.DIFFERENT and any(judgement.more_runs):
        return "above process noise, no rank test"
    return _TELLINGS[judgement.telling]


_TELLINGS = {
    Telling.EQUAL: "equal",
    Telling.DIFFERENT: "different",
    Telling.SAME: "no difference",
    Telling.UNKNOWN: "within noise",
    Telling.MISSING: "not recorded on both sides",
}
