"""Cutting a trace into events gives the same result as a parser, for any JSON and block size."""

import json

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing import json_events
from fsdp_inspect.importing.json_events import EventReader, find_event_ends
from fsdp_inspect.importing.trace_file import ImportLimits
from tests.cases import examples

TEXT = st.text(st.sampled_from('ab"\\{}[],: \n\té'), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
EVENTS = st.lists(st.dictionaries(TEXT, VALUES, max_size=4), max_size=12)
KEYS = st.dictionaries(TEXT.filter(lambda key: key != "traceEvents"), VALUES, max_size=3)


def read(content, *, block=7, limits=None):
    blocks = (content[at : at + block] for at in range(0, len(content), block))
    reader = EventReader(blocks, "trace.json", limits or ImportLimits())
    batches = list(reader.batches(msgspec.json.Decoder(list[dict]).decode, json.loads))
    return [event for batch in batches for event in batch], reader.other_values


@pytest.fixture
def small_stretches(monkeypatch):
    monkeypatch.setattr(json_events, "STRETCH_BYTES", 32)


@settings(max_examples=examples(80), deadline=None)
@given(EVENTS, KEYS, KEYS, st.integers(1, 50), st.booleans())
def test_events_and_values_are_those_of_the_json(events, before, after, block, indents):
    content = {**before, "traceEvents": events, **after}
    encoded = json.dumps(content, indent=1 if indents else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_events, "STRETCH_BYTES", 32)
        found, beside = read(encoded, block=block)
    assert found == events
    assert beside == {**before, **after}


@settings(max_examples=examples(50), deadline=None)
@given(EVENTS)
def test_the_ends_of_events_are_where_each_is_whole(events):
    encoded = json.dumps(events).encode()[1:]
    ends = find_event_ends(encoded).tolist()
    starts = [0, *ends][: len(ends)]
    pieces = [encoded[low:high].lstrip(b", ") for low, high in zip(starts, ends, strict=True)]
    assert [json.loads(piece) for piece in pieces] == events


def test_an_array_alone_is_a_trace_too(small_stretches):
    assert read(b'  [{"a": 1}, {"b": [2]},\n]')[0] == [{"a": 1}, {"b": [2]}]


def test_an_event_larger_than_a_stretch_is_read(small_stretches):
    event = {"name": "x" * 500}
    assert read(json.dumps({"traceEvents": [event, event]}).encode())[0] == [event, event]


def test_a_cut_inside_a_string_is_not_taken(small_stretches):
    events = [{"name": "}, {" * 10}, {"args": {"list": [{"a": 1}, {"a": 2}] * 6}}]
    assert read(json.dumps({"traceEvents": events}).encode())[0] == events


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"hello", "begins with 'hello'", id="text"),
        pytest.param(b"   ", "is cut off", id="spaces"),
        pytest.param(b'{"traceEvents": [', "is cut off", id="open array"),
        pytest.param(b'{"traceEvents": [{"a": 1}, {"b', "is cut off", id="open event"),
        pytest.param(b'{"traceEvents": [{"a": 1}]', "is cut off", id="open object"),
        pytest.param(b'{"traceEvents": {}}', "Expected '['", id="no array"),
        pytest.param(b'{"events": [], "x": 1}', "it has 'events', 'x'", id="no events"),
        pytest.param(b"{}", "it has no keys", id="nothing"),
        pytest.param(b'{"traceEvents": [{"a": }]}', "has invalid JSON at byte", id="no value"),
        pytest.param(b'{"traceEvents": [{"a": 1} 7 {}]}', "has invalid JSON at byte", id="rubbish"),
        pytest.param(
            b'{"traceEvents": [{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
            "nested too deeply",
            id="deep",
        ),
    ],
)
def test_what_is_no_trace_is_said_with_its_place(content, says):
    with pytest.raises(ImportingError, match=r"trace\.json") as raised:
        read(content, block=1000)
    assert says in str(raised.value)


def test_one_event_may_not_fill_memory(small_stretches):
    endless = b'{"traceEvents": [{"name": "' + b"x" * 10_000
    with pytest.raises(ImportingError, match="is larger than"):
        read(endless, limits=ImportLimits(max_event_bytes=1000))


@pytest.mark.parametrize(
    "content",
    [
        b'{"data": [' + b'{"a": 1, "b": [1, {"c": "}, {"}]},' * 300_000,
        b"{" + b"".join(b'"k%d": {"a": [1, 2]},' % number for number in range(300_000)),
    ],
    ids=["one value", "many keys"],
)
def test_a_foreign_file_is_refused_after_its_first_megabyte(content):
    read = 0

    def blocks():
        nonlocal read
        for start in range(0, len(content), 1 << 18):
            read = start + (1 << 18)
            yield content[start : start + (1 << 18)]

    reader = EventReader(blocks(), "trace.json", ImportLimits())
    with pytest.raises(ImportingError, match="is JSON, but not a trace"):
        list(reader.batches(json.loads, json.loads))
    assert read <= 4 << 20
