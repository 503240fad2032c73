"""Recordings of trainings that were killed or whose disk failed."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus
from tests.cases import mark_slow
from tests.conftest import EXHAUSTIVE, Torchrun
from tests.distributed.crash_driver import NUM_RANKS, lines_of

pytestmark = pytest.mark.distributed

TrainOn = Callable[[Path, str], subprocess.CompletedProcess[str]]
NUM_KILLS = {"guard": 2, "exhaustive": 20}
DRIVER = Path(__file__).with_name("crash_driver.py")


@pytest.fixture(scope="module")
def num_kills(request: pytest.FixtureRequest) -> int:
    """More moments are tried if all tests run."""
    return NUM_KILLS["exhaustive" if request.config.getoption(EXHAUSTIVE) else "guard"]


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, run_python: Torchrun, num_kills: int
) -> list[Path]:
    """The folders of recordings that were killed at random moments."""
    folder = tmp_path_factory.mktemp("killed")
    seed = random.randrange(10**6)
    print(f"seed of the moments: {seed}")
    run_python(DRIVER, folder, str(num_kills), str(seed))
    return sorted(folder.iterdir())


def test_every_killed_run_opens_as_crashed(killed: list[Path], num_kills: int) -> None:
    assert len(killed) == num_kills
    for folder in killed:
        run = open_run(folder / "run")
        assert run.status is RunStatus.CUT_OFF, folder
        assert [record.rank for record in run.ranks] == list(range(NUM_RANKS))
        assert run.manifest.units


def test_at_most_the_rows_since_the_last_flush_are_missing(killed: list[Path]) -> None:
    for folder in killed:
        run = open_run(folder / "run")
        for rank in range(NUM_RANKS):
            flushed_ns = int(lines_of(folder / f"flushes-{rank}")[-1])
            progress = [map(int, line.split()) for line in lines_of(folder / f"progress-{rank}")]
            due = {step for step, ended_ns in progress if ended_ns < flushed_ns}
            assert due
            assert due <= set(run.events(rank, kinds=[EventKind.STEP]).step.tolist())


def test_what_is_there_is_whole(killed: list[Path]) -> None:
    for folder in killed:
        run = open_run(folder / "run")
        for rank in range(NUM_RANKS):
            events = run.events(rank)
            steps = np.sort(events.step[events.kind == EventKind.STEP])
            assert steps.tolist() == list(range(len(steps)))
            assert (events.end_ns >= events.start_ns).all()


def test_killed_runs_can_be_compacted(killed: list[Path]) -> None:
    for folder in killed[:5]:
        before = open_run(folder / "run").events(0)
        result = compact_run(folder / "run")
        assert not result.skipped
        after = open_run(folder / "run").events(0)
        for name, column in before.columns().items():
            assert np.array_equal(column, getattr(after, name)), name


# --- the disk

DISK_SCRIPT = """
import errno, gc, os, resource, shutil, sys, threading, time, warnings
gc.disable()  # collections are events too, and every run must have equally many
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdp_inspect import Recorder
from fsdp_inspect.store import streams, writer
from fsdp_inspect.store.reader import open_run

if sys.argv[2] in ("full", "read-only", "delete", "hang"):
    writer.STALL_TIMEOUT_S = 2  # or the disk, which does not recover, costs the test 60 s

class FaultyOs:
    def __init__(self, hangs):
        self.hangs = hangs
    def __getattr__(self, name):
        return getattr(os, name)
    def pwrite(self, *arguments):
        if self.hangs:
            threading.Event().wait()
        raise OSError(errno.EIO, "Input/output error")

def take_all_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        pass

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
for layer in model:
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters())
path, damage = sys.argv[1], sys.argv[2]
with Recorder(model, optimizer=optimizer, path=path, flush_interval_s=0.05,
              device_interval_s=0, print_verdict=False) as recorder:
    for step in range(120):
        with recorder.step():
            loss = model(torch.ones(2, 16)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        while step == 40 and damage == "delete" and os.path.exists(path):
            shutil.rmtree(path, ignore_errors=True)  # the recorder may write a file meanwhile
        if step == 40 and damage == "descriptors":
            take_all_descriptors()
        if step == 40 and damage == "hang":
            while not len(open_run(path).events(0)):  # some steps are on disk before the damage
                time.sleep(0.01)
        if step == 40 and damage in ("errors", "hang"):
            streams.os = FaultyOs(hangs=damage == "hang")
        if step == 100 and damage == "errors":
            streams.os = os
print("trained", 120, loss.item().hex())
"""


@pytest.fixture(scope="module")
def train_on(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> TrainOn:
    """Train on one rank, which records to a folder, and damage the folder meanwhile."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(DISK_SCRIPT)
    return lambda path, damage: run_ranks(script, path, damage, num_ranks=1, check=False)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, train_on: TrainOn) -> tuple[str, int]:
    """The output and the number of events of the same training on a healthy disk."""
    folder = tmp_path_factory.mktemp("healthy") / "run"
    done = train_on(folder, "none")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Training continues") == 0
    return done.stdout, len(open_run(folder).events(0))


@pytest.fixture(scope="module")
def undisturbed(healthy: tuple[str, int]) -> str:
    return healthy[0]


def said_once(stderr: str) -> bool:
    return stderr.lower().count("training continues") == 1


def mount_or_skip(target: Path, *options: str) -> None:
    target.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *options, "tmpfs", str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this machine allows no mount: {done.stderr.strip()}")


@pytest.mark.slow  # tests/store/test_disk_faults.py guards the writer
def test_a_full_disk_costs_records_and_not_the_training(
    healthy: tuple[str, int], tmp_path: Path, train_on: TrainOn
) -> None:
    undisturbed, num_events = healthy
    disk = tmp_path / "disk"
    mount_or_skip(disk, "-t", "tmpfs", "-o", "size=160k")  # the recording needs 230 KiB
    try:
        done = train_on(disk / "run", "full")
        assert (done.returncode, done.stdout) == (0, undisturbed)
        assert said_once(done.stderr), done.stderr
        run = open_run(disk / "run")
        found = re.search(r"Rank 0 dropped ([\d,]+) rows of events", done.stderr)
        assert found, done.stderr
        assert len(run.events(0)) + int(found[1].replace(",", "")) == num_events
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_read_only_disk_costs_the_recording_and_not_the_training(
    undisturbed: str, tmp_path: Path, train_on: TrainOn
) -> None:
    disk = tmp_path / "disk"
    mount_or_skip(disk, "-t", "tmpfs", "-o", "ro,size=256k")
    try:
        done = train_on(disk / "run", "read-only")
        assert (done.returncode, done.stdout) == (0, undisturbed)
        assert said_once(done.stderr), done.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_deleted_in_mid_run_does_not_stop_the_training(
    undisturbed: str, tmp_path: Path, train_on: TrainOn
) -> None:
    done = train_on(tmp_path / "run", "delete")
    assert (done.returncode, done.stdout) == (0, undisturbed), done.stderr
    assert said_once(done.stderr), done.stderr
    assert os.environ.get("OMP_NUM_THREADS") == "1"


@pytest.mark.parametrize("damage", mark_slow(("errors", "descriptors"), but=("errors",)))
def test_no_step_is_lost_when_writing_fails_for_a_while(
    undisturbed: str, tmp_path: Path, train_on: TrainOn, damage: str
) -> None:
    done = train_on(tmp_path / "run", damage)
    assert (done.returncode, done.stdout) == (0, undisturbed), done.stderr
    run = open_run(tmp_path / "run")
    steps = run.events(0, kinds=[EventKind.STEP]).step
    assert np.array_equal(np.sort(steps), np.arange(120))
    assert run.ranks[0].dropped == {}


@pytest.mark.slow
def test_a_disk_that_hangs_until_the_end_costs_counted_rows(
    healthy: tuple[str, int], tmp_path: Path, train_on: TrainOn
) -> None:
    undisturbed, num_events = healthy
    done = train_on(tmp_path / "run", "hang")
    assert (done.returncode, done.stdout) == (0, undisturbed), done.stderr
    run = open_run(tmp_path / "run")
    num_steps = len(run.events(0, kinds=[EventKind.STEP]))
    assert 0 < num_steps < 120
    dropped = run.ranks[0].dropped["events"]
    assert f"dropped {dropped:,} rows of events" in done.stderr
    assert len(run.events(0)) + dropped == num_events
