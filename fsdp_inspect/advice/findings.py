"""Collect the findings of a run: problems that no sharding plan can fix.

The order is: the limit of the step, problems in the trace (`advice.trace_findings`), costly
settings (`advice.setting_findings`), another sharder. The findings
take their numbers from the analyses and measure nothing. The cost of a finding is the number of an
analysis. Its effect is a bound, and no time is counted twice ([Note: no ms twice] in
`advice.gain_parts`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fsdp_inspect.advice.code_change import title_of_framework
from fsdp_inspect.advice.evidence import AND_HOST_WORK, Effect, Evidence, Finding, TraceRow
from fsdp_inspect.advice.setting_findings import find_costly_settings, write_sharding
from fsdp_inspect.advice.trace_findings import find_in_trace
from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.analysis.memory.sharding_worth import (
    FITS_RATIO,
    ReplicationSaving,
    WholeMemory,
    describe_replication_saving,
)
from fsdp_inspect.analysis.verdict import BY_SIMULATION, STRAGGLER_RATIO, Limit
from fsdp_inspect.analysis.verdict.facts import (
    BETWEEN_RATIO,
    COLLECTION_RATIO,
    HOST_RATIO,
    INPUT_RATIO,
)
from fsdp_inspect.analysis.verdict.words import describe_extra_between
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.comparison.noise import WORTH_NAMING_RATIO
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio
from fsdp_inspect.trace.sharders import DDP, DEEPSPEED, FSDP1, SIMPLE_FSDP, traits_of

_RULES = {
    Limit.STRAGGLER: "R32",
    Limit.SLOW_GROUP: "R32",
    Limit.RARE_WORK: "R32",
    Limit.HOST: "R19",
    Limit.MEMORY: "R21",
    Limit.BACKWARD_ORDER: "R11",
}
_BEFORE_COMMUNICATION = (
    Limit.MEMORY,
    Limit.MEMORY_CREEP,
    Limit.CORES,
    Limit.STRAGGLER,
    Limit.SLOW_GROUP,
    Limit.HOST,
    Limit.INPUT,
    Limit.COLLECTION,
    Limit.HOST_STOP,
    Limit.BETWEEN,
    Limit.RARE_WORK,
    Limit.BACKWARD_ORDER,
    Limit.OTHER,
)
_OF_COMMUNICATION = (
    Limit.COMMUNICATION,
    Limit.FIRST_GATHER,
    Limit.ROOT_GATHER,
    Limit.LATENCY,
)
_LATE = (Limit.STRAGGLER, Limit.SLOW_GROUP)
_COSTS = {
    Limit.STRAGGLER: "straggler_cost_ns",
    Limit.SLOW_GROUP: "slow_group_cost_ns",
    Limit.HOST: "device_idle_ns",
    Limit.INPUT: "data_ns",
    Limit.COLLECTION: "garbage_collection_ns",
    Limit.HOST_STOP: "host_stop_ns",
    Limit.BETWEEN: "between_steps_ns",
    Limit.RARE_WORK: "rare_work_ns",
    Limit.BACKWARD_ORDER: "backward_order_ns",
    Limit.COMMUNICATION: "exposed_other_ns",
}
"""The cost of each limit a step: the name of the verdict's number."""


def find_first_things(evidence: Evidence) -> tuple[Finding, ...]:
    """All findings: the limit of the step, then the trace, then the settings."""
    finds = (
        _training,
        _limit,
        _late_ranks,
        _outside,
        _also,
        _broken_plan,
        find_in_trace,
        find_costly_settings,
        find_other_sharders,
    )
    found = (finding for find in finds for finding in find(evidence))
    named = in_words_of(evidence.manifest.sharder, found)
    return tuple(_verifiable(_with_doubt(finding, evidence)) for finding in named)


def _with_doubt(finding: Finding, evidence: Evidence) -> Finding:
    """Lower the least gain that is measured on a machine without free cores, and state it."""
    effect, step_ns = finding.effect, evidence.step_time_ns or 0
    doubt = evidence.trust.gain_caveat(step_ns)
    if doubt is None or not effect.saved_low_ns:
        return finding
    least_ns = max(effect.saved_low_ns - round(evidence.trust.busy_ns(step_ns)), 0)
    effect = replace(effect, sentence=f"{effect.sentence} {doubt}", saved_low_ns=least_ns)
    return replace(finding, effect=effect)


def _verifiable(finding: Finding) -> Finding:
    """Add a way to check the fix, unless the finding has one."""
    if finding.verify:
        return finding
    return replace(finding, verify="Record again, then: fsdp-inspect compare RUN NEW_RUN")


def _training(evidence: Evidence) -> Iterator[Finding]:
    """A mistake of the training itself, before anything about its speed."""
    verdict = evidence.training
    if verdict is not None:
        yield Finding(
            "",
            (),
            verdict.sentence,
            verdict.why_alone,
            verdict.next_steps[:1],
            limits=True,
            effect=Effect(sentence="No time is saved: it is about what the training learns."),
            verify="Record again, then: fsdp-inspect show NEW_RUN",
        )


def _limit(evidence: Evidence) -> Iterator[Finding]:
    """The limit of the step, unless a simulated plan or faster compute is the answer."""
    verdict = evidence.verdict
    is_communication = verdict.limit in _OF_COMMUNICATION
    is_simulated = evidence.manifest.sharder_traits.is_simulated
    is_ours = is_communication and not (is_simulated or verdict.is_outside_fsdp)
    if verdict.limit in _BEFORE_COMMUNICATION or verdict.is_outside_fsdp or is_ours:
        rule = _RULES.get(verdict.limit, "")
        yield Finding(
            rule,
            (),
            verdict.sentence,
            verdict.why,
            tuple(step for step in verdict.next_steps if step not in BY_SIMULATION),
            dict(verdict.numbers),
            limits=True,
            rows=_rows(evidence, verdict.limit),
            effect=_effect_of_buckets(evidence) if is_ours else _effect(evidence, verdict.limit),
            verify=_VERIFY.get(verdict.limit, ""),
        )


def _effect_of_buckets(evidence: Evidence) -> Effect:
    """The effect of a change of communication, if no plan of the sharder can be simulated."""
    traits = evidence.manifest.sharder_traits
    if not traits.has_buckets:
        return Effect(sentence=f"No gain is predicted. {traits.why_not_simulated}")
    if isinstance(evidence.buckets, str):
        return Effect(sentence=f"No gain is predicted. {evidence.buckets}")
    return Effect(sentence="The change of the buckets has its own prediction.")


def _late_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Most of the exposed time is waiting for late ranks, although no single rank is late."""
    numbers = evidence.verdict.numbers
    late = evidence.causes_ns.get(Cause.STRAGGLER.label, 0)
    exposed = sum(evidence.causes_ns.values())
    if evidence.verdict.limit is not Limit.COMMUNICATION or 2 * late <= exposed:
        return
    step = numbers.get("step_time_ns") or 0
    yield Finding(
        "R32",
        (),
        f"Waiting for late ranks takes {format_ratio(late / step)} of the step.",
        f"{format_ns(late)} of {format_ns(exposed)} of exposed time is waiting for ranks that "
        f"arrive late at a collective. No single rank or group is known "
        f"to cost {format_ratio(STRAGGLER_RATIO)} of the step.",
        ("Find out when ranks arrive late: fsdp-inspect show RUN ranks.",),
        {"exposed_ns": exposed},
        limits=True,
        rows=_rows(evidence, Limit.STRAGGLER),
        effect=Effect(
            sentence=f"Saves at most {format_ns(late)} a step, all waits for late ranks. A plan "
            "with fewer collectives waits for them less often, not shorter.",
            saved_low_ns=0,
            saved_high_ns=late,
            is_exposed=True,
        ),
        verify=_VERIFY[Limit.STRAGGLER],
    )


def _outside(evidence: Evidence) -> Iterator[Finding]:
    """The script's own collectives, beside those of FSDP. No plan changes them."""
    verdict = evidence.verdict
    exposed = verdict.numbers.get("exposed_other_ns")
    if not verdict.outside or not exposed:
        return
    sentence, remedy = verdict.outside
    yield Finding(
        "",
        (),
        sentence,
        "FSDP did not issue these collectives, so no sharding plan changes them.",
        (remedy,),
        {"exposed_other_ns": exposed},
        effect=Effect(
            sentence=f"Saves up to {format_ns(exposed)} of waits a step{AND_HOST_WORK}",
            saved_low_ns=0,
            saved_high_ns=round(exposed),
        ),
    )


_VERIFY = {
    Limit.STRAGGLER: "Record again, then: fsdp-inspect show NEW_RUN ranks",
    Limit.SLOW_GROUP: "Record again, then: fsdp-inspect show NEW_RUN ranks",
    Limit.RARE_WORK: "Record again, then: fsdp-inspect show NEW_RUN ranks",
    Limit.MEMORY: "Record again, then: fsdp-inspect show NEW_RUN memory",
    Limit.MEMORY_CREEP: "Record again, then: fsdp-inspect show NEW_RUN memory",
}


def _rows(evidence: Evidence, limit: Limit) -> tuple[TraceRow, ...]:
    if limit not in _LATE:
        return ()
    return evidence.rows(lambda wait: bool(wait.causes_ns.get(Cause.STRAGGLER.label)))


def _effect(evidence: Evidence, limit: Limit) -> Effect:
    """The effect of the limit's cost; unknown for memory and unrecorded parts."""
    name = _COSTS.get(limit)
    cost = evidence.verdict.numbers.get(name) if name else None
    if cost is None:
        return Effect(sentence="No gain is predicted: the recorded data does not show the saving.")
    balanced = evidence.verdict.numbers.get("balanced_ns")
    between = evidence.verdict.numbers.get("late_between_ns") or 0
    sentence = f"Saves at most {format_ns(cost)} a step."
    if limit in (Limit.COLLECTION, Limit.HOST_STOP, Limit.RARE_WORK):
        sentence = f"Saves at most {format_ns(cost)} a step on average."
    if limit is Limit.COMMUNICATION:  # of the script: the fix removes calls
        sentence = f"Saves up to {format_ns(cost)} of waits a step{AND_HOST_WORK}"
    if limit in _LATE:  # an estimate, and no bound
        saves = f"Saves about {format_ns(cost)} a step, estimated from the extra work in the steps."
        sentence = " ".join([saves, *describe_extra_between(between)])
    if limit is Limit.STRAGGLER and balanced is not None:
        sentence = (
            f"Equal batches save about {format_ns(balanced)} a step: all ranks then process the "
            f"mean. The whole cost of the straggler is {format_ns(cost)}."
        )
    return Effect(
        sentence=sentence,
        saved_low_ns=0,
        saved_high_ns=round(cost + between * (limit in _LATE)),
        is_exposed=limit in _LATE,  # other communication is no gain of a plan
    )


def _also(evidence: Evidence) -> Iterator[Finding]:
    """Further costs above their thresholds, other than the limit."""
    numbers = evidence.verdict.numbers
    step = numbers.get("step_time_ns") or 0
    known = (
        (Limit.STRAGGLER, STRAGGLER_RATIO, "Waiting for the straggler takes",
         "Find the straggler: fsdp-inspect show RUN ranks."),
        (Limit.SLOW_GROUP, STRAGGLER_RATIO, "Waiting for a slow group of ranks takes",
         "Find the group: fsdp-inspect show RUN ranks."),
        (Limit.HOST, HOST_RATIO, "The device is host-bound for",
         "Reduce the host's work: torch.compile, a larger microbatch, or fewer units."),
        (Limit.INPUT, INPUT_RATIO, "Waiting for the next batch takes",
         "Load batches ahead of the step: more loader workers, prefetching or pinned memory."),
        (Limit.COLLECTION, COLLECTION_RATIO, "Python's garbage collection takes",
         evidence.verdict.collect_less),
        (Limit.RARE_WORK, STRAGGLER_RATIO,
         f"Rank {numbers.get('rare_work_rank')} works longer in some steps, on average for",
         f"Find out why rank {numbers.get('rare_work_rank')} works longer in some steps: "
         "fsdp-inspect show RUN ranks."),
        (Limit.BETWEEN, BETWEEN_RATIO,
         "Checkpoints, evaluation or generation before each step take",
         "Save or evaluate less often, or in the background "
         "(torch.distributed.checkpoint.async_save)."),
    )  # fmt: skip
    for limit, least, words, do in known:
        name = _COSTS[limit]
        cost = numbers.get(name) or 0
        if limit is evidence.verdict.limit or not step or cost / step < least:
            continue
        share = f"{format_ns(cost)} of a {format_ns(step)} step ({format_ratio(cost / step)})"
        yield Finding(
            _RULES.get(limit, ""),
            (),
            f"{words} {share}.",
            "",
            (do,),
            {name: cost},
            rows=_rows(evidence, limit),
            effect=_effect(evidence, limit),
            verify=_VERIFY.get(limit, ""),
        )


def _broken_plan(evidence: Evidence) -> Iterator[Finding]:
    check = evidence.plan_check
    if check is not None and check.is_consistent is False:
        contradictions = tuple(each for each in check.findings if each.is_contradiction)
        yield Finding(
            next((each.rule for each in contradictions if each.rule), ""),
            tuple(dict.fromkeys(fqn for each in contradictions for fqn in each.fqns)),
            check.sentence,
            f"Counted on rank {check.rank} over {len(check.steps)} timed steps.",
            (
                "Find the reason before you change the plan: the predictions assume that the run "
                "follows its plan.",
            ),
            limits=True,
            effect=Effect(
                sentence="No gain is predicted: the run did not follow the declared plan."
            ),
        )


# --- Word the remedies of findings in the settings of the run's sharder.
#
# The rules name settings of FSDP2. For another sharder, a finding keeps its evidence and names that
# sharder's own setting. A finding without a counterpart is left out: it would be advice that cannot
# be followed.


@dataclass(frozen=True, slots=True)
class SharderRemedy:
    """The remedy for a rule under one sharder."""

    steps: tuple[str, ...]
    snippet: str = ""


_FSDP1_REMEDIES: dict[str, SharderRemedy | None] = {
    "R1": SharderRemedy(
        ("Wrap every transformer block with an auto-wrap policy.",),
        "FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), ...)",
    ),
    "R3": SharderRemedy(("Wrap its parts too, each with the norm that feeds it.",)),
    "R11": None,  # FSDP1 has no lists of units to prefetch
    "R14": SharderRemedy(
        (
            "If the model may compute in 16 bits, gather in 16 bits: "
            "MixedPrecision(param_dtype=torch.bfloat16) halves the messages.",
        ),
        "precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        "FullyShardedDataParallel(model, mixed_precision=precision, ...)",
    ),
    "R20": SharderRemedy(("Unset the variable (it serves tensor parallelism), and record again.",)),
    "R26": None,  # the recorder observes no pinning of FSDP1, which always pins
    "R27": None,  # FSDP1 requires tied weights to be in one unit
    "R29": SharderRemedy(
        (
            "If a full copy of the frozen modules fits, leave them out with ignored_states, or "
            "keep them gathered until backward (ShardingStrategy.SHARD_GRAD_OP).",
        ),
        "FullyShardedDataParallel(model, ignored_states=frozen_modules, ...)",
    ),
    "R30": None,  # FSDP1 pads a unit as a whole: less than one element per rank
}
_OTHER_REMEDIES = {
    rule: remedy if rule == "R20" else None for rule, remedy in _FSDP1_REMEDIES.items()
}
_OTHERS = (DDP, *sorted(DEEPSPEED), SIMPLE_FSDP)
_REMEDIES = {FSDP1: _FSDP1_REMEDIES, **dict.fromkeys(_OTHERS, _OTHER_REMEDIES)}
"""Remedies by sharder, then by rule; None: the finding does not apply. Other rules concern no
setting of a sharder."""


def in_words_of(sharder: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings that apply to a sharder, with its own remedies."""
    remedies = _REMEDIES.get(sharder, {})
    for finding in findings:
        if finding.rule not in remedies:
            yield finding
            continue
        remedy = remedies[finding.rule]
        if remedy is not None:
            # Without simulated plans, no plan contains the change.
            is_simulated = traits_of(sharder).is_simulated
            effect = finding.effect if is_simulated else replace(finding.effect, predicted_by="")
            yield replace(finding, do=remedy.steps, snippet=remedy.snippet, effect=effect)


# --- Find runs that would be better off with another sharder: DDP instead of FSDP, or the reverse.
#
# R35 applies to a sharded run whose model, gradients, optimizer state and activations fit one
# device, and to which DDP would save time. A DDP run states what FSDP would save of its memory.
# Both numbers are inferred (`analysis.memory.sharding_worth`).

_MEMORY_LIMITS = (Limit.MEMORY, Limit.MEMORY_CREEP)


def find_other_sharders(evidence: Evidence) -> Iterator[Finding]:
    """DDP for a model that fits one device; FSDP for the memory of a DDP run."""
    memory, saving = evidence.whole_memory, evidence.replication
    if memory is None:
        return
    if memory.is_sharded:
        yield from _replicate(evidence, memory, saving)
    else:
        yield from _shard(evidence, memory)


def _replicate(
    evidence: Evidence, memory: WholeMemory, saving: ReplicationSaving | None
) -> Iterator[Finding]:
    is_short_of_memory = evidence.verdict.limit in _MEMORY_LIMITS
    is_certain = memory.verdict is FitVerdict.FITS
    if not is_certain or is_short_of_memory or saving is None:
        return
    assert memory.total_bytes is not None
    if saving.high_ns is None:
        yield from _unknown_saving(evidence, memory, saving)
        return
    assert saving.low_ns is not None
    assert saving.all_reduce_ns is not None
    if saving.high_ns <= 0 or not evidence.is_worth_naming(saving.high_ns):
        return
    added = memory.total_bytes - (evidence.peak_bytes or memory.total_bytes)
    frameworks = evidence.manifest.code.frameworks
    train, snippet = "Train with DistributedDataParallel", ""
    if frameworks:
        train += f": switch FSDP off in the settings of {title_of_framework(frameworks[-1])}"
    else:
        snippet = "model = DistributedDataParallel(model, gradient_as_bucket_view=True)"
    yield Finding(
        "R35",
        (),
        f"Sharding is not needed for memory: {memory.sentence.removesuffix('.')}.",
        f"{memory.parts}. FSDP's collectives are exposed for {format_ns(saving.exposed_ns)} a "
        f"step; one all-reduce of the gradients takes {format_ns(saving.all_reduce_ns)}, inferred "
        "from the fitted link.",
        (f"{train}. Then compare the two runs.",),
        {"exposed_ns": saving.exposed_ns},
        effect=Effect(
            sentence=describe_replication_saving(saving),
            saved_low_ns=max(saving.low_ns, 0),
            saved_high_ns=saving.high_ns,
            added_low_bytes=max(added, 0),
            added_high_bytes=max(added, 0),
            is_exposed=True,
        ),
        assumptions=(
            "DDP uses gradient_as_bucket_view=True and the dtype of the weights.",
            "Waits for late ranks do not count, because DDP has them too.",
            "At best backward hides all buckets of the gradients but the last one, at worst none.",
            f"At most {format_ratio(FITS_RATIO)} of the device is used.",
        ),
        snippet=snippet,
    )


def _unknown_saving(
    evidence: Evidence, memory: WholeMemory, saving: ReplicationSaving
) -> Iterator[Finding]:
    """The model fits one device, but the time of DDP's all-reduce is unknown."""
    if evidence.is_worth_naming(saving.exposed_ns):
        yield Finding(
            "R35",
            (),
            f"Sharding is not needed for memory: {memory.sentence.removesuffix('.')}.",
            f"{memory.parts}. FSDP's collectives are exposed for {format_ns(saving.exposed_ns)} a "
            "step.",
            ("Record the same training with DistributedDataParallel, and compare the two runs.",),
            {},
            effect=Effect(sentence=describe_replication_saving(saving)),
        )


def _shard(evidence: Evidence, memory: WholeMemory) -> Iterator[Finding]:
    freed, peak = memory.freed_bytes, evidence.peak_bytes
    if freed is None or not peak or freed < WORTH_NAMING_RATIO * peak:
        return
    yield Finding(
        "R35",
        (),
        f"Sharding would free at most {format_bytes(freed)} on each rank.",
        f"{memory.parts}. FSDP divides parameters, gradients and optimizer state by "
        f"{memory.num_ranks}{', and has no buckets' if memory.bucket_bytes else ''}.",
        (
            "If memory limits the batch or the model, shard it with fully_shard instead of "
            "DistributedDataParallel. Where a framework wraps the model (Transformers, Accelerate, "
            "Lightning), use its settings for FSDP, not this code.",
        ),
        effect=Effect(
            sentence=memory.sentence,
            added_low_bytes=-freed,
            added_high_bytes=0,
        ),
        assumptions=("The gathered units and their buffers take a part of the saving.",),
        snippet=write_sharding(evidence.manifest),
    )
