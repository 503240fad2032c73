"""Test that the first advice is right in each planted situation."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.trace.run import RunSource
from tests.conftest import Torchrun
from tests.studies.planted import situations
from tests.studies.planted.situations import SITUATIONS, first_of, open_situations

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> dict[str, RunSource]:
    folder = tmp_path_factory.mktemp("situations")
    # A fresh interpreter, because the virtual clock must precede all imports.
    command = [sys.executable, "-W", "ignore", "-m", situations.__name__, str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])
    run_ranks(situations.__file__, folder, environment={"PYTHONWARNINGS": "ignore"})
    return open_situations(folder)


def test_every_situation_is_recorded(runs: dict[str, RunSource]) -> None:
    assert {*runs} == {*SITUATIONS}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_first_thing_that_advise_says_is_right(runs: dict[str, RunSource], name: str) -> None:
    situation = SITUATIONS[name]
    first = first_of(runs[name], situation.request)
    assert situation.is_right(first), f"{first}, but right is: {situation.right}"
