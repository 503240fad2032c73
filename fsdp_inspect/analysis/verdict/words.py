"""How does a limit read: the sentence with its number, why, and what to try next?"""

from collections.abc import Callable

from fsdp_inspect.analysis.verdict.facts import StepFacts, StragglerFacts
from fsdp_inspect.analysis.verdict.limits import Limit
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, format_unit
from fsdp_inspect.metrics import find_metric

FRAGMENTED_RATIO = 0.10
"""Reserved but not in use at the peak, as a share of reserved, from which R21 applies."""
WORTH_NAMING_RATIO = 0.02
"""Nothing below this share of the step is advised."""

Words = tuple[str, str, tuple[str, ...]]
"""The sentence, why, what to try next."""

_PHASES_BY_NAME = frozenset({"forward", "backward"})
"""Phases that place a wait; the others say nothing about it."""


def phrase_limit(limit: Limit, facts: StepFacts) -> Words:
    """The words for a limit; a run that contradicts its plan is told so before anything else."""
    sentence, why, next_steps = _WORDS[limit](facts)
    if facts.contradiction:
        first = f"First find out why the run does not do what its plan says: {facts.contradiction}"
        next_steps = (first, *next_steps)
    return sentence, why, next_steps


def _share(facts: StepFacts, duration_ns: int) -> str:
    return (
        f"{format_ns(duration_ns)} of the typical {format_ns(facts.step_time_ns)} step "
        f"({format_ratio(facts.ratio(duration_ns))})"
    )


def _plan(facts: StepFacts) -> str:
    return "the sharding plan" if facts.has_gathers else "the distributed setup"


def _say_memory(facts: StepFacts) -> Words:
    reserved, allocated = facts.peak_reserved_bytes or 0, facts.peak_allocated_bytes or 0
    steps = ["Recompute activations (activation checkpointing), or halve the microbatch."]
    if facts.has_gathers:
        steps.append("Let every block reshard after forward, if some do not.")
    unused = _unused_ratio(facts)
    if unused > FRAGMENTED_RATIO:
        amount = format_bytes(unused * reserved)
        steps.insert(
            0,
            f"Set PYTORCH_ALLOC_CONF=expandable_segments:True: {amount} is reserved but was not "
            "allocated at the peak.",
        )
    why = f"The peak of what tensors hold is {format_bytes(allocated)}; "
    if facts.num_alloc_retries:
        why += f"the allocator had to free its cache {facts.num_alloc_retries} times; "
    return (
        f"Memory is close to the limit: {format_bytes(reserved)} reserved of "
        f"{format_bytes(facts.device_bytes)} ({format_ratio(facts.device_ratio)}).",
        f"{why}the next larger batch or longer sequence ends in out of memory.",
        tuple(steps),
    )


def _unused_ratio(facts: StepFacts) -> float:
    """What is reserved and in no use at the peak: as counted, else from the two peaks."""
    if facts.fragmentation_ratio is not None:
        return facts.fragmentation_ratio
    reserved, allocated = facts.peak_reserved_bytes or 0, facts.peak_allocated_bytes or 0
    return (reserved - allocated) / reserved if reserved else 0.0


def _say_creep(facts: StepFacts) -> Words:
    growth = facts.growth
    assert growth is not None
    full = (
        ""
        if growth.steps_until_full is None
        else f", and fills the device in {growth.steps_until_full} steps at the latest"
    )
    return (
        f"Memory creeps up: rank {growth.rank} holds {format_bytes(growth.bytes_per_step)} more "
        f"after each step{full}.",
        "A step should leave as much allocated as it found; a steady rise is something that is "
        "kept from step to step.",
        (
            "Look for tensors that outlive their step: a loss added up with its graph (take "
            ".item() or .detach()), outputs in a list, a cache without a bound.",
            "See what grows: fsdp-inspect memory RUN.",
        ),
    )


def _say_input(facts: StepFacts) -> Words:
    return (
        f"The step is input-bound: it waits {_share(facts, facts.data_ns)} for the next batch.",
        "The training loop asks for a batch that is not ready.",
        (
            "Load batches ahead of the step: more loader workers, prefetching, pinned memory.",
            f"Leave {_plan(facts)} as it is until the input keeps up.",
        ),
    )


def _say_host(facts: StepFacts) -> Words:
    why = "The compute stream is idle because the host has not issued the next work."
    if facts.is_kernel_trace:
        why = (
            "No kernel and no collective runs on the device. The trace does not tell what the "
            "host was doing: a wait for the next batch is part of it."
        )
    fewer_units = ", fewer and larger units" if facts.has_gathers else ""
    steps = [
        "Give the host less to issue per unit of work: torch.compile, a larger "
        f"microbatch{fewer_units}.",
        "Remove synchronisations in the step (.item(), printing a loss, .cpu()).",
    ]
    if facts.has_gathers:
        steps.append("Prefetch one unit ahead in forward, so that all-gathers are issued earlier.")
    sentence = (
        f"The step is host-bound: the device starves for {_share(facts, facts.host_bound_ns)}."
    )
    return sentence, why, tuple(steps)


def _say_straggler(facts: StepFacts) -> Words:
    straggler = facts.straggler
    assert straggler is not None
    phase = f" in {straggler.phase}" if straggler.phase in _PHASES_BY_NAME else ""
    late = (
        f"It arrives last at {format_ratio(straggler.last_ratio)} of the collectives, latest"
        f"{phase}, by {format_ns(straggler.late_ns)}."
    )
    meanwhile = say_meanwhile(straggler)
    if meanwhile:
        late += f" What takes it longest against the others is {meanwhile}."
    host = f" (host {straggler.host})" if straggler.host else ""
    return (
        f"Rank {straggler.rank} is a straggler: it costs {_share(facts, straggler.cost_ns)}.",
        late,
        (
            f"Find out what is different on rank {straggler.rank}{host}: clocks, heat, another "
            "job, a slower link, more work in its batches. fsdp-inspect ranks RUN has the numbers.",
            "Leave communication as it is until then: these waits are not transfers.",
        ),
    )


def say_meanwhile(straggler: StragglerFacts) -> str:
    """`backward, 3.86 s more a step`: what a straggler does longer; empty if nothing."""
    if straggler.meanwhile_ns <= 0:
        return ""
    part = find_metric(f"{straggler.meanwhile}_ns").label
    return f"{part}, {format_ns(straggler.meanwhile_ns)} more a step"


def _say_communication(facts: StepFacts) -> Words:
    causes = "" if facts.blocks_host else _say_causes(facts)
    why = [_say_kinds(facts), causes, _say_longest(facts)]
    if facts.blocks_host:
        why.append(
            f"All-gathers and reduce-scatters block the host by default on {facts.backend}, so "
            "they are exposed whatever the plan: a property of the backend."
        )
    elif facts.floor_ns and not facts.causes_ns and not facts.is_unwrapped:
        why.append(
            f"{format_ns(facts.floor_ns)} of the exposed time is the floor, which no setting hides."
        )
    return (
        f"Communication is exposed for {_share(facts, facts.exposed_ns)}.",
        " ".join(sentence for sentence in why if sentence),
        tuple(_advise_communication(facts)),
    )


def _say_kinds(facts: StepFacts) -> str:
    """`All-gather 92.0 ms, reduce-scatter 79.1 ms.`, longest first."""
    exposed = sorted(facts.exposed_by_kind_ns.items(), key=lambda kind: -kind[1])
    other = "not FSDP" if facts.knows_fsdp else "other collectives"
    named = [
        f"{other if kind == 'other' else kind.replace('_', '-')} {format_ns(duration)}"
        for kind, duration in exposed
        if duration > 0
    ]
    listed = ", ".join(named)
    return f"{listed[0].upper()}{listed[1:]}." if named else ""


def _say_causes(facts: StepFacts) -> str:
    """`By cause: late issue 38.0 ms, bandwidth 12.1 ms.`; they add up to the exposed time."""
    named = [
        f"{cause.replace('_', ' ')} {format_ns(duration)}"
        for cause, duration in facts.causes_ns.items()
        if duration
    ]
    if not named:
        return ""
    has_floor = facts.causes_ns.get(Cause.FLOOR.label) and not facts.is_unwrapped
    meaning = " No setting hides the floor." if has_floor else ""
    return f"By cause: {', '.join(named)}.{meaning}"


def _say_longest(facts: StepFacts) -> str:
    if facts.top is None:
        return ""
    nobody = " that FSDP did not issue" if facts.knows_fsdp else ""
    owner = nobody if facts.top.fqn is None else f" of {format_unit(facts.top.fqn)}"
    kind = facts.top.kind.replace("_", "-")
    place = f" in {facts.top.phase}" if facts.top.phase in _PHASES_BY_NAME else ""
    lead = "Beyond the floor, the" if facts.floor_ns and not facts.blocks_host else "The"
    waited = format_ns(facts.top.exposed_ns)
    return f"{lead} longest wait, {waited}, is for the {kind}{owner}{place}."


def _advise_communication(facts: StepFacts) -> list[str]:
    steps = []
    if facts.is_unwrapped and facts.has_gathers:
        steps.append(
            "Call fully_shard on every transformer block, not on the whole model only: one big "
            "unit has no compute to hide behind."
        )
    if facts.ratio(facts.backward_gathers_ns) >= WORTH_NAMING_RATIO:
        steps.append(
            "Try reshard_after_forward=False if memory allows: the backward gathers again, "
            f"exposed for {format_ns(facts.backward_gathers_ns)}."
        )
    if facts.ratio(facts.causes_ns.get(Cause.SERIALIZED.label, 0)) >= WORTH_NAMING_RATIO:
        steps.append(
            "Give reduce-scatter a communicator of its own (set_separate_reduce_scatter_group): "
            "collectives stand in one queue, exposed for "
            f"{format_ns(facts.causes_ns[Cause.SERIALIZED.label])}."
        )
    steps += _advise_longest(facts)
    return steps or ["Look at the most exposed collective first: fsdp-inspect exposed RUN."]


def _advise_longest(facts: StepFacts) -> list[str]:
    if facts.blocks_host:
        return ["Judge overlap and prefetch on GPUs: there a collective blocks a stream only."]
    if facts.top is None:
        return []
    is_late = (
        not facts.causes_ns
        or facts.ratio(facts.causes_ns.get(Cause.LATE_ISSUE.label, 0)) >= WORTH_NAMING_RATIO
    )
    if facts.top.kind == "all_gather" and is_late:
        return ["Prefetch one unit ahead, so that the all-gather is issued earlier."]
    if facts.top.kind == "reduce_scatter" and facts.reduces_in_float32:
        return [
            "Reduce gradients in bfloat16 (MixedPrecisionPolicy(reduce_dtype)): half the bytes; "
            "check that the loss still falls."
        ]
    return []


def _say_other(facts: StepFacts) -> Words:
    return (
        f"Most of the rest of the step is not FSDP's: {_share(facts, facts.other_ns)} lies "
        "outside every recorded part.",
        "Neither forward, backward, optimizer, data nor communication was running: the loss, "
        "logging, metrics or other code of the training loop.",
        (f"Profile the training loop itself, before {_plan(facts)}.",),
    )


def _say_compute(facts: StepFacts) -> Words:
    what = (
        "kernels compute for" if facts.is_kernel_trace else ("forward, backward and optimizer take")
    )
    return (
        f"The step is compute-bound: {what} {_share(facts, facts.compute_ns)}.",
        f"Communication is exposed for {_share(facts, facts.exposed_ns)}, of which "
        f"{format_ns(facts.floor_ns)} is the floor, which no setting hides.",
        (
            f"Change nothing in {_plan(facts)}.",
            "Faster compute is what is left: torch.compile, bfloat16, less recomputation.",
        ),
    )


_WORDS: dict[Limit, Callable[[StepFacts], Words]] = {
    Limit.MEMORY: _say_memory,
    Limit.MEMORY_CREEP: _say_creep,
    Limit.INPUT: _say_input,
    Limit.HOST: _say_host,
    Limit.STRAGGLER: _say_straggler,
    Limit.COMMUNICATION: _say_communication,
    Limit.OTHER: _say_other,
    Limit.COMPUTE: _say_compute,
}
