"""What of a run does the gate look at? One number a metric and run, and what fills the peak.

Several runs are repeats of one program: of memory the highest counts, of times one number a run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_inspect.analysis.memory import Memory, PeakMoment
from fsdp_inspect.checks.limits import PHASES, TIME_METRICS
from fsdp_inspect.digest.run import RunDigest, digest_run
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus

NO_UNIT = "(no unit)"
_USABLE = (RunStatus.COMPLETE, RunStatus.IMPORTED)

RESTING = "resting"
"""The name of the moment after a step."""
Held = dict[tuple[str, str], int]
"""Bytes at a moment by unit and category."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What was alive at the highest moment of a phase, or after the step."""

    bytes: int
    unit: str
    """Position: the innermost unit on the host's stack."""
    held: Held


@dataclass(frozen=True, slots=True)
class Reading:
    """What one or more repeats of a program took."""

    manifest: RunManifest
    """Of the run with the highest peak."""
    run_ids: tuple[str, ...]
    method: str
    """Who counted the memory: `cuda_allocator`, `storage_tracker`, `memory_snapshot`; or empty."""
    memory: dict[str, int] = field(default_factory=dict)
    """Highest over the runs, by metric; what was not recorded is left out."""
    times: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Median of the timed steps of each run, by metric."""
    phase: str | None = None
    """Where the peak was reached; None: composition was not recorded."""
    moments: dict[str, Moment] = field(default_factory=dict)
    """By phase, and `RESTING`; of the run with the highest peak."""
    problems: tuple[str, ...] = ()
    """Why a run cannot be judged."""

    def value(self, metric: str) -> int | None:
        """A metric of memory; None: not recorded."""
        return self.memory.get(metric)


def read_runs(runs: Sequence[RunSource]) -> Reading:
    """Look at repeats of one program.

    Args:
        runs: At least one.
    """
    digests = [digest_run(run) for run in runs]
    top = max(range(len(runs)), key=lambda place: digests[place].memory.peak_allocated_bytes or 0)
    memory = digests[top].memory
    peak = memory.peak
    amounts: dict[str, int] = {}
    for digest in digests:
        for metric, amount in _memory_of(digest.memory).items():
            amounts[metric] = max(amount, amounts.get(metric, 0))
    return Reading(
        manifest=runs[top].manifest,
        run_ids=tuple(run.manifest.run_id for run in runs),
        method=next((row.method for row in memory.ranks if row.method), ""),
        memory=amounts,
        times={
            metric: times for metric in TIME_METRICS if (times := tuple(_times_of(metric, digests)))
        },
        phase=peak.phase if peak else None,
        moments=_moments_of(memory),
        problems=tuple(problem for run in runs if (problem := _problem(run)) is not None),
    )


def _memory_of(memory: Memory) -> dict[str, int]:
    ranks = memory.ranks
    found = {
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "step_adds_bytes": _highest(row.step_adds_bytes for row in ranks),
        "resting_bytes": _highest(row.resting_bytes for row in ranks),
    }
    found |= {
        f"peak_{moment.phase}_bytes": moment.bytes
        for moment in memory.phases
        if moment.phase in PHASES
    }
    if memory.peak is not None:
        found |= {f"category.{one.category}": one.bytes for one in memory.peak.categories}
    return {metric: amount for metric, amount in found.items() if amount is not None}


def _highest(amounts: Iterable[int | None]) -> int | None:
    """Of those that are known; None: none is."""
    return max((amount for amount in amounts if amount is not None), default=None)


def _times_of(metric: str, digests: Sequence[RunDigest]) -> list[int]:
    if metric == "step_time_ns":
        return [digest.step_time_ns.median for digest in digests if digest.step_time_ns]
    timed = [digest for digest in digests if digest.step_time_ns]
    return [digest.exposed_ns for digest in timed if digest.exposed_ns is not None]


def _moments_of(memory: Memory) -> dict[str, Moment]:
    found = {moment.phase: moment for moment in memory.phases}
    if memory.peak is not None:
        found[memory.peak.phase] = memory.peak
    if memory.resting is not None:
        found[RESTING] = memory.resting
    return {
        name: Moment(moment.bytes, _name(moment.fqn), _held(moment))
        for name, moment in found.items()
    }


def _held(peak: PeakMoment) -> Held:
    if not peak.owners:
        return {(NO_UNIT, one.category): one.bytes for one in peak.categories}
    return {
        (_name(owner.fqn), one.category): one.bytes
        for owner in peak.owners
        for one in owner.categories
    }


def _name(fqn: str | None) -> str:
    return NO_UNIT if fqn is None else format_unit(fqn)


def _problem(run: RunSource) -> str | None:
    if run.status not in _USABLE:
        return (
            f"Run {run.manifest.run_id!r} is {run.status.value}: it did not end normally on every "
            "rank, and may lack its peak. Record it again."
        )
    return None
