"""Every command that a page or a command prints about a sample runs unchanged."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from fsdp_inspect.cli import main
from fsdp_inspect.store.reader import open_run
from tests.app.conftest import start_app
from tests.app.test_pages import codes_of

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples"
LONGEST = "async-prefetch-2-ranks"
SAMPLE_IDS = [
    pytest.param(name, marks=[pytest.mark.study] * (name == LONGEST))
    for name in sorted(
        path.parent.relative_to(SAMPLES).as_posix() for path in SAMPLES.glob("**/run.json")
    )
]
PAGES = ("overview", "diagnosis", "timeline", "units", "memory", "ranks", "advice", "what_if")
QUESTIONS = (
    *("summary", "diagnose", "simulate", "units", "memory", "ranks", "exposed", "breakdown"),
    *("lifetime", "advise", "advise --details"),
)
NEW = "NEW_RUN"
"""The placeholder for the run that the commands before it record."""
PLACEHOLDER = re.compile(r"(?<![-\w./])[A-Z][A-Z_]+\b")
COMMAND = r"(?:fsdp-inspect|torchrun|python -\w+) [^`\n]+"
BY_THE_MACHINE = ("-m fsdp_inspect.probe", "fsdp-inspect app")
"""Commands that run on the training's machines, or start a server."""


def commands_of_pages(samples: Path, run: str) -> list[str]:
    found = []
    for page in PAGES:
        app = start_app(samples, page, run=run)
        assert not app.exception
        found += codes_of(app, "bash")
        texts = [
            each.value
            for each in (*app.title, *app.markdown, *app.caption, *app.info, *app.warning)
        ]
        found += commands_in(re.sub(r"\\(.)", r"\1", "\n".join(texts)))
    return found


def commands_in(text: str) -> list[str]:
    """Commands in backquotes, and lines that are a command."""
    quoted = re.findall(f"`({COMMAND})`", text)
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    return [*quoted, *(line for line in lines if re.fullmatch(COMMAND, line))]


def call(command: str, folder: Path) -> tuple[int, str]:
    """Run an `fsdp-inspect` command in this process; returns its exit code and its output."""
    out = io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", shlex.split(command, comments=True)),
        mock.patch.dict(os.environ, {"COLUMNS": "2000", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return int(ended.value.code or 0), out.getvalue()


def launch(command: str, folder: Path) -> Path:
    """Record a run with a printed launch line; returns the new run."""
    before = set(folder.rglob("run.json"))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        f"exec {command}",  # so that a timeout ends the command, not only its shell
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stderr[-2000:]}"
    (manifest,) = set(folder.rglob("run.json")) - before
    return manifest.parent


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("run", SAMPLE_IDS)
def test_every_printed_command_runs_as_printed(tmp_path: Path, run: str) -> None:
    # `verify` writes its outcome next to the run.
    copies = Path(shutil.copytree(SAMPLES, tmp_path / "samples"))
    printed = commands_of_pages(copies, run)
    for name, *options in map(str.split, QUESTIONS):
        _, text = call(shlex.join(["fsdp-inspect", name, str(copies / run), *options]), tmp_path)
        printed += commands_in(text)
    commands = [
        each for each in dict.fromkeys(printed) if not any(name in each for name in BY_THE_MACHINE)
    ]
    assert any("--write" in each for each in commands)

    launches = [each for each in commands if not each.startswith("fsdp-inspect")]
    own = [each for each in commands if each.startswith("fsdp-inspect")]
    assert all(set(PLACEHOLDER.findall(each)) <= {NEW} for each in commands), commands
    first = [each for each in own if NEW not in each]
    for command in first:
        code, text = call(command, tmp_path)
        assert code == 0, f"{command}\n{text}"
    assert launches
    is_here = open_run(copies / run).manifest.device_type == "cpu" or torch.cuda.is_available()
    recorded = [launch(command, tmp_path) for command in launches] if is_here else [copies / run]
    for command in own:
        if NEW in command:
            code, text = call(command.replace(NEW, shlex.quote(str(recorded[-1]))), tmp_path)
            assert code in (0, 1, 2), text
            assert "─ Error ─" not in text
            assert "fsdp-inspect: " not in text
