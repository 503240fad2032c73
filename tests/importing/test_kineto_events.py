"""Columns of a trace: exact times, unusual events, messages of communication."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.importing.kineto_events import Category, read_trace
from fsdp_inspect.importing.trace_file import ImportLimits
from tests.cases import examples

KINETO_NS = st.integers(0, 7_889_238 * 10**9)
"""Kineto's times are within three months of its base time."""
UNIX_NS = st.integers(1_600_000_000 * 10**9, 2_000_000_000 * 10**9)


def write_events(path: Path, *events: str) -> Path:
    path.write_text('{"traceEvents": [' + ", ".join(events) + "]}")
    return path


def kernel(start_ns=0, duration_ns=1, **fields):
    times = {"ts": f"@{decimal(start_ns)}", "dur": f"@{decimal(duration_ns)}", **fields}
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, **times}
    return json.dumps(event).replace('"@', "").replace('@"', "")


def decimal(ns):
    """µs in Kineto's notation."""
    return f"{ns // 1000}.{ns % 1000:03}@"


def read(path):
    return read_trace(path, ImportLimits())


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(KINETO_NS, min_size=1, max_size=9) | st.lists(UNIX_NS, min_size=1, max_size=9))
def test_times_are_exact_to_the_nanosecond(tmp_path_factory, times):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    kernels = read(write_events(path, *(kernel(time, 1234) for time in times))).events[
        Category.KERNEL
    ]
    assert kernels.start_ns.tolist() == times
    assert kernels.end_ns.tolist() == [time + 1234 for time in times]


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(kernel(dur=-1), id="negative duration"),
        pytest.param(kernel(ts=-5), id="negative time"),
        pytest.param(kernel(ts=1e300), id="absurd time"),
        pytest.param(kernel(dur=1e300), id="absurd duration"),
        pytest.param(kernel(ts=None), id="no time"),
        pytest.param(kernel(ts="soon"), id="time in words"),
        pytest.param(kernel().replace("0.000", "NaN"), id="not a number"),
        pytest.param(kernel().replace("0.001", "Infinity"), id="infinite"),
        pytest.param(kernel(name=7), id="name that is none"),
        pytest.param(kernel(args=[1]), id="arguments that are none"),
    ],
)
def test_an_event_that_cannot_be_believed_is_left_out_and_counted(tmp_path, odd):
    trace = read(write_events(tmp_path / "trace.json", kernel(1000), odd, kernel(2000)))
    assert trace.events[Category.KERNEL].start_ns.tolist() == [1000, 2000]
    assert (trace.num_events, trace.num_odd) == (3, 1)


def test_a_number_that_is_none_leaves_events_with_shapes_as_they_are(tmp_path):
    shapes = {"Input Dims": [[2, 3], []], "Input type": ["float", ""], "metric": 0.5}
    odd = kernel(1000, args=shapes).replace("0.5", "NaN")
    trace = read(write_events(tmp_path / "trace.json", kernel(2000, args=shapes), odd))
    assert sorted(trace.events[Category.KERNEL].start_ns.tolist()) == [1000, 2000]
    assert trace.num_odd == 0


def test_numbers_as_text_are_read(tmp_path):
    event = kernel(args={"correlation": "17", "External id": 3.0}, ts="1.5")
    kernels = read(write_events(tmp_path / "trace.json", event)).events[Category.KERNEL]
    assert (kernels.correlation[0], kernels.external[0], kernels.start_ns[0]) == (17, 3, 1500)


def test_control_characters_and_foreign_bytes_in_names_are_read(tmp_path):
    path = tmp_path / "trace.json"
    event = kernel().encode().replace(b"gemm", b"a\x01b\xff")
    path.write_bytes(b'{"traceEvents": [' + event + b"]}")
    assert len(read(path).events[Category.KERNEL]) == 1


def test_what_a_collective_says_is_kept(tmp_path):
    metadata = {
        "Collective name": "_allgather_base",
        "In msg nelems": 512,
        "Out msg nelems": 1024,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
    }
    trace = read(write_events(tmp_path / "trace.json", kernel(), kernel(args=metadata)))
    (position, message), *_ = trace.messages[Category.KERNEL].items()
    assert position == 1
    assert (message.collective, message.elements) == ("_allgather_base", 1024)
    assert (message.group_name, message.group_ranks) == ("0", (0, 1))


def test_an_abbreviated_list_of_ranks_is_no_list(tmp_path):
    event = kernel(args={"Collective name": "allreduce", "Process Group Ranks": "[0, ..., 63]"})
    trace = read(write_events(tmp_path / "trace.json", event))
    assert trace.messages[Category.KERNEL][0].group_ranks is None


def test_other_values_of_the_trace_are_kept(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"a": {"b": [1, "}"]}, "traceEvents": [], "baseTimeNanoseconds": 5}')
    assert read(path).other_values == {"a": {"b": [1, "}"]}, "baseTimeNanoseconds": 5}
