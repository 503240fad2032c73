import numpy as np
import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.analysis.bandwidth import measure_bandwidth
from fsdp_inspect.analysis.last_arrivals import (
    MOST_RANKS_ALIGNED,
    find_last_arrivals,
    measure_lateness,
    read_transfers,
    set_waits_apart,
    shorten_longest,
)
from fsdp_inspect.analysis.step_selection import timed_rank, timed_ranks
from fsdp_inspect.analysis.wait_causes import timed_collectives
from fsdp_inspect.trace.codes import COLLECTIVES
from tests.builders import RunBuilder
from tests.llama70b import llama_70b_run

GIB = 1 << 30


def run_of(starts, *, host="one"):
    """One all-gather that ends at 1000; every rank enters at its start."""
    builder = RunBuilder(world_size=len(starts))
    for number, start in enumerate(starts):
        rank = builder.rank(number)
        rank.record["host"] = host
        rank.step(0, 0, 2000)
        rank.all_gather("layers.0", start, 1000, need=start, sequence=0)
    return builder.build()


def collectives_of(run):
    return run.events(0, kinds=sorted(COLLECTIVES))


def test_ranks_of_one_machine_tell_who_arrived_last():
    run = run_of([100, 400, 250])
    known, arrivals = find_last_arrivals(run, 0, collectives_of(run))
    assert arrivals.tolist() == [400]
    assert (known.num_ranks, known.num_refused, known.uncertainty_ns) == (3, 0, 0)
    assert known.sentence == "Waits for stragglers use the arrivals of 3 of 3 ranks, one clock."


def test_the_transfer_is_that_of_the_last_to_arrive():
    run = run_of([100, 400, 250])
    assert read_transfers(run, 0, collectives_of(run)).tolist() == [600]


def test_lateness_is_the_part_of_a_duration_before_the_last_arrival():
    run = run_of([100, 400, 250])
    assert measure_lateness(run, 0, collectives_of(run)) == pytest.approx(300 / 900)
    single = run_of([100])
    assert measure_lateness(single, 0, collectives_of(single)) == 0


def test_of_many_ranks_some_are_read_and_it_is_said():
    many = MOST_RANKS_ALIGNED + 8
    run = run_of(range(100, 100 + many))
    known, arrivals = find_last_arrivals(run, 0, collectives_of(run))
    assert known.num_ranks == MOST_RANKS_ALIGNED
    assert f"{MOST_RANKS_ALIGNED} of {many} ranks" in known.sentence
    assert arrivals.tolist() == [100 + many - 1]


def test_a_single_rank_knows_of_no_straggler():
    run = run_of([100])
    known, arrivals = find_last_arrivals(run, 0, collectives_of(run))
    assert arrivals.tolist() == [-1]
    assert "one rank" in known.sentence


def test_bus_bandwidths_of_a_published_run_are_found_again():
    """TraceLens, Llama-70B on 8 MI300; its GB/s are GiB/s (RULES G)."""
    run = llama_70b_run()
    transfers = read_transfers(run, 0, timed_collectives(run, timed_rank(run, 0)))
    units = {unit.fqn: unit.index for unit in run.manifest.units}
    found = {
        (fqn, row.kind): row.bus_bytes_per_s / GIB
        for fqn in ("layers.0", "")
        for row in measure_bandwidth(run, rank=0, unit=units[fqn], transfer_ns=transfers).kinds
    }
    # The published mean of single rates differs by 0.1% from the rate of the mean duration.
    assert found == {
        ("layers.0", "all_gather"): pytest.approx(231.01, rel=2e-3),
        ("layers.0", "reduce_scatter"): pytest.approx(239.25, rel=2e-3),
        ("", "all_gather"): pytest.approx(287.30, rel=2e-3),
        ("", "reduce_scatter"): pytest.approx(297.96, rel=2e-3),
    }


def late_run(own_starts, late_starts, ends, *, has_reduce=False):
    """Gathers of two ranks, in one step after a warm-up step; rank 1 enters later.

    With `has_reduce`, the first one is an all-reduce of no unit instead.
    """
    builder = RunBuilder(world_size=2)
    for number, starts in enumerate((own_starts, late_starts)):
        rank = builder.rank(number)
        for step in range(4):
            at = 2000 * step
            rank.step(step, at, at + 2000)
            for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
                span = {"start": at + start, "end": at + end, "need": at + start}
                if has_reduce and not place:
                    rank.all_reduce(None, **span, sequence=step)
                else:
                    rank.all_gather(f"layers.{place}", **span, sequence=2 * step + place)
    return builder.build()


def without_waits(run, *, is_blocking=True):
    """The durations of the gathers of a step, and the time of the waits."""
    member = timed_rank(run, 0)
    events = run.events(0, steps=member.steps.tolist())
    found, late_ns = set_waits_apart(run, member, events, is_blocking=is_blocking)
    rows = found.where(np.isin(found.kind, sorted(COLLECTIVES)))
    number = len(member.steps)
    return (rows.end_ns - rows.start_ns).reshape(number, -1)[0].tolist(), late_ns


def test_the_wait_for_a_rank_that_works_longer_is_no_part_of_a_transfer():
    run = late_run([100, 1000], [600, 1000], [700, 1100])
    waits = [member.exposed_ns[0] for member in timed_ranks(run).members]
    assert waits == [600 + 100, 100 + 100]
    assert without_waits(run) == ([100, 100], 500)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_the_wait_in_a_collective_of_no_unit_stays_where_it_is(is_blocking):
    """A simulated step has the all-reduces of tensor parallelism as they were."""
    times = [100, 1000], [600, 1000], [700, 1100]
    assert without_waits(late_run(*times, has_reduce=True), is_blocking=is_blocking) == (
        [600, 100],
        0,
    )


def test_waits_of_ranks_that_are_late_in_turns_are_no_work_of_any_rank():
    run = late_run([100, 1000], [200, 900], [300, 1100])
    assert without_waits(run) == ([200, 100], 0)


def test_beside_compute_a_transfer_has_no_wait_at_all():
    run = late_run([100, 900], [600, 800], [700, 1100])  # each rank is late once
    assert without_waits(run) == ([200, 200], 400)
    assert without_waits(run, is_blocking=False) == ([100, 200], 400)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30), st.integers(0, 10**10))
def test_the_longest_waits_lose_the_amount_together(waits, amount):
    before = np.array(waits, dtype=np.int64)
    after = shorten_longest(before, amount)
    assert (after <= before).all()
    assert (after >= 0).all()
    lost = int((before - after).sum())
    assert min(amount, before.sum()) <= lost < amount + len(waits) or lost == before.sum()
    shortened = after[after < before]
    assert len({*shortened.tolist()}) <= 1
    assert not len(shortened) or (after <= shortened[0]).all()
