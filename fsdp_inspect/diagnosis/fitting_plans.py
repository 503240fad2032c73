"""Find plans that would have fitted where a run ran out of memory.

The recorded steps are simulated under other plans, with the memory of the step that failed: what it
ran is measured, and the rest is in proportion. The simulation must first explain the failure: its
peak of the recorded plan must reach what was alive plus the request. Otherwise no plan is proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import FoundPlans, RunnablePlan, find_plans
from fsdp_inspect.analysis.context import RunContext
from fsdp_inspect.analysis.step_selection import select_steps, timed_rank
from fsdp_inspect.diagnosis.out_of_memory import OutOfMemory
from fsdp_inspect.errors import ClusterError, FsdpInspectError
from fsdp_inspect.parallel.tasks import Tasks
from fsdp_inspect.simulation.recorded import (
    RecordedWork,
    measure_work,
    with_memory_of_failed_step,
)
from fsdp_inspect.store.reduction.run_statistics import condense_run
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.live_memory import STORAGE_TRACKER
from fsdp_inspect.trace.run import RunManifest, RunSource
from fsdp_inspect.trace.tables import StatisticsTable

NUM_PLANS = 3
_GROWN_MARGIN = 0.02
"""Margin to add if the failed step is larger than the recorded ones."""
_GROWN_RATIO = 0.005
"""The smallest growth of the failed step that adds `_GROWN_MARGIN`."""
_EXPLAINED = 0.98
"""The fraction of the memory at the failure that the simulated peak must reach."""


class NoPlans(StrEnum):
    """The reasons why no plan is proposed."""

    IMPORTED = "imported"
    """A snapshot has no times and no plan."""
    NO_LIMIT = "no limit"
    """The device's memory is unknown."""
    FIRST_STEP = "first step"
    """No step has ended."""
    UNSHARDED = "unsharded"
    """The sharder has no sharding plan: each rank keeps all parameters; `detail` names it."""
    LEAK = "leak"
    """Each step leaves storages allocated, so no plan fits for long."""
    NOT_TRAINING = "not training"
    """The allocation belongs to an evaluation."""
    NOT_FOLLOWED = "not followed"
    """The storages of the failed step were not tracked (CUDA)."""
    NOT_EXPLAINED = "not explained"
    """The simulated peak of the recorded plan is below the live memory."""
    NOT_SIMULATED = "not simulated"
    """The simulation misses data; `detail` has the reason."""
    NONE_FITS = "none fits"


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """The plans that would have fitted, or the reason why none is proposed."""

    limit_bytes: int | None
    """The highest peak of a proposed plan, with its margin; None: unknown."""
    reason: NoPlans | None
    """The reason why no plan is proposed; None: there is at least one plan."""
    detail: str = ""
    """A sentence from the simulation about the missing data."""
    found: FoundPlans | None = None
    """The plans by predicted step time; None: none was simulated."""
    recorded_peak_bytes: int | None = None
    """Simulated peak of the recorded plan with the memory of the failed step."""
    growth_ratio: float | None = None
    """Bytes that forwards keep in the failed step / in the recorded steps; None: unknown."""
    has_timed_steps: bool = True
    """Whether the run has timed steps. If all steps are warm-up steps, the predicted times are
    rough."""

    @property
    def num_plans(self) -> int:
        """The number of simulated plans."""
        return self.found.num_plans if self.found is not None else 0

    @property
    def plans(self) -> tuple[RunnablePlan, ...]:
        """The plans that would have fitted, by predicted step time."""
        return self.found.plans if self.found is not None else ()


def search_plans(
    run: RunSource,
    found: OutOfMemory,
    *,
    name_file: Callable[[int], str],
    tasks: Tasks | None = None,
) -> PlanSearch:
    """Find the plans that would have fitted, by predicted step time.

    Args:
        run: The run that ran out of memory.
        found: The failed allocation of the run.
        name_file: Returns the file of the n-th plan, from 1, as the commands name it.
        tasks: Runs the simulations; default in this process.

    Raises:
        ClusterError: The cluster failed; the message names the missing plans.
    """
    record = found.record
    reason = _refusal(run, found)
    if reason is not None:
        return PlanSearch(record.limit_bytes, reason, run.manifest.sharder_traits.title)
    has_timed_steps = timed_rank(run) is not None
    source = run if has_timed_steps else _WithoutWarmup.of(run)
    try:
        work, ratio = _work_of_failure(source, found)
    except ClusterError:
        raise
    except FsdpInspectError as error:
        return PlanSearch(record.limit_bytes, NoPlans.NOT_SIMULATED, str(error))
    peak = work.simulate().peak_bytes
    reached = (record.allocated_bytes or 0) + (record.requested_bytes or 0)
    searched = PlanSearch(
        limit_bytes=record.limit_bytes,
        reason=NoPlans.NOT_EXPLAINED,
        recorded_peak_bytes=peak,
        growth_ratio=ratio,
        has_timed_steps=has_timed_steps,
    )
    if peak is None or peak < _EXPLAINED * reached:
        return searched
    margin = work.trust.memory_margin + (_GROWN_MARGIN if abs(ratio - 1) > _GROWN_RATIO else 0.0)
    assert record.limit_bytes is not None, "checked by _refusal"
    limit = round(record.limit_bytes / (1 + margin))
    try:
        fitting = find_plans(
            source,
            AdviceRequest(memory_limit=limit),
            NUM_PLANS,
            work=work,
            margin=0.0,  # the limit has it
            name_file=name_file,
            tasks=tasks,
        )
    except ClusterError:
        raise
    except FsdpInspectError as error:
        return replace(searched, reason=NoPlans.NOT_SIMULATED, detail=str(error))
    return replace(
        searched,
        limit_bytes=limit,
        found=fitting,
        reason=None if fitting.plans else NoPlans.NONE_FITS,
    )


def _refusal(run: RunSource, found: OutOfMemory) -> NoPlans | None:
    record = found.record
    if run.manifest.source == "imported":
        return NoPlans.IMPORTED
    if record.limit_bytes is None:
        return NoPlans.NO_LIMIT
    if found.leak and found.steady is not None:
        return NoPlans.LEAK
    if run.manifest.sharder_traits.has_buckets:
        return NoPlans.UNSHARDED
    if record.phase == Phase.EVALUATION.label:
        return NoPlans.NOT_TRAINING
    if not select_steps(run).finished:
        return NoPlans.FIRST_STEP
    return NoPlans.NOT_FOLLOWED if record.live_from != STORAGE_TRACKER else None


def _work_of_failure(run: RunSource, found: OutOfMemory) -> tuple[RecordedWork, float]:
    record = found.record
    is_timed = timed_rank(run, record.rank) is not None
    work = measure_work(run, rank=record.rank if is_timed else None)
    return with_memory_of_failed_step(work, run, record.step)


class _WithoutWarmup(RunContext):
    """The run with its warm-up steps as timed steps, if there are no others."""

    @property
    def manifest(self) -> RunManifest:
        return self.source.manifest.model_copy(update={"warmup_steps": 0, "memory_steps": []})

    def statistics(self) -> StatisticsTable:
        """The statistics of the run with these timed steps; the stored ones have fewer."""
        rules = StepRules.of(self.manifest)
        return self.remember(
            "statistics", lambda: condense_run(lambda kind: self.summary(kinds=[kind]), rules)
        )
