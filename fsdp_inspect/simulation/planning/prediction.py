"""Predict the step time, the memory and the cost of one candidate, each with its interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp

from fsdp_inspect.analysis.memory.fit import (
    RESERVED_RATIO,
    FitVerdict,
    default_allowance,
    judge_fit,
)
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.hardware import RESIDUALS
from fsdp_inspect.simulation.planning.candidates import BuilderCandidate, Candidate, Job, Loss
from fsdp_inspect.simulation.planning.estimates import (
    PlannedValue,
    UnreusedBytes,
    ValueOrigin,
    reserved_of,
    reserved_of_forecast,
)
from fsdp_inspect.simulation.planning.forecast_step import ForecastStep
from fsdp_inspect.simulation.planning.machines import PlannedMachine
from fsdp_inspect.simulation.planning.workload import (
    Speed,
    build_workload,
    host_bytes,
    steady_step_ns,
    unreused_bytes,
)
from fsdp_inspect.simulation.recorded import Execution, simulate_step

FORMULA_RATIO = 0.02
"""Half the interval of a peak from closed formulas. `make validate ARGS="--parts planned"` compares
the formulas with forecasts."""
VARIED_RATIOS, ROUGH_RATIOS = (0.20, 0.13), (0.30, 0.60)
"""How far a peak can be below and above the formulas. Varied: settings and models that no forecast
of the trainer checks. Rough, of the part above the resting states: LoRA, experts, and parallelism
beyond FSDP with settings that differ between frameworks. docs/planning_accuracy.md counts the peaks
of published trainings inside."""
FORECAST_RATIO = 0.03
"""Half the interval of a forecast peak. The largest difference from the recorder was 3.0%
(docs/figures.md)."""
_SPLIT_RATIO = 0.6
"""What split blocks add at most, as a fraction of the allowance for reserved memory, if the history
of a forecast is too long for the allocator model. A choice of this project."""
_OUTSIDE_RATIO = (0.7, 1.3)
"""Interval of the memory outside the allocator, as a fraction of its estimate."""
_LOW_POWER = 0.6
"""Average power as a fraction of the GPU's limit: the low end."""
_NS = 1e9
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """The predicted values of one candidate."""

    candidate: Candidate | BuilderCandidate
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


def predict(
    job: Job,
    machine: PlannedMachine,
    candidate: Candidate,
    memory: PlannedMemory | None = None,
) -> PlanPrediction:
    """Predict all values of a candidate, with three simulated steps for its interval.

    Args:
        job: The training.
        machine: The machines and their budgets.
        candidate: The settings.
        memory: The memory of the candidate; None: from closed formulas.
    """
    training = Training(
        gpus=job.gpus,
        tokens=job.tokens,
        tokens_of_step=job.tokens_of_step(candidate),
        flops_per_token=job.model.model_flops_per_token(job.seq_len),
        mfu_text="MFU counts 6 N + 6 L Q T operations for a token: causal attention as it runs",
    )
    known = _with_loss(job, candidate, machine, memory or predict_memory(job, machine, candidate))
    time = _time_estimate(job, machine, candidate)
    return derive_prediction(training, machine, candidate, time, known)


_LOSSES: Mapping[Loss, str] = {
    "whole": "with float32 copies of all logits",
    "compiled": "by torch.compile, without float32 copies of the logits",
    "chunked": "with float32 copies of an eighth of the logits at a time",
    "fused": "in one kernel on the bfloat16 logits",
    "linear": "fused with the output projection",
}


def _with_loss(
    job: Job, candidate: Candidate, machine: PlannedMachine, memory: PlannedMemory
) -> PlannedMemory:
    """The memory with the assumed loss beside a refusal or a doubt, and what another one saves."""
    if memory.verdict in (FitVerdict.FITS, FitVerdict.HOST):
        return memory
    reason = f"{memory.reason} The loss is computed {_LOSSES[candidate.loss]}"
    if candidate.loss != "linear":
        peaks = [
            predict_memory(job, machine, each).reserved.value
            for each in (candidate, replace(candidate, loss="linear"))
        ]
        saved = format_bytes(max(peaks[0] - peaks[1], 0))
        reason += f"; fused with the output projection (--set loss=linear) it saves {saved}"
    return replace(memory, reason=f"{reason}.")


def _time_estimate(job: Job, machine: PlannedMachine, candidate: Candidate) -> PlannedValue:
    """The step time, with the residuals of published trainings or the interval of a run."""
    typical = step_ns(job, candidate, machine.speed)
    half = RESIDUALS[_residual_class(job, machine, candidate)]
    if machine.is_calibrated:
        found = spread_times([step_ns(job, candidate, speed) for speed in machine.speeds], machine)
        low, high = found.low / typical - 1, found.high / typical - 1
        return replace(
            found,
            assumption=f"{found.assumption} So the interval is {low:+.0%} to {high:+.0%}; without "
            f"the run it is {exp(-half) - 1:+.0%} to {exp(half) - 1:+.0%}.",
        )
    if candidate.offload:
        # The processors of hosts differ by more than GPUs.
        ends = [step_ns(job, candidate, speed) for speed in (machine.fast, machine.slow)]
        low, high = min(*ends, typical), max(*ends, typical)
    else:
        low = high = typical
    return PlannedValue(
        typical,
        low * exp(-half),
        high * exp(half),
        machine.origin,
        f"{machine.assumption} {_interval_text(job, machine, candidate)}",
    )


def _residual_class(job: Job, machine: PlannedMachine, candidate: Candidate) -> str:
    """The key of `hardware.RESIDUALS` for a plan."""
    gpu = machine.speed.gpu
    if job.model.experts:
        return "experts"
    if not (gpu.is_confirmed or gpu.is_tried):
        return "unconfirmed"
    defaults = Candidate()
    is_plain = all(getattr(candidate, name) == getattr(defaults, name) for name in _EXTENSIONS)
    is_plain &= job.model.is_causal
    return "confirmed" if gpu.is_confirmed and is_plain else "extended"


_EXTENSIONS = (
    *("products", "adapter_rank", "is_quantized", "offload", "tensor_parallel"),
    *("context_parallel", "pipeline_parallel", "expert_parallel", "param_dtype", "optimizer"),
)
"""Settings for which fewer published trainings confirm the prediction, unless at their default."""


def _interval_text(job: Job, machine: PlannedMachine, candidate: Candidate) -> str:
    kind = _residual_class(job, machine, candidate)
    text = f"80% interval: {exp(RESIDUALS[kind]) - 1:.0%} around the value, "
    if kind == "unconfirmed":
        return f"{text}an estimate: no published training on the {machine.speed.gpu.name} was used."
    if kind == "experts":
        return f"{text}an estimate: only one published training with experts was used."
    what = "this kind" if kind == "confirmed" else "this kind and device, of which there are few"
    return f"{text}from published trainings of {what}."


def step_ns(job: Job, candidate: Candidate, speed: Speed) -> int:
    """The simulated step."""

    def simulated(count: int) -> int:
        return _played(job, replace(candidate, microbatches=count), speed)[0]

    return steady_step_ns(simulated, candidate.microbatches)


def predict_memory(job: Job, machine: PlannedMachine, candidate: Candidate) -> PlannedMemory:
    """Simulate the memory of a step and compare it with the budget."""
    short = replace(candidate, microbatches=min(candidate.microbatches, 2))
    _, peak_bytes, resting = _played(job, short, machine.speed)
    assert peak_bytes is not None
    low, high = formula_ratios(job, candidate)
    varied = peak_bytes - (resting if high == ROUGH_RATIOS[1] else 0)
    allocated = PlannedValue(
        peak_bytes,
        peak_bytes - low * varied,
        peak_bytes + high * varied,
        ValueOrigin.FORMULA,
        "The model saves the tensors of the trainer's decoder with flash attention, and the "
        "optimizer is fused.",
    )
    return judge_memory(job, machine, candidate, allocated)


def formula_ratios(job: Job, candidate: Candidate) -> tuple[float, float]:
    """How far the peak can be below and above the closed formulas, as fractions of it."""
    model, usual = job.model, Candidate()
    is_rough = candidate.adapter_rank > 0 or model.experts > 0
    is_rough |= candidate.tensor_parallel > 1 and candidate.products != usual.products
    if is_rough or candidate.pipeline_parallel > 1 or candidate.context_parallel > 1:
        return ROUGH_RATIOS
    is_varied = any(getattr(candidate, name) != getattr(usual, name) for name in _VARIED)
    is_varied |= candidate.checkpointing == "alternate" or not model.gated
    return VARIED_RATIOS if is_varied else (FORMULA_RATIO, FORMULA_RATIO)


_VARIED = (
    *("checkpoint_every", "compiled", "loss", "master_dtype", "optimizer", "products"),
    *("reduce_dtype", "is_sharded", "tensor_parallel"),
)


@lru_cache(maxsize=256)
def _played(job: Job, candidate: Candidate, speed: Speed) -> tuple[int, int | None, int]:
    """Time, peak and resting memory of a simulated step.

    A search asks for them by turns, and again at its end.
    """
    workload = build_workload(job, candidate, speed)
    assert workload.memory is not None
    step = simulate_step(workload, Execution.STREAM, with_spans=False)
    return step.duration_ns, step.peak_bytes, workload.memory.resting


def judge_memory(
    job: Job, machine: PlannedMachine, candidate: Candidate, allocated: PlannedValue
) -> PlannedMemory:
    """Add what is beyond the allocator's live memory, and judge device and host."""
    host = _host(job.gpus, job.gpus_per_node, host_bytes(job, candidate))
    reserved = reserved_of(allocated, unreused_bytes(job, candidate, machine.speed))
    return _judge_all(job.gpus, machine, allocated, reserved, host)


def judge_forecast(machine: PlannedMachine, step: ForecastStep) -> PlannedMemory:
    """Take the memory of a forecast, and judge device and host."""
    gpus, per_node = step.manifest.world_size, machine.speed.links.gpus_per_node
    allocated = _forecast_estimate(step.peak_allocated_bytes)
    host = _host(gpus, per_node, step.host_bytes(min(per_node, gpus)))
    return _judge_all(gpus, machine, allocated, _reserved_of_step(step, allocated), host)


def predict_device_need(step: ForecastStep, overhead_bytes: int | None = None) -> PlannedValue:
    """The memory that a device needs for a forecast.

    Args:
        step: The forecast.
        overhead_bytes: Memory beyond the forecast's storages; None: estimated.
    """
    allocated = _forecast_estimate(step.peak_allocated_bytes)
    if overhead_bytes is not None:
        return allocated.map(lambda value: value + overhead_bytes)
    return _with_libraries(_reserved_of_step(step, allocated), step.manifest.world_size)


def _reserved_of_step(step: ForecastStep, allocated: PlannedValue) -> PlannedValue:
    if step.peak_reserved_bytes is not None:
        return reserved_of_forecast(allocated, step.peak_reserved_bytes)
    parts = RESERVED_RATIO * allocated.value
    return reserved_of(allocated, UnreusedBytes(parts, _SPLIT_RATIO * parts))


def _forecast_estimate(peak_bytes: int) -> PlannedValue:
    return PlannedValue(
        peak_bytes,
        peak_bytes * (1 - FORECAST_RATIO),
        peak_bytes * (1 + FORECAST_RATIO),
        ValueOrigin.FORECAST,
        "FSDP2's own code allocated these storages, on fake tensors.",
    )


def _judge_all(
    gpus: int,
    machine: PlannedMachine,
    allocated: PlannedValue,
    reserved: PlannedValue,
    host: PlannedValue,
) -> PlannedMemory:
    device = _with_libraries(reserved, gpus)
    verdict, reason = _judge(machine, device, host)
    return PlannedMemory(allocated, reserved, device, host, verdict, reason)


def _with_libraries(reserved: PlannedValue, gpus: int) -> PlannedValue:
    outside = default_allowance(0, world_size=gpus).bytes
    low, high = (ratio * outside for ratio in _OUTSIDE_RATIO)
    return PlannedValue(
        reserved.value + outside,
        reserved.low + low,
        reserved.high + high,
        reserved.origin,
        f"{reserved.assumption} The CUDA context and libraries use {outside / 2**30:.2f} GiB.",
    )


def _judge(
    machine: PlannedMachine, device: PlannedValue, host: PlannedValue
) -> tuple[FitVerdict, str]:
    limited = [
        (what, need, limit, verdict, judge_fit(need.low, need.high, limit))
        for what, need, limit, verdict in (
            ("A device", device, machine.memory_bytes, FitVerdict.DEVICE),
            ("A host", host, machine.host_bytes, FitVerdict.HOST),
        )
        if limit is not None
    ]
    for what, need, limit, verdict, found in limited:
        if found is FitVerdict.DEVICE:
            return (
                verdict,
                f"{what} needs at least {format_bytes(need.low)} of {format_bytes(limit)}.",
            )
    for what, need, limit, _, found in limited:
        if found is FitVerdict.UNKNOWN:
            return found, (
                f"{what} needs {format_bytes(need.low)} to {format_bytes(need.high)}, and "
                f"the budget of {format_bytes(limit)} is inside this interval."
            )
    return FitVerdict.FITS, f"A device needs at most {format_bytes(device.high)}."


_PROCESS_BYTES = (2 << 30, 4 << 30, 8 << 30)
"""Host memory of a training process without offload: libraries, CUDA context, data loader. An
allowance of this project; no published figure was found."""
_PINNED_RATIO = 2
"""torch's allocator of pinned memory rounds each block up to a power of two: at most twice."""


def _host(gpus: int, gpus_per_node: int, states: int) -> PlannedValue:
    """The memory of a host; `states`: its parameters, gradients and AdamW's states."""
    ranks = min(gpus_per_node, gpus)
    low, typical, high = (ranks * size for size in _PROCESS_BYTES)
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


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a training on which rates and costs depend."""

    gpus: int
    tokens: float
    """Tokens of the whole training."""
    tokens_of_step: int
    """Tokens of a step over all ranks."""
    flops_per_token: float
    """Operations of a token by MFU's definition."""
    mfu_text: str
    """That definition."""


def spread_times(times: Sequence[int], machine: PlannedMachine) -> PlannedValue:
    """The step time from simulated steps with typical, fast and slow rates."""
    typical, *ends = times
    return PlannedValue(
        typical, min(*ends, typical), max(*ends, typical), machine.origin, machine.assumption
    )


def derive_prediction(
    training: Training,
    machine: PlannedMachine,
    candidate: Candidate | BuilderCandidate,
    step: PlannedValue,
    memory: PlannedMemory,
) -> PlanPrediction:
    """Derive rates and costs from the step time."""
    rate = step.map(lambda ns: training.tokens_of_step / ns * _NS)
    peak = machine.speed.gpu.bf16_flops * training.gpus
    days = rate.map(lambda value: training.tokens / value / _DAY_S)
    hours = days.map(lambda value: value * 24 * training.gpus)
    return PlanPrediction(
        candidate=candidate,
        step_time_ns=step,
        tokens_per_s=rate,
        mfu=rate.map(
            lambda value: value * training.flops_per_token / peak,
            f"{training.mfu_text}, over the bfloat16 peak of the {machine.speed.gpu.name}. "
            f"{step.assumption}",
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


# --- Bound the time and the memory of a candidate from below, without a simulation.
#
# All sums grow linearly with the number of blocks. So two short models give the sums of a long one.


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of a candidate."""

    ns_per_token: float
    """All compute, or all messages of the shard group, and the optimizer."""
    allocated_bytes: float
    """States, all kept activations, and the largest unit."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over a microbatch; all but `largest` are linear in the number of blocks."""

    compute_ns: float
    messages_ns: float
    optimizer_ns: float
    bytes: float
    largest: float

    def extend(self, other: "_Sums", times: float) -> "_Sums":
        """The sums with the difference to another model added a number of times."""

        def grow(own: float, more: float) -> float:
            return own + times * (more - own)

        return _Sums(
            compute_ns=grow(self.compute_ns, other.compute_ns),
            messages_ns=grow(self.messages_ns, other.messages_ns),
            optimizer_ns=grow(self.optimizer_ns, other.optimizer_ns),
            bytes=grow(self.bytes, other.bytes),
            largest=self.largest,
        )


def bound(job: Job, candidate: Candidate, speed: Speed) -> Bounds:
    """The lower bounds of a candidate."""
    size, layers = candidate.blocks_per_unit, job.model.num_layers
    if layers <= 2 * size:
        sums = _sums(job, candidate, speed, layers)
    else:
        short = _sums(job, candidate, speed, size)
        sums = short.extend(_sums(job, candidate, speed, 2 * size), times=(layers - size) // size)
    count = candidate.microbatches
    step_ns = count * max(sums.compute_ns, sums.messages_ns) + sums.optimizer_ns
    return Bounds(step_ns / job.tokens_of_step(candidate), sums.bytes + sums.largest)


def _sums(job: Job, candidate: Candidate, speed: Speed, num_layers: int) -> _Sums:
    short = replace(job, model=replace(job.model, num_layers=num_layers))
    work = build_workload(short, replace(candidate, microbatches=1), speed)
    assert work.memory is not None
    compute = sum(
        piece.forward_ns + piece.backward_ns + piece.recompute_ns for piece in work.pieces
    )
    copies = sum(unit.copy_out_ns + unit.reduce_copy_in_ns for unit in work.units)
    messages = sum(
        unit.gather_ns * (2 if policy.reshard_after_forward else 1) + unit.reduce_ns
        for unit, policy in zip(work.units, work.policies, strict=True)
    )
    kept = sum(piece.kept for piece in work.memory.pieces)
    return _Sums(
        compute + copies,
        messages,
        work.after_ns,
        work.memory.resting + kept,
        max(unit.unsharded for unit in work.memory.units),
    )
