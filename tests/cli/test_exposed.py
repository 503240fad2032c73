import json


def test_how_long_a_rank_waits_is_said_first(invoke, runs_folder):
    ended = invoke("exposed", runs_folder / "steady")
    assert ended.out.startswith("Rank 0 waits 250 ns per step for communication.")


def test_json_holds_causes_prefetch_bandwidth_and_evidence(invoke, runs_folder):
    asked = ("--rank", "3", "--unit", "layers.1", "--json")
    digest = json.loads(invoke("exposed", runs_folder / "four", *asked).out)
    assert digest["exposed"]["rank"] == 3
    assert digest["exposed"]["causes_ns"] == {"floor": 150, "bandwidth": 60, "late_issue": 40}
    assert {row["fqn"] for row in digest["prefetch"]["units"]} == {"layers.1"}
    assert digest["bandwidth"]["kinds"][0]["link"]["refusal"]
    assert digest["exposed"]["evidence"][0]["cause"] == "bandwidth"


def test_a_wrong_unit_is_refused_with_the_nearest(invoke, runs_folder):
    ended = invoke("exposed", runs_folder / "steady", "--unit", "layer.1")
    assert ended.code == 1
    assert "Nearest: 'layers.1'" in ended.err
