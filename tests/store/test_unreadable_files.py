"""An unreadable file of a run is named, and the rest of the run is shown."""

import os
from pathlib import Path

import pytest

from fsdp_inspect.errors import UnreadableFileError
from fsdp_inspect.store import files as store_files
from fsdp_inspect.store.files import LocalFiles, open_files
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.builders import steady_run, write_run

RANK = "attempt-000/rank-00001"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(steady_run(), tmp_path / "run")


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch):
    """Make the system refuse to open a file; permission bits do not stop root."""

    def apply(name: str) -> None:
        def opened(path: Path):
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", str(path))
            return open_regular(path)

        open_regular = store_files.open_regular
        read_regular = store_files.read_regular
        monkeypatch.setattr(store_files, "open_regular", opened)
        monkeypatch.setattr(
            store_files,
            "read_regular",
            lambda path, most: opened(path).close() or read_regular(path, most),
        )

    return apply


@pytest.mark.parametrize("name", [f"{RANK}/rank.json", f"{RANK}/summary.parquet", "run.json"])
def test_one_unreadable_file_is_named_and_the_rest_is_shown(run_folder, forbid, name):
    forbid(name)
    run = open_run(run_folder)
    assert len(run.summary(ranks=[0])) > 0
    assert len(run.summary(ranks=[1])) > 0
    noted = [note for note in run.notes if name in note and "Permission denied" in note]
    assert len(noted) == 1


def test_an_unreadable_summary_of_a_rank_is_made_again_from_its_events(run_folder, forbid):
    expected = open_run(run_folder).summary(ranks=[1])
    forbid(f"{RANK}/summary.parquet")
    found = open_run(run_folder).summary(ranks=[1])
    assert found.duration_ns.tolist() == expected.duration_ns.tolist()


@pytest.mark.parametrize("name", [f"{RANK}/rank.json", f"{RANK}/summary.parquet", "run.json"])
def test_a_folder_in_place_of_a_file_is_named(run_folder, name):
    (run_folder / name).unlink()
    (run_folder / name).mkdir()
    run = open_run(run_folder)
    assert len(run.summary()) > 0
    assert any(name in note for note in run.notes)


def test_a_pipe_in_place_of_a_table_is_not_waited_for(run_folder):
    path = run_folder / RANK / "events.parquet"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnreadableFileError, match="Not a regular file"):
        open_run(run_folder).events(1)


def test_a_listing_has_the_run_whose_manifest_is_unreadable(run_folder, forbid):
    forbid("run.json")
    (entry,) = list_runs(run_folder.parent)
    assert entry.manifest is None
    assert "Permission denied" in str(entry.problem)


def test_an_unreachable_url_is_one_error(monkeypatch):
    files = open_files("memory://nowhere")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Cannot connect to host")

    monkeypatch.setattr(type(files._system), "ls", refuse)
    with pytest.raises(UnreadableFileError, match=r"memory://nowhere.*Cannot connect to host"):
        open_run("memory://nowhere")


def test_a_path_with_a_nul_is_an_error_that_names_it():
    with pytest.raises(UnreadableFileError, match="null byte"):
        LocalFiles(Path("a\0b")).read("run.json")
