"""Test the timeline page of runs with the events of only some steps."""

import pytest
from fsdp_inspect_app.timeline.track_set import find_drawable_steps, find_sampled_steps

from fsdp_inspect import Run
from fsdp_inspect.store.compacted import write_compacted
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import EVENTS
from tests.app.conftest import start_app
from tests.app.synthetic import make_run, write_run
from tests.app.test_packing import unpack
from tests.app.test_pages import SAMPLES, read

RUN = "tiny-2-ranks"


@pytest.fixture(scope="module")
def thinned(tmp_path_factory):
    """Eight steps in the summary; one run has the events of three steps, another of none."""
    folder = tmp_path_factory.mktemp("thinned")
    run = make_run(num_steps=8)
    for name, kept in (("some", [0, 5, 7]), ("none", [])):
        write_run(folder / name, run)
        compact_run(folder / name)
        for rank in (0, 1):
            target = rank_folder(folder / name, 0, rank) / EVENTS.compacted_name
            events = run.events(rank, steps=kept)
            write_compacted(target, EVENTS, events, covered_rows=len(events))
    return folder


def test_steps_that_kept_their_events_are_told_from_those_that_did_not(thinned):
    assert find_drawable_steps(open_run(thinned / "some"), rank=0) == (0, 5, 7)
    assert find_drawable_steps(open_run(thinned / "none"), rank=0) == ()
    assert find_sampled_steps(open_run(thinned / "some")) == tuple(range(8))


def test_a_step_is_drawn_without_the_summary_of_the_run(thinned, monkeypatch):
    def refuse(run: object) -> None:
        raise AssertionError("The page needs the heading of the run, not its exposed waits.")

    monkeypatch.setattr(Run, "summary", refuse)
    app = start_app(thinned, "timeline", run="some", step="5")
    assert not app.exception
    assert app.query_params["step"] in ("5", ["5"])


def test_only_steps_with_events_can_be_chosen_and_the_others_are_counted(thinned):
    app = start_app(thinned, "timeline", run="some", step="6")
    assert not app.exception
    [picker] = [box for box in app.selectbox if box.label == "Step"]
    assert [option.split(" ")[0] for option in picker.options] == ["0", "5", "7"]
    assert app.query_params["step"] in ("0", "5", "7")
    assert "3 of 8 completed steps have events" in read(app)


def test_without_any_events_the_page_says_what_there_is_instead(thinned):
    app = start_app(thinned, "timeline", run="none")
    assert not app.exception
    assert "No step can be drawn: the events are missing." in read(app)


def test_the_buttons_by_step_time_choose_the_step(open_app):
    run = open_run(SAMPLES / RUN)
    timed = [each for each in Run(run).step_times().over_steps if each.is_timed]
    slowest = max(timed, key=lambda each: each.step_time_ns).step
    app = open_app(SAMPLES, "timeline", run=RUN)
    (marks,) = (each for each in app.button_group if each.label == "By step time")
    assert marks.options[0] == "typical"
    assert marks.value == "typical"
    marks.set_value("slowest").run()
    assert not app.exception
    assert app.query_params["step"] == str(slowest)
    assert next(box for box in app.selectbox if box.label == "Step").value == slowest


def drawing_of(app):
    """What the canvas was given."""
    (proto,) = (each.proto for each in app.get("bidi_component")
                if each.proto.component_name == "fsdp_inspect_timeline")  # fmt: skip
    return unpack(proto.bytes)[0]


def test_many_ranks_have_one_lane_each(open_app, tmp_path):
    write_run(tmp_path / "run", make_run(num_steps=4, num_ranks=20))
    app = open_app(tmp_path, "timeline", run="run", lanes="one")
    assert not app.exception
    drawn = drawing_of(app)
    assert [block["rank"] for block in drawn["blocks"]] == list(range(20))
    assert {lane["kind"] for lane in drawn["lanes"]} == {"clock"}
    (range_of,) = app.select_slider
    range_of.set_value((3, 12)).run()
    drawn = drawing_of(app)
    assert [block["rank"] for block in drawn["blocks"]] == list(range(3, 13))
    assert app.query_params["rank"] == ["3", "12"]


def test_the_hint_of_the_keys_can_be_hidden(open_app):
    app = open_app(SAMPLES, "timeline", run=RUN)
    assert "Click a span to see its details" in read(app)
    app.button(key="hide the hint").click().run()
    assert "Click a span to see its details" not in read(app)
