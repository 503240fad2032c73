"""Ranks by two dimensions of the mesh: the layout, and the ranks that stand out."""

from math import isnan

import pytest

from fsdp_inspect.analysis.mesh_dimensions import LOCAL_RANK, list_axes
from fsdp_inspect.analysis.mesh_grid import measure_mesh_grid
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.report.ranks_wording import describe_location
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder, run_on

WORLD_SIZE = 8
GROUPS = [
    ProcessGroup(index=0, name="0", ranks=[0, 2], role="shard"),
    ProcessGroup(index=1, name="1", ranks=[0, 1], dimension="tp"),
    ProcessGroup(index=2, name="2", ranks=[0, 4], dimension="pp"),
]


def run_of(work, *, groups=None, hosts=None):
    """A run whose ranks work for the given times, in two steps of 1000 ns."""
    builder = RunBuilder(
        ("",), world_size=len(work), process_groups=GROUPS if groups is None else groups
    )
    for rank, duration in enumerate(work):
        own = builder.rank(rank)
        own.record = {"host": (hosts or ["a"] * len(work))[rank], "local_rank": rank % 4}
        for step in range(2):
            begin = 1000 * step
            own.step(step, begin, begin + 1000)
            own.forward("", begin, begin + duration)
            end = begin + 1000
            own.all_gather("", begin + duration, end, need=begin + duration, sequence=step)
    return builder.build()


def grid_of(work, rows=None, columns=None, **run):
    built = run_of(work, **run)
    ranks = measure_ranks(built).ranks
    return measure_mesh_grid(built, ranks, rows=rows, columns=columns)


def test_the_axes_are_the_dimensions_with_several_places():
    assert list_axes(run_of([100] * 8)) == ["pp", "shard", "tp", LOCAL_RANK]
    hosts = ["a"] * 4 + ["b"] * 4
    assert "node" in list_axes(run_of([100] * 8, hosts=hosts))


def test_a_cell_is_the_median_of_its_ranks():
    grid = grid_of([100, 200, 300, 400, 500, 600, 700, 800], "pp", "tp")
    assert (grid.row_places, grid.column_places) == (("0", "1"), ("0", "1"))
    assert grid.ranks == (((0, 2), (1, 3)), ((4, 6), (5, 7)))
    assert grid.values == ((200, 300), (600, 700))


def test_a_slow_stage_is_located():
    grid = grid_of([100, 110, 105, 100, 300, 310, 290, 300])
    assert grid.located is not None
    assert grid.located.names == ("pp 1",)
    assert grid.located.ranks == (4, 5, 6, 7)
    assert describe_location(grid) == (
        "Highest own work: pp 1. Its median is 300 ns; that of all other ranks is 102 ns."
    )


def test_a_slow_group_of_tensor_parallelism_is_located():
    located = grid_of([100, 110, 300, 310, 100, 110, 105, 100]).located
    assert located is not None
    assert located.names == ("tp group of rank 2",)


def test_a_slow_node_is_located_with_its_other_name():
    hosts = ["a"] * 4 + ["b"] * 4
    located = grid_of([100] * 4 + [300] * 4, hosts=hosts).located
    assert located is not None
    assert located.names == ("pp 1", "node b")


def test_one_slow_rank_is_a_rank():
    located = grid_of([100] * 7 + [300]).located
    assert located is not None
    assert located.names == ("rank 7",)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param([100] * 8, id="equal"),
        pytest.param([100, 101, 102, 103, 104, 104, 104, 104], id="a little more"),
        pytest.param([300, 100, 100, 100, 100, 100, 100, 300], id="no dimension fits"),
        pytest.param([300] * 6 + [100] * 2, id="most ranks"),
    ],
)
def test_nothing_is_located_without_evidence(work):
    grid = grid_of(work)
    assert grid.located is None
    assert "is above all others in" in describe_location(grid)


def test_nothing_is_said_about_ranks_without_a_value():
    run = run_on(["a", "b"], source="imported")
    assert describe_location(measure_mesh_grid(run, measure_ranks(run).ranks)) == (
        "Own work is unknown for all ranks."
    )


def test_unknown_dimensions_and_metrics_are_rejected():
    run = run_of([100] * 8)
    rows = measure_ranks(run).ranks
    with pytest.raises(ValueError, match="Unknown mesh dimension 'ep'"):
        measure_mesh_grid(run, rows, rows="ep")
    with pytest.raises(ValueError, match="Unsupported metric 'speed'"):
        measure_mesh_grid(run, rows, metric="speed")


def test_an_empty_cell_has_no_value():
    groups = [
        ProcessGroup(index=0, name="0", ranks=[0, 1, 2, 3], role="shard"),
        ProcessGroup(index=1, name="1", ranks=[0, 1], dimension="ep"),
    ]
    grid = grid_of([100] * 4, "shard", "ep", groups=groups)
    assert isnan(grid.values[0][1])
    assert grid.ranks[0] == ((0,), ())


def test_ranks_of_an_old_run_have_places_by_the_groups_of_rank_0():
    rows = measure_ranks(run_of([100] * 8)).ranks
    assert rows[5].coordinates == {"shard": 0, "tp": 1, "pp": 1}
    assert rows[5].place == "shard 0, tp 1, pp 1"


def test_exposed_times_along_the_dimensions_add_up():
    for row in measure_ranks(run_of([100, 200] * 4)).ranks:
        assert sum(each.exposed_ns for each in row.dimensions) == row.exposed_ns
        assert row.exposed_along("shard") == row.exposed_ns
        assert row.exposed_along("tp") is None
