import numpy as np
import pytest

from fsdp_inspect.analysis.live.view import LiveMemory, LiveRank
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.tables import DeviceTable, EventTable, MemoryTable, ScalarTable
from tests.builders import RunBuilder

NOTHING = {
    "events": EventTable.empty(),
    "memory": MemoryTable.empty(),
    "devices": DeviceTable.empty(),
    "scalars": ScalarTable.empty(),
}
SECOND = 1_000_000_000


def run_of(num_steps, *, memory_steps=()):
    """Steps of 100 ns with 20 ns of exposed all-gather, one sample of memory each."""
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for step in range(num_steps):
        start = 100 * step
        rank.step(step, start, start + 100, is_memory_step=step in memory_steps)
        rank.all_gather("layers.0", start, start + 20, need=start)
        rank.memory(MemoryPoint.STEP_END, 1000 + step, phase=Phase.OUTSIDE, reserved=5000)
    return builder.build()


def feed(run, *, rows_at_once, live=None):
    live = live or LiveRank(memory_from="cuda_allocator")
    events, memory = run.events(0), run.memory(0)
    for start in range(0, len(events), rows_at_once):
        live.add(**{**NOTHING, "events": events.between(start, start + rows_at_once)})
    live.add(**{**NOTHING, "memory": memory})
    return live.view()


def device_rows(**columns):
    count = len(columns["time_ns"])
    missing = dict.fromkeys(DeviceTable.DTYPES, np.full(count, -1))
    return DeviceTable.from_columns({**missing, **{k: np.array(v) for k, v in columns.items()}})


def test_steps_are_the_same_however_the_rows_arrive():
    run = run_of(4)
    views = [feed(run, rows_at_once=size) for size in (1, 3, 100)]
    assert views[0].steps == views[1].steps == views[2].steps
    assert [(one.step, one.step_time_ns, one.exposed_ns) for one in views[0].steps] == [
        (0, 100, 20), (1, 100, 20), (2, 100, 20), (3, 100, 20),
    ]  # fmt: skip
    assert views[0].last_event_ns == 400


def test_a_row_that_comes_after_its_steps_end_is_counted():
    events = run_of(1).events(0)
    end_first = EventTable.concat([events.where(events.kind == 0), events.where(events.kind != 0)])
    live = LiveRank()
    live.add(**{**NOTHING, "events": end_first.between(0, 1)})
    assert live.view().steps[0].exposed_ns == 0
    live.add(**{**NOTHING, "events": end_first.between(1, 2)})
    assert live.view().steps[0].exposed_ns == 20


@pytest.mark.parametrize("rows_at_once", [50, 10_000])
def test_only_the_last_steps_are_kept(rows_at_once):
    view = feed(run_of(220), rows_at_once=rows_at_once)
    assert [view.steps[0].step, view.steps[-1].step, len(view.steps)] == [20, 219, 200]
    assert len(view.memory) == 200


def test_memory_steps_do_not_count_for_the_typical_step():
    builder = RunBuilder(world_size=1)
    for step, (start, end) in enumerate(((0, 100), (100, 9000), (9000, 9100))):
        builder.rank(0).step(step, start, end, is_memory_step=step == 1)
    view = feed(builder.build(), rows_at_once=9)
    assert view.typical_step_ns == 100
    assert [one.is_memory_step for one in view.steps] == [False, True, False]


def test_memory_is_the_highest_reading_of_each_step():
    view = feed(run_of(2), rows_at_once=9)
    assert view.memory == (LiveMemory(0, 1000, 5000), LiveMemory(1, 1001, 5000))


def test_it_is_stalled_after_ten_steps_and_twenty_seconds():
    view = feed(run_of(2), rows_at_once=9)
    assert not view.is_stalled(19 * SECOND)
    assert view.is_stalled(21 * SECOND)
    assert not LiveRank().view().is_stalled(21 * SECOND)


def test_the_machine_is_told_in_units_and_counters_as_rates():
    live = LiveRank()
    times = [0, 1 * SECOND, 3 * SECOND]
    rows = device_rows(
        time_ns=times,
        gpu_power_mw=[250_000, -1, 300_000],
        nvlink_tx_bytes=[100, 300, 50],
        run_delay_ns=[0, SECOND // 4, SECOND],
    )
    live.add(**{**NOTHING, "devices": rows})
    power, sent, delay = live.view().devices
    assert (power.unit, power.seconds, power.values) == ("W", (-3.0, 0.0), (250.0, 300.0))
    assert (sent.unit, sent.seconds, sent.values) == ("bytes/s", (-2.0,), (200.0,))
    assert (delay.unit, delay.values) == ("%", pytest.approx((25.0, 37.5)))


def test_the_last_logged_numbers_have_their_names():
    live = LiveRank(scalar_names=["loss"])
    rows = [{"step": step, "name": name, "time_ns": 0, "value": 1.5 * step}
            for step, name in ((1, 0), (2, 0), (2, 1))]  # fmt: skip
    live.add(**{**NOTHING, "scalars": ScalarTable.from_rows(rows)})
    assert [(one.name, one.step, one.value) for one in live.view().scalars] == [("loss", 2, 3.0)]
