"""Test the cost lines of a run's own collectives."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.simulation.network import (
    CostLine,
    KnownLine,
    Network,
    Pace,
    fit_network,
    known_lines,
    unknown_latencies,
)
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.network_probe import NetworkProbe, ProbedMessage
from tests.builders import InMemoryRun, RunBuilder

MESSAGES = st.lists(
    st.tuples(st.integers(10**4, 10**8), st.integers(10**3, 10**8)), min_size=1, max_size=30
)
MB, MS, FACTOR = 1_000_000, 1_000_000, 3 / 4
"""A megabyte, a millisecond, and the bus factor of all-gathers of four ranks."""


def network_of(
    *gathers: tuple[int, int], scatters: tuple[tuple[int, int], ...] = (), **about_run: object
) -> Network:
    """The network of a rank with these all-gathers and reduce-scatters: bytes and durations."""
    builder = RunBuilder(("layers.0",), world_size=4, **about_run)  # type: ignore[arg-type]
    rank, start = builder.rank(0), 0
    for collective, messages in ((rank.all_gather, gathers), (rank.reduce_scatter, scatters)):
        for num_bytes, duration in messages:
            collective("layers.0", start, start + duration, bytes=num_bytes)
            start += duration
    run = builder.build()
    return fit_network(run.events(0), run.manifest.process_groups, known_lines(run))


def gather_line(network: Network) -> CostLine:
    return network.lines[EventKind.ALL_GATHER]


@settings(deadline=None)  # the first fit loads scipy
@given(MESSAGES)
def test_a_line_keeps_the_sum_of_all_durations_however_they_scatter(
    messages: list[tuple[int, int]],
):
    network = network_of(*messages)
    predicted = [network.duration_ns(EventKind.ALL_GATHER, size, 4) for size, _ in messages]
    total = sum(each for each in predicted if each is not None)
    assert total == pytest.approx(sum(duration for _, duration in messages), rel=1e-3)


@settings(deadline=None)
@given(MESSAGES, st.integers(10**3, 10**9))
def test_the_paces_of_a_line_are_ordered_for_every_message(
    messages: list[tuple[int, int]], size: int
):
    line = gather_line(network_of(*messages))
    paces = (Pace.FAST, Pace.TYPICAL, Pace.CAUTIOUS, Pace.SLOW)
    durations = [line.at(pace).duration_ns(size, FACTOR) for pace in paces]
    assert durations == sorted(durations)
    assert durations[0] >= 0


def test_messages_of_one_size_bound_the_latency():
    line = gather_line(network_of((4 * MB, 10 * MS), (4 * MB, 10 * MS)))
    assert line.bounds is not None
    assert [each.latency_ns for each in line.bounds] == [0, 10 * MS]
    for size, least, most in ((4 * MB, 10, 10), (2 * MB, 5, 10), (40 * MB, 10, 100)):
        assert line.at(Pace.FAST).duration_ns(size, FACTOR) == least * MS
        assert line.at(Pace.CAUTIOUS).duration_ns(size, FACTOR) == most * MS
        assert line.duration_ns(size, FACTOR) == (least + most) / 2 * MS


def test_a_message_that_no_network_is_too_slow_for_shows_latency():
    """4 kB take 0.24 ms over 100 Mbit/s, so at least 9.76 of the 10 ms are latency."""
    line = gather_line(network_of((4000, 10 * MS), (4000, 10 * MS)))
    assert line.bounds is not None
    assert [each.latency_ns for each in line.bounds] == [9.76 * MS, 10 * MS]
    assert line.at(Pace.CAUTIOUS).duration_ns(40_000, FACTOR) == 12.16 * MS
    [stated] = unknown_latencies(network_of((4000, 10 * MS)))
    assert "The lower end assumes a network of at least 12.5 MB/s." in stated
    assert "assumes" not in unknown_latencies(network_of((4 * MB, 10 * MS)))[0]


def test_long_messages_among_short_ones_of_one_size_may_be_latency():
    line = gather_line(network_of(*[(4 * MB, 10 * MS)] * 9, (4 * MB, 110 * MS)))
    assert line.bounds is not None
    assert [each.latency_ns for each in line.bounds] == [0, 20 * MS]
    assert line.at(Pace.FAST).duration_ns(40 * MB, FACTOR) <= 20 * MS


def test_a_shorter_reduce_scatter_lowers_the_highest_latency_of_the_all_gather():
    network = network_of((8 * MB, 10 * MS), scatters=((4 * MB, 6 * MS),))
    bounds = [line.bounds for line in network.lines.values()]
    assert [each and each.most_latency.latency_ns for each in bounds] == [6 * MS, 6 * MS]


def test_an_unknown_latency_is_stated_with_its_bounds_and_the_remedy():
    first, *_ = unknown_latencies(network_of((4 * MB, 10 * MS)))
    assert first.startswith("The latency of all-gather is unknown, between 0 ns and 10.0 ms. Ther")
    assert "python -m fsdp_inspect.probe" in first


def test_a_bandwidth_of_the_user_leaves_an_unknown_latency_between_its_bounds():
    network = network_of((4 * MB, 10 * MS)).change(bus_bytes_per_s=1e9)  # 3 ms for 4 MB
    line = gather_line(network)
    for pace, latency_ns in ((Pace.FAST, 0), (Pace.TYPICAL, 5 * MS), (Pace.SLOW, 10 * MS)):
        assert line.at(pace).duration_ns(4 * MB, FACTOR) == latency_ns + 3 * MS
    assert unknown_latencies(network)[0].startswith("The latency of all-gather is unknown, between")


def test_a_latency_of_the_user_leaves_an_unknown_bandwidth_between_its_bounds():
    network = network_of((4 * MB, 10 * MS)).change(latency_ns=MS)
    line = gather_line(network)
    for pace, transfer_ns in ((Pace.FAST, 0), (Pace.TYPICAL, 5 * MS), (Pace.SLOW, 10 * MS)):
        assert line.at(pace).duration_ns(4 * MB, FACTOR) == transfer_ns + MS
    [stated] = unknown_latencies(network)
    assert stated.startswith(
        "The bandwidth of all-gather is unknown, at least 300 MB/s. There is one"
    )
    assert "The prediction uses 600 MB/s" in stated


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_a_network_of_the_user_is_exact(bus_bytes_per_s: int, latency_ns: int):
    network = network_of((4000, 10 * MS)).change(
        bus_bytes_per_s=bus_bytes_per_s, latency_ns=latency_ns
    )
    line = gather_line(network)
    assert (line.latency_ns, line.bus_bytes_per_s, line.bounds) == (
        latency_ns,
        bus_bytes_per_s,
        None,
    )
    assert unknown_latencies(network) == []


def test_durations_that_do_not_grow_with_the_message_are_latency():
    line = gather_line(network_of((4000, 10 * MS), (40_000, 10 * MS)))
    assert line.duration_ns(100, FACTOR) == 10 * MS
    assert line.duration_ns(400_000, FACTOR) == 10 * MS


def test_two_sizes_separate_latency_and_bandwidth():
    network = network_of((4000, 10 * MS), (8000, 11 * MS))
    line = gather_line(network)
    assert line.bounds is None
    assert line.latency_ns == pytest.approx(9 * MS, rel=1e-3)
    assert unknown_latencies(network) == []


def test_the_error_of_a_line_grows_outside_its_sizes():
    messages = [(4000, 9.5), (4000, 10.5), (8000, 11), (8000, 12), (16000, 14), (16000, 13)]
    line = gather_line(network_of(*((size, int(ms * MS)) for size, ms in messages)))
    widths = [
        line.at(Pace.SLOW).duration_ns(size, FACTOR) / line.duration_ns(size, FACTOR)
        for size in (8000, 100_000, 1_000_000)
    ]
    assert widths[0] < widths[1] < widths[2]


def test_an_emulated_network_states_its_latency():
    link = {"latency_ns": 9 * MS, "bandwidth_bytes_per_s": 3e6}
    emulation = {"gpus_per_node": 4, "intra": link, "inter": None}
    network = network_of((4000, 10 * MS), source="emulated", emulation=emulation)
    assert gather_line(network).duration_ns(40_000, FACTOR) == 19 * MS
    assert unknown_latencies(network) == [
        "The latency of all-gather is 9.00 ms, from the emulated network."
    ]


def probed_network(*probed: tuple[int, int]) -> Network:
    """The network of a run with one all-gather of 10 ms and a probe: bytes and durations."""
    messages = [
        ProbedMessage(kind="all_gather", ranks=[0, 1, 2, 3], bytes=size, count=9, duration_ns=ns)
        for size, ns in probed
    ]
    builder = RunBuilder(("layers.0",), world_size=4)
    builder.rank(0).all_gather("layers.0", 0, 10 * MS, bytes=4000)
    run = builder.build()
    probe = NetworkProbe(world_size=4, backend="gloo", device_type="cpu", messages=messages)
    known = known_lines(_with_probe(run, probe))
    return fit_network(run.events(0), run.manifest.process_groups, known)


def test_a_probe_of_the_same_group_gives_the_latency():
    line = gather_line(probed_network((1000, 8 * MS), (4000, 11 * MS), (8000, 15 * MS)))
    assert line.latency_ns == pytest.approx(7 * MS, rel=0.01)
    assert line.duration_ns(4000, FACTOR) == 10 * MS  # the run's own mean, not that of the probe
    assert line.source == "the network probe of the run"


def test_a_probe_that_scatters_too_much_says_so_and_leaves_the_latency_unknown():
    network = probed_network((1000, 9 * MS), (2000, 3 * MS), (4000, 9 * MS), (8000, 3 * MS))
    assert gather_line(network).bounds == gather_line(network_of((4000, 10 * MS))).bounds
    [assumption] = unknown_latencies(network)
    assert assumption.startswith(
        "The latency of all-gather is unknown, between 9.76 ms and 10.0 ms. There is o"
    )
    assert "The network probe of the run does not show it either: The " in assumption
    assert "Probe the network again while the machines are idle." in assumption


def test_a_probe_of_another_group_is_ignored():
    known: KnownLine = known_lines(
        _with_probe(
            RunBuilder(("a",), world_size=4).build(),
            NetworkProbe(
                world_size=4,
                backend="gloo",
                device_type="cpu",
                messages=[
                    ProbedMessage(kind="all_gather", ranks=[0, 1], bytes=b, count=1, duration_ns=b)
                    for b in (1000, 8000)
                ],
            ),
        )
    )
    assert known(EventKind.ALL_GATHER, [0, 1, 2, 3]) is None
    assert known(EventKind.ALL_GATHER, [0, 1]) is not None


def _with_probe(run: InMemoryRun, probe: NetworkProbe) -> InMemoryRun:
    return replace(run, network_probe=probe)
