"""`fsdp-inspect record`: run a training command with a recorder in each rank."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from fsdp_inspect.errors import FsdpInspectError

_RECORDER = "fsdp_inspect.record"
TORCHRUN_FLAGS = frozenset(
    {"--standalone", "--no-python", "--run-path", "--virtual-local-rank", "--module", "-m"}
)
"""The options of torchrun without a value; a value follows all others."""


def record(context: typer.Context) -> None:
    """Record an unmodified training command, and print what limits its step.

    The training command follows `--`. It is `torchrun ...` or `python ...`, and runs as it is, with
    the recorder in each rank. Options of the recorder stand before `--`, such as `--out runs`;
    `fsdp-inspect record --help` lists them. For other launchers, put `-m fsdp_inspect.record`
    before the script: `accelerate launch -m fsdp_inspect.record train.py`.

    Example: `fsdp-inspect record --out runs -- torchrun --nproc-per-node 8 train.py --lr 3e-4`
    """
    words = sys.argv[sys.argv.index("record") + 1 :]
    at = words.index("--") if "--" in words else len(words)
    options, command = words[:at], words[at + 1 :]
    if any(word in ("--help", "-h") for word in options):
        command = [sys.executable, "-m", _RECORDER, "--help"]
    elif not command:
        raise typer.BadParameter(
            "No training command is given. Expected it after --. For example: fsdp-inspect record "
            "-- torchrun --nproc-per-node 2 train.py"
        )
    else:
        command = insert_recorder(command, options)
        _check_options(options)
    program = shutil.which(command[0])
    if program is None:
        raise FsdpInspectError(
            f"Program {command[0]!r} not found. Expected a program on the path. Activate the "
            "environment of the training."
        )
    sys.stdout.flush()
    os.execv(program, command)


def _check_options(options: Sequence[str]) -> None:
    """End with the recorder's own message about a wrong option, before any rank starts."""
    check = [sys.executable, "-m", _RECORDER, "--check-options", *options, "-m", "-"]
    if code := subprocess.run(check, check=False).returncode:
        raise SystemExit(code)


record.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def insert_recorder(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Put the recorder's module and options before the script of a training command.

    Args:
        command: `torchrun [OPTIONS] [-m] SCRIPT ...` or `python [OPTIONS] [-m] SCRIPT ...`.
        options: The options of the recorder.

    Raises:
        FsdpInspectError: The program is another launcher, or there is no script.
    """
    program = Path(command[0]).name
    is_python = program.startswith("python")
    if not is_python and program != "torchrun":
        raise FsdpInspectError(
            f"Unknown launcher {program!r}. Expected torchrun or python. Put the recorder before "
            f"the script yourself: {shlex.join(['-m', _RECORDER, *options, 'train.py'])}"
        )
    launcher, is_module, at = [command[0]], False, 1
    while at < len(command) and command[at].startswith("-"):
        word = command[at]
        if word in ("-m", "--module"):
            is_module = True
            if is_python and at + 1 < len(command) and command[at + 1] in _LAUNCHERS:
                rest = insert_recorder(["torchrun", *command[at + 2 :]], options)
                return [*launcher, word, command[at + 1], *rest[1:]]
        else:
            launcher.append(word)
            has_value = word in ("-X", "-W") if is_python else _takes_value(word)
            if has_value and at + 1 < len(command):
                at += 1
                launcher.append(command[at])
        at += 1
    if at >= len(command):
        raise FsdpInspectError(
            f"No script in the command {shlex.join(command)!r}. Expected a training script. For "
            "example: fsdp-inspect record -- torchrun --nproc-per-node 2 train.py"
        )
    module = ["-m"] if is_module else []
    return [*launcher, "-m", _RECORDER, *options, *module, *command[at:]]


_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


def _takes_value(word: str) -> bool:
    return "=" not in word and word.replace("_", "-") not in TORCHRUN_FLAGS
