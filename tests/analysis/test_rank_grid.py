import numpy as np
import pytest

from fsdp_inspect.analysis.rank_grid import GRID_METRICS, GridCell, measure_rank_grid
from fsdp_inspect.trace.codes import MemoryPoint
from tests.analysis.stragglers.test_ranks import build_run
from tests.builders import RunBuilder, steady_run

NAN = float("nan")


def uneven_run(**manifest):
    """Rank 0 has three steps, rank 2 has two of them, and rank 1 has no data."""
    builder = RunBuilder(world_size=3, **manifest)
    for number, lengths in ((0, (50, 10, 20)), (2, (90, 30))):
        rank, now = builder.rank(number), 0
        for step, length in enumerate(lengths):
            rank.step(step, now, now + length)
            rank.memory(MemoryPoint.STEP_END, 100 * length)
            now += length
    return builder.build()


def test_every_rank_has_a_row_and_what_is_missing_stays_missing():
    grid = measure_rank_grid(uneven_run(), metric="step_time_ns")
    assert (grid.ranks, grid.steps) == ((0, 2), (0, 1, 2))
    np.testing.assert_array_equal(grid.values, [[50, 10, 20], [90, 30, NAN]])
    np.testing.assert_array_equal(grid.middle, [70, 20, 20])


def test_the_highest_is_of_the_steps_that_count():
    grid = measure_rank_grid(uneven_run(warmup_steps=1), metric="step_time_ns")
    assert grid.left_out == (0,)
    assert grid.highest == GridCell(rank=2, step=1, value=30)
    assert 10 <= grid.low <= grid.high <= 30


def test_where_only_steps_that_are_left_out_exist_they_count():
    grid = measure_rank_grid(uneven_run(warmup_steps=3), metric="step_time_ns")
    assert grid.left_out == ()
    assert grid.highest == GridCell(rank=2, step=0, value=90)


def test_the_highest_peak_is_one_of_all_steps():
    grid = measure_rank_grid(uneven_run(warmup_steps=1), metric="peak_allocated_bytes")
    assert grid.left_out == ()
    assert grid.highest == GridCell(rank=2, step=0, value=9000)


def test_memory_is_laid_out_in_bytes():
    grid = measure_rank_grid(uneven_run(), metric="peak_allocated_bytes")
    np.testing.assert_array_equal(grid.values, [[5000, 1000, 2000], [9000, 3000, NAN]])


def test_exposed_and_own_work_add_up_to_the_step():
    run = build_run((30, 10), (20, 40))
    exposed = measure_rank_grid(run, metric="exposed_ns").values
    own = measure_rank_grid(run, metric="own_work_ns").values
    np.testing.assert_array_equal(exposed, [[10, 30], [30, 10]])
    np.testing.assert_array_equal(own + exposed, [[40, 50], [40, 50]])


def test_waits_of_plain_steps_are_unknown_and_so_is_own_work():
    builder = RunBuilder(world_size=1)
    for step in range(3):
        builder.rank(0).step(step, 10 * step, 10 * step + 10, is_plain=step == 1)
    run = builder.build()
    for metric, known in (("exposed_ns", 0), ("own_work_ns", 10)):
        grid = measure_rank_grid(run, metric=metric)
        np.testing.assert_array_equal(grid.values, [[known, NAN, known]])
    np.testing.assert_array_equal(measure_rank_grid(run, metric="step_time_ns").values, [[10] * 3])


def test_lateness_is_the_time_after_the_first_rank():
    grid = measure_rank_grid(build_run((30, 10), (20, 40)), metric="lateness_ns")
    np.testing.assert_array_equal(grid.values, [[20, 0], [0, 20]])
    assert grid.refusals == ()


def test_lateness_of_clocks_that_do_not_compare_is_missing_with_the_reason():
    run = build_run((30, 10), hosts=("a", "b"))
    grid = measure_rank_grid(run, metric="lateness_ns")
    assert np.isnan(grid.values).all()
    assert grid.highest is None
    assert len(grid.refusals) == 1


def test_one_rank_is_a_row():
    grid = measure_rank_grid(uneven_run(), metric="step_time_ns")
    np.testing.assert_array_equal(grid.of_rank(2), [90, 30, NAN])
    assert grid.of_rank(1) is None


@pytest.mark.parametrize("measure", GRID_METRICS)
def test_a_run_without_steps_has_an_empty_grid(measure):
    grid = measure_rank_grid(RunBuilder().build(), metric=measure)
    assert grid.values.shape == (0, 0)
    assert grid.highest is None


def test_a_grid_of_anything_else_is_refused():
    with pytest.raises(ValueError, match="Unsupported metric 'speed'"):
        measure_rank_grid(steady_run(), metric="speed")
