"""The bound of idle time holds for the kernels of the kept traces of an H100 (torch 2.11)."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES
from tests.gpu.idle import measure_use
from tests.gpu.timing import match, spin_kernels
from tests.studies.benchmarks.profiler_trace import read_trace

KEPT = Path(__file__).parent / "h100" / "timing.tar.xz"
STEPS = range(3, 11)


@pytest.mark.parametrize("name", ["run", "regrouped"])
def test_the_compute_stream_is_idle_only_while_the_host_is_behind(
    name: str, tmp_path: Path
) -> None:
    with tarfile.open(KEPT) as kept:
        kept.extractall(tmp_path, filter="data")
    events = open_run(tmp_path / "timing" / name).events(0, steps=list(STEPS))
    trace = read_trace(tmp_path / "timing" / f"{name}.trace.json")
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    steps = list(measure_use(events, trace, match(collectives, spin_kernels(trace)).offset_ns))
    assert len(steps) == len(STEPS)
    assert min(each.busy_ahead_ratio for each in steps) > 0.96
    assert max(each.busy_behind_ratio for each in steps) < 0.2
    assert min(each.behind_ratio for each in steps) > 0.85
