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

sample, runs, name, *plan = sys.argv[1:]
if plan and {fails!r} in name:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
folder = Path(runs) / f"{{name}}-run"
shutil.copytree(sample, folder)
record = folder / "run.json"
text = "".join(line for line in record.read_text().splitlines(True) if '"crc32"' not in line)
text = text.rstrip().removesuffix("}}").rstrip().removesuffix(",") + "}}"
import re
record.write_text(re.sub(r'"run_id": *"[^"]*"', f'"run_id": "{{name}}"', text))
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
    sample = Path(__file__).parents[2] / "samples" / "tiny-2-ranks" / "run"
    words = (sys.executable, script, sample, "{runs}", "{name}", "--plan={plan}")
    return [str(word) for word in words]
