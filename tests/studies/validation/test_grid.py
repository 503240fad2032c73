"""The grid covers the required cases, and a missed figure is reported."""

from collections import Counter
from pathlib import Path

import pytest

from tests.studies.validation import planned
from tests.studies.validation.figures import Results, all_figures
from tests.studies.validation.grid import LINKS, SHAPES, all_trials, command_of, draw, plans
from tests.studies.validation.oracle import OracleOutcome
from tests.studies.validation.outcomes import Errors, Outcome
from tests.studies.validation.planned import ChoiceGrid, ChoiceOutcome, FitOutcome, Reported
from tests.studies.validation.tables import markdown, verdict

FAR_OFF = Outcome(
    name="even, slow link: wrap=root",
    measured_ns=100,
    predicted_ns=120,
    step_error=0.2,
    same_error=0.01,
    replay_error=0.001,
    in_interval=False,
    measured_peak=None,
    memory_error=None,
)


def test_the_grid_is_that_of_the_issue():
    wraps = {dict(settings).get("wrap", "block") for settings in plans()}
    depths = {dict(settings).get("forward-prefetch", "0") for settings in plans()}
    assert wraps == {"root", "block", "every:2", "every:4", "split"}
    assert depths == {"0", "1", "2", "3"}
    assert (len(LINKS), len(SHAPES)) == (3, 2)
    assert len(plans()) == 4 * 2 * 4 + 1


def test_trials_are_drawn_evenly_from_links_and_shapes():
    drawn = Counter((trial.shape, trial.link) for trial in draw(all_trials(), 42))
    assert set(drawn.values()) == {7}


def test_halves_of_blocks_are_named_to_the_trainer():
    (split,) = (t for t in all_trials() if t.name == "even, slow link: wrap=split")
    assert any("layers.*.ffn_norm, layers.*.ffn" in word for word in command_of(split))


def test_errors_lose_their_signs():
    assert Errors.of([-0.5, 0.1, 0.2]).median == 0.2
    assert Errors.of([-0.5, 0.1, 0.2]).worst == 0.5


def test_a_missed_figure_is_named_in_the_verdict():
    results = Results(emulated=[FAR_OFF], played=[OracleOutcome(0.0, (0.0,))])
    figures = all_figures(results)
    assert "MISSED: emulated network, fixed compute: step time, median" in verdict(results, figures)
    assert "| 20.00 % | 3.3 % |" in markdown(results, figures)


def test_the_noise_of_the_machine_is_allowed_with_real_compute_only():
    wanted = {
        figure.part: figure.wanted
        for figure in all_figures(Results(emulated=[FAR_OFF], real=[FAR_OFF]))
        if figure.name == "step time, median error"
    }
    assert wanted == {
        "emulated network, fixed compute": 0.033,
        "emulated network, real compute": 0.033 + 0.01,
    }


def test_the_planned_grid_has_every_combination_of_its_settings(tmp_path: Path):
    sizes = {
        link: len(ChoiceGrid(tmp_path, planned.SHAPES["deep"], preset, 64, print).candidates)
        for link, preset in planned.LINKS.items()
    }
    settings = 2 * 2 * 2 * 2 * 2  # batch, wrap, reshard, checkpointing, dtype
    assert sizes == {"one node": settings, "two nodes": 2 * settings}
    assert len(planned.SHAPES) == len(planned.MODELS) == 3


def test_a_choice_behind_the_best_and_a_wrong_report_are_misses():
    choice = ChoiceOutcome("deep, one node", 32, 30, 0.05, "keep", "reshard", (0.01,))
    fit = FitOutcome("llama-1b", 64, 16, Reported(40, 1), Reported(40, 0), (0.0,))
    results = Results(choices=[choice], fits=[fit])
    told = verdict(results, all_figures(results))
    assert "MISSED: the choice of plan, virtual time: behind the best of the grid" in told
    assert "the memory of plan, forecasts: reported to fit, and does not" in told
    assert "(--no-forecast)" not in told


@pytest.mark.slow
def test_the_choice_of_two_plans_is_the_faster_one(tmp_path: Path):
    outcome = ChoiceGrid(
        tmp_path, planned.SHAPES["deep"], planned.LINKS["one node"], 2, print
    ).judge()
    assert (outcome.num_plans, outcome.behind_best) == (2, 0.0)
    assert max(map(abs, outcome.step_errors)) < 0.06
