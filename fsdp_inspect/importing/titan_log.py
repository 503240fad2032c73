"""Convert a structured log of torchtitan to the events of a torch.profiler trace.

torchtitan writes one JSON line for each begin and end of a span of the host, for each rank
(`structured_logs/*.jsonl`). The spans `step`, `fetching_batch` and `optim` become marks of steps,
waits for data and the optimizer. Other spans are listed by their time. Source:
pytorch/torchtitan, torchtitan/observability/structured_logger.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fsdp_inspect.errors import ImportingError
from fsdp_inspect.formatting import format_ns, format_numbers
from fsdp_inspect.importing.messages import read_whole
from fsdp_inspect.importing.trace_sources import NOTES_KEY

_NAMES = {
    "fetching_batch": "enumerate(DataLoader)#torchtitan",
    "optim": "Optimizer.step#torchtitan",
}
_STEP = "step"
_ENDINGS = {"_start": True, "_end": False}
_MOST_NAMED = 8
_MAX_US = 1 << 52

Event = dict[str, Any]


@dataclass
class _Log:
    """The spans of a log."""

    base_us: int
    first: Mapping[str, Any]
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
            yield {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}" if name == _STEP else _NAMES.get(name, name),
                "ts": start,
                "dur": end - start,
                "pid": process,
                "tid": thread,
            }

    def read_other_values(self, process: int) -> Event:
        """The rank, the host and the notes of a log."""
        del process
        first = self._log.first
        return {
            "baseTimeNanoseconds": self._log.base_us * 1000,
            "host_name": str(first.get("host_name", "")),
            "distributedInfo": {"rank": first.get("global_rank", first.get("rank"))},
            NOTES_KEY: [*_notes(self._log)],
        }


def _read(path: Path) -> _Log:
    log: _Log | None = None
    begun: dict[tuple[str, str], list[tuple[int, int | None, int]]] = {}
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError):
                if log is not None and not line.endswith(b"\n"):
                    break  # a killed process leaves an incomplete last line
                record = None
            time_us = read_whole(record.get("time_us")) if isinstance(record, dict) else None
            name = record.get("log_type_name") if isinstance(record, dict) else None
            if time_us is None or time_us > _MAX_US or not isinstance(name, str):
                raise ImportingError(
                    f"{path.name} is not a structured log of torchtitan: line {number:,} has no "
                    "time_us and log_type_name. Expected a file of structured_logs/."
                )
            log = log or _Log(time_us, record)
            _add(log, begun, record, name, time_us - log.base_us)
    if log is None:
        raise ImportingError(
            f"{path.name} is empty. Expected a structured log of torchtitan. Choose another file."
        )
    log.num_open = sum(map(len, begun.values()))
    return log


def _add(
    log: _Log,
    begun: dict[tuple[str, str], list[tuple[int, int | None, int]]],
    record: Mapping[str, Any],
    name: str,
    at_us: int,
) -> None:
    step, thread = read_whole(record.get("step")), read_whole(record.get("tid")) or 0
    for tag in record.get("step_tags") or ():
        if step is not None and isinstance(tag, str):
            log.tags.setdefault(tag, set()).add(step)
    ending = next((each for each in _ENDINGS if name.endswith(each)), "")
    if record.get("log_type") != "event" or not ending:
        log.num_values += record.get("log_type_name") == "metric_value"
        return
    span = name.removesuffix(ending)
    opened = begun.setdefault((span, str(record.get("task_name"))), [])
    if _ENDINGS[ending]:
        opened.append((at_us, step, thread))
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
