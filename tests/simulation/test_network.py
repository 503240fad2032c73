"""The lines of a run's own collectives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_inspect.simulation.network import fit_network
from fsdp_inspect.trace.codes import EventKind
from tests.builders import RunBuilder

MESSAGES = st.lists(
    st.tuples(st.integers(10**4, 10**8), st.integers(10**3, 10**8)), min_size=1, max_size=30
)


@settings(deadline=None)  # the first fit loads scipy
@given(MESSAGES)
def test_a_line_keeps_the_sum_of_all_durations_however_they_scatter(
    messages: list[tuple[int, int]],
):
    builder = RunBuilder(("layers.0",), world_size=4)
    rank, start = builder.rank(0), 0
    for num_bytes, duration in messages:
        rank.all_gather("layers.0", start, start + duration, bytes=num_bytes)
        start += duration
    run = builder.build()
    network = fit_network(run.events(0), run.manifest.process_groups)
    predicted = [network.duration_ns(EventKind.ALL_GATHER, size, 4) for size, _ in messages]
    total = sum(each for each in predicted if each is not None)
    assert total == pytest.approx(sum(duration for _, duration in messages), rel=1e-3)
