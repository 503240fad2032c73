"""Find problems in the trace that the simulation of plans does not cover.

The rules are R7 (all-gathers that cross nodes), R12 (FSDP1 without its limiter), R23 (compute that
communication slows), R31 (a pipeline that gathers for each microbatch) and R33 (all-gathers that
wait for work after the optimizer). Each effect is a bound from the trace, not a simulation.
"""

from collections.abc import Iterator

from fsdp_inspect.advice.evidence import (
    MOST_ROWS,
    Effect,
    Evidence,
    Finding,
    NodeLinks,
    TraceRow,
)
from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.analysis.optimizer_wait import OptimizerWait
from fsdp_inspect.analysis.pipeline import Pipeline
from fsdp_inspect.analysis.prefetch import GathersInFlight
from fsdp_inspect.analysis.trust import PIPELINE_CAVEAT
from fsdp_inspect.formatting import (
    format_bytes,
    format_bytes_per_s,
    format_ns,
    format_ratio,
    format_unit,
    plural,
)
from fsdp_inspect.simulation.parameters import share_of
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import Unit

FASTER_INSIDE = 3.0
"""The bus within a node must be at least this many times as fast as across nodes (R7)."""
INFLIGHT_LIMIT = 2
"""All-gathers that FSDP1's limiter allows in flight at once (R12)."""
SLOWDOWN = 1.05
"""A smaller slowdown of compute does not justify other communication buffers (R23)."""


def find_in_trace(evidence: Evidence) -> Iterator[Finding]:
    """Findings that make predictions invalid first, then findings that cost time."""
    for find in (_pipeline, _across_nodes, _unlimited_gathers, _slowed_compute, _after_optimizer):
        yield from find(evidence)


# --- R31


def _pipeline(evidence: Evidence) -> Iterator[Finding]:
    pipeline = evidence.pipeline
    if pipeline is None:
        return
    repeats = bool(pipeline.units) and evidence.is_worth_naming(pipeline.repeated_exposed_ns)
    yield Finding(
        "R31",
        tuple(unit.fqn for unit in pipeline.units) if repeats else (),
        _say_pipeline(pipeline)
        if repeats
        else "The run is a pipeline: its ranks send to each other.",
        f"{pipeline.transfers_per_step} sends and receives a step on rank {pipeline.rank}"
        + (f", {pipeline.forwards_per_step} forwards of a unit." if pipeline.units else "."),
        _DO_IN_PIPELINE if repeats else _BEWARE_IN_PIPELINE,
        {"repeated_gathers_ns": pipeline.repeated_exposed_ns} if repeats else {},
        limits=True,
        rows=_gather_rows(evidence, "forward") if repeats else (),
        effect=_effect_in_pipeline(evidence, pipeline)
        if repeats
        else Effect(
            sentence="No gain is predicted: no unit is gathered again for each microbatch."
        ),
        assumptions=("Parameters stay unsharded between the microbatches of a step.",)
        if repeats
        else (),
        snippet="fully_shard(block, mesh=mesh, reshard_after_forward=False)  # every block"
        if repeats
        else "",
        verify="Record again, then: fsdp-inspect show NEW_RUN units (all-gathers a step)"
        if repeats
        else "",
    )


def _say_pipeline(pipeline: Pipeline) -> str:
    first = pipeline.units[0]
    return (
        f"A pipeline gathers {plural(len(pipeline.units), 'unit')} for each microbatch. Unit "
        f"{format_unit(first.fqn)} is gathered {first.gathers_per_step} times a step, and "
        f"{format_ns(pipeline.repeated_exposed_ns)} are exposed."
    )


_BEWARE_IN_PIPELINE = (f"Do not rely on the plans below. {PIPELINE_CAVEAT}",)
_DO_IN_PIPELINE = (
    "Keep parameters unsharded within a step: reshard_after_forward=False for the units of a "
    "stage. torch.distributed.pipelining reshards them after the last backward.",
    *_BEWARE_IN_PIPELINE,
)


def _effect_in_pipeline(evidence: Evidence, pipeline: Pipeline) -> Effect:
    exposed = pipeline.repeated_exposed_ns
    held = sum(unit.unsharded_bytes for unit in pipeline.units)
    two = sum(sorted(unit.unsharded_bytes for unit in pipeline.units)[-2:])
    return Effect(
        sentence=f"Saves at most {format_ns(exposed)} a step, the waits for the "
        f"{pipeline.repeated_gathers_per_step} all-gathers after the first of each unit. The peak "
        f"rises by {format_bytes(held - two)} to {format_bytes(held)}, since two units are already "
        "unsharded at once.",
        saved_low_ns=0,
        saved_high_ns=exposed,
        added_low_bytes=held - two,
        added_high_bytes=held,
        is_exposed=True,
    )


# --- R7


def _across_nodes(evidence: Evidence) -> Iterator[Finding]:
    links = evidence.links
    exposed = evidence.backward_gathers_ns
    if links is None or not evidence.is_worth_naming(exposed):
        return
    within = links.within_bytes_per_s
    if within is not None and within < FASTER_INSIDE * links.across_bytes_per_s:
        return
    units = _resharded(evidence)
    if not units:
        return
    size = links.ranks_per_node
    yield Finding(
        "R7",
        tuple(unit.fqn for unit in units),
        f"All-gathers of backward cross {links.num_nodes} nodes and are exposed for "
        f"{format_ns(exposed)} a step.",
        _say_links(links),
        (
            f"Reshard after forward to the {size} ranks of a node: reshard_after_forward={size}. "
            "Check that the plan fits: out of memory was reported for it (pytorch#147179).",
        ),
        {"backward_gathers_ns": exposed},
        rows=_gather_rows(evidence, "backward"),
        effect=_effect_in_node(evidence, links, units),
        assumptions=("The latency within a node is 0: the run does not show it.",),
        snippet=f"fully_shard(block, mesh=mesh, reshard_after_forward={size})  # every call",
    )


def _resharded(evidence: Evidence) -> list[Unit]:
    """Units that backward gathers again over the whole shard group."""
    return [unit for unit in evidence.manifest.units if unit.reshard_after_forward is True]


def _say_links(links: NodeLinks) -> str:
    across = f"Bus bandwidth across nodes: {format_bytes_per_s(links.across_bytes_per_s)}"
    if links.within_bytes_per_s is None:
        return f"{across}. The bandwidth within a node is unknown: no collective ran within a node."
    return (
        f"{across}; within a node: {format_bytes_per_s(links.within_bytes_per_s)} "
        f"({links.within_from})."
    )


def _effect_in_node(evidence: Evidence, links: NodeLinks, units: list[Unit]) -> Effect:
    """From the waits in backward minus the gather time within a node, to all these waits."""
    exposed, size = evidence.backward_gathers_ns, links.ranks_per_node
    gathered = sum(unit.unsharded_bytes for unit in units)
    added = sum(_kept_in_node(unit, links) for unit in units)
    memory = f"The peak rises by {format_bytes(added)}: each rank keeps 1/{size} of every unit."
    if links.within_bytes_per_s is None:
        return Effect(
            sentence=f"Saves at most {format_ns(exposed)} a step, depending on the bandwidth "
            f"within a node. {memory}",
            saved_low_ns=0,
            saved_high_ns=exposed,
            added_low_bytes=added,
            added_high_bytes=added,
            is_exposed=True,
        )
    factor = bus_factor(EventKind.ALL_GATHER, size)
    inside = round(gathered * factor / links.within_bytes_per_s * 1e9)
    low = max(exposed - inside, 0)
    return Effect(
        sentence=f"Saves {format_ns(low)} to {format_ns(exposed)} a step: within a node these "
        f"all-gathers take {format_ns(inside)} a pass. {memory}",
        saved_low_ns=low,
        saved_high_ns=exposed,
        added_low_bytes=added,
        added_high_bytes=added,
        is_exposed=True,
    )


def _kept_in_node(unit: Unit, links: NodeLinks) -> int:
    """Bytes of the unit that a rank keeps from forward to backward, in addition to its shard."""
    in_node = unit.model_copy(update={"reshard_after_forward": links.ranks_per_node})
    return share_of(in_node, links.num_nodes * links.ranks_per_node).kept


# --- R12


def _unlimited_gathers(evidence: Evidence) -> Iterator[Finding]:
    flight = evidence.in_flight
    if flight is None or not evidence.manifest.is_fsdp1 or flight.most <= INFLIGHT_LIMIT:
        return
    surplus = flight.bytes - flight.bytes_of_last_two
    yield Finding(
        "R12",
        flight.fqns,
        f"FSDP1 had {flight.most} all-gathers in flight at once: its host runs ahead without a "
        "limit and allocates memory for each one.",
        f"Rank {flight.rank}, step {flight.step}, {flight.phase}: {format_bytes(flight.bytes)} "
        "in flight. The limiter allows two all-gathers.",
        ("Keep limit_all_gathers=True, or move to fully_shard, which needs no limit.",),
        {"gathers_in_flight": flight.most},
        rows=(_row_of_flight(flight),),
        effect=Effect(
            sentence=f"All-gather memory falls by at most {format_bytes(surplus)}. No time is "
            "predicted.",
            added_low_bytes=-surplus,
            added_high_bytes=0,
        ),
        assumptions=("FSDP1 allocates the output of an all-gather when the host issues it.",),
        snippet="FullyShardedDataParallel(module, limit_all_gathers=True, ...)",
        verify="Record or import again: fsdp-inspect advise NEW_RUN no longer reports it",
    )


def _row_of_flight(flight: GathersInFlight) -> TraceRow:
    return TraceRow(
        step=flight.step,
        microbatch=0,
        fqn=flight.fqns[-1],
        kind=EventKind.ALL_GATHER.label,
        phase=flight.phase,
        start_ns=flight.issue_ns,
        end_ns=flight.issue_ns,
        exposed_ns=0,
        what=f"issued while {flight.most - 1} others were in flight",
    )


# --- R23


def _slowed_compute(evidence: Evidence) -> Iterator[Finding]:
    found, manifest = evidence.contention, evidence.manifest
    if found is None or manifest.device_type != "cuda" or manifest.source == "emulated":
        return
    if found.slowdown is None or not found.is_clear or found.slowdown < SLOWDOWN:
        return
    low, middle, high = (_paid_ns(found, each) for each in (found.low, found.slowdown, found.high))
    if not evidence.is_worth_naming(middle):
        return
    yield Finding(
        "R23",
        tuple(dict.fromkeys(unit.fqn for unit in found.units if unit.slowdown is not None)),
        f"Communication slows compute by {format_ratio(found.slowdown - 1)}, "
        f"{format_ns(middle)} of the step.",
        f"The same compute was measured alone and next to communication, on rank {found.rank} in "
        f"{found.num_steps} steps. The factor of single passes is {found.low:.2f} to "
        f"{found.high:.2f}.",
        (
            "On GPUs with NVLink, let the process group own the buffers, so that copy engines or "
            "the switch move the bytes. Call set_symm_mem_for_comm or "
            "set_allocate_memory_from_process_group_for_comm before you attach a recorder.",
        ),
        {"slowdown": found.slowdown},
        effect=Effect(
            sentence=f"Saves at most {format_ns(high)} a step, the cost of the slowdown "
            f"({format_ns(low)} to {format_ns(high)} over single passes).",
            saved_low_ns=0,
            saved_high_ns=high,
        ),
        assumptions=(
            "The ranks are linked by NVLink, and NCCL can use it in this way: neither is recorded.",
            "All reductions may be sums (set_force_sum_reduction_for_comms).",
        ),
        snippet=(
            'os.environ["NCCL_CTA_POLICY"] = "2"  # before init_process_group\n'
            "for module in model.modules():\n"
            "    if isinstance(module, FSDPModule):\n"
            '        module.set_symm_mem_for_comm("NCCL")'
        ),
        verify="Record again: the page Units and this command show the slowdown",
    )


def _paid_ns(found: Contention, slowdown: float | None) -> int:
    """The additional compute time of a step because of communication."""
    overlapping_ns = sum(unit.compute_ns * unit.beside_ratio for unit in found.units)
    return round(overlapping_ns * (1 - 1 / slowdown)) if slowdown and slowdown > 1 else 0


# --- R33


def _after_optimizer(evidence: Evidence) -> Iterator[Finding]:
    wait = evidence.optimizer_wait
    if wait is None or not evidence.is_worth_naming(wait.gain_ns):
        return
    yield Finding(
        "R33",
        tuple(dict.fromkeys(gather.fqn for gather in wait.gathers)),
        f"The first all-gather of a step waits {format_ns(wait.delay_ns)} for work after "
        "the optimizer, but does not need its results.",
        f"Rank {wait.rank}, median of {len(wait.gathers)} steps, from the optimizer's end (or "
        "the all-gather's issue, if that is later) to its copy-in.",
        (
            "Record an event after optimizer.step(), and let the all-gathers wait for that event: "
            "call set_post_optim_event in every step.",
        ),
        {"post_optimizer_wait_ns": wait.delay_ns},
        rows=_rows_of_optimizer(wait),
        effect=Effect(
            sentence=f"Saves {format_ns(wait.gain_low_ns)} to {format_ns(wait.gain_high_ns)} a "
            f"step (median {format_ns(wait.gain_ns)}). The all-gather then overlaps with that "
            "work. If the host runs ahead, the next all-gather does too.",
            saved_low_ns=wait.gain_low_ns,
            saved_high_ns=wait.gain_high_ns,
            is_exposed=True,
        ),
        assumptions=("No work after the optimizer changes the gathered parameters.",),
        snippet=(
            "optimizer.step()\n"
            "event = torch.cuda.Event()\n"
            "event.record()\n"
            "model.set_post_optim_event(event)  # on the root, in each step"
        ),
        verify="Record again: the first all-gather of a step starts right after the optimizer "
        "(fsdp-inspect show NEW_RUN exposed)",
    )


def _rows_of_optimizer(wait: OptimizerWait) -> tuple[TraceRow, ...]:
    return tuple(
        TraceRow(
            step=gather.step,
            microbatch=0,
            fqn=gather.fqn,
            kind=EventKind.ALL_GATHER.label,
            phase="forward",
            start_ns=gather.start_ns,
            end_ns=gather.end_ns,
            exposed_ns=gather.exposed_ns,
            what=f"started {format_ns(gather.delay_ns)} late, after other work",
        )
        for gather in wait.gathers[:MOST_ROWS]
    )


def _gather_rows(evidence: Evidence, phase: str) -> tuple[TraceRow, ...]:
    return evidence.rows(lambda wait: wait.kind == "all_gather" and wait.phase == phase)
