"""Predict the step time, the memory and the cost of one candidate, each with its interval."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_inspect.analysis.capacity.allowance import default_allowance
from fsdp_inspect.planning.candidates import Candidate, Job
from fsdp_inspect.planning.estimates import Estimate, Origin
from fsdp_inspect.planning.machines import Machine
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


class Verdict(StrEnum):
    """Whether a plan fits the memory of its devices and hosts."""

    FITS = "fits"
    """The whole interval is within the budget."""
    UNKNOWN = "cannot tell"
    """The budget is inside the interval."""
    DEVICE = "exceeds device memory"
    """The whole interval is above the budget."""
    HOST = "exceeds host memory"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted values of one candidate."""

    candidate: Candidate
    step_time_ns: Estimate
    tokens_per_s: Estimate
    mfu: Estimate
    days: Estimate
    gpu_hours: Estimate
    energy_kwh: Estimate
    peak_allocated_bytes: Estimate
    peak_reserved_bytes: Estimate
    device_bytes: Estimate
    """Reserved memory plus memory outside the allocator; compared with the budget."""
    host_bytes: Estimate
    """Memory of one host."""
    verdict: Verdict
    reason: str
    """The reason of the verdict, in one sentence."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The predicted memory of a candidate and whether it fits."""

    allocated: Estimate
    reserved: Estimate
    device: Estimate
    host: Estimate
    verdict: Verdict
    reason: str


def predict(job: Job, machine: Machine, candidate: Candidate) -> Prediction:
    """Predict all values of a candidate, with three simulated steps for its interval."""
    times = [step_ns(job, candidate, speed) for speed in machine.speeds]
    memory = predict_memory(job, machine, candidate)
    return _complete(job, machine, candidate, times, memory)


def step_ns(job: Job, candidate: Candidate, speed: Speed) -> int:
    """The simulated step. Beyond three microbatches, each one takes as long as the third."""
    count = candidate.microbatches
    if count <= _EXACT_MICROBATCHES:
        return play(build_workload(job, candidate, speed), Execution.STREAM).duration_ns
    two, three = (step_ns(job, replace(candidate, microbatches=number), speed) for number in (2, 3))
    return two + (count - 2) * (three - two)


def predict_memory(job: Job, machine: Machine, candidate: Candidate) -> Memory:
    """Simulate the memory of a step and compare it with the budget."""
    short = replace(candidate, microbatches=min(candidate.microbatches, 2))
    step = play(build_workload(job, short, machine.speed), Execution.STREAM)
    assert step.peak_bytes is not None
    return judge_memory(job, machine, candidate, allocated_estimate(step.peak_bytes))


def allocated_estimate(peak_bytes: int) -> Estimate:
    """The interval of a peak from closed formulas."""
    return Estimate(
        peak_bytes,
        peak_bytes * (1 - FORMULA_RATIO),
        peak_bytes * (1 + FORMULA_RATIO),
        Origin.FORMULA,
        "The model saves the tensors of the trainer's decoder with flash attention, and AdamW is "
        "fused.",
    )


def judge_memory(job: Job, machine: Machine, candidate: Candidate, allocated: Estimate) -> Memory:
    """Add what is beyond the allocator's live memory, and judge device and host."""
    reserved = reserved_of(allocated)
    outside = default_allowance(0, world_size=job.gpus).bytes
    low, high = (ratio * outside for ratio in _OUTSIDE_RATIO)
    device = Estimate(
        reserved.value + outside,
        reserved.low + low,
        reserved.high + high,
        reserved.origin,
        f"{reserved.assumption} The CUDA context and libraries use {outside / 2**30:.2f} GiB.",
    )
    host = _host(job, candidate)
    verdict, reason = _judge(machine, device, host)
    return Memory(allocated, reserved, device, host, verdict, reason)


def _judge(machine: Machine, device: Estimate, host: Estimate) -> tuple[Verdict, str]:
    for what, estimate, limit, verdict in (
        ("A device", device, machine.memory_bytes, Verdict.DEVICE),
        ("A host", host, machine.host_bytes, Verdict.HOST),
    ):
        if limit is not None and estimate.low > limit:
            return verdict, f"{what} needs at least {_gib(estimate.low)} of {_gib(limit)}."
    for what, estimate, limit in (
        ("A device", device, machine.memory_bytes),
        ("A host", host, machine.host_bytes),
    ):
        if limit is not None and estimate.high > limit:
            return Verdict.UNKNOWN, (
                f"{what} needs {_gib(estimate.low)} to {_gib(estimate.high)}, and the budget of "
                f"{_gib(limit)} is inside this interval."
            )
    return Verdict.FITS, f"A device needs at most {_gib(device.high)}."


def _gib(size: float) -> str:
    from fsdp_inspect.formatting import format_bytes

    return format_bytes(size)


_PROCESS_BYTES = (2 << 30, 4 << 30, 8 << 30)
"""Host memory of a training process without offload: libraries, CUDA context, data loader. An
allowance of this project; no published figure was found."""
_PINNED_RATIO = 2
"""torch's allocator of pinned memory rounds each block up to a power of two: at most twice."""


def _host(job: Job, candidate: Candidate) -> Estimate:
    ranks = min(job.gpus_per_node, job.gpus)
    low, typical, high = (ranks * size for size in _PROCESS_BYTES)
    states = host_bytes(job, candidate)
    pinned = states // 2  # parameters and gradients; AdamW's states are not pinned
    text = "Each process uses 2 to 8 GiB without its states."
    if states:
        text += " Pinned blocks are rounded up to powers of two, so they take up to twice as much."
    return Estimate(
        typical + states,
        low + states,
        high + states + (_PINNED_RATIO - 1) * pinned,
        Origin.FORMULA,
        text,
    )


def _complete(
    job: Job, machine: Machine, candidate: Candidate, times: Sequence[int], memory: Memory
) -> Prediction:
    typical, *ends = times
    step = Estimate(
        typical, min(*ends, typical), max(*ends, typical), machine.origin, machine.assumption
    )
    ranks = job.gpus // candidate.tensor_parallel
    tokens = ranks * candidate.batch_size * candidate.microbatches * job.seq_len
    rate = step.map(lambda ns: tokens / ns * _NS)
    peak = machine.speed.gpu.bf16_flops * job.gpus
    flops = job.model.model_flops_per_token(job.seq_len)
    days = rate.map(lambda value: job.tokens / value / _DAY_S)
    hours = days.map(lambda value: value * 24 * job.gpus)
    return Prediction(
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


def _energy(hours: Estimate, machine: Machine) -> Estimate:
    gpu = machine.speed.gpu
    return Estimate(
        hours.value * gpu.power_w / 1000,
        hours.low * gpu.power_w * _LOW_POWER / 1000,
        hours.high * gpu.system_power_w / 1000,
        Origin.DATASHEET,
        f"Each GPU draws its limit of {gpu.power_w:.0f} W. Low: 60% of it. High: the system's "
        f"{gpu.system_power_w:.0f} W for each GPU. Cooling of the building is not counted.",
    )
