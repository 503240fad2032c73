"""Mistakes over the dimensions of a mesh are named, and legal meshes are not."""

from pathlib import Path

import pytest

from fsdp_inspect import open_run
from tests.conftest import Torchrun
from tests.distributed.correctness_meshes import LOOPS, MISTAKES, NOTES, list_launches

SCRIPT = Path(__file__).with_name("correctness_meshes.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    """A folder with a run of each loop."""
    folder = tmp_path_factory.mktemp("meshes")
    for names in list_launches():
        run_ranks(SCRIPT, folder, *names, num_ranks=4)
    return folder


@pytest.mark.parametrize("name", LOOPS)
def test_a_mesh_has_the_mistake_that_was_planted_or_none(runs: Path, name: str) -> None:
    seen = open_run(runs / name).correctness()

    assert " ".join(fault.sentence for fault in seen.faults) == MISTAKES.get(name, "")
    assert " ".join(note.sentence for note in seen.notes) == NOTES.get(name, "")
