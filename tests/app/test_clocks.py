"""Do times of two hosts meet on one clock?"""

from fsdp_inspect_app.timeline.clocks import align_clocks

from fsdp_inspect.trace.run import ClockPair
from tests.app.synthetic import make_rank


def rank_on(host, rank, *, monotonic_ns, unix_ns):
    record = make_rank(rank, num_steps=1, host=host)
    pair = ClockPair(monotonic_ns=monotonic_ns, unix_ns=unix_ns, uncertainty_ns=40)
    return record.model_copy(update={"clock_start": pair, "clock_uncertainty_ns": 7})


def test_ranks_of_one_host_share_its_clock():
    records = [
        rank_on("a", 0, monotonic_ns=100, unix_ns=5_000),
        rank_on("a", 1, monotonic_ns=900, unix_ns=5_801),
    ]
    alignment = align_clocks(records)
    assert alignment.offset_ns == {0: 0, 1: 0}
    assert alignment.uncertainty_ns == 14


def test_ranks_of_two_hosts_are_shifted_by_what_their_wall_clocks_say():
    records = [
        rank_on("a", 0, monotonic_ns=100, unix_ns=5_000),
        rank_on("b", 1, monotonic_ns=2_000, unix_ns=5_100),
    ]
    alignment = align_clocks(records)
    # 2,000 on b is wall time 5,100, which is 200 on a.
    assert 2_000 + alignment.offset_ns[1] == 200
    assert alignment.uncertainty_ns == 2 * (7 + 40)


def test_no_ranks_need_no_alignment():
    assert align_clocks([]).offset_ns == {}
