"""A recorder that uploads: the training computes the same, whatever the object store does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording import attachment
from fsdp_inspect.recording.folders import RecordingFolder
from fsdp_inspect.recording.launcher import parse_arguments
from fsdp_inspect.store import background_upload
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.run_upload import upload_run
from tests.faulty_store import URL, FaultyStore, register

NUM_STEPS = 5


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register()
    monkeypatch.setattr(background_upload, "INTERVAL_S", 0.05)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    FaultyStore.reset()


def train(path: Path, *, upload: str | None, enabled: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with Recorder(
        model, optimizer=optimizer, path=path, upload=upload, enabled=enabled, print_verdict=False
    ) as recorder:
        for step in range(NUM_STEPS):
            with recorder.step():
                loss = model(torch.full((4, 8), step / 7)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["works", "slow", "fails", "hangs", "denied"])
def test_losses_are_bit_identical_whatever_the_store_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    plain = train(tmp_path / "plain", upload=None, enabled=False)
    FaultyStore.mode = mode
    if mode in ("fails", "hangs", "denied"):
        monkeypatch.setattr(attachment, "FINISH_TIMEOUT_S", 0.1)
    assert train(tmp_path / "run", upload=f"{URL}/{mode}") == plain
    FaultyStore.set_mode("works")
    result = upload_run(tmp_path / "run")
    [entry] = list_runs(f"{URL}/{mode}")
    assert result.url == str(entry.path)
    there = open_run(entry.path)
    assert there.status.value == "complete"
    assert there.ranks[0].num_steps == NUM_STEPS
    assert len(there.events(0)) == len(open_run(tmp_path / "run").events(0)) > 0


def test_unknown_protocol_is_a_warning_and_the_run_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attachment, "FINISH_TIMEOUT_S", 0.1)
    train(tmp_path / "run", upload="nosuch://bucket/runs")
    assert "cannot upload to nosuch://bucket/runs" in caplog.text
    assert open_run(tmp_path / "run").status.value == "complete"


def test_upload_needs_a_url(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"upload must be a URL such as .*, got 'bucket/runs'"):
        train(tmp_path, upload="bucket/runs")


def test_launcher_passes_the_url_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    given = parse_arguments(["--upload", URL, "-m", "train"])
    assert given.recorder["upload"] == URL
    with pytest.raises(SystemExit):
        parse_arguments(["--upload", "bucket", "-m", "train"])
    assert "Expected a URL such as s3://bucket/runs" in capsys.readouterr().err


def test_named_folder_gets_the_time_of_the_run_at_the_url() -> None:
    named = RecordingFolder(Path("runs/llama"), 0, created_unix_ns=1_767_225_600_000_000_000)
    assert named.remote_name == "llama-20260101-000000"
    unique = named._replace(path=Path("runs/20260101-000000-llama-1a2b"))
    assert unique.remote_name == "20260101-000000-llama-1a2b"


class HangingUpload:
    """An upload that never returns."""

    def upload(self) -> None:
        threading.Event().wait()


def test_after_a_failure_another_process_uploads_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", upload=None)
    url = f"file://{tmp_path}/remote/run"
    uploads: list[Any] = [HangingUpload()]
    upload = background_upload.BackgroundUpload(tmp_path / "run", url, uploads, rank=0)
    started_s = time.monotonic()

    upload.leave(0.2)

    assert time.monotonic() - started_s < 5
    assert "another process uploads the rest" in caplog.text
    rank = tmp_path / "remote" / "run" / "attempt-000" / "rank-00000" / "rank.json"
    while not rank.exists():
        time.sleep(0.05)
