"""After a kill at any instant, or on a full disk, the run opens and lists the missing data."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.cases import mark_slow
from tests.store.appending_process import (
    appending_rank,
    assert_first_events,
    wait_for_flush,
)
from tests.store.run_files import make_manifest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
INTERVAL_S = 0.1


@pytest.mark.parametrize("seed", mark_slow(range(5), but=[0]))
def test_killed_four_times_at_random_moments_every_run_opens(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    runs = [tmp_path / str(number) for number in range(4)]
    with ExitStack() as stack:
        children = []
        for run in runs:
            create_run(run, make_manifest(world_size=1))
            children.append(stack.enter_context(appending_rank(run, 0, 1, INTERVAL_S)))
        for run, child in zip(runs, children, strict=True):
            wait_for_flush(run, 0)
            time.sleep(choose.uniform(0, 3 * INTERVAL_S))
            num_on_disk = wait_for_flush(run, 0)
            child.kill()
            child.wait()
            assert_opens_after_kill(run, num_on_disk)


def assert_opens_after_kill(path: Path, num_on_disk: int) -> None:
    run = open_run(path)
    assert run.status is RunStatus.CUT_OFF
    assert_first_events(run, 0, at_least=num_on_disk)
    assert "Rank 0 stopped without a recorded end" in run.notes[0]


# ---- disks that fail

CHILD = """
import sys, time
from pathlib import Path
from fsdp_inspect.store import writer
from tests.store.run_files import *

writer.STALL_TIMEOUT_S = 300  # a machine that stands still is no disk that hangs
writer = RankWriter(Path(sys.argv[1]), make_record(world_size=1), flush_interval_s=0.05)
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    noise = {"bytes": hash((number, 1)) & (2**53 - 1), "issue_ns": hash((number, 2)) >> 2}
    writer.events.append(event_row(number, **noise))
    if number % 500 == 0:
        time.sleep(0.01)
print("trained", flush=True)
sys.stdin.readline()
writer.flush()
writer.close(compact=False)
print(writer.record.dropped.get("events", 0), flush=True)
"""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of some size; skips if mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def training_child(run: Path, num_events: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(run), str(num_events)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def train(child: subprocess.Popen[str], change: Callable[[], object] = lambda: None) -> None:
    """Change the disk when the child is ready, and let it train."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    change()
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "trained\n"


def end(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Let the child close its writer; returns its dropped rows and its stderr."""
    output, errors = child.communicate("\n", timeout=300)
    assert child.returncode == 0
    return int(output), errors


def test_full_disk_stops_recording_not_training(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        create_run(disk / "run", make_manifest(world_size=1))
        with training_child(disk / "run", 40_000) as child:
            train(child)
            dropped, errors = end(child)
        run = open_run(disk / "run")
        assert 0 < len(run.events(0)) < 40_000
        assert errors.count("No space left on device") == 1
        assert errors.splitlines()[1:] == [f"Rank 0 dropped {dropped:,} rows of events."]
        assert dropped == 40_000 - len(run.events(0))
        assert any(f"dropped {dropped:,} rows of events" in note for note in run.notes)
        assert any("No space left on device" in note for note in run.notes)


def test_disk_that_has_room_again_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        create_run(disk / "run", make_manifest(world_size=1))
        with training_child(disk / "run", 20_000) as child:
            train(child, lambda: fill(disk / "ballast"))
            assert child.stderr is not None
            first_error = child.stderr.readline()
            (disk / "ballast").unlink()
            dropped, errors = end(child)
        run = open_run(disk / "run")
        assert (dropped, len(run.events(0))) == (0, 20_000)
        assert "No space left on device" in first_error
        assert "No space left on device" not in errors
        assert run.status is RunStatus.COMPLETE


def test_the_record_has_room_on_a_disk_that_stays_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        create_run(disk / "run", make_manifest(world_size=1))
        with training_child(disk / "run", 20_000) as child:
            train(child, lambda: fill(disk / "ballast"))
            dropped, _ = end(child)
        run = open_run(disk / "run")
        assert (dropped, len(run.events(0))) == (20_000, 0)
        assert any("dropped 20,000 rows of events" in note for note in run.notes)
        assert not list(disk.rglob("*.tmp-*"))


def fill(path: Path) -> None:
    """Fill the disk."""
    with path.open("wb", buffering=0) as ballast:
        size = 1 << 16
        while size:
            try:
                ballast.write(bytes(size))
            except OSError:
                size //= 2


def test_folder_that_turns_read_only_stops_recording_not_training(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        create_run(disk / "run", make_manifest(world_size=1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with training_child(disk / "run", 2000) as child:
            train(child)
            dropped, errors = end(child)
        assert dropped == 2000
        assert errors.count("Read-only file system") == 1
        assert errors.splitlines()[1:] == ["Rank 0 dropped 2,000 rows of events."]
        assert open_run(disk / "run").status is RunStatus.PARTIAL


def test_file_size_limit_stops_recording_not_training(tmp_path: Path) -> None:
    """This acts like a full disk if mounting is not allowed."""
    create_run(tmp_path / "run", make_manifest(world_size=1))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    ended = subprocess.run(
        [sys.executable, "-c", limit + CHILD, str(tmp_path / "run"), "40000"],
        cwd=ROOT,
        input="\n\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    run = open_run(tmp_path / "run")
    dropped = int(ended.stdout.split()[-1])
    assert 0 < dropped == 40_000 - len(run.events(0))
    assert ended.stderr.count("File too large") == 1
    assert (rank_folder(tmp_path / "run", 0, 0) / "events.arrows").stat().st_size <= 200_000
    assert any(f"dropped {dropped:,} rows of events" in note for note in run.notes)
