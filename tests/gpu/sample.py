"""Make a small recorded GPU run in the form of `samples/`.

This module makes the run and its `expected.json`. `pack` adds the README with the table so far, as
soon as the run is recorded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunStatus
from tests.gpu.outcome import Row
from tests.gpu.setting import ONE_NODE, Setting
from tests.studies.benchmarks.figures import Figure

MAX_BYTES = 1 << 20
ROOT = Path(__file__).parents[2]

_EXPECTED = (
    "run_id",
    "world_size",
    "backend",
    "num_steps",
    "num_timed_steps",
    "step_time_ns",
    "communication_ns",
    "exposed_ns",
    "overlap_ratio",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
)
"""Keys of `summary --json` that readers of the sample compare; see samples/record.sh."""


def sample_name(device: str) -> str:
    """The folder in `samples/`."""
    return f"emulated-8-ranks-{device}"


def measure(setting: Setting) -> Iterator[Row]:
    """Record the run like a user, and check that it can be committed."""
    name = sample_name(setting.device)
    folder = setting.scratch / name
    work = setting.scratch / "work"
    work.mkdir(parents=True)
    run_python(["-m", "instrumented_trainer", *_arguments(setting, name)], work)
    [run] = work.glob(f"*{name}*")
    shutil.move(run, folder)
    summary = json.loads(run_python(["-m", "fsdp_inspect", "show", str(folder), "--json"]))
    expected = {key: summary[key] for key in _EXPECTED}
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")
    yield _row(setting, name, folder)


def pack(folder: Path, target: Path, command: str, place: str, table: str) -> None:
    """Add the README and pack the sample into one file, `target`.

    Args:
        folder: The folder that `measure` wrote.
        target: A `.tar.gz` to write.
        command: The trainer's command.
        place: The device.
        table: The table of the steps so far, as Markdown.
    """
    (folder / "README.md").write_text(
        f"# {folder.name}\n\n"
        f"Rank 0 of 8 emulated ranks on {place}: the kernels, the memory and FSDP's scheduling are "
        "real, the network is\na model. One process and no torchrun; recorded by `make gpu` "
        f"with\n\n```bash\n{command}\n```\n\n"
        f"The same call of `make gpu` had measured before:\n\n{table}\n"
    )
    with tarfile.open(target, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)


def command_of(setting: Setting) -> str:
    """The trainer's command, for people."""
    arguments = _arguments(setting, sample_name(setting.device))
    return shlex.join(["python", "-m", "instrumented_trainer", *arguments])


def _arguments(setting: Setting, name: str) -> list[str]:
    settings = {"steps": 5 if setting.quick else 25, **setting.model}
    options = [("--" + key.replace("_", "-"), str(value)) for key, value in settings.items()]
    flat = [word for option in options for word in option]
    return ["--emulate", ONE_NODE, *flat, "--runs-dir", ".", "--name", name]


def run_python(arguments: list[str], folder: Path = ROOT) -> str:
    """Run Python with these arguments; returns its output.

    Raises:
        RuntimeError: It failed. The message has its errors.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _row(setting: Setting, name: str, folder: Path) -> Row:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    run = open_run(folder)
    is_whole = run.status is RunStatus.COMPLETE and not list(run.notes)
    state = "complete, without notes" if is_whole else f"{run.status.value}: {list(run.notes)}"
    leaks = _paths_of_this_machine((folder / "run.json").read_text())
    return setting.judge.exact(
        Figure(
            name=f"sample {name}",
            value=f"{format_bytes(size)}, {state}{leaks and f', names {leaks}'}",
            aim="< 1 MiB, complete, nothing of the machine",
            how=f"Recorded with: {command_of(setting)}",
            numbers={"bytes": size},
        ),
        holds=size < MAX_BYTES and is_whole and not leaks,
    )


def _paths_of_this_machine(text: str) -> str:
    """The first absolute path in a manifest that identifies this machine; empty: none."""
    found = _texts(json.loads(text))
    homes = {str(ROOT), str(Path.home()), "/root", "/home"} - {"/"}
    return next((value for value in found if any(home in value for home in homes)), "")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
