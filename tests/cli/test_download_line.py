"""Long reads of a URL show the downloaded bytes on a terminal, and leave the output as it is."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.store.run_upload import upload_run
from tests.s3_server import FaultyProxy

pytest.importorskip("s3fs", reason="needs the extra [s3]")

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "tiny-2-ranks"
SQL = "SELECT run, step_time_ns FROM runs"
LINE = re.compile(rb"\r\x1b\[2KReading \([0-9.]+ [KMi]*B downloaded\)$")


@pytest.fixture
def runs(
    s3_bucket: str, s3_proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The URL of a folder with the sample `tiny` and a catalog, behind the proxy."""
    upload_run(Path(shutil.copytree(SAMPLE, tmp_path / "tiny")), f"{s3_bucket}/runs")
    index_runs(f"{s3_bucket}/runs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    monkeypatch.setenv("FSDP_INSPECT_CACHE", "")
    monkeypatch.setenv("TERM", "xterm")
    return f"{s3_bucket}/runs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        (("show", "{runs}/tiny", "--json"), "/run.json"),
        pytest.param(
            ("store", "query", SQL, "--runs", "{runs}", "--csv"),
            "/runs.parquet",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["show", "query"],
)
def test_line_is_shown_while_a_command_waits_and_erased_before_its_output(
    runs: str, s3_proxy: FaultyProxy, tmp_path: Path, arguments: tuple[str, ...], held: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "fsdp_inspect",
        *(word.format(runs=runs) for word in arguments),
    ]
    quiet = subprocess.run(command, capture_output=True, check=True)
    assert quiet.stderr == b""
    reader, terminal = os.openpty()
    s3_proxy.hold_after = ("GET", held)
    with (tmp_path / "output").open("wb") as output:
        shown = subprocess.Popen(command, stdout=output, stderr=terminal)
    os.close(terminal)
    drawn = b""
    while not LINE.search(drawn):
        drawn += os.read(reader, 1000)  # an error if the command ends without the line
    s3_proxy.release()
    drawn = b"".join(iter(lambda: read_terminal(reader), b""))
    os.close(reader)
    assert drawn.endswith(b"\r\x1b[2K")
    assert shown.wait() == 0
    assert (tmp_path / "output").read_bytes() == quiet.stdout


def read_terminal(reader: int) -> bytes:
    """What a process writes to its terminal next; empty when it has ended."""
    try:
        return os.read(reader, 1000)
    except OSError:  # the terminal is closed
        return b""
