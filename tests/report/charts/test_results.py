import dataclasses
import re

import pytest

from fsdp_inspect.analysis.scalars import measure_scalars
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.report import palette
from fsdp_inspect.report.charts.results import (
    UNIT_MEASURES,
    draw_breakdown,
    draw_memory,
    draw_owners,
    draw_scalar,
    draw_step_times,
    draw_units,
)
from tests.app.synthetic import make_run

FIXED = {
    palette.ALL_GATHER: "#0081EB",
    palette.REDUCE_SCATTER: "#C04900",
    palette.FORWARD: "#15A160",
    palette.BACKWARD: "#227E90",
    palette.OPTIMIZER: "#DA61BA",
}


@pytest.fixture(scope="module")
def run():
    return make_run(num_steps=8)


@pytest.fixture(scope="module")
def digest(run):
    return measure_summary(run)


def names(chart):
    return re.findall(r'chart-name" title="([^"]*)"', chart.markup)


def ends(chart):
    return re.findall(r'chart-end"[^>]*>([^<]*)<', chart.markup)


def labels(chart):
    return [series["label"] for series in chart.plots[0]["series"]]


def test_the_colours_are_the_fixed_ones():
    assert {look: look.colour for look in FIXED} == FIXED


def test_an_exposed_wait_is_hatched_in_the_colour_of_its_collective():
    assert palette.EXPOSED_ALL_GATHER.hatched
    assert palette.EXPOSED_ALL_GATHER.colour == palette.ALL_GATHER.colour
    assert palette.EXPOSED_REDUCE_SCATTER.hatched
    assert palette.EXPOSED_REDUCE_SCATTER.colour == palette.REDUCE_SCATTER.colour


def test_the_bar_of_a_step_is_as_long_as_the_step(digest):
    widths = re.findall(r"width:([\d.]+)%", draw_breakdown(digest.breakdown).markup)
    assert sum(map(float, widths)) == pytest.approx(100, rel=1e-3)


def test_hatched_bars_are_exactly_the_exposed_and_waiting_parts(digest):
    markup = draw_breakdown(digest.breakdown).markup
    tips = re.findall(r'chart-fill chart-hatched"[^>]* title="([^:"]*):', markup)
    assert set(tips) == {"exposed all-gather", "exposed reduce-scatter", "host-bound"}


def test_owners_are_drawn_longest_on_top(digest):
    owners = digest.exposed.owners
    chart = draw_owners(owners)
    first = owners[0]
    kind = first.kind.replace("_", "-")
    assert names(chart)[0] == f"{first.fqn or '(root)'} · {first.phase} {kind}"
    assert ends(chart) == [format_ns(owner.exposed_ns) for owner in owners]


def test_a_wait_outside_fsdp_has_a_look_of_its_own(digest):
    owner = dataclasses.replace(digest.exposed.owners[0], unit=-1, fqn=None)
    assert palette.look_of_wait(owner.kind, None).colour in draw_owners([owner]).markup


def test_step_times_are_drawn_with_warm_up_shaded(run):
    times = measure_step_times(run)
    chart = draw_step_times(times)
    step_time = chart.plots[0]["series"][1]
    assert step_time["told"] == [format_ns(point.step_time_ns) for point in times.over_steps]
    assert 'chart-band" data-x="0.0" data-w="25.0"' in chart.markup
    assert "warm-up" in chart.markup
    assert f"typical {format_ns(times.step_time_ns.typical)}" in chart.markup


def test_the_loss_is_drawn_as_it_was_logged(run):
    series = measure_scalars(run)[0]
    told = draw_scalar(series, warmup=(0, 1)).plots[0]["series"][0]["told"]
    assert told == [f"{value:.4g}" for value in series.values]


def test_memory_without_an_allocator_has_no_reserved_line(digest):
    steps = digest.memory.over_steps
    assert labels(draw_memory(steps, warmup=())) == ["allocated", "reserved"]
    bare = [dataclasses.replace(step, highest_reserved_bytes=None) for step in steps]
    assert labels(draw_memory(bare, warmup=())) == ["allocated"]


@pytest.mark.parametrize("measure", UNIT_MEASURES)
def test_every_measure_of_the_units_can_be_drawn(digest, measure):
    chart = draw_units(digest.units, measure=measure)
    assert len(names(chart)) == len(digest.units)
    assert "chart-fill" in chart.markup


def test_an_unknown_measure_is_refused_with_the_known_ones(digest):
    with pytest.raises(ValueError, match=r"'speed'.*exposed, compute"):
        draw_units(digest.units, measure="speed")
