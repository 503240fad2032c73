"""What does the canvas get, and is what it sends back believed only as far as it makes sense?"""

import numpy as np
import pytest
from fsdp_inspect_app.timeline import component
from fsdp_inspect_app.timeline.lod import SpanIndex, View
from fsdp_inspect_app.timeline.payload import describe_timeline, encode_timeline, view_key
from fsdp_inspect_app.timeline.tracks import build_timeline

from tests.app.synthetic import MESSAGE_BYTES, make_run
from tests.app.test_packing import unpack

KEY = "run/3/0"


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def timeline(run):
    return build_timeline(run, step=3, ranks=[0])


@pytest.fixture(scope="module")
def index(timeline):
    spans = timeline.spans
    return SpanIndex(lane=spans.lane, look=spans.look, start_ns=spans.start_ns, end_ns=spans.end_ns)


def test_a_packed_step_names_lanes_units_and_looks(run, timeline, index):
    header, columns = unpack(encode_timeline(timeline, index, run.manifest))
    assert [lane["label"] for lane in header["lanes"]] == [
        "compute stream",
        "all-gather",
        "reduce-scatter",
    ]
    assert header["units"][0] == "(root)"
    assert header["view_key"] == view_key(timeline, run.manifest)
    assert len(columns["start"]) == len(timeline.spans)


def test_a_packed_collective_carries_bytes_bandwidth_and_exposure(run, timeline, index):
    header, columns = unpack(encode_timeline(timeline, index, run.manifest))
    looks = [look["label"] for look in header["looks"]]
    own = (columns["look"] == looks.index("all-gather")) & (columns["unit"] == 9)
    assert set(columns["bytes"][own].tolist()) == {MESSAGE_BYTES[9]}
    expected = columns["bytes"][own] / 2 / columns["duration"][own] * 1e9
    np.testing.assert_allclose(columns["bus_bytes_per_s"][own], expected)
    assert columns["exposed"][own].min() > 0


def test_a_window_in_a_step_is_sent_with_a_margin(run, timeline, index):
    view = View(timeline.end_ns // 2, timeline.end_ns // 2 + 1_000_000, 800)
    header, columns = unpack(encode_timeline(timeline, index, run.manifest, view=view))
    assert header["data_start_ns"] == view.start_ns - 250_000
    assert header["data_end_ns"] == view.end_ns + 250_000
    assert 0 < len(columns["start"]) < len(timeline.spans)


def test_the_picture_is_described_in_words(timeline):
    words = describe_timeline(timeline)
    assert words.startswith("Timeline of step 3 on ranks 0: ")
    assert f"{len(timeline.spans)} spans in 3 lanes" in words


def test_the_window_that_the_browser_asks_for_is_taken():
    state = {"view": {"key": KEY, "start_ns": 10, "end_ns": 90, "width_px": 800}}
    assert component.asked_view(state, key=KEY, end_ns=100) == View(10, 90, 800)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(None, id="none"),
        pytest.param("view", id="not a mapping"),
        pytest.param({"key": "other", "start_ns": 1, "end_ns": 9, "width_px": 8}, id="other step"),
        pytest.param({"key": KEY, "start_ns": "1", "end_ns": 9, "width_px": 8}, id="text"),
        pytest.param({"key": KEY, "start_ns": 9, "end_ns": 9, "width_px": 8}, id="empty"),
        pytest.param({"key": KEY, "start_ns": 500, "end_ns": 900, "width_px": 8}, id="outside"),
        pytest.param({"key": KEY}, id="incomplete"),
    ],
)
def test_a_senseless_window_is_no_window(view):
    assert component.asked_view({"view": view}, key=KEY, end_ns=100) is None


def test_a_window_is_clipped_to_the_axis_and_its_width_is_bounded():
    state = {"view": {"key": KEY, "start_ns": -5, "end_ns": 10**15, "width_px": 10**9}}
    assert component.asked_view(state, key=KEY, end_ns=100) == View(0, 100, 8192)


def test_a_clicked_event_is_one_that_exists():
    def selected(event, key=KEY):
        state = {"selected": {"key": key, "event": event}}
        return component.selected_event(state, key=KEY, num_events=5)

    assert selected(4) == 4
    assert selected(5) is None
    assert selected(-1) is None
    assert selected("4") is None
    assert selected(4, key="other") is None
    assert component.selected_event({}, key=KEY, num_events=5) is None
