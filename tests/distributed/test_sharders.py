"""One model, data set and seed under each sharder: equal gradients, comparable runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_inspect.advice.migration import plan_migration
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan
from tests.conftest import Torchrun
from tests.distributed.sharder_driver import SHARDERS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("sharder_driver.py")
OTHERS = [
    (case, sharding)
    for case, names in SHARDERS.items()
    for sharding in names
    if sharding != "fsdp2"
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharders")
    run_ranks(DRIVER, folder, num_ranks=2)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(("case", "sharding"), OTHERS)
def test_gradients_agree_with_those_of_fsdp2(
    results: dict[str, Any], case: str, sharding: str
) -> None:
    expected = results[f"{case}-fsdp2"]["gradients"]
    found = results[f"{case}-{sharding}"]["gradients"]
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(values), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(("case", "sharding"), OTHERS)
def test_losses_agree_with_those_of_fsdp2(
    results: dict[str, Any], case: str, sharding: str
) -> None:
    expected = results[f"{case}-fsdp2"]["losses"]
    assert results[f"{case}-{sharding}"]["losses"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("sharding", SHARDERS["plain"])
def test_the_run_states_its_sharder(results: dict[str, Any], sharding: str) -> None:
    manifest = open_run(results[f"plain-{sharding}"]["run"]).manifest
    assert manifest.sharder == sharding
    assert manifest.config["sharding"] == sharding
    assert manifest.model.class_name == "Decoder"
    assert (
        manifest.model.num_parameters
        == open_run(results["plain-fsdp2"]["run"]).manifest.model.num_parameters
    )


def test_a_migration_counts_what_both_sharders_then_measure(results: dict[str, Any]) -> None:
    old, new = (open_run(results[f"plain-{name}"]["run"]) for name in ("fsdp1", "fsdp2"))
    found = plan_migration(old)

    assert found.shard_bytes == sum(unit.sharded_bytes for unit in old.manifest.units)
    assert found.new_shard_bytes == sum(unit.sharded_bytes for unit in new.manifest.units)
    step = max(old.events(0).step.tolist())
    gathers = old.events(0, steps=[step], kinds=[EventKind.ALL_GATHER])
    assert found.num_gathers == len(gathers)
    assert found.plan.unit_names == tuple(unit.fqn for unit in old.manifest.units)
    strategy = next(each for each in found.settings if each.setting == "sharding_strategy")
    assert (strategy.recorded, strategy.replacement) == (
        "FULL_SHARD",
        "reshard_after_forward=True",
    )
    assert Plan.from_dict(found.plan.to_dict()) == found.plan


def test_a_run_without_fsdp1_has_no_migration(results: dict[str, Any]) -> None:
    with pytest.raises(MissingDataError, match="is DDP"):
        plan_migration(open_run(results["plain-ddp"]["run"]))
