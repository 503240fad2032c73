"""Published traces: known results over the whole trace, and with HTA's own filter.

They are outside of the project (see the README next to them) and are read there.
"""

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import fsdp_inspect
from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from fsdp_inspect.trace.intervals import Intervals
from tests.importing.test_kernels import assert_sums_are_the_unions

FOLDER = Path(__file__).parents[3] / "shared" / "traces" / "hta"

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the traces are not here: no folder {FOLDER}"
)

KNOWN_US = {
    "nccl_data": (46876.492, 115655.843, 7317.026, 39559.466),
    "sampled_rank-0": (396199, 210320, 59216, 336983),
    "sampled_rank-1": (379053, 271973, 75530, 303523),
}
"""Unions of communication and compute, their overlap, and exposed time; sums of µs as floats."""
FLOAT_ERROR_US = 0.005
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HTA_OVERLAP_PCT = {"nccl_data": 14.76, "sampled_rank-0": 11.81, "sampled_rank-1": 20.05}
"""Results of HTA 0.5 with HTA_DISABLE_NS_ROUNDING=1 (otherwise it shortens every kernel to whole µs
and gives 14.31 for the first). It leaves out events that were launched after the start of the last
ProfilerStep."""


@pytest.fixture(scope="module", params=KNOWN_US)
def imported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / request.param
    import_traces(FOLDER / f"{request.param}.json.gz", folder, by_step=False)
    return request.param, open_run(folder)


def rank_of(run):
    return run.ranks[0].rank


def unions(run):
    events = run.events(rank_of(run))
    is_collective = np.isin(events.kind, list(COLLECTIVES))
    is_compute = events.kind == EventKind.COMPUTE
    return tuple(
        Intervals.of(events.start_ns[mask], events.end_ns[mask])
        for mask in (is_collective, is_compute)
    )


def test_the_unions_are_the_known_ones(imported):
    name, run = imported
    communication, compute = unions(run)
    found = (
        communication.duration_ns,
        compute.duration_ns,
        communication.intersect(compute).duration_ns,
        int(run.summary(kinds=[EventKind.STEP]).exposed_ns[0]),
    )
    assert [one / 1000 for one in found] == pytest.approx(KNOWN_US[name], abs=FLOAT_ERROR_US)


def test_the_unions_are_exact_to_the_nanosecond(imported):
    name, run = imported
    with gzip.open(FOLDER / f"{name}.json.gz") as file:
        kernels = [
            event
            for event in json.load(file, parse_float=Decimal)["traceEvents"]
            if event.get("cat") == "kernel"
        ]
    for found, communicates in zip(unions(run), (True, False), strict=True):
        own = [one for one in kernels if one["name"].startswith("nccl") is communicates]
        starts = [int(one["ts"] * 1000) for one in own]
        ends = [int((one["ts"] + one["dur"]) * 1000) for one in own]
        assert found.duration_ns == Intervals.of(starts, ends).duration_ns


@pytest.mark.parametrize("by_step", [True, False])
@pytest.mark.parametrize("name", KNOWN_US)
def test_the_kernels_add_up_to_the_union_of_compute(tmp_path, name, by_step):
    import_traces(FOLDER / f"{name}.json.gz", tmp_path / "run", by_step=by_step)
    run = fsdp_inspect.open_run(tmp_path / "run")
    (rank,) = (record.rank for record in run.ranks_recorded)
    assert_sums_are_the_unions(run, rank)
    assert 0 < run.kernels().unknown_ns < 0.2 * run.kernels().compute_ns


@pytest.mark.parametrize("name", KNOWN_US)
def test_over_the_window_of_hta_the_overlap_is_that_of_hta(tmp_path, name):
    with gzip.open(FOLDER / f"{name}.json.gz") as file:
        content = json.load(file)
    content["traceEvents"] = _launched_before_the_last_step(content["traceEvents"])
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(content))
    import_traces(trace, tmp_path / "run")
    rank = measure_overlap(open_run(tmp_path / "run")).ranks[0]
    assert 100 * rank.overlap_ratio == pytest.approx(HTA_OVERLAP_PCT[name], abs=0.01)


def _launched_before_the_last_step(events):
    """The events that HTA keeps: device events whose launch began before the last ProfilerStep."""
    last = max(event["ts"] for event in events if event["name"].startswith("ProfilerStep#"))
    launched = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") == "cuda_runtime" and event["ts"] < last
    }
    return [
        event
        for event in events
        if event.get("cat") not in DEVICE or event["args"]["correlation"] in launched
    ]


def test_the_collectives_carry_what_the_metadata_says(tmp_path):
    import_traces(FOLDER / "nccl_data.json.gz", tmp_path / "run")
    run = open_run(tmp_path / "run")
    reductions = run.events(0, kinds=[EventKind.ALL_REDUCE])
    assert len(reductions) == 15
    assert 6_637_568 * 4 in reductions.bytes.tolist()
    assert run.manifest.process_groups[0].ranks == [0, 1]
    assert run.manifest.versions["nccl"] == "2.17.1"


def test_by_step_there_is_one_step_for_each_mark(tmp_path):
    import_traces(FOLDER / "nccl_data.json.gz", tmp_path / "run", by_step=True)
    run = open_run(tmp_path / "run")
    steps = run.summary(kinds=[EventKind.STEP])
    assert steps.step.tolist() == [4, 5, 6]
    assert np.all(steps.exposed_ns > 0)
    reductions = run.events(0, kinds=[EventKind.ALL_REDUCE])
    assert np.bincount(reductions.step)[4:].tolist() == [5, 5, 5]
    assert len(run.manifest.units) == 5
