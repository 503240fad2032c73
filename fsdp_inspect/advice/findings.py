"""What should be looked at before the plan? Stragglers, a slow host or input, settings that cost.

Nothing is measured here: what the analyses found is turned into findings, the limit of the step
first. A finding claims no time that a suggestion claims too; what it names as a cost is the
analysis' own number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fsdp_inspect.analysis.allocator import AllocatorUse
from fsdp_inspect.analysis.plan_check import PlanCheck
from fsdp_inspect.analysis.verdict import STRAGGLER_RATIO, Limit, Verdict
from fsdp_inspect.analysis.verdict.facts import DOMINANT_UNIT_RATIO
from fsdp_inspect.analysis.verdict.limits import HOST_RATIO, INPUT_RATIO
from fsdp_inspect.analysis.verdict.words import FRAGMENTED_RATIO
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_unit
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.statistics import median

_RULES = {Limit.STRAGGLER: "R32", Limit.HOST: "R19", Limit.MEMORY: "R21"}
_BEFORE_COMMUNICATION = (
    Limit.MEMORY,
    Limit.MEMORY_CREEP,
    Limit.STRAGGLER,
    Limit.HOST,
    Limit.INPUT,
    Limit.OTHER,
)
_MOST_NAMED = 3
OVERSIZED_RATIO = 2.0
"""A unit with more than so many times the median unit's bytes is worth splitting (R3)."""
FROZEN_RATIO = 0.05
"""A model of which less than that is trained is mostly frozen (R29)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the analyses say about a run; None where a question has no answer."""

    manifest: RunManifest
    verdict: Verdict
    plan_check: PlanCheck | None
    allocator: AllocatorUse | None
    causes_ns: Mapping[str, int]
    """Exposed time of a step by cause."""
    exposed_by_kind_ns: Mapping[str, int]
    backward_gathers_ns: int
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a run that no plan of units and prefetch mends."""

    rule: str
    """The tuning rule; empty if none."""
    units: tuple[str, ...]
    """Fqns; empty: the run as a whole."""
    sentence: str
    evidence: str
    """What it rests on."""
    do: tuple[str, ...]
    numbers: dict[str, float | int | None] = field(default_factory=dict)
    """Those of the sentence, by metric name."""
    limits: bool = False
    """It limits the step, or the plan's predictions do not hold while it is so: it comes before all
    else."""


def find_first_things(evidence: Evidence) -> tuple[Finding, ...]:
    """What comes before advice on the plan: the limit of the step, then what settings cost."""
    return tuple(
        finding
        for find in (_limit, _also, _broken_plan, _one_unit, _large_unit, _waste, _full_precision,
                     _frozen, _connections, _fragmentation, _offload)
        for finding in find(evidence)
    )  # fmt: skip


def _limit(evidence: Evidence) -> Iterator[Finding]:
    """What limits the step, unless that is communication or compute."""
    verdict = evidence.verdict
    if verdict.limit in _BEFORE_COMMUNICATION:
        rule = _RULES.get(verdict.limit, "")
        yield Finding(
            rule,
            (),
            verdict.sentence,
            verdict.why,
            verdict.next_steps,
            dict(verdict.numbers),
            limits=True,
        )


def _also(evidence: Evidence) -> Iterator[Finding]:
    """What is above its threshold too, beside the limit."""
    numbers = evidence.verdict.numbers
    step = numbers.get("step_time_ns") or 0
    known = (
        (Limit.STRAGGLER, "straggler_cost_ns", STRAGGLER_RATIO, "One late rank costs",
         "See who it is: fsdp-inspect ranks RUN."),
        (Limit.HOST, "host_bound_ns", HOST_RATIO, "The device starves for",
         "Give the host less to issue: torch.compile, a larger microbatch, fewer units."),
        (Limit.INPUT, "data_ns", INPUT_RATIO, "Waiting for the next batch takes",
         "Load batches ahead of the step: more loader workers, prefetching, pinned memory."),
    )  # fmt: skip
    for limit, name, least, words, do in known:
        cost = numbers.get(name) or 0
        if limit is not evidence.verdict.limit and step and cost / step >= least:
            share = f"{format_ns(cost)} of a {format_ns(step)} step ({format_ratio(cost / step)})"
            sentence = f"{words} {share}."
            yield Finding(_RULES.get(limit, ""), (), sentence, "", (do,), {name: cost})


def _broken_plan(evidence: Evidence) -> Iterator[Finding]:
    check = evidence.plan_check
    if check is not None and check.is_consistent is False:
        contradictions = tuple(each for each in check.findings if each.is_contradiction)
        yield Finding(
            "",
            tuple(dict.fromkeys(fqn for each in contradictions for fqn in each.fqns)),
            check.sentence,
            f"Counted on rank {check.rank} in {len(check.steps)} timed steps.",
            (
                "Find out why before changing the plan: predictions below assume that a plan is "
                "kept.",
            ),
            limits=True,
        )


def _one_unit(evidence: Evidence) -> Iterator[Finding]:
    units = evidence.manifest.units
    total = sum(unit.num_parameters for unit in units)
    largest = max(units, key=lambda unit: unit.num_parameters, default=None)
    if largest is None or not total or largest.num_parameters / total <= DOMINANT_UNIT_RATIO:
        return
    ratio = largest.num_parameters / total
    name = format_unit(largest.fqn)
    yield Finding(
        "R1",
        (largest.fqn,),
        f"Unit {name} holds {format_ratio(ratio)} of the parameters: nothing computes beside its "
        "gathers.",
        f"It gathers {format_bytes(largest.unsharded_bytes)} at once.",
        ("Call fully_shard on every transformer block, and on the model last.",),
    )


def _large_unit(evidence: Evidence) -> Iterator[Finding]:
    """A unit that is far larger than the others, though it does not dominate the model."""
    units = evidence.manifest.units
    total = sum(unit.num_parameters for unit in units)
    typical = median([unit.unsharded_bytes for unit in units]) or 0
    for unit in units:
        is_dominant = unit.num_parameters > DOMINANT_UNIT_RATIO * total
        if is_dominant or not typical or unit.unsharded_bytes <= OVERSIZED_RATIO * typical:
            continue
        times = unit.unsharded_bytes / typical
        yield Finding(
            "R3",
            (unit.fqn,),
            f"Unit {format_unit(unit.fqn)} gathers {format_bytes(unit.unsharded_bytes)} at once, "
            f"{times:.1f} times as much as the median unit.",
            f"Its reduce-scatter needs an input of {format_bytes(unit.reduce_bytes)} in one piece.",
            ("Call fully_shard on its parts, each with the norm that feeds it.",),
        )


def _full_precision(evidence: Evidence) -> Iterator[Finding]:
    """Every unit gathers in float32 on a device that computes in 16 bits twice as fast."""
    manifest = evidence.manifest
    dtypes = {unit.param_dtype for unit in manifest.units}
    if manifest.device_type != "cuda" or dtypes != {"float32"}:
        return
    gathered = sum(unit.unsharded_bytes for unit in manifest.units)
    yield Finding(
        "R14",
        (),
        f"Every unit gathers in float32: {format_bytes(gathered)} a pass.",
        "Told from the units of the run; autocast leaves the gathers as they are.",
        (
            "If the model may compute in 16 bits, gather in them: "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16) halves the messages. "
            "fsdp-inspect advise --allow-dtypes says what that saves.",
        ),
    )


def _frozen(evidence: Evidence) -> Iterator[Finding]:
    """Most parameters are not trained: sharding them saves no gradients, and costs gathers."""
    units = evidence.manifest.units
    total = sum(unit.num_parameters for unit in units)
    trained = sum(unit.num_trainable_parameters for unit in units)
    if not total or not 0 < trained / total < FROZEN_RATIO:
        return
    gathered = sum(unit.unsharded_bytes for unit in units)
    sharded = sum(unit.sharded_bytes for unit in units)
    yield Finding(
        "R29",
        tuple(unit.fqn for unit in units if not unit.num_trainable_parameters),
        f"{format_ratio(1 - trained / total)} of the parameters are frozen, and every pass gathers "
        "them.",
        f"All units gather {format_bytes(gathered)} a pass; a rank holds {format_bytes(sharded)}.",
        (
            f"If a whole copy of {format_bytes(gathered)} fits, leave frozen modules out of "
            "fully_shard, or keep them unsharded (reshard_after_forward=False and "
            "set_reshard_after_backward(False)).",
        ),
    )


def _waste(evidence: Evidence) -> Iterator[Finding]:
    """Full-precision gathers, tied weights, padding: as `fsdp-inspect check` tells them."""
    findings = evidence.plan_check.findings if evidence.plan_check is not None else ()
    by_rule: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for each in findings:
        if not each.is_contradiction:
            by_rule.setdefault(each.rule, []).append((each.fqns, each.sentence))
    for rule, found in by_rule.items():
        units = tuple(fqn for fqns, _ in found for fqn in fqns)
        sentence = found[0][1].rstrip(".")
        if units:
            named = ", ".join(format_unit(fqn) for fqn in units[:_MOST_NAMED])
            more = f" and {len(units) - _MOST_NAMED} more" if len(units) > _MOST_NAMED else ""
            sentence = f"{named}{more}: {sentence}"
        yield Finding(rule, units, f"{sentence}.", "Told from the units of the run.", ())


def _connections(evidence: Evidence) -> Iterator[Finding]:
    manifest = evidence.manifest
    is_one = manifest.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if manifest.device_type != "cuda" or not is_one:
        return
    waited = evidence.exposed_by_kind_ns.get("reduce_scatter", 0)
    yield Finding(
        "R20",
        (),
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: streams share one queue, so reduce-scatter does not run "
        "beside compute.",
        f"Reduce-scatter is exposed for {format_ns(waited)} a step.",
        ("Unset it for FSDP2 (it is meant for tensor parallelism), and record again.",),
        {"exposed_reduce_scatter_ns": waited},
    )


def _fragmentation(evidence: Evidence) -> Iterator[Finding]:
    allocator = evidence.allocator
    ratio = allocator.fragmentation_ratio if allocator is not None else None
    is_said = evidence.verdict.limit is Limit.MEMORY
    if allocator is None or ratio is None or ratio <= FRAGMENTED_RATIO or is_said:
        return
    unused = ratio * allocator.reserved_bytes
    yield Finding(
        "R21",
        (),
        f"{format_bytes(unused)} of the reserved memory ({format_ratio(ratio)}) lay unused at the "
        "peak: it is fragmented.",
        f"Rank {allocator.rank}, step {allocator.step}: {format_bytes(allocator.reserved_bytes)} "
        f"reserved, {format_bytes(allocator.active_bytes)} in use; "
        f"{allocator.num_alloc_retries or 0} allocation retries.",
        ("Set PYTORCH_ALLOC_CONF=expandable_segments:True.",),
        {"fragmentation_ratio": ratio},
    )


def _offload(evidence: Evidence) -> Iterator[Finding]:
    planned = evidence.manifest.plan.get("units", ())
    units = tuple(", ".join(unit["modules"]) for unit in planned if unit.get("offload") == "cpu")
    if units and evidence.manifest.device_type == "cuda":
        yield Finding(
            "R26",
            units,
            f"{len(units)} units are offloaded to pageable CPU memory: copies to the device are "
            "slow and hold the host.",
            "Told from the recorded plan.",
            ('Pin it: CPUOffloadPolicy(pin_memory=True), or offload = "cpu_pinned" in the plan.',),
        )
