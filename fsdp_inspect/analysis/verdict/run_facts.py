"""Collect the facts behind the verdicts on the run and on each rank.

The facts of a rank come from its own typical step. The floor, which needs events, comes from the
median rank, and causes and longest waits are known for the run only. So the verdicts on a thousand
ranks read the events of one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fsdp_inspect.analysis.batch_work import UnevenWork
from fsdp_inspect.analysis.breakdown import Breakdown, StepBreakdown
from fsdp_inspect.analysis.correctness import TrainingFault
from fsdp_inspect.analysis.exposed import Exposed, ExposedOwner
from fsdp_inspect.analysis.host_stops import HostStops
from fsdp_inspect.analysis.kernels import Kernels
from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.memory.growth import MemoryGrowth
from fsdp_inspect.analysis.memory.peak import Memory, RankMemory
from fsdp_inspect.analysis.placement import SharedCores, find_far_device, find_shared_cores
from fsdp_inspect.analysis.plan_check.check import PlanCheck
from fsdp_inspect.analysis.provenance import Provenance
from fsdp_inspect.analysis.step_selection import inspected_rank
from fsdp_inspect.analysis.trust import Trust
from fsdp_inspect.analysis.verdict import (
    NO_STEPS,
    UNKNOWN,
    HighestMoment,
    OtherPart,
    RankVerdict,
    RareWork,
    SlowGroup,
    StepFacts,
    Straggler,
    Verdict,
    Waiting,
    give_no_verdict,
    give_rank_verdict,
    give_verdict,
    give_verdict_on_training,
)
from fsdp_inspect.analysis.verdict.facts import OVERSIZED_RATIO
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import PARTS_OF_STEP, EventKind, Phase, StepPart
from fsdp_inspect.trace.run import RankRecord, RunManifest, RunSource
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2, SharderTraits, traits_of

_SHARDED = frozenset({EventKind.ALL_GATHER.label, EventKind.REDUCE_SCATTER.label})
_REDUCED = frozenset({EventKind.ALL_REDUCE.label})
_PASSES = frozenset({Phase.FORWARD.label, Phase.BACKWARD.label})
_COMPUTE_PARTS = (StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs inside other parts of the typical step of the median rank, ns."""

    collection_ns: int
    recompute_ns: int


def measure_step_costs(run: RunSource) -> StepCosts | None:
    """Measure costs that no part of the breakdown shows; None without a timed step."""
    member = inspected_rank(run)
    if member is None:
        return None
    collection, recompute = (
        member.typical(member.per_step(kind))
        for kind in (EventKind.GARBAGE_COLLECTION, EventKind.RECOMPUTE)
    )
    return StepCosts(collection, recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The results of the analyses of a run; None if an analysis has no result."""

    manifest: RunManifest
    hosts: dict[int, str]
    """The machine of each rank."""
    breakdown: Breakdown
    memory: Memory
    exposed: Exposed | None
    """The waits in the typical step of the median rank."""
    allocator: AllocatorUse | None
    growth: MemoryGrowth | None
    plan_check: PlanCheck | None
    provenance: Provenance | None
    late: Straggler | SlowGroup | None
    """The straggler or the slow group."""
    rare: RareWork | None = None
    """The steps in which one rank works much longer."""
    costs: StepCosts | None = None
    utilisation_ratio: float | None = None
    """The utilisation of the device of the median rank, which also stands for the other ranks."""
    trust: Trust = field(default_factory=Trust)
    stops: HostStops | None = None
    """What stops the hosts, by line; None: not recorded."""
    kernels: Kernels | None = None
    """The kernels of profiled steps; None: no step was profiled."""
    uneven: UnevenWork | None = None
    """The batches of the straggler."""
    records: Sequence[RankRecord] = ()
    """What the ranks say of their processes."""
    fault: TrainingFault | None = None
    """The first mistake of the training itself."""


def judge(answers: Answers) -> tuple[Verdict, tuple[RankVerdict, ...]]:
    """Return the verdict on the run, and the verdicts on the ranks by rank."""
    verdict, ranks = _judge_speed(answers)
    fault = answers.fault
    return (verdict if fault is None else give_verdict_on_training(fault, verdict)), ranks


def _judge_speed(answers: Answers) -> tuple[Verdict, tuple[RankVerdict, ...]]:
    headline = answers.breakdown.headline
    if headline is None:
        return (NO_STEPS if answers.manifest.source == "imported" else UNKNOWN), ()
    doubt = find_doubt(answers.manifest, headline)
    if doubt is not None:
        return doubt, ()
    of_step = _facts_of_step(answers, headline)
    verdict = give_verdict(_facts_of_run(answers, of_step, headline))
    memory, parts = {row.rank: row for row in answers.memory.ranks}, answers.breakdown.parts
    columns = (
        *(parts.rank, parts.step_time_ns, parts.exposed_ns),
        *(parts.durations_ns, parts.host_behind_ns),
    )
    ranks = tuple(
        give_rank_verdict(
            rank,
            answers.hosts.get(rank, ""),
            _facts_of_rank(answers, of_step, _Times(rank, *times), memory.get(rank)),
            verdict,
        )
        for rank, *times in zip(*(column.tolist() for column in columns), strict=True)
    )
    return verdict, ranks


class _Times(NamedTuple):
    """The times of the typical step of a rank."""

    rank: int
    step_time_ns: int
    exposed_ns: int
    durations_ns: list[int]
    """The parts in the order of `PARTS_OF_STEP`."""
    host_behind_ns: int


def _facts_of_run(answers: Answers, facts: StepFacts, step: StepBreakdown) -> StepFacts:
    exposed, memory = answers.exposed, answers.memory
    allocator, plan_check = answers.allocator, answers.plan_check
    contradicts = plan_check is not None and plan_check.is_consistent is False
    blocks_host = answers.provenance is not None and answers.provenance.blocks_host
    return replace(
        facts,
        exposed_by_kind_ns=step.exposed_by_kind_ns,
        causes_ns=exposed.causes_ns if exposed else {},
        backward_gathers_ns=exposed.backward_gathers_ns if exposed else 0,
        top=_top_owner(exposed, with_floor=blocks_host or facts.is_unwrapped) if exposed else None,
        other_part=_largest_other(exposed) if exposed else None,
        between_passes=_between_passes(answers) if answers.manifest.source == "recorded" else None,
        reduces_in_float32=any(unit.reduce_dtype == "float32" for unit in answers.manifest.units),
        blocks_host=blocks_host,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        device_bytes=memory.device_bytes,
        device_ratio=memory.device_ratio,
        fragmentation_ratio=allocator.fragmentation_ratio if allocator else None,
        num_alloc_retries=allocator.num_alloc_retries if allocator else None,
        growth=answers.growth,
        highest=_highest(memory),
        contradiction=plan_check.sentence if plan_check and contradicts else None,
    )


def _facts_of_rank(
    answers: Answers, facts: StepFacts, times: _Times, memory: RankMemory | None
) -> StepFacts:
    """Return the facts of a rank.

    Args:
        answers: The results of the analyses.
        facts: The facts of the typical step of another rank; what all ranks share is kept.
        times: The times of this rank.
        memory: The memory of this rank.
    """
    own = _measure_times(answers, times)
    if memory is None:
        return replace(facts, **own)
    device, reserved = memory.device_bytes, memory.peak_reserved_bytes
    return replace(
        facts,
        **own,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=reserved,
        device_bytes=device,
        device_ratio=reserved / device if reserved is not None and device else None,
    )


def _measure_times(answers: Answers, times: _Times) -> dict[str, Any]:
    """The times among the facts of a step; in a kernel trace, `other` counts as compute."""
    parts = dict(zip(PARTS_OF_STEP, times.durations_ns, strict=True))
    compute, other = sum(parts[part] for part in _COMPUTE_PARTS), parts[StepPart.OTHER]
    is_kernel_trace = answers.manifest.is_kernel_trace
    floor = answers.exposed.floor_ns if answers.exposed else 0
    return {
        "rank": times.rank,
        "step_time_ns": times.step_time_ns,
        "compute_ns": compute + other if is_kernel_trace else compute,
        "data_ns": parts[StepPart.DATA],
        "host_bound_ns": parts[StepPart.HOST_BOUND],
        "host_behind_ns": times.host_behind_ns,
        "exposed_ns": times.exposed_ns,
        "floor_ns": min(floor, times.exposed_ns),
        "knows_floor": answers.exposed is not None,
        "other_ns": 0 if is_kernel_trace else other,
    }


def _facts_of_step(answers: Answers, step: StepBreakdown) -> StepFacts:
    """Return the facts of the typical step of a rank, without its memory."""
    manifest = answers.manifest
    parameters = [unit.num_parameters for unit in manifest.units]
    durations = [part.duration_ns for part in step.parts]
    exposed_ns = step.exposed_ns or 0
    times = _Times(step.rank, step.step_time_ns, exposed_ns, durations, step.host_behind_ns)
    return StepFacts(
        **_measure_times(answers, times),
        backend=manifest.backend,
        is_kernel_trace=manifest.is_kernel_trace,
        sharder=_sharder(answers),
        lacks_training=manifest.lacks_training,
        knows_fsdp=manifest.knows_fsdp,
        has_plan=manifest.can_rank_plans,
        has_gathers=_has_gathers(answers),
        num_units=len(parameters),
        largest_unit_ratio=max(parameters, default=0) / max(sum(parameters), 1),
        collection_ns=answers.costs.collection_ns if answers.costs else 0,
        recompute_ns=answers.costs.recompute_ns if answers.costs else 0,
        between_ns=step.between_ns,
        utilisation_ratio=answers.utilisation_ratio,
        stop=answers.stops.largest if answers.stops else None,
        collect_call=answers.stops.collect_call if answers.stops else None,
        reads=answers.stops.reads if answers.stops else (),
        driver_calls=answers.stops.driver_calls if answers.stops else (),
        rare=answers.rare,
        uneven=answers.uneven,
        shared_cores=_shared_cores(answers),
        far_device=find_far_device(answers.records),
        kernels=answers.kernels,
        first_gather=_first_gather(answers),
        **_named_parts(answers),
        trust=answers.trust,
        straggler=answers.late if isinstance(answers.late, Straggler) else None,
        slow_group=answers.late if isinstance(answers.late, SlowGroup) else None,
    )


def _shared_cores(answers: Answers) -> SharedCores | None:
    delay = answers.trust.run_delay
    return None if delay is None else find_shared_cores(answers.records, delay.rank)


def _sharder(answers: Answers) -> SharderTraits:
    """The sharder of the step. A trace that only all-reduces has the sharder DDP.

    An import does not record its sharder, and FSDP's collectives show FSDP.
    """
    manifest = answers.manifest
    if manifest.source != "imported" or answers.exposed is None:
        return manifest.sharder_traits
    kinds = {row.kind for row in answers.exposed.passes if row.kind in _SHARDED | _REDUCED}
    if manifest.is_fsdp1:
        return traits_of(FSDP1)
    return traits_of(DDP) if kinds and kinds <= _REDUCED else manifest.sharder_traits


def _has_gathers(answers: Answers) -> bool:
    """Return whether FSDP gathers parameters in the step.

    If the source does not record which collectives FSDP issues, an all-gather in forward or
    backward counts. An all-gather after the optimizer (ZeRO-1) cannot be prefetched or resharded.
    """
    manifest = answers.manifest
    if answers.exposed is None:
        return bool(manifest.units)
    gathers = [row for row in answers.exposed.passes if row.kind == EventKind.ALL_GATHER.label]
    if manifest.knows_fsdp:
        return any(row.num_units for row in gathers)
    return any(row.phase in _PASSES for row in gathers)


def _largest_other(exposed: Exposed) -> OtherPart | None:
    """Return the largest part of communication that FSDP did not issue; None: there is none."""
    other = exposed.by_kind_ns.get("other", 0)
    if not exposed.not_fsdp or not other:
        return None
    largest = exposed.not_fsdp[0]
    return OtherPart(
        kind=largest.kind,
        phase=largest.phase,
        dimension=largest.dimension,
        exposed_ns=min(largest.exposed_ns, other),
        total_ns=other,
        count_per_step=largest.count_per_step,
        place=largest.place,
    )


def _between_passes(answers: Answers) -> OtherPart | None:
    """Return the largest part outside forward, backward and optimizer, which the loop issues.

    DDP and DeepSpeed issue collectives of no unit, but only in these parts. See `knows_fsdp`.
    """
    if answers.manifest.knows_fsdp or answers.exposed is None:
        return None
    own = [row for row in answers.exposed.passes if row.phase == Phase.OUTSIDE.label]
    if not own or any(row.num_units for row in own):
        return None
    return OtherPart(
        kind=own[0].kind,
        phase=own[0].phase,
        dimension="",
        exposed_ns=own[0].exposed_ns,
        total_ns=sum(row.exposed_ns for row in own),
        count_per_step=own[0].count_per_step,
    )


def _named_parts(answers: Answers) -> dict[str, Any]:
    """The parts of the exposed time that have a remedy of their own."""
    exposed, named = answers.exposed, answers.manifest.plan.get("backward_prefetch")
    if exposed is None:
        return {}
    is_fsdp2 = answers.manifest.sharder == FSDP2
    roots = {unit.fqn for unit in answers.manifest.units if unit.is_root and is_fsdp2}
    return {
        "backward_order_ns": exposed.late_prefetch_ns if isinstance(named, dict) and named else 0,
        "root_gather_ns": sum(
            owner.exposed_ns
            for owner in exposed.owners
            if owner.fqn in roots
            and owner.kind == EventKind.ALL_GATHER.label
            and owner.phase == Phase.BACKWARD.label
        ),
        "latency_ns": exposed.latency_ns,
    }


def _first_gather(answers: Answers) -> Waiting | None:
    """The first all-gather and last reduction of a root that is much larger than other units."""
    units, exposed = answers.manifest.units, answers.exposed
    sizes = [unit.unsharded_bytes for unit in units]
    if exposed is None or len(units) < 2:
        return None
    large = {
        unit.fqn
        for unit in units
        if unit.is_root and unit.unsharded_bytes > OVERSIZED_RATIO * (median(sizes) or 0)
    }
    found = [owner for owner in exposed.owners if owner.fqn in large and owner.floor_ns]
    first = max(found, key=lambda each: each.floor_ns, default=None)
    if first is None:
        return None
    whole_ns = sum(owner.floor_ns for owner in found if owner.fqn == first.fqn)
    return Waiting(fqn=first.fqn, kind=first.kind, phase=first.phase, exposed_ns=whole_ns)


def _top_owner(exposed: Exposed, *, with_floor: bool) -> Waiting | None:
    """Return the owner with the most exposed time; None if there is none.

    Args:
        exposed: The waits of the typical step.
        with_floor: `StepFacts.counts_floor`.
    """

    def size(owner: ExposedOwner) -> int:
        return owner.exposed_ns - (0 if with_floor else owner.floor_ns)

    top = max(exposed.owners, key=size, default=None)
    if top is None or not size(top):
        return None
    return Waiting(
        fqn=top.fqn,
        kind=top.kind,
        phase=top.phase,
        exposed_ns=size(top),
        cause=_main_cause(top, with_floor=with_floor),
    )


def _main_cause(owner: ExposedOwner, *, with_floor: bool) -> str:
    """The cause of more than half of an owner's exposed time; empty: none."""
    left_out = "" if with_floor else Cause.FLOOR.label
    causes = {name: time for name, time in owner.causes_ns.items() if name != left_out}
    largest = max(causes, key=lambda name: causes[name], default="")
    return largest if largest and 2 * causes[largest] > sum(causes.values()) else ""


def _highest(memory: Memory) -> HighestMoment | None:
    peak = memory.peak
    if peak is None or not peak.categories:
        return None
    largest = peak.categories[0]
    return HighestMoment(
        rank=peak.rank,
        phase=peak.phase,
        fqn=peak.fqn,
        category=largest.category,
        category_bytes=largest.bytes,
    )


# --- Find the reason why an imported trace allows no conclusion about what limits the step.

LOST_RATIO = 0.1
"""The fraction of lost kernels from which a trace allows no conclusion."""
PAUSE_RATIO = 0.5
"""The fraction of a trace that one pause takes, from which it may lie between two steps."""


def find_doubt(manifest: RunManifest, step: StepBreakdown) -> Verdict | None:
    """Return the first reason for no conclusion, as a verdict; None: a conclusion is possible."""
    if manifest.source != "imported":
        return None
    for find in (_unread, _no_kernels, _lost_kernels, _several_devices, _pause):
        doubt = find(manifest)
        if doubt is not None:
            return doubt
    if manifest.world_size > 1 and not step.communication_ns:
        return give_no_verdict(
            f"No conclusion: this trace of {manifest.world_size:,} ranks shows no communication.",
            "The step of several ranks communicates. The trace lacks these events, or they have "
            "names that this version does not know, so what limits the step is not known.",
            "Profile a whole step on a rank that trains. If the trace contains the communication, "
            "report the names of its kernels.",
        )
    return None


def _unread(manifest: RunManifest) -> Verdict | None:
    unread, read = manifest.num_unread_events, manifest.num_device_events
    if unread <= read:
        return None
    return give_no_verdict(
        f"No conclusion: {unread:,} events of the trace were not understood.",
        f"Only {read:,} kernels and copies were read. The other events have categories that "
        "this version does not know, so the parts of the step are not known.",
        "Report the device and the categories, which the notes of the run list.",
    )


def _no_kernels(manifest: RunManifest) -> Verdict | None:
    if not manifest.lacks_kernels:
        return None
    return give_no_verdict(
        "No conclusion: the trace of a device shows no kernels.",
        f"The processes train on devices ({manifest.backend}), but the trace shows their host "
        "only. When the host issues work is not when the device runs it.",
        "Profile with the activity of the device too, such as ProfilerActivity.CUDA.",
    )


def _lost_kernels(manifest: RunManifest) -> Verdict | None:
    lost, launches = manifest.num_lost_launches, manifest.num_launches
    if lost < LOST_RATIO * launches or not lost:
        return None
    return give_no_verdict(
        f"No conclusion: the trace lacks {format_ratio(lost / launches)} of the launched kernels.",
        f"{lost:,} of {launches:,} kernel launches have no kernel in the trace. The profiler drops "
        "kernels if its buffers are full, and the device then looks idle.",
        "Profile fewer steps, or with record_shapes=False and with_stack=False.",
    )


def _several_devices(manifest: RunManifest) -> Verdict | None:
    devices = manifest.num_devices_per_trace
    if devices < 2:
        return None
    return give_no_verdict(
        f"No conclusion: one trace joins the kernels of {devices} devices.",
        "Work of one device then hides waits of another one, so what limits each device is not "
        "known.",
        "Import one trace for each device: profile each rank in its own process and file.",
    )


def _pause(manifest: RunManifest) -> Verdict | None:
    pause, trace = manifest.longest_pause_ns, manifest.paused_trace_ns
    if pause <= PAUSE_RATIO * trace:
        return None
    if pause == trace:
        return give_no_verdict(
            "No conclusion: the trace has a whole process as one step.",
            "Its start, its warm-up and its end count as the step.",
            "Mark each step with an NVTX or ROCTx range such as 'step 5'.",
        )
    return give_no_verdict(
        f"No conclusion: one pause takes {format_ratio(pause / trace)} of the trace.",
        f"The device does nothing for {format_ns(pause)} of {format_ns(trace)} in one piece. The "
        "trace was imported as one step, so whether the pause lies in a step is not known.",
        "Profile with schedule=... and prof.step(): each mark is then a step.",
    )
