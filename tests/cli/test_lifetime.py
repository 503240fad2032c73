import json


def test_the_goodput_is_said_first(invoke, runs_folder):
    ended = invoke("lifetime", runs_folder / "steady")
    assert ended.out.startswith("Goodput: ")
    assert "4 completed steps in 1 attempt." in ended.out
    assert "Phases of rank 0" in ended.out


def test_the_phases_in_json_add_up(invoke, runs_folder):
    digest = json.loads(invoke("lifetime", runs_folder / "four", "--rank", "3", "--json").out)
    assert digest["rank"] == 3
    assert sum(phase["duration_ns"] for phase in digest["phases"]) == digest["wall_ns"]


def test_an_unknown_rank_is_refused(invoke, runs_folder):
    ended = invoke("lifetime", runs_folder / "steady", "--rank", "9")
    assert ended.code == 1
    assert "Rank 9 not found" in ended.err
