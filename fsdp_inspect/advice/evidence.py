"""What is advice made of? What the analyses say, the rows it rests on, and what comes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.analysis.exposed import ExposedWait
from fsdp_inspect.analysis.gathers_in_flight import GathersInFlight
from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.optimizer_wait import OptimizerWait
from fsdp_inspect.analysis.pipeline import Pipeline
from fsdp_inspect.analysis.plan_check.check import PlanCheck
from fsdp_inspect.analysis.verdict import Verdict
from fsdp_inspect.comparison.noise import WORTH_NAMING_RATIO
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.trace.run import RunManifest

MOST_ROWS = 3
"""Events that stand for all of their kind."""


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """A shard group that crosses nodes: how fast it is, and how fast a node is inside."""

    num_nodes: int
    ranks_per_node: int
    """Of the group, the same on every node, and neighbours in it."""
    across_bytes_per_s: float
    """Bus bandwidth of its all-gathers, measured."""
    within_bytes_per_s: float | None
    """Bus bandwidth inside a node; None: nothing that ran there tells."""
    within_from: str
    """What tells it, in words; empty if nothing does."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One event of the trace that advice rests on; times count from the start of its step."""

    step: int
    microbatch: int
    fqn: str | None
    """None: of no unit."""
    kind: str
    phase: str
    start_ns: int
    end_ns: int
    exposed_ns: int
    what: str
    """What it shows, in words."""


def _row_of(wait: ExposedWait) -> TraceRow:
    cause = wait.cause.replace("_", " ")
    return TraceRow(
        step=wait.step,
        microbatch=wait.microbatch,
        fqn=wait.fqn,
        kind=wait.kind,
        phase=wait.phase,
        start_ns=wait.start_ns,
        end_ns=wait.end_ns,
        exposed_ns=wait.exposed_ns,
        what=f"exposed {format_ns(wait.exposed_ns)}, most of it {cause}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
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
    step_time_ns: int | None = None
    """Of the typical step."""
    peak_bytes: int | None = None
    """Highest peak allocated of all ranks."""
    peak_unit: str | None = None
    """Where the program stood at the highest moment of a memory step."""
    activation_bytes: int | None = None
    """Of that moment."""
    waits: tuple[ExposedWait, ...] = ()
    """The longest waits of the timed steps, longest first."""
    contention: Contention | None = None
    links: NodeLinks | None = None
    in_flight: GathersInFlight | None = None
    pipeline: Pipeline | None = None
    optimizer_wait: OptimizerWait | None = None

    def is_worth_naming(self, duration_ns: float) -> bool:
        """Whether a time is so large a part of the step that it may be advised on."""
        return bool(self.step_time_ns) and duration_ns >= WORTH_NAMING_RATIO * (
            self.step_time_ns or 0
        )

    def rows(self, is_meant: Callable[[ExposedWait], bool]) -> tuple[TraceRow, ...]:
        """The longest waits of a kind, longest first."""
        meant = [wait for wait in self.waits if is_meant(wait)]
        return tuple(_row_of(wait) for wait in meant[:MOST_ROWS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What it would bring to mend a finding: bounds from the trace, nothing that was played."""

    sentence: str
    """With the numbers; where none can be given it says so, and why."""
    saved_low_ns: int | None = None
    """Of a step; None: no time is predicted."""
    saved_high_ns: int | None = None
    added_low_bytes: int | None = None
    """To the peak; below 0: it falls. None: no memory is predicted."""
    added_high_bytes: int | None = None
    played_by: str = ""
    """The plans that tell what time it saves, where any can be played; empty: none do."""
    is_exposed: bool = False
    """The time is exposed communication, which changes of the plan may claim: then it is not
    claimed here ([Note: no ms twice] in `advice.gain_attribution`)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a run that no plan of units and prefetch mends."""

    rule: str
    """The tuning rule (`advice.rules`); empty if none."""
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
    rows: tuple[TraceRow, ...] = ()
    """Events that show it; empty where it is told from settings or sums."""
    effect: Effect = Effect(sentence="None is predicted.")
    assumptions: tuple[str, ...] = ()
    snippet: str = ""
    """Lines to paste; empty where it is no line of code that mends it."""
    verify: str = ""
    """How to see that it is mended."""
