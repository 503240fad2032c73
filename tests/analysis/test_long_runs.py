"""Analyses of a long run read a limited number of its steps, and still agree with each other."""

import random
from dataclasses import fields

import numpy as np
import pytest

from fsdp_inspect.analysis.step_selection import inspected_rank, timed_rank, timed_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.statistics import middle_half, spread_blocks
from fsdp_inspect.store import compacted
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.reduction.timed_steps import MAX_TYPICAL_STEPS, choose_typical
from fsdp_inspect.trace.codes import EventKind
from tests.builders import RunBuilder
from tests.laws.test_typical_step_laws import check_one_number_per_quantity
from tests.studies.benchmarks.large_run import Shape, write_large_run

NUM_STEPS = 420
STEP_NS = 1_000


@pytest.fixture(scope="module")
def long_run():
    """Two ranks with steps of 1,000 to 1,060 ns and two all-gathers that are exposed or hidden."""
    builder, drawn = RunBuilder(["", "layers.0", "layers.1"], world_size=2), random.Random(7)
    for number in range(2):
        rank, begin = builder.rank(number), 0
        for step in range(NUM_STEPS):
            duration = STEP_NS + drawn.randrange(60)
            rank.step(step, begin, begin + duration)
            for place, unit in enumerate(("layers.0", "layers.1")):
                start = begin + 100 + 300 * place
                need = start + drawn.randrange(0, 90)
                rank.all_gather(unit, start, start + 80, need=need)
                rank.forward(unit, start + 90, start + 250)
            begin += duration
    return builder.build()


def test_every_analysis_of_a_long_run_shows_the_same_typical_step(long_run):
    check_one_number_per_quantity(long_run)


def test_the_typical_steps_of_a_long_run_are_blocks_of_the_middle_half(long_run):
    for member in timed_ranks(long_run).members:
        middle = np.flatnonzero(middle_half(member.step_time_ns))
        typical = np.flatnonzero(member.is_typical)
        places = np.searchsorted(middle, typical)
        assert middle[places].tolist() == typical.tolist()
        assert len(typical) == MAX_TYPICAL_STEPS
        assert (places[0], places[-1]) == (0, len(middle) - 1)
        assert (np.diff(places) > 1).sum() == 7


def test_the_steps_that_are_read_are_the_typical_ones(long_run):
    member, inspected = timed_rank(long_run), inspected_rank(long_run)
    typical = member.typical_steps.tolist()
    assert inspected.steps.tolist() == inspected.typical_steps.tolist() == typical
    assert np.unique(inspected.rows.step).tolist() == typical
    assert inspected.typical(inspected.step_time_ns) == member.typical(member.step_time_ns)


def test_a_run_of_192_timed_steps_is_read_as_a_whole():
    times = np.arange(192)
    assert choose_typical(times).sum() == MAX_TYPICAL_STEPS
    assert (choose_typical(times) == middle_half(times)).all()


def test_a_summary_reads_events_of_a_limited_number_of_steps(long_run):
    asked = []

    class WatchedRun(type(long_run)):
        def events(self, rank, *, steps=None, kinds=None):
            if set(kinds or ()) != {EventKind.STEP}:
                asked.append(None if steps is None else len(steps))
            return super().events(rank, steps=steps, kinds=kinds)

    parts = {field.name: getattr(long_run, field.name) for field in fields(long_run)}
    measure_summary(WatchedRun(**parts))
    assert asked
    assert all(number is not None and number <= MAX_TYPICAL_STEPS for number in asked)


@pytest.mark.parametrize(("count", "expected"), [(0, []), (5, [0, 1, 2, 3, 4]), (6, [*range(6)])])
def test_few_positions_are_all_chosen(count, expected):
    assert spread_blocks(count, num_blocks=2, length=3).tolist() == expected


def test_blocks_begin_at_the_start_and_end_at_the_end():
    assert spread_blocks(11, num_blocks=2, length=3).tolist() == [0, 1, 2, 8, 9, 10]


def test_a_stored_long_run_is_read_in_parts_with_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(compacted, "ROW_GROUP_ROWS", 500)
    path = write_large_run(tmp_path / "long", Shape(2, 240, 2), processes=1)
    whole, parts = open_run(path), open_run(path)
    steps = inspected_rank(parts).steps
    expected = whole.summary(ranks=[0])
    expected = expected.where(np.isin(expected.step, steps))
    found = parts.summary(ranks=[0], steps=steps.tolist())
    assert len(steps) < 240
    for name, values in expected.columns().items():
        assert getattr(found, name).tolist() == values.tolist()
