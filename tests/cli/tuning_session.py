"""Run one tuning session under emulation, and provide a fake training, for tests."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = """\
[model]
num_layers = 3
[data]
seq_len = 16
batch_size = 1
[training]
steps = 7
[sharding]
wrap = "block"
[emulation]
emulate = "world_size=8,bandwidth=10MB/s,latency=5ms"
fixed_compute = "forward=2ms,backward=4ms"
"""
"""The link is so slow that it determines the step, so the noise of the machine has little
effect."""

FAKE = """\
import shutil, sys
from pathlib import Path

import pyarrow.parquet as pq

from fsdp_inspect.store.checksums import checksum_text

sample, runs, name, *plan = sys.argv[1:]
if plan and {fails!r} in name:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
folder = Path(runs) / f"{{name}}-run"
shutil.copytree(sample, folder)
old = b"20261124-031135-tiny-2-ranks-f705"
new = name.encode().ljust(len(old), b"-")  # of the same length, so that footers stay valid
for path in filter(Path.is_file, folder.rglob("*")):
    content = path.read_bytes().replace(old, new)
    if path.suffix == ".parquet":
        stated = pq.read_schema(path).metadata
        footer = stated[b"fsdp_inspect"].replace(old, new).decode()
        content = content.replace(
            stated[b"fsdp_inspect_crc32"], checksum_text(footer).encode()
        )
    if path.suffix == ".json":
        lines = content.decode().splitlines(True)
        text = "".join(line for line in lines if '"crc32"' not in line)
        content = (text.rstrip().removesuffix("}}").rstrip().removesuffix(",") + "}}").encode()
    path.write_bytes(content)
"""
"""Does not train: it copies a recorded run, and runs out of memory under one of the plans."""


@dataclass
class Session:
    """The results of a session."""

    folder: Path
    result: dict[str, Any]
    progress: str

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return next(path for path in self.folder.iterdir() if name in path.name and path.is_dir())


def tune(folder: Path, *arguments: object) -> Session:
    """Tune like a user; fails if the command fails."""
    command = [sys.executable, "-m", "fsdp_inspect", "tune", "--runs-dir", folder, "--json"]
    done = subprocess.run(
        [str(word) for word in (*command, *arguments)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return Session(Path(result["session"]), result, done.stderr)


def fake_training(folder: Path, *, fails: str = "plan-1") -> list[str]:
    """A command with placeholders that writes a copy of a sample."""
    script = folder / "fake.py"
    script.write_text(FAKE.format(fails=fails))
    sample = Path(__file__).parents[2] / "samples" / "tiny-2-ranks"
    words = (sys.executable, script, sample, "{runs}", "{name}", "--plan={plan}")
    return [str(word) for word in words]
