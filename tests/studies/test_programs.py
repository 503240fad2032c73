"""The programs that measure start: none of them needs a session of pytest."""

from pathlib import Path

import pytest

from tests.conftest import Torchrun

PROGRAMS = ("benchmarks", "faults", "fuzz", "planted", "torch_matrix", "validation")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_how_it_is_used(run_python: Torchrun, name: str) -> None:
    assert (Path(__file__).parent / name / "__main__.py").exists()
    shown = run_python("-m", f"tests.studies.{name}", "--help", cwd=Path(__file__).parents[2])
    assert shown.stdout.startswith("usage: ")
