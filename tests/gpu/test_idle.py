"""The kept runs of an H100 (torch 2.11): idle time against kernels, simulation against the runs."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import measure_work, observed_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES
from tests.gpu.idle import measure_use
from tests.gpu.timing import match, spin_kernels
from tests.studies.benchmarks.profiler_trace import read_trace

KEPT = Path(__file__).parent / "h100" / "timing.tar.xz"
STEPS = range(3, 11)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(KEPT) as packed:
        packed.extractall(folder, filter="data")
    return folder / "timing"


@pytest.mark.parametrize("name", ["run", "regrouped"])
def test_the_compute_stream_is_idle_only_while_the_host_is_behind(name: str, kept: Path) -> None:
    events = open_run(kept / name).events(0, steps=list(STEPS))
    trace = read_trace(kept / f"{name}.trace.json")
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    steps = list(measure_use(events, trace, match(collectives, spin_kernels(trace)).offset_ns))
    assert len(steps) == len(STEPS)
    assert min(each.busy_ahead_ratio for each in steps) > 0.96
    assert max(each.busy_behind_ratio for each in steps) < 0.2
    assert min(each.behind_ratio for each in steps) > 0.85


@pytest.mark.parametrize("name", ["run", "regrouped"])
def test_a_host_bound_run_simulates_again_in_its_own_time(name: str, kept: Path) -> None:
    work = measure_work(open_run(kept / name))
    assert work.trust.num_other_steps == 0
    assert work.simulate().duration_ns == pytest.approx(work.step_time_ns, rel=0.02)


def test_another_plan_of_a_host_bound_run_is_predicted(kept: Path) -> None:
    run, measured = open_run(kept / "run"), measure_work(open_run(kept / "regrouped"))
    plan = apply_changes(observed_plan(run), Changes(reshard_after_forward=2))
    predicted = simulate_plan(run, plan).predicted
    assert predicted.step_time_ns == pytest.approx(measured.step_time_ns, rel=0.08)
