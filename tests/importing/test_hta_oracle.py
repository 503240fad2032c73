"""Compare with HTA on recorded traces and on a hand-made trace.

HTA requires a separate environment, which `make bench ARGS="--only imports"` makes. Without it,
these tests are skipped.
"""

import pytest

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.intervals import Intervals
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.importing.test_known_traces import FOLDER
from tests.studies.benchmarks.hta_environment import ask_hta, find_hta

HTA = find_hta()
pytestmark = pytest.mark.skipif(
    HTA is None, reason='HTA is not installed: make bench ARGS="--only imports" does that'
)
OVERLAP_POINTS = 0.01
ROUNDED_US = 1


@pytest.fixture
def steps(tmp_path):
    """Three steps without ProfilerStep marks, so HTA leaves nothing out."""
    trace = TraceWriter()
    for number in range(3):
        fsdp2_step(trace, at=1000 * number)
    return trace.write(tmp_path / "trace.json")


def test_over_a_whole_trace_both_find_the_same(tmp_path, steps):
    theirs = ask_hta(HTA, steps)
    import_traces(steps, tmp_path / "run")
    run = open_run(tmp_path / "run")
    step_time_ns = measure_breakdown(run).headline.step_time_ns
    compute = run.events(0, kinds=[EventKind.COMPUTE])
    compute_ns = Intervals.of(compute.start_ns, compute.end_ns).duration_ns
    overlap_pct = 100 * measure_overlap(run).ranks[0].overlap_ratio
    assert overlap_pct == pytest.approx(theirs["overlap_pct"], abs=OVERLAP_POINTS)
    assert step_time_ns / 1000 == pytest.approx(theirs["kernel_us"], abs=ROUNDED_US)
    assert compute_ns / 1000 == pytest.approx(theirs["compute_us"], abs=ROUNDED_US)


def test_the_known_answers_of_hta_are_its_answers():
    if not FOLDER.is_dir():
        pytest.skip(f"the traces are not here: no folder {FOLDER}")
    theirs = ask_hta(HTA, FOLDER / "nccl_data.json.gz")
    assert theirs["overlap_pct"] == pytest.approx(14.76, abs=OVERLAP_POINTS)
