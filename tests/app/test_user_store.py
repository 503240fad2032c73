"""Notes, stars and views are kept in the user's data folder, and errors say what to do."""

import os
import sqlite3
from pathlib import Path

import pytest
from fsdp_inspect_app.user_store import (
    LONGEST_NOTE,
    LONGEST_QUERY,
    MOST_VIEWS,
    RunNote,
    SavedView,
    UserStore,
    user_store,
)

from fsdp_inspect.errors import StoreError

FOLDER = Path("/runs")


@pytest.fixture
def store(tmp_path):
    return UserStore(tmp_path / "data" / "notes.sqlite")


def test_nothing_is_written_before_something_is_kept(store):
    assert store.notes() == {}
    assert store.views(FOLDER) == []
    assert not store.file.parent.exists()


def test_a_note_and_a_star_are_kept_until_both_are_removed(store):
    store.keep_note("run-1", RunNote(is_starred=True, text=" lr too high\n"))
    store.keep_note("run-2", RunNote(text="x" * (LONGEST_NOTE + 5)))
    again = UserStore(store.file).notes()
    assert again["run-1"] == RunNote(is_starred=True, text="lr too high")
    assert len(again["run-2"].text) == LONGEST_NOTE
    store.keep_note("run-1", RunNote())
    assert set(store.notes()) == {"run-2"}


def test_views_belong_to_a_folder_and_one_name_is_one_view(store):
    store.keep_view(FOLDER, SavedView("slow  step", "timeline", "run=a&step=1"))
    store.keep_view(FOLDER, SavedView("slow step", "timeline", "run=a&step=2"))
    store.keep_view(Path("/other"), SavedView("slow step", "units", ""))
    assert store.views(FOLDER) == [SavedView("slow step", "timeline", "run=a&step=2")]
    store.remove_view(FOLDER, "slow step")
    assert store.views(FOLDER) == []
    assert len(store.views(Path("/other"))) == 1


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        pytest.param(SavedView("  ", "units", ""), "no name", id="no name"),
        pytest.param(
            SavedView("a", "units", "x" * (LONGEST_QUERY + 1)), "at most 8000", id="long address"
        ),
        pytest.param(SavedView("one more", "units", ""), "Delete one", id="too many"),
    ],
)
def test_a_view_that_cannot_be_saved_says_why(store, view, expected):
    for number in range(MOST_VIEWS if view.name == "one more" else 1):
        store.keep_view(FOLDER, SavedView(str(number), "units", ""))
    before = store.views(FOLDER)
    with pytest.raises(StoreError, match=expected):
        store.keep_view(FOLDER, view)
    assert store.views(FOLDER) == before


def test_names_that_are_no_utf_8_are_kept_too(store):
    folder, run = Path(os.fsdecode(b"/x\xff")), "run-\udcff"
    assert store.views(folder) == []
    store.keep_view(folder, SavedView("a\udcff", "memory", "run=\udcff"))
    assert [view.name for view in store.views(folder)] == ["a\\udcff"]
    store.remove_view(folder, "a\udcff")
    assert store.views(folder) == []
    store.keep_note(run, RunNote(text="half \ud800"))
    assert [note.text for note in store.notes().values()] == ["half \\ud800"]
    store.keep_note(run, RunNote())
    assert store.notes() == {}


@pytest.mark.parametrize("data", [b"/x\xff\0/y", b"/proc/1/none"])
def test_a_folder_that_cannot_hold_the_file_is_reported(data):
    store = UserStore(Path(os.fsdecode(data), "notes.sqlite"))
    for ask in (
        lambda: store.keep_note("run", RunNote(True)),
        lambda: store.remove_view(FOLDER, ""),
    ):
        with pytest.raises(StoreError, match="cannot be read from or saved in"):
            ask()


def test_a_damaged_file_is_reported_and_stays_as_it_is(store):
    store.file.parent.mkdir()
    store.file.write_text("no database, but perhaps someone needs it")
    for act in (store.notes, lambda: store.keep_note("run", RunNote(text="a"))):
        with pytest.raises(StoreError, match="FSDP_INSPECT_DATA"):
            act()
    assert "someone needs it" in store.file.read_text()


def test_a_file_that_another_dashboard_writes_is_not_lost(store):
    store.keep_note("run-1", RunNote(text="first"))
    with sqlite3.connect(store.file) as other:
        other.execute("INSERT INTO notes VALUES ('run-2', 1, 'second')")
    store.keep_note("run-3", RunNote(text="third"))
    assert set(store.notes()) == {"run-1", "run-2", "run-3"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FSDP_INSPECT_DATA": "/chosen"}, "/chosen/notes.sqlite"),
        ({"FSDP_INSPECT_DATA": ""}, None),
        ({"XDG_DATA_HOME": "/data"}, "/data/fsdp-inspect/notes.sqlite"),
        (
            {"XDG_DATA_HOME": "relative", "HOME": "/home/ada"},
            "/home/ada/.local/share/fsdp-inspect/notes.sqlite",
        ),
    ],
)
def test_the_environment_names_the_folder(monkeypatch, variables, expected):
    monkeypatch.delenv("FSDP_INSPECT_DATA", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = user_store()
    assert (None if store is None else str(store.file)) == expected
