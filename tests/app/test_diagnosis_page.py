"""The Diagnosis page has the sentence, the picture and the stacks; other pages link to it."""

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.trace.correctness import BatchSeen, OptimizerSeen, TrainingSeen
from tests.analysis.test_lifetime import attempt
from tests.app.conftest import OpenApp
from tests.app.synthetic import make_run, write_run
from tests.app.test_pages import read
from tests.browser.states import write_crashed
from tests.builders import write_run as write_run_in_memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that hung and was killed, and one that ended normally."""
    folder = tmp_path_factory.mktemp("diagnosed")
    write_crashed(folder / "hung")
    write_run(folder / "whole", make_run(num_steps=5))
    return folder


def html_of(app) -> str:
    return "\n".join(element.proto.body for element in app.get("html"))


def test_a_hang_is_one_sentence_a_picture_and_two_stacks(open_app: OpenApp, folder: Path) -> None:
    app = open_app(folder, "diagnosis", run="hung")

    assert not app.exception
    text = read(app)
    assert "Rank 1 did not reach a collective in step 4." in text
    assert "waiting for the next batch at ann/train.py:88 (`batch = next(loader)`)" in text
    assert "1 rank waited for it." in text
    html = html_of(app)
    assert "<td class='waits'>waits</td><td class='not_issued'>not issued</td>" in html
    assert "<th scope='col' class='culprit'>rank 1 (gone)</th>" in html
    assert "<li class='user'>train (ann/train.py:88)<code>batch = next(loader)</code></li>" in html
    assert "2 frames as in the other stacks, to main (ann/train.py:120)" in html


def test_a_run_without_a_black_box_says_what_cannot_be_told(
    open_app: OpenApp, folder: Path
) -> None:
    app = open_app(folder, "diagnosis", run="whole")
    assert not app.exception
    assert "The recordings of all ranks ended normally." in read(app)
    assert "the run has no black box" in read(app)


def test_a_run_that_failed_before_its_restart_names_the_attempt(
    open_app: OpenApp, tmp_path: Path
) -> None:
    write_run_in_memory(attempt(0), tmp_path / "restarted")
    write_run_in_memory(attempt(1), tmp_path / "restarted")

    text = read(open_app(tmp_path, "diagnosis", run="restarted"))

    assert "Attempts before this one: 0 (complete)." in text
    assert "--attempt 0" in text


@pytest.mark.parametrize("page", ["overview", "units", "live"])
def test_every_page_says_that_something_went_wrong(
    open_app: OpenApp, folder: Path, page: str
) -> None:
    app = open_app(folder, page, run="hung")
    assert not app.exception
    (error,) = app.error
    assert error.value.startswith("Rank 1 ")
    assert any("diagnosis" in link.proto.page for link in app.get("page_link"))


def test_a_run_that_went_wrong_opens_with_its_diagnosis(open_app: OpenApp, folder: Path) -> None:
    links = {
        run: [link.proto for link in open_app(folder, "runs", **{"with": run}).get("page_link")]
        for run in ("hung", "whole")
    }
    assert [link.page for link in links["hung"]] == ["diagnosis"]
    assert [link.page for link in links["whole"]] == ["overview"]


def test_names_of_code_are_escaped(open_app: OpenApp, tmp_path: Path) -> None:
    write_crashed(tmp_path / "hung")
    stacks = next(tmp_path.glob("hung/**/rank-00001/stacks.txt"))
    stacks.write_text(stacks.read_text().replace(" in train", " in <img src=x>"))

    html = html_of(open_app(tmp_path, "diagnosis", run="hung"))

    assert "&lt;img src=x&gt; (ann/train.py:88)" in html
    assert "<img" not in html


def test_a_mistake_of_the_training_is_stated_once_with_all_changes(
    open_app: OpenApp, tmp_path: Path
) -> None:
    """An optimizer that updates nothing, and ranks that read the same batches."""
    run = make_run(num_steps=5)
    optimizer = OptimizerSeen(
        place="/job/train.py:7", num_steps=4, num_tensors=2, num_of_model=0, num_with_gradient=0,
        num_alike=2,
    )  # fmt: skip
    seen = TrainingSeen(
        num_trainable=2,
        num_with_gradient=2,
        optimizers=[optimizer],
        batches=[BatchSeen(step=step, digest=step) for step in range(4)],
    )
    ranks = [record.model_copy(update={"training": seen}) for record in run.ranks]
    write_run(tmp_path / "stale", replace(run, ranks=ranks))

    app = open_app(tmp_path, "diagnosis", run="stale")

    assert not app.exception
    text = read(app)
    assert text.count("The optimizer updates no parameter of the model") == 1
    assert "Line: job/train.py:7." in text.replace("\\", "")
    assert "Create the optimizer from the parameters of the model that trains" in text
    assert "read the same batches" in text
    assert "Give each rank a part of the data of its own" in text
    assert "Checks of the training without an answer" in app.expander[0].label
    assert not any("timeline" in link.proto.page for link in app.get("page_link"))
