"""Measure the compute rate of a recorded run, so that a plan uses it instead of a roofline."""

import math

from fsdp_inspect.analysis.model_operations import count_matrix_elements, count_query_channels
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.planning.machines import Calibration
from fsdp_inspect.simulation.recorded import RecordedWork, measure_work
from fsdp_inspect.trace.run import RunManifest, RunSource

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
        spread_ratio=_spread(work),
        run_id=manifest.run_id,
        device_name=manifest.device_name or manifest.device_type,
    )


def _spread(work: RecordedWork) -> float:
    """Half the interval: the range of the steps, and the spread between equal processes."""
    return math.hypot(work.spread_ratio, 0.04, work.run_delay_ratio)


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
