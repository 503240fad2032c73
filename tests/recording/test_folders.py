"""All ranks record under one name, in the requested folder, also with failing disks."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording import folders
from fsdp_inspect.recording.environment import read_clock_pair
from fsdp_inspect.recording.folders import RecordingFolder, agree_on_folder, default_path
from fsdp_inspect.store.folder import pid_scope, rank_folder, read_manifest
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import RANK_FILE
from fsdp_inspect.trace.run import JobLaunch, RankRecord, RunManifest, RunStatus
from tests.store.run_files import make_manifest


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The key-value store that the ranks of a job share; here they use it one by one."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    return store


def agree(
    path: Path,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    peers: Collection[int] = (),
    **fields: Any,
) -> RecordingFolder:
    """Agree on a folder like the first recording of a rank's process."""
    monkeypatch.setattr(folders, "_recordings", itertools.count())
    manifest = RunManifest(
        run_id=path.name, created="", created_unix_ns=0, world_size=2, backend="gloo",
        device_type="cpu", **fields,
    )  # fmt: skip
    return agree_on_folder(path, manifest, rank, peers=peers)


@pytest.mark.parametrize("has_rank_0", [False, True])
def test_ranks_without_rank_0_in_their_groups_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_rank_0: bool
) -> None:
    """Rank 0 may have no sharded model. In a mesh, a rank may share no group with the first."""
    monkeypatch.setattr(folders, "_RANK_0_S", 0.1)
    if has_rank_0:
        agree(tmp_path / "a", 0, monkeypatch)

    found = [
        agree(tmp_path / name, rank, monkeypatch, peers=peers)
        for name, rank, peers in (("b", 1, (1, 2, 3)), ("c", 2, (1, 2, 4)), ("d", 4, (2, 3, 4)))
    ]

    name = "a" if has_rank_0 else "b"
    assert {each.path for each in found} == {tmp_path / name}
    assert read_manifest(tmp_path / name).run_id == name


def test_rank_0_chooses_the_name_and_each_rank_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = agree(tmp_path / "node0" / "a", 0, monkeypatch)
    second = agree(tmp_path / "node1" / "b", 1, monkeypatch)

    assert first[:2] == (tmp_path / "node0" / "a", 0)
    assert second[:2] == (tmp_path / "node1" / "a", 0)
    assert read_manifest(second.path).run_id == "a"


def test_only_a_rank_that_writes_the_manifest_asks_for_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(folders, "find_script_commit", lambda: asked.append("git") or "a1b2")
    agree(tmp_path / "shared" / "a", 0, monkeypatch)
    agree(tmp_path / "shared" / "a", 1, monkeypatch)
    assert asked == []
    elsewhere = agree(tmp_path / "node1" / "a", 1, monkeypatch)
    assert read_manifest(elsewhere.path).git_commit == "a1b2"


def test_ranks_of_a_shared_disk_meet_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {agree(default_path("llama", tmp_path), rank, monkeypatch) for rank in (0, 1)}

    assert len(chosen) == 1


class Job:
    """The starts of a job's ranks, one after the other, like those of an elastic agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agent: str) -> None:
        self._monkeypatch = monkeypatch
        self._agent = agent
        self._num_restarts = -1

    def start(self, path: Path, status: RunStatus | None = None, **fields: Any) -> RecordingFolder:
        """Record an attempt on both ranks; `status` is that of rank 0 after it, None: it runs."""
        self._num_restarts += 1
        launch = JobLaunch(id=self._agent, num_restarts=self._num_restarts)
        self._monkeypatch.setattr(folders, "this_launch", lambda: launch)
        first, second = (agree(path, rank, self._monkeypatch, **fields) for rank in (0, 1))
        assert first[:2] == second[:2]
        record = RankRecord(
            rank=0, world_size=2, attempt=first.attempt, launch=launch, pid=os.getpid(),
            clock_start=read_clock_pair(), status=status or RunStatus.RUNNING,
        )  # fmt: skip
        target = rank_folder(first.path, first.attempt, 0)
        target.mkdir()
        (target / RANK_FILE).write_bytes(encode_record(record.model_copy(update=_OF_THIS_PROCESS)))
        return first


_OF_THIS_PROCESS = {"pid_scope": pid_scope()}


def test_a_restart_by_the_same_agent_is_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(monkeypatch, "agent")
    # A rank of another node may seem to run for a minute after the agent has ended it.
    starts = [job.start(tmp_path / "run") for _ in range(3)]
    assert [each[:2] for each in starts] == [(tmp_path / "run", n) for n in range(3)]


def test_a_restart_finds_its_run_under_a_name_with_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = Job(monkeypatch, "agent"), Job(monkeypatch, "another agent")
    first = job.start(default_path("llama", tmp_path))
    other.start(default_path("llama", tmp_path))
    second = job.start(default_path("llama", tmp_path))
    assert second[:2] == (first.path, 1)


@pytest.mark.parametrize(
    ("status", "fields", "reason"),
    [
        (None, {}, "a run that still records"),
        (RunStatus.COMPLETE, {}, "a complete run"),
        (RunStatus.FAILED, {"command": ["train.py", "--lr", "2"]}, "a run with another command"),
        (RunStatus.FAILED, {"config": {"lr": 2}}, "a run with another configuration"),
    ],
)
def test_another_job_never_joins_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: RunStatus | None,
    fields: dict[str, Any],
    reason: str,
) -> None:
    Job(monkeypatch, "yesterday").start(tmp_path / "llama", status)
    with pytest.warns(RuntimeWarning, match=reason):
        today = Job(monkeypatch, "today").start(tmp_path / "llama", **fields)
    assert today[:2] == (tmp_path / "llama-2", 0)
    assert read_manifest(today.path).run_id == "llama-2"


def test_the_same_job_continues_a_run_that_did_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(monkeypatch, "yesterday").start(tmp_path / "llama", RunStatus.FAILED)
    today = Job(monkeypatch, "today").start(tmp_path / "llama")
    assert today[:2] == (tmp_path / "llama", 1)


def test_jobs_that_start_at_once_share_no_run(tmp_path: Path) -> None:
    def start(number: int) -> tuple[Path, int]:
        manifest = make_manifest(run_id="x", world_size=1)
        return agree_on_folder(tmp_path / "x", manifest, 0)[:2]

    with ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = list(pool.map(start, range(8)))
    assert len(set(chosen)) == 8
    assert {attempt for _, attempt in chosen} == {0}


def test_no_rank_of_a_restarted_job_joins_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A static rendezvous keeps the store: the key of the first attempt still exists.
    agree(tmp_path / "run", 0, monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    with pytest.warns(RuntimeWarning, match="rank 0 sent no run folder"):
        agree(tmp_path / "run", 1, monkeypatch)


def test_a_disk_that_rank_0_cannot_use_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        agree(tmp_path / "file" / "a", 0, monkeypatch)

    assert agree(tmp_path / "b", 1, monkeypatch)[:2] == (tmp_path / "a", 0)


def test_a_rank_0_that_never_comes_is_a_warning_and_no_end_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(RuntimeWarning, match="rank 0 sent no run folder"):
        chosen = agree(tmp_path / "b", 1, monkeypatch)

    assert chosen[:2] == (tmp_path / "b", 0)


def test_default_names_sort_by_time_and_hold_no_slash() -> None:
    path = default_path("my/own run", Path("/data"))

    assert path.parent == Path("/data")
    assert path.name[:8].isdecimal()
    assert "-my-own-run-" in path.name


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    monkeypatch.undo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield fully_shard(nn.Linear(4, 1))
    dist.destroy_process_group()


def test_a_script_may_change_its_folder_while_it_is_recorded(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {"device_interval_s": 0, "memory_steps": (), "print_verdict": False}

    with Recorder(model, path="runs/relative", **options) as recorder, recorder.step():
        os.chdir("elsewhere")
        model(torch.ones(2, 4)).sum().backward()

    assert recorder.run_folder == tmp_path / "runs" / "relative"
    assert open_run(tmp_path / "runs" / "relative").status is RunStatus.COMPLETE
    assert list((tmp_path / "elsewhere").iterdir()) == []
