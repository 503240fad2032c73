"""How is a script recorded that knows nothing of it? `torchrun ... -m fsdp_inspect.record`.

    torchrun --nproc-per-node 8 -m fsdp_inspect.record train.py --lr 3e-4
    torchrun --nproc-per-node 8 -m fsdp_inspect.record --out /scratch/runs -m pkg.train --lr 3e-4

In every rank the script runs as `python train.py --lr 3e-4` would run it, and computes the same
numbers (see [Note: What a script can see] in `script`). A `Recorder` is attached to the first
`fully_shard` model that runs a forward pass with gradients, a step ends where an optimizer steps,
and the recording is closed when the script ends, with the error that ended it, if any (see
`discovery`). Whatever happens to the recording, the script goes on, and its exit code is its own.

Without a shared file system every node records below its own `--out`, in a folder of the name
that rank 0 chose. Copy the parts together, rank 0's node last, and compact once:

    rsync -a node1:/scratch/runs/ runs/ && rsync -a node0:/scratch/runs/ runs/
    fsdp-inspect compact runs/<run>
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.script import Target, run_as_main, trim_traceback

if TYPE_CHECKING:
    from torch import nn

    from fsdp_inspect.recording.discovery import Discovery
    from fsdp_inspect.recording.recorder import Recorder

_DESCRIPTION = """\
Record a training script that knows nothing of it.

Every rank runs the script as Python would run it; it computes the same numbers and keeps its exit
code. The recorder attaches itself to the first model sharded with fully_shard (FSDP2) that runs a
forward pass with gradients; a step ends where an optimizer steps. At the end rank 0 says on stderr
what limits the step, and where the recording lies.
"""

_EPILOG = """\
examples:
  torchrun --nproc-per-node 8 -m fsdp_inspect.record train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m fsdp_inspect.record --out /scratch/runs --name 1b -m pkg.train
  fsdp-inspect summary runs/<run>        what limited it, in the terminal
  fsdp-inspect app runs                  all runs, in the browser

Several nodes without a shared file system: each keeps its part below its own --out, in a folder of
the same name. Copy the parts into one, rank 0's node last, and run `fsdp-inspect compact` on it.

To name the loss, the steps or the model, use fsdp_inspect.Recorder in the script instead.
"""


class LauncherArguments(NamedTuple):
    """The launcher's command line, checked."""

    target: Target
    out: Path
    name: str | None
    warmup_steps: int | None
    """None: the recorder's own default."""
    memory_steps: Sequence[int] | Literal["auto"]
    print_verdict: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script under a recorder; ends as the script ends.

    Args:
        arguments: The command line; None: this process's.
    """
    launch_script(parse_arguments(sys.argv[1:] if arguments is None else arguments))


def launch_script(given: LauncherArguments) -> None:
    """Run a script under a recorder; ends as the script ends.

    Args:
        given: The script and how to record it.
    """
    launch = Launch(given)
    try:
        run_as_main(given.target)
    except BaseException as error:
        launch.finish(error)
        trim_traceback(error)
        raise
    launch.finish(None)


class Launch:
    """One script with the recording of what it trains."""

    def __init__(self, given: LauncherArguments) -> None:
        self._given = given
        self._pid = os.getpid()
        self._directory = Path.cwd()  # the script may go elsewhere
        self._discovery: Discovery | None = None
        call_after_import("torch", self._discover)

    def finish(self, error: BaseException | None) -> None:
        """The script ended: close the recording, and say where it is or why there is none."""
        if os.getpid() != self._pid:
            return  # a child that the script forked; the recording is its parent's
        if self._discovery is None:
            say("nothing was recorded: the script did not import torch in this process.")
            return
        try:
            folder = self._discovery.finish(error)
        except Exception as problem:  # ours; the script's end is its own
            say(f"the recording could not be finished: {problem!r}.")
            return
        if folder is not None and folder.exists():
            self._say_where(folder)

    def _say_where(self, folder: Path) -> None:
        if folder.is_relative_to(self._directory):
            folder = folder.relative_to(self._directory)
        say(
            f"recorded in {folder}. Look at it: fsdp-inspect summary {folder}, "
            f"or in the browser: fsdp-inspect app {folder.parent}"
        )

    def _discover(self) -> None:
        """The script has imported torch; here too, without cost to anybody."""
        try:
            from fsdp_inspect.recording.discovery import Discovery

            self._discovery = Discovery(self._open_recorder, say)
        except Exception as error:
            say(f"nothing will be recorded: {error!r}. The script goes on.")

    def _open_recorder(self, model: nn.Module) -> Recorder:
        from fsdp_inspect.recording.folders import default_path
        from fsdp_inspect.recording.recorder import DEFAULT_WARMUP_STEPS, Recorder
        from fsdp_inspect.recording.units import describe_model, find_recordable_groups

        given = self._given
        groups = find_recordable_groups(model)
        name = given.name or describe_model(model, groups).class_name
        steps = given.warmup_steps
        return Recorder(
            model,
            path=default_path(name, self._directory / given.out),
            name=name,
            warmup_steps=DEFAULT_WARMUP_STEPS if steps is None else steps,
            memory_steps=given.memory_steps,
            print_verdict=given.print_verdict,
        )


def say(message: str) -> None:
    """Tell the user something on stderr, from one rank of the job."""
    if _is_rank_0():
        print(f"fsdp_inspect: {message}", file=sys.stderr, flush=True)


def _is_rank_0() -> bool:
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


class RankParser(argparse.ArgumentParser):
    """Prints what N ranks would print N times once."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if _is_rank_0():
            super()._print_message(message, file)


def parse_arguments(arguments: Sequence[str]) -> LauncherArguments:
    """Read the launcher's own options; everything from the script's name on is the script's.

    Args:
        arguments: The command line without the program's name.

    Raises:
        SystemExit: 0 after `--help`; 2 when an option is unknown or impossible, or the script
            does not exist, with a message on stderr, from one rank.
    """
    parser = RankParser(
        prog="python -m fsdp_inspect.record",
        usage="torchrun ... -m fsdp_inspect.record [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    return read_arguments(parser, parser.parse_args(arguments))


def read_arguments(parser: argparse.ArgumentParser, given: argparse.Namespace) -> LauncherArguments:
    """What the options of `add_options` were given, checked.

    Raises:
        SystemExit: 2 when the script does not exist.
    """
    if not given.is_module and not Path(given.target).exists():
        parser.error(
            f"no script at {given.target!r}. Expected a Python file, seen from "
            f"{str(Path.cwd())!r}, or -m with the name of a module."
        )
    return LauncherArguments(
        target=Target(given.target, tuple(given.arguments), given.is_module),
        out=given.out,
        name=given.name,
        warmup_steps=given.warmup_steps,
        memory_steps=given.memory_steps,
        print_verdict=given.print_verdict,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the recording, and the script behind them."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder of runs to record into, made if need be (default: %(default)s); the run gets "
        "a folder of its own in it, named by time and by --name",
    )
    parser.add_argument("--name", help="what to call the run (default: the model's class)")
    parser.add_argument(
        "--warmup-steps",
        type=_step_count,
        metavar="N",
        help="first steps to leave out of every median (default: 2)",
    )
    parser.add_argument(
        "--memory-steps",
        type=_memory_steps,
        default="auto",
        metavar="STEPS",
        help="steps, counted from 0, in which every storage is followed, about twice as slow and "
        "left out of every time: a list such as 3,50; 'none'; or 'auto', the first step after the "
        "warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--no-verdict",
        dest="print_verdict",
        action="store_false",
        help="do not say at the end what limits the step",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="SCRIPT is the name of a module, as in python -m",
    )
    parser.add_argument("target", metavar="SCRIPT", help="the training script, or its module")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="passed to the script as they are",
    )


def _step_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a whole number of steps, 0 or more, got {text!r}"
        )
    return int(text)


def _memory_steps(text: str) -> Sequence[int] | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text == "none":
        return ()
    steps = text.split(",")
    if not all(step.isdecimal() for step in steps):
        raise argparse.ArgumentTypeError(
            f"expected step numbers such as 3,50, or 'auto', or 'none', got {text!r}"
        )
    return tuple(int(step) for step in steps)
