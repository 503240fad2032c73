"""Read what torch.compile compiled, the guards that failed, and where it broke a graph."""

import sys
from typing import Any, NamedTuple

_DYNAMO = "torch._dynamo"
_UTILS = "torch._dynamo.utils"
_EDGES = ("start", "end")


class Compilation(NamedTuple):
    """One compilation of a frame."""

    place: str
    """The compiled function, `file:line`."""
    duration_ns: int
    reason: str
    """The guard that failed; empty: the first compilation, or unknown."""
    start_ns: int = 0
    """Wall time, ns since 1970; 0: unknown."""
    end_ns: int = 0


def read_compilations(last: Any) -> tuple[list[Compilation], Any]:
    """The compilations after the last known one, and the new last one.

    torch keeps the last 64 (torch 2.13, `torch/_dynamo/utils.py`: `get_compilation_metrics`); an
    older torch keeps none.

    Args:
        last: What the previous call returned; None: nothing is known.
    """
    read = getattr(sys.modules.get(_UTILS), "get_compilation_metrics", None)
    new: list[Compilation] = []
    kept = [] if read is None else read()
    for each in reversed(kept):
        if each is last:
            break
        new.insert(0, _describe(each))
    return new, kept[-1] if kept else last


def _describe(metrics: Any) -> Compilation:
    file, line = getattr(metrics, "co_filename", None), getattr(metrics, "co_firstlineno", None)
    seconds = getattr(metrics, "entire_frame_compile_time_s", None) or 0.0
    reason = str(getattr(metrics, "recompile_reason", None) or "")
    start, end = (1000 * (getattr(metrics, f"{edge}_time_us", None) or 0) for edge in _EDGES)
    place = f"{file}:{line}" if file else ""
    return Compilation(place, max(round(seconds * 1e9), 0), reason, start, end)


def read_graph_breaks() -> list[tuple[str, str]]:
    """The line and the reason of each graph break so far, without repetitions.

    torch 2.13, `torch/_dynamo/output_graph.py`: `GraphCompileReason` keeps them until a reset.
    """
    kept = getattr(sys.modules.get(_DYNAMO), "graph_break_reasons", ())
    return list(dict.fromkeys(map(_describe_break, kept)))


def _describe_break(reason: Any) -> tuple[str, str]:
    stack = getattr(reason, "user_stack", ())
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return place, (str(getattr(reason, "reason", "")).splitlines() or [""])[0]
