"""The search finds the best plan of exhaustive grids, and every plan that it reports fits."""

from dataclasses import replace
from operator import itemgetter

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.analysis.memory.fit import FitVerdict, default_allowance
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.report.planning import trainer_settings
from fsdp_inspect.simulation.planning.candidates import (
    Candidate,
    list_candidates,
    narrow_candidates,
)
from fsdp_inspect.simulation.planning.forecast_step import read_forecast
from fsdp_inspect.simulation.planning.machines import make_machine
from fsdp_inspect.simulation.planning.prediction import predict, predict_memory, step_ns
from fsdp_inspect.simulation.planning.search import (
    VALUES,
    FormulaPredictor,
    make_capacity_plan,
    search,
)
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.forecasting import build
from tests.cases import mark_slow
from tests.simulation.planning.jobs import make_job

GIB = 1 << 30
SHAPES = [("small", 4, 1024, 2.3), ("llama-1b", 4, 2048, 14.0), ("llama-8b", 3, 2048, 17.0)]
"""Preset, blocks, tokens of a sequence, and a budget in GiB that excludes a part of the grid."""
LINKS = ["h100-nvlink", "a100-eth100"]


def grid(job):
    """Every candidate in bfloat16 with one or four sequences, on every mesh."""
    return [
        each for each in list_candidates(job, batch_sizes=(1, 4)) if each.param_dtype == "bfloat16"
    ]


@pytest.mark.parametrize("preset", mark_slow(LINKS, but=LINKS[:1]))
@pytest.mark.parametrize("shape", mark_slow(SHAPES, but=SHAPES[2:]), ids=itemgetter(0))
def test_the_chosen_plan_is_within_one_percent_of_the_best_of_the_grid(preset, shape):
    model, layers, seq_len, budget = shape
    job = make_job(model, num_layers=layers, seq_len=seq_len)
    machine = make_machine(preset, memory_bytes=round(budget * GIB))
    candidates = grid(job)

    found = search(FormulaPredictor(job, machine), candidates)

    assert found.best is not None
    rates = [rate_of(job, machine, each) for each in candidates]
    fitting = [rate for rate in rates if rate is not None]
    assert 0 < len(fitting) < len(candidates)
    assert found.best.tokens_per_s.value >= 0.99 * max(fitting)


def rate_of(job, machine, candidate):
    """Tokens per second of a plan that fits; None: it is not certain to fit."""
    if predict_memory(job, machine, candidate).verdict is not FitVerdict.FITS:
        return None
    ranks = job.gpus // candidate.tensor_parallel
    tokens = ranks * candidate.batch_size * job.seq_len
    return tokens / step_ns(job, candidate, machine.speed) * 1e9


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=itemgetter(0))
def test_the_forecasts_of_all_reported_plans_are_within_the_budget(tmp_path, shape):
    model, layers, seq_len, budget = shape
    job = make_job(model, num_layers=layers, seq_len=seq_len)
    machine = make_machine("h100-nvlink", memory_bytes=round(budget * GIB))
    candidates = [each for each in grid(job) if each.tensor_parallel == 1]
    found = search(FormulaPredictor(job, machine), candidates)
    assert found.best is not None

    for number, plan in enumerate((found.best, *found.runners_up)):
        settings = {**trainer_settings(job, plan.candidate), "num_layers": layers}
        settings["offload"] = "cpu" if plan.candidate.offload else "none"
        path = forecast_memory(build, tmp_path / str(number), world_size=8, settings=settings)
        step = read_forecast(open_run(path))
        allocated, reserved = plan.peak_allocated_bytes, plan.peak_reserved_bytes
        assert step.peak_reserved_bytes is not None
        outside = default_allowance(0, world_size=8).bytes
        assert step.peak_reserved_bytes + outside <= machine.memory_bytes
        assert allocated.low <= step.peak_allocated_bytes <= allocated.high
        assert reserved.low <= step.peak_reserved_bytes <= reserved.high


def test_a_budget_inside_the_interval_is_undecided():
    job, candidate = make_job("llama-8b", num_layers=3), Candidate()
    needed = predict(job, make_machine("h100-nvlink"), candidate).device_bytes
    machine = make_machine("h100-nvlink", memory_bytes=round((needed.low + needed.high) / 2))

    found = make_capacity_plan(job, machine, "h100-nvlink", [candidate])

    assert found.found.best is None
    assert found.found.undecided is not None
    assert "inside this interval" in found.found.undecided.reason
    assert found.shortfall is not None


@pytest.mark.slow
def test_a_plan_that_cannot_fit_states_the_smallest_memory_and_gpus():
    job = replace(make_job("llama-8b", gpus=8, gpus_per_node=8), seq_len=8192)
    machine = make_machine("h200-ib400", memory_bytes=2 * GIB)

    found = make_capacity_plan(job, machine, "h200-ib400")

    assert found.found.best is None
    assert found.found.undecided is None
    assert found.shortfall is not None
    assert found.shortfall.memory_bytes is not None
    roomier = make_machine("h200-ib400", memory_bytes=round(found.shortfall.memory_bytes) + 1)
    assert make_capacity_plan(job, roomier, "h200-ib400").found.best is not None


def evaluate(given, gpus, budget_gib, preset="h100-ib400"):
    job = make_job("llama-8b", num_layers=3, gpus=gpus, seq_len=4096)
    machine = make_machine(preset, memory_bytes=round(budget_gib * GIB))
    return make_capacity_plan(job, machine, preset, [given])


@pytest.mark.parametrize(
    ("given", "budget_gib", "gpus"),
    [
        pytest.param(Candidate(), 22, 32, id="more shards"),
        pytest.param(Candidate(batch_size=8), 20, None, id="activations"),
        pytest.param(Candidate(is_sharded=False, replicas=8), 20, None, id="not sharded"),
    ],
)
def test_the_missing_memory_and_gpus_of_a_given_plan_are_those_of_this_plan(
    given, budget_gib, gpus
):
    found = evaluate(given, 8, budget_gib)

    assert found.shortfall is not None
    assert found.shortfall.memory_bytes is not None
    roomier = found.shortfall.memory_bytes / GIB
    assert evaluate(given, 8, roomier + 0.01).found.best is not None
    assert evaluate(given, 8, roomier - 0.01).found.best is None
    assert found.shortfall.gpus == gpus
    if gpus is not None:
        assert evaluate(given, gpus, budget_gib).found.best is not None
        assert evaluate(given, gpus // 2, budget_gib).found.best is None


def test_machines_without_a_network_have_the_gpus_of_one_node():
    found = evaluate(Candidate(), 2, 25, preset="h100-nvlink")

    assert found.shortfall is not None
    assert found.shortfall.gpus == 8
    with_less_memory = evaluate(Candidate(), 2, 22, preset="h100-nvlink")
    assert with_less_memory.shortfall is not None
    assert with_less_memory.shortfall.gpus is None


@pytest.mark.parametrize(
    ("given", "budget_gib", "changes"),
    [
        pytest.param(Candidate(), 23.8, {"checkpointing": "selective"}, id="selective"),
        pytest.param(Candidate(batch_size=2), 31, {"checkpointing": "full"}, id="full"),
        pytest.param(Candidate(checkpointing="full"), 20, {"loss": "linear"}, id="loss"),
    ],
)
def test_the_smallest_change_of_a_given_plan_changes_one_setting_if_that_suffices(
    given, budget_gib, changes
):
    found = evaluate(given, 8, budget_gib)

    assert found.shortfall is not None
    assert found.shortfall.change == replace(given, **changes)


def test_the_smallest_change_of_several_plans_is_none_of_them():
    job = make_job("llama-8b", num_layers=3, seq_len=4096)
    machine = make_machine("h100-nvlink", memory_bytes=23 * GIB)
    on_devices = {"tensor_parallel": 1, "offload": False}
    compared = narrow_candidates(job, {"checkpointing": "none", **on_devices})

    found = make_capacity_plan(job, machine, "h100-nvlink", compared)

    assert found.shortfall is not None
    assert found.shortfall.change == Candidate(checkpointing="full")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"attention": "flash1"}, id="attention"),
        pytest.param({"param_dtype": "float32", "batch_size": 2}, id="dtype and batch"),
        pytest.param({"microbatches": 4, "tensor_parallel": 1}, id="microbatches"),
    ],
)
def test_what_is_missing_is_that_of_plans_with_the_given_settings(settings):
    job = make_job("llama-8b", num_layers=3, seq_len=4096)

    def plan(gib):
        machine = make_machine("h100-nvlink", memory_bytes=round(gib * GIB))
        return make_capacity_plan(job, machine, "h100-nvlink", settings=settings)

    found = plan(1).shortfall

    assert found is not None
    assert found.memory_bytes is not None
    fits = plan(found.memory_bytes / GIB + 0.01).found.best
    assert fits is not None
    assert {name: getattr(fits.candidate, name) for name in settings} == settings
    assert plan(found.memory_bytes / GIB - 0.01).found.best is None


@pytest.mark.parametrize(
    ("settings", "has_change"),
    [({"batch_size": 8}, True), ({"batch_size": 8, "microbatches": 1}, False)],
)
def test_the_smallest_change_keeps_the_batch(settings, has_change):
    job = replace(make_job("llama-8b", num_layers=3, seq_len=4096), batch_tokens=64 * 4096)
    machine = make_machine("h100-nvlink", memory_bytes=12 * GIB)

    found = make_capacity_plan(job, machine, "h100-nvlink", settings=settings)

    assert found.shortfall is not None
    change = found.shortfall.change
    assert (change is not None and change.batch_size == 1) is has_change
    assert change is None or job.tokens_of_step(change) == job.batch_tokens


def test_settings_that_no_plan_has_are_named():
    with pytest.raises(ConfigError, match="Invalid --set replicas=3: no plan"):
        make_capacity_plan(
            make_job("llama-8b", num_layers=3), make_machine("h100-nvlink"), "h100-nvlink",
            settings={"replicas": 3},
        )  # fmt: skip


def test_every_value_is_inside_its_interval_and_has_an_assumption():
    job = make_job("llama-8b", num_layers=3)
    prediction = predict(job, make_machine("h100-nvlink"), Candidate(offload=True))

    for name in VALUES:
        estimate = getattr(prediction, name)
        assert estimate.low <= estimate.value <= estimate.high, name
        assert estimate.low < estimate.high, name
        assert estimate.assumption.endswith("."), name


def test_offload_moves_states_to_the_host_and_takes_longer():
    job, machine = make_job("llama-8b", num_layers=3), make_machine("h100-nvlink")
    on_device, on_host = (
        predict(job, machine, Candidate(offload=offload)) for offload in (False, True)
    )
    assert on_host.peak_allocated_bytes.value < on_device.peak_allocated_bytes.value
    assert on_host.host_bytes.value > on_device.host_bytes.value
    assert on_host.step_time_ns.value > on_device.step_time_ns.value


def test_a_forecast_that_contradicts_the_formula_changes_the_plan(tmp_path):
    job, machine = make_job("small", num_layers=2), make_machine("h100-nvlink")
    candidates = [each for each in grid(job) if each.tensor_parallel == 1]
    first = search(FormulaPredictor(job, machine), candidates).best
    assert first is not None
    forecast_memory(
        build, tmp_path / "run", world_size=8,
        settings={**trainer_settings(job, first.candidate), "num_layers": 2},
    )  # fmt: skip
    step = read_forecast(open_run(tmp_path / "run"))

    def forecast(candidate):
        if candidate != first.candidate:
            return step
        return replace(step, peak_reserved_bytes=machine.memory_bytes * 2)

    found = search(FormulaPredictor(job, machine, forecast), candidates)

    assert found.best is not None
    assert found.best.candidate != first.candidate
    assert found.best.peak_reserved_bytes.value == step.peak_reserved_bytes
    assert found.best.peak_reserved_bytes.origin == "allocator model"
