"""The dashboard on a URL shows the runs there, and states why it cannot."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsdp_inspect_app import loading
from fsdp_inspect_app.catalog_reading import index_of
from streamlit.testing.v1 import AppTest

from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.run_upload import upload_run
from tests.app.synthetic import make_run, write_run

URL = "memory://dashboard/runs"


@pytest.fixture(scope="module")
def at_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("one", 4), ("two", 6)):
        run = make_run(num_steps=steps)
        manifest = run.manifest.model_copy(update={"run_id": name})
        write_run(folder / name, dataclasses.replace(run, manifest=manifest))
        upload_run(folder / name, URL)
    index_runs(URL)
    return URL


def test_every_page_shows_a_run_at_a_url(
    at_url: str, open_app: Callable[..., AppTest], page_names: list[str]
) -> None:
    for page in page_names:
        app = open_app(at_url, page, run="one")
        assert not app.exception, page
        shown = " ".join(element.value for element in app.error)
        assert not shown, (page, shown)


def test_runs_page_lists_the_runs_at_a_url(at_url: str, open_app: Callable[..., AppTest]) -> None:
    open_app(at_url, "runs")
    assert {entry.id for entry in loading.list_entries()} == {"one", "two"}
    [entry] = [each for each in loading.list_entries() if each.id == "two"]
    assert loading.read_summary(entry).num_steps == 6


@pytest.fixture(scope="session")
def page_names() -> list[str]:
    pages = Path(loading.__file__).parent / "app_pages"
    return sorted(path.name for path in pages.iterdir() if (path / f"{path.name}.py").exists())


def test_url_of_the_command_line_stays_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["streamlit_app.py", "s3://bucket/runs"])
    assert loading.runs_folder() == "s3://bucket/runs"
    assert fsspec.filesystem("memory").exists("/dashboard/runs/one/run.json")


def test_trends_and_runs_use_the_catalog_at_the_url(
    at_url: str, open_app: Callable[..., AppTest]
) -> None:
    index = index_of(at_url)
    assert index.find(list_runs(at_url), patience_s=300).is_complete
    found = index.catalog()
    assert found is not None
    assert found.runs["run"].to_pylist() == ["one", "two"]
    trends = open_app(at_url, "trends", metric="exposed_ns", axis="time")
    assert not trends.exception
    assert "at least 5 points of a series on each side" in " ".join(
        each.value for each in trends.caption
    )
    runs = open_app(at_url, "runs", group="world_size")
    assert list(runs.dataframe[0].value["runs"]) == [2]
