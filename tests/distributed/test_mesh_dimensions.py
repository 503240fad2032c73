"""Counts and bytes of collectives by mesh dimension equal their closed form on real meshes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdp_inspect.analysis.stragglers.expert_load import LoadFinding
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.report.ranks_wording import render_ranks
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from tests.conftest import Torchrun
from tests.distributed.dimension_driver import (
    BATCH,
    HIDDEN,
    LATE_S,
    LAYOUTS,
    NUM_LAYERS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    WIDTH,
)
from tests.report.terminal_text import text_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("dimension_driver.py")
ON_EIGHT_RANKS = ("hsdp_tp", "pipeline_tp")
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


def batched(rank: int) -> Volume:
    """As `routed`; a rank has 2 or 6 rows of its own, and each expert receives 4."""
    own, of_expert = [2, 6][rank % 2], 4
    return Volume(4 * NUM_LAYERS, 2 * NUM_LAYERS * (own + of_expert) * WIDTH * FLOAT)


EXPERTS = {"fsdp_ep": routed, "uneven_batches": batched}
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
        case "fsdp_ep" | "uneven_batches":
            return {"shard": sharded(LAYER), "ep": EXPERTS[name](rank), "world": METRIC}
        case "fsdp_cp":
            return {"shard": sharded(LAYER), "cp": GATHERED, "world": METRIC}
        case "pipeline":
            return {"shard": Volume(2, 2 * LAYER), "pp": MESSAGES}
        case "ddp_tp":
            # A bucket is full with five of the six matrices.
            buckets = Volume(2, NUM_LAYERS * LAYER // 2 + ROOT)
            return {"replicate": buckets, "tp": TENSOR_PARALLEL, "world": METRIC}
        case "pipeline_tp":
            # The rows of the first stage need no gradient, so nothing is reduced in its backward.
            passes = [1, 2][rank // 4]
            tp = Volume(passes * NUM_MICROBATCHES, passes * ROWS)
            return {"shard": Volume(2, LAYER), "tp": tp, "pp": MESSAGES}
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
    "uneven_batches": {"shard": ("fsdp", "efsdp"), "ep": ("ep",), "world": ()},
    "fsdp_cp": {"shard": ("dp_shard",), "cp": ("cp",), "world": ()},
    "pipeline": {"shard": ("dp",), "pp": ("pp",)},
    "ddp_tp": {"replicate": ("dp",), "tp": ("tp",), "world": ()},
}
COORDINATES = {
    "fsdp_tp": {"shard": 1, "tp": 0},
    "hsdp": {"replicate": 1, "shard": 0},
    "unnamed": {"shard": 0},
    "fsdp_ep": {"shard": 2, "ep": 0},
    "uneven_batches": {"shard": 2, "ep": 0},
    "fsdp_cp": {"shard": 1, "cp": 0},
    "pipeline": {"shard": 0, "pp": 1},
    "ddp_tp": {"replicate": 1, "tp": 0},
    "hsdp_tp": {"replicate": 1, "shard": 1, "tp": 0},
    "pipeline_tp": {"shard": 1, "tp": 0, "pp": 1},
}
"""The position of rank 2; on eight ranks, of rank 6."""


@pytest.fixture(scope="module")
def four(run_ranks: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dimensions")
    late = ("late_in_tp", "slow_tp_group", "slow_stage")
    run_ranks(DRIVER, folder, *ON_FOUR_RANKS, *late, num_ranks=4)
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


@pytest.mark.parametrize("name", ["pipeline", "slow_stage"])
def test_a_schedule_that_reduces_after_all_backwards_follows_its_plan(
    four: Path, name: str
) -> None:
    check = open_run(four / name).summary().plan_check
    assert check is not None
    assert check.is_consistent, check.sentence


def rows_of_layers(rows: int) -> int:
    """Bytes of this number of rows in each layer."""
    return NUM_LAYERS * rows * WIDTH * FLOAT


@pytest.mark.parametrize(
    ("name", "own", "of_expert", "finding"),
    [
        ("fsdp_ep", (4, 4), (2, 6), LoadFinding.CAUSE),
        ("uneven_batches", (2, 6), (4, 4), LoadFinding.OWN_TOKENS),
    ],
)
def test_the_messages_tell_a_loaded_expert_from_a_large_batch(
    four: Path, name: str, own: tuple[int, int], of_expert: tuple[int, int], finding: LoadFinding
) -> None:
    load = open_run(four / name).ranks().expert_load
    assert load is not None
    assert len(load.groups) == 2
    for group in load.groups:
        assert group.are_directions_known
        assert tuple(row.own_bytes for row in group.members) == tuple(map(rows_of_layers, own))
        assert tuple(row.expert_bytes for row in group.members) == tuple(
            map(rows_of_layers, of_expert)
        )
        assert group.finding is finding
        assert group.busiest_rank == group.members[1].rank
        assert group.imbalance_ratio == 1.5


def late_along(run: Run) -> dict[str, tuple[tuple[int, ...], str]]:
    """The late ranks of each dimension with a meaning, and their place."""
    waits = run.ranks().dimension_waits
    return {
        row.dimension: (row.late_ranks, row.late_place) for row in waits if row.dimension != "world"
    }


def check_straggler(run: Run, rank: int, *directly: str) -> None:
    """The verdict, the command and the grid name the rank, and the waits for it by dimension."""
    ranks = run.ranks()
    assert ranks.straggler is not None
    assert ranks.straggler.rank == rank
    slept_ns = NUM_LAYERS * LATE_S * 1e9
    for dimension in directly:
        assert ranks.straggler.waits_ns[dimension] > 0.5 * slept_ns
    grid = run.mesh_grid()
    assert grid.located is not None
    assert grid.located.ranks == (rank,)
    assert f"Rank {rank} is a straggler" in run.summary().verdict.sentence
    assert "Largest waits of a rank for it, per step: " in run.summary().verdict.why
    assert "Waits for late ranks by mesh dimension" in text_of(render_ranks(ranks))


def test_a_late_rank_delays_its_tp_group_which_delays_the_others(four: Path) -> None:
    run = open_run(four / "late_in_tp")
    assert late_along(run) == {"shard": ((2, 3), "shard 1"), "tp": ((3,), "shard 1, tp 1")}
    waits = {row.dimension: row.waiting_rank for row in run.ranks().dimension_waits}
    assert waits["tp"] == 2
    assert waits["shard"] in (0, 1)
    check_straggler(run, 3, "tp", "shard")


@pytest.mark.parametrize(
    ("layout", "names", "slept_s", "is_upper_bound"),
    [
        ("slow_tp_group", ("tp group of rank 2", "shard 1"), NUM_LAYERS * LATE_S, False),
        ("slow_stage", ("pp 1",), NUM_MICROBATCHES * LATE_S, True),
    ],
)
def test_a_slow_group_is_named_with_its_cost(
    four: Path, layout: str, names: tuple[str, ...], slept_s: float, is_upper_bound: bool
) -> None:
    run = open_run(four / layout)
    ranks = run.ranks()
    group = ranks.slow_group
    assert group is not None, ranks.straggler_refusal
    assert ranks.straggler is None
    assert (group.names, group.ranks) == (names, (2, 3))
    assert (group.meanwhile, bool(group.bound_because)) == ("forward", is_upper_bound)
    assert group.cost_ns > 0.5 * slept_s * 1e9
    grid = run.mesh_grid()
    assert grid.located is not None
    assert grid.located.names == names
    verdict = run.summary().verdict
    assert verdict.limit is Limit.SLOW_GROUP
    assert names[0] in verdict.sentence.lower()
    assert "ranks 2-3" in verdict.because
    assert run.advise().findings[0].sentence == verdict.sentence


@pytest.mark.slow
def test_three_dimensions_equal_their_closed_form(run_ranks: Torchrun, tmp_path: Path) -> None:
    run_ranks(DRIVER, tmp_path, *ON_EIGHT_RANKS, "late_in_hsdp_tp", num_ranks=8)
    for name in ON_EIGHT_RANKS:
        run = open_run(tmp_path / name)
        check_volumes(run, name)
        check_losses(tmp_path, name, 8)
        assert run.ranks_recorded[6].coordinates == COORDINATES[name]
    run = open_run(tmp_path / "late_in_hsdp_tp")
    assert late_along(run) == {
        "replicate": ((4, 5, 6, 7), "replicate 1"),
        "shard": ((4, 5), "replicate 1, shard 0"),
        "tp": ((5,), "replicate 1, shard 0, tp 1"),
    }
    check_straggler(run, 5, "tp", "shard")
