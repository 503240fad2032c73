"""Laws of exposed waits and their causes, over random schedules of one rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.bandwidth import measure_bandwidth
from fsdp_inspect.analysis.contention import measure_contention
from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.analysis.prefetch import measure_prefetch
from fsdp_inspect.analysis.wait_causes import NEEDED_KINDS, split_waits
from fsdp_inspect.results import to_plain
from fsdp_inspect.store.reduction.step_parts import reduce_rank
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Method, Phase, Stream
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder
from tests.cases import examples

STEP_NS = 60
UNITS = ("", "layers.0", "layers.1")
HAPPENINGS = sorted(NEEDED_KINDS - {EventKind.STEP, EventKind.COMPUTE} | {EventKind.FORWARD})
EXAMPLES = settings(max_examples=examples(40), deadline=None)
MOMENTS = st.integers(0, STEP_NS)


@st.composite
def events(draw, kinds):
    issue, start, end = sorted(draw(st.tuples(MOMENTS, MOMENTS, MOMENTS)))
    return {
        "kind": draw(st.sampled_from(kinds)),
        "start": start,
        "end": end,
        "unit": draw(st.sampled_from((None, *UNITS))),
        "phase": draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.OUTSIDE])),
        "stream": draw(st.sampled_from(list(Stream))),
        "group": draw(st.integers(-1, 1)),
        "method": draw(st.sampled_from([Method.MEASURED, Method.HOST_BLOCKING])),
        "microbatch": draw(st.integers(0, 1)),
        "issue_ns": issue,
        "need_ns": draw(st.sampled_from([-1]) | MOMENTS),
    }


RECORDED = st.lists(st.lists(events(HAPPENINGS), max_size=14), min_size=1, max_size=3)
FROM_KERNELS = st.lists(
    st.lists(events([*HAPPENINGS, EventKind.COMPUTE]), max_size=14), min_size=1, max_size=3
)
SCHEDULES = RECORDED | FROM_KERNELS


def build(schedule, *, scale=1):
    builder = RunBuilder(UNITS, world_size=1)
    rank = builder.rank(0)
    for step, happenings in enumerate(schedule):
        begin = step * STEP_NS
        rank.step(step, begin * scale, (begin + STEP_NS) * scale)
        for happening in happenings:
            row = dict(happening)
            for name in ("start", "end", "issue_ns", "need_ns"):
                row[name] = (row[name] + begin) * scale if row[name] >= 0 else -1
            rank.add(row.pop("kind"), row.pop("start"), row.pop("end"), bytes=8, **row)
    return builder.build()


def events_of(schedule):
    return build(schedule).event_tables[0]


@EXAMPLES
@given(SCHEDULES, st.data())
def test_the_causes_of_a_wait_add_up_to_its_exposed_time(schedule, data):
    table = events_of(schedule)
    number = int(np.isin(table.kind, list(COLLECTIVES)).sum())
    drawn = data.draw(st.none() | st.lists(st.integers(-1, 200), min_size=number, max_size=number))
    arrivals = None if drawn is None else np.array(drawn, dtype=np.int64)
    waits = split_waits(table, last_arrival_ns=arrivals)
    assert (waits.by_cause_ns >= 0).all()
    assert (waits.share_by_cause_ns >= 0).all()
    assert waits.by_cause_ns.sum(axis=1).tolist() == waits.exposed_ns.tolist()
    duration = waits.collectives.end_ns - waits.begin_ns
    assert (waits.exposed_ns <= np.maximum(duration, 0)).all()


@EXAMPLES
@given(SCHEDULES)
def test_the_shares_of_the_waits_add_up_to_the_exposed_time_of_the_step(schedule):
    table = events_of(schedule)
    waits, summary = split_waits(table), reduce_rank(table, rank=0)
    steps = summary.where(summary.kind == EventKind.STEP)
    for step, exposed in zip(steps.step, steps.exposed_ns, strict=True):
        shares = waits.share_by_cause_ns[waits.collectives.step == step]
        assert shares.sum() == exposed


@EXAMPLES
@given(SCHEDULES)
def test_no_wait_is_shared_out_for_more_than_it_is_charged(schedule):
    waits = split_waits(events_of(schedule))
    assert (waits.share_by_cause_ns.sum(axis=1) <= waits.exposed_ns).all()


@EXAMPLES
@given(SCHEDULES)
def test_what_an_owner_and_the_rank_are_told_adds_up(schedule):
    exposed = measure_exposed(build(schedule))
    assert sum(exposed.causes_ns.values()) == exposed.exposed_ns
    for told in (*exposed.passes, *exposed.owners, *exposed.evidence):
        assert sum(told.causes_ns.values()) == told.exposed_ns


@EXAMPLES
@given(SCHEDULES, st.integers(2, 1000))
def test_scaling_all_times_scales_every_cause(schedule, factor):
    table = events_of(schedule)
    assert_same(split_waits(scaled(table, factor)), split_waits(table), factor)


def scaled(table, factor):
    times = {
        name: np.where(getattr(table, name) < 0, -1, getattr(table, name) * factor)
        for name in ("issue_ns", "start_ns", "end_ns", "need_ns")
    }
    return replace(table, **times)


@EXAMPLES
@given(SCHEDULES, st.permutations(range(len(UNITS))))
def test_relabelling_the_units_changes_no_wait(schedule, order):
    table = events_of(schedule)
    relabelled = {
        name: np.where(getattr(table, name) < 0, -1, np.array(order)[getattr(table, name)])
        for name in ("unit", "issued_by")
    }
    assert_same(split_waits(replace(table, **relabelled)), split_waits(table))


@EXAMPLES
@given(SCHEDULES, st.data())
def test_splitting_a_span_of_compute_in_two_changes_no_wait(schedule, data):
    table = events_of(schedule)
    compute = np.flatnonzero(table.kind == EventKind.COMPUTE)
    if len(compute) == 0:
        return
    chosen = data.draw(st.sampled_from(compute.tolist()))
    middle = data.draw(st.integers(table.start_ns[chosen], table.end_ns[chosen]))
    second = table.where(np.array([chosen]))
    second.start_ns[:] = middle
    ends = table.end_ns.copy()
    ends[chosen] = middle
    halves = EventTable.concat([replace(table, end_ns=ends), second])
    assert_same(split_waits(halves), split_waits(table))


@EXAMPLES
@given(SCHEDULES)
def test_doubling_all_times_doubles_every_ns_halves_every_rate_and_changes_no_ratio(schedule):
    # Means are over at most 3 steps; with multiples of 60 no mean is rounded.
    single, double = build(schedule, scale=60), build(schedule, scale=120)
    for measure in (measure_exposed, measure_prefetch, measure_contention, measure_bandwidth):
        assert_doubled(to_plain(measure(single)), to_plain(measure(double)))


def assert_doubled(before, after, name=""):
    if isinstance(before, dict):
        assert list(before) == list(after)
        inside = name if name.endswith("_ns") else ""
        for key, value in before.items():
            assert_doubled(value, after[key], inside or key)
    elif isinstance(before, list):
        for one, other in zip(before, after, strict=True):
            assert_doubled(one, other)
    elif isinstance(before, str) or before is None:
        assert before == after
    else:
        factor = 2 if name.endswith("_ns") else 0.5 if name.endswith("_per_s") else 1
        # Fits are solved numerically; all other numbers are exact.
        assert after == pytest.approx(before * factor, rel=1e-3, abs=1e-3), name


def assert_same(waits, expected, factor=1):
    for name in ("exposed_ns", "by_cause_ns", "share_by_cause_ns"):
        assert np.array_equal(getattr(waits, name), getattr(expected, name) * factor), name
