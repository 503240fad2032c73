"""The class, the ranks and the certainty of a diagnosis, from hand-made boxes and records."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect import Run
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.diagnosis.decision import SchedulerAction, decide
from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass, Status, Unknown, diagnose
from fsdp_inspect.report.diagnosis import (
    describe_diagnosis,
    diagnosis_to_dict,
    headline_diagnosis,
    render_diagnosis,
    render_states,
)
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.black_box import (
    BlackBox,
    CodePlace,
    Collection,
    Communicator,
    Header,
    Watched,
)
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.correctness import BatchSeen, OptimizerSeen, TrainingSeen
from fsdp_inspect.trace.run import ClockPair, RankRecord, RunManifest, RunStatus, StartStage
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump, parse_dump
from tests.boxes import HEADER, SECOND, Call, make_box
from tests.browser.states import write_imported
from tests.builders import InMemoryRun
from tests.report.terminal_text import text_of

RANKS = (0, 1, 2)
CLOCK = ClockPair(monotonic_ns=0, unix_ns=0, uncertainty_ns=0)
DONE = [Call(0), Call(1), Call(2)]
HUNG = replace(HEADER, sign_ns=90 * SECOND, hang_seen_ns=70 * SECOND, sign_unix_ns=90 * SECOND)


def run_of(
    boxes: dict[int, BlackBox],
    statuses: dict[int, RunStatus] | None = None,
    dumps: dict[int, list[StackDump]] | None = None,
    world_size: int = 3,
    **fields: object,
) -> InMemoryRun:
    statuses = statuses or dict.fromkeys(boxes, RunStatus.RUNNING)
    ranks = [
        RankRecord(rank=rank, world_size=world_size, clock_start=CLOCK, status=status, **fields)
        for rank, status in statuses.items()
    ]
    manifest = RunManifest(
        run_id="r",
        created="",
        created_unix_ns=0,
        world_size=world_size,
        backend="gloo",
        device_type="cpu",
    )
    return InMemoryRun(
        manifest,
        ranks,
        {},
        status=RunStatus.RUNNING,
        black_boxes=boxes,
        dumps=dumps or {},
    )


def dump_at(
    line: str, source: DumpSource = DumpSource.WATCHDOG, inner: str = ""
) -> list[StackDump]:
    text = (
        f'{{"training_thread": "0x01", "statements": {{"train.py:88": "{line}"}}}}\n'
        "Thread 0x01 (most recent call first):\n"
        f"{inner}"
        '  File "train.py", line 88 in main\n'
    )
    found = parse_dump(text, source)
    assert found is not None
    return [found]


def waiting(rank: int) -> BlackBox:
    calls = [*DONE, Call(3, has_finished=rank == 9)] if rank != 1 else DONE
    return make_box(calls, RANKS, HUNG)


def test_a_run_that_ended_in_order_is_healthy() -> None:
    done = dict.fromkeys(RANKS, RunStatus.COMPLETE)
    found = diagnose(run_of({rank: make_box(DONE, RANKS) for rank in RANKS}, done))
    assert (found.status, found.problem) == (Status.HEALTHY, None)


def test_a_damaged_file_of_a_healthy_run_is_said(tmp_path: Path) -> None:
    sample = Path(__file__).parents[2] / "samples" / "tiny-2-ranks"
    shutil.copytree(sample, tmp_path / "run")
    assert diagnose(open_run(tmp_path / "run")).damage == ()
    for file in (tmp_path / "run").rglob("rank-00000/events.parquet"):
        file.write_bytes(b"")
    run = open_run(tmp_path / "run")
    found = diagnose(run)
    [reason] = found.damage
    assert found.status is Status.HEALTHY
    assert "events.parquet cannot be decoded" in reason
    assert any(reason in line for line in describe_diagnosis(found).evidence)
    assert reason in run.notes


def test_a_hang_that_ended_before_the_watchdog_looked_again_is_no_hang() -> None:
    done = dict.fromkeys(RANKS, RunStatus.COMPLETE)
    found = diagnose(run_of({rank: make_box(DONE, RANKS, HUNG) for rank in RANKS}, done))
    assert (found.status, found.problem) == (Status.HEALTHY, None)


def test_the_step_of_a_rank_that_ended_its_recording_is_its_last_one() -> None:
    boxes = {rank: make_box(DONE, RANKS, step=20) for rank in RANKS}
    for status, step in ((RunStatus.COMPLETE, 19), (RunStatus.RUNNING, 20)):
        found = diagnose(run_of(boxes, dict.fromkeys(RANKS, status)))
        assert [each.last_step for each in found.states] == [step] * 3


def test_attempts_before_this_one_are_named_with_their_status() -> None:
    done = dict.fromkeys(RANKS, RunStatus.COMPLETE)
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    first = replace(run_of(boxes, done, attempt=0), status=RunStatus.FAILED)
    found = diagnose(replace(run_of(boxes, done, attempt=2), earlier_attempts=[first]))
    assert headline_diagnosis(found) == "No failure found in this attempt."
    assert describe_diagnosis(found, run="runs/a").earlier == (
        "Attempts before this one: 0 (failed). Diagnose one: `fsdp-inspect diagnose runs/a "
        "--attempt 0`. This folder has no data of attempt 1."
    )
    assert diagnosis_to_dict(found)["missing_attempts"] == [{"first": 1, "last": 1}]


def test_attempts_without_data_are_named() -> None:
    done = dict.fromkeys(RANKS, RunStatus.COMPLETE)
    found = diagnose(run_of({rank: make_box(DONE, RANKS) for rank in RANKS}, done, attempt=2))
    assert headline_diagnosis(found) == "No failure found in this attempt."
    assert describe_diagnosis(found).earlier == "This folder has no data of attempts 0-1."


def test_the_next_steps_after_an_earlier_attempt_show_no_other_attempt() -> None:
    found = diagnose(run_of({0: make_box(DONE, RANKS)}, {0: RunStatus.COMPLETE}))
    out_of_memory = replace(
        found, status=Status.PROBLEM, problem=ProblemClass.OUT_OF_MEMORY, unknown=None
    )
    last, earlier = (
        describe_diagnosis(out_of_memory, run="r", attempt=attempt).next for attempt in (None, 0)
    )
    assert any("`fsdp-inspect show r memory`" in step for step in last)
    assert not any("fsdp-inspect show" in step or "advise" in step for step in earlier)
    assert not any("diagnose r`" in step for step in earlier)


def test_the_line_of_a_late_rank_without_stacks_is_unknown() -> None:
    """The line of its last collective, which has ended, is another one."""
    found = diagnose(run_of({rank: waiting(rank) for rank in RANKS}))
    assert (found.problem, found.ranks, found.location) == (ProblemClass.RANK_LATE, (1,), "")
    lines = text_of(render_states(found), width=160).splitlines()
    [row] = [line for line in lines if line.startswith("1 ")]
    assert row.rstrip().endswith("–")
    assert "all-gather of unit 2 in forward (train.py:7)" in row


def test_the_rank_that_never_came_is_late_with_its_line() -> None:
    boxes = {rank: waiting(rank) for rank in RANKS}

    found = diagnose(run_of(boxes, dumps={1: dump_at("batch = next(loader)")}))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), True)
    assert found.location == "train.py:88"
    assert describe_diagnosis(found).sentence == (
        "Rank 1 never reached the all-gather of unit 3 in forward of step 0. It has been waiting "
        "for the next batch at train.py:88 (`batch = next(loader)`) for 87 s. 2 ranks wait for it."
    )


def test_a_late_rank_in_a_collective_waits_for_the_late_rank_in_its_own_code() -> None:
    """Rank 0 is in a collective that no rank recorded, such as a barrier of a framework."""
    boxes = {rank: waiting(1) for rank in (0, 1)} | {2: waiting(2)}
    torch = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier\n'
    dumps = {0: dump_at("trainer.fit()", inner=torch), 1: dump_at("open(path)")}

    found = diagnose(run_of(boxes, dumps=dumps))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (1,))
    assert not found.is_certain
    assert found.location == "train.py:88"


def test_a_missing_folder_of_the_late_rank_is_said() -> None:
    found = diagnose(run_of({rank: waiting(rank) for rank in (0, 2)}))

    assert (found.status, found.ranks) == (Status.CANNOT_TELL, ())
    assert found.unknown is Unknown.MISSING_RANKS
    assert "rank 1 has no readable rank.json in this folder" in describe_diagnosis(found).sentence


def test_all_ranks_in_one_collective_is_the_transport() -> None:
    calls = [*DONE, Call(3, has_finished=False)]
    found = diagnose(run_of({rank: make_box(calls, RANKS, HUNG) for rank in RANKS}))
    assert (found.problem, found.ranks) == (ProblemClass.TRANSPORT_STUCK, ())


def test_a_rank_in_its_own_code_with_more_collectives_than_the_waiting_ones_is_late() -> None:
    """Inside `Join`, the ranks issue different numbers of collectives."""
    boxes = {rank: make_box([*DONE, Call(3, has_finished=False)], RANKS, HUNG) for rank in (1, 2)}
    boxes[0] = make_box([*DONE, Call(3), Call(4)], RANKS, HUNG)

    found = diagnose(run_of(boxes, dumps={0: dump_at("time.sleep(60)")}))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (0,))
    assert not found.is_certain
    assert describe_diagnosis(found).sentence.startswith(
        "Probably: Rank 0 never reached the all-gather of unit 3 in forward of step 0. It has been "
    )
    assert diagnose(run_of(boxes)).problem is ProblemClass.TRANSPORT_STUCK


def behind(rank: int, header: Header = HUNG) -> BlackBox:
    """Rank 1 has not seen the end of the third collective; the others wait in the fourth."""
    calls = [*DONE, Call(3, has_finished=False)]
    return make_box([*DONE[:2], Call(2, has_finished=False)] if rank == 1 else calls, RANKS, header)


def test_a_rank_that_saw_no_end_of_what_others_finished_is_late() -> None:
    boxes = {rank: behind(rank) for rank in (0, 2)}
    frozen = replace(HUNG, hang_seen_ns=0, sign_ns=3 * SECOND, sign_unix_ns=3 * SECOND)
    boxes[1] = behind(1, frozen)

    found = diagnose(run_of(boxes))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), True)
    assert describe_diagnosis(found).sentence == (
        "Rank 1 never reached the all-gather of unit 3 in forward of step 0. It does not answer: "
        "its process is stopped or gone, or native code holds Python's lock. 2 ranks wait for it."
    )


def test_a_rank_that_is_still_in_what_others_finished_has_a_stuck_transport() -> None:
    boxes = {rank: behind(rank) for rank in RANKS}

    torch = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    found = diagnose(run_of(boxes, dumps={1: dump_at("dist.all_reduce(x)", inner=torch)}))

    assert (found.problem, found.ranks) == (ProblemClass.TRANSPORT_STUCK, (1,))
    assert not found.is_certain
    assert describe_diagnosis(found).sentence == (
        "Probably: Rank 1 has not left the all-gather of unit 2 in forward of step 0, which "
        "the other ranks have finished: the transport to it makes no progress. 2 ranks wait for it."
    )


@pytest.mark.parametrize("is_held", [False, True], ids=["all in it", "one in an earlier one"])
def test_a_hang_during_a_race_is_not_blamed_on_the_transport(is_held: bool) -> None:
    saving = Call(NO_UNIT, kind=EventKind.BROADCAST, has_finished=False, state=1)
    boxes = {rank: make_box([*DONE, saving], RANKS, HUNG) for rank in RANKS}
    torch = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    dumps = {}
    if is_held:
        boxes[1] = behind(1)
        dumps = {1: dump_at("dist.all_reduce(x)", inner=torch)}

    found = diagnose(run_of(boxes, dumps=dumps))

    assert (found.problem, found.ranks) == (ProblemClass.ORDER_DIVERGED, ())
    assert not found.is_certain
    text = describe_diagnosis(found)
    assert "have finished" not in text.sentence
    assert "A possible cause is a race: a broadcast of a background thread" in text.sentence
    assert text.sentence.endswith("exchange the data of different collectives, or wait forever.")
    assert text.next[0].endswith("If the run then hangs again, the race is not the cause.")


def test_a_rank_that_works_on_something_else_is_late_even_if_it_saw_no_end() -> None:
    boxes = {rank: behind(rank) for rank in RANKS}
    found = diagnose(run_of(boxes, dumps={1: dump_at("batch = next(loader)")}))
    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), True)


def test_a_rank_in_its_own_code_that_saw_no_end_is_late_but_not_with_certainty() -> None:
    """Native code waits for a collective without a frame of torch's Python code."""
    boxes = {rank: behind(rank) for rank in RANKS}
    found = diagnose(run_of(boxes, dumps={1: dump_at("loss.backward()")}))
    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), False)


def test_a_silent_rank_among_ranks_that_all_wait_is_named() -> None:
    calls = [*DONE, Call(3, has_finished=False)]
    boxes = {rank: make_box(calls, RANKS, HUNG) for rank in RANKS}
    boxes[2] = make_box(calls, RANKS, replace(HUNG, hang_seen_ns=0))

    found = diagnose(run_of(boxes))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (2,))
    assert not found.is_certain
    assert describe_diagnosis(found).sentence == (
        "Probably: All 3 ranks are in the all-gather of unit 3 in forward of step 0 for 86 s. "
        "Rank 2 does not answer: its process is stopped or gone, or native code holds Python's "
        "lock."
    )


def test_a_rank_that_vanished_before_the_hang_died() -> None:
    gone = replace(HUNG, ended_unix_ns=20 * SECOND, hang_seen_ns=0)
    boxes = {0: waiting(0), 1: make_box(DONE, RANKS, gone), 2: waiting(2)}
    statuses = {0: RunStatus.RUNNING, 1: RunStatus.CUT_OFF, 2: RunStatus.RUNNING}

    found = diagnose(run_of(boxes, statuses))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (1,))
    assert describe_diagnosis(found).next[-1].startswith("Look for what ended it")


@pytest.mark.parametrize("other", [RunStatus.COMPLETE, RunStatus.FAILED])
def test_ranks_whose_files_a_disk_refused_may_have_ended_well(other: RunStatus) -> None:
    boxes = {rank: make_box(DONE, RANKS, replace(HUNG, hang_seen_ns=0)) for rank in RANKS}
    run = run_of(boxes, {0: RunStatus.CUT_OFF, 1: RunStatus.CUT_OFF, 2: other})
    full = {"problems": ["events: [Errno 28] No space left on device"]}
    records = [each.model_copy(update=full) for each in run.ranks]
    run = replace(run, ranks=records)

    found = diagnose(run)

    is_unknown = other is RunStatus.COMPLETE
    assert (found.unknown is Unknown.NOT_WRITTEN) is is_unknown
    assert (decide(found, run).action is SchedulerAction.CANNOT_TELL) is is_unknown
    if is_unknown:
        text = describe_diagnosis(found)
        assert text.sentence.startswith("Cannot tell how ranks 0-1 ended: a disk refused")
        assert text.next[-1].startswith("Look at the exit code of the launcher.")


@pytest.mark.parametrize(("host", "is_unknown"), [("a", True), ("b", False)])
def test_a_rank_of_a_full_disk_may_not_have_written_that(host: str, is_unknown: bool) -> None:
    boxes = {rank: make_box(DONE, RANKS, replace(HUNG, hang_seen_ns=0)) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.CUT_OFF))
    full = {"host": "a", "problems": ["events: [Errno 28] No space left on device"]}
    fields = ({"host": "a"}, full, {"host": host})
    records = [each.model_copy(update=known) for each, known in zip(run.ranks, fields, strict=True)]
    found = diagnose(replace(run, ranks=records))

    assert (found.unknown is Unknown.NOT_WRITTEN) is is_unknown
    assert found.ranks == (RANKS if is_unknown else ())


def test_another_error_of_the_recorder_does_not_hide_that_ranks_were_killed() -> None:
    boxes = {rank: make_box(DONE, RANKS, replace(HUNG, hang_seen_ns=0)) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.CUT_OFF))
    lost = "The process group's store does not answer ([Errno 111] Connection refused)."
    records = [each.model_copy(update={"problems": [lost]}) for each in run.ranks]
    assert diagnose(replace(run, ranks=records)).unknown is not Unknown.NOT_WRITTEN


def test_of_two_ranks_that_vanished_the_one_that_waited_is_no_culprit() -> None:
    gone = replace(HUNG, ended_unix_ns=20 * SECOND, hang_seen_ns=0)
    later = replace(gone, ended_unix_ns=25 * SECOND)
    calls = [*DONE, Call(3, has_finished=False)]
    boxes = {0: make_box(calls, RANKS, later), 1: make_box(DONE, RANKS, gone)}
    statuses = {0: RunStatus.CUT_OFF, 1: RunStatus.CUT_OFF, 2: RunStatus.RUNNING}

    found = diagnose(run_of({**boxes, 2: waiting(2)}, statuses))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (1,))


def test_a_rank_that_was_killed_after_the_hang_did_not_cause_it() -> None:
    boxes = {rank: waiting(rank) for rank in RANKS}
    late = replace(HUNG, ended_unix_ns=95 * SECOND, hang_seen_ns=0, sign_unix_ns=4 * SECOND)
    boxes[1] = make_box(DONE, RANKS, late)
    statuses = dict.fromkeys(RANKS, RunStatus.CUT_OFF)

    found = diagnose(run_of(boxes, statuses))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (1,))
    assert "does not answer" in describe_diagnosis(found).sentence


@pytest.mark.parametrize(
    ("end", "status"),
    [(RunStatus.COMPLETE, Status.HEALTHY), (RunStatus.RUNNING, Status.CANNOT_TELL)],
)
def test_ranks_without_a_black_box_are_known_by_their_ends(end: RunStatus, status: Status) -> None:
    found = diagnose(run_of({}, dict.fromkeys(RANKS, end)))

    assert (found.status, found.unknown) == (status, Unknown.NO_BLACK_BOX)
    sentence = describe_diagnosis(found).sentence
    assert sentence.endswith("Cannot tell whether the ranks agreed: the run has no black box.")
    assert sentence.startswith("The recordings of all ranks ended") is (status is Status.HEALTHY)


def test_an_exception_of_its_own_comes_before_lost_peers() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")
    own = run.ranks[2].model_copy(
        update={"failure": "ValueError at step 3: bad", "failed_at": "t.py:4"}
    )

    found = diagnose(replace(run, ranks=[*run.ranks[:2], own]))

    assert (found.problem, found.ranks, found.location) == (ProblemClass.RANK_DIED, (2,), "t.py:4")
    assert describe_diagnosis(found).next == (
        "Read the whole traceback at the end of that rank's log.",
    )


def test_lost_peers_alone_name_nobody() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")

    found = diagnose(run)

    assert (found.status, found.ranks) == (Status.CANNOT_TELL, ())


@pytest.mark.parametrize("is_hung", [True, False])
def test_json_has_the_promised_keys(is_hung: bool) -> None:
    boxes = {rank: waiting(rank) if is_hung else make_box(DONE, RANKS) for rank in RANKS}
    found: Diagnosis = diagnose(run_of(boxes))
    wanted = {"status", "class", "ranks", "unit", "phase", "step", "location", "evidence", "next"}
    assert wanted <= set(diagnosis_to_dict(found))


def test_an_end_that_nobody_saw_is_no_wait() -> None:
    forgotten = [Call(0, has_finished=False, group=1), *DONE, Call(3, step=2)]
    seen = replace(HEADER, sign_ns=90 * SECOND, step=3)
    boxes = {rank: make_box(forgotten, RANKS, seen) for rank in RANKS}

    found = diagnose(run_of(boxes, dict.fromkeys(RANKS, RunStatus.CUT_OFF)))

    assert (found.problem, found.wait) == (ProblemClass.STOPPED, None)


def test_a_later_collective_that_ended_ends_the_earlier_one() -> None:
    calls = [Call(0), Call(1, has_finished=False), Call(2)]
    boxes = {rank: make_box(calls, RANKS, HUNG) for rank in RANKS}
    found = diagnose(run_of(boxes))
    assert found.wait is None


def silent_run(header: Header, dumps: dict[int, list[StackDump]] | None = None) -> InMemoryRun:
    """Rank 1 does not answer the watchdogs of the ranks that wait for it."""
    boxes = {rank: waiting(rank) for rank in RANKS}
    boxes[1] = make_box(DONE, RANKS, header)
    statuses = dict.fromkeys(RANKS, RunStatus.CUT_OFF)
    return run_of(boxes, statuses, dumps)


def crash() -> StackDump:
    text = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
        '  File "train.py", line 88 in main\n'
    )
    dump = parse_dump(text, DumpSource.CRASH)
    assert dump is not None
    return dump


def test_a_crash_whose_core_is_dumped_for_long_is_no_late_rank() -> None:
    header = replace(HEADER, sign_ns=5 * SECOND, ended_unix_ns=80 * SECOND)

    found = diagnose(silent_run(header, {1: [crash()]}))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (1,))


def raced_run(saving: Call, end: list[StackDump] | str) -> InMemoryRun:
    """Rank 1 dies while its background thread has a collective in some process group."""
    boxes = {rank: make_box([*DONE, saving], RANKS) for rank in RANKS}
    statuses = dict.fromkeys(RANKS, RunStatus.CUT_OFF)
    if not isinstance(end, str):
        return run_of(boxes, statuses, {1: end})
    run = run_of(boxes, statuses)
    run.ranks[1] = run.ranks[1].model_copy(update={"failure": end})
    return run


@pytest.mark.parametrize("native", [True, False])
def test_a_crash_during_a_race_names_the_race_as_a_possible_cause(native: bool) -> None:
    saving = Call(NO_UNIT, kind=EventKind.BROADCAST, has_finished=False, state=1)
    found = diagnose(
        raced_run(saving, [crash()] if native else "RuntimeError: op.preamble.length <= op.nbytes")
    )

    assert (found.problem, found.is_certain) == (ProblemClass.RANK_DIED, False)
    text = describe_diagnosis(found)
    assert (
        "A possible cause is a race: a broadcast of a background thread (64 B) in forward "
        "(train.py:7) had not finished, in a process group that the training thread uses too."
    ) in text.sentence
    assert text.next[0].startswith("Give the background thread a process group of its own")


@pytest.mark.parametrize(
    ("saving", "end"),
    [
        (Call(NO_UNIT, state=1), "Segmentation fault"),
        (Call(NO_UNIT, has_finished=False, state=1, group=1), "Segmentation fault"),
        (Call(NO_UNIT, has_finished=False, state=1), "ValueError: empty batch"),
    ],
    ids=["finished", "own group", "error of Python code"],
)
def test_a_death_without_a_race_is_not_blamed_on_one(saving: Call, end: str) -> None:
    found = diagnose(raced_run(saving, end if ":" in end else [crash()]))

    assert (found.problem, found.is_certain) == (ProblemClass.RANK_DIED, True)
    text = describe_diagnosis(found)
    assert " race" not in " ".join((text.sentence, *text.next))


@pytest.mark.parametrize(
    ("state", "words", "next_step"),
    [
        ("T", "It does not answer: its process is stopped by a signal (SIGSTOP).", "kill -CONT"),
        ("D", "waits in the kernel for a device", "dmesg"),
        ("R", "its process runs, and native code probably holds Python's lock.", "py-spy dump"),
        ("", "its process is stopped or gone, or native code holds Python's lock.", "ps -o pid"),
    ],
)
def test_why_a_rank_does_not_answer_is_seen_from_outside(
    state: str, words: str, next_step: str
) -> None:
    watched = Watched(80 * SECOND, 0, 70 * SECOND, 0, state)
    found = diagnose(silent_run(replace(HEADER, sign_ns=9 * SECOND, watched=watched)))
    assert found.problem is ProblemClass.RANK_LATE
    text = describe_diagnosis(found)
    assert words in text.sentence
    assert [next_step in step for step in text.next] == [True]


@pytest.mark.parametrize(("began_s", "is_named"), [(11, True), (79, False)])
def test_a_garbage_collection_is_named_if_it_fills_the_wait(began_s: int, is_named: bool) -> None:
    header = replace(
        HEADER,
        sign_ns=10 * SECOND,
        sign_unix_ns=10 * SECOND,
        watched=Watched(80 * SECOND, 0, 70 * SECOND, 0, "R"),
        collection=Collection(began_s * SECOND, "train.py:41"),
    )
    found = diagnose(silent_run(header))
    assert ("collecting garbage at train.py:41" in describe_diagnosis(found).sentence) is is_named
    assert (found.location == "train.py:41") is is_named


@pytest.mark.parametrize(
    ("faults", "swap", "words"),
    [
        (7_000, 1 << 30, "7,000 major page faults in 70 s: its memory is read back from swap"),
        (7_000, 0, "its memory, or files that it maps, are read from a disk."),
        (70, 1 << 30, None),
    ],
)
def test_a_process_that_reads_its_memory_from_a_disk(
    faults: int, swap: int, words: str | None
) -> None:
    watched = Watched(80 * SECOND, faults, 70 * SECOND, swap, "D")
    found = diagnose(silent_run(replace(HEADER, sign_ns=9 * SECOND, watched=watched)))
    text = describe_diagnosis(found)
    assert ("page faults" in text.sentence) is (words is not None)
    assert words is None or words in text.sentence
    assert any("Free host memory" in each for each in text.next) is (words is not None)


def test_signs_of_a_hang_that_ended_do_not_hide_a_death() -> None:
    """The watchdogs of busy ranks had no time to note the end of the hang."""
    ended = replace(HUNG, hang_seen_ns=SECOND // 2)  # before the first collective
    boxes = {rank: waiting(rank) for rank in RANKS}
    boxes = {rank: replace(box, header=ended) for rank, box in boxes.items()}
    boxes[1] = replace(boxes[1], header=replace(ended, ended_unix_ns=80 * SECOND))
    [old] = dump_at("model(batch)")
    statuses = {0: RunStatus.RUNNING, 1: RunStatus.CUT_OFF, 2: RunStatus.RUNNING}
    old_dumps = {1: [replace(old, clock_ns=SECOND)]}

    found = diagnose(run_of(boxes, statuses, old_dumps))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (1,))
    state = found.state_of(1)
    assert state is not None
    assert state.activity is None


def test_of_two_ranks_that_wait_for_each_other_the_rarer_collective_is_named() -> None:
    rare = Call(NO_UNIT, kind=EventKind.ALL_REDUCE, bytes=12, group=1, has_finished=False)
    usual = Call(NO_UNIT, kind=EventKind.ALL_REDUCE, bytes=16, has_finished=False)
    boxes = {
        rank: replace(
            make_box([*DONE, last], (0, 1), HUNG), places={1: CodePlace("train.py", line, "main")}
        )
        for rank, last, line in ((0, usual, 60), (1, rare, 58))
    }

    found = diagnose(run_of(boxes, world_size=2))

    assert (found.problem, found.ranks) == (ProblemClass.FOREIGN_COLLECTIVE, ())
    assert (found.location, found.is_certain) == ("train.py:58", False)
    assert describe_diagnosis(found).sentence == (
        "Probably: The ranks wait for each other: rank 1 in an all-reduce of no unit (12 B) in "
        "forward "
        "(train.py:58) of step 0, and rank 0 in an all-reduce of no unit (16 B) in forward "
        "(train.py:60)."
    )


def test_a_difference_stays_the_answer_when_later_collectives_have_overwritten_it() -> None:
    pair = (0, 1)
    steps = [Call(unit, step=step) for step in (0, 1) for unit in (0, 1, 2)]
    swapped = [*steps[:3], steps[4], steps[3], steps[5]]
    then = {0: make_box(steps, pair), 1: make_box(swapped, pair)}
    later = {
        rank: make_box([*calls, *(Call(unit, step=9) for unit in range(9))], pair)
        for rank, calls in ((0, steps), (1, swapped))
    }
    now = {rank: replace(box, entries=box.entries[6:]) for rank, box in later.items()}
    run = run_of(now, dict.fromkeys(pair, RunStatus.CUT_OFF), world_size=2)
    term = parse_dump("Thread 0x01 (most recent call first):\n", DumpSource.SIGTERM)
    assert term is not None
    run = replace(run, dumps={rank: [term] for rank in pair})

    found = diagnose(replace(run, desync_boxes=then))
    [caveat] = measure_trust(replace(run, desync_boxes=then)).prediction_caveats
    assert caveat.startswith("The ranks issued different collectives, so results of this run may")

    assert (found.problem, found.ranks, found.step) == (ProblemClass.ORDER_DIVERGED, (1,), 1)
    assert [event.kind.value for event in found.events] == ["desync", "end"]
    text = describe_diagnosis(found)
    assert "12 collectives have finished since, and those of different tensors" in text.sentence
    assert any(
        "In order: in step 1, the collectives of the ranks" in each for each in text.evidence
    )
    assert found.grid is not None
    assert found.grid.rows[found.grid.focus].step == 1

    unseen = diagnose(run)  # the recorder did not see it, but the digests differ

    assert (unseen.problem, unseen.ranks, unseen.step) == (ProblemClass.ORDER_DIVERGED, (), None)
    assert "before step 9" in describe_diagnosis(unseen).sentence


@pytest.mark.parametrize(("last_step", "are_wrong"), [(1, False), (2, True)])
def test_weights_are_wrong_after_an_update_with_wrong_results(
    last_step: int, are_wrong: bool
) -> None:
    steps = [Call(unit, step=step) for step in (0, 1) for unit in (0, 1, 2)]
    swapped = [*steps[:3], steps[4], steps[3], steps[5]]
    boxes = {
        rank: make_box(calls, (0, 1), step=last_step) for rank, calls in ((0, steps), (1, swapped))
    }
    run = run_of(boxes, dict.fromkeys((0, 1), RunStatus.CUT_OFF), world_size=2)

    [about] = [step for step in describe_diagnosis(diagnose(run)).next if "weights" in step]

    assert about.startswith("Do not use the weights" if are_wrong else "No rank has ended step 1.")


def loaders(ended: tuple[int, int], waiting: tuple[int, int]) -> dict[int, BlackBox]:
    """Rank 1 has ended its loader, and the others wait; (batches, passes) of it, and of them."""
    batches, passes = ended
    done = replace(HUNG, num_batches=batches, num_loader_passes=passes, last_ended_pass=passes)
    batches, passes = waiting
    header = replace(done, num_batches=batches, num_loader_passes=passes, last_ended_pass=0)
    boxes = {rank: replace(waiting_box, header=header) for rank, waiting_box in all_wait().items()}
    return {**boxes, 1: make_box(DONE, RANKS, done)}


# --- a lost peer that another end explains

LOST = "RuntimeError at step 5: Connection closed by peer"


def lost_run(
    boxes: dict[int, BlackBox], others: dict[int, RunStatus], dumps: dict[int, list[StackDump]]
) -> InMemoryRun:
    """A run in which all ranks except `others` lost a peer in second 60."""
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED) | others, dumps)
    lost = {"failure": LOST, "communication_error": LOST, "failed_unix_ns": 60 * SECOND}
    for rank in set(RANKS) - set(others):
        run = with_record(run, rank, **lost)
    return run


def seen_until(second: int, **fields: int) -> Header:
    return replace(HEADER, sign_ns=second * SECOND, sign_unix_ns=second * SECOND, **fields)


@pytest.mark.parametrize("ended_s", [60, 90])
def test_a_rank_that_vanished_long_after_the_others_lost_a_peer_was_late(ended_s: int) -> None:
    boxes = {rank: replace(waiting(rank), header=seen_until(60)) for rank in RANKS}
    boxes[1] = replace(boxes[1], header=seen_until(60, ended_unix_ns=ended_s * SECOND))

    found = diagnose(lost_run(boxes, {1: RunStatus.CUT_OFF}, {}))

    problem = ProblemClass.RANK_DIED if ended_s == 60 else ProblemClass.RANK_LATE
    assert (found.problem, found.ranks) == (problem, (1,))


def test_a_rank_that_had_not_come_when_the_others_timed_out_is_late() -> None:
    boxes = {rank: replace(waiting(rank), header=seen_until(60)) for rank in RANKS}
    boxes[1] = replace(boxes[1], header=seen_until(90, ended_unix_ns=90 * SECOND))
    dumps = {1: dump_at("time.sleep(600)", DumpSource.SIGTERM)}

    found = diagnose(lost_run(boxes, {1: RunStatus.CUT_OFF}, dumps))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), True)
    assert describe_diagnosis(found).sentence == (
        "Rank 1 never reached the all-gather of unit 3 in forward of step 0. It had been sleeping "
        "at train.py:88 (`time.sleep(600)`) for 87 s. 2 ranks waited for it."
    )


@pytest.mark.parametrize(("ended_s", "is_first"), [(59, True), (61, False)])
def test_a_rank_that_sigterm_ended_before_the_others_lost_it_is_named(
    ended_s: int, is_first: bool
) -> None:
    boxes = {rank: make_box(DONE, RANKS, seen_until(60)) for rank in RANKS}
    boxes[1] = make_box(DONE, RANKS, seen_until(ended_s, ended_unix_ns=ended_s * SECOND))
    dumps = {1: dump_at("loss.backward()", DumpSource.SIGTERM)}

    found = diagnose(lost_run(boxes, {1: RunStatus.CUT_OFF}, dumps))

    expected = (ProblemClass.STOPPED, (1,)) if is_first else (None, ())
    assert (found.problem, found.ranks, found.is_certain) == (*expected, False)
    begin = "Probably: Rank 1 was ended by SIGTERM" if is_first else "Cannot tell which rank failed"
    assert describe_diagnosis(found).sentence.startswith(begin)
    assert ("SIGTERM ended rank 1 before the others" in headline_diagnosis(found)) is is_first


def test_the_awaited_rank_that_lost_a_peer_first_is_named() -> None:
    """For example, a store of its own did not answer."""
    boxes = {rank: replace(waiting(rank), header=seen_until(7)) for rank in RANKS}
    run = with_record(lost_run(boxes, {}, {}), 1, failed_unix_ns=6 * SECOND, failed_at="t.py:4")

    found = diagnose(run)

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_DIED, (1,), False)
    assert found.location == "t.py:4"


def test_a_rank_that_fails_after_the_others_ended_normally_has_failed() -> None:
    """Its peers did not leave early, so they are not at fault; nor does it make progress."""
    late = replace(seen_until(60), hang_seen_ns=50 * SECOND)
    boxes = {rank: make_box(DONE, RANKS, late) for rank in RANKS}
    ended = dict.fromkeys((0, 2), RunStatus.COMPLETE)

    found = diagnose(lost_run(boxes, ended, {1: dump_at("upload()")}))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_DIED, (1,), False)


def test_ranks_that_stand_outside_collectives_are_counted() -> None:
    boxes = {rank: make_box(DONE, RANKS, HUNG) for rank in RANKS}
    run = run_of(boxes, dumps=dict.fromkeys((0, 2), dump_at("time.sleep(9)")))
    assert diagnose(run).problem is ProblemClass.SLOW_BUT_ALIVE
    sentence = describe_diagnosis(diagnose(run)).sentence
    assert "Ranks 0, 2 have been sleeping at train.py:88" in sentence

    killed = diagnose(with_record(run, 2, status=RunStatus.CUT_OFF))
    sentence = describe_diagnosis(killed).sentence
    assert sentence.endswith("Then rank 2 was killed, or left silently.")


def all_wait() -> dict[int, BlackBox]:
    return {rank: waiting(rank) for rank in RANKS}


@pytest.mark.parametrize(
    ("ended", "others", "problem"),
    [
        ((6, 1), (7, 1), ProblemClass.UNEVEN_BATCHES),
        ((12, 2), (13, 2), ProblemClass.UNEVEN_BATCHES),
        ((6, 1), (7, 2), ProblemClass.RANK_LATE),  # the others are in the next epoch
        ((12, 2), (7, 3), ProblemClass.RANK_LATE),
        ((12, 2), (12, 2), ProblemClass.RANK_LATE),  # it used a batch without a step
        ((0, 0), (0, 0), ProblemClass.RANK_LATE),  # a recording of an earlier version
    ],
)
def test_batches_are_uneven_only_if_another_rank_has_had_more(
    ended: tuple[int, int], others: tuple[int, int], problem: ProblemClass
) -> None:
    dumps = {1: dump_at("open('fifo').read()")}
    found = diagnose(run_of(loaders(ended, others), dumps=dumps))

    assert (found.problem, found.ranks, found.is_certain) == (problem, (1,), True)
    sentence = describe_diagnosis(found).sentence
    assert ("Rank 0 has had 1 more." in sentence) is (problem is ProblemClass.UNEVEN_BATCHES)
    assert ("a batch without a step" in sentence) is (ended == (12, 2) == others)
    if problem is ProblemClass.RANK_LATE:
        assert (
            "reading or writing a file or a pipe at train.py:88 (`open('fifo').read()`)" in sentence
        )


def test_a_rank_that_ended_is_named_however_short_the_others_have_waited() -> None:
    header = replace(HEADER, sign_ns=5 * SECOND)
    boxes = {0: make_box([*DONE, Call(3, has_finished=False)], (0, 1), header)}
    boxes[1] = make_box(DONE, (0, 1), header)
    statuses = {0: RunStatus.CUT_OFF, 1: RunStatus.COMPLETE}
    dumps = {0: [replace(dump_at("x")[0], source=DumpSource.SIGTERM)]}

    found = diagnose(run_of(boxes, statuses, dumps, world_size=2))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_EXITED_EARLY, (1,))

    boxes[0] = boxes[1]
    found = diagnose(run_of(boxes, statuses, dumps, world_size=2))

    assert (found.status, found.problem) == (Status.PROBLEM, ProblemClass.STOPPED)
    assert describe_diagnosis(found).sentence.startswith("Rank 0 was ended by SIGTERM")


@pytest.mark.parametrize("is_stale", [True, False])
def test_only_a_certain_mistake_comes_before_an_end_from_outside(is_stale: bool) -> None:
    boxes = dict.fromkeys((0, 1), make_box(DONE, (0, 1)))
    statuses = {0: RunStatus.CUT_OFF, 1: RunStatus.COMPLETE}
    dumps = {0: [replace(dump_at("x")[0], source=DumpSource.SIGTERM)]}
    optimizer = OptimizerSeen(
        num_steps=3, num_tensors=4, num_of_model=0, num_with_gradient=0, num_alike=4
    )
    training = TrainingSeen(
        num_with_gradient=4,
        optimizers=[optimizer] if is_stale else [],
        batches=[BatchSeen(step=step, digest=step) for step in range(4)],
    )

    found = diagnose(run_of(boxes, statuses, dumps, world_size=2, training=training))

    assert found.problem is (ProblemClass.TRAINING if is_stale else ProblemClass.STOPPED)
    evidence = " ".join(describe_diagnosis(found).evidence)
    assert ("Probably: ranks 0-1 read the same batches." in evidence) is is_stale


def with_record(run: InMemoryRun, rank: int, **fields: object) -> InMemoryRun:
    """The run with other fields of a rank's record."""
    records = [
        record.model_copy(update=fields) if record.rank == rank else record for record in run.ranks
    ]
    return replace(run, ranks=records)


@pytest.mark.parametrize(
    ("failure", "communication_error", "is_own"),
    [
        ("TimeoutError at step 5: the tokenizer did not answer", None, True),
        ("BrokenPipeError at step 5: [Errno 32] Broken pipe", None, True),
        ("RuntimeError at step 5: DataLoader timed out after 5 seconds", None, True),
        ("RuntimeError at step 5: the feature store timed out", "", True),
        ("RuntimeError at step 5: Connection closed by peer", "Connection closed by peer", False),
        ("ValueError at step 5: the step failed", "gloo/transport: Connection reset", False),
        ("RuntimeError at step 5: CUDA error: timed out", "CUDA error: timed out", True),
    ],
)
def test_a_lost_peer_is_known_by_the_frame_that_raised(
    failure: str, communication_error: str | None, is_own: bool
) -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")
    run = with_record(run, 1, failure=failure, communication_error=communication_error)

    found = diagnose(run)

    assert found.ranks == ((1,) if is_own else ())
    assert (found.status is Status.PROBLEM) is is_own


def test_of_two_own_errors_the_one_that_was_raised_first_is_named() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")
    run = with_record(run, 0, failure="ValueError: late", failed_unix_ns=9 * SECOND)
    run = with_record(run, 2, failure="ConnectionRefusedError: x", failed_unix_ns=8 * SECOND)
    assert diagnose(run).ranks == (2,)


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        ("RuntimeError at step 5: gave up", ProblemClass.RANK_DIED),
        ("MemoryError at step 5", ProblemClass.OUT_OF_MEMORY),
        ("KeyboardInterrupt at step 5", ProblemClass.RANK_LATE),  # a user ended the hang
        ("RuntimeError at step 5: Connection closed by peer", ProblemClass.RANK_LATE),
    ],
)
def test_a_late_rank_that_fails_later_is_told(failure: str, problem: ProblemClass) -> None:
    dumps = {1: dump_at("time.sleep(11)")}
    run = run_of(all_wait(), dict.fromkeys(RANKS, RunStatus.FAILED), dumps)
    run = replace(run, ranks=[r.model_copy(update={"failure": "timed out"}) for r in run.ranks])

    found = diagnose(with_record(run, 1, failure=failure, failed_unix_ns=99 * SECOND))

    assert (found.problem, found.ranks) == (problem, (1,))
    sentence = describe_diagnosis(found).sentence
    assert "sleeping at train.py:88" in sentence
    assert ("Before, nothing moved for 90 s" in sentence) is (problem is not ProblemClass.RANK_LATE)
    if problem is ProblemClass.OUT_OF_MEMORY:
        [step] = describe_diagnosis(found).next
        assert step.startswith("The run failed before its memory was recorded.")


@pytest.mark.parametrize(
    ("late_s", "failure", "ranks"),
    [
        (24, "RuntimeError at step 0: Timed out waiting 25000ms for send", (1,)),
        (1, "RuntimeError at step 0: Timed out waiting 25000ms for send", ()),
        (24, "RuntimeError at step 0: Connection reset by peer", ()),
    ],
)
def test_a_rank_that_came_when_others_gave_up_is_told(
    late_s: int, failure: str, ranks: tuple[int, ...]
) -> None:
    header = replace(HEADER, sign_ns=27 * SECOND, sign_unix_ns=127 * SECOND)
    calls = [Call(0), Call(1, has_finished=False)]
    boxes = {rank: make_box(calls, RANKS, header) for rank in RANKS}
    boxes[1].entries["issued_ns"][-1] += late_s * SECOND
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")
    run = with_record(run, 1, failed_unix_ns=128 * SECOND)
    run = with_record(run, 2, failed_unix_ns=128 * SECOND)
    found = diagnose(with_record(run, 0, failure=failure, failed_unix_ns=127 * SECOND))

    assert found.ranks == ranks
    if ranks:
        text = describe_diagnosis(found)
        assert text.sentence.startswith("Probably: Rank 1 came 24 s late to the all-gather of ")
        assert "ranks 0, 2 had waited until a time limit" in text.sentence
        assert "--hang-after SECONDS" in text.next[0]
    else:
        assert found.status is Status.CANNOT_TELL


def test_unequal_sizes_of_one_line_without_a_unit_are_no_other_order() -> None:
    boxes = {
        rank: make_box([Call(NO_UNIT, bytes=8 * (1 + rank), kind=EventKind.ALL_REDUCE)], RANKS)
        for rank in RANKS
    }
    found = diagnose(run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED)))

    assert found.problem is ProblemClass.SIZE_MISMATCH
    step = describe_diagnosis(found).next[0]
    assert step.startswith("Give the tensor of that line the same size and dtype on all ranks")


def test_a_collective_that_some_ranks_issue_outside_the_units_is_not_blamed_on_units() -> None:
    barrier = Call(NO_UNIT, kind=EventKind.ALL_REDUCE, has_finished=False)
    calls = {0: barrier, 1: Call(0, has_finished=False), 2: Call(0, has_finished=False)}
    boxes = {rank: make_box([*DONE, call], RANKS, HUNG) for rank, call in calls.items()}
    found = diagnose(run_of(boxes))

    assert found.problem is ProblemClass.ORDER_DIVERGED
    step = describe_diagnosis(found).next[0]
    assert step.startswith("Let all ranks issue the collective of train.py:7 at the same point")


def test_a_send_without_a_receive_is_no_collective_that_all_ranks_must_call() -> None:
    send = Call(NO_UNIT, kind=EventKind.POINT_TO_POINT, bytes=4, group=1, has_finished=False)
    boxes = {rank: make_box([*DONE, Call(0, has_finished=False)], RANKS, HUNG) for rank in RANKS}
    boxes[0] = make_box([*DONE, send], RANKS, HUNG)
    torch = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in send\n'
    found = diagnose(run_of(boxes, dumps={0: dump_at("dist.send(loss, 1)", inner=torch)}))

    assert found.problem is ProblemClass.FOREIGN_COLLECTIVE
    assert "the send or the receive that has no counterpart" in describe_diagnosis(found).next[0]


def test_a_late_rank_that_is_killed_later_is_told() -> None:
    boxes = all_wait()
    gone = replace(HUNG, ended_unix_ns=95 * SECOND)
    boxes[1] = replace(boxes[1], header=gone)
    statuses = {0: RunStatus.RUNNING, 1: RunStatus.CUT_OFF, 2: RunStatus.RUNNING}

    found = diagnose(run_of(boxes, statuses, {1: dump_at("time.sleep(11)")}))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (1,))
    assert describe_diagnosis(found).sentence.endswith("Then it was killed, or left silently.")


@pytest.mark.parametrize(("lead_ns", "ranks"), [(SECOND, (1,)), (SECOND // 100, ())])
def test_of_ranks_that_all_vanished_the_one_that_others_waited_for_died_first(
    lead_ns: int, ranks: tuple[int, ...]
) -> None:
    header = replace(HEADER, sign_ns=5 * SECOND, ended_unix_ns=9 * SECOND)
    calls = [*DONE, Call(3, has_finished=False)]
    boxes = {rank: make_box(calls, RANKS, header) for rank in RANKS}
    boxes[1] = make_box(DONE, RANKS, replace(header, ended_unix_ns=9 * SECOND - lead_ns))

    found = diagnose(run_of(boxes, dict.fromkeys(RANKS, RunStatus.CUT_OFF)))

    assert (found.ranks, found.is_certain) == (ranks, False)
    expected = ProblemClass.RANK_DIED if ranks else ProblemClass.STOPPED
    assert found.problem is expected


def test_an_interrupt_of_all_ranks_stops_the_run_from_outside() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    failed = dict.fromkeys(RANKS, RunStatus.FAILED)
    run = run_of(boxes, failed, failure="KeyboardInterrupt at step 5")

    found = diagnose(run)

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.STOPPED, (), True)
    assert (
        "Ranks 0-2 were interrupted (SIGINT, such as Ctrl-C)" in describe_diagnosis(found).sentence
    )

    late = replace(HEADER, sign_ns=60 * SECOND, sign_unix_ns=60 * SECOND)  # its end took 50 s
    waits = {rank: replace(waiting(rank), header=late) for rank in RANKS}
    ended = run_of(waits, failed, failure="KeyboardInterrupt", failed_unix_ns=5 * SECOND)
    assert diagnose(ended).problem is ProblemClass.STOPPED

    lost = with_record(run, 1, failure="RuntimeError: Connection closed by peer")
    assert diagnose(lost).problem is ProblemClass.STOPPED
    one = with_record(with_record(run, 1, failure="ncclRemoteError"), 2, failure="ncclRemoteError")
    assert (diagnose(one).problem, diagnose(one).ranks) == (ProblemClass.RANK_DIED, (0,))


@pytest.mark.parametrize("code", [0, 3])
def test_os_exit_is_told_from_a_kill(code: int) -> None:
    header = replace(HEADER, exit_code=code, ended_unix_ns=9 * SECOND)
    boxes = {rank: make_box(DONE, RANKS, header) for rank in RANKS}

    found = diagnose(run_of(boxes, dict.fromkeys(RANKS, RunStatus.CUT_OFF)))

    assert found.is_certain
    if code == 0:
        assert found.status is Status.HEALTHY
    else:
        assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, RANKS)
        assert describe_diagnosis(found).sentence == "Ranks 0-2 left with os._exit(3) in step 0."


@pytest.mark.parametrize(("still_s", "status"), [(2, Status.HEALTHY), (8, Status.CANNOT_TELL)])
def test_ranks_that_have_not_moved_for_a_while_are_not_said_to_make_progress(
    still_s: int, status: Status
) -> None:
    seen = replace(HEADER, sign_ns=90 * SECOND, sign_unix_ns=90 * SECOND)
    header = replace(seen, changed_ns=(90 - still_s) * SECOND)

    found = diagnose(run_of({rank: make_box(DONE, RANKS, header) for rank in RANKS}))

    assert found.status is status
    sentence = describe_diagnosis(found).sentence
    assert ("make progress" in sentence) is (status is Status.HEALTHY)
    assert ("nothing has moved for 8.0 s in step 0" in sentence) is (status is Status.CANNOT_TELL)


def test_the_evidence_names_every_rank() -> None:
    ranks = tuple(range(40))
    calls = [*DONE, Call(3, has_finished=False)]
    boxes = {rank: make_box(calls if rank else DONE, ranks, HUNG) for rank in ranks}

    found = diagnose(run_of(boxes, world_size=40))

    assert any(
        each.startswith("Ranks 1-39: waiting") for each in describe_diagnosis(found).evidence
    )
    assert "39 ranks wait for it" in describe_diagnosis(found).sentence


def test_ranks_that_wait_in_other_process_groups_are_counted() -> None:
    there = Call(0, group=1, has_finished=False)
    boxes = {
        0: make_box([*DONE, Call(3, has_finished=False)], RANKS, HUNG),
        1: make_box(DONE, RANKS, HUNG),
        2: make_box([*DONE, there], RANKS, HUNG),
    }
    found = diagnose(run_of(boxes))
    assert found.ranks == (1,)
    assert "2 ranks wait for it." in describe_diagnosis(found).sentence


def test_the_error_of_a_worker_is_shown_with_its_text() -> None:
    stack = "\n".join(f'  File "loader.py", line {line}, in load' for line in range(40))
    failure = (
        "ValueError at step 5: Caught ValueError in DataLoader worker process 0.\n"
        f"Original Traceback (most recent call last):\n{stack}\nValueError: sample 7 is empty\n"
    )
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")

    text = describe_diagnosis(diagnose(with_record(run, 1, failure=failure)))

    assert "worker process 0: ValueError: sample 7 is empty" in text.sentence
    assert not any("memory" in each for each in text.next)


def test_a_late_rank_in_its_own_code_has_a_next_step() -> None:
    boxes = {rank: waiting(rank) for rank in RANKS}
    found = diagnose(run_of(boxes, dumps={1: dump_at("total += fold(part)")}))
    assert "why that line takes so long" in " ".join(describe_diagnosis(found).next)


def test_a_rank_that_was_killed_in_a_unit_has_the_unit_in_json() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    in_unit = replace(HEADER, unit=2, phase=int(Phase.FORWARD), sign_ns=9 * SECOND)
    boxes[1] = make_box(DONE, RANKS, in_unit)
    statuses = {0: RunStatus.RUNNING, 1: RunStatus.CUT_OFF, 2: RunStatus.RUNNING}

    found = diagnosis_to_dict(diagnose(run_of(boxes, statuses)))

    assert (found["class"], found["ranks"], found["unit"]) == ("rank died", [1], "unit 2")


def test_of_ranks_in_a_circle_the_ranks_that_are_fewer_than_the_others_are_named() -> None:
    """Equal halves of a small process group do not tell who is wrong."""
    members = (0, 1, 2, 3)
    barrier = Call(NO_UNIT, kind=EventKind.ALL_REDUCE, has_finished=False)
    pair = Communicator("pair", (0, 1))
    boxes = {rank: make_box([Call(0), barrier], members, HUNG) for rank in (0, 1, 2)}
    for rank in (0, 1, 2):
        boxes[rank] = make_box([Call(0)], members, HUNG)
    boxes[3] = make_box([Call(0), barrier], members, HUNG)
    apart = Call(NO_UNIT, group=1, kind=EventKind.ALL_REDUCE, has_finished=False)
    in_unit = Call(5, group=1, has_finished=False)
    for rank, calls in ((0, [Call(0), apart]), (1, [Call(0), in_unit]), (2, [Call(0), in_unit])):
        box = make_box(calls, members, HUNG)
        group = pair if rank == 0 else Communicator(f"of {rank}", (rank, 3))
        boxes[rank] = replace(box, groups={**box.groups, 1: group})

    found = diagnose(run_of(boxes, world_size=4))

    assert (found.ranks, found.is_certain) == ((3,), False)


def test_before_the_first_step_the_rank_that_the_recording_waits_for_is_late() -> None:
    """Ranks wait for rank 0 where the training waits for it, too."""
    inner = '  File "/site-packages/fsdp_inspect/recording/folders.py", line 9 in _follow\n'
    torch = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier\n'
    dumps = dict.fromkeys((1, 2), dump_at("model(x)", inner=inner))
    dumps[0] = dump_at("dist.barrier()", inner=torch)
    boxes = {rank: make_box([], RANKS, HUNG) for rank in RANKS}

    found = diagnose(run_of(boxes, dumps=dumps, start_stage=StartStage.SHARDED))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (0,), False)
    assert "waiting for rank 0 to begin to train" in describe_diagnosis(found).sentence


@pytest.mark.parametrize(
    ("stage", "ranks", "words"),
    [
        (StartStage.STARTED, (1,), "it was killed, left silently, has not imported torch, or"),
        (
            StartStage.GROUP_MADE,
            (),
            "it was killed, left silently, trains already, in a run of its",
        ),
    ],
)
def test_a_rank_without_a_record_of_its_start_is_named_with_what_is_unknown(
    stage: StartStage, ranks: tuple[int, ...], words: str
) -> None:
    boxes = {rank: make_box([], RANKS, HUNG) for rank in (0, 2)}
    torch = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in init\n'
    dumps = {rank: dump_at("dist.init_process_group()", inner=torch) for rank in boxes}

    found = diagnose(run_of(boxes, dumps=dumps, start_stage=stage))

    assert (found.status, found.ranks, found.is_certain) == (Status.CANNOT_TELL, ranks, False)
    sentence = describe_diagnosis(found).sentence
    assert sentence.startswith(
        "Cannot tell why the training has not begun, because rank 1 left no record of the start: "
        f"{words}"
    )
    assert re.search(r"Ranks 0, 2: (no|a) process group", sentence)
    assert "waiting for the other ranks to start at train.py:88" in sentence


def test_of_ranks_in_a_circle_the_one_without_a_batch_had_fewer() -> None:
    """It waits in a barrier after its loop, and the others wait in their next step."""
    barrier = Call(NO_UNIT, group=1, kind=EventKind.ALL_REDUCE, has_finished=False)
    has_ended = {"num_loader_passes": 1, "num_batches": 4, "last_ended_pass": 1}
    boxes = {rank: make_box([*DONE, Call(3, has_finished=False)], RANKS, HUNG) for rank in RANKS}
    for rank in (0, 2):
        header = replace(HUNG, num_loader_passes=1, num_batches=5)
        boxes[rank] = replace(boxes[rank], header=header)
    boxes[1] = make_box([*DONE, barrier], RANKS, HUNG, **has_ended)

    found = diagnose(run_of(boxes))

    assert (found.problem, found.ranks) == (ProblemClass.UNEVEN_BATCHES, (1,))
    assert found.unit == "unit 3"


def test_an_import_that_knows_nothing_of_its_ranks_lists_none(tmp_path):
    write_imported(tmp_path / "run", tmp_path / "traces")
    found = Run(open_run(tmp_path / "run")).diagnose()
    text = text_of(render_diagnosis(found))
    assert text.startswith("Cannot tell: an imported trace does not show how the ranks ended.")
    assert "Rank" not in text
    [step] = describe_diagnosis(replace(found, missing_ranks=(1,))).next
    assert step.startswith("Diagnose what shows the end: the folder of a run")


GLOO_LIMIT = "[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"
NCCL_LIMIT = "[Rank 1] Watchdog caught collective operation timeout: ran for 9500 milliseconds"


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (f"RuntimeError at step 5: {GLOO_LIMIT}", "waited 20 s in vain for another rank"),
        (f"DistBackendError at step 5: {NCCL_LIMIT}", "waited 9.5 s in vain for another rank"),
        ("DistStoreError at step 5: wait timeout", "waited in vain for another rank"),
        ("RuntimeError at step 5: Connection closed by peer", "lost another rank"),
    ],
)
def test_a_rank_whose_time_limit_was_over_lost_no_other_rank(failure: str, words: str) -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.COMPLETE))
    run = with_record(run, 1, status=RunStatus.FAILED, failure=failure)

    evidence = " ".join(describe_diagnosis(diagnose(run)).evidence)

    assert f"; {words}. Ranks 0, 2: last issued" in evidence
    assert ("lost another rank" in evidence) is (words == "lost another rank")
