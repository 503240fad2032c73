"""Bounds of the waits for collectives, from the events that torch.profiler wrote on gloo ranks.

The importer takes no part. The host waits for a collective between two operators of its thread, so
the wait is at most the gap around it. It is at least as long as the event inside of it:

    blocking call    gloo's work, which starts after the call and ends before the call returns
    functional one   `_c10d_functional::wait_tensor`, until the last operator of gloo's work

torch completes the result of a work after its last operator, and ends the work after that. The
chunks of a message and the copy of its part are operators of the call, and bound no gap.

Both bounds hold on a slow and on a busy machine, because the recorder's marks lie between them: a
thread that waits for a core lengthens the gap with the wait.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_inspect.trace.codes import EventKind

WAIT = "_c10d_functional::wait_tensor"
_FUNCTIONAL = "_c10d_functional::"
_GLOO_WORK = {
    "c10d::allreduce_": "gloo:all_reduce",
    "c10d::allgather_": "gloo:all_gather",
    "c10d::_allgather_base_": "gloo:all_gather",
    "c10d::allgather_into_tensor_coalesced_": "gloo:all_gather",
    "c10d::reduce_scatter_": "gloo:all_reduce",
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "gloo:all_reduce",
    "c10d::alltoall_base_": "gloo:all_to_all",
    "c10d::broadcast_": "gloo:broadcast",
}
"""gloo's name for the work of each operator; it runs a reduce-scatter as an all-reduce."""
KINDS = {
    "c10d::allreduce_": EventKind.ALL_REDUCE,
    "c10d::allgather_": EventKind.ALL_GATHER,
    "c10d::_allgather_base_": EventKind.ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": EventKind.ALL_GATHER,
    "c10d::reduce_scatter_": EventKind.REDUCE_SCATTER,
    "c10d::_reduce_scatter_base_": EventKind.REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": EventKind.REDUCE_SCATTER,
    "c10d::alltoall_base_": EventKind.ALL_TO_ALL,
    "c10d::broadcast_": EventKind.BROADCAST,
}


_OF_THE_CALL = ("aten::chunk", "aten::copy_")


@dataclass(frozen=True, slots=True)
class WaitBounds:
    """One collective of the trace, with the bounds of the wait for it."""

    step: int
    """The number of its `ProfilerStep`, from 0."""
    kind: EventKind
    least_ns: float
    most_ns: float


@dataclass(frozen=True, slots=True)
class Span:
    """An event of a trace with a duration."""

    name: str
    start: float
    end: float
    thread: Any


def read_wait_bounds(path: Path) -> list[WaitBounds]:
    """Read the bounds of all waits of a rank, in the order of the calls."""
    events = [
        event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"
    ]
    steps = [each for each in _spans(events, "user_annotation") if "ProfilerStep#" in each.name]
    operators: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            operators[event["tid"]].append(_span(event))
    threads = {number: _Thread(own) for number, own in operators.items()}
    works: dict[str, deque[Span]] = defaultdict(deque)
    for work in _spans(events, "user_annotation"):
        if work.name.startswith("gloo:"):
            works[work.name].append(work)
    found = []
    for own in operators.values():
        found += [
            (call.start, _bounds(call, threads, works, steps))
            for call in sorted(own, key=lambda each: each.start)
            if call.name in KINDS
        ]
    return [bounds for _, bounds in sorted(found, key=lambda each: each[0]) if bounds.step >= 0]


def _bounds(
    call: Span, threads: dict[Any, _Thread], works: dict[str, deque[Span]], steps: list[Span]
) -> WaitBounds:
    thread = threads[call.thread]
    waiting = works[_GLOO_WORK[call.name]]
    while waiting and waiting[0].start < call.start:
        waiting.popleft()  # issued before the trace
    work = waiting.popleft()
    functional = thread.functional_around(call)
    event = work if functional is None else thread.wait_after(functional.end)
    anchor = call if functional is None else event
    begin, end = thread.gap_around(anchor.start, max(anchor.end, event.end))
    completed = (
        work.end if functional is None else threads.get(work.thread, _Thread([])).last_end_in(work)
    )
    least = max(0.0, min(event.end, completed) - event.start)
    step = next((n for n, each in enumerate(steps) if each.start <= call.start < each.end), -1)
    return WaitBounds(step, KINDS[call.name], 1000 * least, 1000 * (end - begin))


class _Thread:
    """The operators of one thread. Each start and each end is a moment at which it did not wait."""

    def __init__(self, operators: list[Span]) -> None:
        ordered = sorted(operators, key=lambda each: (each.start, -each.end))
        self._ends = sorted(each.end for each in operators)
        self._moments: list[float] = []
        inside = 0.0
        for each in ordered:
            if each.name in _OF_THE_CALL:
                inside = max(inside, each.end)
            elif each.start >= inside:
                self._moments += [each.start, each.end]
        self._moments.sort()
        self._functional = [
            each for each in ordered if each.name.startswith(_FUNCTIONAL) and each.name != WAIT
        ]
        self._waits = [each for each in ordered if each.name == WAIT]

    def functional_around(self, call: Span) -> Span | None:
        """The functional operator that issued this call; None: `torch.distributed` did."""
        return next(
            (
                each
                for each in self._functional
                if each.start <= call.start and call.end <= each.end
            ),
            None,
        )

    def wait_after(self, moment: float) -> Span:
        """The first operator that waits for a functional collective from a moment on."""
        return next(each for each in self._waits if each.start >= moment)

    def last_end_in(self, span: Span) -> float:
        """The end of the last operator in a span; without any, the end of the span."""
        last = bisect_right(self._ends, span.end) - 1
        is_inside = last >= 0 and self._ends[last] > span.start
        return self._ends[last] if is_inside else span.end

    def gap_around(self, start: float, end: float) -> tuple[float, float]:
        """From the last moment before `start` to the first one after `end`."""
        before, after = bisect_left(self._moments, start), bisect_right(self._moments, end)
        begin = self._moments[before - 1] if before else start
        return begin, self._moments[after] if after < len(self._moments) else float("inf")


def _spans(events: list[dict[str, Any]], category: str) -> list[Span]:
    found = [_span(event) for event in events if event.get("cat") == category]
    return sorted(found, key=lambda each: each.start)


def _span(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(event["name"], start, start + float(event["dur"]), event["tid"])
