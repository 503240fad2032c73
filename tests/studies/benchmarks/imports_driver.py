"""Import a trace or open its run in a fresh process, and print one line of JSON.

python -m tests.studies.benchmarks.imports_driver import TRACE RUN
python -m tests.studies.benchmarks.imports_driver open RUN
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy.ma  # noqa: F401 - by numpy itself, at the first np.unique: an import of a package

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run


def main(what: str, *paths: str) -> None:
    """Import and analyse a trace, or open and analyse a run."""
    run = Path(paths[-1])
    start = time.perf_counter_ns()
    if what == "import":
        import_traces(Path(paths[0]), run)
    loaded = time.perf_counter_ns()
    opened = open_run(run)
    breakdown, overlap = measure_breakdown(opened).ranks[0], measure_overlap(opened).ranks[0]
    done = time.perf_counter_ns()
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    answer = {
        "load_ns": loaded - start,
        "analyse_ns": done - loaded,
        "peak_bytes": peak_kib * 1024,
        "overlap_pct": 100 * overlap.overlap_ratio,
        "step_time_ns": breakdown.step_time_ns,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
