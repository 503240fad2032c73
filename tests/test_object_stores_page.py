"""The command sequence of docs/object_stores.md, and the commands and the dashboard at a URL."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "object_stores.md"


@pytest.mark.slow
def test_sequence_of_the_page_runs(tmp_path: Path, free_port: Callable[[], int]) -> None:
    pytest.importorskip("s3fs", reason="needs the extra [s3]")
    block = re.search(r"<!-- a test runs this block -->\n```bash\n(.*?)```", PAGE.read_text(), re.S)
    assert block is not None
    script = block[1].replace("5000", str(free_port())).replace("torchrun ", _torchrun())
    script = script.replace("fsdp-inspect ", f"{sys.executable} -m fsdp_inspect ")
    script = script.replace("python -m moto", f"{sys.executable} -W ignore -m moto")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $SERVER' ERR\n{script}"],
        cwd=tmp_path,
        env={**os.environ, "FSDP_INSPECT_CACHE": str(tmp_path / "cache"), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "uploaded to s3://demo/runs/" in done.stderr
    listing = next(part for part in done.stdout.split("\n\n") if "created (UTC)" in part)
    assert "first" in listing
    assert "second" in listing
    assert re.search(r"2 ranks, \d+ files \(.*\) uploaded: s3://demo/runs/.*third", _joined(done))


def _torchrun() -> str:
    local = "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1"
    return f"{sys.executable} -m torch.distributed.run {local} "


def _joined(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stdout.split())
