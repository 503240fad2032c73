"""The reserved memory of a plan without forecasts contains the forecast of small models."""

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.report.planning import trainer_settings
from fsdp_inspect.simulation.planning.candidates import Candidate
from fsdp_inspect.simulation.planning.forecast_step import read_forecast
from fsdp_inspect.simulation.planning.machines import make_machine
from fsdp_inspect.simulation.planning.prediction import predict_memory
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.forecasting import build
from tests.cases import mark_slow
from tests.simulation.planning.jobs import make_job

CLOSEST = [
    ("llama-70b", 2, 256, 16, Candidate(blocks_per_unit=2, prefetch=2)),
    (
        "llama-70b", 3, 1024, 8,
        Candidate(
            checkpointing="full", param_dtype="float32", prefetch=2, reshard_after_forward=False
        ),
    ),
    (
        "llama-8b", 6, 4096, 16,
        Candidate(batch_size=4, param_dtype="float32", prefetch=2, replicas=2),
    ),
    (
        "llama-8b", 4, 256, 16,
        Candidate(
            batch_size=4, checkpointing="full", blocks_per_unit=2, param_dtype="float32",
            prefetch=2, reshard_after_forward=False,
        ),
    ),
    (
        "llama-1b", 3, 256, 16,
        Candidate(checkpointing="selective", blocks_per_unit=2, param_dtype="float32", prefetch=2),
    ),
    (
        "llama-70b", 4, 1024, 8,
        Candidate(
            batch_size=4, checkpointing="full", blocks_per_unit=2, param_dtype="float32",
            prefetch=2, offload=True, reshard_after_forward=False,
        ),
    ),
]  # fmt: skip
"""Of 334 forecasts of models with one to six blocks: the plans whose forecast is closest to the
high end, and those above an earlier high end. Preset, blocks, tokens, GPUs, plan."""


@pytest.mark.parametrize("case", mark_slow(CLOSEST, but=CLOSEST[:1]), ids=lambda case: case[0])
def test_the_forecast_of_a_small_model_is_below_the_high_end(tmp_path, case):
    preset, layers, seq_len, gpus, candidate = case
    job = make_job(preset, num_layers=layers, seq_len=seq_len, gpus=gpus, gpus_per_node=gpus // 2)
    machine = make_machine("h200-ib400", gpus_per_node=job.gpus_per_node)
    settings = {**trainer_settings(job, candidate), "num_layers": layers}
    settings["offload"] = "cpu" if candidate.offload else "none"

    path = forecast_memory(build, tmp_path / "run", world_size=gpus, settings=settings)

    reserved = predict_memory(job, machine, candidate).reserved
    found = read_forecast(open_run(path)).peak_reserved_bytes
    assert found is not None
    assert reserved.low <= found <= reserved.high
