"""Laws of every run with any events, tested on random runs."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.breakdown import measure_breakdown, measure_step_breakdown
from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.analysis.step_times import measure_overlap, measure_step_times
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.results import to_plain
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind, Phase, Stream
from fsdp_inspect.trace.tables import EventTable
from tests.builders import RunBuilder
from tests.cases import examples

STEP_NS = 50
UNITS = ("", "layers.0", "layers.1")
KINDS = sorted(set(EventKind) - {EventKind.STEP})
FEW_EXAMPLES = settings(max_examples=examples(50), deadline=None)


@st.composite
def events(draw):
    low = draw(st.integers(0, STEP_NS))
    high = draw(st.integers(low, STEP_NS))
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "start": low,
        "end": high,
        "unit": draw(st.sampled_from((None, *UNITS))),
        "phase": draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.OUTSIDE])),
        "stream": draw(st.sampled_from(list(Stream))),
        "need": draw(st.none() | st.integers(0, STEP_NS)),
        "microbatch": draw(st.integers(0, 1)),
    }


STEPS = st.lists(events(), max_size=12)
RANKS = st.lists(st.lists(STEPS, min_size=1, max_size=3), min_size=1, max_size=4)


def build(ranks, *, scale=1):
    builder = RunBuilder(UNITS, world_size=len(ranks))
    for number, steps in enumerate(ranks):
        rank = builder.rank(number)
        for step, drawn in enumerate(steps):
            begin = step * STEP_NS
            rank.step(step, begin * scale, (begin + STEP_NS) * scale)
            for event in drawn:
                add(rank, event, begin, scale)
    return builder.build()


def add(rank, event, begin, scale):
    event = dict(event)
    need = event.pop("need")
    at = [(begin + event.pop(name)) * scale for name in ("start", "end")]
    waited = need is not None and event["kind"] in COLLECTIVES
    need_ns = (begin + need) * scale if waited else -1
    rank.add(event.pop("kind"), *at, need_ns=need_ns, bytes=8, **event)


@FEW_EXAMPLES
@given(RANKS)
def test_the_parts_of_every_step_add_up_to_it(ranks):
    run = build(ranks)
    for rank, steps in enumerate(ranks):
        for step in range(len(steps)):
            split = measure_step_breakdown(run, rank=rank, step=step)
            assert sum(part.duration_ns for part in split.parts) == split.step_time_ns
            assert all(part.duration_ns >= 0 for part in split.parts)


@FEW_EXAMPLES
@given(RANKS)
def test_the_headline_is_the_typical_step(ranks):
    run = build(ranks)
    times, headline = measure_step_times(run), measure_breakdown(run).headline
    assert (headline.rank, headline.closest_step) == (times.median_rank, times.closest_step)
    assert headline.step_time_ns == times.step_time_ns.typical
    assert sum(part.duration_ns for part in headline.parts) == headline.step_time_ns


@FEW_EXAMPLES
@given(RANKS)
def test_exposed_never_exceeds_communication_nor_the_step(ranks):
    for rank in measure_overlap(build(ranks)).ranks:
        assert 0 <= rank.exposed_ns <= rank.communication_ns <= rank.step_time_ns
        assert (rank.overlap_ratio is None) == (rank.communication_ns == 0)
        assert rank.overlap_ratio is None or 0 <= rank.overlap_ratio <= 1


@FEW_EXAMPLES
@given(RANKS)
def test_the_floor_never_exceeds_the_wait_that_it_is_part_of(ranks):
    exposed = measure_exposed(build(ranks))
    assert exposed.floor_ns <= exposed.exposed_ns
    for owner in exposed.owners:
        assert 0 <= owner.floor_ns <= owner.exposed_ns


@FEW_EXAMPLES
@given(RANKS)
def test_what_the_kinds_are_exposed_for_adds_up_in_each_step(ranks):
    run = build(ranks)
    split = measure_breakdown(run).headline
    exposed = [part for part in split.parts if part.name.startswith("exposed")]
    assert sum(part.duration_ns for part in exposed) == split.exposed_ns


@FEW_EXAMPLES
@given(RANKS, st.randoms(use_true_random=False))
def test_relabelling_the_ranks_changes_no_number(ranks, random):
    shuffled = list(ranks)
    random.shuffle(shuffled)
    before, after = measure_summary(build(ranks)), measure_summary(build(shuffled))
    for name in ("communication_ns", "exposed_ns", "overlap_ratio"):
        assert getattr(before, name) == getattr(after, name)
    assert before.step_time_ns.typical == after.step_time_ns.typical
    assert sorted(map(without_rank, before.ranks)) == sorted(map(without_rank, after.ranks))


def without_rank(row):
    return [value for name, value in to_plain(row).items() if name != "rank"]


@FEW_EXAMPLES
@given(RANKS)
def test_doubling_all_times_doubles_every_ns_and_no_ratio(ranks):
    # Means are over at most 3 steps, and quantiles lie at tenths between two of them. With
    # multiples of 30, none is rounded.
    single, double = (to_plain(measure_summary(build(ranks, scale=scale))) for scale in (30, 60))
    for before, after in zip(_collectives(single), _collectives(double), strict=True):
        duration, longer = before.pop("duration_ns"), after.pop("duration_ns")
        # The mean of one collective is the sum divided by their number, so it may be rounded.
        assert (duration is None) is (longer is None)
        assert duration is None or abs(longer - 2 * duration) <= 1
    for digest in (single, double):
        digest["verdict"] = digest["verdict"]["numbers"]
        digest["rank_verdicts"] = [rank["limit"] for rank in digest["rank_verdicts"]]
    assert doubled(single) == double


def _collectives(digest):
    """The collectives of each unit, by kind."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [unit[kind] for unit in digest["units"] for kind in kinds]


def doubled(value, name=""):
    """The expected value: doubled times, halved bandwidths, all else unchanged."""
    if isinstance(value, dict):
        inside = name if name.endswith("_ns") else ""
        return {
            key: doubled(item, key if key == "num_steps" else inside or key)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [doubled(item) for item in value]
    if value is None:
        return None
    if name == "bus_bytes_per_s":
        return value / 2
    return value * 2 if name.endswith("_ns") else value


@FEW_EXAMPLES
@given(RANKS, st.integers(-1000, 10**15))
def test_no_number_depends_on_where_a_clock_starts(ranks, offset):
    run = build(ranks)
    shifted = replace(
        run, event_tables={rank: shift(table, offset) for rank, table in run.event_tables.items()}
    )
    assert measure_summary(run) == measure_summary(shifted)


def shift(table, offset):
    columns = table.columns()
    for name in ("issue_ns", "start_ns", "end_ns"):
        columns[name] = columns[name] + offset + 1000
    columns["need_ns"] = np.where(table.need_ns < 0, -1, table.need_ns + offset + 1000)
    return EventTable.from_columns(columns)
