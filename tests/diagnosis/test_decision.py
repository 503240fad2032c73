"""What a scheduler does after a run."""

import json
from dataclasses import replace

import pytest

from fsdp_inspect.diagnosis.decision import SchedulerAction, decide
from fsdp_inspect.diagnosis.diagnose import ProblemClass, diagnose
from fsdp_inspect.trace.run import RunStatus
from tests.boxes import HEADER, SECOND, Call, make_box
from tests.browser.states import write_crashed
from tests.builders import InMemoryRun, RunBuilder

HOSTS = ("a", "a", "b", "b")


def attempt(*earlier: InMemoryRun, at: int, **record: object) -> InMemoryRun:
    """A start on two nodes in which one rank ends with a record, and the others by SIGTERM."""
    builder = RunBuilder(world_size=len(HOSTS))
    for rank, host in enumerate(HOSTS):
        own = {"status": RunStatus.CUT_OFF, "crash_stacks": True, **record} if rank == at else {}
        builder.rank(rank).record = {"host": host, "status": RunStatus.COMPLETE, **own}
    return builder.build(earlier_attempts=earlier)


def failed(*earlier: InMemoryRun, text: str, at: int = 1, place: str = "train.py:3") -> InMemoryRun:
    error = {"failure": text, "failed_at": place, "failed_unix_ns": 5, "communication_error": ""}
    return attempt(*earlier, at=at, status=RunStatus.FAILED, **error)


ONCE = failed(text="ValueError at step 4: no label 17")
CASES = {
    "healthy": (attempt(at=-1), SchedulerAction.CONTINUE, True),
    "an error of the script": (ONCE, SchedulerAction.STOP, False),
    "the same error again": (
        failed(ONCE, text="ValueError at step 9: no label 3"), SchedulerAction.STOP, True,
    ),
    "another error": (failed(ONCE, text="KeyError at step 9: 'text'"), SchedulerAction.STOP, False),
    "a file server": (
        failed(text="ConnectionResetError at step 9: by peer", place="data.py:8"),
        SchedulerAction.RESTART, False,
    ),
    "out of memory": (failed(text="OutOfMemoryError at step 9: CUDA"), SchedulerAction.STOP, True),
    "a broken device": (
        failed(text="AcceleratorError at step 9: CUDA error: uncorrectable ECC error encountered"),
        SchedulerAction.EXCLUDE, True,
    ),
    "a killed rank": (attempt(at=1), SchedulerAction.RESTART, False),
    "a node that kills twice": (attempt(attempt(at=0), at=1), SchedulerAction.EXCLUDE, False),
    "two nodes that kill once": (attempt(attempt(at=2), at=1), SchedulerAction.RESTART, False),
}  # fmt: skip


def test_only_a_run_that_goes_on_makes_progress() -> None:
    """A rank that stood outside collectives and then died."""
    seen = {"sign_ns": 60 * SECOND, "hang_seen_ns": 50 * SECOND, "sign_unix_ns": 60 * SECOND}
    builder = RunBuilder(world_size=2)
    for rank, status in enumerate((RunStatus.COMPLETE, RunStatus.CUT_OFF)):
        builder.rank(rank).record = {"status": status}
    box = make_box([Call(0)], (0, 1), replace(HEADER, **seen))
    run = replace(builder.build(), black_boxes={0: box, 1: box})
    found = diagnose(run)
    assert found.problem is ProblemClass.SLOW_BUT_ALIVE
    assert decide(found, run).action is SchedulerAction.RESTART
    assert decide(replace(found, is_running=True), run).action is SchedulerAction.CONTINUE


@pytest.mark.parametrize("name", CASES)
def test_a_decision_follows_from_the_diagnosis_and_from_what_repeats(name: str) -> None:
    run, action, is_certain = CASES[name]
    decision = decide(diagnose(run), run)
    assert (decision.action, decision.is_certain) == (action, is_certain), decision.sentence
    assert decision.nodes == (("a",) if action is SchedulerAction.EXCLUDE else ())
    assert decision.sentence.startswith("Probably: ") == (not is_certain)


def test_a_rank_that_leaves_early_may_not_do_so_again() -> None:
    run = CASES["out of memory"][0]
    found = replace(diagnose(run), problem=ProblemClass.RANK_EXITED_EARLY, is_certain=True)
    decision = decide(found, run)
    assert (decision.action, decision.is_certain) == (SchedulerAction.STOP, False)


def test_the_command_answers_schedulers(invoke, tmp_path) -> None:
    write_crashed(tmp_path / "run")
    ended = invoke("diagnose", tmp_path / "run", "--decide")
    decided = json.loads(invoke("diagnose", tmp_path / "run", "--json").out)["decision"]
    codes = {"continue": 0, "restart": 10, "stop": 11, "exclude": 12, "cannot tell": 2}
    assert ended.code == codes[decided["action"]]
    assert ended.out.strip() == decided["sentence"]
