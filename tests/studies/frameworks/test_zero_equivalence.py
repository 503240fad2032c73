"""Steps of ZeRO with planted faults, compared with the ranks' own gradients."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_inspect.comparison.equivalence import StepFault, StepStatus, compare_steps
from fsdp_inspect.trace.step_dump import (
    ENVIRONMENT_VARIABLE,
    DumpSettings,
    StepDump,
    read_dumps,
)
from tests.conftest import Torchrun

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make frameworks installs it.")

SCRIPT = Path(__file__).with_name("zero_equivalence.py")
FAULTS = {
    "none": None,
    "alone": StepFault.NOT_REDUCED,
    "own": StepFault.NOT_REDUCED,
    "twice": StepFault.DIVIDED_TWICE,
}
CASES = [(stage, fault) for stage in (1, 2, 3) for fault in FAULTS if (stage, fault) != (3, "own")]


@pytest.mark.parametrize(("stage", "fault"), CASES)
def test_a_fault_of_the_gradients_of_zero_is_named(
    stage: int, fault: str, torchrun: Torchrun, tmp_path: Path
) -> None:
    def dump(name: str, sharded: str | None) -> list[StepDump]:
        target = tmp_path / name
        target.mkdir()
        settings = DumpSettings(str(target), 1, sharded and str(tmp_path / sharded))
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(
            "from fsdp_inspect.recording.equivalence.start import start\nstart()\n"
        )
        environment = {
            ENVIRONMENT_VARIABLE: settings.encode(),
            "PYTHONPATH": os.pathsep.join([str(site), str(SCRIPT.parents[3])]),
        }
        torchrun(SCRIPT, str(stage), fault, environment=environment)
        return read_dumps(target)

    found = compare_steps(dump("sharded", None), dump("whole", "sharded"))
    expected = StepStatus.EQUAL if fault == "none" else StepStatus.DIFFERENT
    assert (found.status, found.fault) == (expected, FAULTS[fault])
    assert found.num_backwards == 2
    names = {name for each in found.units for name in each.parameters}
    assert {"model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"} <= names
    assert all(each.gradient_norm > 0 for each in found.units)
    if stage < 3:
        assert {each.unit for each in found.units} == {"parameter group 0"}
