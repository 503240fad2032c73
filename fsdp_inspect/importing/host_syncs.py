"""Find the calls in a trace in which the host waits for the device, with the idle time after them.

After such a call the device has no work until the host launches the next kernel. That idle time is
what the call costs; the time inside the call is mostly work of the device. A line is known if the
trace has stacks (`profile(with_stack=True)`); Kineto then states the first line of each function.
"""

import re

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.importing.communications import Issues
from fsdp_inspect.importing.host_ranges import NOWHERE, HostRanges
from fsdp_inspect.importing.kernel_names import user_line
from fsdp_inspect.importing.kernel_rows import unit_at
from fsdp_inspect.importing.kineto_events import Category, EventColumns, KinetoTrace
from fsdp_inspect.importing.unit_ranges import UnitRanges
from fsdp_inspect.importing.windows import PhaseRanges, StepMarks
from fsdp_inspect.trace.host_work import MOST_STOPS, HostActivity, HostStop
from fsdp_inspect.trace.intervals import Intervals

Int64Array = NDArray[np.int64]

_WAIT = re.compile(
    r"(?:cuda|hip|cu)(?:Stream|Device|Event|Ctx)Synchronize|(?:cuda|hip)Memcpy(?!\w*Async)"
)
_READS = {
    "aten::_local_scalar_dense": ".item()",
    "aten::item": ".item()",
    "aten::is_nonzero": "bool(tensor)",
    "aten::nonzero": "nonzero() or a boolean mask",
}
"""Operators that read values, and their names in texts."""


def find_host_syncs(
    trace: KinetoTrace,
    ranges: UnitRanges,
    phases: PhaseRanges,
    marks: StepMarks,
    busy: Intervals,
) -> HostActivity | None:
    """The calls that wait for the device, by kind, line, phase and unit.

    Args:
        trace: The whole trace, with its launches.
        ranges: The ranges of the units.
        phases: The phases.
        marks: The steps.
        busy: The times in which the device runs anything.

    Returns:
        Units have the indices of `ranges`. None: the trace has no launches.
    """
    launches = trace.events[Category.LAUNCH]
    if len(launches) == 0:
        return None
    waits_by_name = np.array([_WAIT.match(name) is not None for name in trace.names], dtype=bool)
    is_wait = waits_by_name[launches.name]
    waits, others = launches.where(is_wait), launches.where(~is_wait)
    waits = waits.where(np.argsort(waits.start_ns, kind="stable"))
    step = marks.of_issue(waits.start_ns)
    idle_ns, has_next = _idle_after(waits, others, busy)
    issues = Issues(waits.thread, waits.start_ns)
    unit, phase = unit_at(ranges, issues), phases.phase_of(waits.thread, waits.start_ns)
    place, what = _lines(trace, waits), _reads(trace, waits)
    found: dict[tuple[str, str, int, int], list[int]] = {}
    steps: dict[tuple[str, str, int, int], set[int]] = {}
    for at in np.flatnonzero((step != NOWHERE) & has_next).tolist():
        key = (what[at], place[at], int(phase[at]), int(unit[at]))
        if key not in found and len(found) >= MOST_STOPS:
            continue
        total = found.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += int(waits.end_ns[at] - waits.start_ns[at])
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
    return HostActivity(
        num_steps=num_steps,
        num_read_steps=num_steps,
        sees_reads=True,
        stops=sorted(stops, key=lambda stop: -(stop.idle_ns or 0)),
    )


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


def _lines(trace: KinetoTrace, waits: EventColumns) -> list[str]:
    """The user's innermost function around each wait; empty: unknown."""
    calls = trace.events[Category.PYTHON]
    around = HostRanges.of(calls).innermost(waits.thread, waits.start_ns)
    return [
        "" if at == NOWHERE else user_line(trace.names[calls.name[at]]) for at in around.tolist()
    ]


def _reads(trace: KinetoTrace, waits: EventColumns) -> list[str]:
    """The read of a value around each wait, or the name of the call."""
    operators = trace.events[Category.OPERATOR]
    reads = operators.where(np.array([name in _READS for name in trace.names])[operators.name])
    around = HostRanges.of(reads).innermost(waits.thread, waits.start_ns)
    return [
        trace.names[waits.name[place]] if at == NOWHERE else _READS[trace.names[reads.name[at]]]
        for place, at in enumerate(around.tolist())
    ]
