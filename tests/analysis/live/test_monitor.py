"""Monitors get the same numbers of a running run and of an ended one."""

import numpy as np

from fsdp_inspect.analysis.live.feed import LiveState
from fsdp_inspect.analysis.live.monitor import (
    MOST_RANKS,
    Monitor,
    StepRows,
    choose_ranks,
    measure_rank_numbers,
    monitor_run,
)
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS, LiveRank
from fsdp_inspect.analysis.step_selection import steps_by_rank
from fsdp_inspect.analysis.throughput import measure_throughput
from fsdp_inspect.store.folder import create_run
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import DeviceTable, MemoryTable, ScalarTable
from tests.analysis.live.test_feed import write_steps
from tests.builders import RunBuilder, add_steady_step, steady_run
from tests.store.run_files import make_manifest


def test_a_run_says_live_what_it_says_when_it_is_over(tmp_path):
    path = tmp_path / "run"
    create_run(path, make_manifest(warmup_steps=0, memory_steps=[]))
    writers = [write_steps(path, rank, num_steps=4) for rank in (0, 1)]
    live = Monitor([0, 1]).look(open_run(path))
    for writer in writers:
        writer.close(RunStatus.COMPLETE)
    over = monitor_run(open_run(path), [0, 1])

    assert (live.state, over.state) == (LiveState.RUNNING, LiveState.ENDED)
    for then, now in zip(live.ranks, over.ranks, strict=True):
        assert then.numbers == now.numbers
        assert (then.step_method, then.gather_method) == (now.step_method, now.gather_method)
    assert live.ranks[0].numbers.num_steps == 4


def test_trackers_get_the_tokens_of_all_ranks_as_the_summary_does(tmp_path):
    path = tmp_path / "run"
    create_run(path, make_manifest(warmup_steps=0, memory_steps=[]))
    writer = write_steps(path, 0, num_steps=3, scalar_names=["throughput(tps)", "mfu(%)"])
    for name, value in enumerate((300.0, 40.0)):
        row = {"step": 1, "name": name, "time_ns": 0, "value": value}
        writer.scalars.append(tuple(row[column] for column in ScalarTable.DTYPES))
    writer.flush()
    run = open_run(path)
    last = list(StepRows(run).read_new(run, is_last=True))[-1]
    writer.close(RunStatus.COMPLETE)

    assert (last.values["tokens_per_s"], last.values["mfu_ratio"]) == (600, 0.4)
    summed = measure_throughput(open_run(path))
    assert (summed.tokens_per_s, summed.mfu_ratio) == (600, 0.4)


def test_trackers_get_the_steps_of_the_next_attempt(tmp_path):
    path, manifest = tmp_path / "run", make_manifest(warmup_steps=0, memory_steps=[])
    create_run(path, manifest)
    first = write_steps(path, 0, num_steps=9)
    rows = StepRows(open_run(path))
    assert [row.step for row in rows.read_new(open_run(path), is_last=False)] == [*range(8)]
    first.close(RunStatus.FAILED, "no memory left")
    second = write_steps(path, 0, num_steps=4, attempt=create_run(path, manifest))
    assert [row.step for row in rows.read_new(open_run(path), is_last=False)] == [0, 1, 2]
    second.close(RunStatus.COMPLETE)


def test_live_numbers_are_of_the_last_steps_and_never_of_memory_steps():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for number in range(30):
        add_steady_step(rank, number, start=1000 * number, is_memory_step=number == 28)
    events = builder.build().events(0)
    live = LiveRank()
    for step in range(30):
        new = events.where(events.step == step)
        live.add(new, MemoryTable.empty(), DeviceTable.empty(), ScalarTable.empty())

    view = live.view()
    for rows in (view.recent, view.detailed):
        steps = np.unique(rows.step).tolist()
        assert steps == [*range(9, 28), 29]
        assert len(steps) == TYPICAL_STEPS


def test_plain_steps_count_for_the_step_time_and_data_but_not_for_communication():
    builder = RunBuilder(world_size=1)
    rank, start = builder.rank(0), 4000
    for number in range(4):
        add_steady_step(rank, number, start=1000 * number)
    for number in range(4, 4 + TYPICAL_STEPS):
        rank.step(number, start, start + 3000, is_plain=True)
        rank.data(start, start + 500)
        start += 3000
    live, run = LiveRank(), builder.build()
    live.add(run.events(0), MemoryTable.empty(), DeviceTable.empty(), ScalarTable.empty())
    view, units = live.view(), run.manifest.units
    last, detailed = next(steps_by_rank(view.recent)), next(steps_by_rank(view.detailed))
    numbers, alone = (measure_rank_numbers(each, detailed, units) for each in (last, detailed))

    assert (numbers.num_steps, numbers.step_time_ns, numbers.data_ns) == (20, 3000, 500)
    assert numbers.step_time_ns == view.typical_step_ns
    assert (numbers.exposed_ns, numbers.units) == (alone.exposed_ns, alone.units)
    assert measure_rank_numbers(last, None, units).exposed_ns is None


def test_a_live_run_names_its_last_step_and_the_steps_behind_its_communication(tmp_path):
    path = tmp_path / "run"
    create_run(path, make_manifest(warmup_steps=0, memory_steps=[]))
    writer = write_steps(path, 0, num_steps=4, num_plain=TYPICAL_STEPS)
    live = Monitor([0]).look(open_run(path))
    writer.close(RunStatus.COMPLETE)
    over = monitor_run(open_run(path), [0])

    assert live.over == "the last 20 steps"
    assert live.detailed == "the last 4 detailed steps (0 to 3)"
    assert [run.ranks[0].last_step for run in (live, over)] == [23, 23]
    assert [run.ranks[0].gather_method for run in (live, over)] == ["measured"] * 2


def test_few_ranks_are_told_unless_others_are_asked_for():
    run = steady_run(world_size=20, num_steps=1)

    assert choose_ranks(run, None) == tuple(range(MOST_RANKS))
    assert choose_ranks(run, [19, 3]) == (3, 19)
