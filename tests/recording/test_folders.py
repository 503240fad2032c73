"""All ranks record under one name, in the requested folder, also with failing disks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording import folders
from fsdp_inspect.recording.folders import RecordingFolder, agree_on_folder, default_path
from fsdp_inspect.store.folder import read_manifest
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunManifest, RunStatus


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The key-value store that the ranks of a job share; here they use it one by one."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    return store


def agree(path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> RecordingFolder:
    """Agree on a folder like the first recording of a rank's process."""
    monkeypatch.setattr(folders, "_recordings", itertools.count())
    manifest = RunManifest(
        run_id=path.name, created="", created_unix_ns=0, world_size=2, backend="gloo",
        device_type="cpu",
    )  # fmt: skip
    return agree_on_folder(path, manifest, rank)


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


def test_a_restart_is_the_next_attempt_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(tmp_path / "run", 0, monkeypatch)

    chosen = {agree(tmp_path / "run", rank, monkeypatch) for rank in (0, 1)}

    assert {each[:2] for each in chosen} == {(tmp_path / "run", 1)}


def test_no_rank_of_a_restarted_job_joins_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A static rendezvous keeps the store: the key of the first attempt still exists.
    agree(tmp_path / "run", 0, monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    with pytest.warns(RuntimeWarning, match="rank 0 sent no run folder"):
        agree(tmp_path / "run", 1, monkeypatch)
    restarted = {agree(tmp_path / "run", rank, monkeypatch) for rank in (0, 1)}

    assert {each[:2] for each in restarted} == {(tmp_path / "run", 1)}
    assert all("/1/" in each.key for each in restarted)


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
