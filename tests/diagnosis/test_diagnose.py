"""The class, the ranks and the certainty of a diagnosis, from hand-made boxes and records."""

from dataclasses import replace

import pytest

from fsdp_inspect.diagnosis.diagnose import Diagnosis, ProblemClass, Status, Unknown, diagnose
from fsdp_inspect.report.diagnosis import describe_diagnosis, diagnosis_to_dict
from fsdp_inspect.trace.black_box import BlackBox, CodePlace, Collection, Header, Watched
from fsdp_inspect.trace.codes import NO_UNIT, EventKind
from fsdp_inspect.trace.run import ClockPair, RankRecord, RunManifest, RunStatus
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump, parse_dump
from tests.boxes import HEADER, SECOND, Call, make_box
from tests.builders import InMemoryRun

RANKS = (0, 1, 2)
CLOCK = ClockPair(monotonic_ns=0, unix_ns=0, uncertainty_ns=0)
DONE = [Call(0), Call(1), Call(2)]
HUNG = replace(HEADER, sign_ns=90 * SECOND, hang_seen_ns=70 * SECOND, sign_unix_ns=90 * SECOND)


def run_of(
    boxes: dict[int, BlackBox],
    statuses: dict[int, RunStatus] | None = None,
    dumps: dict[int, list[StackDump]] | None = None,
    world_size: int = 3,
    **fields: str,
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


def test_a_hang_that_ended_before_the_watchdog_looked_again_is_no_hang() -> None:
    done = dict.fromkeys(RANKS, RunStatus.COMPLETE)
    found = diagnose(run_of({rank: make_box(DONE, RANKS, HUNG) for rank in RANKS}, done))
    assert (found.status, found.problem) == (Status.HEALTHY, None)


def test_the_rank_that_never_came_is_late_with_its_line() -> None:
    boxes = {rank: waiting(rank) for rank in RANKS}

    found = diagnose(run_of(boxes, dumps={1: dump_at("batch = next(loader)")}))

    assert (found.problem, found.ranks, found.is_certain) == (ProblemClass.RANK_LATE, (1,), True)
    assert found.location == "train.py:88"
    assert describe_diagnosis(found).sentence == (
        "Rank 1 never reached the all-gather of unit 3 in forward of step 0. It has been waiting "
        "for the next batch at train.py:88 (`batch = next(loader)`) for 87 s. 2 ranks wait for it."
    )


def test_a_missing_folder_of_the_late_rank_is_said() -> None:
    found = diagnose(run_of({rank: waiting(rank) for rank in (0, 2)}))

    assert (found.status, found.ranks) == (Status.CANNOT_TELL, ())
    assert found.unknown is Unknown.MISSING_RANKS
    assert "rank 1 is not in this folder" in describe_diagnosis(found).sentence


def test_all_ranks_in_one_collective_is_the_transport() -> None:
    calls = [*DONE, Call(3, has_finished=False)]
    found = diagnose(run_of({rank: make_box(calls, RANKS, HUNG) for rank in RANKS}))
    assert (found.problem, found.ranks) == (ProblemClass.TRANSPORT_STUCK, ())


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
    statuses = {0: RunStatus.RUNNING, 1: RunStatus.CRASHED, 2: RunStatus.RUNNING}

    found = diagnose(run_of(boxes, statuses))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (1,))


def test_of_two_ranks_that_vanished_the_one_that_waited_is_no_culprit() -> None:
    gone = replace(HUNG, ended_unix_ns=20 * SECOND, hang_seen_ns=0)
    later = replace(gone, ended_unix_ns=25 * SECOND)
    calls = [*DONE, Call(3, has_finished=False)]
    boxes = {0: make_box(calls, RANKS, later), 1: make_box(DONE, RANKS, gone)}
    statuses = {0: RunStatus.CRASHED, 1: RunStatus.CRASHED, 2: RunStatus.RUNNING}

    found = diagnose(run_of({**boxes, 2: waiting(2)}, statuses))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_DIED, (1,))


def test_a_rank_that_was_killed_after_the_hang_did_not_cause_it() -> None:
    boxes = {rank: waiting(rank) for rank in RANKS}
    late = replace(HUNG, ended_unix_ns=95 * SECOND, hang_seen_ns=0, sign_unix_ns=4 * SECOND)
    boxes[1] = make_box(DONE, RANKS, late)
    statuses = dict.fromkeys(RANKS, RunStatus.CRASHED)

    found = diagnose(run_of(boxes, statuses))

    assert (found.problem, found.ranks) == (ProblemClass.RANK_LATE, (1,))
    assert "does not answer" in describe_diagnosis(found).sentence


def test_ranks_without_a_black_box_are_not_called_healthy() -> None:
    found = diagnose(run_of({}, dict.fromkeys(RANKS, RunStatus.COMPLETE)))
    assert (found.status, found.unknown) == (Status.CANNOT_TELL, Unknown.NO_BLACK_BOX)


def test_an_exception_of_its_own_comes_before_lost_peers() -> None:
    boxes = {rank: make_box(DONE, RANKS) for rank in RANKS}
    run = run_of(boxes, dict.fromkeys(RANKS, RunStatus.FAILED), failure="Connection closed by peer")
    own = run.ranks[2].model_copy(
        update={"failure": "ValueError at step 3: bad", "failed_at": "t.py:4"}
    )

    found = diagnose(replace(run, ranks=[*run.ranks[:2], own]))

    assert (found.problem, found.ranks, found.location) == (ProblemClass.RANK_DIED, (2,), "t.py:4")


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

    found = diagnose(run_of(boxes, dict.fromkeys(RANKS, RunStatus.CRASHED)))

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
    statuses = dict.fromkeys(RANKS, RunStatus.CRASHED)
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
    statuses = dict.fromkeys(RANKS, RunStatus.CRASHED)
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
    assert "race" not in " ".join((text.sentence, *text.next))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("T", "It does not answer: its process is stopped by a signal (SIGSTOP)."),
        ("D", "waits in the kernel for a device"),
        ("R", "its process runs, and native code holds Python's lock."),
        ("", "its process is stopped or gone, or native code holds Python's lock."),
    ],
)
def test_why_a_rank_does_not_answer_is_seen_from_outside(state: str, words: str) -> None:
    watched = Watched(80 * SECOND, 0, 70 * SECOND, 0, state)
    found = diagnose(silent_run(replace(HEADER, sign_ns=9 * SECOND, watched=watched)))
    assert found.problem is ProblemClass.RANK_LATE
    assert words in describe_diagnosis(found).sentence


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
    statuses = {0: RunStatus.RUNNING, 1: RunStatus.CRASHED, 2: RunStatus.RUNNING}
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
