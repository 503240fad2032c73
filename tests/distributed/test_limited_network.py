"""The cost of communication on a slow network: real gloo over real TCP."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from tests.distributed.limited_driver import NUM_BYTES
from tests.distributed.limited_network import limited_network, why_not

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DRIVER = Path(__file__).with_name("limited_driver.py")
RATE_MBIT = 200
BYTES_PER_S = RATE_MBIT * 1e6 / 8
BURST_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of rank 0, and the run."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    folder = tmp_path_factory.mktemp("limited") / "run"
    with limited_network(RATE_MBIT) as network:
        first, _ = network.run(DRIVER, folder)
    return first.stdout, folder


def test_an_all_gather_is_no_faster_than_the_link(trained: tuple[str, Path]) -> None:
    measured_s = float(trained[0].split("ALL_GATHER_S ")[1].split()[0])
    sent = NUM_BYTES / 2  # each of two ranks sends its half; the first burst is immediate
    least_s = (sent - BURST_BYTES) / BYTES_PER_S

    assert measured_s > least_s


def test_a_recorded_all_gather_takes_at_least_what_its_bytes_take(
    trained: tuple[str, Path],
) -> None:
    events = open_run(trained[1]).events(0, kinds=[EventKind.ALL_GATHER])
    duration_s = (events.end_ns - events.start_ns) / 1e9

    assert len(events) > 0
    assert np.median(duration_s) > (np.median(events.bytes) / 2 - BURST_BYTES) / BYTES_PER_S


def test_nothing_of_the_network_is_left_behind(trained: tuple[str, Path]) -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)

    assert not [name for name in listed.stdout.split() if name.startswith(f"fi{os.getpid()}")]
