"""Stragglers and their cost, distinguished from ranks that are late alternately."""

from dataclasses import replace

import pytest

from fsdp_inspect.advice.run_advice import find_findings
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.report.ranks_wording import describe_answer
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import InMemoryRun, RunBuilder, steady_run
from tests.llama70b import (
    BLOCK_GATHER,
    BLOCK_SCATTER,
    NUM_STEPS,
    PUBLISHED,
    STRAGGLER,
    llama_70b_run,
)

GIB = 1 << 30


def build_run(*works, hosts=None):
    """Steps of one gather each; `works`: for each step the work of each rank before it."""
    builder = RunBuilder(world_size=len(works[0]))
    now = 0
    for step, work in enumerate(works):
        end = now + max(work) + 10
        for number, own in enumerate(work):
            rank = builder.rank(number)
            rank.record = {"host": hosts[number] if hosts else "a"}
            rank.step(step, now, end)
            rank.data(now, now + own)
            rank.all_gather("layers.0", now + own, end, need=now + own, sequence=step)
        now = end
    return builder.build()


@pytest.fixture(scope="module")
def llama():
    return measure_ranks(llama_70b_run(2 * NUM_STEPS))


def test_the_published_straggler_is_found(llama):
    straggler = llama.straggler
    assert straggler.rank == STRAGGLER
    assert round(100 * straggler.last_ratio, 1) == 86.1
    assert (straggler.phase, straggler.meanwhile) == ("backward", "backward")
    assert straggler.cost_ratio > 0.3


def test_the_published_skews_and_transfers_are_measured(llama):
    found = {(row.kind, row.bytes): row for row in llama.skews}
    for row in PUBLISHED:
        skew = found[row.kind.label, row.bytes]
        assert (skew.skew_ns, skew.transfer_ns) == (row.skew_ns, row.transfer_ns)
        assert skew.num_collectives == 2 * row.count


@pytest.mark.parametrize(
    ("row", "published"),
    [(BLOCK_GATHER, 231.01), (BLOCK_SCATTER, 239.25)],
    ids=["gather", "scatter"],
)
def test_bus_bandwidth_is_the_published_one_in_gib(llama, row, published):
    found = next(skew for skew in llama.skews if skew.bytes == row.bytes)
    # The published means are means of bandwidths; ours is from the mean latency. They agree to
    # 0.1%.
    assert found.bus_bytes_per_s / GIB == pytest.approx(published, rel=1e-3)


def test_more_skew_than_transfer_puts_the_straggler_first(llama):
    assert llama.skewed_ratio == pytest.approx(486 / 488)


def test_a_straggler_is_priced_by_the_step_without_it():
    ranks = measure_ranks(build_run(*[(100, 100, 160)] * 5))
    straggler = ranks.straggler
    assert (straggler.rank, straggler.cost_ns, straggler.late_ns) == (2, 60, 60)
    assert straggler.cost_ratio == pytest.approx(60 / 170)
    assert (straggler.meanwhile, straggler.meanwhile_ns) == ("data", 60)
    assert ranks.replay.error_ratio == 0


@pytest.mark.parametrize(("others_ns", "extra_ns"), [(0, 40), (40, 0)])
def test_what_a_straggler_does_between_its_steps_is_no_part_of_its_cost(others_ns, extra_ns):
    """Fixing both saves 100 a step, so the cost of 60 is no bound of what can be saved."""
    builder, length = RunBuilder(world_size=3), 40 + 160 + 10
    for step in range(5):
        now = length * step
        for number, (between, own) in enumerate([(others_ns, 100), (others_ns, 100), (40, 160)]):
            rank, start = builder.rank(number), now + between
            rank.record = {"host": "a"}
            rank.step(step, now, now + length)
            rank.add(EventKind.BETWEEN_STEPS, now, start)
            rank.forward("layers.0", start, start + own)
            rank.all_gather("layers.0", start + own, now + length, need=start + own, sequence=step)
    run = builder.build()
    straggler = measure_ranks(run).straggler
    assert (straggler.rank, straggler.cost_ns, straggler.between_ns) == (2, 60, extra_ns)

    why, (fix, *_) = measure_summary(run).verdict.why, find_findings(run)
    extra = "Checkpoints, evaluation or generation between its steps take 40 ns longer, too"
    assert "is about 60 ns shorter" in why
    assert (extra in why) is (extra in fix.effect.sentence) is bool(extra_ns)
    estimate = "Saves about 60 ns a step, estimated from the extra work in the steps."
    assert fix.effect.sentence.startswith(estimate)
    assert fix.effect.saved_high_ns == 60 + extra_ns


@pytest.mark.parametrize(("delay_ns", "named"), [(0, True), (100, True), (200, False)])
def test_a_rank_without_a_core_is_no_straggler(delay_ns, named):
    """Its extra work is 60 of a step of 170 ns; a run delay of 200 in 1,000 ns is 34 a step."""
    run = build_run(*[(100, 100, 160)] * 5)
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [
        {**unknown, "time_ns": time, "run_delay_ns": delay}
        for time, delay in ((0, 0), (1000, delay_ns))
    ]
    ranks = measure_ranks(replace(run, device_tables={2: DeviceTable.from_rows(samples)}))
    assert (ranks.straggler is not None) == named
    headline, *rest = describe_answer(ranks)
    assert headline.startswith("Rank 2") == named
    assert any("had no CPU core" in line for line in rest) == (delay_ns > 50)
    if not named:
        assert "the training thread of rank 2 has no CPU core for 20%" in ranks.straggler_refusal
        assert "or other threads and workers of rank 2." in ranks.straggler_refusal


def test_a_straggler_is_named_where_all_ranks_lack_cores():
    """More ranks than cores: the others wait for a core as long, so this explains no difference."""
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [{**unknown, "time_ns": at, "run_delay_ns": at // 5} for at in (0, 1000)]
    tables = {rank: DeviceTable.from_rows(samples) for rank in range(3)}
    ranks = measure_ranks(replace(build_run(*[(100, 100, 160)] * 5), device_tables=tables))
    assert ranks.straggler is not None
    assert ranks.straggler.rank == 2


def test_more_work_alone_means_longer_waits_for_a_core():
    """Per own work of 100 and 160, all ranks wait alike, so cores explain no difference."""
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    tables = {
        rank: DeviceTable.from_rows(
            [{**unknown, "time_ns": at, "run_delay_ns": at * percent // 100} for at in (0, 1000)]
        )
        for rank, percent in enumerate((30, 30, 50))
    }
    ranks = measure_ranks(replace(build_run(*[(100, 100, 160)] * 5), device_tables=tables))
    assert ranks.straggler is not None
    assert ranks.straggler.rank == 2


def test_without_cores_it_is_unknown_whether_a_rank_is_a_straggler():
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [{**unknown, "time_ns": at, "run_delay_ns": at // 4} for at in (0, 1000)]
    run = build_run(*[(160, 100), (100, 160)] * 2)
    ranks = measure_ranks(replace(run, device_tables={0: DeviceTable.from_rows(samples)}))
    headline, second, *rest = describe_answer(ranks)
    assert headline == "Training threads have no CPU core for 25% of the time."
    assert ranks.straggler_refusal == "training threads had no CPU core for 25% of the time."
    assert second.endswith(f"whether there is a straggler: {ranks.straggler_refusal}")
    assert any("had no CPU core for 25% of the recording" in line for line in rest)


def test_cores_that_other_ranks_lack_come_before_a_straggler_that_costs_less():
    """The extra work of rank 2 is its own: only the other ranks lacked cores."""
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [{**unknown, "time_ns": at, "run_delay_ns": at * 69 // 100} for at in (0, 1000)]
    run = replace(
        build_run(*[(100, 100, 160)] * 5),
        device_tables={rank: DeviceTable.from_rows(samples) for rank in (0, 1)},
    )
    headline, second, *_ = describe_answer(measure_ranks(run))
    assert headline == "Training threads have no CPU core for 69% of the time."
    assert second.startswith("Rank 2 is a straggler")
    assert measure_summary(run).verdict.sentence == headline


def test_a_rank_that_is_not_recorded_may_be_the_straggler():
    run = build_run(*[(100, 100, 100, 100)] * 6)
    run = replace(
        run,
        ranks=[record for record in run.ranks if record.rank != 2],
        event_tables={rank: rows for rank, rows in run.event_tables.items() if rank != 2},
    )
    headline, *_ = describe_answer(measure_ranks(run))
    assert headline == ("It is unknown whether there is a straggler: rank 2 is not recorded.")


def test_ranks_that_take_turns_are_an_imbalance_and_no_straggler():
    works = [(160, 100), (100, 160), (160, 100), (100, 160)]
    ranks = measure_ranks(build_run(*works))
    assert ranks.straggler is None
    assert ranks.replay.recorded_ns == 170
    assert {row.busiest_ratio for row in ranks.ranks} == {0.5}


def test_a_rank_that_is_hardly_late_is_no_straggler():
    ranks = measure_ranks(build_run(*[(100, 101)] * 6))
    assert (ranks.straggler, ranks.straggler_refusal) == (None, None)


@pytest.mark.parametrize("groups", [(-1, -1), (0, 1)], ids=["unnamed", "of each rank alone"])
def test_ranks_whose_collectives_do_not_match_are_not_compared(groups):
    """The traces of an import may be of two runs, or name no process groups."""
    builder = RunBuilder(world_size=2)
    for number, group in enumerate(groups):
        rank = builder.rank(number)
        rank.record = {"host": "a"}
        for step in range(6):
            start, length = 1000 * step, 100 + 60 * (number ^ step % 2)
            rank.step(step, start, start + length)
            rank.forward("layers.0", start, start + length - 10)
            more = {"need": start + length - 10, "sequence": step, "group": group}
            rank.all_gather("layers.0", start + length - 10, start + length, **more)
    ranks = measure_ranks(builder.build())
    assert (ranks.replay, ranks.clock_uncertainty_ns) == (None, None)
    assert ranks.straggler_refusal == "no collective of two ranks matches."
    assert describe_answer(ranks) == (
        "It is unknown whether there is a straggler: no collective of two ranks matches.",
    )


def test_a_rank_without_a_timed_step_is_not_a_rank_without_files():
    builder = RunBuilder(world_size=2)
    builder.rank(0).step(0, 0, 10)
    builder.rank(0).data(0, 5)
    builder.rank(1).record = {"host": "a"}
    answer = describe_answer(measure_ranks(builder.build()))[0]
    assert answer == "Ranks cannot be compared: only rank 0 has a complete timed step."


@pytest.mark.parametrize(("num_steps", "told"), [(1, False), (5, False), (6, True)])
def test_two_ranks_need_six_steps_until_one_of_them_is_told_to_be_late(num_steps, told):
    ranks = measure_ranks(build_run(*[(100, 160)] * num_steps))
    assert (ranks.straggler is not None) is told
    assert (ranks.straggler_refusal is None) is told


def test_too_few_steps_are_refused_with_what_chance_does_and_how_many_it_takes():
    refusal = measure_ranks(llama_70b_run()).straggler_refusal
    assert "rank 4 works longest in 2 of 2 steps" in refusal
    assert "Among 8 equal ranks, this happens by chance in up to 12.5% of runs." in refusal
    assert "Record at least 3 timed steps." in refusal


def test_jitter_that_both_ranks_have_is_not_billed_to_the_later_one():
    steady = [(100, 160)] * 20
    jittering = [(100 + 80 * (step % 5 == 0), 160 + 80 * (step % 5 == 3)) for step in range(20)]
    one, two = measure_ranks(build_run(*steady)), measure_ranks(build_run(*jittering))
    assert one.straggler.cost_ns == 60
    assert 0 < two.straggler.cost_ns <= 60


def test_the_cost_of_a_rank_with_varying_extra_work_has_a_range():
    extra = [60, 60, 60, 60, 180, 180, 180, 180, 60, 60] * 4  # mean 108, median 60
    straggler = measure_ranks(build_run(*[(100, 100 + more) for more in extra])).straggler
    assert straggler.cost_ns == 60
    assert 60 <= straggler.cost_low_ns < 108 <= straggler.cost_high_ns <= 180
    assert straggler.cost_range
    even = measure_ranks(build_run(*[(100, 160)] * 20)).straggler
    assert even.cost_low_ns == even.cost_ns == even.cost_high_ns
    assert not even.cost_range


def test_imbalance_costs_no_more_than_the_ranks_wait():
    ranks = measure_ranks(build_run(*[(160, 100), (100, 160)] * 6))
    assert ranks.straggler is None
    assert ranks.imbalance_ns == 30
    assert ranks.imbalance_ns <= min(row.exposed_ns for row in ranks.ranks)


def test_a_single_stall_costs_nothing_beyond_the_typical_step():
    works = [(100, 110)] * 20
    works[10] = (100, 5_000)
    straggler = measure_ranks(build_run(*works)).straggler
    assert straggler.cost_ns <= 10


def one_way_run(*works, kind=EventKind.BROADCAST, num_steps=8):
    """Each step: a collective that rank 0 leaves at once and the others after it, and a barrier.

    `works`: the work of each rank before it. The barrier ends 40 after the last rank has left.
    """
    builder, length = RunBuilder(world_size=len(works)), max(works) + 50
    for step in range(num_steps):
        start = length * step
        for number, work in enumerate(works):
            rank, at = builder.rank(number), start + work
            left = at + 1 if number == 0 else max(at, start + works[0]) + 2
            rank.record = {"host": "a"}
            rank.step(step, start, start + length)
            times = {"need_ns": at, "group": 0, "sequence": 2 * step, "bytes": 8}
            rank.add(kind, at, left, **times)
            rank.all_gather("layers.0", left, start + length, need=left, sequence=2 * step + 1)
    return builder.build()


@pytest.mark.parametrize("kind", [EventKind.BROADCAST, EventKind.ALL_TO_ALL])
def test_the_source_that_receivers_of_a_broadcast_wait_for_is_a_straggler(kind):
    """At the next collective, all ranks arrive together."""
    ranks = measure_ranks(one_way_run(160, 100, 100, kind=kind))
    assert ranks.straggler is not None
    assert (ranks.straggler.rank, ranks.straggler.cost_ns) == (0, 59)
    assert ranks.replay.error_ratio == 0
    skew = next(row for row in ranks.skews if row.kind == kind.label)
    assert (skew.skew_ns, skew.num_collectives) == (60, 8)


def test_nobody_waits_at_a_broadcast_for_a_receiver():
    """Rank 0 leaves before rank 1 arrives. Rank 1 delays the others later, at the all-gather."""
    run = one_way_run(100, 160, 100)
    assert all(row.kind != "broadcast" or row.skew_ns == 0 for row in measure_ranks(run).skews)
    straggler = measure_ranks(run).straggler
    assert (straggler.rank, straggler.late_ns) == (1, 61)


def run_with_longer_work(*arrivals: int) -> InMemoryRun:
    """Rank 0 works 100, and rank 1 works 200; both issue their gather before, at these times."""
    builder = RunBuilder(world_size=2)
    for step in range(8):
        start = 300 * step
        for number, arrival in enumerate(arrivals):
            rank = builder.rank(number)
            rank.record = {"host": "a"}
            rank.step(step, start, start + 300)
            times = {"need": start + 100 * (number + 1), "sequence": step}
            rank.all_gather("layers.0", start + arrival, start + 300, **times)
    return builder.build()


def test_extra_work_of_which_others_are_seen_to_wait_for_a_part_has_an_unknown_cost():
    """Rank 1 works 100 longer, but arrives only 25 later. The replay is 25 shorter without it."""
    ranks = measure_ranks(run_with_longer_work(0, 25))
    assert ranks.straggler is None
    headline, *rest = describe_answer(ranks)
    assert headline == (
        "It is unknown whether there is a straggler: rank 1 works longest in most steps, by 100 ns "
        "a step, and the replay is 25 ns a step shorter without it. The arrivals at collectives do "
        "not show that other ranks wait for at least half of this work, so they may wait for "
        "another reason."
    )
    assert not any("no rank alone" in line for line in rest)


def test_a_rank_that_works_longer_while_the_link_is_busy_is_no_straggler():
    ranks = measure_ranks(run_with_longer_work(5, 0))
    assert [row.own_work_ns for row in ranks.ranks] == [100, 200]
    assert (ranks.straggler, ranks.straggler_refusal) == (None, None)


def test_a_late_input_is_found_though_it_is_last_at_one_collective_a_step():
    straggler = measure_ranks(late_input_run()).straggler
    # It works 100 longer before the first gather, and 2 less before each other gather.
    assert (straggler.rank, straggler.meanwhile, straggler.cost_ns) == (1, "data", 96)
    assert straggler.last_ratio == pytest.approx(1 / 3)


def late_input_run():
    """Rank 1's batch is late; at the two other gathers of a step, rank 0 is slightly late."""
    builder = RunBuilder(world_size=2)
    for step in range(8):
        start = 1000 * step
        for number in (0, 1):
            rank = builder.rank(number)
            rank.record = {"host": "a"}
            rank.step(step, start, start + 1000)
            waits = [(200, 310), (500, 520), (700, 720)]
            if number == 1:
                waits = [(300, 310), (498, 520), (698, 720)]
            rank.data(start, start + waits[0][0])
            for place, (begin, end) in enumerate(waits):
                times = {"need": start + begin, "sequence": 3 * step + place}
                rank.all_gather("layers.0", start + begin, start + end, **times)
    return builder.build()


@pytest.mark.parametrize(("extra", "is_found"), [(60, True), (0, False)])
def test_a_rank_that_works_longer_is_found_among_ranks_that_are_late_at_random(extra, is_found):
    """Of ten further collectives of a step, each rank is late by 10 at five of them."""
    builder = RunBuilder(world_size=2)
    for number in range(2):
        rank = builder.rank(number)
        rank.record = {"host": "a"}
        for step in range(12):
            start = now = 2000 * step
            rank.step(step, start, start + 2000)
            rank.data(start, start + 100 + number * extra)
            for place in range(11):
                late = number * extra if place == 0 else 10 * ((place + step) % 2 == number)
                begin, now = now + 100 + late, now + 100 + max(extra if place == 0 else 10, 1) + 5
                rank.all_gather("layers.0", begin, now, need=begin, sequence=11 * step + place)
    ranks = measure_ranks(builder.build())
    assert ranks.straggler_refusal is None
    found = ranks.straggler
    assert (found is not None) == is_found
    if found is not None:
        assert (found.rank, found.meanwhile) == (1, "data")
        assert 0.7 * extra <= found.cost_ns <= extra


def test_without_clocks_the_rank_that_waits_least_is_still_told():
    run = build_run(*[(100, 100, 160)] * 3, hosts=["a", "b", "c"])
    ranks = measure_ranks(run)
    assert ranks.straggler is None
    assert ranks.replay is None
    assert [row.shortest_ratio for row in ranks.ranks] == [0, 0, 1]
    assert "rank 1 cannot be aligned" in ranks.refusals[0]


def test_each_rank_has_its_typical_step():
    row = measure_ranks(steady_run()).ranks[1]
    assert (row.step_time_ns, row.exposed_ns, row.own_work_ns) == (1000, 250, 750)


def test_one_rank_has_nobody_to_wait_for():
    ranks = measure_ranks(steady_run(world_size=1))
    assert (ranks.straggler, ranks.replay, ranks.skews) == (None, None, ())


def test_a_run_without_a_timed_step_has_no_ranks():
    ranks = measure_ranks(RunBuilder().build())
    assert ranks.ranks == ()


def test_relabelling_the_ranks_relabels_the_straggler_only():
    one = measure_ranks(build_run(*[(100, 110, 160)] * 5)).straggler
    two = measure_ranks(build_run(*[(160, 110, 100)] * 5)).straggler
    assert (one.rank, two.rank) == (2, 0)
    assert (one.cost_ns, one.late_ns) == (two.cost_ns, two.late_ns)


def test_large_runs_are_sampled():
    run = build_run(*[tuple([100] * 59 + [160])] * 2)
    ranks = measure_ranks(run)
    assert len(ranks.ranks) == 60
    assert len(ranks.sampled_ranks) == 48
    assert ranks.straggler.rank == 59
    assert [row.num_collectives for row in ranks.skews] == [2]
