"""Phrase a limit: a headline with one number, the reason, and the changes to try next.

A headline has at most 12 words. The details are in the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from fsdp_inspect.analysis.host_stops import HostStopCost
from fsdp_inspect.analysis.kernels import Kernels
from fsdp_inspect.analysis.memory.growth import MemoryGrowth
from fsdp_inspect.analysis.verdict.facts import (
    COMMUNICATION_RATIO,
    LEAST_IDLE_RATIO,
    OF_WAITS,
    PHASES_BY_NAME,
    STRAGGLER_RATIO,
    Limit,
    OtherPart,
    SlowGroup,
    StepFacts,
    Straggler,
    find_cost_beside,
)
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import (
    capitalize,
    format_bytes,
    format_category,
    format_cause,
    format_count,
    format_ns,
    format_ranks,
    format_ratio,
    format_unit,
    listed,
    phrase_cause,
    plural,
)
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.store.reduction.order_wording import shorten_place
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.host_work import (
    BOOLEAN_MASK,
    COLLECTION,
    COMPILATION,
    DEVICE_ALLOCATION,
    GRAPH_CAPTURE,
    KERNEL_LOADING,
    PAGEABLE_COPY,
    PRINTED,
)

FRAGMENTED_RATIO = 0.10
"""R21 applies if more than this fraction of reserved memory is unused at the peak."""
FUSABLE_RATIO = 0.05
"""Fused kernels are advised if they save this fraction of the step."""
GOOD_PEAK_RATIO = 0.50
"""Published trainings seldom reach more of the peak (docs/planning_accuracy.md)."""
WORTH_NAMING_RATIO = 0.02
"""Changes that affect a smaller fraction of the step are not advised."""

COMPARE_PLANS = "Compare other sharding plans by simulation: `fsdp-inspect advise RUN`."
"""The only next step about the plan of a recorded run. The simulation decides which change of the
plan helps. The verdict names no change, so it cannot contradict the simulation."""
COMPARE_BUCKETS = "Compare other sizes of the buckets by simulation: `fsdp-inspect advise RUN`."
BY_SIMULATION = (COMPARE_PLANS, COMPARE_BUCKETS)
"""The next steps that `advise` itself takes."""
NOT_TRAINING = (
    "The trace shows no backward pass and no optimizer step, so no advice about training applies. "
    "Profile a training step for advice."
)
"""The only next step about a trace of inference."""
FIND_CALL = "Find its call{}: `fsdp-inspect show RUN exposed` shows its kind and phase."
"""What to do about a collective whose line is unknown, with the calls that often issue one."""
_CALLS_OF = {
    "all_gather": " (full_tensor(), a metric)",
    "all_reduce": " (a norm, a metric)",
}

FEWER_CALLS = (
    "Issue such collectives less often, or in fewer and larger messages. Compute norms with the "
    "local shards, as torch's clip_grad_norm_ does."
)

NOT_TRANSFERS = "No change of communication shortens the waits for a late rank."

Words = tuple[str, str, str, tuple[str, ...]]
"""The headline, the main reason in one short sentence, the complete reason, the changes to try
next."""


def phrase_limit(limit: Limit, facts: StepFacts) -> Words:
    """Phrase a limit. The first next step is a contradiction between run and plan, if any."""
    sentence, because, why, next_steps = _WORDS[limit](facts)
    if facts.lacks_training:
        return sentence, because, why, (NOT_TRAINING,)
    if facts.contradiction and limit is not Limit.BACKWARD_ORDER:
        first = f"First find out why the plan check fails. {facts.contradiction}"
        next_steps = (first, *next_steps)
    if beside := find_cost_beside(facts, limit):
        also, *_, remedies = _WORDS[beside](facts)
        last = [each for each in next_steps if each == _MEASURE_ON_GPUS]
        rest = [each for each in next_steps if each not in last]
        next_steps = (*rest, f"{also} {remedies[0]}", *last)
    return sentence, because, why, next_steps


def phrase_largest_part(limit: Limit, facts: StepFacts) -> str:
    """State that compute takes more of the step than the waits of the headline; else empty."""
    if limit not in OF_WAITS or facts.compute_ns <= facts.exposed_ns:
        return ""
    takes = "Forward, backward and optimizer take" if facts.blocks_host else "Compute takes"
    largest = f"{takes} {_ratio(facts, facts.compute_ns)}."
    if facts.hideable_ns is None:
        return largest
    return f"{largest} Hiding waits saves at most {_ratio(facts, max(facts.hideable_ns, 0))}."


def _ratio(facts: StepFacts, duration_ns: int) -> str:
    return format_ratio(facts.ratio(duration_ns))


def _of_step(facts: StepFacts, duration_ns: int) -> str:
    """`15.0 ms of the typical step of 100.0 ms`."""
    return f"{format_ns(duration_ns)} of the typical step of {format_ns(facts.step_time_ns)}"


def _plan(facts: StepFacts) -> str:
    return "the sharding plan" if facts.has_gathers else "the distributed setup"


def _phrase_memory(facts: StepFacts) -> Words:
    reserved, allocated = facts.peak_reserved_bytes or 0, facts.peak_allocated_bytes or 0
    steps = ["Recompute activations (activation checkpointing), or halve the microbatch."]
    if facts.has_plan:
        steps.append(COMPARE_PLANS)
    elif facts.has_gathers:
        steps.append("Reshard every block after forward, if some blocks stay unsharded.")
    unused = _unused_ratio(facts)
    if unused > FRAGMENTED_RATIO:
        steps.insert(
            0,
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True: "
            f"{format_bytes(unused * reserved)} of reserved memory is unused at the peak.",
        )
    why = [
        f"The allocator reserves {format_bytes(reserved)} of {format_bytes(facts.device_bytes)}; "
        f"tensors hold at most {format_bytes(allocated)}."
    ]
    if facts.num_alloc_retries:
        why.append(f"The allocator emptied its cache {facts.num_alloc_retries} times.")
    why.append("A larger batch or a longer sequence can run out of memory.")
    return (
        f"Memory limits the run: {format_ratio(facts.device_ratio)} of the device is reserved.",
        _phrase_highest(facts),
        " ".join(why),
        tuple(steps),
    )


def _phrase_highest(facts: StepFacts) -> str:
    peak = facts.highest
    if peak is None:
        return f"Tensors hold at most {format_bytes(facts.peak_allocated_bytes or 0)}."
    place = "outside all units" if peak.fqn is None else f"in {format_unit(peak.fqn)}"
    return (
        f"The peak is in {peak.phase}, {place}, on rank {peak.rank}. Its largest part is "
        f"{format_category(peak.category)}: {format_bytes(peak.category_bytes)}."
    )


def _unused_ratio(facts: StepFacts) -> float:
    """Return the unused fraction of reserved memory, as recorded or else from the two peaks."""
    if facts.fragmentation_ratio is not None:
        return facts.fragmentation_ratio
    reserved, allocated = facts.peak_reserved_bytes or 0, facts.peak_allocated_bytes or 0
    return (reserved - allocated) / reserved if reserved else 0.0


def _phrase_growth(facts: StepFacts) -> Words:
    growth = facts.growth
    assert growth is not None
    place = shorten_place(growth.place)
    because = f"Rank {growth.rank} ends each step with more allocated memory than the step before"
    look = (
        "Look for tensors that outlive their step: a loss accumulated with its graph (use "
        ".item() or .detach()), outputs kept in a list, an unbounded cache."
    )
    if place:
        because += f": most of it is allocated at {place}"
        look = (
            f"Stop keeping the tensors of {place} over steps: keep a number (.item()) or a "
            "detached copy, or delete them."
        )
    return (
        f"Memory grows by {format_bytes(growth.growth_bytes_per_step)} per step.",
        f"{because}.",
        f"{because}.{describe_when_full(growth)} Steady growth means that the training loop keeps "
        "tensors from step to step.",
        (
            look,
            "Run `fsdp-inspect show RUN memory` to see the growth.",
        ),
    )


def describe_when_full(growth: MemoryGrowth) -> str:
    """The sentence about the end of growth, with a space before it; empty if it is unknown."""
    left = growth.steps_until_full
    if left is None:
        return ""
    if left == 0:
        return " The memory is full."
    return f" The device is full after at most {plural(left, 'more step')}."


def _phrase_input(facts: StepFacts) -> Words:
    return (
        f"The step is input-bound for {_ratio(facts, facts.data_ns)} of its time.",
        f"The training loop waits {format_ns(facts.data_ns)} for its next batch{_on_rank(facts)}.",
        f"The training loop waits {_of_step(facts, facts.data_ns)} for the next batch.",
        (
            "Load batches before the step needs them: more loader workers, prefetching, pinned "
            "memory.",
            f"Leave {_plan(facts)} as it is until the input keeps up.",
        ),
    )


def _phrase_host(facts: StepFacts) -> Words:
    idle = _of_step(facts, facts.host_bound_ns)
    why = f"The compute stream is idle for {idle}, because the host has not issued work."
    if facts.is_kernel_trace:
        why = (
            f"No kernel and no collective runs for {idle}. The trace does not record what the "
            "host does: this time includes waits for the next batch."
        )
    fewer_units = ", fewer and larger units" if _may_name_plans(facts) else ""
    reads = _name_reads(facts.reads)
    steps = [
        *_name_driver_calls(facts),
        *([reads] if reads else ()),
        "Reduce the host's work relative to the device's: torch.compile, a larger "
        f"microbatch{fewer_units}.",
        *(() if reads else [_ANY_READ]),
        *_name_far_device(facts),
    ]
    if _may_name_plans(facts) and facts.sharder.prefetch_ahead:
        steps.append(
            f"{facts.sharder.prefetch_ahead} in forward, so that the host issues all-gathers "
            "earlier."
        )
    if facts.device_idle_ns > facts.host_bound_ns:
        return (*_phrase_idle_device(facts), tuple(steps))
    if facts.exposed_ns > facts.host_bound_ns:
        why += (
            f" Communication is exposed for {format_ns(facts.exposed_ns)}, which is more. A late "
            "host of any rank makes it longer: make the hosts faster first, and record again."
        )
    sentence = f"The step is host-bound for {_ratio(facts, facts.host_bound_ns)} of its time."
    because = f"The host has not issued work while the compute stream is idle{_on_rank(facts)}."
    if facts.is_kernel_trace:
        because = f"No kernel and no collective runs for {format_ns(facts.host_bound_ns)}."
    return sentence, because, why, tuple(steps)


_ANY_READ = "Remove synchronisations from the step (.item(), printing a loss, .cpu())."


def _name_reads(reads: Sequence[HostStopCost]) -> str:
    """The lines that read values, which make the host wait for the device; empty: unknown."""
    named = [
        f"{stop.what} at {shorten_place(stop.place)} ({_calls(stop)} a step{_idle(stop)})"
        for stop in reads
        if stop.place
    ]
    if not named:
        return ""
    pin = " Pin the batches (pin_memory=True) and copy them with non_blocking=True."
    is_pageable = any(stop.what == PAGEABLE_COPY and stop.place for stop in reads)
    sentence = f"Remove synchronisations from the step: {listed(named[:3], 3)}."
    return sentence + (pin if is_pageable else "")


_DRIVER_REMEDIES = {
    DEVICE_ALLOCATION: "Avoid new memory in the step: PYTORCH_ALLOC_CONF=expandable_segments:True, "
    "or one step with the largest batch first.",
    GRAPH_CAPTURE: "Capture CUDA graphs once: keep shapes and addresses of inputs constant.",
    KERNEL_LOADING: "Run a few steps before the profiled ones, so that kernels are loaded, or set "
    "CUDA_MODULE_LOADING=EAGER.",
}


def _name_driver_calls(facts: StepFacts) -> Iterator[str]:
    """The calls of the driver in which the device is idle for a hundredth of the step."""
    by_kind: dict[str, list[HostStopCost]] = {}
    for stop in facts.driver_calls:
        by_kind.setdefault(stop.what, []).append(stop)
    for what, stops in by_kind.items():
        idle_ns = sum(stop.idle_ns or 0 for stop in stops)
        if idle_ns >= LEAST_IDLE_RATIO * facts.step_time_ns:
            place = f", most at {shorten_place(stops[0].place)}" if stops[0].place else ""
            yield (
                f"{_DRIVER_REMEDIES[what]} The device is idle for {format_ns(idle_ns)} a step "
                f"during such calls{place}."
            )


def _phrase_idle_device(facts: StepFacts) -> tuple[str, str, str]:
    busy, idle = format_ratio(facts.utilisation_ratio), _ratio(facts, facts.device_idle_ns)
    return (
        f"The GPU idles for about {idle} of the step: it is host-bound.",
        f"The GPU runs kernels for {busy} of the time and waits for the host{_on_rank(facts)}.",
        f"{_say_behind(facts)} NVML counts kernels for {busy} of the time (mean reading in the "
        "timed steps), so the GPU is idle for the rest.",
    )


def _say_behind(facts: StepFacts) -> str:
    return (
        f"The host is not ahead of the GPU for {_of_step(facts, facts.host_behind_ns)}: the GPU "
        "has passed a mark, and the host has not issued the next one. It launches slowly, or waits "
        "for a result."
    )


def leave_out_larger_microbatch(step: str) -> str:
    """A next step without a larger microbatch, for a run that exceeds its limit of memory."""
    step = step.replace(", a larger microbatch, or", " or").replace(", a larger microbatch", "")
    return step.replace("A larger microbatch, or gradient", "Gradient")


def _phrase_host_or_compute(facts: StepFacts) -> Words:
    behind = _ratio(facts, facts.host_behind_ns)
    return (
        f"The host or compute: the host lags for {behind} of the step.",
        f"The GPU may lack work for up to {behind} of the step{_on_rank(facts)}.",
        f"{_say_behind(facts)} How much of that time the GPU works is not known, because the run "
        "has no reading of its utilisation.",
        (
            "Find the idle time of the GPU: profile a few steps with torch.profiler, then "
            "`fsdp-inspect import` the trace.",
            "Reduce the host's work: torch.compile, a larger microbatch, no synchronisations "
            "(.item(), printing a loss, .cpu()).",
            *_name_far_device(facts),
        ),
    )


def _phrase_cores(facts: StepFacts) -> Words:
    delay = facts.trust.run_delay
    assert delay is not None, "missing cores were measured"
    share, rank = format_ratio(delay.ratio), delay.rank
    return (
        facts.trust.cores_headline,
        f"On rank {rank} the training thread is ready to run, but other work holds the cores.",
        f"Linux counts the time in which the training thread of rank {rank} is ready to run and "
        f"has no core: {share} of the recording. Other programs, workers of data loaders, too many "
        "threads or a CPU quota hold the cores. All times of this run are longer by an unknown "
        "part, so a late rank, a wait or a slow unit may be a missing core.",
        (
            *_name_threads(facts),
            *_name_far_device(facts),
            "Give each rank cores of its own: fewer threads (OMP_NUM_THREADS) and loader workers, "
            "no other programs, a larger CPU quota.",
            "Record the run again on free cores before you compare times or plans.",
        ),
    )


def _name_threads(facts: StepFacts) -> Iterator[str]:
    """The setting of ranks with more threads than cores."""
    shared = facts.shared_cores
    if shared is None or shared.threads <= shared.cores:
        return
    cores = plural(shared.cores, "core")
    if shared.threads == shared.ranks:
        yield (
            f"Start fewer ranks on this host, or give the job more cores: {shared.ranks} ranks "
            f"share {cores}."
        )
        return
    who = f"torch runs {shared.threads} threads on {cores}"
    if shared.ranks > 1:
        who = f"{shared.ranks} ranks with {shared.threads} threads of torch in all share {cores}"
    yield (
        f"Set OMP_NUM_THREADS={shared.threads_of_each} or less: {who}. Or give each rank more "
        "cores (--cpus-per-task, taskset, numactl)."
    )


def _name_far_device(facts: StepFacts) -> Iterator[str]:
    """The setting of ranks that run far from their GPU."""
    far = facts.far_device
    if far is not None:
        nodes = listed([str(node) for node in far.core_nodes], 4)
        others = f", and {plural(far.num_ranks - 1, 'other rank')}" if far.num_ranks > 1 else ""
        yield (
            "Run each process on the NUMA node of its GPU: numactl "
            f"--cpunodebind={far.device_node} --membind={far.device_node} for rank {far.rank}, "
            f"whose cores are on node {nodes}{others}. What it gains is unknown."
        )


def _on_rank(facts: StepFacts) -> str:
    return "" if facts.rank is None else f" on rank {facts.rank}"


def _phrase_straggler(facts: StepFacts) -> Words:
    straggler = facts.straggler
    assert straggler is not None
    parts = f" ({straggler.cost_range} in parts of the run)" if straggler.cost_range else ""
    phase = f", most of all in {straggler.named_phase}" if straggler.named_phase else ""
    why = [
        f"Without its extra work the typical step of {format_ns(facts.step_time_ns)} is "
        f"about {format_ns(straggler.cost_ns)} shorter{parts}.",
        f"It arrives last at {format_ratio(straggler.last_ratio)} of the collectives, then by "
        f"{format_ns(straggler.late_ns)} (median){phase}.",
    ]
    extra = describe_extra_work(straggler)
    if extra:
        why.append(f"On this rank {extra} per step than on the other ranks.")
    why += describe_extra_between(straggler.between_ns)
    along = describe_waits_along(straggler.waits_ns)
    if along:
        why.append(along)
    host = f" (host {straggler.host})" if straggler.host else ""
    because = f"It arrives last at {format_ratio(straggler.last_ratio)} of the collectives."
    if extra:
        because = f"On rank {straggler.rank}{host} {extra} per step than on the other ranks."
    uneven, balanced_ns = facts.uneven, facts.balanced_ns
    if uneven is not None and balanced_ns is not None:
        because = (
            f"Rank {uneven.rank} processed {uneven.ratio:.1f} times the {uneven.word} of the "
            f"others in {uneven.num_more} of {uneven.out_of} steps."
        )
        padding = uneven.padding_ratio
        if padding:
            why.append(f"Masks leave out {format_ratio(padding)} of its tokens (padding).")
        return (
            f"Rank {straggler.rank} is a straggler: it costs "
            f"{_ratio(facts, straggler.cost_ns)} of the step.",
            because,
            " ".join([because, *why]),
            (
                f"Give each rank equally many {uneven.word}: pack or group sequences by length. "
                f"Equal batches save about {format_ns(balanced_ns)} of the step: then all ranks "
                "process the mean.",
                NOT_TRANSFERS,
            ),
        )
    differs = f"Find out how rank {straggler.rank}{host} differs from the other ranks"
    shows = "`fsdp-inspect show RUN ranks` shows the numbers."
    look = (
        f"{differs}: clocks, heat, another job or thread, a slower link, more work in its batches. "
        f"{shows}"
    )
    if straggler.meanwhile == "other":
        look = (
            f"{differs} in the code outside of forward, backward, optimizer and data loader: "
            f"making batches, logging, checkpoints. {shows}"
        )
    if straggler.waits_for_data:
        look = (
            f"{differs} in its input: files and their disk, decoding and augmentation, length of "
            f"samples, loader workers and their cores. {shows}"
        )
    return (
        f"Rank {straggler.rank} is a straggler: it costs {_ratio(facts, straggler.cost_ns)} of "
        "the step.",
        because,
        " ".join(why),
        (look, NOT_TRANSFERS),
    )


def describe_extra_work(straggler: Straggler) -> str:
    """Describe the extra work of a straggler: `backward takes 3.86 s longer`; empty without any."""
    return _extra_work(straggler.meanwhile, straggler.meanwhile_ns)


def describe_extra_between(between_ns: float) -> list[str]:
    """Describe the extra work of late ranks that their cost leaves out; empty without any."""
    if not between_ns:
        return []
    return [
        "Checkpoints, evaluation or generation between its steps take "
        f"{format_ns(between_ns)} longer, too: this estimate leaves them out."
    ]


def _extra_work(part: str, excess_ns: int) -> str:
    if excess_ns <= 0:
        return ""
    name = "other code" if part == "other" else find_metric(f"{part}_ns").label
    return f"{name} takes {format_ns(excess_ns)} longer"


def _phrase_slow_group(facts: StepFacts) -> Words:
    group = facts.slow_group
    assert group is not None
    cost = (
        f"Without the extra work of {format_ranks(group.ranks)}, the typical step of "
        f"{format_ns(facts.step_time_ns)} is {group.at_most}{format_ns(group.cost_ns)} shorter."
    )
    return (
        f"{capitalize(describe_group(group.names[0]))} is slow: it costs {group.at_most}"
        f"{_ratio(facts, group.cost_ns)} of the step.",
        describe_slow_ranks(group.ranks, group.busiest_ratio),
        " ".join([cost, *describe_extra_between(group.between_ns), *describe_slow_group(group)]),
        (
            _advise_slow_group(group),
            NOT_TRANSFERS,
        ),
    )


def describe_group(name: str) -> str:
    """Describe a place of ranks in a sentence: `stage pp 1`, `the tp group of rank 2`, `node b`."""
    if name.startswith("pp "):
        return f"stage {name}" if " group " not in name else f"the {name}"
    return name if name.startswith("node ") else f"the {name}"


def describe_slow_ranks(ranks: Sequence[int], busiest_ratio: float) -> str:
    """Describe that each rank of a slow group works longer than all other ranks."""
    return (
        f"Each of {format_ranks(ranks)} works longer than every other rank in "
        f"{format_ratio(busiest_ratio)} of the steps."
    )


def describe_slow_group(group: SlowGroup) -> list[str]:
    """Describe the ranks, the delay and the extra work of a slow group, one sentence each."""
    lines = [describe_slow_ranks(group.ranks, group.busiest_ratio)]
    if group.last_ratio:
        lines.append(
            f"The last rank is one of them at {format_ratio(group.last_ratio)} of the collectives "
            f"with other ranks, by {format_ns(group.late_ns)}."
        )
    extra = _extra_work(group.meanwhile, group.meanwhile_ns)
    if extra:
        lines.append(f"On these ranks {extra} per step than on the other ranks.")
    if group.bound_because:
        lines.append(f"The cost is an upper bound, because {group.bound_because}.")
    _, *others = group.names
    if others:
        lines.append(
            f"The same ranks are {' and '.join(others)}: the run cannot show which of these places "
            "is the reason."
        )
    return lines


def _advise_slow_group(group: SlowGroup) -> str:
    shows = "`fsdp-inspect show RUN ranks` shows the numbers."
    name = describe_group(group.names[0])
    if name.startswith("stage "):
        return f"Move layers from {name} to other stages, or check its machine. {shows}"
    return (
        f"Find out how {name} differs: clocks, heat, another job or thread, a slower link, larger "
        f"batches, more work for the same batch. {shows}"
    )


def describe_waits_along(waits_ns: Mapping[str, int]) -> str:
    """How long a rank waits for a straggler along each dimension of the mesh; empty if unknown."""
    if not waits_ns:
        return ""
    waits = [f"{format_ns(wait)} along {label}" for label, wait in waits_ns.items()]
    return f"Largest waits of a rank for it, per step: {', '.join(waits)}."


def _may_name_plans(facts: StepFacts) -> bool:
    """Whether the verdict names changes of the plan, because no simulation can choose one."""
    return facts.has_gathers and not facts.has_plan


def _phrase_communication(facts: StepFacts) -> Words:
    if facts.other_part is not None and facts.is_mostly_outside:
        return _phrase_other_part(facts, facts.other_part)
    causes = "" if facts.blocks_host else _phrase_causes(facts)
    why = [_phrase_kinds(facts), causes, _phrase_most_exposed(facts)]
    if facts.blocks_host:
        why.append(f"By default, collectives block the host on {facts.backend}.")
    elif facts.floor_ns and not (facts.causes_ns or facts.top or facts.is_unwrapped):
        why.append(
            f"{format_ns(facts.floor_ns)} of the exposed time is {phrase_cause(Cause.FLOOR.label)}."
        )
    return (
        f"Communication is exposed for {_ratio(facts, facts.exposed_ns)} of the step.",
        _phrase_main_wait(facts),
        " ".join(sentence for sentence in why if sentence),
        tuple(_advise_communication(facts)),
    )


def _phrase_other_part(facts: StepFacts, part: OtherPart) -> Words:
    """Phrase the limit if most of the exposed time comes from code outside FSDP."""
    name, remedy = describe_other_part(part)
    place = f" in {part.phase}" if part.phase in PHASES_BY_NAME else ""
    kind = part.kind.replace("_", "-")
    own = f"the {kind} of {name}{place}{_where(part)}"
    longest = f"{own}: {format_ns(part.exposed_ns)}{_on_rank(facts)}"
    return (
        f"Communication outside FSDP is exposed for {_ratio(facts, part.total_ns)} of the step.",
        f"The largest part is {longest}.",
        f"{_phrase_kinds(facts)} The largest part outside FSDP is {own}: "
        f"{format_ns(part.exposed_ns)}. No sharding plan changes it.",
        (remedy, *([COMPARE_PLANS] if facts.has_plan else [])),
    )


_OF_OPTIMIZERS = frozenset({"all_gather", "broadcast", "reduce_scatter", "all_to_all"})
"""Collectives that clipping, norms and metrics do not issue."""


def describe_other_part(part: OtherPart) -> tuple[str, str]:
    """Return the name of communication that FSDP did not issue, and its remedy."""
    if part.dimension in _DIMENSIONS:
        return _DIMENSIONS[part.dimension]
    if part.dimension not in _LOOP_DIMENSIONS:
        return f"the mesh dimension {part.dimension!r}", _advise_call(part)
    if part.phase == Phase.OPTIMIZER.label and part.kind in _OF_OPTIMIZERS:
        return (
            "the optimizer",
            "The optimizer exchanges parameters or updates itself (ZeRO-1, Muon, Shampoo): issue "
            "its collectives without waiting for each, and in fewer and larger messages.",
        )
    if part.phase == Phase.OPTIMIZER.label:
        return (
            "the optimizer phase",
            "Look for gradient clipping, norms or metrics around the optimizer: issue them less "
            "often, or without waiting for each result.",
        )
    if part.phase == Phase.DATA.label:
        return "data loading", "Let each rank read its own batch, or fetch the next batch earlier."
    return "the training loop", FEWER_CALLS if part.place else _advise_call(part)


def _advise_call(part: OtherPart) -> str:
    return FIND_CALL.format(_CALLS_OF.get(part.kind, ""))


def _where(part: OtherPart) -> str:
    """` (train.py:45, 82 times a step)`; empty: the line is unknown."""
    if not part.place or part.dimension not in _LOOP_DIMENSIONS:
        return ""
    times = f", {format_count(part.count_per_step)} times a step" if part.count_per_step > 1 else ""
    return f" ({shorten_place(part.place)}{times})"


_LOOP_DIMENSIONS = frozenset({"", "shard", "replicate", "world", "other"})
"""Dimensions whose collectives outside FSDP come from the training loop: norms, metrics."""
_KEEP_ON_NODE = "Keep its ranks on one node, or use fewer ranks in this dimension."
_DIMENSIONS = {
    "tp": (
        "tensor parallelism",
        f"{_KEEP_ON_NODE} On GPUs, torch.compile can hide it (async tensor parallelism).",
    ),
    "ep": (
        "expert parallelism",
        f"{_KEEP_ON_NODE} Check that the experts receive equally many tokens.",
    ),
    "cp": ("context parallelism", _KEEP_ON_NODE),
    "pp": (
        "pipeline parallelism",
        "Use more microbatches, or a schedule with smaller gaps between the stages.",
    ),
}
"""The name of each mesh dimension in a sentence, and its remedy."""


def _phrase_kinds(facts: StepFacts) -> str:
    """`171.1 ms of the typical step of 1.20 s are exposed: all-gather 92.0 ms, ...`."""
    return f"{_of_step(facts, facts.exposed_ns)} are exposed{_list_kinds(facts)}."


def _list_kinds(facts: StepFacts) -> str:
    """`: all-gather 92.0 ms, reduce-scatter 12.0 ms`; empty if the kinds are unknown."""
    exposed = sorted(facts.exposed_by_kind_ns.items(), key=lambda kind: -kind[1])
    other = "other" if facts.knows_fsdp else "other collectives"
    named = [
        f"{other if kind == 'other' else kind.replace('_', '-')} {format_ns(duration)}"
        for kind, duration in exposed
        if duration > 0
    ]
    return f": {', '.join(named)}" if named else ""


def _phrase_causes(facts: StepFacts) -> str:
    """`By cause: late issue 38.0 ms, bandwidth 12.1 ms.` The causes add up to the exposed time."""
    named = [
        f"{format_cause(cause)} {format_ns(duration)}"
        for cause, duration in facts.causes_ns.items()
        if duration
    ]
    if not named:
        return ""
    has_floor = facts.causes_ns.get(Cause.FLOOR.label) and not facts.is_unwrapped
    meaning = " The floor can only be shortened." if has_floor else ""
    return f"By cause: {', '.join(named)}.{meaning}"


def _phrase_most_exposed(facts: StepFacts) -> str:
    if facts.top is None:
        return ""
    without_unit = " that FSDP did not issue" if facts.knows_fsdp else ""
    owner = without_unit if facts.top.fqn is None else f" of {format_unit(facts.top.fqn)}"
    kind = facts.top.kind.replace("_", "-")
    place = f" in {facts.top.phase}" if facts.top.phase in PHASES_BY_NAME else ""
    lead = "The"
    if facts.floor_ns and not facts.counts_floor:
        lead = f"Beyond the floor of {format_ns(facts.floor_ns)}, the"
    exposed = format_ns(facts.top.exposed_ns)
    return f"{lead} largest waits are for the {kind}{owner}{place}: {exposed}."


def _phrase_main_wait(facts: StepFacts) -> str:
    """Phrase unit, cause and rank of the largest waits, or the property that all waits share."""
    if facts.blocks_host:
        blocks = f"Collectives block the host on {facts.backend}"
        if facts.top is None:
            return f"{blocks}{_list_kinds(facts)}."
        most = _phrase_most_exposed(facts)
        return f"{blocks}. {most}"
    if 2 * facts.late_ranks_ns > facts.exposed_ns:
        late = format_ns(facts.late_ranks_ns)
        return f"Ranks that arrive late cause {late} of the waits{_on_rank(facts)}."
    if facts.top is None:
        return "No single wait is long."
    cause = format_cause(facts.top.cause)
    mostly = f", mostly {cause}" if cause else ""
    return f"{_phrase_most_exposed(facts).removesuffix('.')}{_on_rank(facts)}{mostly}."


_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce"})
_MEASURE_ON_GPUS = "Measure overlap and prefetch on GPUs, where a collective blocks only a stream."


def phrase_outside(facts: StepFacts) -> tuple[str, ...]:
    """What FSDP did not issue costs, and the remedy; empty if it is small or most of the waits."""
    part = facts.other_part
    if part is None or facts.is_mostly_outside or not facts.knows_fsdp:
        return ()
    if facts.ratio(part.total_ns) < COMMUNICATION_RATIO:
        return ()
    name, remedy = describe_other_part(part)
    what = f"most of all the {part.kind.replace('_', '-')} of {name}{_where(part)}"
    ratio = _ratio(facts, part.total_ns)
    return f"Communication outside FSDP is exposed for {ratio} of the step, {what}.", remedy


def _advise_communication(facts: StepFacts) -> list[str]:
    steps = []
    if 2 * facts.late_ranks_ns > facts.exposed_ns:
        steps.append(
            f"Balance the ranks first: {format_ns(facts.late_ranks_ns)} of the exposed time are "
            "waits for ranks that arrive late, and no single rank is known to cost "
            f"{format_ratio(STRAGGLER_RATIO)} of the step. `fsdp-inspect show RUN ranks` shows the "
            "ranks."
        )
    outside = [" ".join(words)] if (words := phrase_outside(facts)) else []
    if facts.has_plan:
        steps += [COMPARE_PLANS, *outside]
        if facts.blocks_host:
            steps.append(_MEASURE_ON_GPUS)
        return steps
    changes = [*_changes_by_gain(facts), *_collectives_between_passes(facts)]
    changes.sort(key=lambda change: -change[0])
    steps += [text for gain_ns, text in changes if facts.ratio(gain_ns) >= WORTH_NAMING_RATIO]
    steps += outside
    return steps or [
        "Start with the most exposed collective: `fsdp-inspect show RUN exposed` shows it."
    ]


def _collectives_between_passes(facts: StepFacts) -> Iterator[tuple[int, str]]:
    """Yield the waits of the loop's own collectives beside DDP or DeepSpeed, and how to find them.

    They are the loop's: metrics, logged values, barriers.
    """
    part = facts.between_passes
    if part is not None and facts.ratio(part.total_ns) >= COMMUNICATION_RATIO:
        yield (
            part.total_ns,
            f"Collectives outside forward, backward and optimizer are exposed for "
            f"{format_ns(part.total_ns)}, most of all the {part.kind.replace('_', '-')}: "
            f"{format_ns(part.exposed_ns)}. Look for barriers, metrics and logged values: "
            "`fsdp-inspect show RUN exposed` lists the kinds.",
        )


def _changes_by_gain(facts: StepFacts) -> Iterator[tuple[int, str]]:
    """Yield the exposed time that a change can remove at most, and the change.

    Only changes of the run's sharder, of collectives that the step has.
    """
    sharder, kinds = facts.sharder, facts.exposed_by_kind_ns
    if facts.blocks_host:
        yield facts.exposed_ns, _MEASURE_ON_GPUS
        return
    if facts.is_unwrapped and (facts.has_gathers or sharder.keep_gathered is None):
        # The simulation decides on buckets that were recorded, so the verdict cannot contradict it.
        yield (
            facts.exposed_ns,
            COMPARE_BUCKETS
            if sharder.has_buckets and not facts.is_kernel_trace
            else f"{sharder.hide_single_unit}: little compute hides the communication of a unit "
            "that is most of the model.",
        )
    if sharder.keep_gathered and facts.backward_gathers_ns:
        yield (
            facts.backward_gathers_ns,
            f"Try {sharder.keep_gathered} if memory allows: the all-gathers of backward are "
            f"exposed for {format_ns(facts.backward_gathers_ns)}.",
        )
    serialized = facts.causes_ns.get(Cause.SERIALIZED.label, 0)
    has_both = not kinds or (kinds.get("reduce_scatter", 0) and facts.has_gathers)
    if sharder.separate_communicator and has_both:
        yield (
            serialized,
            f"Give reduce-scatter its own communicator ({sharder.separate_communicator}): "
            f"{format_ns(serialized)} are exposed because collectives queue behind each other.",
        )
    yield from _changes_of_most_exposed(facts)


def _changes_of_most_exposed(facts: StepFacts) -> Iterator[tuple[int, str]]:
    if facts.top is None:
        return
    sharder, kind = facts.sharder, facts.top.kind
    late = facts.causes_ns.get(Cause.LATE_ISSUE.label, 0)
    if kind == "all_gather" and sharder.prefetch_ahead and (late or not facts.causes_ns):
        yield (
            late or facts.top.exposed_ns,
            f"{sharder.prefetch_ahead}, so that the all-gather is issued earlier.",
        )
    of_reductions = sum(facts.exposed_by_kind_ns.get(each, 0) for each in _REDUCTIONS)
    is_reduction = kind == "reduce_scatter" or (kind in _REDUCTIONS and facts.top.fqn is not None)
    has_backend = facts.is_kernel_trace or sharder.backend_of_16_bits in facts.backend
    if is_reduction and facts.reduces_in_float32 and has_backend:
        yield (
            max(of_reductions, facts.top.exposed_ns) // 2,
            f"Reduce gradients in bfloat16 ({sharder.reduce_in_16_bits}): this halves the "
            "bytes. Check that the loss still falls.",
        )
    bandwidth = facts.causes_ns.get(Cause.BANDWIDTH.label, 0)
    if bandwidth and kind in ("all_gather", *_REDUCTIONS):
        yield (
            bandwidth // 2,
            f"Send fewer bytes, or use a faster link: {format_ns(bandwidth)} are exposed because "
            "transfers take longer than the compute that could hide them. A larger microbatch, or "
            "gradient accumulation, gives each transfer more compute.",
        )


def _phrase_other(facts: StepFacts) -> Words:
    return (
        f"Other code of the training loop takes {_ratio(facts, facts.other_ns)} of the step.",
        f"It is outside forward, backward, optimizer, data and communication{_on_rank(facts)}.",
        f"The loss, logging, metrics or other code take {_of_step(facts, facts.other_ns)}. This "
        "time is outside forward, backward, optimizer, data and communication.",
        (f"Profile the training loop before you change {_plan(facts)}.",),
    )


def _phrase_compute(facts: StepFacts) -> Words:
    compute = _of_step(facts, facts.compute_ns)
    if facts.is_kernel_trace:
        why = f"Compute kernels run for {compute}."
    else:
        why = f"Forward, backward and optimizer take {compute}."
    exposed = "No communication is exposed."
    if facts.exposed_ns:
        exposed = (
            f"Communication is exposed for {format_ns(facts.exposed_ns)}, of which "
            f"{format_ns(facts.floor_ns)} is {phrase_cause(Cause.FLOOR.label)}."
        )
    sentence = f"The step is compute-bound: compute takes {_ratio(facts, facts.compute_ns)} of it."
    kernels = facts.kernels
    if kernels is None:
        return (
            sentence,
            exposed,
            f"{why} {exposed} Which part of it can be removed is unknown, because no step was "
            "profiled.",
            (
                "Make compute faster: torch.compile, bfloat16, less recomputation. Record with "
                "--profile-steps 20:23 to see its kernels: `fsdp-inspect show RUN kernels`.",
                _say_plan_gain(facts),
            ),
        )
    reached = _say_peak(kernels)
    most = kernels.most_fusable
    share = kernels.fusable_ns / max(kernels.step_ns, 1)
    if most is None or share < FUSABLE_RATIO:
        return (
            sentence,
            f"{reached} {exposed}",
            f"{why} {exposed} {reached} Fused kernels would save less than "
            f"{format_ratio(FUSABLE_RATIO)} of the step.",
            (_advise_kernels(kernels), _say_plan_gain(facts)),
        )
    place = "outside all units" if most.fqn is None else f"in {format_unit(most.fqn)}"
    if most.phase in PHASES_BY_NAME:
        place += f" in {most.phase}"
    return (
        f"Compute-bound: unfused elementwise kernels cost {format_ratio(share)} of the step.",
        f"Fused kernels save up to {format_ns(kernels.fusable_ns)} a step.",
        f"{why} Elementwise kernels run one after the other on the same data. One kernel for each "
        f"such run saves up to {format_ns(kernels.fusable_ns)} of {format_ns(kernels.step_ns)}, "
        f"most of it {place}. {reached} {exposed}",
        (
            "Compile the blocks (torch.compile), or use fused kernels for norms, activations and "
            "the loss.",
            _say_plan_gain(facts),
        ),
    )


def _say_peak(kernels: Kernels) -> str:
    """The share of the peak that the profiled steps reach, or why it is unknown."""
    if kernels.peak_ratio is not None:
        return (
            f"The profiled steps reach {format_ratio(kernels.peak_ratio)} of the peak "
            f"({kernels.peak_source})."
        )
    reason = "the trace has no shapes" if kernels.flops is None else "its rate is not known"
    return f"The share of the device's peak is unknown, because {reason}."


def _advise_kernels(kernels: Kernels) -> str:
    """Name the kind of compute that takes most time, or state that nothing is worth a change."""
    if kernels.peak_ratio is not None and kernels.peak_ratio >= GOOD_PEAK_RATIO:
        return "Nothing here is worth changing: compute is close to what trainings reach."
    computing = [cost for cost in kernels.kinds if cost.compute_ratio is not None]
    if not computing:
        return "Make compute faster: torch.compile, bfloat16, less recomputation."
    first = computing[0]
    return (
        f"The largest part is {first.kind}: {format_ratio(first.compute_ratio)} of compute. Make "
        "it faster: bfloat16, larger matrices, less recomputation."
    )


def _say_plan_gain(facts: StepFacts) -> str:
    """Phrase the possible gain from a change of communication in a compute-bound step."""
    if facts.has_plan:
        return (
            f"Another sharding plan can hide at most {format_ns(max(facts.avoidable_ns, 0))} of "
            "communication. `fsdp-inspect advise RUN` also simulates its copies and host time."
        )
    return f"Change nothing in {_plan(facts)}."


def _phrase_collection(facts: StepFacts) -> Words:
    stop = facts.stop
    if stop is not None and stop.what == COLLECTION and stop.duration_ns > facts.collection_ns:
        alone = f" on rank {stop.rank}" if stop.is_alone else ""
        waits = ", and the other ranks wait for it" if stop.is_alone else ""
        time = f"{format_ns(stop.duration_ns)} a step on average"
        seen = f"{stop.num_steps} of {stop.out_of} steps have a collection"
        return (
            f"Python's garbage collection takes {_share_of_stop(facts)}{alone}.",
            f"Collections on rank {stop.rank} take {time}.",
            f"Collections of garbage stop rank {stop.rank} for {time}{waits}: {seen}. Most time: "
            f"{shorten_place(stop.place) or 'unknown line'}.",
            collect_less(facts),
        )
    return (
        f"Python's garbage collection takes {_ratio(facts, facts.collection_ns)} of the step.",
        f"Collections stop the training thread for {format_ns(facts.collection_ns)} a step"
        f"{_on_rank(facts)}.",
        f"Collections of garbage stop the training thread for "
        f"{_of_step(facts, facts.collection_ns)}.",
        collect_less(facts),
    )


def collect_less(facts: StepFacts) -> tuple[str, ...]:
    """What removes garbage collections from the step, best first."""
    call = facts.collect_call
    rarely = "on all ranks in the same step, such as every 1,000 steps"
    if call is not None:
        place = shorten_place(call.place) or "the script"
        seen = f"in {call.num_steps} of {call.out_of} steps"
        return (f"{place} calls gc.collect() {seen}. Remove it, or call it {rarely}.",)
    return (
        f"Call gc.freeze() after the model is built, then gc.disable(), and gc.collect() {rarely}.",
        "Remove gc.collect() from the step, if the script calls it.",
    )


def _idle(stop: HostStopCost) -> str:
    """`, 3.10 ms idle`; empty if the idle time after the calls is unknown."""
    return "" if stop.idle_ns is None else f", {format_ns(stop.idle_ns)} idle"


def _calls(stop: HostStopCost) -> str:
    """The calls of a step: `2,000`, or `0.4` if most steps have none."""
    return f"{round(stop.count):,}" if stop.count >= 10 else f"{stop.count:.2g}"


def _share_of_stop(facts: StepFacts) -> str:
    """The mean cost of a stop as a part of the mean step, which is longer than the typical one."""
    mean_ns = facts.stop.mean_step_ns if facts.stop else 0
    if not mean_ns:
        return f"{_ratio(facts, facts.stop_ns)} of the step"
    return f"{format_ratio(facts.stop_ns / mean_ns)} of the mean step"


def _phrase_host_stop(facts: StepFacts) -> Words:
    stop = facts.stop
    assert stop is not None
    share, place = _share_of_stop(facts), shorten_place(stop.place)
    at = f" at {place}" if place else ""
    rank = f" on rank {stop.rank}" if stop.is_alone else ""
    often = f"{stop.num_steps} of {stop.out_of} steps have one."
    time = f"{format_ns(stop.duration_ns)} a step"
    if stop.what == COMPILATION:
        guard = f" The guard that failed: {stop.reason.splitlines()[0]}." if stop.reason else ""
        return (
            f"Recompilations take {share}{rank}.",
            f"torch.compile compiles{at} again: {time} on average.",
            f"torch.compile compiles{at} again, for {time} on average; {often}{guard}",
            (
                "Keep shapes and Python values constant, or mark them: dynamic=True, "
                "torch._dynamo.mark_dynamic(tensor, dim).",
                "Run with TORCH_LOGS=recompiles to see each failed guard.",
            ),
        )
    inside = "" if stop.fqn is None else f" in {format_unit(stop.fqn)}"
    what = stop.what if "(" in stop.what else capitalize(stop.what)
    return (
        f"{what}{at} takes {share}{rank}.",
        f"{_calls(stop)} calls a step{inside} take {format_ns(stop.duration_ns)}.",
        f"{_calls(stop)} calls a step of {stop.what}{at}{inside} take {time}. On a device each "
        "of them also waits for all work before it.",
        (
            _REMEDIES.get(
                stop.what, "Keep the value on the device, and read it once every N steps."
            ),
            "Read values that are only logged in few steps, after the optimizer's step.",
        ),
    )


_REMEDIES = {
    BOOLEAN_MASK: "Select by sorted indices, or multiply by the mask: its size is then known "
    "without reading values.",
    PRINTED: "Print few values, in few steps, after the optimizer's step.",
}


def _phrase_between(facts: StepFacts) -> Words:
    is_exposed = facts.has_plan and facts.ratio(facts.avoidable_ns) >= COMMUNICATION_RATIO
    return (
        f"Checkpoints, evaluation or generation take {format_ratio(facts.between_ratio)} of the "
        "loop's time.",
        f"They take {format_ns(facts.between_ns)} per step on average{_on_rank(facts)}.",
        "Checkpoints, and passes without a gradient such as evaluation and generation, take "
        f"{format_ns(facts.between_ns)} per step on average, before steps of "
        f"{format_ns(facts.step_time_ns)}, which do not contain them.",
        (
            "Run `fsdp-inspect show RUN lifetime` to see the time of checkpoints and of passes "
            "without a gradient.",
            "Save or evaluate less often, or save in the background "
            "(torch.distributed.checkpoint.async_save).",
            *([COMPARE_PLANS] if is_exposed else []),
        ),
    )


def _phrase_rare_work(facts: StepFacts) -> Words:
    rare = facts.rare
    assert rare is not None
    return (
        f"Rank {rare.rank} works {format_ns(rare.extra_ns)} longer in {len(rare.steps)} of "
        f"{rare.out_of} steps.",
        f"That is {format_ns(rare.mean_ns)} in the mean step ({_ratio(facts, rare.mean_ns)}), for "
        "which the other ranks wait.",
        rare.sentence,
        (
            f"Look at what only rank {rare.rank} does in these steps: slow batches, saving, "
            f"evaluation, logging, or another program on its machine. `fsdp-inspect show RUN "
            f"breakdown --rank {rare.rank} --step {rare.steps[0]}` splits one of them.",
        ),
    )


def _phrase_recomputation(facts: StepFacts) -> Words:
    do = "Checkpoint fewer blocks, if memory allows."
    return (
        f"Activation checkpointing repeats forwards for {_ratio(facts, facts.recompute_ns)} of "
        "the step.",
        f"Repeated forwards take {format_ns(facts.recompute_ns)} a step{_on_rank(facts)}.",
        f"Repeated forwards take {_of_step(facts, facts.recompute_ns)}. They free the activations "
        "of the checkpointed modules.",
        (do, *([COMPARE_PLANS] if facts.has_plan else [])),
    )


def _phrase_first_gather(facts: StepFacts) -> Words:
    first = facts.first_gather
    assert first is not None
    name = format_unit(first.fqn or "")
    return (
        f"The large root unit is exposed for {_ratio(facts, first.exposed_ns)} of the step.",
        f"{name} is gathered before any compute and reduced after all of it: "
        f"{format_ns(first.exposed_ns)}{_on_rank(facts)}.",
        f"{name} is much larger than the other units. Its first all-gather and its last reduction "
        f"take {_of_step(facts, first.exposed_ns)}, and no compute runs next to them.",
        (
            "Make units of its large modules that run late, such as the output layer: they are "
            "then gathered next to compute. An embedding is needed first, so only fewer bytes "
            "shorten its part: bfloat16, or a smaller shard group.",
            *([COMPARE_PLANS] if facts.has_plan else []),
        ),
    )


def _phrase_backward_order(facts: StepFacts) -> Words:
    size = facts.backward_order_ns
    return (
        f"The order of backward prefetch exposes {_ratio(facts, size)} of the step.",
        f"All-gathers in backward are late or unused for {format_ns(size)}{_on_rank(facts)}.",
        f"The script sets the units that backward prefetches. After the first all-gather of "
        f"backward, late or unused ones are exposed for {_of_step(facts, size)}.",
        (
            "Remove the calls of set_modules_to_backward_prefetch, or correct their order. By "
            "default torch prefetches in the reverse order of forward.",
        ),
    )


def _phrase_root_gather(facts: StepFacts) -> Words:
    size = facts.root_gather_ns
    return (
        f"Gathering the root again in backward exposes {_ratio(facts, size)} of the step.",
        f"Backward waits {format_ns(size)} for parameters that forward had{_on_rank(facts)}.",
        f"The root unit reshards after forward, and backward begins with it. Its second all-gather "
        f"is exposed for {_of_step(facts, size)}.",
        (
            "Keep the root unsharded after forward (reshard_after_forward=False), which is torch's "
            "default for a root.",
            *([COMPARE_PLANS] if facts.has_plan else []),
        ),
    )


def _phrase_latency(facts: StepFacts) -> Words:
    size = facts.latency_ns
    return (
        f"The latency of collectives is exposed for {_ratio(facts, size)} of the step.",
        f"Messages of any size would wait {format_ns(size)} a step{_on_rank(facts)}.",
        f"{_phrase_kinds(facts)} The fitted latency accounts for {format_ns(size)} of it, and "
        "fewer bytes do not shorten this part.",
        (
            "Send fewer and larger messages: larger units, or parameters kept after forward.",
            *([COMPARE_PLANS] if facts.has_plan else []),
        ),
    )


_WORDS: dict[Limit, Callable[[StepFacts], Words]] = {
    Limit.MEMORY: _phrase_memory,
    Limit.MEMORY_CREEP: _phrase_growth,
    Limit.INPUT: _phrase_input,
    Limit.CORES: _phrase_cores,
    Limit.HOST: _phrase_host,
    Limit.HOST_OR_COMPUTE: _phrase_host_or_compute,
    Limit.STRAGGLER: _phrase_straggler,
    Limit.SLOW_GROUP: _phrase_slow_group,
    Limit.COMMUNICATION: _phrase_communication,
    Limit.COLLECTION: _phrase_collection,
    Limit.HOST_STOP: _phrase_host_stop,
    Limit.BETWEEN: _phrase_between,
    Limit.RARE_WORK: _phrase_rare_work,
    Limit.RECOMPUTE: _phrase_recomputation,
    Limit.FIRST_GATHER: _phrase_first_gather,
    Limit.BACKWARD_ORDER: _phrase_backward_order,
    Limit.ROOT_GATHER: _phrase_root_gather,
    Limit.LATENCY: _phrase_latency,
    Limit.OTHER: _phrase_other,
    Limit.COMPUTE: _phrase_compute,
}
