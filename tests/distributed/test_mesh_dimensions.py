"""Counts and bytes of collectives by mesh dimension equal their closed form on real meshes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdp_inspect.run import Run, open_run
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from tests.conftest import Torchrun
from tests.distributed.dimension_driver import (
    BATCH,
    HIDDEN,
    LAYOUTS,
    NUM_LAYERS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    WIDTH,
)

pytestmark = pytest.mark.distributed

DRIVER = Path(__file__).with_name("dimension_driver.py")
ON_EIGHT_RANKS = ("hsdp_tp",)
ON_FOUR_RANKS = tuple(name for name in LAYOUTS if name not in ON_EIGHT_RANKS)
FLOAT = 4
LAYER = 2 * WIDTH * HIDDEN * FLOAT
"""Bytes of the parameters of a layer."""
ROOT = 2 * WIDTH * WIDTH * FLOAT
"""Bytes of the stem and the head, which the root unit owns."""
ROWS = BATCH * WIDTH * FLOAT
"""Bytes of the hidden states of a rank."""


class Volume(NamedTuple):
    """The number and bytes of a step's collectives."""

    count: int
    bytes: int


def sharded(layer: int) -> Volume:
    """Each layer is gathered in forward and backward and reduced once; the root gathers once."""
    return Volume(
        2 * NUM_LAYERS + 1 + NUM_LAYERS + 1,
        NUM_LAYERS * 2 * layer + ROOT + NUM_LAYERS * layer + ROOT,
    )


def replicated(layer: int, shards: int) -> Volume:
    """The collectives over replicas: the reduced shard of each unit."""
    return Volume(NUM_LAYERS + 1, (NUM_LAYERS * layer + ROOT) // shards)


TENSOR_PARALLEL = Volume(2 * NUM_LAYERS, 2 * NUM_LAYERS * ROWS)
"""An all-reduce of the output in forward, and one of the input's gradient in backward."""
METRIC = Volume(1, FLOAT)
"""The all-reduce of the loss."""


def routed(rank: int) -> Volume:
    """Two all-to-alls per layer in forward and in backward; half of them carry the expert's rows.

    The expert of the first rank of `ep` receives 1 row of each rank, and the expert of the second
    receives 3 rows.
    """
    of_expert = [2, 6][rank % 2] * WIDTH * FLOAT
    return Volume(4 * NUM_LAYERS, 2 * NUM_LAYERS * (ROWS + of_expert))


GATHERED = Volume(2 * NUM_LAYERS, 2 * NUM_LAYERS * 2 * ROWS)
"""An all-gather of the rows of both ranks in forward, and its reduce-scatter in backward."""
MESSAGES = Volume(2 * NUM_MICROBATCHES, 2 * ROWS)
"""Each stage sends or receives each microbatch in forward, and its gradient in backward."""


def expected(name: str, rank: int) -> dict[str, Volume]:
    """Collectives of a step by dimension of the mesh, from the shapes of the model."""
    match name:
        case "fsdp_tp":
            return {"shard": sharded(LAYER // 2), "tp": TENSOR_PARALLEL, "world": METRIC}
        case "hsdp":
            return {
                "replicate": replicated(LAYER, 2),
                "shard": sharded(LAYER),
                "world": METRIC,
            }
        case "unnamed":
            shard = sharded(LAYER)
            with_metric = Volume(shard.count + 1, shard.bytes + FLOAT)
            return {"shard": with_metric, "other": Volume(1, 3 * FLOAT)}
        case "fsdp_ep":
            return {"shard": sharded(LAYER), "ep": routed(rank), "world": METRIC}
        case "fsdp_cp":
            return {"shard": sharded(LAYER), "cp": GATHERED, "world": METRIC}
        case "pipeline":
            return {"shard": Volume(2, 2 * LAYER), "pp": MESSAGES}
        case "hsdp_tp":
            return {
                "replicate": replicated(LAYER // 2, 2),
                "shard": sharded(LAYER // 2),
                "tp": TENSOR_PARALLEL,
                "world": METRIC,
            }
    raise ValueError(f"No closed form for {name!r}.")


NAMES = {
    "fsdp_tp": {"shard": ("dp",), "tp": ("tp",), "world": ()},
    "hsdp": {"shard": ("dp_shard",), "replicate": ("dp_replicate",), "world": ()},
    "unnamed": {"shard": (), "other": ()},
    "fsdp_ep": {"shard": ("fsdp", "efsdp"), "ep": ("ep",), "world": ()},
    "fsdp_cp": {"shard": ("dp_shard",), "cp": ("cp",), "world": ()},
    "pipeline": {"shard": ("dp",), "pp": ("pp",)},
}
COORDINATES = {
    "fsdp_tp": {"shard": 1, "tp": 0},
    "hsdp": {"replicate": 1, "shard": 0},
    "unnamed": {"shard": 0},
    "fsdp_ep": {"shard": 2, "ep": 0},
    "fsdp_cp": {"shard": 1, "cp": 0},
    "pipeline": {"shard": 0, "pp": 1},
}
"""The position of rank 2."""


@pytest.fixture(scope="module")
def four(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dimensions")
    run_ranks(DRIVER, folder, *ON_FOUR_RANKS, num_ranks=4, timeout_s=240)
    return folder


def check_volumes(run: Run, name: str) -> None:
    """Check the closed form on every rank, for the breakdown and for the recorded events."""
    for step in run.breakdown().ranks:
        volumes = {
            row.dimension: Volume(row.count_per_step, row.bytes_per_step) for row in step.dimensions
        }
        assert volumes == expected(name, step.rank)
        events = run.source.events(step.rank, steps=[NUM_STEPS - 1], kinds=sorted(COLLECTIVES))
        assert len(events) == sum(each.count for each in volumes.values())
        assert events.bytes.sum() == sum(each.bytes for each in volumes.values())


def check_losses(folder: Path, name: str, num_ranks: int) -> None:
    for rank in range(num_ranks):
        losses = json.loads((folder / f"{name}-{rank}.json").read_text())
        assert losses["recorded"] == losses["plain"]
        assert len(losses["plain"]) == NUM_STEPS


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_counts_and_bytes_of_each_dimension_equal_their_closed_form(four: Path, name: str) -> None:
    check_volumes(open_run(four / name), name)


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_losses_are_bit_identical_with_and_without_the_recorder(four: Path, name: str) -> None:
    check_losses(four, name, 4)


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_no_recorder_reports_a_problem(four: Path, name: str) -> None:
    assert [record.problems for record in open_run(four / name).ranks_recorded] == [[]] * 4


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_dimensions_have_the_names_of_the_mesh(four: Path, name: str) -> None:
    run = open_run(four / name)
    for step in run.breakdown().ranks:
        assert {row.dimension: row.names for row in step.dimensions} == NAMES[name]
    assert run.ranks_recorded[2].coordinates == COORDINATES[name]


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_exposed_times_of_the_dimensions_add_up(four: Path, name: str) -> None:
    run = open_run(four / name)
    for step in run.breakdown().ranks:
        assert sum(row.exposed_ns for row in step.dimensions) == step.exposed_ns
    exposed = run.exposed().exposed
    assert exposed is not None
    assert sum(row.time.exposed_ns for row in exposed.dimensions) == exposed.exposed_ns
    for row in exposed.dimensions:
        assert sum(row.causes_ns.values()) == row.time.exposed_ns
    by_dimension = {row.time.dimension for row in exposed.dimensions}
    assert {owner.dimension for owner in exposed.owners} == by_dimension


def test_only_a_dimension_that_ranks_suggest_is_inferred(four: Path) -> None:
    for name in ON_FOUR_RANKS:
        step = open_run(four / name).breakdown().shown
        assert step is not None
        inferred = {row.dimension for row in step.dimensions if row.is_inferred}
        assert inferred == ({"shard"} if name == "unnamed" else set())


def test_the_backward_of_a_functional_collective_is_recorded(four: Path) -> None:
    events = open_run(four / "fsdp_ep").source.events(
        0, steps=[NUM_STEPS - 1], kinds=[EventKind.ALL_TO_ALL]
    )
    assert len(events) == 4 * NUM_LAYERS
    events = open_run(four / "fsdp_cp").source.events(
        0, steps=[NUM_STEPS - 1], kinds=[EventKind.REDUCE_SCATTER]
    )
    assert (events.unit < 0).sum() == NUM_LAYERS


@pytest.mark.slow
def test_three_dimensions_equal_their_closed_form(run_ranks: Torchrun, tmp_path: Path) -> None:
    run_ranks(DRIVER, tmp_path, *ON_EIGHT_RANKS, num_ranks=8, timeout_s=300)
    for name in ON_EIGHT_RANKS:
        run = open_run(tmp_path / name)
        check_volumes(run, name)
        check_losses(tmp_path, name, 8)
        assert run.ranks_recorded[6].coordinates == {"replicate": 1, "shard": 1, "tp": 0}
