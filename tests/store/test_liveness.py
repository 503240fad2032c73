"""Crashed ranks: found by the process table on their own host, and by silence elsewhere."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_inspect.store.files import LocalFiles
from fsdp_inspect.store.folder import SILENCE_S, is_alive, last_sign_unix_ns, pid_scope
from fsdp_inspect.store.schema import BLACK_BOX_FILE
from fsdp_inspect.trace.run import ClockPair
from tests.store.run_files import make_record


def test_this_process_is_alive(tmp_path: Path) -> None:
    assert is_alive(make_record(), LocalFiles(tmp_path), "rank")


@pytest.mark.distributed
def test_process_that_ended_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not is_alive(make_record(pid=child.pid), LocalFiles(tmp_path), "rank")


@pytest.mark.distributed
def test_process_that_was_killed_and_not_yet_collected_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(make_record(pid=child.pid), LocalFiles(tmp_path), "rank")
    child.wait()


def test_newer_process_with_the_same_number_is_not_the_rank(tmp_path: Path) -> None:
    long_ago = ClockPair(monotonic_ns=0, unix_ns=time.time_ns() - 10**15, uncertainty_ns=1)
    record = make_record(clock_start=long_ago)
    assert not is_alive(record, LocalFiles(tmp_path), "rank")


def test_process_number_of_another_container_says_nothing_here(tmp_path: Path) -> None:
    record = make_record(pid=2**22 + 1, flushed_unix_ns=time.time_ns())
    assert not is_alive(record, LocalFiles(tmp_path), "rank")
    elsewhere = record.model_copy(update={"pid_scope": "another boot, another namespace"})
    assert is_alive(elsewhere, LocalFiles(tmp_path), "rank")
    here = record.model_copy(update={"pid_scope": pid_scope(), "host": "renamed"})
    assert not is_alive(here, LocalFiles(tmp_path), "rank")


@pytest.mark.parametrize(
    ("silence_s", "alive"), [(0, True), (SILENCE_S + 30, False)], ids=["short", "long"]
)
def test_rank_elsewhere_is_dead_after_a_long_silence(
    tmp_path: Path, silence_s: float, alive: bool
) -> None:
    last = time.time_ns() - int(silence_s * 1e9)
    record = make_record(host="node7", pid=1, flushed_unix_ns=last)
    assert is_alive(record, LocalFiles(tmp_path), "rank") is alive


def test_a_stopped_rank_elsewhere_is_alive_while_its_black_box_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / BLACK_BOX_FILE).touch()
    record = make_record(host="node7", pid=1, flushed_unix_ns=1)
    assert is_alive(record, LocalFiles(tmp_path), "rank")


def test_last_sign_is_that_of_the_file_that_changed_last(tmp_path: Path) -> None:
    for number, name in enumerate(["rank.json", "events.arrows", "device.arrows"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(1, 10 + number))
    assert (
        last_sign_unix_ns(
            make_record(flushed_unix_ns=3), LocalFiles(tmp_path.parent), tmp_path.name
        )
        == 12
    )
