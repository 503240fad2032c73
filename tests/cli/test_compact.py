import json

from tests.builders import steady_run, write_run


def test_compaction_says_what_it_did_and_again_changes_nothing(invoke, tmp_path):
    run = write_run(steady_run(), tmp_path / "run")
    assert "2 ranks compacted" in invoke("store", "compact", run).out
    compacted = {path: path.read_bytes() for path in run.rglob("*.parquet")}
    assert invoke("store", "compact", run).code == 0
    assert {path: path.read_bytes() for path in run.rglob("*.parquet")} == compacted


def test_json_tells_programs_what_was_done(invoke, tmp_path):
    run = write_run(steady_run(), tmp_path / "run")
    result = json.loads(invoke("store", "compact", run, "--json").out)
    assert (result["path"], len(result["compacted"]), result["skipped"]) == (str(run), 2, [])


def test_a_folder_without_a_run_is_an_error(invoke, tmp_path):
    ended = invoke("store", "compact", tmp_path)
    assert ended.code == 1
    assert "No run found at" in ended.err
