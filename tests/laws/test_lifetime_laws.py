"""Laws of the phases of a run, for any recorded times."""

from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.lifetime import measure_lifetime
from fsdp_inspect.trace.codes import EventFlag, EventKind
from fsdp_inspect.trace.run import ClockPair, ProcessLife, RunStatus, TimeSpan
from tests.builders import InMemoryRun, RunBuilder

TIMES = st.integers(0, 60)
SPANS = st.builds(
    lambda low, length: TimeSpan(start_ns=low, end_ns=low + length), TIMES, st.integers(0, 30)
)
LIVES = st.none() | st.builds(
    ProcessLife,
    started_ns=st.none() | TIMES,
    imported_ns=st.none() | TIMES,
    shard=st.none() | SPANS,
    loads=st.lists(SPANS, max_size=3),
    background_saves=st.lists(SPANS, max_size=2),
)


@st.composite
def attempts(draw, number: int) -> InMemoryRun:
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for step in range(draw(st.integers(0, 4))):
        span = draw(SPANS)
        rank.step(step, span.start_ns, span.end_ns)
    for span in draw(st.lists(SPANS, max_size=4)):
        flags = draw(st.sampled_from([0, int(EventFlag.CHECKPOINT)]))
        rank.add(EventKind.BETWEEN_STEPS, span.start_ns, span.end_ns, flags=flags)
    at, wall, end = draw(TIMES), draw(st.integers(0, 200)), draw(st.none() | TIMES)
    rank.record = {
        "attempt": number,
        "status": draw(st.sampled_from(list(RunStatus))),
        "life": draw(LIVES),
        "clock_start": ClockPair(monotonic_ns=at, unix_ns=wall, uncertainty_ns=0),
        "clock_end": None
        if end is None
        else ClockPair(monotonic_ns=end, unix_ns=wall + end - at, uncertainty_ns=0),
    }
    return builder.build()


@given(data=st.data(), num_attempts=st.integers(1, 3))
@settings(deadline=None)
def test_the_phases_add_up_to_the_wall_time(data, num_attempts):
    *earlier, last = [data.draw(attempts(number)) for number in range(num_attempts)]
    run = InMemoryRun(last.manifest, last.ranks, last.event_tables, earlier_attempts=earlier)
    lifetime = measure_lifetime(run)
    assert sum(phase.duration_ns for phase in lifetime.phases) == lifetime.wall_ns
    assert all(phase.duration_ns > 0 for phase in lifetime.phases)
    assert 0 <= lifetime.goodput_ratio <= 1
