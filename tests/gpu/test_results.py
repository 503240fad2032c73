"""The results of several calls of the GPU script, merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import __main__ as script
from tests.gpu.outcome import Judge, Row, Verdict, failed, not_started
from tests.gpu.results import FIGURES, LOG, Results, merge_folders, shorten
from tests.gpu.suites import count_outcomes
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.machine import Machine, describe_machine

MACHINE = replace(describe_machine(), gpu="1 x NVIDIA H100")


def held(name: str, value: str = "1") -> Row:
    figure = Figure(name=name, value=value, how="counted", numbers={"times": float("inf")})
    return Judge(is_quick=False).exact(figure, holds=True)


def results_in(folder: Path, rows: dict[str, list[Row]], machine: Machine = MACHINE) -> Path:
    folder.mkdir()
    Results(machine, rows).write(folder)
    (folder / LOG).write_text(f"log of {folder.name}\n")
    return folder


def test_results_come_through_their_file_unchanged(tmp_path: Path) -> None:
    rows = {"timing": [held("a"), failed("b", "stopped")], "costs": [held("c")]}
    assert Results.read(results_in(tmp_path / "one", rows)) == Results(MACHINE, rows)
    assert Results.read(tmp_path) is None


def test_a_later_call_replaces_the_steps_that_it_measured(tmp_path: Path) -> None:
    first = results_in(
        tmp_path / "first",
        {"timing": [held("a", "old"), failed("timing", "x")], "costs": [held("b")]},
    )
    second = results_in(
        tmp_path / "second",
        {
            "timing": [held("a", "new")],
            "costs": [not_started("costs", "no time")],
            "clock": [held("c")],
        },
    )
    (second / "smoke.tar.gz").write_bytes(b"packed")
    target = tmp_path / "merged"
    target.mkdir()
    merged = merge_folders([first, second], target)
    assert [row.figure.value for row in merged.all_rows] == ["new", "1", "1"]
    assert merged.exit_code == 0
    assert Results.read(target) == merged
    assert (target / LOG).read_text() == "log of first\nlog of second\n"
    assert (target / "smoke.tar.gz").read_bytes() == b"packed"


def test_calls_on_different_machines_are_not_merged(tmp_path: Path) -> None:
    first = results_in(tmp_path / "first", {"timing": [held("a")]})
    other = replace(MACHINE, gpu="1 x NVIDIA H200")
    second = results_in(tmp_path / "second", {"timing": [held("a")]}, other)
    with pytest.raises(ValueError, match="different machines: 1 x NVIDIA H100 with torch"):
        merge_folders([first, second], tmp_path)


def test_a_folder_without_results_is_not_merged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"No {FIGURES} found in {tmp_path}"):
        merge_folders([tmp_path], tmp_path)


@pytest.mark.parametrize("bad", [failed("a", "stopped"), not_started("a", "no time")])
def test_a_missed_row_and_a_missing_step_are_the_exit_code(bad: Row) -> None:
    assert Results(MACHINE, {"a": [held("b"), bad]}).exit_code == 1
    assert bad.verdict in (Verdict.MISSED, Verdict.NOT_STARTED)


def test_the_command_merges_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = results_in(tmp_path / "first", {"timing": [held("first row")]})
    second = results_in(tmp_path / "second", {"costs": [held("second row")]})
    merging = ["--merge", str(first), str(second)]
    assert script.main([*merging, "--out", str(tmp_path / "merged")]) == 0
    table = capsys.readouterr().out
    assert "first row" in table
    assert "second row" in table
    with pytest.raises(SystemExit):
        script.main(merging)


def test_a_log_that_is_too_large_keeps_its_end(tmp_path: Path) -> None:
    log = tmp_path / LOG
    log.write_bytes(b"start" + b"x" * 100 + b"end")
    shorten(log, 100)
    assert log.read_bytes() == b"x" * 47 + b"end"


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        ("=== 5 passed, 1 skipped in 3.21s ===", {"passed": 5, "skipped": 1}),
        ("=== 1 failed, 2 errors in 3.21s ===", {"failed": 1, "error": 2}),
        ("no tests ran in 0.01s", {}),
    ],
)
def test_the_outcomes_of_a_suite_are_those_of_its_last_line(
    last: str, counts: dict[str, int]
) -> None:
    assert count_outcomes(f"a.py::test PASSED\n{last}\n") == counts
