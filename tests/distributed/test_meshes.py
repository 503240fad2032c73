"""Meshes that do not cover all ranks, and units with separate meshes, on gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.trace.plan import Plan
from tests.conftest import Torchrun
from tests.distributed.mesh_driver import MODELS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("mesh_driver.py")
SHARDED = tuple(name for name in MODELS if name != "replicated_blocks")


@pytest.fixture(scope="module")
def recorded(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    run_ranks(str(DRIVER), str(folder), num_ranks=4)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_run_follows_its_plan(recorded: Path, name: str) -> None:
    run = open_run(recorded / name)
    check = check_plan(run.source)
    assert check.is_consistent, check.sentence
    assert not [note for note in run.summary().notes if "plan" in note]


@pytest.mark.parametrize("name", SHARDED)
def test_plans_are_simulated_on_the_data_parallel_ranks(recorded: Path, name: str) -> None:
    run = open_run(recorded / name)
    simulation = run.simulate()
    assert abs(simulation.replay_error) < 0.02
    assert simulation.memory_error is not None
    assert abs(simulation.memory_error) < 0.02
    advice = run.advise()
    assert advice.plan is not None, advice.refusal
    assert all(point.plan.world_size == 4 for point in advice.plan.front)
    assert not any("replicate" in point.plan.mesh for point in advice.plan.front)


def plan_of(run: Run) -> Plan:
    return Plan.from_dict(run.manifest.plan)


def test_no_expert_is_moved_to_another_mesh(recorded: Path) -> None:
    run = open_run(recorded / "expert_parallel")
    assert plan_of(run).mesh == {"shard": 4}
    assert {unit.name for unit in plan_of(run).units if unit.mesh == {"shard": 2}} == {
        f"layers.{number}.experts" for number in range(3)
    }
    advice = run.advise()
    assert advice.plan is not None
    assert any("a unit on another mesh" in note for note in advice.plan.notes)
    for point in advice.plan.front:
        for unit in point.plan.units:
            assert all(("experts" in name) == bool(unit.mesh) for name in unit.modules)


def test_tensor_parallelism_is_named(recorded: Path) -> None:
    run = open_run(recorded / "tensor_parallel")
    exposed = run.summary().exposed
    assert exposed is not None
    assert {part.dimension for part in exposed.not_fsdp} == {"tp"}


def test_replicated_units_are_observed_but_not_simulated(recorded: Path) -> None:
    run = open_run(recorded / "replicated_blocks")
    plan = plan_of(run)
    assert plan.unit("layers.1").mesh == {"replicate": 4}
    assert run.manifest.units[plan.unit_names.index("layers.1")].module_class == "Block"
    refusal = run.advise().refusal
    assert refusal is not None
    assert "1 of its 4 units are replicated (torch's replicate), first layers.1." in refusal
    assert "advise RUN" not in " ".join(run.summary().verdict.next_steps)
