"""Several models in one recording on two gloo ranks, with the recorder and with the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.trace.codes import EventKind
from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("models_script.py")
NAMES = {"gan": {"generator", "discriminator"}, "ppo": {"actor", "critic", "reference"}}
STEPS_PER_ROUND = {"gan": 3, "ppo": 2}
NUM_ROUNDS = 8


@pytest.fixture(scope="module", params=NAMES)
def training(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(training: str, run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The losses without a recorder, with one, and with the launcher, and both runs."""
    folder = tmp_path_factory.mktemp(training)
    run_ranks(SCRIPT, training, folder / "plain.json", num_ranks=2)
    run_ranks(SCRIPT, training, folder / "recorder.json", folder / "run", num_ranks=2)
    launched = ("-m", "fsdp_inspect.record", "--out", folder / "launched", "--no-verdict")
    run_ranks(*launched, SCRIPT, training, folder / "launched.json", num_ranks=2)
    return folder


@pytest.fixture(params=["run", "launched"])
def run(request: pytest.FixtureRequest, folder: Path) -> Run:
    path = folder / request.param
    return open_run(path if request.param == "run" else next(path.iterdir()))


def test_the_losses_are_those_without_a_recorder(folder: Path) -> None:
    plain = json.loads((folder / "plain.json").read_text())
    assert json.loads((folder / "recorder.json").read_text()) == plain
    assert json.loads((folder / "launched.json").read_text()) == plain


def test_units_carry_the_name_of_their_model(run: Run, training: str) -> None:
    assert {unit.fqn.partition(".")[0] for unit in run.manifest.units} == NAMES[training]
    assert all(len(unit.modules) == 1 for unit in run.manifest.units)


def test_a_step_is_a_round_of_all_optimizers(run: Run, training: str) -> None:
    events = run.source.events(0)
    steps = events.where(events.kind == EventKind.STEP).step.tolist()
    optimizer = events.where(events.kind == EventKind.OPTIMIZER).step.tolist()
    # A launcher learns the optimizers: the first steps have some of them, the next step has the
    # rest.
    assert NUM_ROUNDS - 1 <= len(steps) <= NUM_ROUNDS + 1
    per_step = [optimizer.count(step) for step in steps[3:]]
    assert per_step == [STEPS_PER_ROUND[training]] * len(per_step)


def test_every_question_has_an_answer_without_a_false_alarm(run: Run) -> None:
    check = check_plan(run.source)
    assert check.is_consistent, check.sentence
    assert any(finding.rule == "R11" for finding in check.findings)
    summary = run.summary()
    assert summary.verdict.numbers["step_time_ns"]
    assert "plan check fails" not in " ".join(summary.verdict.next_steps)
    advice = run.advise()
    assert advice.plan is not None or "cannot be predicted" in (advice.refusal or "")
    if advice.plan is not None:
        for point in advice.plan.front:
            for unit in point.plan.units:
                assert len({name.partition(".")[0] for name in unit.modules}) == 1
