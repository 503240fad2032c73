"""Measure time and memory of imports, alternating with HTA in one run.

Both load the same trace and report the same times (parts of the step, overlap), each in a fresh
process. Imports of packages do not count. Their results must agree.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_inspect.formatting import format_bytes, format_ns
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.hta_environment import ROOT, ask_hta, make_hta

STEP_US = 1000
OPERATORS_PER_STEP = 40
"""Host operators besides those that launch kernels. They are half of the events of a real trace."""
_OPERATOR = {
    "Record function id": 0,
    "Concrete Inputs": ["", "", "1"],
    "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
    "Input Strides": [[4096, 1], [4096, 1], []],
    "Input Dims": [[2048, 4096], [2048, 4096], []],
}
_KERNEL = {
    "queued": 0,
    "context": 1,
    "registers per thread": 96,
    "shared memory": 41744,
    "blocks per SM": 0.14814815,
    "warps per SM": 2.962963,
    "grid": [16, 1, 1],
    "block": [640, 1, 1],
    "est. achieved occupancy %": 5,
}
"""Fields that Kineto writes and an import does not need, with record_shapes=True."""
_SHARE_WITHOUT_FLOWS = 0.8
_LINKED = ("kernel", "gpu_memset", "cuda_runtime")
_AGREEMENT_PCT = 0.01

_DRIVER = "tests.studies.benchmarks.imports_driver"


def measure_imports(folder: Path, *, num_events: int, rounds: int) -> list[Figure]:
    """Measure time and memory of both on one trace, and of opening the imported run again.

    Args:
        folder: The folder for the trace; made if missing.
        num_events: The lowest number of events.
        rounds: The number of measurements of each, alternating.

    Raises:
        RuntimeError: HTA cannot be installed, or the results of the two differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hta = make_hta()
    trace, count = write_large_trace(folder / "trace.json", num_events)
    ours, theirs, again = [], [], []
    for number in range(rounds):
        run = folder / f"run-{number}"
        theirs.append(ask_hta(hta, trace))
        ours.append(_ask("import", str(trace), str(run)))
        again.append(_ask("open", str(run)))
        _check(ours[-1], theirs[-1])
    how = (
        f"Measured: median of {rounds} fresh processes each, in turn with HTA 0.5, on a generated "
        f"CUDA trace of {count:,} events ({format_bytes(trace.stat().st_size)}); loading and "
        "breakdown, imports of packages left out. Their overlaps agree to "
        f"{_AGREEMENT_PCT} percentage points."
    )
    return [
        _figure("import and breakdown of a trace", ours, how),
        _figure("the same with HTA", theirs, how),
        _ratio("HTA over import, time", theirs, ours, ">= 10 x", how),
        Figure(
            name="import over HTA, peak memory",
            value=f"{_peak(ours) / _peak(theirs):.2f} x",
            aim="<= 0.5 x",
            how=how,
            numbers={"ratio": _peak(ours) / _peak(theirs), "peak_bytes": _peak(ours)},
        ),
        _figure("opening the imported run again", again, how),
        _ratio("HTA over opening again, time", theirs, again, ">= 100 x", how),
    ]


def write_large_trace(
    path: Path, num_events: int, trace: TraceWriter | None = None
) -> tuple[Path, int]:
    """Write a trace of equal steps; returns its path and its number of events.

    Args:
        path: The file to write.
        num_events: The lowest number of events.
        trace: The empty trace with its metadata; default that of rank 0 of two.
    """
    trace = trace or TraceWriter()
    number = 0
    while len(trace.events) < _SHARE_WITHOUT_FLOWS * num_events:
        at = number * STEP_US
        fsdp2_step(trace, at=at)
        for place in range(OPERATORS_PER_STEP):
            begin = at + 130 + 10 * place
            count = {"External id": place + 1, "Ev Idx": len(trace.events)}
            trace.operator("aten::mul", begin, begin + 5, **count, **_OPERATOR)
        number += 1
    for event in [one for one in trace.events if one["cat"] in _LINKED]:
        if event["cat"] == "kernel":
            event["args"].update(_KERNEL)
        trace.events.append(_flow(event))
    return trace.write(path), len(trace.events)


def _flow(event: dict[str, Any]) -> dict[str, Any]:
    """One end of the arrow that Kineto draws from a launch to the launched event."""
    is_launch = event["cat"] == "cuda_runtime"
    place = {name: event[name] for name in ("pid", "tid", "ts")}
    label = {"cat": "ac2g", "name": "ac2g", "id": event["args"]["correlation"]}
    return {"ph": "s" if is_launch else "f", **place, **label, **({} if is_launch else {"bp": "e"})}


def _ask(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", _DRIVER, *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    if abs(ours["overlap_pct"] - theirs["overlap_pct"]) > _AGREEMENT_PCT:
        raise RuntimeError(
            f"HTA finds an overlap of {theirs['overlap_pct']} % and the import "
            f"{ours['overlap_pct']} %. Expected the same."
        )


def _time_ns(answers: Sequence[dict[str, Any]]) -> float:
    return statistics.median(one["load_ns"] + one["analyse_ns"] for one in answers)


def _peak(answers: Sequence[dict[str, Any]]) -> float:
    return statistics.median(one["peak_bytes"] for one in answers)


def _figure(name: str, answers: Sequence[dict[str, Any]], how: str) -> Figure:
    return Figure(
        name=name,
        value=f"{format_ns(_time_ns(answers))}, {format_bytes(_peak(answers))}",
        how=how,
        numbers={"time_ns": _time_ns(answers), "peak_bytes": _peak(answers)},
    )


def _ratio(
    name: str,
    theirs: Sequence[dict[str, Any]],
    ours: Sequence[dict[str, Any]],
    aim: str,
    how: str,
) -> Figure:
    """The median of the ratios of the rounds."""
    ratios = [_time_ns([one]) / _time_ns([other]) for one, other in zip(theirs, ours, strict=True)]
    times = statistics.median(ratios)
    return Figure(
        name=name,
        value=f"{times:.0f} x",
        interval=f"{min(ratios):.0f} to {max(ratios):.0f} x (range)",
        aim=aim,
        how=how,
        numbers={"times": times, "times_low": min(ratios), "times_high": max(ratios)},
    )
