"""Measure the heading of a run: its identity, its status and the breakdown of its typical step."""

from dataclasses import dataclass
from typing import Protocol

from fsdp_inspect.analysis.breakdown import StepBreakdown, measure_breakdown
from fsdp_inspect.analysis.damage import try_measure
from fsdp_inspect.analysis.provenance import Provenance, measure_provenance
from fsdp_inspect.analysis.run_identity import RunIdentity, identify
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.trace.run import RunSource


class Heading(Protocol):
    """The fields that a page or a report shows at its top."""

    @property
    def run_id(self) -> str:
        """The run's name."""
        ...

    @property
    def status(self) -> str:
        """The value of a `RunStatus`."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Missing or unusual data of the run, one sentence each."""
        ...

    @property
    def identity(self) -> RunIdentity:
        """The command, model, device and versions of the run."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        ...

    @property
    def backend(self) -> str:
        """The backend of `torch.distributed`, such as `nccl`."""
        ...


@dataclass(frozen=True, slots=True)
class RunHeading:
    """The heading of a run and its typical step, which are a small part of its `Summary`."""

    run_id: str
    status: str
    notes: tuple[str, ...]
    identity: RunIdentity
    world_size: int
    backend: str
    median_rank: int | None
    breakdown: StepBreakdown | None
    """The typical step of the median rank; None without a timed step."""
    provenance: Provenance | None


def measure_run_heading(run: RunSource) -> RunHeading:
    """Measure the heading of a run from its summary, without waits.

    If a file is damaged, the numbers that need it are None, and `notes` gives the reason.
    """
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
