import json


def test_units_are_shown_for_the_median_rank(invoke, runs_folder):
    ended = invoke("units", runs_folder / "steady")
    assert "layers.1  all-gather" in ended.out
    assert "timed steps of rank 0" in ended.out


def test_another_rank_can_be_asked_for(invoke, runs_folder):
    costs = json.loads(invoke("units", runs_folder / "four", "--rank", "3", "--json").out)
    assert costs["rank"] == 3
    assert [unit["fqn"] for unit in costs["units"]] == ["layers.0", "layers.1"]


def test_a_rank_that_is_not_there_is_refused_with_those_that_are(invoke, runs_folder):
    ended = invoke("units", runs_folder / "four", "--rank", "9")
    assert ended.code == 1
    assert "rank 9" in ended.err
    assert "0-3" in ended.err
