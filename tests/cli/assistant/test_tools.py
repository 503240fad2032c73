"""Tools open only runs of their folder, and explain errors in three parts."""

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from fsdp_inspect.cli.assistant.run_folder import RunFolder
from fsdp_inspect.cli.assistant.tools import TOOLS, limit_result, take_part

NAMES_OF_OTHERS = ("linked", "../secret", "file:///etc", "a\0b", "")
ERRORS = (
    ("summary", {"run": "leaking"}, "is a link to a place outside the folder of runs"),
    ("summery", {}, "Unknown tool 'summery'. Expected a tool of this server. Nearest"),
    ("summary", {}, "run is missing. Expected the arguments of the tool's schema."),
    ("summary", {"run": "tiny-2-ranks", "path": "x"}, "There is no key 'path'."),
    ("exposed", {"run": "tiny-2-ranks", "rank": -1}, "Expected greater than or equal to 0"),
    ("exposed", {"run": "tiny-2-ranks", "unit": "layers.99"}, "Nearest: 'layers.0'"),
    ("exposed", {"run": "tiny-2-ranks", "rank": 7}, "rank"),
    ("simulate", {"run": "tiny-2-ranks", "wrap": "x"}, "Invalid wrap policy: 'x'. Expected"),
    ("simulate", {"run": "tiny-2-ranks", "latency": "x"}, "such as '20us'"),
    ("simulate", {"run": "tiny-2-ranks", "microbatches": 10**9}, "less than or equal to 1024"),
    ("simulate", {"run": "tiny-2-ranks", "world_size": 2**70}, "less than or equal to 1048576"),
    ("simulate", {"run": "tiny-2-ranks", "wrap": f"every:{'9' * 5000}"}, "Invalid wrap policy"),
    ("summary", {"run": "tiny-2-ranks", "part": "[[["}, "Invalid part '[[['. Expected a path"),
    ("summary", {"run": "tiny-2-ranks", "part": "verdict."}, "Invalid part 'verdict.'"),
    ("units", {"run": "tiny-2-ranks", "part": f"units[{'9' * 5000}]"}, "Invalid part"),
    ("compare", {"runs": ["tiny-2-ranks"]}, "runs is ['tiny-2-ranks']. Expected"),
    ("define_metrics", {"names": ["exposed"]}, "Nearest: 'exposed_ns'"),
    ("units", {"run": "tiny-2-ranks", "part": "units[99]"}, "It is a list of 8 items."),
)
"""A wrong call, and a part of its answer."""


@pytest.fixture(scope="module")
def answers(ask, runs_folder):
    """The answers of one session: to the list of runs, to other names, to errors, to `compare`."""
    names = [*NAMES_OF_OTHERS, str(runs_folder.parent / "secret")]
    found = iter(
        ask(
            ("list_runs", {}),
            *(("summary", {"run": name}) for name in names),
            *((tool, given) for tool, given, _ in ERRORS),
            ("compare", {"runs": ["tiny-2-ranks", "async-prefetch-2-ranks"]}),
        )
    )
    listed = next(found)
    others = [next(found) for _ in names]
    errors = [next(found) for _ in ERRORS]
    return Answers(listed, others, errors, next(found), ask.listed)


class Answers(NamedTuple):
    """Pairs of is_error and answer, and the tools of the server."""

    listed: tuple[bool, Any]
    others: list[tuple[bool, Any]]
    errors: list[tuple[bool, Any]]
    compared: tuple[bool, Any]
    tools: list[Any]


def test_runs_are_listed_without_links_that_lead_out(answers):
    bad, listed = answers.listed
    assert not bad
    names = {row["run"] for row in listed["runs"]}
    assert names == {
        "tiny-2-ranks", "hsdp-4-ranks", "async-prefetch-2-ranks", "failed", "leaking",
    }  # fmt: skip
    problems = {row["run"]: row["problem"] for row in listed["runs"] if "problem" in row}
    assert list(problems) == ["leaking"]
    assert "is a link to a place outside the folder of runs" in problems["leaking"]


def test_every_tool_is_listed_with_its_arguments(answers):
    schemas = {tool.name: tool.input_schema for tool in answers.tools}
    assert len(schemas) == 17
    assert all(tool.annotations.read_only_hint and tool.description for tool in answers.tools)
    assert schemas["summary"]["required"] == ["run"]
    assert schemas["simulate"]["additionalProperties"] is False


def test_no_name_leads_out_of_the_folder(answers):
    assert len(answers.others) == 6
    for bad, text in answers.others:
        assert bad
        assert "runs outside this folder cannot be opened" in text


@pytest.mark.parametrize("at", range(len(ERRORS)), ids=lambda at: ERRORS[at][2])
def test_an_error_has_the_value_and_the_remedy(answers, at):
    bad, text = answers.errors[at]
    assert bad
    assert ERRORS[at][2] in text
    assert "Traceback" not in text


def test_runs_are_compared_with_origins(answers):
    bad, compared = answers.compared
    assert not bad
    assert "do not differ significantly" in compared["result"]["answer"]
    assert [one["run"] for one in compared["origin"]["runs"]] == [
        "tiny-2-ranks",
        "async-prefetch-2-ranks",
    ]


def test_large_results_are_shortened_and_name_what_is_left_out():
    large = {"step_time_ns": 7, "units": [{"fqn": f"layers.{at}", "rows": [at] * 50}
                                          for at in range(1000)]}  # fmt: skip
    bounded = limit_result(large)
    assert len(json.dumps(bounded.result)) <= 24_000
    assert bounded.result["step_time_ns"] == 7
    assert bounded.result["units"][0]["fqn"] == "layers.0"
    assert "of 1000 items" in bounded.left_out[0]
    assert take_part(large, "units[999].rows[0]") == 999


def test_small_results_are_not_shortened():
    assert limit_result({"a": [1, 2]}).left_out == ()


def test_a_slow_answer_keeps_no_other_one_waiting(runs_folder, monkeypatch):
    pytest.importorskip("mcp")
    from fsdp_inspect.cli.assistant.server import answer_call

    folder, is_slow, goes_on = RunFolder(runs_folder), threading.Event(), threading.Event()

    def answer_slowly(runs, given):
        runs.open(given.run)
        is_slow.set()
        goes_on.wait(60)
        return {}

    slow = dataclasses.replace(TOOLS["simulate"], answer=answer_slowly)
    monkeypatch.setattr("fsdp_inspect.cli.assistant.server.TOOLS", {**TOOLS, "simulate": slow})
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(answer_call, folder, "simulate", {"run": "tiny-2-ranks"})
        assert is_slow.wait(60)
        assert not answer_call(folder, "units", {"run": "tiny-2-ranks"}).is_error
        assert not waiting.done()
        goes_on.set()
        assert not waiting.result().is_error


def test_a_run_is_kept_open_for_later_calls(runs_folder):
    folder = RunFolder(runs_folder)
    with folder.lending() as first:
        opened = first.open("tiny-2-ranks")
        with folder.lending() as second:
            assert second.open("tiny-2-ranks") is not opened
    with folder.lending() as third:
        assert third.open("tiny-2-ranks") is opened
