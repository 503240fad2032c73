"""The memory curve of a step has the recorded readings and keeps every peak."""

import numpy as np
import pytest
from fsdp_inspect_app.timeline.memory import MemoryCurve, find_sampled_ranks, read_curve
from hypothesis import given, strategies as st

from fsdp_inspect.trace.tables import MemoryTable
from tests.app.synthetic import make_memory, make_run

GIB = 1 << 30


def curve_of(highest):
    n = len(highest)
    return MemoryCurve(
        time_ns=10 * np.arange(n),
        allocated=np.array(highest) - 1,
        highest=np.array(highest),
        reserved=np.full(n, -1),
        unit=np.arange(n, dtype=np.int16),
        phase=np.zeros(n, dtype=np.int8),
    )


def curves_of(run, step):
    sampled = find_sampled_ranks(run, step, range(2))
    return [read_curve(run, record, step, sampled) for record in run.ranks]


def test_the_readings_of_a_step_are_found_by_rank():
    run = make_run()
    assert find_sampled_ranks(run, 3, [0, 1]) == {0, 1}
    assert find_sampled_ranks(run, 3, [1]) == {1}
    curves = curves_of(run, 3)
    assert len(curves) == 2
    assert None not in curves
    assert curves[0].allocated.tolist() == [5 * GIB, 12 * GIB, 9 * GIB, 5 * GIB]
    assert (curves[0].peak, curves[0].top_bytes) == (1, 14 * GIB)


def test_a_peak_between_two_readings_belongs_to_the_later_one(monkeypatch):
    run = make_run()

    def with_peak(_, rank):
        memory = make_memory(rank, run.tables[rank])
        memory.peak_allocated[memory.step == 3] = [5 * GIB, 12 * GIB, 13 * GIB, 13 * GIB]
        return memory

    monkeypatch.setattr(type(run), "memory", with_peak)
    curve = curves_of(run, 3)[0]
    assert curve.highest.tolist() == [5 * GIB, 12 * GIB, 13 * GIB, 5 * GIB]
    assert curve.peak == 2


@pytest.mark.parametrize(("step", "sampled"), [(99, [0]), (3, []), (3, [7])])
def test_without_readings_there_is_no_curve(step, sampled):
    run = make_run()
    assert read_curve(run, run.ranks[0], step, sampled) is None


def test_of_a_rank_that_did_not_read_its_memory_nothing_is_opened(monkeypatch):
    run = make_run()
    monkeypatch.setattr(type(run), "memory", lambda *_: pytest.fail("its samples were opened"))
    assert read_curve(run, run.ranks[0], 3, [1]) is None


def test_a_run_without_memory_has_no_curve(monkeypatch):
    run = make_run()
    monkeypatch.setattr(type(run), "memory", lambda *_: MemoryTable.empty())
    assert curves_of(run, 3) == [None, None]


def test_a_window_shows_its_readings_and_one_on_either_side():
    thinned = curve_of([1] * 10).thinned(25, 45, most=100)
    assert thinned.time_ns.tolist() == [20, 30, 40, 50]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(2, 20))
def test_thinning_keeps_the_highest_reading_and_the_ends(highest, most):
    thinned = curve_of(highest).thinned(0, 10 * len(highest), most)
    assert len(thinned) <= most + 2
    assert thinned.highest.max() == max(highest)
    assert thinned.time_ns[0] == 0
    assert thinned.time_ns[-1] == 10 * (len(highest) - 1)
    assert (np.diff(thinned.time_ns) > 0).all()
