"""Sharded steps with planted faults, compared with the same steps without sharding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.comparison.equivalence import (
    Equivalence,
    StepFault,
    StepStatus,
    compare_steps,
)
from fsdp_inspect.report.equivalence import describe_equivalence, describe_evidence
from fsdp_inspect.trace.step_dump import (
    ENVIRONMENT_VARIABLE,
    DumpSettings,
    StepDump,
    read_dumps,
    read_progress,
)
from tests.cases import mark_slow
from tests.conftest import Torchrun

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "equivalence_script.py"
HEALTHY = (
    "none",
    "none accumulate clip bf16 dropout",
    "ignored reduce",
    "none tp",
    "none closure",
    "none keep",
)
WRAPPED = (
    *(
        "none ddp static",
        "none ddp views accumulate dropout outputs",
        "none fsdp1",
        "none fsdp1 orig accumulate",
    ),
    *("none fsdp1 bf16 accumulate", "none fsdp1 orig grad-op dropout"),
)
WRAPPED_FAULTS = {
    "alone ddp": StepFault.NOT_REDUCED,
    "alone fsdp1 orig": StepFault.NOT_REDUCED,
    "no-sync ddp": StepFault.NOT_REDUCED,
    "twice ddp": StepFault.DIVIDED_TWICE,
    "twice fsdp1": StepFault.DIVIDED_TWICE,
}
FAULTS = {
    "divisor": (StepFault.SCALED, "layers.1"),
    "own": (StepFault.NOT_REDUCED, "layers.1"),
    "missing": (StepFault.MISSING_GRADIENT, "layers.2"),
    "ignored": (StepFault.NOT_REDUCED, None),
    "sum-of-one": (StepFault.SCALED, "layers.1"),
    "dtype": (StepFault.LOST_PRECISION, "layers.1"),
    "dtype bf16": (StepFault.LOST_PRECISION, "layers.1"),
    "dtype-later": (StepFault.LOST_PRECISION, "layers.0"),
    "stale": (StepFault.STALE_PARAMETERS, "layers.1"),
    "twice": (StepFault.DIVIDED_TWICE, None),
    "twice accumulate clip": (StepFault.DIVIDED_TWICE, None),
    "twice-later": (StepFault.DIVIDED_TWICE, None),
}
QUICK_FAULTS = ("missing", "stale")


@pytest.fixture(scope="module")
def compare(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory):
    """Run the script with the given arguments, with and without sharding, and compare."""

    def run(words: str) -> Equivalence:
        folder = tmp_path_factory.mktemp("equivalence")

        def dump(name: str, sharded: str | None) -> list[StepDump]:
            target = folder / name
            target.mkdir()
            settings = DumpSettings(str(target), 1, sharded and str(folder / sharded))
            run_ranks(
                SCRIPT,
                *words.split(),
                num_ranks=4 if "tp" in words else 2,
                environment={ENVIRONMENT_VARIABLE: settings.encode(), "OMP_NUM_THREADS": "1"},
            )
            return read_dumps(target)

        return compare_steps(dump("sharded", None), dump("whole", "sharded"))

    return run


@pytest.mark.parametrize("words", mark_slow(HEALTHY, but=HEALTHY[1:2]))
def test_a_correct_step_equals_the_step_without_sharding(compare, words: str) -> None:
    found = compare(words)
    assert (found.status, found.fault) == (StepStatus.EQUAL, None)
    assert [each.unit for each in found.units][:2] == ["", "layers.2"]
    assert all(each.error_ratio <= each.tolerance_ratio for each in found.units)
    assert all(each.gradient_norm > 0 for each in found.units)


@pytest.mark.parametrize("words", mark_slow(WRAPPED, but=WRAPPED[1:2]))
def test_a_correct_step_of_ddp_or_fsdp1_equals_the_step_without_reductions(
    compare, words: str
) -> None:
    found = compare(words)
    assert (found.status, found.fault) == (StepStatus.EQUAL, None)
    units = {each.unit for each in found.units}
    assert units == ({"bucket 0"} if "ddp" in words else {"", "layers.0", "layers.1", "layers.2"})
    compared = {name for each in found.units for name in each.parameters}
    assert {"layers.1.up.weight", "layers.1.up.bias", "head.weight", "scale"} <= compared
    assert all(each.error_ratio <= each.tolerance_ratio for each in found.units)
    assert all(each.gradient_norm > 0 for each in found.units)


@pytest.mark.parametrize("words", mark_slow(WRAPPED_FAULTS, but=["alone fsdp1 orig"]))
def test_a_planted_fault_of_ddp_or_fsdp1_is_named(compare, words: str) -> None:
    found = compare(words)
    assert (found.status, found.fault) == (StepStatus.DIFFERENT, WRAPPED_FAULTS[words])


@pytest.mark.parametrize("words", mark_slow(FAULTS, but=QUICK_FAULTS))
def test_a_planted_fault_is_named_with_its_unit(compare, words: str) -> None:
    found = compare(words)
    fault, unit = FAULTS[words]
    assert (found.status, found.fault, found.unit) == (StepStatus.DIFFERENT, fault, unit)


def test_a_wrong_divisor_is_stated_with_its_factor_and_line(compare) -> None:
    found = compare("divisor")
    assert found.factor == pytest.approx(1 / 3, rel=1e-4)
    line = next(
        at
        for at, text in enumerate(SCRIPT.read_text().splitlines(), 1)
        if "3.0 * dist.get_world_size()" in text
    )
    assert found.location.endswith(f"{SCRIPT.name}:{line}")
    assert "0.3333 times the mean over ranks" in describe_equivalence(found)
    assert f"{SCRIPT.name}:{line}" in " ".join(describe_evidence(found))


def test_a_sum_that_the_script_asks_for_is_no_firm_fault(compare) -> None:
    found = compare("sum")
    assert (found.status, found.fault) == (StepStatus.UNKNOWN, StepFault.SCALED)
    assert found.factor == pytest.approx(2, rel=1e-4)
    assert "right if the loss is divided by a total" in " ".join(describe_evidence(found))


def test_a_loss_that_cannot_be_repeated_gives_no_answer(compare) -> None:
    found = compare("labels")
    assert (found.status, found.fault) == (StepStatus.UNKNOWN, StepFault.OTHER_LOSS)
    assert describe_equivalence(found).startswith("Cannot tell: on ranks 0-1, the loss differs")


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    local = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    own = [sys.executable, "-m", "fsdp_inspect", "equivalence", "--json"]
    return subprocess.run(
        [*own, *words[:-1], "--", *torchrun, *local, str(SCRIPT), words[-1]],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # the tests above compare the same dumps without torchrun
def test_the_command_runs_torchrun_and_states_the_fault() -> None:
    done = _command("--step", "0", "twice")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["sentence"] == "The gradients are divided by the number of ranks twice."
    assert found["factor"] == 0.5
    assert f"{SCRIPT.name}:" in found["location"]
    assert found["next"].startswith("Remove the division")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--step", "7", "none"), "ended before the update of step 7, after 3 updates."),
        (("early",), "ran 3 times with other tensors, such as those from before sharding."),
    ],
)
def test_a_script_that_does_not_reach_the_step_learns_why(
    words: tuple[str, ...], reason: str
) -> None:
    done = _command(*words)
    assert done.returncode == 2
    shown = " ".join(done.stderr.replace("│", " ").split())
    assert reason in shown
    assert "`fsdp-inspect diagnose`" in shown
    assert "Traceback" not in shown


def test_a_rank_notes_the_steps_of_an_optimizer_from_before_sharding(
    run_ranks: Torchrun, tmp_path: Path
) -> None:
    settings = DumpSettings(str(tmp_path), 1, None)
    run_ranks(SCRIPT, "early", environment={ENVIRONMENT_VARIABLE: settings.encode()})

    found = read_progress(tmp_path)

    assert found is not None
    assert (found.has_model, found.num_updates, found.num_others) == (True, 0, 3)
    assert f"{SCRIPT.name}:" in found.place
