"""Record an unmodified training script: `torchrun ... -m fsdp_inspect.record`.

    torchrun --nproc-per-node 8 -m fsdp_inspect.record train.py --lr 3e-4
    torchrun --nproc-per-node 8 -m fsdp_inspect.record --out /scratch/runs -m pkg.train --lr 3e-4

Every rank runs the script as `python train.py --lr 3e-4` would, with the same numerical results
(see [Note: What a script can see] in `script`). A `Recorder` is attached to every sharded
model at the first forward pass with gradients (see `discovery`). A step ends when an optimizer
steps, or with several models when each optimizer has stepped. The recording closes when the script
ends, with the script's exception if there is one.
A failure of the recording never stops the script or changes its exit code.

Without a shared file system every node records below its own `--out`, into a folder with the name
that rank 0 chose. Copy the parts to one machine and merge them:

    rsync -a node0:/scratch/runs/ parts/0/ && rsync -a node1:/scratch/runs/ parts/1/
    fsdp-inspect store merge parts/*/<run> --out runs/<run>
"""

from __future__ import annotations

import argparse
import builtins
import functools
import io
import math
import os
import pkgutil
import runpy
import subprocess
import sys
import types
import zipfile
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fsdp_inspect.alert_rules import ALERT_HELP, ALERT_IF_HELP, ALERTS_VARIABLE, AlertTarget
from fsdp_inspect.quantities import parse_bytes, parse_profile_steps
from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.trace.records import MAX_NS

if TYPE_CHECKING:
    from torch import nn

    from fsdp_inspect.recording.discovery import Discovery
    from fsdp_inspect.recording.recorder import Recorder
    from fsdp_inspect.recording.start_watch import StartWatch


_DESCRIPTION = """\
Record an unmodified training script.

Every rank runs the script as Python would run it, with the same results and
exit code. The recorder attaches to every sharded model when the first of them
runs a forward pass with gradients. It supports fully_shard (FSDP2),
FullyShardedDataParallel (FSDP1), DistributedDataParallel (DDP), DeepSpeed ZeRO
and SimpleFSDP. A step ends when the optimizer steps. With several models, it
ends when each optimizer has stepped. At the end, rank 0 prints what limits the
step and the path of the run folder on stderr.
"""

_EPILOG = """\
examples:
  torchrun --nproc-per-node 8 -m fsdp_inspect.record train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m fsdp_inspect.record --out /scratch/runs --name 1b -m pkg.train
  fsdp-inspect show runs/<run>        show the result in the terminal
  fsdp-inspect app runs                  show all runs in the browser

On several nodes without a shared file system, each node records below its own
--out, into a folder of the same name. Copy the parts to one machine, and merge
them with `fsdp-inspect store merge`.

To record the loss, mark the steps or choose the model, use
fsdp_inspect.Recorder in the script.
"""


class LauncherArguments(NamedTuple):
    """The parsed and validated command line of the launcher."""

    target: Target
    out: Path
    recorder: Mapping[str, Any]
    """The keyword arguments of `Recorder` that the command line states."""
    alerts: AlertTarget | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script under a recorder; exit as the script exits.

    Args:
        arguments: The command line; None means that of this process.
    """
    launch_script(parse_arguments(sys.argv[1:] if arguments is None else arguments))


def launch_script(given: LauncherArguments) -> None:
    """Run a script under a recorder; exit as the script exits.

    Args:
        given: The script and the options of its recording.
    """
    launch = Launch(given)
    if given.alerts is not None and _is_rank_0():
        _start_alerts(given.out, given.alerts)
    try:
        run_as_main(given.target)
    except BaseException as error:
        launch.finish(error)
        trim_traceback(error)
        raise
    launch.finish(None)


class Launch:
    """One script and the recording of its training."""

    def __init__(self, given: LauncherArguments) -> None:
        self._given = given
        self._pid = os.getpid()
        self._directory = Path.cwd()  # the script may change it
        self._discovery: Discovery | None = None
        self._start: StartWatch | None = None
        call_after_import("torch", self._discover)

    def finish(self, error: BaseException | None) -> None:
        """Close the recording after the script, and print its path or why there is no recording."""
        if os.getpid() != self._pid:
            return  # a child that the script forked; the recording belongs to the parent
        if self._discovery is None:
            say("nothing was recorded: the script did not import torch in this process.")
            return
        if self._start is not None and self._discovery.recorder is None:
            is_clean = error is None or (isinstance(error, SystemExit) and not error.code)
            self._start.end(None if is_clean else error)
        try:
            folder = self._discovery.finish(error)
        except Exception as problem:  # an internal error must not change the script's exit
            say(f"finishing the recording failed: {problem!r}.")
            return
        if folder is not None and folder.exists() and _is_rank_0():
            self._tell_place(folder, error)

    def _tell_place(self, folder: Path, error: BaseException | None) -> None:
        """Print the path of a run, unless the recorder has done it with the verdict."""
        from fsdp_inspect.recording.verdict import tell_place

        is_clean = error is None or (isinstance(error, SystemExit) and not error.code)
        if not (is_clean and self._given.recorder.get("print_verdict", True)):
            tell_place(folder)

    def _discover(self) -> None:
        """Wait for a model. The script has imported torch, so importing it here costs nothing."""
        try:
            import fsdp_inspect.recording.verdict  # noqa: F401 - notes the folder of the start
            from fsdp_inspect.recording.discovery import Discovery
            from fsdp_inspect.recording.start_watch import StartWatch

            self._discovery = Discovery(self._open_recorder, say)
            self._start = StartWatch(
                self._directory / self._given.out,
                self._given.recorder.get("hang_after_s"),
                lambda: self._discovery is None or self._discovery.is_over,
                with_source=self._given.recorder.get("record_source", True),
            )
        except Exception as error:
            say(f"nothing will be recorded: {error!r}. The script continues.")

    def _open_recorder(self, model: nn.Module) -> Recorder:
        from fsdp_inspect.recording.folders import default_path
        from fsdp_inspect.recording.models import class_name_of
        from fsdp_inspect.recording.recorder import Recorder

        keywords = dict(self._given.recorder)
        keywords.setdefault("name", class_name_of(model))
        path = default_path(keywords["name"], self._directory / self._given.out)
        recorder = Recorder(model, path=path, **keywords)  # waits for rank 0
        if self._start is not None:
            self._start.end(None)
        return recorder


def _start_alerts(folder: Path, alerts: AlertTarget) -> None:
    """Start the process that watches the files of this recording and ends after this process."""
    try:
        subprocess.Popen(
            [sys.executable, "-m", "fsdp_inspect.alert_watch", str(folder), str(os.getpid())],
            env=os.environ | {ALERTS_VARIABLE: alerts.encode()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a launcher ends the process group of its rank
        ).returncode = 0  # it outlives this process: no warning that it still runs
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        say(f"no alerts are sent: {error}. The script continues.")


def say(message: str) -> None:
    """Print a message to the user on stderr, from one rank of the job."""
    if _is_rank_0():
        print(f"fsdp_inspect: {message}", file=sys.stderr, flush=True)


def _is_rank_0() -> bool:
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


class RankParser(argparse.ArgumentParser):
    """A parser for one of several ranks: one rank prints, and options must not be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        if _is_rank_0():
            super()._print_message(message, file)


def parse_arguments(arguments: Sequence[str]) -> LauncherArguments:
    """Parse the launcher's own options; the script's name and the rest belong to the script.

    Args:
        arguments: The command line without the program's name.

    Raises:
        SystemExit: 0 after `--help`; 2, with a message on stderr from one rank, if an option is
            unknown or invalid or the script does not exist.
    """
    parser = RankParser(
        prog="python -m fsdp_inspect.record",
        usage="fsdp-inspect record [OPTIONS] -- torchrun ... (SCRIPT | -m MODULE) [ARGUMENTS]\n"
        "   or: torchrun ... -m fsdp_inspect.record [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--alert",
        metavar="URL|COMMAND",
        help=f"send alerts on this recording: {ALERT_HELP} A process of its own reads the files of "
        "the run, and ends with rank 0 (default: no alerts)",
    )
    parser.add_argument(
        "--alert-if",
        action="append",
        metavar="RULE",
        help=ALERT_IF_HELP[:1].lower() + ALERT_IF_HELP[1:].replace("%", "%%"),
    )
    parser.add_argument("--check-options", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    given = parser.parse_args(arguments)
    try:
        alerts = AlertTarget.read(given.alert, given.alert_if or [])
    except ValueError as error:
        parser.error(str(error))
    if given.check_options:  # `fsdp-inspect record` asks before it starts the training
        if given.target != "-":
            parser.error(f"unexpected {given.target!r}. Expected the training command after --")
        parser.exit()
    own = ("alert", "alert_if", "check_options")
    return read_arguments(parser, given, own)._replace(alerts=alerts)


def read_arguments(
    parser: argparse.ArgumentParser, given: argparse.Namespace, own: Collection[str] = ()
) -> LauncherArguments:
    """Validate the parsed options of `add_options`.

    Args:
        parser: The parser, which states errors.
        given: The parsed options.
        own: The names of options that are no keyword arguments of `Recorder`.

    Raises:
        SystemExit: 2 when the script does not exist.
    """
    if not given.is_module and not Path(given.target).exists():
        parser.error(
            f"script not found: {given.target!r}. Expected a Python file, relative to "
            f"{str(Path.cwd())!r}, or -m with the name of a module."
        )
    no_keywords = {"target", "arguments", "is_module", "out", *own}
    recorder = {name: value for name, value in vars(given).items() if name not in no_keywords}
    target = Target(given.target, tuple(given.arguments), given.is_module)
    return LauncherArguments(target, given.out, recorder)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the recording, then the script and its arguments.

    An option that is not given is absent from the result: `Recorder` defines its default.
    """
    add_option = functools.partial(parser.add_argument, default=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="parent folder of the run folder, created if missing (default: %(default)s); the "
        "name of the run folder contains the time and --name",
    )
    add_option("--name", help="name of the run (default: the model's class)")
    add_option(
        "--warmup-steps",
        type=_step_count,
        metavar="N",
        help="number of warm-up steps, not timed (default: 2)",
    )
    add_option(
        "--memory-steps",
        type=_memory_steps,
        metavar="STEPS",
        help="memory steps, which run under the storage tracker (about twice as slow, and not "
        "timed): a list such as 3,50, counted from 0; 'none'; or 'auto', the first step after "
        "the warm-up (default: auto)",
    )
    add_option(
        "--numerics-every",
        type=_step_count,
        metavar="N",
        help="read the values of the model in every Nth step, which is then not timed: norms, "
        "values that are not finite, and updates that are rounded away (default: 0, no step)",
    )
    add_option(
        "--profile-steps",
        type=_profile_steps,
        metavar="STEPS",
        help="steps that run under torch's profiler, and are not timed: 20:23 for 20, 21 and 22; "
        "`fsdp-inspect show RUN kernels` shows their kernels by unit (default: none)",
    )
    add_option(
        "--overhead",
        type=_overhead,
        metavar="BUDGET",
        help="part of the step time that the recording may take, such as 1%%: after the first 20 "
        "timed steps, blocks of steps are recorded in detail as the budget allows, and the others "
        "without their units; 'none' records every step in detail (default: 1%%)",
    )
    add_option(
        "--device-memory",
        type=_device_memory,
        metavar="SIZE",
        help="limit the memory of the device, such as 2GiB: an allocation that exceeds the limit "
        "fails with torch.OutOfMemoryError, as on a device of that size, and `fsdp-inspect "
        "diagnose` shows the live memory and the plans that fit. On CPU, every step then runs "
        "under the storage tracker (default: no limit)",
    )
    add_option(
        "--no-source",
        dest="record_source",
        action="store_false",
        help="store no source lines: neither those around the fully_shard calls nor the statements "
        "in stacks; `advise` then writes no diff of the script",
    )
    add_option(
        "--no-verdict",
        dest="print_verdict",
        action="store_false",
        help="at the end, print neither the verdict (what limits the step) nor, after a failure, "
        "the diagnosis",
    )
    add_option(
        "--hang-after",
        dest="hang_after_s",
        type=_seconds,
        metavar="SECONDS",
        help="report a hang after this time without progress: every rank writes its stacks, and "
        "rank 0 prints the diagnosis; the job continues (default: 60, or the time of 20 steps if "
        "longer)",
    )
    add_option(
        "--on-desync",
        choices=("warn", "raise", "off"),
        help="if ranks issue different collectives: `warn` prints the difference on every rank; "
        "`raise` also compares all ranks before each optimizer step, and stops the training there; "
        "`off` compares nothing (default: warn)",
    )
    add_option(
        "--log-to",
        type=_trackers,
        metavar="TRACKERS",
        help="trackers to which rank 0 logs the numbers of each step, in the background: a list of "
        "wandb, mlflow, tensorboard, comet, trackio and otel, such as wandb,otel (default: none)",
    )
    add_option(
        "--dashboard-url",
        metavar="URL",
        help="address of a dashboard of these runs, to which the trackers link",
    )
    add_option(
        "--upload",
        type=_url,
        metavar="URL",
        help="upload the recording below this URL while it grows, such as s3://bucket/runs; any "
        "URL that fsspec can write. The recording stays in --out too, and training continues if "
        "the object store fails: `fsdp-inspect store upload` then sends the rest (default: none)",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="SCRIPT is the name of a module, as for python -m",
    )
    parser.add_argument("target", metavar="SCRIPT", help="training script, or its module with -m")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="passed to the script unchanged",
    )


def _step_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"invalid number of steps: {text!r}. Expected a whole number, 0 or more"
        )
    return int(text)


def _trackers(text: str) -> Sequence[str]:
    from fsdp_inspect.recording.trackers.feed import check_trackers

    try:
        return check_trackers(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _device_memory(text: str) -> int:
    amount = parse_bytes(text, needs_unit=True)
    if not amount or amount > MAX_NS:
        raise argparse.ArgumentTypeError(
            f"invalid amount of memory: {text!r}. Expected an amount above 0 with a unit, such as "
            "2GiB or 512MB"
        )
    return amount


def _url(text: str) -> str:
    if "://" not in text:
        raise argparse.ArgumentTypeError(
            f"invalid URL: {text!r}. Expected a URL such as s3://bucket/runs"
        )
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"invalid time: {text!r}. Expected seconds above 0")
    return seconds


def _overhead(text: str) -> float | None:
    from fsdp_inspect.recording.overhead import read_overhead

    try:
        return None if text == "none" else read_overhead(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}".rstrip(".")) from None


def _profile_steps(text: str) -> Sequence[int]:
    try:
        return parse_profile_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}".rstrip(".")) from None


def _memory_steps(text: str) -> Sequence[int] | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text == "none":
        return ()
    steps = text.split(",")
    if not all(step.isdecimal() for step in steps):
        raise argparse.ArgumentTypeError(
            f"invalid memory steps: {text!r}. Expected step numbers such as 3,50, 'auto' or 'none'"
        )
    return tuple(int(step) for step in steps)


# --- Run a script exactly as the Python interpreter would run it.
#
# [Note: What a script can see] `sys.argv`, `sys.path[0]`, `__main__` with its `__file__`,
# `__spec__` and `__package__`, exit codes and the text of tracebacks equal those of `python
# script.py` or `python -m module`. The module `__main__` stays in place until the process ends, so
# that pickles, spawned DataLoader workers and exit handlers find it (the public `runpy` functions
# restore the old one).


class Target(NamedTuple):
    """The script or module to run."""

    name: str
    """Path of a script (or of a folder or archive with a `__main__.py`), or name of a module."""
    arguments: Sequence[str]
    is_module: bool


def run_as_main(target: Target) -> None:
    """Run the target as the main program of this process; its exceptions propagate.

    Args:
        target: The script or module; a script must exist.
    """
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if target.is_module:
        sys.argv[:] = ["-m", *target.arguments]
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
        return
    sys.argv[:] = [target.name, *target.arguments]
    path = os.path.abspath(target.name)  # noqa: PTH100 - links stay, as Python does it
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, added by `python -m`
    if Path(path).is_dir() or zipfile.is_zipfile(path):
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(os.path.realpath(path)).parent))
    _run_file(path, main)


def trim_traceback(error: BaseException) -> None:
    """Make Python print the same traceback as without a launcher.

    Args:
        error: The exception of `run_as_main`, about to be raised again.
    """
    first = _first_of_script(error.__traceback__)
    shown = sys.excepthook

    def show(
        kind: type[BaseException], value: BaseException, where: types.TracebackType | None
    ) -> None:
        if value is error:
            value, where = value.with_traceback(first), first
        shown(kind, value, where)

    sys.excepthook = show


def _run_file(path: str, main: types.ModuleType) -> None:
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # a .pyc
    if code is None:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__package__ = None
    exec(code, vars(main))


def _first_of_script(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback below this file's frames; None if the script could not be compiled."""
    place, own = traceback, None
    while place is not None and (own is None or place.tb_frame.f_code.co_filename == __file__):
        if place.tb_frame.f_code.co_filename == __file__:
            own = place
        place = place.tb_next
    return traceback if own is None else own.tb_next
