import json

from tests.builders import RunBuilder, write_run


def test_runs_of_a_folder_are_listed(invoke, runs_folder):
    ended = invoke("runs", runs_folder)
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()] == ["run", "four", "steady"]


def test_json_lists_them_for_programs(invoke, runs_folder):
    listed = json.loads(invoke("runs", runs_folder, "--json").out)
    assert [run["id"] for run in listed] == ["four", "steady"]
    assert listed[0]["path"] == str(runs_folder / "four")


def test_a_folder_that_is_not_there_is_an_error(invoke, tmp_path):
    ended = invoke("runs", tmp_path / "nothing")
    assert ended.code == 1
    assert "not found. Expected a folder of runs." in " ".join(ended.err.split())


def test_the_folder_is_runs_unless_given(invoke, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert invoke("runs").out.startswith("No runs in runs.")


def test_a_run_opens_by_the_name_that_the_user_gave_it(invoke, tmp_path):
    """`record --name` puts time and letters around the name of the folder."""
    builder = RunBuilder(["a"], name="mine")
    builder.rank(0).step(0, 0, 1000)
    write_run(builder.build(), tmp_path / "20261129-035140-mine-be1e")
    named = invoke("show", tmp_path / "mine")
    assert named.code == 0
    assert named.out.startswith("20261129-035140-mine-be1e")

    write_run(builder.build(), tmp_path / "20261129-035200-mine-af00")
    ended = invoke("show", tmp_path / "mine")
    assert ended.code == 1
    words = " ".join(ended.err.split())
    assert "is ambiguous: 2 runs have this name." in words
    assert "20261129-035200-mine-af00" in words
    assert "No run found" in " ".join(invoke("show", tmp_path / "other").err.split())
