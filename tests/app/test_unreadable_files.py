"""A page of a run with unreadable files shows the rest and names them, without a traceback."""

import shutil

import pytest
from fsdp_inspect_app.pages import SECTIONS

from tests.app.conftest import start_app
from tests.app.test_pages import SAMPLES, read

RANK = "attempt-000/rank-00001"
PAGES = [file.name for file in SECTIONS["This run"]]


@pytest.fixture
def runs(tmp_path):
    """A run in which the record and summary of rank 1 are folders, so they cannot be read."""
    shutil.copytree(SAMPLES / "tiny-2-ranks" / "run", tmp_path / "run")
    for name in (f"{RANK}/rank.json", f"{RANK}/summary.parquet"):
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_the_rest(runs, page):
    app = start_app(runs, page, run="run")
    assert not app.exception
    assert "cannot be shown" not in read(app)


def test_the_overview_names_the_unreadable_file(runs):
    shown = read(start_app(runs, "overview", run="run"))
    assert "rank.json" in shown.replace("\\", "")


def test_a_page_that_fails_says_so_without_a_traceback(runs, monkeypatch):
    from fsdp_inspect_app import loading

    def crash(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(loading, "read_summary", crash)
    app = start_app(runs, "overview", run="run")
    assert not app.exception
    assert "This page cannot be shown" in read(app).replace("\\", "")
    assert any("KeyError" in error.value for error in app.error)
