"""Collect the results of all analyses of a run in one object.

`fsdp-inspect show`, the dashboard's Overview and the end of a recording show this object. Its
fields are the keys of `summary --json`, with the units in their names. Times are times of the
typical step of the median rank, unless a field states otherwise ([Note: the typical step] in
`store.reduction.timed_steps`).
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.batch_work import measure_uneven_work
from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.context import try_measure
from fsdp_inspect.analysis.correctness import Correctness, check_training
from fsdp_inspect.analysis.drift import Drift, measure_drift
from fsdp_inspect.analysis.exposed import Exposed, measure_exposed
from fsdp_inspect.analysis.host_stops import HostStops, measure_host_stops
from fsdp_inspect.analysis.kernels import find_profile
from fsdp_inspect.analysis.last_arrivals import find_last_arrivals
from fsdp_inspect.analysis.lifetime import measure_known_lifetime
from fsdp_inspect.analysis.memory.allocator import AllocatorUse, measure_allocator
from fsdp_inspect.analysis.memory.growth import measure_memory_growth
from fsdp_inspect.analysis.memory.peak import Memory, measure_memory
from fsdp_inspect.analysis.plan_check.check import PlanCheck, check_plan
from fsdp_inspect.analysis.provenance import measure_provenance
from fsdp_inspect.analysis.recorder_cost import RecorderCost, measure_recorder_cost
from fsdp_inspect.analysis.run_heading import RunHeading, identify
from fsdp_inspect.analysis.scalars import measure_loss
from fsdp_inspect.analysis.step_selection import inspected_rank, timed_ranks
from fsdp_inspect.analysis.step_times import RankOverlap, measure_overlap, measure_step_times
from fsdp_inspect.analysis.stragglers.rank_work import MAX_CHANCE
from fsdp_inspect.analysis.stragglers.ranks import find_late_ranks, find_rare_work
from fsdp_inspect.analysis.throughput import Throughput, measure_throughput
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.analysis.units import UnitCost, measure_units
from fsdp_inspect.analysis.verdict import RankVerdict, RareWork, Straggler, Verdict
from fsdp_inspect.analysis.verdict.run_facts import Answers, judge, measure_step_costs
from fsdp_inspect.analysis.wait_causes import timed_collectives
from fsdp_inspect.results import Result
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.trace.run import RunSource

_MOST_READ_RANKS = 64
"""Of more ranks, the summary does not read single steps; `show RUN ranks` does."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The first and the last value of the logged loss."""

    first: float
    last: float
    num_steps: int
    name: str
    """The name under which the training loop logs it."""


@dataclass(frozen=True, slots=True)
class StepsLeftOut:
    """The completed steps that no time uses."""

    warmup: tuple[int, ...]
    memory: tuple[int, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class Summary(RunHeading, Result):
    """The summary of a run. The fields are the keys of `summary --json`."""

    is_kernel_trace: bool
    """Whether the run is an imported kernel trace, which defines some metrics differently
    (`metrics.define_metric`)."""
    num_ranks: int
    """Number of ranks that wrote data."""
    num_steps: int
    """Number of completed steps, including steps that no time uses."""
    num_timed_steps: int
    left_out: StepsLeftOut
    goodput_ratio: float | None
    """Time of the phase training / wall time; None for imports and old runs."""
    goodput_basis: str | None
    """`Lifetime.goodput_basis`; None without `goodput_ratio`."""
    restarts: str | None
    """`Lifetime.restarts`; None also for imports and old runs."""
    throughput: Throughput | None
    """Tokens per second, MFU and the utilisation of the device; None if all are unknown."""
    wall_ns: int | None
    """Wall time of the run, over all attempts; None for imports and old runs."""
    step_time_ns: Distribution | None
    drift: Drift | None
    """Changes of the step time during the run; None if files are damaged."""
    communication_ns: int | None
    exposed_ns: int | None
    overlap_ratio: float | None
    """1 - exposed_ns / communication_ns; None without communication."""
    floor_ns: int | None
    """The part of `exposed_ns` that cannot be hidden."""
    communication_bytes: int | None
    """Sum of the full padded messages of one step."""
    collectives_per_step: float | None
    peak_allocated_bytes: int | None
    """Highest peak over all ranks; None if memory was not recorded."""
    peak_reserved_bytes: int | None
    """Highest peak over all ranks; None on CPU, where nothing is reserved."""
    exposed: Exposed | None
    """The waits of the typical step by owner and cause, including waits for stragglers. The causes
    add up to the exposed parts of `breakdown`."""
    memory: Memory
    loss: Loss | None
    units: tuple[UnitCost, ...]
    ranks: tuple[RankOverlap, ...]
    verdict: Verdict
    rank_verdicts: tuple[RankVerdict, ...]
    """The limit of each rank, by rank."""
    plan_check: PlanCheck | None
    """The result of checking the collectives against the plan."""
    recorder: RecorderCost | None
    """What the recorder cost; None: not recorded."""
    stops: HostStops | None
    """What stops the hosts, by line; None: not recorded."""

    @property
    def recorder_sentence(self) -> str | None:
        """`RecorderCost.sentence`; None if there is nothing to state."""
        return None if self.recorder is None else self.recorder.sentence


def measure_summary(run: RunSource) -> Summary:
    """Run all analyses of a run.

    An analysis whose files are damaged has no result, and `notes` gives the reason.
    """
    damage: list[str] = []
    times, overlap = measure_step_times(run), measure_overlap(run)
    breakdown, memory = measure_breakdown(run), measure_memory(run)
    exposed = try_measure(_measure_waits, run, damage)
    units = try_measure(measure_units, run, damage)
    provenance = try_measure(measure_provenance, run, damage)
    drift = try_measure(measure_drift, run, damage)
    lifetime = try_measure(measure_known_lifetime, run, damage)
    loss = try_measure(_find_loss, run, damage)
    throughput = try_measure(measure_throughput, run, damage)
    plan_check = try_measure(check_plan, run, damage)
    training = try_measure(check_training, run, damage)
    stops = measure_host_stops(run)
    late = try_measure(lambda source: find_late_ranks(source, overlap.ranks), run, damage)
    verdict, rank_verdicts = judge(
        Answers(
            manifest=run.manifest,
            hosts={record.rank: record.host for record in run.ranks},
            breakdown=breakdown,
            memory=memory,
            exposed=exposed,
            allocator=_measure_allocator(run, memory),
            growth=try_measure(measure_memory_growth, run, damage),
            plan_check=plan_check,
            provenance=provenance,
            costs=try_measure(measure_step_costs, run, damage),
            utilisation_ratio=throughput.device_utilisation_ratio if throughput else None,
            trust=measure_trust(run),
            late=late,
            rare=try_measure(_find_rare_work, run, damage),
            stops=stops,
            kernels=find_profile(run),
            uneven=measure_uneven_work(run, late.rank) if isinstance(late, Straggler) else None,
            records=run.ranks,
            fault=training.faults[0] if training and training.faults else None,
        )
    )
    manifest, steps, typical = run.manifest, times.selection, overlap.run
    return Summary(
        run_id=manifest.run_id,
        status=run.status.value,
        notes=tuple(
            dict.fromkeys([*run.notes, *damage, *memory.unreadable, *_other_mistakes(training)])
        ),
        is_kernel_trace=manifest.is_kernel_trace,
        identity=identify(manifest),
        world_size=manifest.world_size,
        num_ranks=len(run.ranks),
        backend=manifest.backend,
        num_steps=len(steps.finished),
        num_timed_steps=len(steps.timed),
        left_out=StepsLeftOut(steps.warmup, steps.memory, steps.sentence),
        median_rank=times.median_rank,
        provenance=provenance,
        goodput_ratio=lifetime.goodput_ratio if lifetime else None,
        goodput_basis=lifetime.goodput_basis if lifetime else None,
        restarts=lifetime.restarts if lifetime else None,
        throughput=throughput,
        wall_ns=lifetime.wall_ns if lifetime else None,
        step_time_ns=times.step_time_ns,
        drift=drift,
        communication_ns=typical.communication_ns if typical else None,
        exposed_ns=typical.exposed_ns if typical else None,
        overlap_ratio=typical.overlap_ratio if typical else None,
        floor_ns=exposed.floor_ns if exposed else None,
        communication_bytes=typical.communication_bytes if typical else None,
        collectives_per_step=typical.collectives_per_step if typical else None,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        breakdown=breakdown.headline,
        exposed=exposed,
        memory=memory,
        loss=loss,
        units=units.units if units else (),
        ranks=overlap.ranks,
        verdict=verdict,
        rank_verdicts=rank_verdicts,
        plan_check=plan_check,
        recorder=try_measure(measure_recorder_cost, run, damage),
        stops=stops,
    )


def _other_mistakes(training: Correctness | None) -> list[str]:
    """What the checks of the training found besides the mistake that the verdict names."""
    found = (*training.faults[1:], *training.notes) if training else ()
    return [f"{each.headline} {each.change}" for each in found]


def _measure_waits(run: RunSource) -> Exposed | None:
    """Measure the waits of the median rank. Waits for stragglers are those of its typical steps."""
    member = inspected_rank(run)
    if member is None:
        return None
    collectives = timed_collectives(run, member)
    known = np.isin(collectives.step, member.typical_steps)
    last_arrival_ns = np.full(len(collectives), -1, dtype=np.int64)
    _, last_arrival_ns[known] = find_last_arrivals(run, member.rank, collectives.where(known))
    return measure_exposed(run, last_arrival_ns=last_arrival_ns)


def _find_rare_work(run: RunSource) -> RareWork | None:
    """The steps in which one rank works much longer and others wait.

    None: there are none, they may be chance, or the run has too many ranks.
    """
    if len(run.ranks) > _MOST_READ_RANKS:
        return None
    found = find_rare_work(timed_ranks(run))
    is_cost = found is not None and found.others_wait and found.chance <= MAX_CHANCE
    return found if is_cost else None


def _measure_allocator(run: RunSource, memory: Memory) -> AllocatorUse | None:
    """Measure the allocator of the rank with the highest peak; None without an allocator."""
    if memory.peak_rank is None or memory.peak_reserved_bytes is None:
        return None
    return measure_allocator(run, rank=memory.peak_rank)


def _find_loss(run: RunSource) -> Loss | None:
    found = measure_loss(run)
    if found is None:
        return None
    return Loss(found.values[0], found.values[-1], len(found.steps), found.name)
