import pytest

from fsdp_inspect.analysis.prefetch import measure_prefetch
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventFlag, EventKind, Method, Phase, Stream
from tests.builders import RunBuilder, steady_run

PREFETCHED = int(EventFlag.PREFETCHED)
UNUSED = int(EventFlag.UNUSED)


def one_step():
    builder = RunBuilder(("layers.0", "layers.1", "layers.2"), world_size=2)
    builder.rank(0).step(0, 0, 1000)
    builder.rank(0).all_gather("layers.0", 0, 10, need=0)
    return builder, builder.rank(0)


def unit_of(run, fqn, phase="forward"):
    units = measure_prefetch(run).units
    return next(unit for unit in units if (unit.fqn, unit.phase) == (fqn, phase))


def test_a_gather_that_another_unit_issued_is_explicit():
    builder, rank = one_step()
    rank.all_gather("layers.1", 20, 60, need=90, flags=PREFETCHED, issued_by=0)
    unit = unit_of(builder.build(), "layers.1")
    assert unit.num_by_issue == {"explicit": 1}
    assert unit.issued_by == ("layers.0",)
    assert (unit.lead_ns, unit.duration_ns, unit.hidden_ratio) == (70, 40, 1.0)


def test_a_gather_of_its_own_unit_is_implicit_where_the_host_was_ahead():
    builder, rank = one_step()
    rank.all_gather("layers.1", 20, 60, need=50, issue_ns=5)
    unit = unit_of(builder.build(), "layers.1")
    assert unit.num_by_issue == {"implicit": 1}
    assert (unit.lead_ns, unit.hidden_ratio, unit.exposed_ns) == (45, 0.75, 10)


def test_a_gather_issued_when_it_was_needed_was_missed():
    builder, rank = one_step()
    rank.all_gather("layers.1", 20, 60, need=21)
    unit = unit_of(builder.build(), "layers.1")
    assert unit.num_by_issue == {"missed": 1}
    assert unit.lead_ns == 1


def test_a_gather_that_blocks_the_host_hides_nothing_whoever_issued_it():
    builder, rank = one_step()
    columns = {"method": Method.HOST_BLOCKING, "stream": Stream.HOST, "flags": PREFETCHED}
    rank.all_gather("layers.1", 20, 60, need=20, **columns)
    assert unit_of(builder.build(), "layers.1").num_by_issue == {"blocked": 1}


def test_the_first_gather_of_a_forward_is_not_called_missed():
    assert unit_of(one_step()[0].build(), "layers.0").num_by_issue == {"first": 1}


def test_gathers_that_nobody_used_are_counted_with_their_bytes():
    builder, rank = one_step()
    rank.all_gather("layers.1", 20, 60, flags=PREFETCHED | UNUSED, bytes=4096)
    prefetch = measure_prefetch(builder.build())
    assert prefetch.num_by_issue == {"first": 1, "unused": 1}
    assert prefetch.unused_bytes == unit_of(builder.build(), "layers.1").unused_bytes == 4096


def test_units_come_in_order_of_execution_forward_before_backward():
    units = measure_prefetch(steady_run()).units
    assert [(unit.fqn, unit.phase, unit.num_gathers) for unit in units] == [
        ("layers.0", "forward", 3),
        ("layers.0", "backward", 3),
        ("layers.1", "forward", 3),
        ("layers.1", "backward", 3),
    ]


def test_all_gathers_are_told_apart_and_add_up():
    prefetch = measure_prefetch(steady_run())
    assert (prefetch.num_steps, prefetch.num_gathers) == (3, 12)
    assert prefetch.num_by_issue == {"explicit": 6, "missed": 3, "first": 3}
    assert prefetch.hidden_ratio == pytest.approx(1 - 130 / 300)


def test_gathers_needed_in_another_order_than_issued_are_named_with_the_wait():
    builder, rank = one_step()
    rank.all_gather("layers.2", 20, 60, need=95, flags=PREFETCHED, issued_by=0, issue_ns=11)
    rank.all_gather("layers.1", 21, 90, need=50, flags=PREFETCHED, issued_by=0, issue_ns=12)
    (pair,) = measure_prefetch(builder.build()).swapped
    assert (pair.phase, pair.issued_first, pair.needed_first) == ("forward", "layers.2", "layers.1")
    assert (pair.num_times, pair.waited_ns) == (1, 10)


def test_an_order_of_issue_that_is_that_of_use_is_not_blamed():
    assert measure_prefetch(steady_run()).swapped == ()


def test_in_a_kernel_trace_the_lead_is_unknown_and_hiding_tells():
    builder, rank = one_step()
    rank.add(EventKind.COMPUTE, 10, 60, stream=Stream.COMPUTE)
    rank.all_gather("layers.1", 20, 70)
    rank.all_gather("layers.2", 80, 90)
    run = builder.build()
    assert unit_of(run, "layers.1").num_by_issue == {"implicit": 1}
    assert unit_of(run, "layers.1").lead_ns is None
    assert unit_of(run, "layers.2").num_by_issue == {"missed": 1}


def test_gathers_of_evaluation_and_of_others_do_not_count():
    builder, rank = one_step()
    rank.all_gather("layers.1", 20, 60, phase=Phase.EVALUATION)
    rank.all_gather(None, 20, 60)
    assert measure_prefetch(builder.build()).num_gathers == 1


def test_a_run_without_gathers_hides_nothing():
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 10)
    prefetch = measure_prefetch(builder.build())
    assert (prefetch.num_gathers, prefetch.hidden_ratio, prefetch.units) == (0, None, ())
    assert measure_prefetch(RunBuilder().build()) is None


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 9 not found"):
        measure_prefetch(steady_run(), rank=9)
