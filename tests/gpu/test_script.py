"""Each step of the GPU script without a GPU, on small inputs, and its errors."""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_inspect.store.reader import open_run
from tests.benchmarks.figures import Figure
from tests.benchmarks.machine import describe_machine
from tests.forked_process import ForkedProcess
from tests.gpu import __main__ as script
from tests.gpu.outcome import Judge, Row, Verdict
from tests.gpu.setting import NEEDS_CUDA
from tests.gpu.two_ranks import refusal


@pytest.mark.parametrize(
    ("num_gpus", "version", "runs"),
    [(1, (2, 28, 9), False), (1, (2, 30, 1), True), (2, (2, 28, 9), True)],
)
def test_two_ranks_need_two_gpus_or_a_library_that_shares_one(
    num_gpus: int, version: tuple[int, ...], runs: bool
) -> None:
    reason = refusal(num_gpus, version)
    assert (reason == "") == runs
    assert runs or "NCCL 2.28.9 refuses two ranks on one GPU" in reason


def test_noise_is_not_judged_in_a_quick_try_out_and_equality_is() -> None:
    figure = Figure(name="x", value="1", how="counted")
    assert Judge(is_quick=True).aimed(figure, holds=False).verdict is Verdict.NOT_JUDGED
    assert Judge(is_quick=False).aimed(figure, holds=False).verdict is Verdict.MISSED
    assert Judge(is_quick=True).exact(figure, holds=False).verdict is Verdict.MISSED


def test_a_row_comes_through_its_file_unchanged() -> None:
    figure = Figure(name="x | y", value="1 µs", how="two\nlines", numbers={"ns": 1e3})
    row = Row(figure, Verdict.HOLDS)
    assert Row.from_json(row.to_json()) == row
    assert "\n" not in row.to_json()


def run_of(tmp_path: Path, limit_s: float = 60) -> script.Script:
    options = argparse.Namespace(device="cpu", quick=True, out=tmp_path / "out", limit_s=limit_s)
    options.out.mkdir()
    return script.Script(options, tmp_path, describe_machine())


def test_a_step_that_breaks_is_a_row_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.STEPS, "nonsense", 60)
    call = run_of(tmp_path)
    call.run("nonsense")
    assert call.finish() == 1
    [row] = call.rows
    assert row.verdict is Verdict.MISSED
    assert "No module named 'tests.gpu.nonsense'" in row.figure.how
    assert "nonsense: 1 rows, 1 missed" in capsys.readouterr().out


def test_a_step_that_hangs_is_stopped_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.STEPS, "memory", 0.5)
    call = run_of(tmp_path)
    call.run("memory")
    assert "Stopped after 0.5 s, its limit" in call.rows[0].figure.how


def test_a_step_is_not_started_when_the_time_is_used_up(tmp_path: Path) -> None:
    call = run_of(tmp_path, limit_s=0)
    call.run("memory")
    assert "Not started" in call.rows[0].figure.how


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_every_step_says_why_and_nothing_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script.main([]) == 0
    table = capsys.readouterr().out
    assert table.count("| not available |") == len(script.STEPS)
    assert "torch sees no CUDA device" in table


def forked(command: list[str], *, cwd: Path, stdin: int, stdout: Any, stderr: int) -> ForkedProcess:
    """A step that starts with torch imported. Other tests start steps like the script does."""
    assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
    return ForkedProcess(command, cwd=cwd, stdout=stdout, stderr=stdout)


@pytest.mark.study
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_every_step_runs_on_a_cpu_in_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        script, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked})
    )
    monkeypatch.setattr(script, "STEPS", dict.fromkeys(script.STEPS, 600.0))
    options = ["--device", "cpu", "--quick", "--limit-s", "1000"]
    assert script.main([*options, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "figures.json").read_text())
    verdicts = Counter(figure["verdict"] for figure in content["figures"])
    reasons = {f["how"] for f in content["figures"] if f["verdict"] == "not available"}
    assert verdicts["MISSED"] == 0
    assert len(content["figures"]) > 20
    assert all(reason.startswith(NEEDS_CUDA) for reason in reasons)
    assert "| how |" in (tmp_path / "figures.md").read_text()
    assert len(list(tmp_path.iterdir())) <= 8  # few enough files to copy
    with tarfile.open(tmp_path / "emulated-8-ranks-cpu.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    sample = tmp_path / "emulated-8-ranks-cpu"
    assert "torchrun" in (sample / "README.md").read_text()
    assert open_run(sample / "run").manifest.source == "emulated"
    assert json.loads((sample / "expected.json").read_text())["world_size"] == 8
    assert sum(path.stat().st_size for path in sample.rglob("*") if path.is_file()) < 1 << 20
