"""What a migration from FSDP1 to FSDP2 states, compared with the FSDP2 run of its plan."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.advice.migration import Migration, plan_migration
from fsdp_inspect.report.advice import describe_effects, describe_migration
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunSource
from tests.conftest import Torchrun
from tests.distributed.migration_driver import CASES, NUM_STEPS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("migration_driver.py")


@pytest.fixture(scope="module")
def folder(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migration")
    run_ranks(DRIVER, path, num_ranks=4)
    return path


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def opened(folder: Path, case: str) -> tuple[RunSource, RunSource, Migration]:
    old, new = (open_run(folder / f"{case}-{name}") for name in ("fsdp1", "fsdp2"))
    return old, new, plan_migration(old)


def gathers_of(run: RunSource) -> int:
    return len(run.events(0, steps=[NUM_STEPS - 1], kinds=[EventKind.ALL_GATHER]))


def test_the_plan_trains_to_the_same_losses(folder: Path, case: str) -> None:
    losses = json.loads((folder / f"{case}.json").read_text())
    tolerance = 2e-2 if case == "mixed" else 1e-5
    assert losses["fsdp2"] == pytest.approx(losses["fsdp1"], rel=tolerance)


def test_gathers_and_shards_are_those_of_both_runs(folder: Path, case: str) -> None:
    old, new, found = opened(folder, case)
    assert (gathers_of(old), gathers_of(new)) == (found.num_gathers, found.num_gathers)
    assert found.shard_bytes == sum(unit.sharded_bytes for unit in old.manifest.units)
    assert found.new_shard_bytes == sum(unit.sharded_bytes for unit in new.manifest.units)
    assert [unit.fqn for unit in new.manifest.units] == [unit.fqn for unit in old.manifest.units]


def test_buffers_of_one_unit_are_those_that_fsdp2_allocates(folder: Path, case: str) -> None:
    _, new, found = opened(folder, case)
    largest = max(unit.unsharded_bytes for unit in new.manifest.units)
    assert found.gather_buffer_bytes == (0 if case == "no_shard" else largest)
    assert found.reduce_buffer_bytes == max(unit.reduce_bytes for unit in new.manifest.units)


def test_only_settings_with_a_recorded_value_are_lost(folder: Path) -> None:
    lost = {
        case: {
            each.setting: each.recorded
            for each in opened(folder, case)[2].settings
            if each.recorded and not each.has_counterpart
        }
        for case in CASES
    }
    usual = {"limit_all_gathers": "True", "use_orig_params": "False"}
    assert lost["full_shard"] == usual
    assert lost["orig_params"] == {"limit_all_gathers": "False", "use_orig_params": "True"}
    assert lost["prefetch"] == {**usual, "backward_prefetch": "BACKWARD_POST"}
    assert lost["no_prefetch"] == {**usual, "backward_prefetch": "None"}


def test_the_effects_are_said_for_every_strategy(folder: Path, case: str) -> None:
    found = opened(folder, case)[2]
    assert "FSDP2 can shard the same 4 units" in describe_migration(found)
    effects = describe_effects(found)
    assert effects[0].startswith(
        "All-gathers: none" if case == "no_shard" else f"All-gathers: {found.num_gathers}"
    )
    assert any(line.startswith("Sharded parameters of rank 0: ") for line in effects)


def test_advise_shows_the_move_and_writes_its_plan(folder: Path, tmp_path: Path) -> None:
    run, plan = folder / "full_shard-fsdp1", tmp_path / "plan.toml"
    command = [sys.executable, "-m", "fsdp_inspect", "advise", str(run), "--details"]
    ended = subprocess.run(
        [*command, "--write", str(plan)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, "2 settings have no counterpart" in ended.stdout) == (0, True)
    assert "FSDP2 pads each parameter" in " ".join(ended.stdout.split())
    assert "Wrote the plan for FSDP2" in ended.stderr
    assert Plan.load(tmp_path / "plan.fsdp2.toml") == opened(folder, "full_shard")[2].plan
    assert Plan.load(plan).fsdp1 is not None
