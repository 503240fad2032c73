"""The events of a step, compared with the analyses of that step."""

import numpy as np
import pytest

from fsdp_inspect.analysis.bandwidth import measure_bandwidth
from fsdp_inspect.analysis.breakdown_causes import measure_breakdown_causes
from fsdp_inspect.analysis.step_waits import (
    DataWait,
    describe_event,
    find_data_wait,
    measure_step_waits,
)
from fsdp_inspect.trace.codes import EventKind, Phase
from tests.app.synthetic import MESSAGE_BYTES, make_run
from tests.builders import RunBuilder

LAST = 9
"""The unit `norm, lm_head`, whose all-gather is the longest wait."""


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def waits(run):
    return measure_step_waits(run, rank=0, step=3)


def facts_of(run, waits, event):
    return describe_event(
        run.manifest,
        run.events(0, steps=[3]),
        event,
        waits=waits,
        bandwidth=measure_bandwidth(run, rank=0),
    )


def test_the_longest_waits_come_first_and_are_named_by_their_events(run, waits):
    facts = [facts_of(run, waits, event) for event in waits.longest()]
    assert [(one.kind, one.fqn) for one in facts][:2] == [
        ("all_gather", "norm, lm_head"),
        ("reduce_scatter", ""),
    ]
    spent = [one.exposed_ns for one in facts]
    assert spent == sorted(spent, reverse=True)
    assert len(spent) == 4


def test_causes_of_a_wait_add_up_to_it_and_are_those_of_the_breakdown(run, waits):
    for event in waits.event.tolist():
        assert sum(waits.causes(event).values()) == waits.exposed(event)
    breakdown = measure_breakdown_causes(run, rank=0, step=3)
    assert set(breakdown.causes_ns) <= {
        cause for event in waits.event.tolist() for cause in waits.causes(event)
    }
    assert waits.exposed_ns.sum() >= breakdown.shown.exposed_ns


def test_a_collective_is_described_with_size_speed_and_lead(run, waits):
    events = run.events(0, steps=[3])
    event = int(np.flatnonzero((events.kind == EventKind.ALL_GATHER) & (events.unit == LAST))[0])
    facts = facts_of(run, waits, event)
    duration = int(events.end_ns[event] - events.start_ns[event])
    assert (facts.bytes, facts.dtype, facts.group) == (MESSAGE_BYTES[LAST], "bfloat16", "shard")
    assert facts.issued_by == "layers.7"
    assert facts.duration_ns == duration
    assert facts.bus_bytes_per_s == pytest.approx(MESSAGE_BYTES[LAST] / 2 / duration * 1e9)
    assert facts.fit_bus_bytes_per_s == pytest.approx(facts.bus_bytes_per_s, rel=0.05)
    assert facts.lead_ns == events.need_ns[event] - events.issue_ns[event]
    assert facts.exposed_ns == sum(facts.causes_ns.values()) > 0
    assert (facts.source, facts.method) == ("recorded", "measured")


def test_what_is_no_collective_has_neither_message_nor_wait(run, waits):
    events = run.events(0, steps=[3])
    event = int(np.flatnonzero((events.kind == EventKind.FORWARD) & (events.unit == 3))[0])
    facts = facts_of(run, waits, event)
    assert (facts.kind, facts.fqn, facts.phase) == ("forward", "layers.2", "forward")
    assert (facts.bytes, facts.bus_bytes_per_s, facts.fit_bus_bytes_per_s) == (None, None, None)
    assert (facts.lead_ns, facts.exposed_ns, facts.causes_ns) == (None, None, {})
    assert facts.start_ns > 0


def test_without_a_fit_and_without_a_wait_nothing_is_made_up(run):
    waits = measure_step_waits(run, rank=0, step=3)
    events = run.events(0, steps=[3])
    event = int(np.flatnonzero(events.kind == EventKind.ALL_GATHER)[3])
    facts = describe_event(run.manifest, events, event, waits=waits, bandwidth=None)
    assert facts.fit_bus_bytes_per_s is None
    assert (facts.exposed_ns, facts.causes_ns) == (0, {})


def test_the_wait_for_data_is_that_of_a_step_with_the_typical_time_for_data():
    builder, start = RunBuilder(world_size=1), 0
    rank = builder.rank(0)
    for step, data_ns in enumerate((30, 0, 30, 0, 30)):  # every second step finds its batch ready
        rank.step(step, start, start + 100)
        if data_ns:
            rank.add(EventKind.DATA, start + 5, start + 5 + data_ns, phase=Phase.DATA)
        start += 100
    assert find_data_wait(builder.build()) == DataWait(rank=0, step=2, start_ns=5, end_ns=35)


def test_a_run_that_waits_for_no_data_has_no_such_wait():
    assert find_data_wait(RunBuilder().build()) is None
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)
    assert find_data_wait(builder.build()) is None
