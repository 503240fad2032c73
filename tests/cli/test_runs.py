import json


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
