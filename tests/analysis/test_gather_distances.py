"""The prefetch and reuse distances of ZeRO-3, from gathers and uses of known order."""

from dataclasses import replace

import pytest

from fsdp_inspect.analysis.gather_distances import GatherDistances
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.report.text import describe_distances, render_units
from fsdp_inspect.trace.codes import EventFlag, EventKind, Phase
from fsdp_inspect.trace.sharders import ZERO3
from tests.builders import RunBuilder
from tests.report.terminal_text import text_of

UNITS = ("a", "b", "c")
SIZE = 100


def build_run(sharder=ZERO3):
    """Build forward a, b, c and backward c, b, a.

    `c` is gathered before `a` runs, and `a` is gathered again for its backward.
    """
    builder = RunBuilder(UNITS, world_size=2)
    own = builder.rank(0)
    kept = EventFlag.STILL_GATHERED
    for step in range(4):
        begin = 1000 * step
        own.step(step, begin, begin + 1000)
        uses = [*((unit, EventKind.FORWARD) for unit in UNITS),
                *((unit, EventKind.BACKWARD) for unit in UNITS[::-1])]  # fmt: skip
        for place, (unit, kind) in enumerate(uses):
            start = begin + 100 + 100 * place
            flags = kept if kind == EventKind.BACKWARD and unit != "a" else 0
            phase = Phase.FORWARD if kind == EventKind.FORWARD else Phase.BACKWARD
            own.add(kind, start, start + 50, unit=unit, phase=phase, flags=flags)
        own.add(
            EventKind.ALL_GATHER, begin + 50, begin + 90, need_ns=begin + 299, unit="c",
            flags=EventFlag.PREFETCHED, phase=Phase.FORWARD, bytes=8, issue_ns=begin + 50,
        )  # fmt: skip
    made = builder.build()
    units = [
        unit.model_copy(update={"num_parameters": SIZE, "reshard_after_forward": True})
        for unit in made.manifest.units
    ]
    observed = {"prefetch_bucket_size": "60000", "max_reuse_distance": "0"}
    changes = {"units": units, "sharder": sharder, "observed": observed}
    return replace(made, manifest=made.manifest.model_copy(update=changes))


@pytest.fixture(scope="module")
def distances() -> GatherDistances:
    found = measure_units(build_run()).distances
    assert found is not None
    return found


def test_a_prefetch_distance_counts_the_parameters_of_the_units_in_between(distances):
    rows = {row.fqn: row for row in distances.units}
    assert (rows["c"].num_prefetched, rows["c"].prefetch_distance) == (4, 2 * SIZE)
    assert rows["a"].prefetch_distance is None
    assert distances.longest_prefetch == 2 * SIZE


def test_a_reuse_distance_counts_the_parameters_between_forward_and_backward(distances):
    rows = {row.fqn: row for row in distances.units}
    found = {name: (row.reuse_distance, row.kept_ratio) for name, row in rows.items()}
    assert found == {"a": (4 * SIZE, 0.0), "b": (2 * SIZE, 1.0), "c": (0, 1.0)}
    assert (distances.longest_kept, distances.shortest_released) == (2 * SIZE, 4 * SIZE)


def test_the_report_states_the_distances_and_the_settings(distances):
    assert describe_distances(distances) == [
        "Gathers are issued up to 200 parameters ahead (prefetch_bucket_size: 60,000).",
        "Parameters stay gathered over at most 200 other parameters (max_reuse_distance: 0).",
        "Parameters are gathered again after at least 400 other parameters "
        "(max_reuse_distance: 0).",
    ]
    assert "Prefetch and reuse distances" in text_of(render_units(measure_units(build_run())))


def test_another_sharder_has_no_distances():
    assert measure_units(build_run(sharder="fsdp2")).distances is None
