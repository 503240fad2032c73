from dataclasses import replace

from fsdp_inspect.analysis.prefetch import SwappedPair
from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.report.exposed import MOST_OWNERS, render_waits
from fsdp_inspect.trace.codes import Method, Stream
from tests.builders import RunBuilder, steady_run
from tests.report.terminal_text import text_of

HEADLINE = """\
Rank 0 waits 250 ns per step for communication.
  Step time: 1.00 µs (typical step).
  Main cause: the floor, which can only be shortened (60% of the exposed time).
  Largest waits: 100 ns per step for the reduce-scatter of layers.0 in backward.
"""
DIMENSIONS = """\
By mesh dimension
dimension  exposed  share  per step  causes
shard       230 ns    23%         6  floor 65%, late issue 17%, transfer 17%
other        20 ns     2%         1  transfer 100%
"""
PASSES = """\
By collective, typical step of rank 0
collective      phase     dimension  per step  units  exposed  causes
all-gather      forward   shard             2      2   100 ns  floor 50%,
                                                               transfer 40%,
                                                               late issue 10%
reduce-scatter  backward  shard             2      2   100 ns  floor 100%
all-gather      backward  shard             2      2    30 ns  late issue 100%
all-reduce      backward  other             1      0    20 ns  transfer 100%
"""
OWNERS = """\
By unit, typical step of rank 0
unit        collective      phase     exposed  causes
layers.0    reduce-scatter  backward   100 ns  floor 100%
layers.0    all-gather      forward     50 ns  floor 100%
layers.1    all-gather      forward     50 ns  transfer 80%, late issue 20%
layers.1    all-gather      backward    30 ns  late issue 100%
(not FSDP)  all-reduce      backward    20 ns  transfer 100%
"""
GATHERS = """\
All-gathers over 3 steps: 6 explicit, 3 missed, 3 first
unit      phase     issued      lead  in flight  hidden
layers.0  forward   first       0 ns      50 ns      0%
layers.0  backward  explicit  110 ns      70 ns    100%
layers.1  forward   explicit  100 ns     150 ns   66.7%
layers.1  backward  missed      0 ns      30 ns      0%
"""
BANDWIDTH = """\
Bandwidth of the transfers
collective      group       per step  transfer       bus  latency  residual
all-gather      shard of 2     256 B     75 ns  427 MB/s        –         –
reduce-scatter  shard of 2     128 B     90 ns  356 MB/s        –         –
all-reduce      –                4 B     20 ns         –        –         –
Transfer, over 3 steps: mean time on this rank, which may include waits for
other ranks. Bus: of all bytes in all transfers.
"""


def shown(run, **asked):
    return text_of(render_waits(measure_rank_waits(run, **asked)))


def ms(value):
    return round(value * 1e6)


def one_step():
    builder = RunBuilder(("layers.0", "layers.1"), world_size=2)
    builder.rank(0).step(0, 0, ms(100))
    builder.rank(0).all_gather("layers.0", 0, ms(1), need=ms(1))
    return builder, builder.rank(0)


def test_the_waits_of_a_rank_read_so():
    text = shown(steady_run())
    assert text.startswith(HEADLINE)
    for part in (DIMENSIONS, PASSES, OWNERS, GATHERS, BANDWIDTH):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_one_unit_reads_so():
    text = shown(steady_run(), unit="layers.1")
    assert text.startswith(
        "In its typical step, rank 0 waits for layers.1: 50 ns for the all-gather in\nforward "
    )
    assert "layers.0  " not in text


def test_evidence_names_the_place_in_the_step_and_what_was_ahead():
    builder, rank = one_step()
    rank.reduce_scatter("layers.1", ms(5), ms(40))
    rank.all_gather("layers.0", ms(10), ms(60), need=ms(30), issue_ns=ms(6))
    text = " ".join(text_of(render_waits(measure_rank_waits(builder.build())), width=140).split())
    assert (
        "0 layers.0 all-gather (forward) 6.000 30.000 60.000 30.0 ms serialized behind layers.1"
        in text
    )


def test_a_unit_that_is_never_waited_for_says_so():
    assert "Rank 0 does not wait for layers.1 in its typical step." in shown(
        one_step()[0].build(), unit="layers.1"
    )


def test_bandwidth_and_stragglers_are_not_told_apart_by_one_rank():
    builder, rank = one_step()
    rank.all_gather("layers.1", ms(10), ms(60), need=ms(30), issue_ns=ms(0))
    text = " ".join(shown(builder.build()).split())
    assert (
        "limited by the transfer, or waiting for other ranks (one rank cannot show which)" in text
    )


def test_a_rank_that_waits_for_nothing_says_so():
    text = shown(one_step()[0].build())
    assert text.startswith("Rank 0 has no exposed communication in its typical step.")


def test_gathers_that_block_the_host_need_no_table():
    builder, rank = one_step()
    columns = {"method": Method.HOST_BLOCKING, "stream": Stream.HOST}
    rank.all_gather("layers.1", ms(2), ms(3), need=ms(2), **columns)
    text = shown(builder.build())
    assert "They block the host, so no compute hides them." in text
    assert "lead" not in text


def test_waste_and_a_wrong_order_of_prefetch_are_pointed_out():
    digest = measure_rank_waits(steady_run())
    pair = SwappedPair("forward", "layers.2", "layers.1", 3, ms(2))
    prefetch = replace(digest.prefetch, unused_bytes=4096, swapped=(pair,))
    text = text_of(render_waits(replace(digest, prefetch=prefetch)))
    assert "Unused all-gathers: 4.00 KiB over these steps." in text
    assert "In forward, the all-gather of layers.2 is issued before that of layers.1" in text


def test_many_owners_are_listed_in_part():
    builder = RunBuilder([f"layers.{number}" for number in range(MOST_OWNERS + 5)], world_size=1)
    builder.rank(0).step(0, 0, 1000)
    for number in range(MOST_OWNERS + 5):
        builder.rank(0).all_gather(f"layers.{number}", 10 * number, 10 * number + 5, need=0)
    assert f"the first {MOST_OWNERS} of {MOST_OWNERS + 5}" in shown(builder.build())


def test_a_slowdown_is_shown_with_its_spread_and_whether_it_is_clear():
    digest = measure_rank_waits(steady_run())
    for is_clear, words in (
        (
            True,
            "compute takes 1.20 times as long (single passes: 1.10 to 1.30).",
        ),
        (False, "(single passes: 1.10 to 1.30). This is within noise."),
    ):
        told = replace(digest.contention, slowdown=1.2, low=1.1, high=1.3, is_clear=is_clear)
        text = text_of(render_waits(replace(digest, contention=told)))
        assert words in " ".join(text.split())


def test_a_unit_name_is_never_read_as_markup():
    builder = RunBuilder(("[red]layers[/red]",), world_size=1)
    builder.rank(0).step(0, 0, 100)
    builder.rank(0).all_gather("[red]layers[/red]", 0, 50, need=0)
    assert "[red]layers[/red] all-gather" in shown(builder.build())


def test_without_a_timed_step_there_is_a_reason():
    assert shown(RunBuilder().build()).startswith(
        "Exposed communication is unknown: the run has no timed step."
    )
