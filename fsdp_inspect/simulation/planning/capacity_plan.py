"""Answer a capacity question: the best plan, or what is missing for any plan to fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.results import Result, to_plain
from fsdp_inspect.simulation.planning.candidates import BATCH_SIZES, Candidate, Job, list_candidates
from fsdp_inspect.simulation.planning.forecast_step import ForecastStep
from fsdp_inspect.simulation.planning.machines import PlannedMachine
from fsdp_inspect.simulation.planning.prediction import FitVerdict, PlannedMemory, predict_memory
from fsdp_inspect.simulation.planning.predictor import FormulaPredictor
from fsdp_inspect.simulation.planning.search import PlanSearchResult, search
from fsdp_inspect.simulation.planning.workload import plan_of
from fsdp_inspect.trace.plan import Plan

MOST_GPUS = 4096
VALUES = (
    "step_time_ns",
    "tokens_per_s",
    "mfu",
    "gpu_hours",
    "days",
    "energy_kwh",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "device_bytes",
    "host_bytes",
)
"""The predicted values of a plan, in the order of reports."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What would make some plan fit."""

    memory_bytes: float | None
    """The smallest budget of a device with which some plan is certain to fit on these GPUs; None:
    the host's memory is too small."""
    gpus: int | None
    """The smallest number of GPUs, doubled from the given one, on which some plan is certain to fit
    the budget; None: none up to `MOST_GPUS`."""


@dataclass(frozen=True, slots=True)
class CapacityPlan(Result):
    """The answer of `fsdp-inspect plan`."""

    model: str
    num_parameters: int
    gpus: int
    gpu: str
    preset: str
    seq_len: int
    tokens: float
    memory_bytes: int
    """The budget of a device."""
    host_memory_bytes: int | None
    """The budget of a host; None: not limited."""
    found: PlanSearchResult
    shortfall: Shortfall | None
    """What is missing; None: a plan fits."""
    notes: tuple[str, ...]
    """Settings that could not be compared, and forecasts that failed, one sentence each."""
    plan: Plan | None
    """The best plan as a plan file; None: no plan fits."""
    job: Job | None
    """The training; None: that of a builder."""

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain values, those of the search first; without plan and job."""
        plain = to_plain(self)
        assert isinstance(plain, dict)
        del plain["job"], plain["plan"]
        plain = {**plain.pop("found"), **plain}
        for prediction in (plain["best"], plain["undecided"], *plain["runners_up"]):
            if prediction is not None:
                prediction["candidate"] = _plain_candidate(prediction["candidate"])
        for rejection in plain["rejected"]:
            example = rejection.pop("example")
            rejection |= {name: value for name, value in example.items() if name != "reason"}
            rejection["candidate"] = _plain_candidate(rejection["candidate"])
            rejection["detail"] = example["reason"]
        return plain


def _plain_candidate(candidate: dict[str, Any]) -> dict[str, Any]:
    """The settings by name; those of a builder are pairs."""
    return dict(candidate["items"]) if "items" in candidate else candidate


def make_capacity_plan(
    job: Job,
    machine: PlannedMachine,
    preset: str,
    candidates: Sequence[Candidate] | None = None,
    forecast: Callable[[Candidate], ForecastStep | None] | None = None,
) -> CapacityPlan:
    """Find the fastest plan that fits a budget.

    Args:
        job: The training.
        machine: The machines with their budgets.
        preset: The name of the machines' preset.
        candidates: The plans to compare; None: all.
        forecast: Makes the forecast of a plan to report, or returns None; None: there is none.

    Raises:
        ConfigError: No candidate has the requested batch, or the preset has too few GPUs.
    """
    machine.speed.links.ring(job.gpus, 1)  # rejects a preset without a network
    listed = list(list_candidates(job)) if candidates is None else list(candidates)
    if not listed:
        raise ConfigError(
            f"Invalid --batch-tokens {job.batch_tokens}: no microbatch of {BATCH_SIZES[0]} to "
            f"{BATCH_SIZES[-1]} sequences of {job.seq_len} tokens on {job.gpus} GPUs divides it. "
            f"Expected a multiple of {job.seq_len * job.gpus} tokens. Change --batch-tokens or "
            "--seq-len."
        )
    found = search(FormulaPredictor(job, machine, forecast), listed)
    best = None if found.best is None else found.best.candidate
    return CapacityPlan(
        model=job.model.name,
        num_parameters=job.model.num_parameters,
        gpus=job.gpus,
        gpu=machine.speed.gpu.name,
        preset=preset,
        seq_len=job.seq_len,
        tokens=job.tokens,
        memory_bytes=machine.memory_bytes,
        host_memory_bytes=machine.host_bytes,
        found=found,
        shortfall=None if best else _find_shortfall(job, machine),
        notes=(),
        plan=plan_of(job, best) if isinstance(best, Candidate) else None,
        job=job,
    )


def _find_shortfall(job: Job, machine: PlannedMachine) -> Shortfall:
    gpus: int | None = None
    size = job.gpus * 2
    while size <= MOST_GPUS and gpus is None and machine.has_network:
        if any(memory.verdict is FitVerdict.FITS for memory in _smallest(job, machine, size)):
            gpus = size
        size *= 2
    unlimited = replace(machine, memory_bytes=1 << 62)
    needs = [
        memory.device.high
        for memory in _smallest(job, unlimited, job.gpus)
        if memory.verdict is FitVerdict.FITS
    ]
    return Shortfall(min(needs, default=None), gpus)


def _smallest(job: Job, machine: PlannedMachine, gpus: int) -> Iterator[PlannedMemory]:
    """The memory of the candidates with the least of it."""
    larger = replace(job, gpus=gpus, batch_tokens=None)
    for candidate in list_candidates(larger, batch_sizes=BATCH_SIZES[:1]):
        is_small = (
            candidate.checkpointing == "full"
            and candidate.reshard_after_forward
            and candidate.blocks_per_unit == 1
            and candidate.prefetch == 0
            and candidate.param_dtype == "bfloat16"
            and candidate.replicas == 1
        )
        if is_small:
            yield predict_memory(larger, machine, candidate)
