"""The data for the canvas, and the checks of its answers."""

import dataclasses

import numpy as np
import pytest
from fsdp_inspect_app.timeline import lod
from fsdp_inspect_app.timeline.lod import View
from fsdp_inspect_app.timeline.payload import MAX_READINGS, describe_tracks, encode_tracks
from fsdp_inspect_app.timeline.request import Jump, TimelineRequest, parse_view, read_request
from fsdp_inspect_app.timeline.track_set import Place, Tracks, TrackSet
from fsdp_inspect_app.timeline.tracks import build_timeline, draw_events

from fsdp_inspect.trace.codes import EventKind
from tests.app.synthetic import MESSAGE_BYTES, make_run
from tests.app.test_packing import unpack


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def member(run):
    return TrackSet(build_timeline(run, step=3, ranks=[0, 1]), run.manifest)


@pytest.fixture(scope="module")
def tracks(member):
    return Tracks((member,))


@pytest.fixture(scope="module")
def packed(tracks):
    return unpack(encode_tracks(tracks, TimelineRequest()))


def num_spans(timeline):
    return sum(len(drawn.layout.index) for drawn in timeline.ranks)


def test_a_packed_step_names_lanes_units_and_ranks(packed, member, tracks):
    header, columns = packed
    own = ["host issue", "compute stream", "all-gather", "reduce-scatter", "memory"]
    assert [lane["label"] for lane in header["lanes"]] == own * 2
    assert [block["rank"] for block in header["blocks"]] == [0, 1]
    assert header["units"][0] == "(root)"
    assert header["key"] == tracks.key
    assert len(columns["start"]) == num_spans(member.timeline)


def test_a_packed_collective_carries_bytes_bandwidth_and_exposure(packed, run):
    header, columns = packed
    looks = [look["label"] for look in header["looks"]]
    is_body = [lane["kind"] == "collective" for lane in header["lanes"]]
    own = np.array(is_body)[columns["lane"]] & (columns["look"] == looks.index("all-gather"))
    own &= columns["unit"] == 9
    assert set(columns["bytes"][own].tolist()) == {MESSAGE_BYTES[9]}
    expected = columns["bytes"][own] / 2 / columns["duration"][own] * 1e9
    np.testing.assert_allclose(columns["bus_bytes_per_s"][own], expected, rtol=1e-6)
    assert columns["exposed"][own].max() > 0


def test_times_of_an_event_are_relative_to_the_piece_that_shows_it(packed, member):
    _, columns = packed
    issue = columns["start"] + columns["issue"]
    drawn = member.timeline.ranks
    expected = np.concatenate([one.events.issue_ns + one.shift_ns for one in drawn])
    expected = expected[columns["event"]]
    np.testing.assert_allclose(issue, expected, atol=64)


def test_memory_is_sent_with_its_peak_and_where_it_was(packed):
    header, columns = packed
    curve = header["memory"][0]
    assert (curve["count"], curve["top_bytes"]) == (4, 14 << 30)
    assert (curve["peak_bytes"], curve["peak_phase"]) == (12 << 30, "forward")
    assert columns["memory_allocated"][:4].tolist() == [5 << 30, 12 << 30, 9 << 30, 5 << 30]


def test_a_step_of_which_nothing_else_is_known_is_an_empty_lane(run, member):
    events = run.events(0, steps=[3])
    empty = TrackSet(draw_events(events.where(events.kind == EventKind.STEP), rank=0), run.manifest)
    assert "0 spans in 1 lanes" in describe_tracks(Tracks((empty,)))
    header, columns = unpack(encode_tracks(Tracks((empty,)), TimelineRequest()))
    assert header["is_exact"]
    assert len(columns["start"]) == 0
    below = unpack(encode_tracks(Tracks((member, empty)), TimelineRequest()))[1]
    assert len(below["start"]) == num_spans(member.timeline)


def test_a_window_in_a_step_is_sent_with_a_margin(tracks, member):
    view = View(tracks.end_ns // 2, tracks.end_ns // 2 + 1_000_000, 800)
    header, columns = unpack(encode_tracks(tracks, TimelineRequest(view=view)))
    assert header["data_start_ns"] == view.start_ns - 250_000
    assert header["data_end_ns"] == view.end_ns + 250_000
    assert 0 < len(columns["start"]) < num_spans(member.timeline)


def test_a_view_is_never_a_megabyte(packed, tracks, monkeypatch):
    def bytes_of(columns):
        return sum(column.itemsize for name, column in columns.items() if "memory" not in name)

    _, spans = packed
    assert bytes_of(spans) * lod.MAX_SPANS < 800_000
    monkeypatch.setattr("fsdp_inspect_app.timeline.payload.MAX_SPANS", 1)
    header, density = unpack(encode_tracks(tracks, TimelineRequest()))
    assert not header["is_exact"]
    assert bytes_of(density) * lod.MAX_RECTANGLES < 800_000
    readings = sum(column.itemsize for name, column in spans.items() if "memory" in name)
    assert readings * MAX_READINGS < 200_000


def test_the_picture_is_described_in_words(tracks, member):
    words = describe_tracks(tracks)
    assert words.startswith("Timeline of step 3 on ranks 0, 1: ")
    assert f"{member.timeline.num_timed_spans} spans in 10 lanes" in words


def test_several_steps_lie_one_above_the_other_from_their_starts(run, member):
    predicted = draw_events(run.events(1, steps=[4]), rank=1)
    below = TrackSet(predicted, run.manifest, title="predicted")
    above = dataclasses.replace(member, title="recorded")
    both = Tracks((above, below))
    header, columns = unpack(encode_tracks(both, TimelineRequest()))
    assert [(block["title"], block["rank"]) for block in header["blocks"]] == [
        ("recorded", 0),
        ("recorded", 1),
        ("predicted", 1),
    ]
    assert [block["start_ns"] for block in header["blocks"]][::2] == [0, 0]
    assert len(header["units"]) == 20
    assert len(columns["start"]) == num_spans(member.timeline) + num_spans(predicted)
    in_last = columns["lane"] >= header["blocks"][2]["first_lane"]
    assert columns["unit"][in_last].max() == 19
    assert columns["event"][in_last].min() >= member.timeline.num_events
    assert both.place(both.number(Place(1, 5))) == Place(1, 5)


def test_when_one_of_several_steps_is_too_large_all_are_sent_as_density(run, member, monkeypatch):
    monkeypatch.setattr("fsdp_inspect_app.timeline.payload.MAX_SPANS", 250)
    small = TrackSet(draw_events(run.events(1, steps=[4]), rank=1), run.manifest)
    header, columns = unpack(encode_tracks(Tracks((member, small)), TimelineRequest()))
    assert not header["is_exact"]
    assert "event" not in columns


@pytest.mark.parametrize(
    ("query", "number", "total"),
    [
        pytest.param("layers.3", 1, 5, id="a name"),
        pytest.param("LAYERS.3", 1, 5, id="in any case"),
        pytest.param("lm_head", 1, 6, id="a part of a name"),
        pytest.param("layers.99", 0, 0, id="no name"),
        pytest.param("", 0, 0, id="nothing"),
    ],
)
def test_a_search_counts_what_is_drawn_of_the_unit_on_one_rank(tracks, query, number, total):
    found = tracks.find(query, after=None, direction=0)
    assert (found.number, found.total) == (number, total)


def test_a_search_goes_forwards_and_backwards_and_around(tracks, member):
    first = tracks.find("layers.3", after=None, direction=0)
    second = tracks.find("layers.3", after=first.place, direction=1)
    assert second.number == 2
    assert tracks.find("layers.3", after=second.place, direction=-1) == first
    last = tracks.find("layers.3", after=first.place, direction=-1)
    assert last.number == last.total
    events = member.timeline.ranks[0].events
    starts = [events.start_ns[found.place.event] for found in (first, second, last)]
    assert starts == sorted(starts)


def test_a_search_stays_on_the_rank_of_the_selection(tracks, member):
    after = Place(0, member.timeline.find_rank(1).first_event)
    found = tracks.find("layers.3", after=after, direction=1)
    assert member.timeline.rank_of(found.place.event).rank == 1


def test_search_and_jump_are_answered_with_the_place_in_time(tracks, member):
    drawn = member.timeline.find_rank(1)
    own = int(np.flatnonzero(drawn.events.kind == EventKind.ALL_GATHER)[3])
    place = Place(0, drawn.first_event + own)
    asked = TimelineRequest(query="layers.3", serial=7)
    header, _ = unpack(encode_tracks(tracks, asked, jump=Jump(2, place)))
    found = header["found"]
    assert (found["serial"], found["number"]) == (7, 1)
    assert found["end_ns"] > found["start_ns"]
    assert header["jump"]["serial"] == 2
    assert header["jump"]["event"] == place.event
    assert header["jump"]["start_ns"] == drawn.events.start_ns[own] + drawn.shift_ns


def test_an_event_has_a_name_for_the_address(member):
    event = member.timeline.find_rank(1).first_event + 5
    assert member.name_of_event(event) == "1-5"
    assert member.find_event("1-5") == Place(0, event)
    for name in ("", "1", "1-", "7-0", "1-999999", "-1-5", "1-5;", "١-٥"):
        assert member.find_event(name) is None, name


def state_of(tracks, **asked):
    return {"asked": {"key": tracks.key, **asked}}


def test_what_the_browser_asks_for_is_taken(tracks):
    state = state_of(
        tracks,
        view={"start_ns": 10, "end_ns": 90, "width_px": 800},
        selected=3,
        find={"query": "layers", "direction": -1, "serial": 4},
        pinned=[1, 1, 9, "0"],
    )
    assert read_request(state, tracks, opening=TimelineRequest()) == TimelineRequest(
        view=View(10, 90, 800),
        selected=Place(0, 3),
        query="layers",
        direction=-1,
        serial=4,
        pinned=((0, 1),),
    )


def test_what_a_drawing_opens_with_holds_until_the_browser_speaks_of_it(tracks):
    opening = TimelineRequest(query="layers.1")
    assert read_request({}, tracks, opening=opening) == opening
    other = {"asked": {"key": "another step", "selected": 1}}
    assert read_request(other, tracks, opening=opening) == opening


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"view": "view", "find": 3, "pinned": 4, "selected": "x"}, id="other types"),
        pytest.param({"view": {"start_ns": "1", "end_ns": 9, "width_px": 8}}, id="text"),
        pytest.param({"view": {"start_ns": 9, "end_ns": 9, "width_px": 8}}, id="empty window"),
        pytest.param({"view": {"start_ns": 10**15, "end_ns": 10**16, "width_px": 8}}, id="outside"),
        pytest.param({"selected": 10**9, "find": {"query": 1, "serial": -1}}, id="no such event"),
        pytest.param({"selected": -1, "pinned": [-1, 2]}, id="negative"),
        pytest.param({"find": {"direction": [], "serial": 2**40}}, id="a list"),
    ],
)
def test_what_makes_no_sense_is_as_if_not_asked(tracks, asked):
    assert (
        read_request(state_of(tracks, **asked), tracks, opening=TimelineRequest())
        == TimelineRequest()
    )


def test_a_window_is_clipped_to_the_axis_and_its_width_is_bounded(tracks):
    view = {"start_ns": -5, "end_ns": 10**15, "width_px": 10**9}
    asked = read_request(state_of(tracks, view=view), tracks, opening=TimelineRequest())
    assert asked.view == View(0, tracks.end_ns, 8192)


def test_a_window_in_an_address_is_two_times():
    assert parse_view("10-90", 100) == View(10, 90, 1600)
    for text in ("", "10", "10-", "-5-90", "90-10", "1e3-2e3", "200-300", "1" * 50 + "-2"):
        assert parse_view(text, 100) is None, text
