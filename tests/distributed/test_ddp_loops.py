"""Rules about settings of DDP apply to loops with the fault, and not to loops like them."""

from pathlib import Path

import pytest

from fsdp_inspect.run import open_run
from tests.conftest import Torchrun
from tests.distributed import ddp_loops
from tests.distributed.ddp_loops import LOOPS, MICROBATCHES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(ddp_loops.__file__, folder)
    return folder


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rule_applies_to_the_loop_with_its_fault_only(folder: Path, loop: str) -> None:
    findings = {each.rule: each for each in open_run(folder / loop).advise().findings}
    assert ("R36" in findings) == (loop == "searching")
    assert ("R16" in findings) == (loop == "late_no_sync")
    if "R16" in findings:
        assert f"reduces every bucket {MICROBATCHES} times" in findings["R16"].sentence
