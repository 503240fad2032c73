"""One training for each fault; `make faults` runs more of them, on more ranks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.studies.faults.cases import EXPECTED, Case
from tests.studies.faults.judging import RIGHT, Verdict, judge
from tests.studies.faults.running import SCRIPT, end_ranks, run_case, run_healthy, start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
OF_EACH_CHANGE = (
    *("skip-equal", "skip-other", "swap-equal", "branch", "dtype", "user-size", "foreign"),
    *("foreign-absent", "foreign-hidden", "data-worker", "checkpoint", "evaluation", "breakpoint"),
    *("lock", "native", "stopped", "uneven", "exception", "memory", "memory-batch", "killed"),
    *("segmentation", "leave", "garbage", "object", "frozen", "two-groups", "save", "all-slow"),
    *("not-a-number",),
)
"""The faults that every change is tested with; the others are a study."""


def is_right(verdict: Verdict) -> bool:
    return (verdict.problem, verdict.ranks, verdict.line) == (RIGHT, RIGHT, RIGHT)


OF_SETUPS = (
    *(("join", "ddp"), ("start-killed", "fsdp1"), ("nan-skip", "hsdp"), ("critic", "fsdp2")),
    *(("epoch-hang", "accelerate"), ("stop-killed", "lightning"), ("skip-equal", "moe")),
    *(("own-refused", "tp"), ("exit-quick", "accumulation")),
)
"""Faults in other set-ups that every change is tested with."""


def cases_of(faults: Sequence[str]) -> list[Case]:
    models = ("mlp", "llama")
    return [Case(name, models[at % 2], 3, at % 3, 4) for at, name in enumerate(faults)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(cases_of(OF_EACH_CHANGE), id="of each change"),
        pytest.param([Case(fault, setup, 4, 1, 4) for fault, setup in OF_SETUPS], id="of set-ups"),
        pytest.param(
            cases_of([fault for fault in EXPECTED if fault not in OF_EACH_CHANGE]),
            marks=pytest.mark.study,
            id="all others",
        ),
    ],
)
def test_every_fault_is_named_with_its_rank_and_line(tmp_path: Path, cases: Sequence[Case]) -> None:
    with ThreadPoolExecutor(3) as pool:  # most of the time they wait
        outcomes = pool.map(run_case, cases, [tmp_path / case.fault for case in cases])
        verdicts = [judge(outcome) for outcome in outcomes]

    # Three trainings together can starve a rank, so wrong cases run again alone.
    again = [
        judge(run_case(each.outcome.case, tmp_path / f"{each.outcome.case.fault}-again"))
        for each in verdicts
        if not is_right(each)
    ]
    assert not [
        (each.outcome.case.name, each.outcome.found) for each in again if not is_right(each)
    ]
    assert len(again) <= len(cases) // 20
    assert not any(each.is_falsely_certain for each in (*verdicts, *again))


@pytest.mark.parametrize("fault", ["none", "healthy"])
@pytest.mark.parametrize("model", ["mlp", "llama"])
def test_a_healthy_training_raises_no_alarm(tmp_path: Path, model: str, fault: str) -> None:
    assert run_healthy(tmp_path / "healthy", num_ranks=2, model=model, fault=fault) == ""


@pytest.mark.parametrize(("fault", "codes"), [("swap-equal", [1, 1, 1]), ("none", [0, 0, 0])])
def test_raise_stops_every_rank_before_the_update(
    tmp_path: Path, fault: str, codes: list[int]
) -> None:
    options = ("--out", "runs", "--no-verdict", "--memory-steps", "none", "--on-desync", "raise")
    training = (str(SCRIPT), fault, "--rank", "1", "--step", "4")
    ranks = start_ranks(("-m", "fsdp_inspect.record", *options, *training), 3, tmp_path)
    for process in ranks.processes:
        process.join(500)
    end_ranks(ranks)

    assert [process.returncode for process in ranks.processes] == codes
    said = [line for line in ranks.stderr.read_text().split("\n") if "DesyncError: Rank 1" in line]
    assert len(said) == (3 if fault != "none" else 0)
    assert all(line.endswith("The optimizer step was not taken.") for line in said)
