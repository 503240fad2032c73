"""Planted causes of slow compute on two ranks: kernels of profiled steps, lines, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fsdp_inspect
from fsdp_inspect.analysis.batch_work import measure_uneven_work
from fsdp_inspect.analysis.host_stops import HostStopCost
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.report.text import render_kernels, render_summary
from fsdp_inspect.store.schema import PROFILE_REQUEST_FILE
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.host_work import BOOLEAN_MASK, COLLECTION, COMPILATION, PRINTED
from tests.cases import mark_slow, wants_slow
from tests.conftest import Torchrun
from tests.distributed import compute_script
from tests.distributed.compute_script import CASES, NUM_STEPS
from tests.report.terminal_text import text_of

pytestmark = pytest.mark.distributed


QUICK = ("plain", "profiled", "mask", "collections", "tokens")
"""The cases of `make test`."""


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("compute")
    cases = [*CASES] if wants_slow(request) else QUICK
    run_ranks("-m", "tests.distributed.compute_script", folder, *cases)
    return folder


def seen(folder: Path, case: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / case / f"seen{rank}.json").read_text())


def opened(folder: Path, case: str) -> fsdp_inspect.Run:
    return fsdp_inspect.open_run(folder / case / "run")


@pytest.mark.parametrize(
    "case",
    mark_slow(["profiled", "other_profiler", "failing", "print", "mask"], but=["profiled", "mask"]),
)
def test_losses_are_bit_identical(folder: Path, case: str) -> None:
    for rank in range(2):
        assert seen(folder, case, rank)["losses"] == seen(folder, "plain", rank)["losses"]


def test_profiled_steps_show_operators_by_unit_and_are_not_timed(folder: Path) -> None:
    run = opened(folder, "profiled")
    found = run.kernels()
    assert found.steps == (6, 7)
    assert not found.on_device
    assert not {6, 7} & set(select_steps(run.source).timed)
    assert 0 < found.compute_ns < found.step_ns
    by_unit = {(cost.fqn, cost.phase, cost.kind) for cost in found.groups}
    for unit in ("0", "1", "2"):
        for phase in ("forward", "backward"):
            assert (unit, phase, "matrix product") in by_unit
    (products,) = (cost for cost in found.kinds if cost.kind == "matrix product")
    assert products.flops == 3 * 6 * 2 * 16 * 64 * 256
    assert "kernels" not in [note for note in run.notes if "damaged" in note]
    assert "matrix product" in text_of(render_kernels(found))


@pytest.mark.slow
def test_a_request_of_the_dashboard_profiles_equal_steps_of_all_ranks(folder: Path) -> None:
    run = opened(folder, "requested")
    notes = [[each for each in record.problems if "The profile of steps" in each]
             for record in run.ranks_recorded]  # fmt: skip
    steps = {each.split(" has ")[0] for (each,) in notes}
    assert len(notes) == 2
    assert len(steps) == 1
    profiled = run.kernels().steps
    assert len(profiled) == 3
    assert not {*profiled} & {*select_steps(run.source).timed}
    assert not (folder / "requested" / "run" / PROFILE_REQUEST_FILE).exists()


def test_the_window_states_its_own_cost(folder: Path) -> None:
    problems = opened(folder, "profiled").ranks_recorded[0].problems
    (cost,) = (each for each in problems if "The profile of steps 6 to 7" in each)
    assert "outside of all timed steps" in cost


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reason"),
    [("other_profiler", "the script started a profiler"), ("failing", "the disk is full")],
)
def test_a_window_that_fails_ends_alone(folder: Path, case: str, reason: str) -> None:
    run = opened(folder, case)
    assert any(reason in each for each in run.ranks_recorded[0].problems)
    assert len(select_steps(run.source).finished) == NUM_STEPS


# --- What stops the host, by line.


def stops_of(folder: Path, case: str) -> list[HostStopCost]:
    found = opened(folder, case).host_stops()
    assert found is not None
    return [stop for stop in found.stops if stop.is_cost]


def true_ns(folder: Path, case: str, rank: int) -> float:
    """What the script measured itself, as the mean of the counted steps."""
    planted = seen(folder, case, rank)["planted_s"]
    counted = planted[-(NUM_STEPS - 3) :]  # without warm-up and the memory step
    return 1e9 * sum(counted) / len(counted)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("mask", BOOLEAN_MASK),
        pytest.param("print", PRINTED, marks=pytest.mark.slow),
        pytest.param("compilations", COMPILATION, marks=pytest.mark.slow),
    ],
)
def test_a_planted_stop_has_its_line_and_size(folder: Path, case: str, what: str) -> None:
    first = stops_of(folder, case)[0]
    assert first.what == what
    assert "compute_script.py:" in first.place
    assert first.duration_ns == pytest.approx(true_ns(folder, case, first.rank), rel=0.2)


@pytest.mark.slow
def test_reads_in_a_loop_have_their_line_and_number(folder: Path) -> None:
    """A read on a CPU takes as long as reading the clock, so its size is only a rough one."""
    first = stops_of(folder, "items")[0]
    assert first.what == ".item()"
    assert first.count == pytest.approx(50_000, rel=0.01)
    assert 0.05 < first.duration_ns / first.count / 1000 < 5


@pytest.mark.slow
def test_reads_are_no_longer_watched_where_there_are_many(folder: Path) -> None:
    work = opened(folder, "items").ranks_recorded[0].host_work
    assert work is not None
    assert (work.num_read_steps, work.num_steps) == (3, NUM_STEPS - 3)


def test_collections_on_one_rank_are_found_there(folder: Path) -> None:
    first = stops_of(folder, "collections")[0]
    assert (first.what, first.rank, first.is_alone) == (COLLECTION, 1, True)
    assert first.duration_ns == pytest.approx(true_ns(folder, "collections", 1), rel=0.2)
    assert (first.num_steps, first.out_of) == (3, NUM_STEPS - 3)


def _line_of(code: str) -> str:
    lines = Path(compute_script.__file__).read_text().splitlines()
    return str(next(at for at, line in enumerate(lines, 1) if line.strip() == code))


@pytest.mark.slow
def test_a_compilation_names_the_guard(folder: Path) -> None:
    first = stops_of(folder, "compilations")[0]
    assert "factor == " in first.reason
    assert first.num_steps == 1
    run = opened(folder, "compilations")
    (found,) = run.host_stops().graph_breaks
    assert found.place.endswith("compute_script.py:" + _line_of("torch._dynamo.graph_break()"))
    assert "graph_break" in found.reason
    assert "Graph breaks of torch.compile" in text_of(render_summary(run.summary()))
    steps = {step.step: step for step in run.step_times().over_steps}
    compiled = run.source.events(0, kinds=[EventKind.COMPILATION])
    wholes = run.source.events(0, kinds=[EventKind.STEP])
    within = {
        step: (start, end)
        for step, start, end in zip(
            wholes.step.tolist(), wholes.start_ns, wholes.end_ns, strict=True
        )
    }
    assert {0, 5} <= {*compiled.step.tolist()}
    for step, start, end in zip(
        compiled.step.tolist(), compiled.start_ns, compiled.end_ns, strict=True
    ):
        assert within[step][0] <= start < end <= within[step][1]
    assert "compilation" in steps[5].contains


def test_a_rank_with_twice_the_tokens_is_known(folder: Path) -> None:
    batches = opened(folder, "tokens").ranks_recorded[0].host_work.batches
    assert {(batch.size, batch.longest) for batch in batches} == {(2 * 2048, 2048)}
    uneven = measure_uneven_work(opened(folder, "tokens").source, 0)
    assert uneven is not None
    assert (uneven.ratio, uneven.word) == (2.0, "tokens")
    assert uneven.num_more == uneven.out_of > 5
    assert uneven.balanced_ratio == pytest.approx(0.75)
    assert measure_uneven_work(opened(folder, "tokens").source, 1) is None


def test_a_healthy_loop_has_no_long_stop(folder: Path) -> None:
    run = opened(folder, "profiled")
    step_ns = run.summary().breakdown.step_time_ns
    reads = [stop for stop in stops_of(folder, "profiled") if stop.what != COLLECTION]
    assert all(stop.duration_ns < 0.05 * step_ns for stop in reads)


def test_the_methods_of_tensors_are_as_before(folder: Path) -> None:
    """Each case trained after the others in the same processes, and detached at its end."""
    assert seen(folder, "profiled")["patched"] == seen(folder, "plain")["patched"] == []
