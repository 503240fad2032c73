"""Traces of several ranks: the ranks with one clock, and the offsets of the others."""

import pytest

from fsdp_inspect.analysis.clocks.alignment import align_clocks
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

SHIFT_NS = 1_500_000_000


def import_ranks(folder, *, later_us=(0, 0), hosts=("node1", "node1"), **beside):
    """Import one step of each rank; its trace states that it was this many µs later."""
    traces = folder / "traces"
    traces.mkdir()
    for rank, (at, host) in enumerate(zip(later_us, hosts, strict=True)):
        trace = TraceWriter(rank=rank, **({"host_name": host} if host else {}), **beside)
        fsdp2_step(trace, at=at)
        trace.write(traces / f"rank{rank}.json")
    import_traces(traces, folder / "run")
    return open_run(folder / "run")


def starts_of(run):
    return [int(run.events(rank).start_ns.min()) for rank in (0, 1)]


@pytest.mark.parametrize("later_us", [(0, 0), (0, 5), (5, 0)])
def test_ranks_of_one_host_keep_the_offset_of_their_traces(tmp_path, later_us):
    run = import_ranks(tmp_path, later_us=later_us)
    first, second = starts_of(run)
    alignment = align_clocks(run)
    assert min(first, second) >= 0
    assert second - first == 1000 * (later_us[1] - later_us[0])
    assert len({one.machine for one in alignment.clocks.values()}) == 1
    assert alignment.uncertainty_ns == 2000


def test_ranks_of_one_host_whose_collectives_contradict_its_clock_are_aligned_by_them(tmp_path):
    run = import_ranks(tmp_path, later_us=(0, SHIFT_NS // 1000))
    alignment = align_clocks(run)
    first, second = starts_of(run)
    assert second - first == SHIFT_NS
    assert alignment.uncertainty_ns > 2000
    offset = alignment.clocks[1].clock.offset_ns
    assert abs(offset - SHIFT_NS) <= alignment.uncertainty_ns


@pytest.mark.parametrize("hosts", [("node1", "node2"), ("", "")])
def test_ranks_of_other_or_unknown_hosts_are_aligned_by_their_collectives(tmp_path, hosts):
    alignment = align_clocks(import_ranks(tmp_path, hosts=hosts))
    assert alignment.ranks == (0, 1)
    assert len({one.machine for one in alignment.clocks.values()}) == 2
    assert alignment.uncertainty_ns > 2000


def test_ranks_of_one_host_without_wall_time_are_aligned_by_their_collectives(tmp_path):
    alignment = align_clocks(import_ranks(tmp_path, baseTimeNanoseconds=0))
    assert len({one.machine for one in alignment.clocks.values()}) == 2


def test_the_records_say_when_each_rank_began(tmp_path):
    records = import_ranks(tmp_path, later_us=(0, 5)).ranks
    began = [(one.clock_start.monotonic_ns, one.clock_start.unix_ns) for one in records]
    assert began[1][0] - began[0][0] == began[1][1] - began[0][1] == 5000
