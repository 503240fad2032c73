"""Trainings that fail under a limit of the device's memory, on gloo ranks and emulated ranks.

A real run proves a proposed plan: it stays below the limit that the recorded plan exceeds.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass
from fsdp_inspect.diagnosis.fitting_plans import NoPlans
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.run import Run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import OUT_OF_MEMORY_FILE
from fsdp_inspect.trace.codes import Phase

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("growing_script.py")
RANK_0 = Path("attempt-000", "rank-00000")
MIB = 1 << 20


def line_of(marker: str) -> int:
    lines = SCRIPT.read_text().split("\n")
    return next(at for at, line in enumerate(lines, 1) if line.endswith(f"# line: {marker}"))


def run_in(folder: Path) -> Path:
    [run] = folder.iterdir()
    return run


def diagnose(folder: Path) -> Diagnosis:
    return Run(open_run(run_in(folder))).diagnose()


@pytest.fixture
def trainer(run_ranks: Any, tmp_path: Path) -> Any:
    """Train the tiny preset into a folder; returns the result of the ranks."""

    def train(name: str, *arguments: str) -> Any:
        where = ("--runs-dir", str(tmp_path / name), "--steps", "6")
        return run_ranks("-m", "instrumented_trainer", *where, *arguments, check=False)

    return train


@pytest.fixture
def script(run_ranks: Any, tmp_path: Path) -> Any:
    """Record the script into a folder under the launcher; returns the result of the ranks."""

    def train(name: str, limit: str, *arguments: str, check: bool = False) -> Any:
        launcher = ("-m", "fsdp_inspect.record", "--no-verdict", "--device-memory", limit)
        where = ("--out", str(tmp_path / name), SCRIPT)
        return run_ranks(*launcher, *where, *arguments, check=check)

    return train


@pytest.mark.slow
def test_the_first_proposed_plan_passes_under_the_limit_and_the_recorded_one_does_not(
    trainer: Any, tmp_path: Path
) -> None:
    limit = ("--device-memory", "22MiB")
    failed = trainer("first", *limit)
    assert failed.returncode != 0
    assert "fsdp_inspect: rank 0: Out of memory in " in failed.stderr

    found = diagnose(tmp_path / "first")
    assert (found.problem, found.ranks) == (ProblemClass.OUT_OF_MEMORY, (0, 1))
    assert found.plans is not None
    assert found.plans.reason is None
    steps = [each.proposal.step_ns for each in found.plans.plans]
    assert len(steps) == 3
    assert steps == sorted(steps)
    first = found.plans.plans[0].proposal
    first.plan.dump(tmp_path / "plan.toml")

    passed = trainer("second", *limit, "--plan", str(tmp_path / "plan.toml"))
    assert passed.returncode == 0, passed.stderr
    peak = Run(open_run(run_in(tmp_path / "second"))).memory().memory.peak_allocated_bytes
    assert peak is not None
    assert first.peak_bytes == pytest.approx(peak, rel=0.06)
    assert trainer("third", *limit).returncode != 0


def test_a_batch_that_grows_is_explained_by_unit_line_and_growth(
    script: Any, tmp_path: Path
) -> None:
    assert script("runs", "40MiB", "6", "32", "200").returncode != 0

    found = diagnose(tmp_path / "runs")
    memory = found.out_of_memory
    assert memory is not None
    assert (found.unit, found.phase, found.step) == ("layers.2", Phase.FORWARD, 6)
    assert found.location.endswith(f"growing_script.py:{line_of('wide')}")
    assert memory.record.limit_bytes == 40 * MIB
    assert memory.record.requested_bytes == 200 * 32 * 4 * 64 * 4  # the output of gelu
    assert memory.live_bytes == memory.record.allocated_bytes
    assert memory.by_category[0].name == "activation"
    assert memory.growth is not None
    assert memory.growth[0].category == "activation"
    assert memory.growth[0].place.endswith(f"growing_script.py:{line_of('wide')}")
    assert found.plans is not None
    assert found.plans.growth_ratio == pytest.approx(200 / 32)
    text = describe_diagnosis(found)
    assert text.sentence.startswith("Out of memory in forward of layers.2, step 6: allocating")
    assert any("Step 5 held" in line for line in text.evidence)


@pytest.mark.slow
def test_a_plan_for_the_grown_batch_passes_under_the_limit(script: Any, tmp_path: Path) -> None:
    script("first", "40MiB", "6", "32", "200")
    found = diagnose(tmp_path / "first")
    assert found.plans is not None
    proposal = found.plans.plans[0].proposal
    proposal.plan.dump(tmp_path / "plan.toml")

    script("second", "40MiB", "6", "32", "200", str(tmp_path / "plan.toml"), check=True)

    assert diagnose(tmp_path / "second").problem is None


def test_a_failure_in_the_first_step_says_that_no_plan_can_be_told(
    script: Any, tmp_path: Path
) -> None:
    assert script("runs", "20MiB", "0", "1", "100").returncode != 0

    found = diagnose(tmp_path / "runs")
    assert (found.step, found.problem) == (0, ProblemClass.OUT_OF_MEMORY)
    assert found.plans is not None
    assert (found.plans.plans, found.plans.reason) == ((), NoPlans.FIRST_STEP)
    assert found.out_of_memory is not None
    assert found.out_of_memory.growth is None
    assert found.out_of_memory.activation_bytes > 10 * MIB
    assert found.out_of_memory.by_place[0].name.endswith(f":{line_of('wide')}")


def test_a_limit_below_the_parameters_fails_in_the_first_forward(
    script: Any, tmp_path: Path
) -> None:
    assert script("runs", "100KiB", "2", "1", "1").returncode != 0

    found = diagnose(tmp_path / "runs")
    assert found.out_of_memory is not None
    record = found.out_of_memory.record
    assert record.allocated_bytes is not None
    assert record.allocated_bytes > 100 * 1024
    assert found.step == 0
    assert "100 KiB" in describe_diagnosis(found).sentence


@pytest.mark.slow
def test_a_script_that_catches_the_failure_trains_on_and_ends_healthy(
    script: Any, tmp_path: Path
) -> None:
    script("runs", "40MiB", "3", "32", "200", "retry", check=True)

    assert diagnose(tmp_path / "runs").problem is None
    assert not (run_in(tmp_path / "runs") / RANK_0 / OUT_OF_MEMORY_FILE).exists()


def test_a_damaged_or_foreign_report_is_noted_and_the_failure_still_known(
    script: Any, tmp_path: Path
) -> None:
    script("runs", "20MiB", "0", "1", "100")
    run = run_in(tmp_path / "runs")
    for rank in (0, 1):
        path = run / "attempt-000" / f"rank-{rank:05d}" / OUT_OF_MEMORY_FILE
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        if rank == 1:
            fields = json.loads(whole)
            del fields["crc32"]
            path.write_text(json.dumps({**fields, "run_id": "another-run"}))

    opened = open_run(run)
    found = Run(opened).diagnose()
    assert (found.problem, found.out_of_memory) == (ProblemClass.OUT_OF_MEMORY, None)
    assert "Tried to allocate" in describe_diagnosis(found).sentence
    notes = "\n".join(opened.notes)
    assert "cannot be parsed" in notes
    assert "belongs to another recording: run 'another-run'" in notes


def test_an_emulated_training_fails_under_the_limit_too(run_python: Any, tmp_path: Path) -> None:
    arguments = ("--emulate", "world_size=4,bandwidth=1GB/s", "--steps", "6")
    where = ("--runs-dir", str(tmp_path / "runs"), "--device-memory", "20.5MiB")
    done = run_python("-m", "instrumented_trainer", *arguments, *where, check=False)
    assert done.returncode != 0

    found = diagnose(tmp_path / "runs")
    assert (found.problem, found.ranks) == (ProblemClass.OUT_OF_MEMORY, (0,))
    assert found.plans is not None
    assert found.plans.plans
    assert "of the limit of 20.5 MiB" in describe_diagnosis(found).sentence
