"""Find the calls in a trace that stop the host, with the idle time of the device that they cause.

After a wait for the device, the device has no work until the host launches the next kernel. That
idle time is what the wait costs; the time inside it is mostly work of the device. The driver's own
work (a new allocation, the capture of a CUDA graph, the loading of a kernel) costs the time inside
the call in which the device is idle; after the call, the host may be slow for other reasons. A line
is known if the trace has stacks (`profile(with_stack=True)`); Kineto then states the first line of
each function. Sources: names of the CUDA and HIP runtimes, CUPTI's kinds of overhead.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.collective_rows import make_rows
from fsdp_inspect.importing.communications import Issues
from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.kernel_names import user_line
from fsdp_inspect.importing.kernel_rows import unit_at
from fsdp_inspect.importing.kineto_events import (
    Category,
    EventColumns,
    KinetoTrace,
    join_columns,
)
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.importing.windows import PhaseRanges, StepMarks
from fsdp_inspect.trace.codes import EventKind, Method, Stream
from fsdp_inspect.trace.host_work import MOST_STOPS, STOP_NAMES, HostActivity, HostStop
from fsdp_inspect.trace.intervals import Intervals
from fsdp_inspect.trace.tables import EventTable

Int64Array = NDArray[np.int64]

_WAIT = re.compile(
    r"(?:cuda|hip|cu)(?:Stream|Device|Event|Ctx)Synchronize|(?:cuda|hip)Memcpy(?!\w*Async)"
)
_DRIVER = {
    EventKind.DEVICE_ALLOCATION: re.compile(
        r"(?:cuda|hip(?:Ext)?|cuMem)(?:Host)?(?:Malloc|Alloc|Free)(?!\w*Async)"
        r"|cuMem(?:Create|Map|Unmap|Release)(?!\w*Async)"
    ),
    EventKind.GRAPH_CAPTURE: re.compile(
        r"(?:cuda|hip|cu)(?:StreamBeginCapture|StreamEndCapture|GraphInstantiate)"
    ),
    EventKind.KERNEL_LOADING: re.compile(
        r"(?:cu|hip)(?:Module|Library)(?:Load|GetFunction)|Runtime Triggered Module Loading"
        r"|Lazy Function Loading"
    ),
}
"""The calls of the driver that few steps need."""
_WAITS, _OTHERS = -1, -2
_CAPTURE = "Capture"
_READS = {
    "aten::_local_scalar_dense": ".item()",
    "aten::item": ".item()",
    "aten::is_nonzero": "bool(tensor)",
    "aten::nonzero": "nonzero() or a boolean mask",
}
"""Operators that read values, and their names in texts."""


@dataclass(frozen=True, slots=True)
class HostCalls:
    """The calls of a trace that stop its host."""

    activity: HostActivity | None
    """The calls by kind, line, phase and unit. None: the trace has no launches."""
    driver: EventTable
    """A row for each call of the driver; its step is not set."""


def find_host_calls(
    trace: KinetoTrace,
    ranges: UnitRanges,
    phases: PhaseRanges,
    marks: StepMarks,
    busy: Intervals,
) -> HostCalls:
    """The calls that wait for the device or have a long work of the driver.

    Args:
        trace: The whole trace, with its launches.
        ranges: The ranges of the units.
        phases: The phases.
        marks: The steps.
        busy: The times in which the device runs anything.

    Returns:
        Units of the activity have the indices of `ranges`.
    """
    launches = trace.events[Category.LAUNCH]
    if len(launches) == 0:
        return HostCalls(None, EventTable.empty())
    codes = np.array([_code_of(name) for name in trace.names], dtype=np.int64)
    waits = launches.where(codes[launches.name] == _WAITS)
    waits = waits.where(np.argsort(waits.start_ns, kind="stable"))
    idle_ns, has_next = _idle_after(waits, launches.where(codes[launches.name] == _OTHERS), busy)
    driver = _find_driver_calls(trace, codes, busy)
    lost_ns = driver.end_ns - driver.start_ns - busy.covered_ns(driver.start_ns, driver.end_ns)
    calls = join_columns([waits.where(has_next), driver])
    idle_ns = np.concatenate([idle_ns[has_next], lost_ns])
    code = codes[calls.name]
    issues = Issues(calls.thread, calls.start_ns)
    unit, phase = unit_at(ranges, issues), phases.phase_of(calls.thread, calls.start_ns)
    place, reads = _lines(trace, calls), _reads(trace, calls)
    step = marks.of_issue(calls.start_ns)
    found: dict[tuple[str, str, int, int], list[int]] = {}
    steps: dict[tuple[str, str, int, int], set[int]] = {}
    for at in np.flatnonzero(step != NOWHERE).tolist():
        what = reads[at] if code[at] == _WAITS else STOP_NAMES[EventKind(int(code[at]))]
        key = (what, place[at], int(phase[at]), int(unit[at]))
        if key not in found and len(found) >= MOST_STOPS:
            continue
        total = found.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += int(calls.end_ns[at] - calls.start_ns[at])
        total[2] += int(idle_ns[at])
        steps.setdefault(key, set()).add(int(step[at]))
    stops = [
        HostStop(
            what=key[0],
            place=key[1][:1000],
            phase=key[2],
            unit=key[3],
            count=count,
            duration_ns=duration_ns,
            idle_ns=idle,
            num_steps=len(steps[key]),
        )
        for key, (count, duration_ns, idle) in found.items()
    ]
    num_steps = len(marks.number)
    activity = HostActivity(
        num_steps=num_steps,
        num_read_steps=num_steps,
        sees_reads=True,
        stops=sorted(stops, key=lambda stop: -(stop.idle_ns or 0)),
    )
    rows = make_rows(
        codes[driver.name],
        driver.start_ns,
        driver.end_ns,
        phase=phases.phase_of(driver.thread, driver.start_ns),
        stream=Stream.HOST,
        method=Method.MEASURED,
    )
    return HostCalls(activity, rows)


def _code_of(name: str) -> int:
    if _WAIT.match(name):
        return _WAITS
    return next((int(kind) for kind, pattern in _DRIVER.items() if pattern.match(name)), _OTHERS)


def _find_driver_calls(trace: KinetoTrace, codes: Int64Array, within: Intervals) -> EventColumns:
    """The calls of the driver in order; one that begins a capture lasts until the capture ends.

    Args:
        trace: The trace.
        codes: The code of each name of the trace.
        within: Calls are cut at its begin and its end.
    """
    if not len(within):
        return join_columns([])
    calls = join_columns([trace.events[Category.LAUNCH], trace.events[Category.OVERHEAD]])
    calls = _join_captures(calls.where(codes[calls.name] >= 0), trace.names)
    first_ns, last_ns = int(within.starts[0]), int(within.ends[-1])
    start_ns, end_ns = (np.clip(each, first_ns, last_ns) for each in (calls.start_ns, calls.end_ns))
    return replace(calls, start_ns=start_ns, end_ns=end_ns).where(end_ns > start_ns)


def find_captures(trace: KinetoTrace) -> HostRanges:
    """The captures of CUDA graphs: what is launched in them does not run."""
    calls = trace.events[Category.LAUNCH]
    is_capture = np.array([_CAPTURE in name for name in trace.names], dtype=bool)
    return HostRanges.of(_join_captures(calls.where(is_capture[calls.name]), trace.names))


def _join_captures(calls: EventColumns, names: Sequence[str]) -> EventColumns:
    calls = calls.where(np.argsort(calls.start_ns, kind="stable"))
    begins, ends = (
        np.array([each in name for name in names], dtype=bool)[calls.name]
        for each in ("BeginCapture", "EndCapture")
    )
    end_ns = calls.end_ns.copy()
    for at in np.flatnonzero(begins).tolist():
        later = ends & (calls.thread == calls.thread[at]) & (calls.start_ns >= calls.start_ns[at])
        end_ns[at] = calls.end_ns[later][0] if later.any() else end_ns[at]
    return replace(calls, end_ns=end_ns).where(~ends)


def _idle_after(
    waits: EventColumns, launches: EventColumns, busy: Intervals
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """The device's idle time from each wait to the start of the next work; whether there is one."""
    launched = np.sort(launches.start_ns)
    place = np.searchsorted(launched, waits.end_ns)
    has_next = place < len(launched)
    # The next work starts at or after its launch: the first start on the device from then on.
    after_ns = launched[np.minimum(place, max(len(launched) - 1, 0))] if len(launched) else place
    begun = np.searchsorted(busy.starts, after_ns)
    has_next &= begun < len(busy.starts)
    begun = np.minimum(begun, max(len(busy.starts) - 1, 0))
    next_ns = busy.starts[begun] if len(busy.starts) else after_ns
    drained_ns = np.where(begun > 0, busy.ends[np.maximum(begun - 1, 0)], next_ns)
    idle_ns = np.maximum(next_ns - np.maximum(drained_ns, waits.start_ns), 0)
    running = np.searchsorted(busy.starts, waits.end_ns, side="right") - 1
    if len(busy.starts):  # other streams may still work when the host goes on
        idle_ns[(running >= 0) & (busy.ends[np.maximum(running, 0)] > waits.end_ns)] = 0
    # Several waits before one launch: the last of them counts.
    next_ns = np.where(has_next, next_ns, NOWHERE)
    is_last = np.ones(len(waits), dtype=bool)
    is_last[:-1] = next_ns[1:] != next_ns[:-1]
    return np.where(is_last & has_next, idle_ns, 0), has_next


def _lines(trace: KinetoTrace, calls: EventColumns) -> list[str]:
    """The user's innermost function around each call; empty: unknown."""
    python = trace.events[Category.PYTHON]
    around = HostRanges.of(python).innermost(calls.thread, calls.start_ns)
    return [
        "" if at == NOWHERE else user_line(trace.names[python.name[at]]) for at in around.tolist()
    ]


def _reads(trace: KinetoTrace, calls: EventColumns) -> list[str]:
    """The read of a value around each call, or the name of the call."""
    operators = trace.events[Category.OPERATOR]
    reads = operators.where(np.array([name in _READS for name in trace.names])[operators.name])
    around = HostRanges.of(reads).innermost(calls.thread, calls.start_ns)
    return [
        trace.names[calls.name[place]] if at == NOWHERE else _READS[trace.names[reads.name[at]]]
        for place, at in enumerate(around.tolist())
    ]
