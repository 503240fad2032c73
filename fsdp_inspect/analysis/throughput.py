"""Measure tokens per second, MFU, the energy and the utilisation of the device.

The recorder does not know which tensors are tokens. Tokens come from numbers that the training loop
logs, or from recorded settings. Every value states its origin.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.kernels import find_profile
from fsdp_inspect.analysis.scalars import ScalarSeries, measure_scalars
from fsdp_inspect.analysis.step_selection import RankSteps, inspected_rank
from fsdp_inspect.hardware import find_gpu
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.run import RunManifest, RunSource

_COUNTS = ("num_input_tokens_seen", "num_tokens", "n_tokens_seen")
"""Tokens of all ranks since the start: Transformers' Trainer (5.23), TRL (1.16), and torchtitan
(0.3)."""
_RATE_OF_RANK = "throughput(tps)"
"""Tokens per second and device: torchtitan (0.3), `components/metrics.py`."""
_RATES = ("tokens_per_s", "tokens_per_second", _RATE_OF_RANK)
_MFU = {"mfu(%)": 0.01, "mfu": 1.0}
"""Logged MFU, and its unit. The first is that of torchtitan."""
_EXPERTS = ("expert", "router")


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput of a run in its typical step."""

    tokens_per_s: float | None
    """Tokens of all ranks per second."""
    tokens_origin: str
    """`logged as num_tokens` or `from the settings of the run`; empty if tokens are unknown."""
    mfu_ratio: float | None
    """Model FLOPs / (time x peak FLOPs of all devices)."""
    mfu_origin: str
    """`logged as mfu(%)`, or the device and its peak; empty if MFU is unknown."""
    energy_j_per_step: float | None
    """Energy of the GPU of `rank` in the typical step, J: mean power (NVML) x step time."""
    planned_energy_j_per_step: float | None
    """What `plan` assumes for that GPU: it draws its limit (datasheet); None: another device."""
    energy_j_per_token: float | None
    """Energy of all GPUs per token, J, if each takes the power of that one."""
    cpu_energy_j_per_step: float | None
    """Energy of all CPUs of the host of `rank` in the typical step, J: mean power (RAPL) x step
    time. All ranks of a host share it."""
    rank: int
    device_utilisation_ratio: float | None
    """Mean over the timed steps of the fraction of time in which a kernel ran (NVML)."""


def read_logged(name: str, value: float, world_size: int) -> tuple[str, float] | None:
    """The metric that a logged number states, with its value over all ranks; None: none is known.

    Args:
        name: The name under which the training loop logs the number.
        value: The number.
        world_size: The number of ranks.
    """
    if name in _MFU:
        return "mfu_ratio", value * _MFU[name]
    if name in _RATES:
        return "tokens_per_s", value * (world_size if name == _RATE_OF_RANK else 1)
    return None


def measure_throughput(run: RunSource) -> Throughput | None:
    """Measure the throughput of a run; None without a timed step, or if nothing is known."""
    member = inspected_rank(run)
    if member is None or not len(member.typical_steps):
        return None
    scalars = {series.name: series for series in measure_scalars(run)}
    step_time_ns = member.typical(member.step_time_ns)
    tokens_per_s, tokens_origin = _measure_tokens(run.manifest, scalars, member, step_time_ns)
    mfu, mfu_origin = _measure_mfu(run.manifest, scalars, member, tokens_per_s)
    if mfu is None:
        mfu, mfu_origin = _mfu_of_kernels(run, step_time_ns)
    power_w = _mean_reading(run, member, "gpu_power_mw", 1e-3)
    gpu = find_gpu(run.manifest.device_name)
    host_w = _mean_rise(run, member, "package_energy_uj", 1e-6)
    watts = None if power_w is None else power_w * run.manifest.world_size
    found = Throughput(
        tokens_per_s=tokens_per_s,
        tokens_origin=tokens_origin,
        mfu_ratio=mfu,
        mfu_origin=mfu_origin,
        energy_j_per_step=None if power_w is None else power_w * step_time_ns / 1e9,
        planned_energy_j_per_step=None if gpu is None else gpu.power_w * step_time_ns / 1e9,
        energy_j_per_token=watts / tokens_per_s if watts and tokens_per_s else None,
        cpu_energy_j_per_step=None if host_w is None else host_w * step_time_ns / 1e9,
        rank=member.rank,
        device_utilisation_ratio=_mean_reading(run, member, "gpu_utilisation_pct", 0.01),
    )
    known = (tokens_per_s, mfu, power_w, host_w, found.device_utilisation_ratio)
    return found if any(value is not None for value in known) else None


def _measure_tokens(
    manifest: RunManifest,
    scalars: Mapping[str, ScalarSeries],
    member: RankSteps,
    step_time_ns: int,
) -> tuple[float | None, str]:
    for name in _COUNTS:
        tokens = _per_step(scalars.get(name))
        if tokens and step_time_ns:
            return tokens / step_time_ns * 1e9, f"logged as {name}"
    for name in _RATES:
        rate = _logged(scalars.get(name), member, manifest)
        if rate is not None and rate > 0:
            return rate, f"logged as {name}{' of each rank' if name == _RATE_OF_RANK else ''}"
    tokens = _tokens_of_settings(manifest)
    if tokens and step_time_ns:
        return tokens / step_time_ns * 1e9, "from the settings of the run"
    return None, ""


def _per_step(series: ScalarSeries | None) -> float | None:
    """The mean increase of a total per step; None if it was logged less than twice."""
    if series is None or len(series.steps) < 2:
        return None
    total = series.values[-1] - series.values[0]
    return total / (series.steps[-1] - series.steps[0]) if math.isfinite(total) else None


def _logged(series: ScalarSeries | None, member: RankSteps, manifest: RunManifest) -> float | None:
    """The median over all ranks of a logged number after warm-up; None if it was not logged."""
    if series is None:
        return None
    first = int(member.steps[0])
    pairs = zip(series.steps, series.values, strict=True)
    values = [value for step, value in pairs if step >= first and math.isfinite(value)]
    if not values:
        return None
    found = read_logged(series.name, float(np.median(values)), manifest.world_size)
    return None if found is None else found[1]


def _tokens_of_settings(manifest: RunManifest) -> int | None:
    """Tokens of a step of all ranks; None if a setting is missing.

    `batch_size` counts the sequences of a microbatch of one rank, as in `planning.calibration`.
    """
    values = [manifest.config.get(name) for name in ("seq_len", "batch_size", "microbatches")]
    seq_len, batch_size, microbatches = values
    if not isinstance(seq_len, int) or not isinstance(batch_size, int):
        return None
    if not isinstance(microbatches, int) or not {*manifest.mesh} <= {"shard", "replicate"}:
        return None  # ranks of another dimension share their tokens
    return seq_len * batch_size * microbatches * manifest.world_size


def _measure_mfu(
    manifest: RunManifest,
    scalars: Mapping[str, ScalarSeries],
    member: RankSteps,
    tokens_per_s: float | None,
) -> tuple[float | None, str]:
    for name in _MFU:
        logged = _logged(scalars.get(name), member, manifest)
        if logged is not None:
            return logged, f"logged as {name}"
    gpu = find_gpu(manifest.device_name)
    flops = _flops_per_token(manifest)
    if gpu is None or flops is None or tokens_per_s is None:
        return None, ""
    ratio = tokens_per_s * flops / (gpu.bf16_flops * manifest.world_size)
    return ratio, f"of {gpu.bf16_flops / 1e12:.0f} TFLOP/s of {gpu.name}, bfloat16"


def _flops_per_token(manifest: RunManifest) -> float | None:
    """Model FLOPs of forward and backward for a token; None if they are not certain.

    6 for each element of a matrix that is not an embedding, and causal attention: for each query
    channel half of the sequence, in two products, each with its backward (PaLM, arXiv 2204.02311,
    appendix B). Known for dense decoders in bfloat16 of which every parameter is trained.
    """
    shapes = [(name, shape) for unit in manifest.units for name, shape in unit.parameters.items()]
    seq_len = manifest.config.get("seq_len")
    is_dense = not any(part in name for name, _ in shapes for part in _EXPERTS)
    queries = count_query_channels(manifest)
    model = manifest.model
    is_known = (
        is_dense
        and queries > 0
        and isinstance(seq_len, int)
        and all(len(shape) <= 2 for _, shape in shapes)
        and model.num_trainable_parameters == model.num_parameters
        and all(unit.param_dtype == "bfloat16" for unit in manifest.units)
    )
    if not is_known or not isinstance(seq_len, int):
        return None
    return 6.0 * (count_matrix_elements(manifest) + seq_len * queries)


def _mfu_of_kernels(run: RunSource, step_time_ns: int) -> tuple[float | None, str]:
    """The operations of the profiled steps / (typical step x peak): any model with shapes."""
    kernels = find_profile(run)
    if kernels is None or not kernels.flops or not kernels.peak_flops or not step_time_ns:
        return None, ""
    ratio = kernels.flops / (step_time_ns / 1e9 * kernels.peak_flops)
    return ratio, f"of {kernels.peak_source}; operations of profiled steps, with recomputation"


def _mean_reading(run: RunSource, member: RankSteps, name: str, scale: float) -> float | None:
    """The mean reading of the device during the inspected steps; None without a reading."""
    _, inside = _readings(run, member, name)
    return float(inside.mean()) * scale if len(inside) else None


def _mean_rise(run: RunSource, member: RankSteps, name: str, scale: float) -> float | None:
    """The mean rise of a counter per second during the inspected steps; None: unknown."""
    times_ns, inside = _readings(run, member, name)
    if len(inside) < 2 or times_ns[-1] == times_ns[0]:
        return None
    return float(inside[-1] - inside[0]) * scale * 1e9 / float(times_ns[-1] - times_ns[0])


def _readings(
    run: RunSource, member: RankSteps, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The times and values of a column of the device samples in the inspected steps."""
    devices = run.devices(member.rank)
    devices = devices.where(getattr(devices, name) >= 0)
    if len(devices):
        steps = run.events(member.rank, steps=member.steps.tolist(), kinds=[EventKind.STEP])
        spans = Intervals.of(steps.start_ns, steps.end_ns)
        devices = devices.where(spans.covered_ns(devices.time_ns, devices.time_ns + 1) > 0)
    return devices.time_ns, getattr(devices, name)


# --- Count what a token multiplies in a model, from the recorded shapes of its parameters.

_QUERY_NAMES = ("q_proj.weight", "wq.weight")
"""The ends of the names of a query projection, whose matrix has one row for each query channel."""


def count_matrix_elements(manifest: RunManifest) -> int:
    """Count the elements of the matrices that a token multiplies: all but embeddings."""
    return sum(
        math.prod(shape)
        for unit in manifest.units
        for name, shape in unit.parameters.items()
        if len(shape) == 2 and "embed" not in name
    )


def count_query_channels(manifest: RunManifest) -> int:
    """Count the query channels of all blocks; 0 without a query projection with a known name.

    For each token, causal attention multiplies each channel by half of the sequence, twice.
    """
    return sum(
        shape[0]
        for unit in manifest.units
        for name, shape in unit.parameters.items()
        if len(shape) == 2 and name.endswith(_QUERY_NAMES)
    )
