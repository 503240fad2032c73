"""The input and the parts of advice: results of the analyses, events of the trace, findings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsdp_inspect.analysis.bandwidth import KindBandwidth, measure_bandwidth
from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.analysis.exposed import ExposedWait
from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.memory.sharding_worth import ReplicationSaving, WholeMemory
from fsdp_inspect.analysis.optimizer_wait import OptimizerWait
from fsdp_inspect.analysis.pipeline import Pipeline
from fsdp_inspect.analysis.plan_check.check import PlanCheck
from fsdp_inspect.analysis.prefetch import GathersInFlight
from fsdp_inspect.analysis.trust import Trust
from fsdp_inspect.analysis.verdict import Verdict
from fsdp_inspect.comparison.noise import WORTH_NAMING_RATIO
from fsdp_inspect.formatting import format_count, format_ns
from fsdp_inspect.simulation.buckets import BucketSimulation
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import ProcessGroup, RunManifest, RunSource, hosts_of, ranks_per_node

MOST_ROWS = 3
"""The highest number of events that a finding or a suggestion shows."""


AND_HOST_WORK = ", and the host's work for these calls, which is not measured separately."
"""The end of the effect of a fix that removes collectives: their waits are no bound."""
SIMULATED_PLANS = "the simulated plans"
"""`Effect.predicted_by` of findings that only name a change of the plan."""


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """A shard group that crosses nodes, with its bandwidth across and within nodes."""

    num_nodes: int
    ranks_per_node: int
    """Ranks of the group on each node; consecutive, and equally many on every node."""
    across_bytes_per_s: float
    """Measured bus bandwidth of the group's all-gathers."""
    within_bytes_per_s: float | None
    """Bus bandwidth within a node; None: unknown, since no collective ran within a node."""
    within_from: str
    """A description of the source of `within_bytes_per_s`; empty if it is None."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One event of the trace that supports advice. Times count from the start of its step."""

    step: int
    microbatch: int
    fqn: str | None
    """None: the event belongs to no unit."""
    kind: str
    phase: str
    start_ns: int
    end_ns: int
    exposed_ns: int
    what: str
    """A description of the event."""


def _describe_wait(wait: ExposedWait) -> str:
    """`exposed 33.0 ms, the longest of 28 (median 2.10 ms)`: an event is not a typical one."""
    exposed = f"exposed {format_ns(wait.exposed_ns)}"
    if wait.count == 1:
        return exposed
    return f"{exposed}, the longest of {wait.count} (median {format_ns(wait.median_ns)})"


def _row_of(wait: ExposedWait) -> TraceRow:
    return TraceRow(
        step=wait.step,
        microbatch=wait.microbatch,
        fqn=wait.fqn,
        kind=wait.kind,
        phase=wait.phase,
        start_ns=wait.start_ns,
        end_ns=wait.end_ns,
        exposed_ns=wait.exposed_ns,
        what=_describe_wait(wait),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The results of the analyses of a run; None if an analysis has no result."""

    manifest: RunManifest
    verdict: Verdict
    """The verdict on the speed."""
    plan_check: PlanCheck | None
    allocator: AllocatorUse | None
    causes_ns: Mapping[str, int]
    """Exposed time of a step by cause, ns."""
    exposed_by_kind_ns: Mapping[str, int]
    backward_gathers_ns: int
    reductions_per_unit: float = 0.0
    """Reductions of gradients per unit and step in the typical step; 0 if it is unknown."""
    unused_map_ns: int = 0
    """The exposed time of the all-reduces of no unit in backward, which with
    `find_unused_parameters` are those of DDP's map of unused parameters."""
    optimizer_ns: int = 0
    """The optimizer in the typical step."""
    step_time_ns: int | None = None
    """Time of the typical step."""
    peak_bytes: int | None = None
    """The highest peak allocated over all ranks."""
    peak_unit: str | None = None
    """The unit that runs at the peak of a memory step."""
    activation_bytes: int | None = None
    """Activation bytes at that peak."""
    waits: tuple[ExposedWait, ...] = ()
    """The longest waits of the timed steps, longest first."""
    contention: Contention | None = None
    links: NodeLinks | None = None
    in_flight: GathersInFlight | None = None
    pipeline: Pipeline | None = None
    optimizer_wait: OptimizerWait | None = None
    whole_memory: WholeMemory | None = None
    """The memory without sharding; None for runs without FSDP or DDP."""
    trust: Trust = field(default_factory=Trust)
    """The evidence for and against times and gains."""
    unused_by_rank: tuple[str, ...] = ()
    """`RankRecord.unused_parameters` of the recorded ranks."""
    training: Verdict | None = None
    """The verdict on a training that is wrong; None: no mistake was found."""
    buckets: BucketSimulation | str = ""
    """The best size of buckets of DDP or ZeRO, or the reason why none is advised."""
    replication: ReplicationSaving | None = None
    """The time that DDP would save; None for runs without FSDP."""

    def is_worth_naming(self, duration_ns: float) -> bool:
        """Whether a time is a large enough part of the step to be worth advice."""
        return bool(self.step_time_ns) and duration_ns >= WORTH_NAMING_RATIO * (
            self.step_time_ns or 0
        )

    def rows(self, is_meant: Callable[[ExposedWait], bool]) -> tuple[TraceRow, ...]:
        """The longest waits that match, longest first."""
        meant = [wait for wait in self.waits if is_meant(wait)]
        return tuple(_row_of(wait) for wait in meant[:MOST_ROWS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of fixing a finding: bounds from the trace, without a simulation."""

    sentence: str
    """The effect with its numbers, or the reason why none is predicted."""
    saved_low_ns: int | None = None
    """Time saved a step; None: no time is predicted."""
    saved_high_ns: int | None = None
    """Of what is measured: the host's work for calls that a fix removes is not in it."""
    added_low_bytes: int | None = None
    """Bytes added to the peak; negative: the peak falls. None: no memory is predicted."""
    added_high_bytes: int | None = None
    predicted_by: str = ""
    """The plans whose simulation predicts the time; empty: no plan does."""
    is_exposed: bool = False
    """The time is exposed communication. Changes of the plan may save the same time: then this
    effect does not count it ([Note: no ms twice] in `advice.gain_parts`)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that no sharding plan can fix."""

    rule: str
    """The tuning rule (`advice.rules`); empty if none."""
    units: tuple[str, ...]
    """Fqns; empty: the whole run."""
    sentence: str
    evidence: str
    """The measurement that supports the sentence."""
    do: tuple[str, ...]
    numbers: dict[str, float | int | None] = field(default_factory=dict)
    """The numbers of the sentence, by metric name."""
    limits: bool = False
    """True if it limits the step, or if it makes the predictions of plans invalid. It is then shown
    before everything else."""
    rows: tuple[TraceRow, ...] = ()
    """Events that show the problem; empty if it comes from settings or sums."""
    effect: Effect = Effect(sentence="No gain is predicted.")
    assumptions: tuple[str, ...] = ()
    snippet: str = ""
    """Lines to paste; empty if no line of code fixes the problem."""
    verify: str = ""
    """A way to check that the problem is fixed."""


# --- Find shard groups that cross nodes, and measure their bandwidth across and within nodes.
#
# There is no result if the node of a rank is unknown (`trace.run`).


def find_node_links(run: RunSource) -> NodeLinks | None:
    """The shard group that crosses nodes, with its bandwidth across and within nodes.

    Returns:
        None if no shard group with all-gathers crosses nodes, if its ranks are not spread evenly
        over consecutive ranks of each node, or if their nodes or the bandwidth are unknown.
    """
    nodes = hosts_of(run)
    shards = [group for group in run.manifest.process_groups if group.role == "shard"]
    spread = {group.index: _spread(group, nodes) for group in shards}
    if not any(spread.values()):
        return None
    bandwidth = measure_bandwidth(run)
    kinds = bandwidth.kinds if bandwidth is not None else ()
    for kind in kinds:
        place = spread.get(kind.group) if kind.group is not None else None
        if place and kind.kind == EventKind.ALL_GATHER.label and kind.bus_bytes_per_s:
            within, source = _within(run, kinds, nodes)
            num_nodes, ranks_per_node = place
            return NodeLinks(num_nodes, ranks_per_node, kind.bus_bytes_per_s, within, source)
    return None


def _spread(group: ProcessGroup, nodes: dict[int, str]) -> tuple[int, int] | None:
    """Nodes of a group and ranks on each; None: one node, one rank a node, or unknown."""
    size = ranks_per_node(nodes.get(rank) for rank in group.ranks)
    if size is None or size in (1, len(group.ranks)):
        return None
    return len(group.ranks) // size, size


def _within(
    run: RunSource, kinds: tuple[KindBandwidth, ...], nodes: dict[int, str]
) -> tuple[float | None, str]:
    """The bandwidth within a node, emulated or the fastest measured, and its source."""
    link = run.manifest.emulation.get("intra")
    if isinstance(link, dict):
        return float(link["bandwidth_bytes_per_s"]), "the emulated link"
    groups = {group.index: group for group in run.manifest.process_groups}
    known = [
        (kind.bus_bytes_per_s, kind)
        for kind in kinds
        if kind.bus_bytes_per_s and kind.group is not None and _is_inside(groups[kind.group], nodes)
    ]
    if known:
        fastest, kind = max(known, key=lambda pair: pair[0])
        what = kind.kind.replace("_", "-")
        return fastest, f"measured: {format_count(kind.num_events)} {what}s of {kind.group_size}"
    return None, ""


def _is_inside(group: ProcessGroup, nodes: dict[int, str]) -> bool:
    places = {nodes.get(rank, "") for rank in group.ranks}
    return len(group.ranks) > 1 and len(places) == 1 and "" not in places
