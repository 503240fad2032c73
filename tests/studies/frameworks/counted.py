"""Run a script and count its collectives with torch's own profiler, without the recorder.

    torchrun --nproc-per-node 2 -m tests.studies.frameworks.counted FOLDER SCRIPT [ARGUMENTS ...]

Writes FOLDER/counts-RANK.json: the collectives of each kind between the ends of two optimizer
steps. torch marks each optimizer step and each call of a process group (`c10d::...`), also of
functional collectives and of DTensor. FSDP Inspect is not used.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::barrier": "barrier",
}
"""torch's names of a process group's calls, and the recorder's names for them."""


def count(events: list[Any]) -> list[dict[str, int]]:
    """Collectives by kind from each end of an optimizer step to the next one.

    An optimizer may contain others, like torchtitan's container. Their steps end together.
    """
    steps = [event for event in events if event.name().startswith("Optimizer.step#")]
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in steps]
    outer = [
        end
        for start, end in spans
        if not any(first < start and end < last for first, last in spans)
    ]
    ends = sorted(outer)
    counts = [Counter[str]() for _ in ends]
    for event in events:
        kind = KINDS.get(event.name())
        if kind is not None:
            place = bisect_left(ends, event.start_ns())
            if place < len(ends):
                counts[place][kind] += 1
    return [dict(each) for each in counts]


def main(folder: Path, script: str, *arguments: str) -> None:
    """Run the script like `python SCRIPT ARGUMENTS`, and write the counts at its end."""
    sys.argv = [script, *arguments]
    profiler = profile(activities=[ProfilerActivity.CPU])
    with profiler:
        runpy.run_path(script, run_name="__main__")
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    path = folder / f"counts-{os.environ['RANK']}.json"
    path.write_text(json.dumps(count(results.events())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
