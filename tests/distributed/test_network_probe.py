"""Test the probe of the network on two gloo ranks: `torchrun ... -m fsdp_inspect.probe`."""

import shutil
from pathlib import Path

import pytest

from fsdp_inspect.run import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed]

SAMPLES = Path(__file__).parents[2] / "samples"
PROBE = ("-m", "fsdp_inspect.probe", "--seconds", "0.3")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded run of two ranks whose messages do not show the latency."""
    return Path(shutil.copytree(SAMPLES / "tiny-2-ranks" / "run", tmp_path / "run"))


def test_a_probed_run_is_simulated_with_the_measured_latency(run: Path, run_ranks: Torchrun):
    before = open_run(run).simulate(wrap="root")
    done = run_ranks(*PROBE, run, num_ranks=2)
    assert "Next: fsdp-inspect advise" in done.stdout
    probe = open_run(run).source.network_probe
    assert probe is not None
    assert probe.world_size == 2
    for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE):
        sizes, durations = probe.durations_of(kind, [0, 1])
        assert len(sizes) > 3
        assert min(durations) > 0
    after = open_run(run).simulate(wrap="root")
    assert any("between 0 ns and" in each for each in before.assumptions)
    assert any("from the network probe of the run" in each for each in after.assumptions)
    assert after.high_ns - after.low_ns < before.high_ns - before.low_ns


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("hsdp-4-ranks", "The probe has 2 ranks, but run"),
        ("missing", "No run found at"),
    ],
)
def test_an_unsuitable_run_ends_with_one_line(sample: str, message: str, run_ranks: Torchrun):
    done = run_ranks(*PROBE, SAMPLES / sample / "run", num_ranks=2, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
