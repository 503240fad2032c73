"""`fsdp-inspect equivalence`: compare a sharded step with the same step without sharding."""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable

if TYPE_CHECKING:
    from fsdp_inspect.comparison.equivalence import Equivalence
    from fsdp_inspect.trace.step_dump import StepDump

EQUAL, DIFFERENT, CANNOT_TELL = range(3)

_CHECKS = (
    "To check the training itself, record it (`torchrun ... -m fsdp_inspect.record train.py`), "
    "and run `fsdp-inspect diagnose`."
)
_SITE = """\
# Written by `fsdp-inspect equivalence`; started by every Python process of the command.
import importlib.machinery
import importlib.util
import sys

try:
    from fsdp_inspect.recording.equivalence.start import start
except ImportError:
    pass  # a Python without FSDP Inspect: the command dumps nothing
else:
    start()
_own = {own!r}
_paths = [path for path in sys.path if path != _own]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _paths)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
"""


def equivalence(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The training command, after --: torchrun ... train.py.",
            metavar="-- COMMAND",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int,
        typer.Option(
            min=0,
            help="The step to compare, counted from 0. Stale parameters, which were not gathered "
            "again after an update, can be found from step 1 on.",
            metavar="N",
        ),
    ] = 1,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Keep the dumps and the output of the runs in this new folder. Default: a "
            "temporary folder, which is deleted.",
            metavar="DIR",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that sharding does not change the gradients: one step with and without it.

    The command runs two or three times, each time up to the update of the step. The first run is
    sharded as in the script. In the second run, the parameters are whole on every rank, no gradient
    is reduced, and the step starts from the parameters and random states of the first run. Each
    rank then computes the gradient of its own batch. The mean over the ranks must equal the sharded
    gradient of each unit. If they differ for an unknown reason, a third run, sharded again, shows
    how much two equal runs differ.

    The models may use fully_shard, FSDP1, DDP or DeepSpeed's ZeRO-1 to ZeRO-3. With ZeRO, the
    engine stays as it is in the second run: each rank's own gradients are taken before the engine
    reduces them.

    The tolerance follows from the dtypes. The command finds, for example, a missing reduction, a
    wrong divisor, a gradient that is divided twice, lost precision, and stale parameters. Each run
    writes the files that the script writes before this update, such as logs.

    Each process needs memory for the whole model. The temporary folder needs space for the
    gradients of every rank.

    Exit codes: 0 equal, 1 different, 2 cannot tell.

    Example: `fsdp-inspect equivalence -- torchrun --nproc-per-node 2 train.py`
    """
    if not command:
        raise typer.BadParameter(
            "No command is given. Expected the training command after --. For example: "
            "fsdp-inspect equivalence -- torchrun --nproc-per-node 2 train.py",
            param_hint="COMMAND",
        )
    if keep is not None:
        if keep.exists():
            raise typer.BadParameter(
                f"{str(keep)!r} exists. Expected the name of a new folder.", param_hint="--keep"
            )
        keep.mkdir(parents=True)
        found = _Session(keep.absolute(), command, step).run()
    else:
        with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as folder:
            found = _Session(Path(folder), command, step).run()
    _show(found, as_json=as_json)
    codes = {"equal": EQUAL, "different": DIFFERENT}
    raise typer.Exit(codes.get(found.status.value, CANNOT_TELL))


class _Session:
    """Runs a command with and without sharding, and compares the dumps."""

    def __init__(self, folder: Path, command: Sequence[str], step: int) -> None:
        self._folder = folder
        self._command = command
        self._step = step

    def run(self) -> "Equivalence":
        """Compare both runs. An unexplained difference is checked with a second sharded run."""
        from fsdp_inspect.comparison.equivalence import StepFault, compare_steps

        site = self._folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE.format(own=str(site)))
        sharded = self._dump("sharded", None)
        whole = self._dump("whole", "sharded")
        found = compare_steps(sharded, whole)
        if found.fault in (StepFault.OTHER_OUTPUT, StepFault.OTHER_GRADIENT):
            found = compare_steps(sharded, whole, self._dump("repeat", None))
        return found

    def _dump(self, name: str, sharded: str | None) -> "list[StepDump]":
        """Run the command, and read the dumps of its ranks.

        Raises:
            FsdpInspectError: The command failed, or did not reach the step.
        """
        from fsdp_inspect.cli.child import ChildError, run_child
        from fsdp_inspect.errors import FsdpInspectError
        from fsdp_inspect.trace.step_dump import ENVIRONMENT_VARIABLE, DumpSettings, read_dumps

        folder = self._folder / name
        folder.mkdir()
        paths = [str(self._folder / "site"), os.environ.get("PYTHONPATH", "")]
        settings = DumpSettings(
            str(folder), self._step, None if sharded is None else str(self._folder / sharded)
        )
        what = "the step without sharding" if sharded else "the sharded step"
        failure = None
        try:
            run_child(
                self._command,
                what=what,
                log=self._folder / f"{name}.log",
                environment={
                    **os.environ,
                    ENVIRONMENT_VARIABLE: settings.encode(),
                    "PYTHONPATH": os.pathsep.join(each for each in paths if each),
                    "PYTHONUNBUFFERED": "1",
                },
                keeps_log=False,
            )
        except ChildError as error:
            failure = error
        dumps = read_dumps(folder)
        num_ranks = dumps[0].world_size if dumps else 0
        if dumps and len(dumps) == num_ranks:
            return dumps
        if failure is not None:
            raise failure
        raise FsdpInspectError(self._why_nothing(folder, what, len(dumps), num_ranks))

    def _why_nothing(self, folder: Path, what: str, num_dumps: int, num_ranks: int) -> str:
        from fsdp_inspect.formatting import plural
        from fsdp_inspect.trace.step_dump import read_progress

        shown = shlex.join(self._command)
        if num_dumps:
            return (
                f"Only {num_dumps} of {num_ranks} ranks dumped {what}. Expected a command that "
                f"starts all ranks on this machine, and each rank to reach step {self._step}."
            )
        if not any(folder.iterdir()):
            return (
                f"No rank of `{shown}` was seen in {what}. Expected a command that starts ranks "
                f"with torchrun or another launcher that sets RANK, with this Python "
                f"({sys.executable}), and a script that imports torch."
            )
        progress = read_progress(folder)
        if progress is None or not progress.has_model:
            return (
                f"`{shown}` ran no forward of a sharded model. Expected a model of fully_shard, "
                f"FSDP1, DDP or DeepSpeed's ZeRO-1 to ZeRO-3. {_CHECKS}"
            )
        if progress.num_others and not progress.num_updates:
            place = f" ({progress.place})" if progress.place else ""
            return (
                f"No optimizer of `{shown}` updates a parameter of the sharded model: "
                f"optimizer.step(){place} ran {plural(progress.num_others, 'time')} with other "
                "tensors, such as those from before sharding. Expected an optimizer that is "
                f"created after the model is sharded, from the parameters that it then has. "
                f"{_CHECKS}"
            )
        return (
            f"`{shown}` ended before the update of step {self._step}, after "
            f"{plural(progress.num_updates, 'update')}. Expected a script that updates the "
            f"sharded model at least {self._step + 1} times. Compare an earlier step with "
            f"--step, or train longer. {_CHECKS}"
        )


def _show(found: "Equivalence", *, as_json: bool) -> None:
    from fsdp_inspect.report.equivalence import equivalence_to_dict, render_equivalence
    from fsdp_inspect.report.json import render_json

    if as_json:
        print(render_json(equivalence_to_dict(found)))
    else:
        print_renderable(render_equivalence(found))
