"""Every setting of the trainer on real gloo ranks: one launch for two ranks, one for four.

Gradients are compared with those of one process on the same global batch. A different order of
float32 additions gives a largest deviation of 1e-6 of a parameter's largest gradient. With bfloat16
compute (8 bits of mantissa) it is 3%.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect import Plan
from fsdp_inspect.store.reader import open_run
from tests.cases import mark_slow, wants_slow
from tests.distributed.trainer_driver import ON_2_RANKS, ON_4_RANKS, SLOW

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("trainer_driver.py")
FLOAT32, BFLOAT16 = 1e-6, 3e-2
SAME_STEPS = [
    name
    for name, settings in ON_2_RANKS.items()
    if settings.get("num_layers") == 3
    and settings.get("preset") is None
    and settings.get("microbatches", 1) == 1
    and "param_dtype" not in settings
    and "schedule" not in settings
]
"""Cases that train the default model on the default batches and must give equal losses."""

Results = dict[str, Any]


def with_slow(names: Sequence[str]) -> list[Any]:
    """The cases; slow ones are marked."""
    return mark_slow(names, but=[name for name in names if name not in SLOW])


def launch(request: pytest.FixtureRequest, cases: Iterable[str], folder: Path) -> Results:
    num_ranks, run_ranks = 2 if cases is ON_2_RANKS else 4, request.getfixturevalue("run_ranks")
    left_out = [] if wants_slow(request) else SLOW
    run_ranks(DRIVER, folder, *left_out, num_ranks=num_ranks)
    results: Results = json.loads((folder / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(request, ON_2_RANKS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(request, ON_4_RANKS, tmp_path_factory.mktemp("four"))


def tolerance_of(settings: dict[str, Any]) -> float:
    return BFLOAT16 if settings.get("param_dtype") == "bfloat16" else FLOAT32


@pytest.mark.parametrize("case", with_slow([*ON_2_RANKS]))
def test_gradients_on_2_ranks_are_those_of_one_process(two, case):
    assert two[case]["gradient_error"] <= tolerance_of(ON_2_RANKS[case])


@pytest.mark.parametrize("case", with_slow([*ON_4_RANKS]))
def test_gradients_on_4_ranks_are_those_of_one_process(four, case):
    assert four[case]["gradient_error"] <= tolerance_of(ON_4_RANKS[case])


@pytest.mark.parametrize("case", with_slow(SAME_STEPS))
def test_a_setting_of_sharding_changes_no_loss(two, case):
    assert two[case]["losses"] == pytest.approx(two["default"]["losses"], rel=1e-6)


@pytest.mark.parametrize(
    "case", with_slow(["hsdp", "replicas_only", "half_mesh", "half_mesh_by_unit"])
)
def test_a_mesh_changes_no_loss(four, two, case):
    """Two microbatches on two ranks are the same global batch as one on four."""
    assert four[case]["losses"] == pytest.approx(two["accumulation_every"]["losses"], rel=1e-5)


@pytest.mark.parametrize("case", with_slow(["accumulation_last", "accumulation_kept"]))
def test_when_gradients_are_reduced_changes_no_loss(two, case):
    assert two[case]["losses"] == pytest.approx(two["accumulation_every"]["losses"], rel=1e-6)


@pytest.mark.parametrize("case", with_slow(["bfloat16", "bfloat16_reduce"]))
def test_bfloat16_learns_nearly_alike(two, case):
    assert two[case]["losses"] == pytest.approx(two["default"]["losses"], rel=1e-3)
    assert two[case]["losses"] != two["default"]["losses"]


def units_with_parameters(plan: Results) -> list[Results]:
    """The units without the root, if other units own all parameters: torch has no settings then."""
    units = plan["units"]
    return units if len(units) == 1 else [unit for unit in units if unit["modules"] != [""]]


@pytest.mark.parametrize("case", with_slow([*ON_2_RANKS, *ON_4_RANKS]))
def test_the_model_is_sharded_as_the_settings_say(two, four, case):
    result = two[case] if case in ON_2_RANKS else four[case]
    observed, asked = result["observed"], result["asked"]
    assert units_with_parameters(observed) == units_with_parameters(asked)
    for field in ("mesh", "world_size", "forward_prefetch", "backward_prefetch", "checkpointing"):
        assert observed[field] == asked[field]
    assert observed["notes"] == []


@pytest.mark.parametrize("case", with_slow(["resume", "resume_offload_bfloat16", "resume_dropout"]))
def test_a_resumed_run_on_2_ranks_goes_on_to_the_last_bit(two, case):
    assert_resumed(two[case])


@pytest.mark.slow
def test_a_resumed_run_on_replicas_goes_on_to_the_last_bit(four):
    assert_resumed(four["resume_hsdp"])


def assert_resumed(result: Results) -> None:
    assert list(result["whole"]) == ["1", "2", "3", "4", "5", "6"]
    assert result["resumed"] == {step: result["whole"][step] for step in ("4", "5", "6")}
    assert result["folders"] == ["step-000003", "step-000006"]


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_resumes_on_another(four):
    flat, resumed = four["other_mesh"]["flat"], four["other_mesh"]["resumed_as_hsdp"]
    assert list(resumed) == ["3", "4"]
    assert list(resumed.values()) == pytest.approx([flat["3"], flat["4"]], rel=1e-5)


def test_recording_changes_no_loss_to_the_last_bit(two):
    assert two["recorded"]["recorded"] == two["recorded"]["plain"]


def test_a_recorded_run_says_how_it_was_made(two):
    run = open_run(two["recorded"]["run_folder"])
    assert run.manifest.tags == ["a", "b"]
    assert run.manifest.config["microbatches"] == 2
    assert Plan.from_dict(run.manifest.plan).unit_names[2] == "layers.0, layers.1"
    assert [record.num_steps for record in run.ranks] == [3, 3]


@pytest.mark.slow
def test_evaluation_changes_no_training_loss(two):
    assert two["evaluation"]["losses_with_evaluation"] == two["evaluation"]["losses"]


@pytest.mark.slow
def test_the_evaluation_loss_falls_while_training(two):
    losses = two["evaluation"]["evaluation"]
    assert losses["4"] < losses["2"] < 5.6


def test_a_plan_observed_on_one_run_gives_the_same_run_from_its_file(two):
    result = two["plan_file"]
    assert units_with_parameters(result["observed"]) == units_with_parameters(result["asked"])
    assert result["losses_by_plan"] == result["losses"]


@pytest.mark.slow
def test_the_loss_of_the_tiny_preset_falls_visibly(two):
    losses = two["tiny"]["losses"]
    assert losses[0] > 5.5  # a random guess among 256 bytes gives 5.55
    assert sum(losses[-5:]) / 5 < 3.5
