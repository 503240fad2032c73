"""The state of a run (moving, stalled, dead, ended), read from its folder."""

import re
import time

import pytest

from fsdp_inspect.analysis.live.feed import LiveFeed, LiveState
from fsdp_inspect.report.live_wording import (
    advise_live,
    describe_live,
    describe_pace,
    headline_live,
)
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.codes import EventFlag, EventKind
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import EventTable
from tests.store.run_files import (
    STEP_NS,
    event_row,
    make_manifest,
    make_record,
    memory_row,
    scalar_row,
)

ROWS_PER_STEP = 4
CLOCK_NS = 5 * 10**9
"""The most that the wall clock is corrected during a test."""
AHEAD_S = 600
"""Steps end this far in the future, so that no run is stalled because the machine is slow."""


@pytest.fixture
def path(tmp_path):
    create_run(tmp_path / "run", make_manifest())
    return tmp_path / "run"


def write_steps(path, rank, *, num_steps=3, ago_s=-AHEAD_S, num_plain=0, **record):
    """Write a rank whose last step ended `ago_s` ago and which still records."""
    known = make_record(rank, **record)
    last = num_steps + num_plain
    begun = known.clock_start.monotonic_ns - int(ago_s * 1e9) - last * STEP_NS
    writer = RankWriter(path, known)
    append_steps(writer, range(num_steps), begun_ns=begun)
    append_steps(writer, range(num_steps, last), begun_ns=begun, are_plain=True)
    return writer


def append_steps(writer, steps, *, begun_ns, are_plain=False):
    """Append steps of 1 µs on the clock of the rank; they are on disk when this returns."""
    times = ("start_ns", "end_ns", "issue_ns", "need_ns")
    for number in range(steps.start * ROWS_PER_STEP, steps.stop * ROWS_PER_STEP):
        row = dict(zip(EventTable.DTYPES, event_row(number), strict=True))
        if are_plain and row["kind"] != EventKind.STEP:
            continue
        row["flags"] |= EventFlag.PLAIN_STEP * are_plain
        shifted = (value + begun_ns if name in times and value >= 0 else value
                   for name, value in row.items())  # fmt: skip
        writer.events.append(tuple(shifted))
    writer.flush()


def look(path, feed=None):
    return (feed or LiveFeed(0)).look(open_run(path))


def test_a_run_that_moves_says_its_last_step(path):
    writers = [write_steps(path, rank) for rank in (0, 1)]
    live = look(path)
    assert live.state is LiveState.RUNNING
    assert headline_live(live) == "Step 2 took 1.00 µs."
    assert describe_live(live).startswith("200 ns were exposed. The step ended ")
    assert describe_pace(live).startswith("Rank 0. Typical: 1.00 µs a step")
    assert advise_live(live) == ""
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


def test_a_run_without_a_step_is_starting(path):
    writer = write_steps(path, 0, num_steps=0)
    live = look(path)
    assert live.state is LiveState.STARTING
    assert headline_live(live) == "The run has started. No step has ended yet."
    assert describe_live(live) == "Recorded so far: rank 0."
    writer.close(RunStatus.COMPLETE)


def test_a_run_whose_processes_live_but_end_no_step_is_stalled(path):
    writer = write_steps(path, 0, ago_s=100)
    live = look(path)
    assert live.state is LiveState.STALLED
    assert re.fullmatch(r"Stalled: no step has ended for 1\d\d s\.", headline_live(live))
    assert describe_live(live) == "A step typically takes 1.00 µs. The last step was 2."
    assert "hangs in a collective" in advise_live(live)
    writer.close(RunStatus.COMPLETE)


def test_one_dead_rank_decides_while_the_others_go_on(path):
    writers = [write_steps(path, 0), write_steps(path, 1, pid=2**22 + 1)]
    live = look(path)
    assert live.state is LiveState.CUT_OFF
    assert live.culprits == (1,)
    assert headline_live(live) == "Rank 1 stopped without a recorded end."
    assert describe_live(live) == "The last step was 2."
    assert "out-of-memory killer" in advise_live(live)
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


def test_a_failure_is_told_in_its_own_words(path):
    write_steps(path, 0).close(RunStatus.FAILED, "no memory left")
    live = look(path)
    assert live.state is LiveState.FAILED
    assert headline_live(live) == "Rank 0 failed."
    assert describe_live(live) == "no memory left. The last step was 2."


def test_the_reason_is_the_own_error_of_a_rank_before_that_of_one_that_lost_it(path):
    lost = "RuntimeError at step 2: Connection closed by peer"
    write_steps(path, 0).close(RunStatus.FAILED, lost)
    write_steps(path, 1).close(RunStatus.FAILED, "ValueError at step 2: bad sample")
    assert describe_live(look(path)).startswith("ValueError at step 2: bad sample.")


def test_a_run_that_was_followed_to_its_end_keeps_its_last_steps(path):
    writer, feed = write_steps(path, 0), LiveFeed(0)
    assert look(path, feed).state is LiveState.RUNNING
    writer.close(RunStatus.COMPLETE)
    live = look(path, feed)
    assert live.state is LiveState.ENDED
    assert [one.step for one in live.view.steps] == [0, 1, 2]
    assert (headline_live(live), describe_live(live)) == (
        "The run has ended.",
        "The last step was 2.",
    )


@pytest.mark.parametrize("is_followed", [True, False])
def test_rows_that_compaction_moved_before_a_look_are_read_once(path, is_followed):
    writer, feed = write_steps(path, 0, scalar_names=["loss"]), LiveFeed(0)
    if is_followed:
        look(path, feed)
    append_steps(writer, range(3, 5), begun_ns=0)
    writer.scalars.append(scalar_row(4))
    writer.memory.append(memory_row(4))
    writer.close(RunStatus.COMPLETE)
    for _ in range(2):
        view = look(path, feed).view
        assert [one.step for one in view.steps] == [0, 1, 2, 3, 4]
        assert [one.step_time_ns for one in view.steps] == [STEP_NS] * 5
        assert [(one.name, one.step, one.value) for one in view.scalars] == [("loss", 4, 3.5)]
        assert [one.step for one in view.memory] == [4]


def test_a_feed_follows_the_next_attempt_of_a_run(path):
    feed = LiveFeed(0)
    first = write_steps(path, 0)
    look(path, feed)
    first.close(RunStatus.FAILED, "no memory left")
    second = write_steps(path, 0, num_steps=7, attempt=create_run(path, make_manifest()))
    live = look(path, feed)
    second.close(RunStatus.COMPLETE)
    assert (live.state, live.view.steps[-1].step) == (LiveState.RUNNING, 6)
    assert look(path, feed).view.steps == live.view.steps


def test_the_present_is_told_on_the_ranks_own_clock(path):
    writer = write_steps(path, 0)
    before = time.monotonic_ns()
    now = look(path).now_ns
    assert before - CLOCK_NS <= now <= time.monotonic_ns() + CLOCK_NS
    writer.close(RunStatus.COMPLETE)
