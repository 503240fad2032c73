"""Describe the machine of a plan: GPUs, links, budgets, and the ends of its intervals."""

from dataclasses import dataclass, replace

from fsdp_inspect.analysis.throughput import count_matrix_elements, count_query_channels
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.hardware import (
    GPUS,
    HOST_OPTIMIZER_S_PER_BILLION,
    NETWORK_RATIO,
)
from fsdp_inspect.simulation.planning.estimates import ValueOrigin
from fsdp_inspect.simulation.planning.workload import WHOLE_ENDS, Links, Speed
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.trace.links import PRESETS
from fsdp_inspect.trace.run import RunManifest, RunSource

_MOST_GPUS = 4096


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """The rates and the budgets of the machines."""

    speed: Speed
    """The typical rates."""
    fast: Speed
    slow: Speed
    memory_bytes: int
    """Memory of a device."""
    host_bytes: int | None
    """Memory of a host; None: not limited."""
    origin: ValueOrigin
    is_calibrated: bool
    """Whether a recorded run gave the compute rate; `fast` and `slow` are then its interval."""
    assumption: str
    """The source of the compute times and of the network, in one or two sentences."""

    @property
    def most_gpus(self) -> int:
        """The largest number of GPUs to look for: without a network, those of one node."""
        links = self.speed.links
        return links.gpus_per_node if links.preset.inter is None else _MOST_GPUS

    @property
    def speeds(self) -> tuple[Speed, Speed, Speed]:
        """Typical, fast, slow."""
        return self.speed, self.fast, self.slow


@dataclass(frozen=True, slots=True)
class Calibration:
    """Compute rates from a recorded run."""

    flops: float
    """Operations per second of the compute of a device."""
    spread_ratio: float
    """Half the interval of the rate, as a fraction of it."""
    run_id: str
    device_name: str


def make_machine(
    preset: str,
    *,
    gpus_per_node: int | None = None,
    memory_bytes: int | None = None,
    host_bytes: int | None = None,
    calibration: Calibration | None = None,
) -> PlannedMachine:
    """The machine of a preset.

    Args:
        preset: A key of `trace.link_presets.PRESETS`.
        gpus_per_node: Default: the preset's.
        memory_bytes: Budget of a device; default: the GPU's memory.
        host_bytes: Budget of a host; None: not limited.
        calibration: Compute rates of a run; None: a roofline with published efficiency.
    """
    links, gpu = PRESETS[preset], GPUS[preset]
    network = Links(links, gpus_per_node or links.gpus_per_node)
    efficiency = low = high = None
    origin = ValueOrigin.SIMULATION
    compute = (
        f"Large matrix products reach {gpu.products:.0%} of the {gpu.name}'s peak rate; attention, "
        "elementwise operations and the optimizer have rates of their own."
    )
    if calibration is not None:
        efficiency = calibration.flops / gpu.bf16_flops
        spread = min(calibration.spread_ratio, 0.9)
        low, high = efficiency * (1 - spread), efficiency * (1 + spread)
        origin = ValueOrigin.CALIBRATED
        compute = (
            f"Compute runs at {calibration.flops / 1e12:.3g} TFLOP/s, as in run "
            f"{calibration.run_id} on {calibration.device_name}."
        )
        if calibration.device_name not in gpu.device_names:
            compute += f" That device is not known to be a {gpu.name}: the times are its own."
    fast_host, slow_host = HOST_OPTIMIZER_S_PER_BILLION
    speed = Speed(gpu, network, efficiency, (fast_host * slow_host) ** 0.5)
    slower, faster = NETWORK_RATIO
    least, most = WHOLE_ENDS
    return PlannedMachine(
        speed=speed,
        fast=Speed(gpu, replace(network, bandwidth_ratio=faster), high, fast_host, 0.5, most),
        slow=Speed(gpu, replace(network, bandwidth_ratio=slower), low, slow_host, 2.0, least),
        memory_bytes=memory_bytes or gpu.memory_bytes,
        host_bytes=host_bytes,
        origin=origin,
        is_calibrated=calibration is not None,
        assumption=(
            f"{compute} The network has the rates of preset {preset}."
            if calibration is None
            else f"{compute} The network reaches {slower:.0%} to {faster:.0%} of preset {preset}."
        ),
    )


# --- Measure the compute rate of a recorded run, so that a plan uses it instead of a roofline.

_SETTINGS = ("seq_len", "batch_size")


def measure_calibration(run: RunSource) -> Calibration:
    """The operations per second of a run's forward and backward, without waits.

    Operations are counted as in `planning.transformer`: 2 for each element of a matrix and token in
    forward and twice that in backward, with causal attention if the model has a query projection
    with a known name. Otherwise the rate leaves attention out and is too low for long sequences.

    Raises:
        MissingDataError: The run lacks its shapes, its batch, or the data of a simulation.
    """
    manifest = run.manifest
    work = measure_work(run)
    seq_len, batch_size = _settings(manifest)
    numel = count_matrix_elements(manifest) + seq_len * count_query_channels(manifest)
    spent = sum(
        piece.forward_ns + piece.backward_ns + piece.recompute_ns for piece in work.workload.pieces
    )
    repeated = sum(piece.recompute_ns for piece in work.workload.pieces)
    passes = 3.0 + (1.0 if repeated else 0.0)
    if not numel or not spent:
        raise _missing(manifest, "the shapes of its parameters or the time of its compute")
    return Calibration(
        flops=2.0 * numel * seq_len * batch_size * passes / spent * 1e9,
        spread_ratio=work.trust.calibration_margin(work.step_time_ns),
        run_id=manifest.run_id,
        device_name=manifest.device_name or manifest.device_type,
    )


def _settings(manifest: RunManifest) -> list[int]:
    """Tokens of a sequence, and sequences of a microbatch of one rank."""
    values = [manifest.config.get(name) for name in _SETTINGS]
    found = [value for value in values if isinstance(value, int) and value > 0]
    if len(found) < len(_SETTINGS):
        raise _missing(manifest, "the settings seq_len and batch_size")
    return found


def _missing(manifest: RunManifest, what: str) -> MissingDataError:
    return MissingDataError(
        f"Run {manifest.run_id!r} cannot calibrate a plan: it lacks {what}. Expected a run of this "
        "repository's trainer, or one with Recorder(config={'seq_len': ..., 'batch_size': ...}). "
        "Record such a run, or leave out --calibrate."
    )
