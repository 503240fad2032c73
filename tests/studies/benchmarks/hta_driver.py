"""Measure HTA's results and their cost, in the interpreter of HTA's own environment.

    hta-python hta_driver.py TRACE     one line of JSON

Peak memory is VmHWM of this process. getrusage would include the parent's memory before exec.
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path


def main(trace: str) -> None:
    """Load and analyse one trace, as a user of HTA does."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    start = time.perf_counter_ns()
    analysis = TraceAnalysis(trace_files={0: trace})
    loaded = time.perf_counter_ns()
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    done = time.perf_counter_ns()
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    answer = {
        "load_ns": loaded - start,
        "analyse_ns": done - loaded,
        "peak_bytes": peak_kib * 1024,
        "overlap_pct": float(overlap["comp_comm_overlap_pctg"].iloc[0]),
        "idle_us": float(breakdown["idle_time(us)"].iloc[0]),
        "compute_us": float(breakdown["compute_time(us)"].iloc[0]),
        "kernel_us": float(breakdown["kernel_time(us)"].iloc[0]),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
