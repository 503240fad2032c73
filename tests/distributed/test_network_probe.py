"""Test the probe of the network on two gloo ranks: `torchrun ... -m fsdp_inspect.probe`."""

import shutil
from pathlib import Path

import pytest

from fsdp_inspect.analysis.link_fit import fit_link
from fsdp_inspect.run import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.schema import PROBE_FILE
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.network_probe import NetworkProbe, ProbedMessage
from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed]

SAMPLES = Path(__file__).parents[2] / "samples"
KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
RANKS = [0, 1]
PROBE = ("-m", "fsdp_inspect.probe", "--seconds", "0.3")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded run of two ranks whose messages do not show the latency."""
    return Path(shutil.copytree(SAMPLES / "tiny-2-ranks", tmp_path / "run"))


def test_a_probe_measures_messages_of_the_run_s_groups_and_is_used(run: Path, run_ranks: Torchrun):
    """On a busy machine the durations can scatter too much to show a latency."""
    done = run_ranks(*PROBE, run, num_ranks=2)
    assert "Next: fsdp-inspect advise" in done.stdout
    probe = open_run(run).source.network_probe
    assert probe is not None
    assert probe.world_size == 2
    assumptions = open_run(run).simulate(wrap="root").assumptions
    for kind in KINDS:
        sizes, durations = probe.durations_of(kind, RANKS)
        assert len(sizes) > 3
        assert min(durations) > 0
    fit = fit_link(*probe.durations_of(EventKind.ALL_GATHER, RANKS), 1.0)
    assert fit is not None
    used = "from the network probe of the run"
    refused = f"The network probe of the run does not show it either: {fit.refusal}"
    [of_gathers] = [each for each in assumptions if "latency of all-gather is" in each]
    assert (refused if fit.refusal else used) in of_gathers


def test_a_probe_narrows_the_prediction(run: Path):
    before = open_run(run).simulate(wrap="root")
    messages = [
        ProbedMessage(kind=kind.label, ranks=RANKS, bytes=size, count=9, duration_ns=2000 + size)
        for kind in KINDS
        for size in (4 << 10, 64 << 10, 1 << 20)
    ]
    probe = NetworkProbe(world_size=2, backend="gloo", device_type="cpu", messages=messages)
    (run / PROBE_FILE).write_bytes(encode_record(probe))
    after = open_run(run).simulate(wrap="root")
    assert any("between 0 ns and" in each for each in before.assumptions)
    assert "The latency of all-gather is 2.00 µs" in "\n".join(after.assumptions)
    assert after.high_ns - after.low_ns < before.high_ns - before.low_ns


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("hsdp-4-ranks", "The probe has 2 ranks, but run"),
        ("missing", "No run found at"),
    ],
)
def test_an_unsuitable_run_ends_with_one_line(sample: str, message: str, run_ranks: Torchrun):
    done = run_ranks(*PROBE, SAMPLES / sample, num_ranks=2, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
