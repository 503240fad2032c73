"""The black box of a rank in memory, and the process that saves it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_inspect.recording import black_box_keeper
from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.recording.dist_calls import uses_compile
from fsdp_inspect.recording.verdict import EXPLAINED_FILE
from fsdp_inspect.trace.black_box import (
    CAPACITY,
    CLOSED_OFFSET,
    EMPTY_HEADER,
    ENDED_OFFSET,
    HEADER_BYTES,
    MAX_BYTES,
    WATCHED_OFFSET,
    WATCHED_STRUCT,
    Header,
    decode,
    encode_header,
)
from fsdp_inspect.trace.codes import EventKind, Phase
from tests.browser.states import write_crashed

GATHER = int(EventKind.ALL_GATHER)
HEADER = EMPTY_HEADER
_DIES = """
import os, sys, time
import torch.distributed as dist
from pathlib import Path
from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.trace.black_box import EMPTY_HEADER
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
box = BlackBoxWriter(time.perf_counter_ns)
box.write_header(EMPTY_HEADER)
run = Path(sys.argv[2]) if len(sys.argv) > 2 else None
assert box.start_keeper(Path(sys.argv[1]), run, None)
for unit in range(5):
    box.issue(11, unit, dist.group.WORLD, 64, 1, 2, 3, 0, 0)
os.kill(os.getpid(), 9)
"""
_STOPS = _DIES.replace(
    "os.kill(os.getpid(), 9)", "box.begin_collection(1, 'train.py:7'); os.kill(os.getpid(), 19)"
)


def read_header(target: Path, is_wanted: Callable[[Header], bool]) -> Header:
    """A header of the keeper that satisfies a condition."""
    while True:
        header = decode(target.read_bytes()).header if target.exists() else EMPTY_HEADER
        if is_wanted(header):
            return header
        time.sleep(0.05)


@pytest.fixture
def group() -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def issue(box: BlackBoxWriter, group: dist.ProcessGroup, unit: int, kind: int = GATHER) -> int:
    return box.issue(kind, unit, group, 64, 1, Phase.FORWARD, 3, 0, 0)


def test_entries_are_in_order_with_their_ends(group: dist.ProcessGroup) -> None:
    box = BlackBoxWriter(lambda: 5)
    numbers = [issue(box, group, unit) for unit in range(3)]
    box.finish(numbers[1], 9)
    box.write_header(HEADER)

    entries = decode(box.contents()).entries

    assert entries["unit"].tolist() == [0, 1, 2]
    assert entries["finished_ns"].tolist() == [0, 9, 0]
    assert entries["sequence"].tolist() == [0, 1, 2]


def test_the_ring_keeps_the_newest(group: dist.ProcessGroup) -> None:
    box = BlackBoxWriter(lambda: 5)
    for unit in range(CAPACITY + 10):
        issue(box, group, unit)
    box.write_header(HEADER)

    entries = decode(box.contents()).entries

    assert entries["unit"].tolist() == list(range(10, CAPACITY + 10))


def test_equal_orders_have_equal_digests_and_others_do_not(group: dist.ProcessGroup) -> None:
    one, same, other = (BlackBoxWriter(lambda: 5) for _ in range(3))
    for unit in (0, 1, 2):
        issue(one, group, unit)
        issue(same, group, unit)
    for unit in (0, 2, 1):
        issue(other, group, unit)

    assert one.orders[0].last == same.orders[0].last != other.orders[0].last
    assert one.orders[0].digest_at(1) == other.orders[0].digest_at(1)
    assert one.orders[0].digest_at(4) is None


def test_point_to_point_is_no_part_of_the_order(group: dist.ProcessGroup) -> None:
    box = BlackBoxWriter(lambda: 5)
    issue(box, group, 0)
    before = box.orders[0].last
    issue(box, group, 0, int(EventKind.POINT_TO_POINT))
    assert (box.orders[0].last, box.orders[0].count) == (before, 1)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the keeper needs Linux")
def test_a_rank_that_is_killed_leaves_all_of_its_collectives(tmp_path: Path) -> None:
    target, begun_ns = tmp_path / "black_box.bin", time.time_ns()

    done = subprocess.run([sys.executable, "-c", _DIES, str(target)], check=False)

    assert done.returncode == -signal.SIGKILL
    read_header(target, lambda header: header.ended_unix_ns > 0)
    box = decode(target.read_bytes())
    assert box.entries["unit"].tolist() == [0, 1, 2, 3, 4]
    assert begun_ns <= box.header.ended_unix_ns <= time.time_ns()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the keeper needs Linux")
def test_the_keeper_of_the_first_rank_that_vanished_prints_the_diagnosis(tmp_path: Path) -> None:
    write_crashed(tmp_path / "run")
    box_file = tmp_path / "run" / "attempt-000" / "rank-00001" / "black_box.bin"
    command = [sys.executable, "-c", _DIES, str(box_file), str(tmp_path / "run")]

    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        for _ in range(2)
    )

    assert (first.returncode, second.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
    assert first.stderr.startswith("fsdp_inspect: Probably: The ranks wait for each other")
    assert second.stderr == ""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the keeper needs Linux")
def test_the_keeper_sees_that_a_rank_is_stopped_while_it_collects_garbage(tmp_path: Path) -> None:
    target = tmp_path / "black_box.bin"
    rank = subprocess.Popen([sys.executable, "-c", _STOPS, str(target)])

    try:
        header = read_header(target, lambda header: header.watched.state == "T")
    finally:
        rank.kill()
        rank.wait()
    assert header.collection is not None
    assert header.collection.place == "train.py:7"
    assert header.watched.still_ns >= 0


@pytest.mark.parametrize(
    ("flags", "pending"), [(0, 1 << 8), (0x4, 0)], ids=["a pending SIGKILL", "an exit"]
)
def test_a_look_at_a_rank_that_dies_keeps_the_state_before(
    tmp_path: Path, flags: int, pending: int
) -> None:
    def set_state(letter: str, flags: int, pending: int) -> None:
        (tmp_path / "stat").write_text(f"7 (python) {letter} 0 0 0 0 0 {flags} 0 0 0 0")
        (tmp_path / "status").write_text(f"SigPnd: 0\nShdPnd: {pending:x}\nVmSwap: 0 kB\n")

    watch = black_box_keeper.Watch(7)
    watch._folder = str(tmp_path)
    content = encode_header(HEADER, 0).ljust(HEADER_BYTES, b"\0")
    set_state("T", 0, 0)
    stopped = watch.look(content, is_over=False)
    set_state("R", flags, pending)

    assert watch.look(content, is_over=False) == stopped


def test_the_keeper_knows_the_layout_and_the_name_of_the_mark() -> None:
    assert black_box_keeper.ENDED_OFFSET == ENDED_OFFSET
    assert black_box_keeper.CLOSED_OFFSET == CLOSED_OFFSET
    assert black_box_keeper.WATCHED_OFFSET == WATCHED_OFFSET
    assert black_box_keeper.WATCHED.format == WATCHED_STRUCT.format
    assert black_box_keeper.RING_OFFSET == HEADER_BYTES
    assert black_box_keeper.EXPLAINED_FILE == EXPLAINED_FILE
    closed = encode_header(replace(HEADER, is_closed=True), 0)
    opened = encode_header(HEADER, 0)
    assert (closed[CLOSED_OFFSET], opened[CLOSED_OFFSET]) == (1, 0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the keeper needs Linux")
def test_the_keeper_ends_when_it_is_asked_to(tmp_path: Path, group: dist.ProcessGroup) -> None:
    box = BlackBoxWriter(lambda: 5)
    issue(box, group, 7)
    box.write_header(HEADER)
    assert box.start_keeper(tmp_path / "black_box.bin", None, None)

    box.stop_keeper(500, has_failed=False)

    assert decode((tmp_path / "black_box.bin").read_bytes()).entries["unit"].tolist() == [7]
    assert decode((tmp_path / "black_box.bin").read_bytes()).header.ended_unix_ns == 0


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_frame_is_noticed(fullgraph: bool) -> None:
    """torch 2.13: `torch._dynamo.utils.counters` counts frames, with `fullgraph` only graphs."""
    torch._dynamo.utils.counters.clear()
    assert not uses_compile()

    torch.compile(lambda x: x + 1, backend="eager", fullgraph=fullgraph)(torch.zeros(2))

    assert uses_compile()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    ("state", "flags", "pending"),
    [("Z", 0, 0), ("R", 0x4, 0), ("D", 0x200, 0), ("R", 0x400, 0), ("T", 0, 1 << 8)],
    ids=["zombie", "exits", "dumps its core", "was killed", "will be killed"],
)
def test_a_look_at_a_dying_process_does_not_replace_the_last_good_one(
    tmp_path: Path, state: str, flags: int, pending: int
) -> None:
    def write(state: str, flags: int, pending: int) -> None:
        fields = f"1 (python) {state} 1 1 1 0 -1 {flags} 0 0 7 0 0"
        (tmp_path / "stat").write_text(fields)
        (tmp_path / "status").write_text(f"VmSwap:\t0 kB\nSigPnd:\t{pending:016x}\n")

    watch = black_box_keeper.Watch(1)
    watch._folder = str(tmp_path)
    content = bytes(MAX_BYTES)
    write("T", 0, 0)
    good = watch.look(content, is_over=False)
    write(state, flags, pending)

    assert watch.look(content, is_over=False) == good
    assert WATCHED_STRUCT.unpack_from(good, WATCHED_OFFSET)[-1] == b"T"


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_call_of_os_exit_is_noted(code: int | None) -> None:
    box = BlackBoxWriter(lambda: 5)
    if code is not None:
        box.note_exit(code)
    box.write_header(EMPTY_HEADER)
    assert decode(box.contents()).header.exit_code == code
