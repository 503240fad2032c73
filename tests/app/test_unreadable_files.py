"""A page of a run with unreadable files shows the rest and names them, without a traceback."""

import os
import shutil

import pytest
from fsdp_inspect_app.pages import SECTIONS

from tests.app.conftest import start_app
from tests.app.test_pages import SAMPLES, read

RANK = "attempt-000/rank-00001"
UNKNOWN = {
    "timeline": ("step", "rank"),
    "units": ("unit",),
    "memory": ("rank",),
}
"""The parameters of a link that each page reads."""
PAGES = [file.name for file in SECTIONS["This run"]]


@pytest.fixture
def runs(tmp_path):
    """A run in which the record and summary of rank 1 are folders, so they cannot be read."""
    shutil.copytree(SAMPLES / "tiny-2-ranks", tmp_path / "run")
    for name in (f"{RANK}/rank.json", f"{RANK}/summary.parquet"):
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_page_shows_the_rest(runs, page):
    app = start_app(runs, page, run="run")
    assert not app.exception
    assert "cannot be shown" not in read(app)


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    """A folder with a run whose tables of rank 1 end in the middle, and one without run.json."""
    folder = tmp_path_factory.mktemp("torn")
    shutil.copytree(SAMPLES / "tiny-2-ranks", folder / "run")
    for table in ("events", "memory", "scalars"):
        file = folder / "run" / RANK / f"{table}.parquet"
        os.truncate(file, file.stat().st_size // 2)
    shutil.copytree(SAMPLES / "tiny-2-ranks", folder / "headless")
    (folder / "headless" / "run.json").unlink()
    return folder


@pytest.mark.parametrize("page", [*PAGES, "compare", "runs"])
def test_every_page_states_what_is_torn_and_unknown_and_shows_the_rest(torn, page):
    address = {"run": "run", "step": "99", "rank": "77", "unit": "layers.99"}
    app = start_app(torn, page, **address)
    shown = read(app).replace("\\", "")
    assert not app.exception
    assert "cannot be shown" not in shown
    assert len(app.title) == 1
    assert "badge[complete]" not in shown
    problems = " ".join(one.value for one in (*app.error, *app.warning, *app.info))
    if page in PAGES and page != "live":
        assert "parquet" in f"{problems} {shown}", shown
    for name in UNKNOWN.get(page, ()):
        assert f"{name.capitalize()} `{address[name]}` of the link was not found" in shown


def test_a_folder_without_a_manifest_is_reported(torn):
    runs = start_app(torn, "runs")
    assert [panel.label for panel in runs.expander] == ["1 run cannot be read"]
    assert "run.json is missing" in read(runs).replace("\\", "")
    linked = read(start_app(torn, "overview", run="headless")).replace("\\", "")
    assert "Run `headless` of the link was not found" in linked
    assert "Its folder has no run.json" in linked


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
