"""A sleeping rank is found with its cost, from parts on two disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.store.merging import merge_runs
from fsdp_inspect.store.reader import StoredRun, open_run
from tests.conftest import Torchrun
from tests.distributed.straggler_driver import NUM_BLOCKS, SLEEP_S

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("straggler_driver.py")


@pytest.fixture(scope="module")
def run(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    folder = tmp_path_factory.mktemp("straggler")
    run_ranks(str(DRIVER), str(folder), num_ranks=2)
    parts = [folder / "node-0" / "run", folder / "node-1" / "run"]
    return open_run(merge_runs(parts, folder / "merged").path)


def test_the_rank_that_sleeps_is_found_and_costs_its_sleep(run: StoredRun) -> None:
    ranks = measure_ranks(run)
    if ranks.straggler is None:  # other programs took its cores while the test ran
        assert "has no CPU core" in (ranks.straggler_refusal or "")
        return
    assert (ranks.straggler.rank, ranks.straggler.meanwhile) == (1, "forward")
    slept_ns = NUM_BLOCKS * SLEEP_S * 1e9
    assert ranks.replay is not None
    assert 0.5 * slept_ns < ranks.straggler.cost_ns < ranks.replay.recorded_ns


def test_the_rank_that_sleeps_before_a_broadcast_costs_its_sleep(
    run_ranks: Torchrun, tmp_path: Path
) -> None:
    run_ranks(str(DRIVER), str(tmp_path), "broadcast", num_ranks=2)
    parts = [tmp_path / "node-0" / "run", tmp_path / "node-1" / "run"]
    ranks = measure_ranks(open_run(merge_runs(parts, tmp_path / "merged").path))
    if ranks.straggler is None:  # other programs took its cores while the test ran
        assert "has no CPU core" in (ranks.straggler_refusal or "")
        return
    assert ranks.straggler.rank == 0
    assert ranks.straggler.cost_ns > 0.5 * NUM_BLOCKS * SLEEP_S * 1e9


def test_the_waits_that_are_shown_are_those_for_the_rank_that_sleeps(run: StoredRun) -> None:
    exposed = measure_rank_waits(run).exposed
    assert exposed is not None
    assert exposed.rank == 0
    assert exposed.causes_ns["straggler"] > 0.5 * NUM_BLOCKS * SLEEP_S * 1e9


def test_the_replay_gives_the_recorded_step_exactly(run: StoredRun) -> None:
    replay = measure_ranks(run).replay
    assert replay is not None
    assert replay.replayed_ns == replay.recorded_ns


def test_no_plan_gains_the_waits_for_the_rank_that_sleeps(run: StoredRun) -> None:
    plan = apply_changes(observed_plan(run), Changes(wrap="root"))
    found = simulate_plan(run, plan)
    slept_ns = NUM_BLOCKS * SLEEP_S * 1e9
    assert len(found.predicted.units) == 1
    assert found.step_time_ns > slept_ns
    assert abs(found.replay_error) < 0.02
    assert any("waits for ranks that work longer" in line for line in found.assumptions)


class TwoMachines:
    """The same run, as if its ranks had recorded on two machines."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self.ranks = [
            record.model_copy(update={"host": f"node-{record.rank}", "pid_scope": ""})
            for record in run.ranks
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def test_clocks_that_are_one_are_found_to_be_within_the_stated_uncertainty(run: StoredRun) -> None:
    alignment = align_clocks(TwoMachines(run))  # type: ignore[arg-type]
    times = run.events(1).start_ns
    error = abs(alignment.to_reference(1, times) - times).max()
    assert error <= alignment.between_ns(0, 1)
