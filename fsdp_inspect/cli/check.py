"""`fsdp-inspect check`: compare a run with its baseline or a budget (the CI gate)."""

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli import UNJUDGED
from fsdp_inspect.cli.arguments import (
    JsonOption,
    open_stored_argument,
    print_renderable,
    whole_number,
)
from fsdp_inspect.error_text import shorten
from fsdp_inspect.formatting import show_controls

if TYPE_CHECKING:
    from fsdp_inspect.comparison.gate.baseline import Baseline
    from fsdp_inspect.comparison.gate.check import CheckResult
    from fsdp_inspect.comparison.gate.measurements import GateMeasurements
    from fsdp_inspect.store.reader import StoredRun

_FOLDER = "{runs}"


class Format(StrEnum):
    """The output format of a check."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    GITHUB = "github"


def check(  # noqa: PLR0913 - one argument an option
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="A run or a forecast. Several runs, or a folder of runs, are repeats.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Baseline file. --update writes it.", metavar="FILE"),
    ] = None,
    baseline_runs: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL of earlier runs with a catalog (`index`): their median is the "
            "baseline.",
            metavar="RUNS",
        ),
    ] = None,
    baseline_tag: Annotated[
        str | None,
        typer.Option(help="Only earlier runs with this tag, such as main.", metavar="TAG"),
    ] = None,
    baseline_last: Annotated[
        int,
        typer.Option(
            help="Largest number of earlier runs, newest first.",
            metavar="N",
            parser=whole_number(1),
        ),
    ] = 10,
    budget: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with a table [limits], absolute or relative to the baseline.",
            metavar="FILE",
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write the baseline instead of checking.")
    ] = False,
    record: Annotated[
        str | None,
        typer.Option(
            help="Record the runs with this command; {runs} is replaced by their folder.",
            metavar="COMMAND",
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            help="Number of runs to record; times require 5.", parser=whole_number(1), metavar="N"
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder to keep the recorded runs in.", metavar="DIR"),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT[=FILE]",
            help="text, markdown, junit or github (annotations). With =FILE, the result is written "
            "there; Markdown is appended. Repeat the option for more outputs.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a run with its baseline, a budget, or both.

    Exit code 0: the run passes. 1: a regression. 2: the run cannot be judged.

    Memory of forecasts and emulated runs must equal the baseline to the byte. Memory of recorded
    runs has a tolerance of 1%. Times require five runs on each side, and a change within noise
    cannot be judged. A baseline belongs to one torch version and device. Another world size, mesh
    or plan is judged too: an increase that it does not explain cannot be judged. Warm-up steps
    never count.

    `--baseline-runs` takes the median of the last runs that have the configuration, machine and
    torch version of the run. With fewer than five such runs, the run cannot be judged.

    Example: `fsdp-inspect check forecasts/llama-8b-8-ranks --baseline baselines/llama-8b-8.json`

    Example: `fsdp-inspect check runs/pr-17 --baseline-runs runs/ --baseline-tag main`
    """
    from fsdp_inspect.errors import FsdpInspectError

    outputs, files = _read_formats(formats or [])
    wrong_use = {
        "Expected either runs or --record 'COMMAND'.": (runs is None) == (record is None),
        "Nothing to compare with: --baseline, --baseline-runs or --budget is missing.": baseline
        is None
        and (update or (budget is None and baseline_runs is None)),
        "Expected either --baseline or --baseline-runs.": baseline is not None
        and baseline_runs is not None,
        "--baseline-tag requires --baseline-runs RUNS. Add it.": baseline_tag is not None
        and baseline_runs is None,
        "--repeat and --out require --record 'COMMAND'. Add it, or omit them.": record is None
        and (repeat > 1 or out is not None),
        "Expected either --json or one --format without a file.": as_json + len(outputs) > 1,
    }
    for message, applies in wrong_use.items():
        if applies:
            raise typer.BadParameter(message)
    words = None if record is None else _split(record)
    try:
        reading = _read(runs or [], words, repeat, out)
        if update:
            assert baseline is not None
            _write_baseline(reading, baseline)
            return
        if baseline_runs is None:
            before = None if baseline is None else _read_baseline(baseline)
        else:
            before = _take_baseline(baseline_runs, reading, baseline_last, baseline_tag)
        result = _judge(reading, before, budget)
    except FsdpInspectError as error:
        typer.echo(show_controls(f"Error: {error}"), err=True)
        raise typer.Exit(UNJUDGED) from error
    _print(result, outputs[0] if outputs else Format.TEXT, as_json=as_json)
    if record is not None and out is None and result.exit_code:
        typer.echo("The recorded runs were deleted. To keep them, use --out DIR.", err=True)
    are_written = _write_files(result, files)
    raise typer.Exit(result.exit_code or (0 if are_written else UNJUDGED))


def _read_formats(texts: Sequence[str]) -> tuple[list[Format], list[tuple[Format, Path]]]:
    """The formats to print, and those to write with their files."""
    outputs, files = [], []
    for text in texts:
        name, _, file = text.partition("=")
        if name not in {each.value for each in Format} or (file and name == Format.TEXT):
            raise typer.BadParameter(
                f"Unknown format {shorten(name)!r}. Expected one of "
                f"{', '.join(each.value for each in Format)}, or with a file: junit=report.xml.",
                param_hint="--format",
            )
        if file:
            files.append((Format(name), Path(file)))
        else:
            outputs.append(Format(name))
    return outputs, files


def _split(record: str) -> list[str]:
    """Split a command into words as a shell does."""
    try:
        words = shlex.split(record)
    except ValueError as error:
        raise typer.BadParameter(
            f"invalid command {record!r}: {error}. Expected a shell command. Close the quote.",
            param_hint="--record",
        ) from error
    if not any(_FOLDER in word for word in words):
        raise typer.BadParameter(
            "{runs} is missing in the command. Expected it as the folder of runs, for example "
            "'torchrun train.py --runs-dir {runs}'.",
            param_hint="--record",
        )
    return words


def _read(
    given: Sequence[str], command: Sequence[str] | None, repeat: int, out: Path | None
) -> "GateMeasurements":
    from fsdp_inspect.comparison.gate.measurements import read_runs

    if command is None:
        return read_runs(_open_all(given))
    with _folder_of_runs(out) as folder:
        return read_runs(_record(command, repeat, folder, keeps=out is not None))


@contextmanager
def _folder_of_runs(out: Path | None) -> Iterator[Path]:
    """Create the folder for recorded runs: the given one, or a temporary one."""
    from fsdp_inspect.errors import CheckError

    if out is None:
        with tempfile.TemporaryDirectory(prefix="fsdp-inspect-") as temporary:
            yield Path(temporary)
        return
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise CheckError(
            f"Folder {str(out)!r} cannot be created: {error.strerror or error}. Expected a new "
            "folder. Choose another --out."
        ) from error
    yield out


def _open_all(given: Sequence[str]) -> "list[StoredRun]":
    from fsdp_inspect.errors import CheckError
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    opened: list[StoredRun] = []
    for one in given:
        inside = list_runs(one)
        if len(inside) > 1:
            opened += [open_run(entry.path) for entry in inside]
        else:
            opened.append(open_stored_argument(one))
    paths = [run.path for run in opened]
    twice = next((run for run in opened if paths.count(run.path) > 1), None)
    if twice is not None:
        raise CheckError(
            f"Run {twice.manifest.run_id!r} is given {paths.count(twice.path)} times. Expected "
            "repeats, each recorded on its own. Give each run once."
        )
    return opened


def _record(command: Sequence[str], repeat: int, folder: Path, *, keeps: bool) -> "list[StoredRun]":
    import os

    from fsdp_inspect.cli.child import run_child
    from fsdp_inspect.errors import CheckError
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    found: list[StoredRun] = []
    for number in range(1, repeat + 1):
        into = folder / str(number)
        into.mkdir()
        words = [word.replace(_FOLDER, str(into.resolve())) for word in command]
        what = f"recording {number} of {repeat}"
        log = folder / f"{number}.log"
        run_child(words, what=what, log=log, environment=os.environ, keeps_log=keeps)
        entries = list_runs(into)
        if len(entries) != 1:
            raise CheckError(
                f"The command recorded {len(entries)} runs. Expected one. Pass {{runs}} to the "
                "recorder, as --runs-dir does for the trainer."
            )
        found.append(open_run(entries[0].path))
    return found


def _write_baseline(reading: "GateMeasurements", path: Path) -> None:
    from fsdp_inspect.comparison.gate.baseline import why_no_baseline, write_baseline
    from fsdp_inspect.errors import CheckError
    from fsdp_inspect.report.check import describe_baseline

    problem = why_no_baseline(reading)
    if problem is not None:
        raise CheckError(problem)
    try:
        baseline, _ = write_baseline(reading, path)
    except OSError as error:
        raise CheckError(
            f"The baseline {str(path)!r} cannot be written: {error.strerror or error}. Expected a "
            "writable path. Choose another one."
        ) from error
    typer.echo(
        f"Wrote {path} from {', '.join(reading.run_ids)}. "
        f"{describe_baseline(baseline, num_runs=len(reading.run_ids))} Review and commit it."
    )


def _read_baseline(path: Path) -> "Baseline":
    from fsdp_inspect.comparison.gate.baseline import read_baseline

    return read_baseline(path)


def _take_baseline(
    runs: str, reading: "GateMeasurements", last: int, tag: str | None
) -> "Baseline":
    """The median of earlier runs, which a line on stderr names."""
    from fsdp_inspect.catalog.baseline import take_baseline
    from fsdp_inspect.catalog.catalog import open_catalog

    taken = take_baseline(open_catalog(runs), reading, last=last, tag=tag)
    names = ", ".join(taken.runs)
    times = "" if taken.has_times else " Times are not judged: they require 5 runs on each side."
    typer.echo(
        show_controls(f"Baseline: the median of {len(taken.runs)} runs: {names}.{times}"), err=True
    )
    return taken.baseline


def _judge(
    reading: "GateMeasurements", baseline: "Baseline | None", budget: Path | None
) -> "CheckResult":
    from fsdp_inspect.comparison.gate.check import check_run as judge
    from fsdp_inspect.comparison.gate.limits import read_budget

    return judge(reading, baseline, None if budget is None else read_budget(budget))


def _print(result: "CheckResult", output: Format, *, as_json: bool) -> None:
    from fsdp_inspect.report.check import render_check
    from fsdp_inspect.report.json import render_json

    if as_json:
        print(render_json(result))
    elif output is Format.TEXT:
        print_renderable(render_check(result))
    else:
        print(_render(result, output), end="")


def _render(result: "CheckResult", output: Format) -> str:
    """A check for a file, or for another program."""
    from fsdp_inspect.report import check as report

    if output is Format.JUNIT:
        return report.render_junit([result])
    if output is Format.GITHUB:
        return report.render_annotations([result])
    return report.render_markdown([result])


def _write_files(result: "CheckResult", files: Sequence[tuple[Format, Path]]) -> bool:
    """Write the requested files; False and a message if one cannot be written."""
    try:
        for output, path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = "a" if output is Format.MARKDOWN else "w"  # appends to the job's summary
            with path.open(mode, encoding="utf-8") as file:
                file.write(_render(result, output))
    except OSError as error:
        typer.echo(
            f"Error: the result cannot be written to {error.filename!r}: {error.strerror}. "
            "Expected a writable path. Choose another one.",
            err=True,
        )
        return False
    return True
