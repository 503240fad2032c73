"""Each step of the GPU script without a GPU, on small inputs, and its errors."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as script
from tests.gpu.outcome import Judge, Row, Verdict
from tests.gpu.results import Results
from tests.gpu.two_ranks import refusal
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.machine import describe_machine


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
    return script.Script(options, tmp_path, Results(describe_machine()))


def test_a_step_that_breaks_is_a_row_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.STEPS, "nonsense", 60)
    call = run_of(tmp_path)
    call.run("nonsense")
    assert call.finish() == 1
    [row] = call.results.all_rows
    assert row.verdict is Verdict.MISSED
    assert "No module named 'tests.gpu.nonsense'" in row.figure.how
    assert "nonsense: 1 rows, 1 missed" in capsys.readouterr().out


def test_a_step_that_hangs_is_stopped_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.STEPS, "memory", 0.1)  # times five in a quick trial
    call = run_of(tmp_path)
    call.run("memory")
    assert "Stopped after 0.5 s, its limit" in call.results.all_rows[0].figure.how


def test_a_step_is_not_started_when_the_time_is_used_up(tmp_path: Path) -> None:
    call = run_of(tmp_path, limit_s=0)
    call.run("memory")
    [row] = call.results.all_rows
    assert row.verdict is Verdict.NOT_STARTED
    assert row.figure.how == "Not started: all 0 s of the call were used."
    assert call.finish() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_every_step_says_why_and_nothing_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script.main([]) == 0
    table = capsys.readouterr().out
    assert table.count("| not available |") == len(script.STEPS)
    assert "torch sees no CUDA device" in table
