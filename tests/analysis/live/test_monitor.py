"""Monitors get the same numbers of a running run and of an ended one."""

import numpy as np

from fsdp_inspect.analysis.live.feed import LiveState
from fsdp_inspect.analysis.live.monitor import (
    MOST_RANKS,
    Monitor,
    StepRows,
    choose_ranks,
    monitor_run,
)
from fsdp_inspect.analysis.live.view import TYPICAL_STEPS, LiveRank
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
    live = Monitor(path, 0, [0, 1]).look(open_run(path))
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

    steps = np.unique(live.view().recent.step).tolist()
    assert steps == [*range(9, 28), 29]
    assert len(steps) == TYPICAL_STEPS


def test_few_ranks_are_told_unless_others_are_asked_for():
    run = steady_run(world_size=20, num_steps=1)

    assert choose_ranks(run, None) == tuple(range(MOST_RANKS))
    assert choose_ranks(run, [19, 3]) == (3, 19)
