"""Which run is this, and which step stands for it? What is told before any wait is looked at."""

from dataclasses import dataclass
from typing import Protocol

from fsdp_inspect.analysis.breakdown import StepBreakdown, measure_breakdown
from fsdp_inspect.analysis.damage import try_measure
from fsdp_inspect.analysis.provenance import Provenance, measure_provenance
from fsdp_inspect.analysis.run_identity import RunIdentity, identify
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.trace.run import RunSource


class Heading(Protocol):
    """What a page or a report says of a run at its top."""

    @property
    def run_id(self) -> str:
        """The run's name."""
        ...

    @property
    def status(self) -> str:
        """As `RunStatus` writes it."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing or odd about the run, in words."""
        ...

    @property
    def identity(self) -> RunIdentity:
        """What ran, where."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        ...

    @property
    def backend(self) -> str:
        """What moved the bytes."""
        ...


@dataclass(frozen=True, slots=True)
class RunHeading:
    """A run's heading, and the step that stands for it; a small part of its `RunDigest`."""

    run_id: str
    status: str
    notes: tuple[str, ...]
    identity: RunIdentity
    world_size: int
    backend: str
    median_rank: int | None
    breakdown: StepBreakdown | None
    """The median step of the median rank; None without a timed step."""
    provenance: Provenance | None


def measure_run_heading(run: RunSource) -> RunHeading:
    """Of steps only what the summaries tell; of what is damaged only what that needs."""
    damage: list[str] = []
    breakdown = measure_breakdown(run).headline
    provenance = try_measure(measure_provenance, run, damage)
    manifest = run.manifest
    return RunHeading(
        run_id=manifest.run_id,
        status=run.status.value,
        notes=tuple(dict.fromkeys([*run.notes, *damage])),
        identity=identify(manifest),
        world_size=manifest.world_size,
        backend=manifest.backend,
        median_rank=measure_step_times(run).median_rank,
        breakdown=breakdown,
        provenance=provenance,
    )
