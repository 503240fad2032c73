import json

import pytest

from tests.builders import RunBuilder, write_run

HOSTILE = "a\x1b[31m\x9b2J\u202e"
HOSTILE_SHOWN = "a␛[31m\N{REPLACEMENT CHARACTER}2J\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    builder = RunBuilder(units=(HOSTILE,), run_id=f"r{HOSTILE}", name=HOSTILE, device_name=HOSTILE)
    for number in range(2):
        rank = builder.rank(number)
        rank.record["host"] = HOSTILE
        rank.step(0, 0, 100)
        rank.all_gather(HOSTILE, 0, 50, need=0)
        rank.forward(HOSTILE, 50, 90)
    return write_run(builder.build(), tmp_path_factory.mktemp("runs") / "hostile")


def test_units_are_shown_for_the_median_rank(invoke, runs_folder):
    ended = invoke("units", runs_folder / "steady")
    assert "layers.1  all-gather" in ended.out
    assert "Typical step of rank 0, from" in ended.out


def test_another_rank_can_be_asked_for(invoke, runs_folder):
    costs = json.loads(invoke("units", runs_folder / "four", "--rank", "3", "--json").out)
    assert costs["rank"] == 3
    assert (costs["run_id"], costs["source"], costs["notes"]) == ("four", "recorded", [])
    assert [unit["fqn"] for unit in costs["units"]] == ["layers.0", "layers.1"]


def test_a_rank_that_is_not_there_is_refused_with_those_that_are(invoke, runs_folder):
    ended = invoke("units", runs_folder / "four", "--rank", "9")
    assert ended.code == 1
    assert "Rank 9 not found" in ended.err
    assert "0-3" in ended.err


@pytest.mark.parametrize("subcommand", ["units", "exposed", "summary", "compare", "runs"])
def test_a_terminal_obeys_no_name(invoke, hostile_run, runs_folder, subcommand):
    given = [hostile_run, runs_folder / "steady"] if subcommand == "compare" else [hostile_run]
    ended = invoke(subcommand, *given)
    assert ended.code == 0
    assert set(HOSTILE) & set(ended.out) <= set(HOSTILE_SHOWN)
    assert "\x1b" not in ended.out


def test_the_name_of_a_unit_shows_what_it_holds(invoke, hostile_run):
    assert HOSTILE_SHOWN in invoke("show", hostile_run, "units").out


def test_an_error_that_names_a_hostile_run_commands_no_terminal(invoke, hostile_run):
    ended = invoke("show", hostile_run, "units", "--rank", "9")
    assert ended.code == 1
    assert "\x1b" not in ended.err
