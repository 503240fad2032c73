"""The memory of emulated ranks equals that of real ranks, byte for byte, under many plans."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.trace.codes import MemoryPoint
from tests.conftest import Torchrun
from tests.distributed.memory_plans import PLANS, train_plans

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("memory_plans.py")
ON_FOUR_RANKS = ("block", "hsdp", "integer")
ON_TWO_RANKS = tuple(plan for plan in PLANS if plan not in ON_FOUR_RANKS)

Samples = dict[str, list[int]]
Pair = Callable[[int, str], tuple[Samples, Samples]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Pair:
    """The samples of real and of emulated ranks under a plan."""
    folder = tmp_path_factory.mktemp("memory")
    for num_ranks, plans in ((2, ON_TWO_RANKS), (4, ON_FOUR_RANKS)):
        real, emulated = folder / f"real{num_ranks}", folder / f"emulated{num_ranks}"
        real.mkdir()
        emulated.mkdir()
        run_ranks(DRIVER, real, *plans, num_ranks=num_ranks)
        train_plans(emulated, plans, f"world_size={num_ranks},bandwidth=10GB/s")

    def read(num_ranks: int, plan: str) -> tuple[Samples, Samples]:
        real, emulated = (
            json.loads((folder / f"{kind}{num_ranks}" / f"{plan}.json").read_text())
            for kind in ("real", "emulated")
        )
        return real, emulated

    return read


CASES = [(2, plan) for plan in ON_TWO_RANKS] + [(4, plan) for plan in ON_FOUR_RANKS]


@pytest.mark.parametrize(("num_ranks", "plan"), CASES)
def test_the_peak_is_that_of_real_ranks(trained: Pair, num_ranks: int, plan: str) -> None:
    real, emulated = trained(num_ranks, plan)

    assert max(emulated["peak_allocated"]) == max(real["peak_allocated"]) > 0


@pytest.mark.parametrize(("num_ranks", "plan"), CASES)
def test_the_peak_is_made_of_the_same(trained: Pair, num_ranks: int, plan: str) -> None:
    real, emulated = trained(num_ranks, plan)

    assert peaks(emulated) == peaks(real)


def peaks(samples: Samples) -> list[dict[str, Any]]:
    """The rows that describe the peak: its position, and the live bytes by category."""
    rows = [dict(zip(samples, row, strict=True)) for row in zip(*samples.values(), strict=True)]
    return [row for row in rows if row["point"] == MemoryPoint.PEAK]
