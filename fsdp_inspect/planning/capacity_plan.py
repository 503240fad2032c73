"""Answer a capacity question: the best plan, or what is missing for any plan to fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.planning.candidates import BATCH_SIZES, Candidate, Job, list_candidates
from fsdp_inspect.planning.machines import PlannedMachine
from fsdp_inspect.planning.prediction import (
    FitVerdict,
    PlannedMemory,
    PlanPrediction,
    predict_memory,
)
from fsdp_inspect.planning.search import Rejection, search
from fsdp_inspect.planning.workload import plan_of
from fsdp_inspect.results import Result, to_plain
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
    best: PlanPrediction | None
    """The fastest plan that is certain to fit; None: there is none."""
    runners_up: tuple[PlanPrediction, ...]
    undecided: PlanPrediction | None
    """A faster plan for which the budget is inside the interval of its memory."""
    rejected: tuple[Rejection, ...]
    num_candidates: int
    num_simulated: int
    shortfall: Shortfall | None
    """What is missing; None: a plan fits."""
    job: Job

    @property
    def plan(self) -> Plan | None:
        """The best plan as a plan file."""
        return None if self.best is None else plan_of(self.job, self.best.candidate)

    def to_dict(self) -> dict[str, Any]:
        """The attributes as plain values, without the job."""
        plain = to_plain(self)
        assert isinstance(plain, dict)
        del plain["job"]
        for rejection in plain["rejected"]:
            example = rejection.pop("example")
            rejection |= {name: value for name, value in example.items() if name != "reason"}
            rejection["detail"] = example["reason"]
        return plain


def make_capacity_plan(
    job: Job,
    machine: PlannedMachine,
    preset: str,
    candidates: Sequence[Candidate] | None = None,
) -> CapacityPlan:
    """Find the fastest plan that fits a budget.

    Args:
        job: The training.
        machine: The machines with their budgets.
        preset: The name of the machines' preset.
        candidates: The plans to compare; None: all.

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
    result = search(job, machine, listed)
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
        best=result.best,
        runners_up=result.runners_up,
        undecided=result.undecided,
        rejected=result.rejected,
        num_candidates=result.num_candidates,
        num_simulated=result.num_simulated,
        shortfall=None if result.best else _find_shortfall(job, machine),
        job=job,
    )


def _find_shortfall(job: Job, machine: PlannedMachine) -> Shortfall:
    gpus: int | None = None
    size = job.gpus * 2
    while size <= MOST_GPUS and gpus is None and machine.speed.links.preset.inter is not None:
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
