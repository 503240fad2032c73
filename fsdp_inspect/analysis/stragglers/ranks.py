"""Compare the ranks of a run: find the straggler, its cost, and the skew of the collectives.

Numbers of a rank come from the summary, over all its timed steps. Numbers of a collective come from
the events of a sample of ranks and steps: the skew is the spread of the arrivals, the transfer is
the duration once the last rank has arrived. The cost of a straggler comes from a replay of the
recorded steps on all ranks, without the straggler's extra work.

[Note: straggler conditions] Some rank is the last at every collective. A rank is a straggler if all
of these hold:

- It works longest in at least three quarters of the steps, and in more steps than equal ranks would
  by chance (exact binomial against 1/N, times N for the choice of the rank, at most 5%: see
  [Note: chance] in `analysis.stragglers.rank_work`). With too few steps, the result is unknown.
- The other ranks wait for its extra work: at its own collectives, the skew where it is last, less
  what it would be late at random, is at least half of that work. Other ranks are last at random
  too, which shows how much that is: their skew, times 1/(N-1) with N ranks at each collective. This
  counts time and not collectives: a rank with slow data is late at one collective per step, and no
  more often than others elsewhere. Collectives of other ranks do not count: on a mesh, its TP group
  waits for it first, and then other ranks wait for its TP group.
  If they do not, but the replay is shorter without it, the result is unknown.
- Where it is last, it is later than the uncertainty of the clocks, on average.
- The typical step is at least 2% shorter without it. The cost is the systematic part: the smallest
  of two replayed differences and the median extra work (`RankPricing.without`,
  `RankWork.excess_ns`). If the replay of the recorded steps is wrong by more than 5%, or by more
  than the cost, the result is unknown.

Ranks that are late in turns are an imbalance. So is a rank that works longer in a few steps, such
as one that evaluates alone (`RareWork`). Ratios refer to the typical step of the median rank, as in
the verdict.

Source: RULES R32; TraceLens' start skew and communication latency (minimum over ranks).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.breakdown import DimensionTime, measure_dimensions
from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.analysis.context import remember
from fsdp_inspect.analysis.mesh_dimensions import group_dimensions, name_rank_sets, rank_coordinates
from fsdp_inspect.analysis.shared_collectives import Matching
from fsdp_inspect.analysis.step_selection import (
    RankSteps,
    TimedRanks,
    split_by_rank,
    timed_ranks,
    timed_summary,
)
from fsdp_inspect.analysis.step_times import RankOverlap, measure_overlap
from fsdp_inspect.analysis.stragglers.arrivals import Arrivals, Lateness, find_arrivals
from fsdp_inspect.analysis.stragglers.dimension_waits import (
    DimensionWait,
    measure_dimension_waits,
    waits_for,
)
from fsdp_inspect.analysis.stragglers.evidence import (
    LEAST_COST_RATIO,
    MAX_ERROR_RATIO,
    OWN_PARTS,
    StragglerEvidence,
    find_slow_group,
)
from fsdp_inspect.analysis.stragglers.expert_load import ExpertLoad, measure_expert_load
from fsdp_inspect.analysis.stragglers.rank_replay import RankPricing, ReplayedCost, StepReplay
from fsdp_inspect.analysis.stragglers.rank_work import (
    MAX_CHANCE,
    RankWork,
    common_steps,
    sample_ranks,
    spread,
    steps_to_tell,
    windows_of,
)
from fsdp_inspect.analysis.trust import Trust, find_extra_run_delay, measure_trust
from fsdp_inspect.analysis.verdict import STRAGGLER_RATIO, RareWork, SlowGroup, Straggler
from fsdp_inspect.columns import (
    Column,
    TableSpec,
    metric_column,
    number_column,
    text_column,
    value_column,
)
from fsdp_inspect.formatting import format_ns, format_ranks, format_ratio
from fsdp_inspect.metrics import MetricUnit
from fsdp_inspect.results import TableResult
from fsdp_inspect.statistics import median, percentile
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.mesh_dimensions import DIMENSIONS, OTHER, WORLD
from fsdp_inspect.trace.run import RunSource, hosts_of

_Int64 = NDArray[np.int64]

MAX_SAMPLED_RANKS = 48
MAX_SAMPLED_STEPS = 8
STEPS_OF_WINDOW = 4
MAX_WINDOWS = 5
MAX_REPLAYED_RANKS = 64
"""Ranks times windows; it limits the time of the search."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, with times of its typical step and its arrivals at the sampled collectives."""

    rank: int
    host: str
    step_time_ns: int
    communication_ns: int | None
    """None, as the next value, if the import shows no collective."""
    exposed_ns: int | None
    overlap_ratio: float | None
    """None without communication."""
    own_work_ns: int | None
    """Step time - exposed communication: the time in which the rank does not wait for other
    ranks. None if the exposed time is unknown."""
    busiest_ratio: float
    """Fraction of the steps in which no other rank works longer."""
    peak_allocated_bytes: int | None
    """Peak over all steps, including memory steps."""
    last_ratio: float | None
    """Fraction of the sampled collectives at which the rank arrives last; None if unknown."""
    lateness_ns: int | None
    """Median time from the first arrival to the rank's arrival; None if its clock is not
    aligned."""
    shortest_ratio: float | None
    """Fraction of the sampled collectives that are shortest on this rank. It is a sign of late
    arrivals that requires no aligned clocks."""
    coordinates: dict[str, int]
    """The rank's place along each dimension of the mesh; empty: unknown, or a mesh without
    dimensions."""
    dimensions: tuple[DimensionTime, ...]
    """The rank's collectives by dimension of the mesh. Exposed times add up to `exposed_ns`."""

    @property
    def place(self) -> str:
        """The coordinates as text: `pp 0, tp 1`."""
        return ", ".join(f"{name} {place}" for name, place in self.coordinates.items())

    def exposed_along(self, dimension: str) -> int | None:
        """Exposed time along a dimension; None without communication along it."""
        times = (row.exposed_ns for row in self.dimensions if row.dimension == dimension)
        return next(times, None)

    @property
    def exposed_along_own_names(self) -> int | None:
        """Exposed time along dimensions with names of the user; None without such dimensions."""
        times = [row.exposed_ns for row in self.dimensions if row.dimension not in _LABELS]
        return sum(times) if times else None


def _exposed_column(dimension: str) -> Column:
    return value_column(
        f"exposed_{dimension}_ns",
        MetricUnit.NS,
        f"Exposed communication along the mesh dimension {dimension}.",
        lambda row: row.exposed_along(dimension),
        label=f"exposed {dimension}",
    )


_LABELS = (*DIMENSIONS, WORLD, OTHER)
RANK_DIMENSIONS = TableSpec(
    "Exposed communication by mesh dimension",
    (
        number_column("rank", "The rank."),
        text_column("place", "Its position along each dimension of the mesh.", label="mesh"),
        metric_column("exposed_ns", label="exposed"),
        *map(_exposed_column, _LABELS),
        value_column(
            "exposed_named_ns",
            MetricUnit.NS,
            "Exposed communication along dimensions with names of the user.",
            lambda row: row.exposed_along_own_names,
            label="exposed own",
        ),
    ),
)
"""The columns of `RankRow` for the dimensions of the mesh."""


@dataclass(frozen=True, slots=True)
class CollectiveSkew:
    """Collectives of one kind, message and process group, over the sample."""

    kind: str
    dimension: str
    """The dimension of the mesh; `other` if it is unknown."""
    bytes: int
    num_ranks: int
    """Number of ranks in the process group."""
    num_collectives: int
    skew_ns: int | None
    """Median time from the first to the last arrival; None if clocks are not aligned."""
    skew_p90_ns: int | None
    transfer_ns: int | None
    """Mean, as in `analysis.bandwidth`; None if the ends of most are only upper bounds."""
    skewed_ratio: float | None
    """Fraction of these collectives whose skew is longer than their transfer."""
    bus_bytes_per_s: float | None
    """Bus bandwidth of the transfer, which begins when all ranks have arrived."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Arrivals and transfers by collective",
        (
            text_column("collective", "Its kind.", lambda row: row.kind.replace("_", "-")),
            text_column("dimension", "The dimension of the mesh."),
            metric_column("bytes", lambda row: row.bytes if row.bytes >= 0 else None),
            number_column("num_ranks", "Ranks of the process group.", label="ranks"),
            number_column("num_collectives", "Sampled collectives.", label="n"),
            metric_column("skew_ns"),
            value_column(
                "skew_p90_ns",
                MetricUnit.NS,
                "The skew that 90% of the collectives do not exceed.",
                label="p90",
            ),
            metric_column("transfer_ns"),
            value_column(
                "bus_bytes_per_s",
                MetricUnit.BYTES_PER_S,
                "Bus bandwidth of the transfer.",
                label="bus",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class Ranks(TableResult):
    """The comparison of the ranks of a run."""

    ranks: tuple[RankRow, ...]
    """The ranks, ascending. Ranks without a timed step are absent."""
    skews: tuple[CollectiveSkew, ...]
    """The skews, largest total skew first."""
    skewed_ratio: float | None
    """Fraction of all sampled collectives whose skew is longer than their transfer. Above one half,
    RULES R32 puts the straggler before communication."""
    straggler: Straggler | None
    slow_group: SlowGroup | None
    """The place whose ranks the other ranks wait for. There is then no straggler."""
    straggler_refusal: str | None
    """The reason why it is unknown whether a rank or a group is slow, as a clause without a capital
    letter. None: it is known, or no clocks are aligned (`refusals`)."""
    trust: Trust
    """The evidence for and against a late rank: missing cores, missing ranks."""
    replay: StepReplay | None
    """The replay; None if clocks are not aligned, or the recorded order cannot be replayed."""
    rare_work: RareWork | None
    """Extra work that always the same rank has, but in few steps; None: there is none."""
    dimension_waits: tuple[DimensionWait, ...]
    """The waits for late ranks by dimension of the mesh. Empty for a mesh of one dimension, and if
    clocks are not aligned."""
    expert_load: ExpertLoad | None
    """The load of the ranks that share experts; None without expert parallelism."""
    num_recorded: int
    """The ranks of the run folder, also those without a timed step."""
    sampled_ranks: tuple[int, ...]
    sampled_steps: tuple[int, ...]
    clock_uncertainty_ns: int | None
    """Largest uncertainty between two sampled ranks; None if no collective of two aligned ranks
    matches."""
    refusals: tuple[str, ...]
    """Unknown results with the reason, one sentence each."""

    @property
    def imbalance_ns(self) -> int | None:
        """Cost of all late arrivals together, per step."""
        return None if self.replay is None else self.replay.replayed_ns - self.replay.balanced_ns

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Ranks in their typical step",
        (
            number_column("rank", "The rank."),
            text_column("host", "The machine that it ran on."),
            text_column("place", "Its position along each dimension of the mesh.", label="mesh"),
            metric_column("step_time_ns"),
            metric_column("communication_ns"),
            metric_column("exposed_ns", label="exposed"),
            metric_column("overlap_ratio"),
            metric_column("own_work_ns"),
            metric_column("busiest_ratio"),
            metric_column("lateness_ns", label="late"),
            metric_column("last_ratio", label="last"),
            metric_column("shortest_ratio"),
            metric_column("peak_allocated_bytes", label="peak"),
            *RANK_DIMENSIONS.columns[3:],
        ),
    )
    DIMENSIONS: ClassVar[TableSpec] = RANK_DIMENSIONS
    """The columns of `ranks` for their dimensions."""
    WAITS: ClassVar[TableSpec] = DimensionWait.TABLE
    """The columns of `dimension_waits`."""
    SKEWS: ClassVar[TableSpec] = CollectiveSkew.TABLE
    """The columns of `skews`."""

    def rows(self) -> Sequence[RankRow]:
        """The ranks, by rank."""
        return self.ranks


def measure_ranks(run: RunSource) -> Ranks:
    """Compare the ranks of a run.

    It reads the summary of all ranks, and the events of at most `MAX_SAMPLED_RANKS` ranks in
    `MAX_SAMPLED_STEPS` steps. These are the ranks that communicate least, because a straggler does
    not wait for other ranks, and other ranks spread evenly.
    """
    return remember(run, "ranks", partial(_measure_ranks, run))


def _measure_ranks(run: RunSource) -> Ranks:
    timed, trust = timed_ranks(run), measure_trust(run)
    members = timed.members
    here = [record.rank for record in run.ranks]
    sample = sample_ranks(timed.typical, here, MAX_SAMPLED_RANKS)
    steps = common_steps([member for member in members if member.rank in sample])
    sampled_steps = spread(steps, MAX_SAMPLED_STEPS)
    alignment = align_clocks(run, sample)
    arrivals = find_arrivals(run, sample, sampled_steps, alignment)
    num_windows = max(1, min(MAX_WINDOWS, MAX_REPLAYED_RANKS // max(1, len(sample))))
    windows = windows_of(steps, STEPS_OF_WINDOW, num_windows)
    rows = _rank_rows(run, timed, arrivals)
    pricing = RankPricing(run, sample, windows, alignment)
    step_time = timed.median.typical(timed.median.step_time_ns) if timed.median else None
    evidence = StragglerEvidence(
        tuple(row.rank for row in rows),
        RankWork(members),
        arrivals,
        arrivals.aligned(),
        set(sample) <= alignment.clocks.keys(),
        pricing,
        alignment.uncertainty_ns,
        step_time or 0,
        np.stack([timed.typical.means(part) for part in OWN_PARTS], axis=1),
        timed.typical.means(StepPart.BETWEEN_STEPS),
        cache(partial(_message_waits, run, members)),
    )
    slow_group, group_refusal = find_slow_group(evidence, name_rank_sets(run, evidence.ranks))
    priced, refusal = (None, None) if slow_group else _find_straggler(rows, evidence)
    if priced is not None:
        refusal = _find_missing_core(run, [priced.row.rank], rows, evidence)
        priced = priced if refusal is None else None
    if slow_group is not None:
        group_refusal = _find_missing_core(run, slow_group.ranks, rows, evidence)
        slow_group = slow_group if group_refusal is None else None
    refusal = refusal or group_refusal
    if not (priced or slow_group or refusal):
        refusal = trust.refuse_no_straggler(is_replayed=pricing.result is not None)
        if refusal is None and len(rows) > 1 and not len(arrivals) and pricing.result is None:
            refusal = "no collective of two ranks matches."
    if run.manifest.lacks_kernels:
        priced, slow_group = None, None
        refusal = "the traces show no work of the devices."
    return Ranks(
        ranks=rows,
        skews=_measure_skews(run, arrivals),
        skewed_ratio=_skewed_ratio(evidence.aligned),
        straggler=_describe_straggler(run, evidence, priced) if priced else None,
        slow_group=slow_group,
        straggler_refusal=None if priced else refusal,
        trust=trust,
        replay=None if timed.lacks_communication else pricing.result,
        rare_work=find_rare_work(timed),
        dimension_waits=measure_dimension_waits(run, arrivals, alignment.uncertainty_ns),
        expert_load=measure_expert_load(run),
        num_recorded=len(here),
        sampled_ranks=tuple(sample),
        sampled_steps=tuple(sampled_steps),
        clock_uncertainty_ns=alignment.uncertainty_ns if len(evidence.aligned) else None,
        refusals=(*alignment.refusals.values(), *pricing.refusals),
    )


def _message_waits(run: RunSource, members: Sequence[RankSteps]) -> dict[int, int]:
    """Return the exposed sends and receives in the typical step of each rank; empty without any."""
    sends = split_by_rank(timed_summary(run, kinds=[EventKind.POINT_TO_POINT]))
    return {
        member.rank: member.typical_per_step(rows, "exposed_ns")
        for member in members
        if (rows := sends.get(member.rank)) is not None
    }


def _rank_rows(run: RunSource, timed: TimedRanks, arrivals: Arrivals) -> tuple[RankRow, ...]:
    peaks = run.statistics()
    peaks = peaks.where(peaks.kind == StepPart.PEAK_ALLOCATED)
    peak_bytes = dict(zip(peaks.rank.tolist(), peaks.bytes.tolist(), strict=True))
    busiest = _busiest_ratios(timed.members)
    lateness = Lateness(arrivals)
    dimensions = measure_dimensions(run)
    return tuple(
        RankRow(
            rank=row.rank,
            host=row.host,
            step_time_ns=row.step_time_ns,
            communication_ns=row.communication_ns,
            exposed_ns=row.exposed_ns,
            overlap_ratio=row.overlap_ratio,
            own_work_ns=row.own_work_ns,
            busiest_ratio=busiest[row.rank],
            peak_allocated_bytes=peak_bytes.get(row.rank),
            last_ratio=lateness.last_ratio(row.rank),
            lateness_ns=lateness.typical_ns(row.rank),
            shortest_ratio=lateness.shortest_ratio(row.rank),
            coordinates=rank_coordinates(run, row.rank),
            dimensions=dimensions[row.rank],
        )
        for row in measure_overlap(run).ranks
    )


def _busiest_ratios(members: Sequence[RankSteps]) -> dict[int, float]:
    """Return, by rank, the fraction of its steps in which no other rank works longer."""
    if not members:
        return {}
    work = np.concatenate([member.own_work_ns for member in members])
    steps, place = np.unique(
        np.concatenate([member.steps for member in members]), return_inverse=True
    )
    longest = np.full(len(steps), np.iinfo(np.int64).min)
    np.maximum.at(longest, place, work)
    bounds = np.cumsum([0, *(len(member.steps) for member in members)]).tolist()
    is_longest = work == longest[place]
    return {
        member.rank: int(np.count_nonzero(is_longest[low:high])) / (high - low)
        for member, (low, high) in zip(members, pairwise(bounds), strict=True)
    }


def _skewed_ratio(aligned: Arrivals) -> float | None:
    aligned = aligned.timed()
    if len(aligned) == 0:
        return None
    return float(np.count_nonzero(aligned.skew_ns() > aligned.transfer_ns) / len(aligned))


def _measure_skews(run: RunSource, arrivals: Arrivals) -> tuple[CollectiveSkew, ...]:
    matching = Matching(run.manifest.process_groups, run.manifest.world_size)
    rows = arrivals.rows
    dimensions = group_dimensions(run, arrivals.ranks[0]) if arrivals.ranks else None
    likes = np.stack([rows.kind, rows.bytes, rows.group], axis=1).astype(np.int64)
    skews = []
    for kind, message, group in np.unique(likes, axis=0).tolist():
        own = arrivals.where((likes == (kind, message, group)).all(axis=1))
        aligned = own.aligned()
        skew = aligned.skew_ns() if len(aligned) else np.empty(0, dtype=np.int64)
        num_ranks = len(matching.members(group, arrivals.ranks[0]))
        timed = own.timed()
        transfer = round(timed.transfer_ns.mean()) if len(timed) else None
        factor = bus_factor(kind, num_ranks)
        skews.append(
            CollectiveSkew(
                kind=EventKind(kind).label,
                dimension=dimensions.label(group) if dimensions else OTHER,
                bytes=message,
                num_ranks=num_ranks,
                num_collectives=len(own),
                skew_ns=median(skew),
                skew_p90_ns=percentile(skew, 90),
                transfer_ns=transfer,
                skewed_ratio=_skewed_ratio(aligned),
                bus_bytes_per_s=(
                    message * factor / transfer * 1e9
                    if transfer and factor and message > 0
                    else None
                ),
            )
        )
    total = [(row.skew_ns or 0) * row.num_collectives for row in skews]
    order = sorted(range(len(skews)), key=lambda place: -total[place])
    return tuple(skews[place] for place in order)


@dataclass(frozen=True, slots=True)
class _Priced:
    row: RankRow
    cost: ReplayedCost


def _find_straggler(
    rows: Sequence[RankRow], evidence: StragglerEvidence
) -> tuple[_Priced | None, str | None]:
    """Return the straggler, or the reason why it is unknown; see [Note: straggler conditions]."""
    row = _find_suspect(rows, evidence)
    if row is None:
        return None, None
    work = evidence.work
    chance = work.chance(row.rank)
    if chance > MAX_CHANCE:
        return None, (
            f"rank {row.rank} works longest in {work.num_longest(row.rank)} of {work.num_steps} "
            f"steps. Among {work.num_ranks} equal ranks, this happens by chance in up to "
            f"{format_ratio(chance)} of runs. Record "
            f"{steps_to_tell(work, row.rank)}."
        )
    priced, replay = evidence.pricing.without([row.rank]), evidence.pricing.result
    if priced is None or replay is None:
        return None, (
            f"rank {row.rank} works longest in most steps, but its cost is unknown: its clock is "
            "not aligned, or its steps cannot be replayed."
        )
    cost = min(priced.cost_ns, work.excess_ns(row.rank))
    if cost < evidence.least_cost_ns:
        return None, _judge_messages(evidence, row.rank)
    if not evidence.are_waited_for([row.rank]):
        return None, _judge_messages(evidence, row.rank) or (
            f"rank {row.rank} works longest in most steps, by {format_ns(work.excess_ns(row.rank))}"
            f" a step, and the replay is {format_ns(cost)} a step shorter without it. The arrivals "
            "at collectives do not show that other ranks wait for at least half of this work, so "
            "they may wait for another reason."
        )
    if replay.error_ratio > MAX_ERROR_RATIO or cost < replay.error_ratio * evidence.step_time_ns:
        return None, (
            f"the cost of rank {row.rank} is unknown, because the replay misses the recorded step "
            f"by {format_ratio(replay.error_ratio)}."
        )
    return _Priced(row, replace(priced, cost_ns=cost)), None


def _find_missing_core(
    run: RunSource, ranks: Sequence[int], rows: Sequence[RankRow], evidence: StragglerEvidence
) -> str | None:
    """Return why the extra work of slow ranks may be waits for a core; None: it is not.

    A thread lacks a core only while it works, so more work alone makes the waits longer. Waits that
    are as long for the work as on the other ranks explain no difference.
    """
    found = find_extra_run_delay(run, ranks)
    if found is None:
        return None
    delay, usual_ratio = found
    own = median([row.own_work_ns or 0 for row in rows if row.rank in ranks]) or 0
    others = median([row.own_work_ns or 0 for row in rows if row.rank not in ranks]) or 0
    expected_ratio = usual_ratio * own / others if others else usual_ratio
    extra_ns = (delay.ratio - expected_ratio) * evidence.step_time_ns
    if 2 * extra_ns < evidence.work.excess_ns(*ranks):
        return None
    verb = "works" if len(ranks) == 1 else "work"
    usual = f" (other ranks: {format_ratio(usual_ratio)})" if usual_ratio else ""
    return (
        f"{format_ranks(ranks)} {verb} longest in most steps, but the training thread of rank "
        f"{delay.rank} has no CPU core for {format_ratio(delay.ratio)} of the time{usual}. This "
        "can explain at least half of the extra work. Find what runs on its cores: other programs, "
        f"or other threads and workers of rank {delay.rank}. Then record again."
    )


def _judge_messages(evidence: StragglerEvidence, rank: int) -> str | None:
    """Return why a rank may delay others that only exchange messages with it; None: it does not."""
    if not evidence.message_waits_ns:
        return None
    return (
        f"rank {rank} works longest in most steps, but its cost is unknown, because sends and "
        "receives cannot be replayed. Its extra work in the steps takes "
        f"{format_ns(evidence.work.excess_ns(rank))} a step."
    )


def _find_suspect(rows: Sequence[RankRow], evidence: StragglerEvidence) -> RankRow | None:
    """Return the rank that works longest in most steps, if its extra work matters; else None."""
    if evidence.pricing.result is None or not len(evidence.aligned) or not evidence.work.num_steps:
        return None
    return next(
        (
            row
            for row in rows
            if evidence.works_longest([row.rank])
            and evidence.work.excess_ns(row.rank) >= evidence.least_cost_ns
        ),
        None,
    )


def _describe_straggler(run: RunSource, evidence: StragglerEvidence, priced: _Priced) -> Straggler:
    row = priced.row
    late_ns, phase = evidence.how_late([row.rank])
    meanwhile, meanwhile_ns = evidence.longest_part([row.rank])
    return Straggler(
        rank=row.rank,
        host=row.host if len({*hosts_of(run).values()}) > 1 else "",
        last_ratio=row.last_ratio or 0.0,
        late_ns=late_ns,
        phase=phase,
        meanwhile=meanwhile,
        meanwhile_ns=meanwhile_ns,
        like_rank=priced.cost.like_rank,
        cost_ns=priced.cost.cost_ns,
        cost_low_ns=priced.cost.low_ns,
        cost_high_ns=priced.cost.high_ns,
        cost_ratio=priced.cost.cost_ns / evidence.step_time_ns,
        between_ns=evidence.extra_between_ns([row.rank]),
        waits_ns=waits_for(run, evidence.aligned, row.rank, evidence.uncertainty_ns),
    )


# --- Search for a straggler or a slow group, but read events only if step times give a reason to.
#
# A straggler works longer than the other ranks: its step time - its exposed communication is larger
# than the median over ranks. So do the ranks of a slow group. The summary shows that without
# events. Only then the search reads the events of the ranks that `fsdp-inspect show RUN ranks`
# reads, so that both give the same result.


def may_have_late_ranks(ranks: Sequence[RankOverlap]) -> bool:
    """Return whether the extra work of some rank is large enough to make the step longer."""
    work = [row.own_work_ns for row in ranks if row.own_work_ns is not None]
    median_work, step_time = median(work), median([row.step_time_ns for row in ranks])
    if len(work) < 2 or median_work is None or not step_time:
        return False
    return max(work) - median_work >= STRAGGLER_RATIO * step_time


def find_rare_work(timed: TimedRanks) -> RareWork | None:
    """The steps in which one rank works much longer than all others; None: there are none.

    Args:
        timed: The timed steps of all ranks.
    """
    if timed.median is None or timed.lacks_communication:
        return None
    step_ns = timed.median.typical(timed.median.step_time_ns)
    found = RankWork(timed.members).find_rare(step_ns, LEAST_COST_RATIO * step_ns)
    if found is None:
        return None
    own = next(member for member in timed.members if member.rank == found.rank)
    others = [member for member in timed.members if member.rank != found.rank]
    extra = {
        part.label: _median_change(own.per_step(part), np.isin(own.steps, found.steps))
        for part in OWN_PARTS
    }
    longest = max(extra, key=lambda part: extra[part])
    waits = [_longer_wait(each, found.steps) for each in others]
    return replace(
        found,
        part=longest if 2 * extra[longest] >= found.extra_ns else None,
        others_wait=2 * float(np.median(waits)) >= found.extra_ns,
    )


def _median_change(times: NDArray[np.int64], is_rare: NDArray[np.bool_]) -> float:
    """The median over some steps - that over the others; 0 if one of them is empty."""
    if is_rare.all() or not is_rare.any():
        return 0.0
    return float(np.median(times[is_rare]) - np.median(times[~is_rare]))


def _longer_wait(member: RankSteps, steps: Sequence[int]) -> float:
    """How much longer a rank waits in some steps, or in the step after each (median).

    Work after the last collective of a step is waited for at the first one of the next step.
    """
    is_one, waits = np.isin(member.steps, steps), member.exposed_ns
    following = np.append(waits[1:], 0)
    return _median_change(np.where(is_one, np.maximum(waits, following), waits), is_one)


def find_late_ranks(run: RunSource, ranks: Sequence[RankOverlap]) -> Straggler | SlowGroup | None:
    """Return the rank or the group that the other ranks wait for; None without one."""
    if not may_have_late_ranks(ranks):
        return None
    found = measure_ranks(run)
    return found.slow_group or found.straggler
