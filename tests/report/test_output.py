import pytest

from fsdp_inspect.errors import ExportError
from fsdp_inspect.report.output import whole_file, whole_folder


def test_a_file_takes_its_place_when_it_is_complete(tmp_path):
    path = tmp_path / "deep" / "out.json"
    with whole_file(path) as place:
        place.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def write_half(whole, reason, *, name=""):
    with whole as place:
        (place / name if name else place).write_text("half")
        raise reason


@pytest.mark.parametrize("reason", [KeyboardInterrupt, ValueError])
def test_an_interrupted_file_leaves_nothing_and_keeps_the_old_one(tmp_path, reason):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(reason):
        write_half(whole_file(path, replaces=True), reason)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_only_when_that_was_asked_for(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ExportError, match="--force"), whole_file(path):
        pass
    with whole_file(path, replaces=True) as place:
        place.write_text("new")
    assert path.read_text() == "new"


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExportError, match=r"Cannot write .*out\.json.*--out"),
        whole_file(tmp_path / "file" / "out.json"),
    ):
        pass


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "tables"
    with pytest.raises(KeyboardInterrupt):
        write_half(whole_folder(folder), KeyboardInterrupt, name="events.csv")
    assert list(tmp_path.iterdir()) == []
    with whole_folder(folder) as place:
        (place / "events.csv").write_text("whole")
    assert (folder / "events.csv").read_text() == "whole"


def test_files_of_others_in_a_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "events.csv").write_text("old")
    with pytest.raises(ExportError, match="--force"), whole_folder(tmp_path):
        pass
    with whole_folder(tmp_path, replaces=True) as place:
        (place / "events.csv").write_text("new")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "events.csv").read_text() == "new"


def test_an_empty_folder_may_be_filled(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    with whole_folder(folder) as place:
        (place / "events.csv").write_text("whole")
    assert [file.name for file in folder.iterdir()] == ["events.csv"]


def test_a_file_never_replaces_a_folder(tmp_path):
    folder = tmp_path / "out.json"
    folder.mkdir()
    with pytest.raises(ExportError, match="a folder"), whole_file(folder, replaces=True):
        pass
