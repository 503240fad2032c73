"""Every command that a page or a command prints about a sample runs unchanged."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from fsdp_inspect.cli import main
from fsdp_inspect.store.reader import open_run
from tests.app.conftest import start_app
from tests.app.synthetic import make_run, write_run
from tests.app.test_pages import codes_of
from tests.browser.states import write_crashed, write_imported

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
    *("show", "show summary", "show units", "show memory", "show ranks", "show exposed"),
    *("show breakdown", "show lifetime", "show kernels", "show numerics", "diagnose", "simulate"),
    *("advise", "advise --details"),
)
NEW = "NEW_RUN"
"""The placeholder for the run that the commands before it record."""
PLACEHOLDER = re.compile(r"(?<![-\w./])[A-Z][A-Z_]+\b")
COMMAND = r"(?:fsdp-inspect|torchrun|python3? -\w+) [^`\n]+"
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
        mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}),
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


WRONG = (
    "show missing",
    "app missing",
    "import missing",
    "diagnose missing",
    "store query 'select 1'",
    "compare missing",
    "check missing",
    "verify missing.json missing",
    "export missing html",
    "record",
    "record -- train.py",
    "record -- mpirun train.py",
    "runs missing",
)
"""Calls with an error; the error names the next command."""


def test_commands_in_errors_exist(tmp_path: Path) -> None:
    """A command in an error may need a folder of the user, so it is asked for its help."""
    printed = []
    for wrong in WRONG:
        code, text = call(f"fsdp-inspect {wrong}", tmp_path)
        assert code, wrong
        printed += re.findall(r"fsdp-inspect ((?:[a-z]+(?: |\b))+)(?=[^:])", text)
    assert len(printed) > 3
    for words in {each.strip() for each in printed}:
        name, *rest = words.split()
        if name == "record":  # its help replaces this process
            continue
        groups = {"store", "plan", "export"}
        command = [name, *rest[:1]] if name in groups else [name]
        code, text = call(shlex.join(["fsdp-inspect", *command, "--help"]), tmp_path)
        assert code == 0, f"fsdp-inspect {words}\n{text}"


@pytest.mark.parametrize("state", ["crashed", "imported", "partial"])
def test_commands_about_runs_in_other_states_run_as_printed(tmp_path: Path, state: str) -> None:
    runs = tmp_path / "runs"
    if state == "crashed":
        write_crashed(runs / state)
    elif state == "imported":
        write_imported(runs / state, tmp_path / "traces")
    else:
        whole = make_run()
        write_run(runs / state, replace(whole, ranks=whole.ranks[:1]))
    printed = []
    for page in ("overview", "diagnosis"):
        app = start_app(runs, page, run=state)
        assert not app.exception
        texts = [each.value for each in (*app.markdown, *app.caption, *app.info, *app.warning)]
        printed += codes_of(app, "bash")
        printed += commands_in(re.sub(r"\\(.)", r"\1", "\n".join(texts)))
    for name, *options in map(str.split, QUESTIONS):
        _, text = call(shlex.join(["fsdp-inspect", name, str(runs / state), *options]), tmp_path)
        printed += commands_in(text)
    assert_run_as_printed(printed, tmp_path)


def assert_run_as_printed(printed: Sequence[str], folder: Path) -> None:
    """Run the commands that neither record, nor serve, nor need a new run."""
    commands = [
        each
        for each in dict.fromkeys(printed)
        if each.startswith("fsdp-inspect ")
        and not any(name in each for name in BY_THE_MACHINE)
        and NEW not in each
    ]
    assert commands
    assert not any(PLACEHOLDER.findall(each) for each in commands), commands
    for command in commands:
        code, text = call(command, folder)
        assert code in (0, 1, 2), f"{command}\n{text}"  # 2: a diagnosis cannot tell
        assert "─ Error ─" not in text, f"{command}\n{text}"
