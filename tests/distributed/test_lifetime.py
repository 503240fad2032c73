"""The phases of a real run: an evaluation, checkpoints, a failure and a restart."""

import re
from pathlib import Path

import pytest

import fsdp_inspect
from fsdp_inspect.analysis.lifetime import Lifetime
from fsdp_inspect.trace.codes import EventKind
from tests.conftest import Torchrun
from tests.distributed.lifetime_script import SLEEP_S, STANDSTILL_S

SCRIPT = Path(__file__).with_name("lifetime_script.py")
STEPS = 8
SLEEP_NS = round(SLEEP_S * 1e9)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    run = tmp_path_factory.mktemp("lifetime") / "run"
    run_ranks(SCRIPT, run, STEPS, check=False)
    run_ranks(SCRIPT, run, STEPS, "resume")
    return run


@pytest.fixture(scope="module")
def lifetime(folder: Path) -> Lifetime:
    return fsdp_inspect.open_run(folder).lifetime()


def test_the_phases_add_up_to_the_wall_time(lifetime: Lifetime) -> None:
    assert sum(phase.duration_ns for phase in lifetime.phases) == lifetime.wall_ns
    assert not lifetime.duration_ns("other")


def test_what_the_script_does_is_found(lifetime: Lifetime) -> None:
    # Both attempts build and evaluate.
    assert lifetime.duration_ns("build") >= 2 * SLEEP_NS
    assert lifetime.duration_ns("evaluation") >= 2 * SLEEP_NS
    # The watchdog looks every 0.2 s, and sees the last movement up to that much late.
    assert lifetime.duration_ns("idle") >= 2 * (STANDSTILL_S - 0.3) * 1e9
    for phase in ("shard", "load", "checkpoint", "restart", "first step", "compile"):
        assert lifetime.duration_ns(phase) > 0, phase
    assert lifetime.background_checkpoint_ns > 0


def test_steps_after_the_last_checkpoint_of_the_failed_attempt_are_lost(
    lifetime: Lifetime,
) -> None:
    assert (lifetime.num_attempts, lifetime.num_steps) == (2, 2 * STEPS)
    assert lifetime.num_lost_steps == STEPS - 5
    assert lifetime.duration_ns("lost") > 0


def test_the_training_is_in_the_steps_that_count(folder: Path, lifetime: Lifetime) -> None:
    total = 0
    for number, counted in ((0, range(1, 5)), (1, range(1, STEPS))):
        rows = fsdp_inspect.open_run(folder, attempt=number).source.summary(
            ranks=[0], kinds=[EventKind.STEP]
        )
        total += int(rows.duration_ns[[step in counted for step in rows.step.tolist()]].sum())
    assert 0 < lifetime.duration_ns("training") < total - 2 * STANDSTILL_S * 1e9
    assert lifetime.goodput_ratio == lifetime.duration_ns("training") / lifetime.wall_ns


def test_memory_before_the_first_sample_is_known(lifetime: Lifetime) -> None:
    peaks = {phase.phase: phase.process_peak_bytes for phase in lifetime.phases}
    assert peaks["build"]
    assert peaks["shard"]


def test_the_note_about_a_standstill_states_its_measured_duration(
    folder: Path, lifetime: Lifetime
) -> None:
    notes = " ".join(fsdp_inspect.open_run(folder).notes)
    said = re.findall(r"No progress for (\d+) s in step (\d+)", notes)
    seconds = [int(found) for found, _ in said]
    assert seconds
    assert STANDSTILL_S - 1 < min(seconds) <= max(seconds) < lifetime.wall_ns / 1e9
    assert "3" in {step for _, step in said}
    [event] = [each for each in fsdp_inspect.open_run(folder).diagnose().events if each.has_ended]
    assert event.step == 3
