import json


def test_ranks_are_compared(invoke, runs_folder):
    ended = invoke("ranks", runs_folder / "four")
    assert ended.code == 0
    assert "Typical step of each rank" in ended.out


def test_ranks_are_given_to_programs(invoke, runs_folder):
    measured = json.loads(invoke("ranks", runs_folder / "four", "--json").out)
    assert [row["rank"] for row in measured["ranks"]] == [0, 1, 2, 3]
    assert {"straggler", "replay", "skews", "refusals", "sampled_steps"} <= set(measured)


def test_a_rank_that_is_not_there_is_refused(invoke, runs_folder):
    ended = invoke("ranks", runs_folder / "four", "--rank", "9")
    assert ended.code == 1
    assert "Rank 9 not found" in ended.err
