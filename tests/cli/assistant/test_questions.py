"""An assistant gets the known answers to 30 questions from the real server over stdio."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.cli.assistant.tools import MAX_CHARACTERS, take_part
from tests.cli.assistant.conftest import SAMPLES

TINY, HSDP, PREFETCH = "tiny-2-ranks", "hsdp-4-ranks", "async-prefetch-2-ranks"


@dataclass(frozen=True)
class Question:
    """A question, the call of a tool that answers it, and the known answer."""

    words: str
    tool: str
    path: str
    """The place of the answer in the result."""
    known: Any
    """The answer, or the key of the run's expected.json that holds it, or a function of the run."""
    run: str = TINY
    given: dict[str, Any] = field(default_factory=dict)


def _expected(*keys: str) -> Callable[[str], Any]:
    def read(run: str) -> Any:
        value = json.loads((SAMPLES / run / "expected.json").read_text())
        for key in keys:
            value = value[key]
        return value

    return read


def _of(ask: Callable[[Any], Any]) -> Callable[[str], Any]:
    return lambda run: ask(_open(run))


@cache
def _open(run: str) -> Any:
    return open_run(SAMPLES / run)


QUESTIONS = (
    Question("How long is a typical step?", "summary", "step_time_ns.typical",
             _expected("step_time_ns", "typical")),
    Question("And with HSDP?", "summary", "step_time_ns.typical",
             _expected("step_time_ns", "typical"), HSDP),
    Question("How long is communication exposed?", "summary", "exposed_ns",
             _expected("exposed_ns")),
    Question("And with prefetch?", "summary", "exposed_ns", _expected("exposed_ns"), PREFETCH),
    Question("How much is hidden?", "summary", "overlap_ratio", _expected("overlap_ratio"),
             PREFETCH),
    Question("What is the peak?", "summary", "peak_allocated_bytes",
             _expected("peak_allocated_bytes")),
    Question("And the reserved peak on CPU?", "summary", "peak_reserved_bytes", None),
    Question("What limits the step?", "summary", "verdict.limit", "communication"),
    Question("Why?", "summary", "verdict.why", _of(lambda run: run.summary().verdict.why)),
    Question("How many steps count?", "summary", "num_timed_steps", _expected("num_timed_steps")),
    Question("How many ranks trained?", "summary", "world_size", 4, HSDP),
    Question("How long are collectives?", "summary", "communication_ns",
             _expected("communication_ns"), HSDP),
    Question("How many collectives a step?", "summary", "collectives_per_step",
             _of(lambda run: run.summary().collectives_per_step), HSDP),
    Question("What is the slowest 10%?", "step_times", "step_time_ns.p90",
             _expected("step_time_ns", "p90")),
    Question("Which part is largest?", "breakdown", "largest.name",
             _of(lambda run: run.breakdown().largest.name), HSDP),
    Question("How long does gloo block the host?", "breakdown", "causes_ns.blocking",
             _of(lambda run: run.breakdown().causes_ns["blocking"])),
    Question("Which unit waits most?", "exposed", "exposed.owners[0].fqn",
             _of(lambda run: run.exposed().exposed.owners[0].fqn)),
    Question("How long do all-gathers wait?", "exposed", "exposed.by_kind_ns.all_gather",
             _of(lambda run: run.exposed().exposed.by_kind_ns["all_gather"])),
    Question("How long does rank 1 wait?", "exposed", "exposed.exposed_ns",
             _of(lambda run: run.exposed(rank=1).exposed.exposed_ns), given={"rank": 1}),
    Question("What does layers.3 exchange?", "units", "units[4].all_gather.bytes",
             _of(lambda run: run.units().units[4].all_gather.bytes)),
    Question("Where is the peak?", "memory", "memory.peak.fqn",
             _of(lambda run: run.memory().memory.peak.fqn)),
    Question("What fills it?", "memory", "memory.peak.categories[0].category", "activation"),
    Question("Is there a straggler?", "ranks", "straggler",
             _of(lambda run: run.ranks().to_dict()["straggler"])),
    Question("How often did it restart?", "lifetime", "num_attempts", 1),
    Question("What is its goodput?", "lifetime", "goodput_ratio",
             _of(lambda run: run.lifetime().goodput_ratio), PREFETCH),
    Question("What should I change first?", "advise", "plan.suggestions[0].what",
             "Keep parameters unsharded after forward (reshard_after_forward=False)"),
    Question("What does that gain?", "advise", "plan.suggestions[0].saved_ns",
             _of(lambda run: run.advise().plan.suggestions[0].saved_ns), HSDP),
    Question("How slow without resharding?", "simulate", "predicted.step_time_ns",
             _of(lambda run: run.simulate(reshard_after_forward=False).predicted.step_time_ns),
             given={"reshard_after_forward": False}),
    Question("What does that do to the peak?", "simulate", "predicted.peak_bytes",
             _of(lambda run: run.simulate(reshard_after_forward=False).predicted.peak_bytes),
             given={"reshard_after_forward": False}),
    Question("Why did it fail?", "diagnose", "class", "rank died", "failed"),
)  # fmt: skip


@pytest.fixture(scope="module")
def answers(ask):
    """The whole answer of each call, which may be shortened, and the answered part of it."""
    calls = []
    for one in QUESTIONS:
        given = {"run": one.run, **one.given}
        calls += [(one.tool, given), (one.tool, {**given, "part": one.path})]
    return ask(*calls)


def test_thirty_questions_are_asked():
    assert len(QUESTIONS) == 30


@pytest.mark.parametrize("at", range(len(QUESTIONS)), ids=lambda at: QUESTIONS[at].words)
def test_the_answer_is_the_known_one(answers, at):
    question = QUESTIONS[at]
    known = question.known(question.run) if callable(question.known) else question.known
    (is_whole_bad, whole), (is_bad, part) = answers[2 * at : 2 * at + 2]
    assert (is_whole_bad, is_bad) == (False, False), (whole, part)
    assert part["result"] == known
    assert take_part(whole["result"], question.path) == known


@pytest.mark.parametrize("at", range(len(QUESTIONS)), ids=lambda at: QUESTIONS[at].words)
def test_the_answer_states_its_origin_within_the_limit(answers, at):
    question, (_, whole) = QUESTIONS[at], answers[2 * at]
    is_predicted = question.tool in ("advise", "simulate")
    assert whole["origin"]["source"] == ("predicted" if is_predicted else "recorded")
    assert whole["origin"]["run"] == question.run
    assert "step" in whole["origin"]["methods"]
    assert len(json.dumps(whole["result"])) <= MAX_CHARACTERS
