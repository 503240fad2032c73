"""Predict the step time, the memory and the cost of one candidate, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from fsdp_inspect.analysis.capacity.allowance import default_allowance
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.planning.candidates import Candidate, Job
from fsdp_inspect.planning.estimates import PlannedValue, ValueOrigin
from fsdp_inspect.planning.machines import PlannedMachine
from fsdp_inspect.planning.reserved import reserved_of
from fsdp_inspect.planning.workload import Speed, build_workload, host_bytes
from fsdp_inspect.simulation.recorded import Execution, play

FORMULA_RATIO = 0.02
"""Half the interval of a peak from closed formulas. The largest difference from a forecast of 36
small steps was 1.4% (tests/planning/test_formulas.py)."""
_OUTSIDE_RATIO = (0.7, 1.3)
"""Interval of the memory outside the allocator, as a fraction of its estimate."""
_LOW_POWER = 0.6
"""Average power as a fraction of the GPU's limit: the low end."""
_EXACT_MICROBATCHES = 3
_NS = 1e9
_DAY_S = 86_400


class FitVerdict(StrEnum):
    """Whether a plan fits the memory of its devices and hosts."""

    FITS = "fits"
    """The whole interval is within the budget."""
    UNKNOWN = "cannot tell"
    """The budget is inside the interval."""
    DEVICE = "exceeds device memory"
    """The whole interval is above the budget."""
    HOST = "exceeds host memory"


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """The predicted values of one candidate."""

    candidate: Candidate
    step_time_ns: PlannedValue
    tokens_per_s: PlannedValue
    mfu: PlannedValue
    days: PlannedValue
    gpu_hours: PlannedValue
    energy_kwh: PlannedValue
    peak_allocated_bytes: PlannedValue
    peak_reserved_bytes: PlannedValue
    device_bytes: PlannedValue
    """Reserved memory plus memory outside the allocator; compared with the budget."""
    host_bytes: PlannedValue
    """Memory of one host."""
    verdict: FitVerdict
    reason: str
    """The reason of the verdict, in one sentence."""


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The predicted memory of a candidate and whether it fits."""

    allocated: PlannedValue
    reserved: PlannedValue
    device: PlannedValue
    host: PlannedValue
    verdict: FitVerdict
    reason: str


def predict(job: Job, machine: PlannedMachine, candidate: Candidate) -> PlanPrediction:
    """Predict all values of a candidate, with three simulated steps for its interval."""
    times = [step_ns(job, candidate, speed) for speed in machine.speeds]
    memory = predict_memory(job, machine, candidate)
    return _complete(job, machine, candidate, times, memory)


def step_ns(job: Job, candidate: Candidate, speed: Speed) -> int:
    """The simulated step. Beyond three microbatches, each one takes as long as the third."""
    count = candidate.microbatches
    if count <= _EXACT_MICROBATCHES:
        return _played(job, candidate, speed)[0]
    two, three = (step_ns(job, replace(candidate, microbatches=number), speed) for number in (2, 3))
    return two + (count - 2) * (three - two)


def predict_memory(job: Job, machine: PlannedMachine, candidate: Candidate) -> PlannedMemory:
    """Simulate the memory of a step and compare it with the budget."""
    short = replace(candidate, microbatches=min(candidate.microbatches, 2))
    _, peak_bytes = _played(job, short, machine.speed)
    assert peak_bytes is not None
    return judge_memory(job, machine, candidate, allocated_estimate(peak_bytes))


@lru_cache(maxsize=256)
def _played(job: Job, candidate: Candidate, speed: Speed) -> tuple[int, int | None]:
    """Time and peak of a simulated step. A search asks for them by turns, and again at its end."""
    step = play(build_workload(job, candidate, speed), Execution.STREAM)
    return step.duration_ns, step.peak_bytes


def allocated_estimate(peak_bytes: int) -> PlannedValue:
    """The interval of a peak from closed formulas."""
    return PlannedValue(
        peak_bytes,
        peak_bytes * (1 - FORMULA_RATIO),
        peak_bytes * (1 + FORMULA_RATIO),
        ValueOrigin.FORMULA,
        "The model saves the tensors of the trainer's decoder with flash attention, and AdamW is "
        "fused.",
    )


def judge_memory(
    job: Job, machine: PlannedMachine, candidate: Candidate, allocated: PlannedValue
) -> PlannedMemory:
    """Add what is beyond the allocator's live memory, and judge device and host."""
    reserved = reserved_of(allocated)
    outside = default_allowance(0, world_size=job.gpus).bytes
    low, high = (ratio * outside for ratio in _OUTSIDE_RATIO)
    device = PlannedValue(
        reserved.value + outside,
        reserved.low + low,
        reserved.high + high,
        reserved.origin,
        f"{reserved.assumption} The CUDA context and libraries use {outside / 2**30:.2f} GiB.",
    )
    host = _host(job, candidate)
    verdict, reason = _judge(machine, device, host)
    return PlannedMemory(allocated, reserved, device, host, verdict, reason)


def _judge(
    machine: PlannedMachine, device: PlannedValue, host: PlannedValue
) -> tuple[FitVerdict, str]:
    for what, estimate, limit, verdict in (
        ("A device", device, machine.memory_bytes, FitVerdict.DEVICE),
        ("A host", host, machine.host_bytes, FitVerdict.HOST),
    ):
        if limit is not None and estimate.low > limit:
            return (
                verdict,
                f"{what} needs at least {format_bytes(estimate.low)} of {format_bytes(limit)}.",
            )
    for what, estimate, limit in (
        ("A device", device, machine.memory_bytes),
        ("A host", host, machine.host_bytes),
    ):
        if limit is not None and estimate.high > limit:
            return FitVerdict.UNKNOWN, (
                f"{what} needs {format_bytes(estimate.low)} to {format_bytes(estimate.high)}, and "
                f"the budget of {format_bytes(limit)} is inside this interval."
            )
    return FitVerdict.FITS, f"A device needs at most {format_bytes(device.high)}."


_PROCESS_BYTES = (2 << 30, 4 << 30, 8 << 30)
"""Host memory of a training process without offload: libraries, CUDA context, data loader. An
allowance of this project; no published figure was found."""
_PINNED_RATIO = 2
"""torch's allocator of pinned memory rounds each block up to a power of two: at most twice."""


def _host(job: Job, candidate: Candidate) -> PlannedValue:
    ranks = min(job.gpus_per_node, job.gpus)
    low, typical, high = (ranks * size for size in _PROCESS_BYTES)
    states = host_bytes(job, candidate)
    pinned = states // 2  # parameters and gradients; AdamW's states are not pinned
    text = "Each process uses 2 to 8 GiB without its states."
    if states:
        text += " Pinned blocks are rounded up to powers of two, so they take up to twice as much."
    return PlannedValue(
        typical + states,
        low + states,
        high + states + (_PINNED_RATIO - 1) * pinned,
        ValueOrigin.FORMULA,
        text,
    )


def _complete(
    job: Job,
    machine: PlannedMachine,
    candidate: Candidate,
    times: Sequence[int],
    memory: PlannedMemory,
) -> PlanPrediction:
    typical, *ends = times
    step = PlannedValue(
        typical, min(*ends, typical), max(*ends, typical), machine.origin, machine.assumption
    )
    tokens = job.tokens_of_step(candidate)
    rate = step.map(lambda ns: tokens / ns * _NS)
    peak = machine.speed.gpu.bf16_flops * job.gpus
    flops = job.model.model_flops_per_token(job.seq_len)
    days = rate.map(lambda value: job.tokens / value / _DAY_S)
    hours = days.map(lambda value: value * 24 * job.gpus)
    return PlanPrediction(
        candidate=candidate,
        step_time_ns=step,
        tokens_per_s=rate,
        mfu=rate.map(
            lambda value: value * flops / peak,
            "MFU counts 6 N + 12 L Q T operations for a token, over the bfloat16 peak of the "
            f"{machine.speed.gpu.name}. {machine.assumption}",
        ),
        days=days,
        gpu_hours=hours,
        energy_kwh=_energy(hours, machine),
        peak_allocated_bytes=memory.allocated,
        peak_reserved_bytes=memory.reserved,
        device_bytes=memory.device,
        host_bytes=memory.host,
        verdict=memory.verdict,
        reason=memory.reason,
    )


def _energy(hours: PlannedValue, machine: PlannedMachine) -> PlannedValue:
    gpu = machine.speed.gpu
    return PlannedValue(
        hours.value * gpu.power_w / 1000,
        hours.low * gpu.power_w * _LOW_POWER / 1000,
        hours.high * gpu.system_power_w / 1000,
        ValueOrigin.DATASHEET,
        f"Each GPU draws its limit of {gpu.power_w:.0f} W. Low: 60% of it. High: the system's "
        f"{gpu.system_power_w:.0f} W for each GPU. Cooling of the building is not counted.",
    )
