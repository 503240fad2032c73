"""What should be looked at before the plan? Stragglers, a slow host or input, settings that cost.

Nothing is measured here: what the analyses found is turned into findings, the limit of the step
first, then what the run's own traffic shows (`advice.trace_findings`), then what its settings cost
(`advice.setting_findings`). What a finding names as a cost is the analysis' own number; what it
says of the effect of mending it are bounds, never claimed twice ([Note: no ms twice] in
`advice.gain_attribution`).
"""

from collections.abc import Iterator
from dataclasses import replace

from fsdp_inspect.advice.evidence import Effect, Evidence, Finding, TraceRow
from fsdp_inspect.advice.setting_findings import find_costly_settings
from fsdp_inspect.advice.trace_findings import find_in_trace
from fsdp_inspect.analysis.verdict import STRAGGLER_RATIO, Limit
from fsdp_inspect.analysis.verdict.limits import HOST_RATIO, INPUT_RATIO
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import format_ns, format_ratio

_RULES = {Limit.STRAGGLER: "R32", Limit.HOST: "R19", Limit.MEMORY: "R21"}
_BEFORE_COMMUNICATION = (
    Limit.MEMORY,
    Limit.MEMORY_CREEP,
    Limit.STRAGGLER,
    Limit.HOST,
    Limit.INPUT,
    Limit.OTHER,
)
_COSTS = {
    Limit.STRAGGLER: "straggler_cost_ns",
    Limit.HOST: "host_bound_ns",
    Limit.INPUT: "data_ns",
}
"""What each limit costs a step, as the verdict names it."""


def find_first_things(evidence: Evidence) -> tuple[Finding, ...]:
    """What comes before advice on the plan: the limit of the step, then what settings cost."""
    finds = (_limit, _also, _broken_plan, find_in_trace, find_costly_settings)
    return tuple(_verifiable(finding) for find in finds for finding in find(evidence))


def _verifiable(finding: Finding) -> Finding:
    """How to see what came of it, where it does not say so itself."""
    if finding.verify:
        return finding
    return replace(finding, verify="Record again, then: fsdp-inspect compare RUN NEW_RUN")


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
            rows=_rows(evidence, verdict.limit),
            effect=_effect(evidence, verdict.limit),
            verify=_VERIFY.get(verdict.limit, ""),
        )


_VERIFY = {
    Limit.STRAGGLER: "Record again, then: fsdp-inspect ranks NEW_RUN",
    Limit.MEMORY: "Record again, then: fsdp-inspect memory NEW_RUN",
    Limit.MEMORY_CREEP: "Record again, then: fsdp-inspect memory NEW_RUN",
}


def _rows(evidence: Evidence, limit: Limit) -> tuple[TraceRow, ...]:
    if limit is not Limit.STRAGGLER:
        return ()
    return evidence.rows(lambda wait: bool(wait.causes_ns.get(Cause.STRAGGLER.label)))


def _effect(evidence: Evidence, limit: Limit) -> Effect:
    """At most what it costs; of memory and unrecorded parts nothing can be said."""
    name = _COSTS.get(limit)
    cost = evidence.verdict.numbers.get(name) if name else None
    if cost is None:
        return Effect(
            sentence="None is predicted: nothing that was recorded tells what mending it saves."
        )
    return Effect(
        sentence=f"Saves between nothing and {format_ns(cost)} a step, which is all that it costs.",
        saved_low_ns=0,
        saved_high_ns=round(cost),
        is_exposed=limit is Limit.STRAGGLER,
    )


def _also(evidence: Evidence) -> Iterator[Finding]:
    """What is above its threshold too, beside the limit."""
    numbers = evidence.verdict.numbers
    step = numbers.get("step_time_ns") or 0
    known = (
        (Limit.STRAGGLER, STRAGGLER_RATIO, "One late rank costs",
         "See who it is: fsdp-inspect ranks RUN."),
        (Limit.HOST, HOST_RATIO, "The device starves for",
         "Give the host less to issue: torch.compile, a larger microbatch, fewer units."),
        (Limit.INPUT, INPUT_RATIO, "Waiting for the next batch takes",
         "Load batches ahead of the step: more loader workers, prefetching, pinned memory."),
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
            f"Counted on rank {check.rank} in {len(check.steps)} timed steps.",
            (
                "Find out why before changing the plan: predictions below assume that a plan is "
                "kept.",
            ),
            limits=True,
            effect=Effect(sentence="None is predicted: the plan that was declared never ran."),
        )
