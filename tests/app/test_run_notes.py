"""Stars and notes of runs are shown on their pages, and lead and are found in the list."""

import dataclasses

import pytest

from tests.app.synthetic import make_manifest, make_run, write_run
from tests.app.test_pages import read


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two runs, and a data folder of their own."""
    monkeypatch.setenv("FSDP_INSPECT_DATA", str(tmp_path / "data"))
    for name in ("first", "second"):
        manifest = make_manifest(run_id=name)
        run = dataclasses.replace(make_run(num_steps=3), manifest=manifest)
        write_run(tmp_path / "runs" / name, run)
    return tmp_path / "runs"


def test_a_starred_run_with_a_note_leads_the_list_and_is_found(open_app, folder):
    app = open_app(folder, "overview", run="second")
    app.button(key="star-header").click().run()
    app.text_area(key="note of second").set_value("lr **too** high")
    [save] = [button for button in app.button if button.label == "Save note"]
    save.click().run()
    assert "Note: lr **too** high" in read(app)
    assert app.button(key="star-header").label == "Unstar"

    rows = open_app(folder, "runs").dataframe[0].value
    assert rows["folder"].tolist()[0] == "second"
    assert rows["mark"].tolist() == ["starred", ""]
    assert rows["note"].tolist() == ["lr **too** high", ""]
    for words in ("starred", "too high"):
        found = open_app(folder, "runs", search=words).dataframe[0].value
        assert found["folder"].tolist() == ["second"], words


def test_a_note_that_cannot_be_saved_is_reported(open_app, folder, tmp_path):
    (tmp_path / "data").write_text("a file where the folder of data should be")
    app = open_app(folder, "overview", run="first")
    app.button(key="star-header").click().run()
    assert not app.exception
    assert "Notes and views cannot be" in app.error[0].value


def test_without_a_data_folder_there_are_no_buttons(open_app, folder, monkeypatch):
    monkeypatch.setenv("FSDP_INSPECT_DATA", "")
    app = open_app(folder, "overview", run="first")
    assert not [button for button in app.button if button.key == "star-header"]
