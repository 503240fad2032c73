"""A standstill that ended: the rank and the line are in the notes."""

import re
from pathlib import Path

import pytest

import fsdp_inspect
from tests.conftest import Torchrun

SCRIPT = Path(__file__).with_name("standstill_script.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_the_note_names_the_rank_and_the_line(tmp_path: Path, run_ranks: Torchrun, invoke) -> None:
    run_ranks(SCRIPT, tmp_path / "run")
    [note] = [each for each in fsdp_inspect.open_run(tmp_path / "run").notes if "diagnosis" in each]
    assert "in step 3. The training continued" in note
    assert "The diagnosis was: Rank 1 never reached the all-gather of" in note
    assert re.search(r"standstill_script\.py:\d+ \(`time\.sleep\(1\.0\)`\)", note)
    shown = " ".join(invoke("diagnose", tmp_path / "run").out.split())
    assert "The diagnosis was: Rank 1 never reached" in shown
