import json


def test_where_the_typical_step_goes_is_said_first(invoke, runs_folder):
    ended = invoke("summary", runs_folder / "steady", "--rank", "0")
    assert ended.out.startswith("Typical step of rank 0: 1.00 µs.\n  Exposed communication: 250 ns")


def test_the_parts_in_json_add_up(invoke, runs_folder):
    digest = json.loads(invoke("show", runs_folder / "four", "--rank", "3", "--json").out)
    shown = digest["shown"]
    assert shown["rank"] == 3
    assert sum(part["duration_ns"] for part in shown["parts"]) == shown["step_time_ns"]
    assert sum(digest["causes_ns"].values()) == shown["exposed_ns"]
    assert [row["rank"] for row in digest["ranks"]] == [0, 1, 2, 3]


def test_a_step_that_was_not_finished_is_refused_with_those_that_were(invoke, runs_folder):
    ended = invoke("summary", runs_folder / "steady", "--step", "9")
    assert ended.code == 1
    assert "Step 9 not found" in ended.err
    assert "0 to 3" in ended.err


def test_the_old_name_of_the_command_still_works(invoke, runs_folder):
    old, new = (
        invoke(*words, runs_folder / "steady", "--rank", "0").out
        for words in (["breakdown"], ["summary"])
    )
    assert old == new
    assert "breakdown" not in invoke("--help").out.replace("its breakdown", "")
