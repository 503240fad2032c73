"""Steps side by side do not touch, and are restored unchanged."""

import numpy as np
import pytest

from fsdp_inspect.analysis.wait_causes import split_waits
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace import intervals as side_by_side
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.intervals import Intervals, lay_side_by_side
from fsdp_inspect.trace.tables import EventTable, Table
from tests.builders import steady_run
from tests.store.run_files import assert_same_rows

ROW = {**dict.fromkeys(EventTable.DTYPES, 0), "kind": EventKind.FORWARD, "need_ns": -1}


def event(step: int, start: int, end: int, **columns: int) -> dict[str, int]:
    return {**ROW, "step": step, "issue_ns": start, "start_ns": start, "end_ns": end, **columns}


def test_steps_that_overlap_in_time_lie_apart_and_keep_their_lengths():
    rows = [event(7, 100, 200), event(3, 150, 400, need_ns=390), event(7, 200, 250, issue_ns=90)]
    [axis] = lay_side_by_side(EventTable.from_rows(rows))
    assert axis.steps.tolist() == [3, 7]
    assert axis.positions.tolist() == [1, 0, 2]
    assert axis.place.tolist() == [0, 1, 1]
    lengths = axis.events.end_ns - axis.events.start_ns
    assert lengths.tolist() == [250, 100, 50]
    assert axis.events.end_ns[0] < axis.begin_ns[1] == axis.events.issue_ns[2]
    assert (axis.events.need_ns - [axis.shift_ns[0], 0, 0]).tolist() == [390, -1, -1]
    spans = Intervals.of(axis.events.start_ns, axis.events.end_ns)
    assert axis.duration_ns(spans).tolist() == [250, 150]


def test_steps_with_kernels_lie_on_an_axis_of_their_own():
    rows = [event(0, 0, 5), event(1, 5, 9), event(1, 6, 7, kind=EventKind.COMPUTE), event(2, 9, 10)]
    axes = list(lay_side_by_side(EventTable.from_rows(rows)))
    assert [axis.steps.tolist() for axis in axes] == [[0, 2], [1]]
    assert list(lay_side_by_side(EventTable.empty())) == []


def test_steps_whose_times_fill_an_axis_have_one_each():
    long = 1 << 61
    rows = [event(step, 0, 10, issue_ns=-long) for step in range(3)]
    axes = list(lay_side_by_side(EventTable.from_rows(rows)))
    assert [axis.steps.tolist() for axis in axes] == [[0], [1], [2]]
    assert all(int(axis.events.end_ns.max()) == long + 10 for axis in axes)


@pytest.fixture(scope="module")
def events() -> EventTable:
    return steady_run(num_steps=6).events(0)


def _fields(table: object) -> dict[str, np.ndarray]:
    return {name: getattr(table, name) for name in table.__slots__}


def test_it_changes_no_number_how_many_steps_lie_side_by_side(
    events: EventTable, monkeypatch: pytest.MonkeyPatch
):
    rows, waits = reduce_rank(events, rank=0), split_waits(events)
    assert len(np.unique(rows.step)) == 6
    monkeypatch.setattr(side_by_side, "_MOST_EVENTS", 1)
    assert [len(axis.steps) for axis in lay_side_by_side(events)] == [1] * 6
    assert_same_rows(reduce_rank(events, rank=0), rows)
    for name, column in _fields(split_waits(events)).items():
        if isinstance(column, Table):
            assert_same_rows(column, getattr(waits, name))
        else:
            assert column.tolist() == getattr(waits, name).tolist()
