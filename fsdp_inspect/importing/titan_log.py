"""Convert a structured log of torchtitan to the events of a torch.profiler trace.

torchtitan writes one JSON line for each begin and end of a span of the host, for each rank
(`structured_logs/*.jsonl`). The spans `step`, `fetching_batch` and `optim` become marks of steps,
waits for data and the optimizer. Other spans are listed by their time. Source:
pytorch/torchtitan, torchtitan/observability/structured_logger.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import format_ns, format_numbers
from fsdp_inspect.importing.trace_file import read_json_lines
from fsdp_inspect.importing.trace_sources import NOTES_KEY, make_event

_NAMES = {
    "fetching_batch": "enumerate(DataLoader)#torchtitan",
    "optim": "Optimizer.step#torchtitan",
}
_STEP = "step"
_ENDINGS = {"_start": True, "_end": False}
_MOST_NAMED = 8

Event = dict[str, Any]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]


class _Line(msgspec.Struct):
    time_us: _Number
    log_type_name: str
    log_type: str = ""
    step: _Number | None = None
    tid: _Number | None = None
    step_tags: list[str] | None = None
    task_name: str | None = None
    host_name: str = ""
    global_rank: _Number | None = None
    rank: _Number | None = None


@dataclass
class _Log:
    """The spans of a log."""

    base_us: int
    first: _Line
    spans: list[tuple[str, int, int, int | None, int]] = field(default_factory=list)
    """The name, start and end in µs since `base_us`, the step, and the thread."""
    tags: dict[str, set[int]] = field(default_factory=dict)
    num_open: int = 0
    num_values: int = 0


class TitanLog:
    """One log; see `trace_sources.TraceSource`."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._log = _read(path)

    def list_processes(self) -> list[int]:
        """One process: torchtitan writes a file for each rank."""
        return [0]

    def read_events(self, process: int) -> Iterator[Event]:
        """The spans of a log as annotations."""
        if not any(name == _STEP for name, *_ in self._log.spans):
            raise ImportingError(
                f"{self._name} has no complete span 'step'. Expected a structured log of a "
                "torchtitan training that ended at least one step. Choose the logs of the trainer."
            )
        for name, start, end, step, thread in self._log.spans:
            known = f"ProfilerStep#{step}" if name == _STEP else _NAMES.get(name, name)
            span = start * 1000, end * 1000
            yield make_event("user_annotation", known, span, process, thread)

    def read_other_values(self, process: int) -> Event:
        """The rank, the host and the notes of a log."""
        del process
        first = self._log.first
        rank = first.rank if first.global_rank is None else first.global_rank
        return {
            "baseTimeNanoseconds": self._log.base_us * 1000,
            "host_name": first.host_name,
            "distributedInfo": {"rank": rank},
            NOTES_KEY: [*_notes(self._log)],
        }


def _read(path: Path) -> _Log:
    log: _Log | None = None
    begun: dict[tuple[str, str | None], list[tuple[int, int | None, int]]] = {}
    for line in read_json_lines(path, _Line, "a structured log of torchtitan"):
        log = log or _Log(line.time_us, line)
        _add(log, begun, line)
    assert log is not None
    log.num_open = sum(map(len, begun.values()))
    return log


def _add(
    log: _Log, begun: dict[tuple[str, str | None], list[tuple[int, int | None, int]]], line: _Line
) -> None:
    if line.step is not None:
        for tag in line.step_tags or ():
            log.tags.setdefault(tag, set()).add(line.step)
    ending = next((each for each in _ENDINGS if line.log_type_name.endswith(each)), "")
    if line.log_type != "event" or not ending:
        log.num_values += line.log_type_name == "metric_value"
        return
    span, at_us = line.log_type_name.removesuffix(ending), line.time_us - log.base_us
    opened = begun.setdefault((span, line.task_name), [])
    if _ENDINGS[ending]:
        opened.append((at_us, line.step, line.tid or 0))
    elif opened:
        start, first_step, first_thread = opened.pop()
        log.spans.append((span, start, max(at_us, start), first_step, first_thread))


def _notes(log: _Log) -> Iterator[str]:
    yield (
        "The trace is a structured log of torchtitan. It has spans of the host only: no kernels, "
        "no collectives, no units and no memory, so exposed communication is unknown."
    )
    others: Counter[str] = Counter()
    for name, start, end, *_ in log.spans:
        if name != _STEP and name not in _NAMES:
            others[name] += (end - start) * 1000
    if others:
        listed = [f"{name} {format_ns(total)}" for name, total in others.most_common(_MOST_NAMED)]
        yield f"Time of other spans, nested ones included: {', '.join(listed)}."
    for tag, steps in sorted(log.tags.items())[:_MOST_NAMED]:
        yield f"Steps with the tag {tag}: {format_numbers(sorted(steps))}."
    if log.num_open:
        yield f"{log.num_open} spans have no end: the training was still in them, or was killed."
    if log.num_values:
        yield f"{log.num_values:,} logged values were left out."
