"""Mark the issue of each collective and the wait for it in a trace of torch.profiler.

A trace of gloo does not show for which collective a rank waits, if not the call itself waits. Marks
of the test do: `mark_waits` adds an event around each issue, and one inside of each wait, which
ends and begins inside of the recorder's own marks. No code of the recorder or importer takes part
in reading them.

A wait has these bounds:

    at most     the gap between the operators of its thread around it
    at least    from the mark inside of the wait until the last rank issues the same collective. A
                message is received after its sender has issued it. gloo may buffer a message that
                is sent, so this wait has no lower bound

Both hold on a slow and on a busy machine: no collective ends before all ranks have issued it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fsdp_inspect.recording.dispatcher_kernels import observe
from fsdp_inspect.trace.codes import EventKind
from tests.distributed.trace_waits import Span, WaitBounds

KINDS = {
    "c10d::allreduce_": EventKind.ALL_REDUCE,
    "c10d::_allgather_base_": EventKind.ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": EventKind.ALL_GATHER,
    "c10d::_reduce_scatter_base_": EventKind.REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": EventKind.REDUCE_SCATTER,
    "c10d::send": EventKind.POINT_TO_POINT,
    "c10d::recv_": EventKind.POINT_TO_POINT,
}
_GROUPS = {"c10d::allreduce_": 1, "c10d::send": 1, "c10d::recv_": 1}
"""The place of the process group among the arguments; 2 for all others."""
_WAIT = "_c10d_functional::wait_tensor"
_BEFORE_ALL, _INSIDE_ALL = "before the wait for all buckets", "inside the wait for all buckets"


class _Marks:
    """Numbers the collectives of a rank, and finds the number of each wait."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        """Kept alive, so that a wait has the same Python object."""
        self._number_of_work: dict[int, int] = {}
        self._number_of_result: dict[int, int] = {}

    def issue(self, operator: str, arguments: tuple[Any, ...], issue: Callable[[], Any]) -> Any:
        group = dist.ProcessGroup.unbox(arguments[_GROUPS.get(operator, 2)])
        sides = ""
        if operator in ("c10d::send", "c10d::recv_"):  # ranks within the group
            own, peer = group.rank(), arguments[2]
            sides = f"{own}-{peer}" if operator == "c10d::send" else f"{peer}-{own}"
        number = len(self._works)
        with record_function(f"issue|{number}|{operator}|{group.group_name}|{sides}"):
            returned = issue()
        work = dist.Work.unbox(returned[1] if isinstance(returned, tuple) else returned)
        self._works.append(work)
        self._number_of_work[id(work)] = number
        result = arguments[0]
        while isinstance(result, list):
            result = result[0]
        self._number_of_result[result.data_ptr()] = number
        return returned

    def wait_tensor(self, arguments: tuple[Any, ...], issue: Callable[[], Any]) -> Any:
        if isinstance(arguments[0], torch._subclasses.FakeTensor):
            return issue()  # torch.compile traces a graph
        number = self._number_of_result.get(arguments[0].data_ptr())
        with record_function(f"wait|{number}"):
            return issue()

    def wait_work(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._number_of_work.get(id(work))
            if number is None:
                return original(work, *args, **kwargs)
            with record_function(f"wait|{number}"):
                return original(work, *args, **kwargs)

        return wait


def mark_waits() -> Callable[[], None]:
    """Mark all issues and waits of this process from now on; returns a function that ends it."""
    marks, ends = _Marks(), ExitStack()
    for operator in KINDS:

        def issue(
            arguments: tuple[Any, ...], issue: Callable[[], Any], operator: str = operator
        ) -> Any:
            return marks.issue(operator, arguments, issue)

        ends.callback(observe(operator, issue, is_innermost=True))
    ends.callback(observe(_WAIT, marks.wait_tensor, is_innermost=True))
    original = dist.Work.wait
    dist.Work.wait = marks.wait_work(original)  # type: ignore[method-assign]
    ends.callback(lambda: setattr(dist.Work, "wait", original))
    return ends.close


def mark_final_wait(last: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Mark the wait of DDP for all its buckets, in callbacks of autograd.

    autograd runs its callbacks in the order in which they were queued: one of these marks as soon
    as the backward begins, the callback of the recorder at the first bucket, the other mark at the
    gradient of the last parameter, and the callback of DDP after the last bucket, which waits.

    Args:
        last: The parameter whose gradient is the last one.

    Returns:
        A function to call with the output of each forward.
    """
    engine = torch.autograd.Variable._execution_engine

    def queue(name: str) -> None:
        def mark() -> None:
            with record_function(name):
                pass

        engine.queue_callback(mark)

    last.register_hook(lambda _: queue(_INSIDE_ALL))

    def before(output: torch.Tensor) -> None:
        output.register_hook(lambda _: queue(_BEFORE_ALL))

    return before


@dataclass(frozen=True, slots=True)
class _Issue:
    span: Span
    step: int
    operator: str
    key: tuple[Any, ...]
    """Equal on all ranks of the collective; of both sides of a message."""


class _Trace:
    """The marks and operators of one rank, on the clock of the machine."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        begin = content.get("baseTimeNanoseconds", 0)
        events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        spans = [(event.get("cat"), _span(event, begin)) for event in events]
        self.marks = [span for category, span in spans if category == "user_annotation"]
        self.steps = sorted(
            (span for span in self.marks if "ProfilerStep#" in span.name),
            key=lambda span: span.start,
        )
        self._moments: dict[Any, list[float]] = defaultdict(list)
        self._starts: dict[Any, list[float]] = defaultdict(list)
        self._calls = [s for category, s in spans if category == "cpu_op" and s.name in KINDS]
        for category, span in spans:
            if category == "cpu_op":
                self._moments[span.thread] += [span.start, span.end]
                self._starts[span.thread].append(span.start)
        for starts in self._starts.values():
            starts.sort()
        for moments in self._moments.values():
            moments.sort()
        self.issues = self._read_issues()

    def step_of(self, span: Span) -> int:
        return next(
            (n for n, step in enumerate(self.steps) if step.start <= span.start < step.end), -1
        )

    def _read_issues(self) -> dict[int, _Issue]:
        found: dict[int, _Issue] = {}
        counts: Counter[tuple[Any, ...]] = Counter()
        for span in sorted(self.marks, key=lambda span: span.start):
            if not span.name.startswith("issue|"):
                continue
            _, number, operator, group, sides = span.name.split("|")
            step = self.step_of(span)
            alike = (step, "message" if sides else operator, group, sides)
            place = (alike, operator)
            found[int(number)] = _Issue(span, step, operator, (*alike, counts[place]))
            counts[place] += 1
        return found

    def gap_around(self, thread: Any, start: float, end: float) -> float:
        """From the last moment of an operator before `start` to the first one after `end`."""
        moments = self._moments[thread]
        before, after = bisect_left(moments, start), bisect_right(moments, end)
        begin = moments[before - 1] if before else start
        return (moments[after] if after < len(moments) else float("inf")) - begin

    def start_of(self, issue: _Issue, wait: Span) -> float:
        """The start of the call that issues and waits; of the wait, if the call does not wait."""
        starts = self._starts[wait.thread]
        num_between = bisect_left(starts, wait.start) - bisect_right(starts, issue.span.end)
        if issue.span.thread != wait.thread or num_between > 0:
            return wait.start
        return max(
            call.start
            for call in self._calls
            if call.name == issue.operator and call.start <= issue.span.start <= call.end
        )


def read_marked_waits(traces: Mapping[int, Path]) -> dict[int, list[WaitBounds]]:
    """Read the bounds of all marked waits.

    Args:
        traces: The trace of each rank.
    """
    read = {rank: _Trace(path) for rank, path in traces.items()}
    issued: dict[tuple[Any, ...], list[_Issue]] = defaultdict(list)
    for trace in read.values():
        for issue in trace.issues.values():
            issued[issue.key].append(issue)
    return {
        rank: [*_waits(trace, issued), *_final_waits(trace, issued)] for rank, trace in read.items()
    }


def _waits(trace: _Trace, issued: Mapping[Any, Sequence[_Issue]]) -> list[WaitBounds]:
    found = []
    for wait in trace.marks:
        if not wait.name.startswith("wait|"):
            continue
        issue = trace.issues[int(wait.name.removeprefix("wait|"))]
        step = trace.step_of(wait)
        last = 0.0 if issue.operator == "c10d::send" else _last_issue(issue, issued)
        start = trace.start_of(issue, wait)
        found.append(
            WaitBounds(
                step,
                KINDS[issue.operator],
                max(0.0, last - wait.start),
                trace.gap_around(wait.thread, start, wait.end),
            )
        )
    return [each for each in found if each.step >= 0]


def _last_issue(issue: _Issue, issued: Mapping[Any, Sequence[_Issue]]) -> float:
    """The moment before which no rank can have the result."""
    return max(each.span.start for each in issued[issue.key])


def _final_waits(trace: _Trace, issued: Mapping[Any, Sequence[_Issue]]) -> list[WaitBounds]:
    """The wait of DDP for all buckets of a step; empty without its marks."""
    found = []
    for number, step in enumerate(trace.steps):
        marks = {mark.name: mark for mark in trace.marks if step.start <= mark.start < step.end}
        if _INSIDE_ALL not in marks:
            continue
        after = next(mark for name, mark in marks.items() if "Optimizer.step" in name)
        last = max(
            _last_issue(each, issued) for each in trace.issues.values() if each.step == number
        )
        found.append(
            WaitBounds(
                number,
                EventKind.ALL_REDUCE,
                max(0.0, last - marks[_INSIDE_ALL].end),
                after.start - marks[_BEFORE_ALL].start,
            )
        )
    return found


def _span(event: dict[str, Any], begin_ns: int) -> Span:
    start = begin_ns + 1000 * float(event["ts"])
    return Span(event["name"], start, start + 1000 * float(event["dur"]), event["tid"])
