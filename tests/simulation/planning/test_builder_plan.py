"""Plans of a builder of the user's own: the operations, the best plan, and what is missing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.simulation.planning.builder_predictor import BuilderPredictor, make_builder_plan
from fsdp_inspect.simulation.planning.candidates import list_builder_candidates
from fsdp_inspect.simulation.planning.forecast_step import ForecastStep, read_forecast
from fsdp_inspect.simulation.planning.machines import make_machine
from fsdp_inspect.store.reader import open_run
from tests.simulation.planning.gpt_builder import DIM, HEADS, LAYERS, VOCABULARY, build

GIB = 1 << 30
GPUS, TOKENS = 8, 1024
KNOBS = {"batch_size": (1, 2, 4, 8, 16, 32), "checkpointing": ("full", "none")}
GIVEN = {"offload": "none"}


class Forecasts:
    """Forecasts of the builder, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[tuple[Any, ...], ForecastStep] = {}

    def __call__(self, gpus: int, changed: Mapping[str, Any]) -> ForecastStep:
        key = (gpus, *sorted(changed.items()))
        if key not in self.made:
            path = self.folder / str(len(self.made))
            forecast_memory(build, path, world_size=gpus, settings={**GIVEN, **changed})
            self.made[key] = read_forecast(open_run(path))
        return self.made[key]


@pytest.fixture(scope="module")
def forecasts(tmp_path_factory):
    return Forecasts(tmp_path_factory.mktemp("forecasts"))


def plan(forecasts, machine, **values):
    options = {"seq_len": None, "batch_tokens": None, "given": GIVEN, "gpus": GPUS, **values}
    accepted = ["batch_size", "seq_len", "checkpointing", "offload"]
    return make_builder_plan(
        forecasts, machine, "h100-nvlink", tokens=1e9, accepted=accepted, **options
    )


def test_operations_are_those_of_the_matrices_and_the_unmasked_half_of_attention(forecasts):
    counts = forecasts(GPUS, {"batch_size": 2, "checkpointing": "none"}).manifest.operations
    tokens = 2 * TOKENS
    matrices = 2 * tokens * (LAYERS * 12 * DIM * DIM + DIM * VOCABULARY)
    attention = LAYERS * 4 * 2 * HEADS * TOKENS * TOKENS * (DIM // HEADS)

    forward = [each for each in counts if each.phase == "forward"]
    assert sum(each.whole for each in forward) == matrices + attention
    assert sum(each.run for each in forward) == matrices + attention // 2
    assert all(each.itemsize == 2 for each in forward if each.run)


def test_full_checkpointing_repeats_the_forward_of_the_blocks_in_backward(forecasts):
    def run(mode, phase, units):
        counts = forecasts(GPUS, {"batch_size": 2, "checkpointing": mode}).manifest.operations
        return sum(each.run for each in counts if each.phase == phase and each.unit in units)

    blocks = [
        unit.index
        for unit in forecasts(GPUS, {"batch_size": 2, "checkpointing": "none"}).manifest.units
        if unit.fqn.startswith("blocks")
    ]
    assert len(blocks) == LAYERS
    repeated = run("full", "backward", blocks) - run("none", "backward", blocks)
    last_products = LAYERS * 2 * (2 * TOKENS) * 4 * DIM * DIM  # torch stops before them
    assert repeated == run("none", "forward", blocks) - last_products > 0


@pytest.mark.slow
def test_the_best_plan_is_that_of_all_forecasts(forecasts):
    machine = make_machine("h100-nvlink", memory_bytes=4 * GIB)

    found = plan(forecasts, machine).found

    predictor = BuilderPredictor(forecasts, machine, gpus=GPUS, tokens=1e9, seq_len=None)
    times, verdicts = {}, {}
    for candidate in list_builder_candidates(KNOBS):
        verdicts[candidate] = predictor.memory(candidate).verdict
        if verdicts[candidate] is FitVerdict.FITS:
            times[candidate] = predictor.ns_per_token(candidate)
    assert FitVerdict.DEVICE in verdicts.values()
    assert found.best is not None
    assert times[found.best.candidate] <= min(times.values()) * 1.005
    assert found.best.device_bytes.high <= machine.memory_bytes
    assert found.best.peak_allocated_bytes.origin == "forecast"
    assert found.best.peak_reserved_bytes.origin == "allocator model"


@pytest.mark.slow
def test_a_value_that_the_builder_refuses_is_left_out_with_the_reason(forecasts):
    answer = plan(forecasts, make_machine("h100-nvlink"))

    assert answer.found.num_candidates == len(list(list_builder_candidates(KNOBS)))
    assert [note.partition(". ")[0] for note in answer.notes] == [
        "Not compared: checkpointing=selective"
    ]
    assert "not written yet" in answer.notes[0]
    assert answer.plan is not None
    assert answer.plan.unit("blocks.0").reshard_after_forward


@pytest.mark.slow
def test_a_batch_needs_microbatches_or_the_right_number_of_sequences(forecasts):
    machine = make_machine("h100-nvlink")

    answer = plan(forecasts, machine, batch_tokens=4 * GPUS * TOKENS)

    assert answer.found.best is not None
    assert answer.found.best.candidate.settings["batch_size"] == 4
    with pytest.raises(ConfigError, match="Invalid --batch-tokens 1000"):
        plan(forecasts, machine, batch_tokens=1000)


@pytest.mark.slow
def test_without_a_fitting_plan_the_missing_memory_is_stated(forecasts):
    answer = plan(forecasts, make_machine("h100-nvlink", memory_bytes=GIB))

    assert answer.found.best is None
    assert answer.plan is None
    assert answer.shortfall is not None
    assert answer.shortfall.memory_bytes is not None
    roomier = make_machine("h100-nvlink", memory_bytes=round(answer.shortfall.memory_bytes) + 1)
    assert plan(forecasts, roomier).found.best is not None
