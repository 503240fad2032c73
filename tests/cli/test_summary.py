import json

from tests.builders import steady_run, write_run


def test_a_summary_shows_the_verdict_and_where_the_step_goes(invoke, runs_folder):
    ended = invoke("summary", runs_folder / "steady")
    assert ended.code == 0
    assert "Communication is exposed for 25% of the step." in ended.out
    assert "left out: step 0 (warm-up)" in ended.out


def test_json_is_the_whole_digest_and_nothing_else(invoke, runs_folder):
    digest = json.loads(invoke("show", runs_folder / "four", "--json").out)
    assert (digest["run_id"], digest["world_size"], len(digest["ranks"])) == ("four", 4, 4)
    assert digest["step_time_ns"]["median"] == 1000
    assert digest["peak_reserved_bytes"] is None


def test_the_verdict_can_be_had_alone(invoke, runs_folder):
    ended = invoke("summary", runs_folder / "steady", "--verdict")
    assert ended.out.startswith("Communication is exposed")
    assert "Ranks" not in ended.out


def test_the_verdict_is_there_for_programs_too(invoke, runs_folder):
    verdict = json.loads(invoke("summary", runs_folder / "steady", "--verdict", "--json").out)
    assert verdict["limit"] == "communication"
    assert verdict["numbers"]["exposed_ns"] == 250


def test_a_folder_with_one_run_inside_stands_for_that_run(invoke, tmp_path):
    write_run(steady_run(run_id="only"), tmp_path / "sample" / "run")
    assert invoke("summary", tmp_path / "sample").out.startswith("run  complete")


def test_a_folder_with_several_runs_asks_which(invoke, runs_folder):
    ended = invoke("show", runs_folder, "summary")
    assert ended.code == 1
    assert str(runs_folder / "four") in ended.err
