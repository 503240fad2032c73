"""Test that the headline of the verdict names each planted cause with its size."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.run import open_run
from tests.conftest import Torchrun
from tests.studies.planted import causes
from tests.studies.planted.causes import LINKS, WITHOUT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

EXPECTED = {
    "slow rank": (Limit.STRAGGLER, "Find out how rank 1"),
    "data": (Limit.INPUT, "Load batches before"),
    "recomputation": (Limit.RECOMPUTE, "Checkpoint fewer blocks"),
    "garbage collection": (Limit.COLLECTION, "calls gc.collect() in 9 of 9 steps. Remove it"),
    "checkpoint between steps": (Limit.BETWEEN, "lifetime` to see the time of checkpoints"),
    "core starvation": (Limit.CORES, "give the job more cores: 2 ranks share 1 core"),
    "latency": (Limit.LATENCY, "fewer and larger messages"),
    "huge embedding in the root": (Limit.FIRST_GATHER, "Make units of its large modules"),
    "backward prefetch order": (
        Limit.BACKWARD_ORDER,
        "Remove the calls of set_modules_to_backward_prefetch",
    ),
    "resharded root": (Limit.ROOT_GATHER, "Keep the root unsharded"),
}
"""The limit of each cause, and words of the first next step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    folder = tmp_path_factory.mktemp("causes")
    # A fresh interpreter, because the virtual clock must precede all imports.
    command = [sys.executable, "-W", "ignore", "-m", causes.__name__, str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])
    run_ranks(causes.__file__, folder, environment={"PYTHONWARNINGS": "ignore"})
    return folder


def counted(path: Path) -> dict[str, float]:
    """The counters of the rank with the largest cause."""
    ranks = [json.loads(file.read_text()) for file in path.glob("counted-*.json")]
    return dict(max(ranks, key=lambda rank: rank["size_ns"]))


@pytest.mark.parametrize("cause", EXPECTED)
def test_the_headline_names_the_cause_with_its_size(folder: Path, cause: str) -> None:
    limit, remedy = EXPECTED[cause]
    verdict = open_run(folder / cause / "run").summary().verdict
    count = counted(folder / cause)
    size_ns = count["size_ns"]
    if cause in LINKS:
        size_ns = count["step_ns"] - counted(folder / (cause + WITHOUT))["step_ns"]
    assert verdict.limit is limit, verdict
    found = re.search(r"(\d[\d.]*)%", verdict.sentence)
    assert found is not None
    whole_ns = count["step_ns"] + (size_ns if limit is Limit.BETWEEN else 0)
    assert float(found[1]) / 100 * whole_ns == pytest.approx(size_ns, rel=0.2)
    assert remedy in verdict.next_steps[0]
