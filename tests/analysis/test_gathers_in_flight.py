"""All-gathers that the host issued and the device has not completed."""

from fsdp_inspect.analysis.prefetch import measure_gathers_in_flight
from tests.builders import RunBuilder

UNITS = ("a", "b", "c", "d")


def flight(*spans: tuple[int, int, int], sizes: tuple[int, ...] = (1, 2, 4, 8)):
    """Each span: issued by the host, started, ended."""
    builder = RunBuilder(UNITS, device_type="cuda")
    rank = builder.rank(0)
    rank.step(0, 100, 1000)
    for unit, (issue, start, end), size in zip(UNITS, spans, sizes, strict=False):
        rank.all_gather(unit, start, end, issue_ns=issue, bytes=size)
    return measure_gathers_in_flight(builder.build())


def test_a_host_that_runs_ahead_has_all_of_them_under_way():
    found = flight((110, 200, 300), (120, 300, 400), (130, 400, 500), (140, 500, 600))
    assert (found.most, found.issue_ns, found.fqns) == (4, 40, UNITS)
    assert (found.bytes, found.bytes_of_last_two) == (15, 12)


def test_a_host_that_is_held_back_has_two():
    found = flight((110, 120, 200), (130, 200, 300), (200, 300, 400), (300, 400, 500))
    assert (found.most, found.fqns) == (2, ("a", "b"))


def test_a_run_that_gathers_nothing_has_no_answer():
    assert flight() is None
