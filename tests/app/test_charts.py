"""Figures draw the numbers of the results in the fixed colours."""

import dataclasses

import pytest
from fsdp_inspect_app.charts.units import draw_collectives, draw_holds, draw_spreads

from fsdp_inspect.analysis.memory.peak import CategoryBytes, PeakMoment
from fsdp_inspect.analysis.rank_waits import measure_rank_waits
from fsdp_inspect.analysis.scalars import measure_scalars
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.unit_history import measure_unit_history
from fsdp_inspect.report import palette
from fsdp_inspect.report.figures import (
    UNIT_MEASURES,
    draw_breakdown,
    draw_memory,
    draw_owners,
    draw_peak,
    draw_scalar,
    draw_step_times,
    draw_units,
)
from tests.app.synthetic import make_run

FIXED = {
    palette.ALL_GATHER: "#0072B2",
    palette.REDUCE_SCATTER: "#D55E00",
    palette.FORWARD: "#009E73",
    palette.BACKWARD: "#56B4E9",
    palette.OPTIMIZER: "#CC79A7",
}


@pytest.fixture(scope="module")
def run():
    return make_run(num_steps=8)


@pytest.fixture(scope="module")
def digest(run):
    return measure_summary(run)


def test_the_colours_are_the_fixed_ones():
    assert {look: look.colour for look in FIXED} == FIXED


def test_what_is_exposed_is_hatched_in_the_colour_of_its_collective():
    assert palette.EXPOSED_ALL_GATHER.hatched
    assert palette.EXPOSED_ALL_GATHER.colour == palette.ALL_GATHER.colour
    assert palette.EXPOSED_REDUCE_SCATTER.hatched
    assert palette.EXPOSED_REDUCE_SCATTER.colour == palette.REDUCE_SCATTER.colour


def test_the_bar_of_a_step_is_as_long_as_the_step(digest):
    figure = draw_breakdown(digest.breakdown)
    length = sum(bar.x[0] for bar in figure.data)
    assert length == pytest.approx(digest.breakdown.step_time_ns / 1e6)


def test_hatched_bars_are_exactly_the_exposed_and_waiting_parts(digest):
    figure = draw_breakdown(digest.breakdown)
    hatched = {bar.name.rsplit(" ", 2)[0] for bar in figure.data if bar.marker.pattern.shape}
    assert hatched == {"exposed all-gather", "exposed reduce-scatter", "host-bound"}


def test_owners_are_drawn_longest_on_top(digest):
    figure = draw_owners(digest.exposed.owners)
    longest = digest.exposed.owners[0]
    assert figure.layout.yaxis.ticktext[0] == f"{longest.fqn or '(root)'} · {longest.phase}"
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # row 0 is on top
    drawn = [value for bar in figure.data for value in bar.x]
    assert max(drawn) == longest.exposed_ns / 1e6


def test_a_wait_outside_fsdp_has_a_look_of_its_own(digest):
    owner = dataclasses.replace(digest.exposed.owners[0], unit=-1, fqn=None)
    assert draw_owners([owner]).data[0].name == "other collective"


def test_owners_that_are_never_waited_for_are_left_out(digest):
    figure = draw_owners(digest.exposed.owners)
    waited = [owner for owner in digest.exposed.owners if owner.exposed_ns]
    assert sum(len(bar.x) for bar in figure.data) == len(waited)


def test_step_times_are_drawn_with_warm_up_shaded(run):
    times = measure_step_times(run)
    figure = draw_step_times(times)
    assert list(figure.data[0].y) == [point.step_time_ns / 1e6 for point in times.over_steps]
    shades = [(shape.x0, shape.x1) for shape in figure.layout.shapes if shape.x0 != 0]
    assert (-0.5, 1.5) in shades
    assert "warm-up" in [note.text for note in figure.layout.annotations]


def test_the_loss_is_drawn_as_it_was_logged(run):
    series = measure_scalars(run)[0]
    figure = draw_scalar(series, warmup=(0, 1))
    assert list(figure.data[0].y) == list(series.values)


def test_memory_of_a_large_device_is_drawn_in_gib(digest):
    figure = draw_memory(digest.memory.over_steps, warmup=())
    assert [line.name for line in figure.data] == ["allocated", "reserved"]
    highest = digest.memory.over_steps[0].highest_allocated_bytes
    assert figure.data[0].y[0] == highest / (1 << 30)


def test_memory_without_an_allocator_has_no_reserved_line(digest):
    steps = [
        dataclasses.replace(step, highest_reserved_bytes=None) for step in digest.memory.over_steps
    ]
    assert [line.name for line in draw_memory(steps, warmup=()).data] == ["allocated"]


def test_the_peak_is_drawn_by_category():
    categories = (CategoryBytes("activation", 3 << 20), CategoryBytes("all_gather_buffer", 1 << 20))
    peak = PeakMoment(
        rank=0,
        step=2,
        phase="backward",
        unit=1,
        fqn="layers.0",
        bytes=4 << 20,
        categories=categories,
        owners=(),
    )
    figure = draw_peak(peak)
    assert figure.layout.yaxis.ticktext == ("activation", "all-gather buffer")
    assert list(figure.data[0].x) == [3.0, 1.0]


@pytest.mark.parametrize("measure", UNIT_MEASURES)
def test_every_measure_of_the_units_can_be_drawn(digest, measure):
    figure = draw_units(digest.units, measure=measure)
    assert all(len(bar.x) == len(digest.units) for bar in figure.data)
    assert len(figure.data) >= 1


def test_names_of_units_are_no_markup_in_a_chart(digest):
    units = [dataclasses.replace(digest.units[0], fqn="<b>x</b>")]
    figure = draw_units(units, measure="compute")
    assert figure.layout.yaxis.ticktext == ("&lt;b&gt;x&lt;/b&gt;",)


def test_an_unknown_measure_is_refused_with_the_known_ones(digest):
    with pytest.raises(ValueError, match=r"'speed'.*exposed, compute"):
        draw_units(digest.units, measure="speed")


def test_every_collective_of_a_unit_is_a_point_and_the_fit_a_line(run):
    history, waits = measure_unit_history(run, unit=3), measure_rank_waits(run, unit="layers.2")
    fits = {
        "all-gather, forward": next(
            kind.link for kind in waits.bandwidth.kinds if kind.kind == "all_gather"
        )
    }
    figure = draw_collectives(history, fits)
    assert [trace.name for trace in figure.data] == [
        "all-gather, forward",
        "all-gather, backward",
        "reduce-scatter, backward",
    ]
    gathers = history.histories[0]
    assert list(figure.data[0].y) == [one.duration_ns / 1e6 for one in gathers.collectives]
    [line] = figure.layout.shapes
    assert line.y0 == fits["all-gather, forward"].predict_ns(gathers.bytes) / 1e6


def test_the_spread_of_a_units_collectives_has_a_box_a_kind(run):
    figure = draw_spreads(measure_unit_history(run, unit=3))
    assert figure.layout.yaxis.ticktext[0] == "all-gather, forward"
    assert [len(box.x) for box in figure.data] == [6, 6, 6]


def test_memory_that_a_unit_holds_is_drawn_where_it_is_held(run):
    history = measure_unit_history(run, unit=3)
    figure = draw_holds(history)
    assert list(figure.layout.yaxis.ticktext) == [
        "all-gather buffer",
        "unsharded parameter",
        "reduce-scatter buffer",
    ]
    first = history.holds[0]
    assert figure.data[0].base[0] == first.start_ns / 1e6
    assert figure.layout.xaxis.range[1] == history.step_time_ns / 1e6
