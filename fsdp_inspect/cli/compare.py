"""`fsdp-inspect compare`: compare runs by settings, times, units and memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, show_result

if TYPE_CHECKING:
    from fsdp_inspect.store.reader import StoredRun
    from fsdp_inspect.trace.run import TableOrigin

SidesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="A B [C ...]",
        help="Runs to compare with the first. A folder of runs with equal settings is one side "
        "of repeats.",
        show_default=False,
    ),
]


def compare(sides: SidesArgument, as_json: JsonOption = False) -> None:
    """Compare two or more runs: settings, times, units and memory.

    Runs with equal settings are repeats of one side. Each run gives one step time, because steps of
    one process are not independent. With five runs on each side, a rank test compares the times.
    With fewer runs, changes below 10% are within noise. Counts and bytes are compared exactly.

    Example: `fsdp-inspect compare runs/before runs/after`
    """
    from fsdp_inspect.comparison.comparison import compare_runs
    from fsdp_inspect.report.comparison import render_comparison

    show_result(compare_runs(*open_sides(sides)), render_comparison, as_json=as_json)


def open_sides(given: list[str]) -> "list[StoredRun | list[StoredRun]]":
    """Open each argument as a run or as a side of repeats.

    Raises:
        BadParameter: There are fewer than two arguments, or one run is given twice.
        FsdpInspectError: The runs of a folder differ in their settings.
    """
    opened = [open_side(one) for one in given]
    if len(opened) < 2:
        number = len(opened[0]) if isinstance(opened[0], list) else 1
        found = "one run" if number == 1 else f"{number} runs of the same settings"
        raise typer.BadParameter(
            f"{given[0]!r} contains {found}, which is one side. Expected two or more sides. Give "
            "the runs separately: fsdp-inspect compare A B"
        )
    _refuse_twins(given, opened)
    # A folder with one run is this run, and may repeat another argument.
    return [one[0] if isinstance(one, list) and len(one) == 1 else one for one in opened]


def open_side(given: str) -> "StoredRun | list[StoredRun]":
    """Open a run, or a folder of runs with the same settings.

    Raises:
        FsdpInspectError: There is no run, or a folder's runs differ in their settings.
    """
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    try:
        return open_run(given)
    except NotARunError:
        inside = list_runs(given)
        if not inside:
            raise
    runs = [open_run(entry.path) for entry in sorted(inside, key=lambda entry: entry.id)]
    _refuse_mixture(given, [entry.id for entry in sorted(inside, key=lambda e: e.id)], runs)
    return runs


def _refuse_mixture(given: str, names: list[str], runs: "list[StoredRun]") -> None:
    """Reject a folder of runs with different settings."""
    from fsdp_inspect.comparison.settings import are_repeats, compare_settings
    from fsdp_inspect.errors import FsdpInspectError

    for name, run in zip(names[1:], runs[1:], strict=True):
        if are_repeats(runs[0].manifest, run.manifest):
            continue
        differing = compare_settings([runs[0].manifest, run.manifest])[0]
        first, second = differing.values
        raise FsdpInspectError(
            f"The folder {given!r} contains {len(runs)} different runs: {differing.name} is "
            f"{first!r} in {names[0]} and {second!r} in {name}. Expected a run, or a folder of "
            f"runs with equal settings. Give the runs separately: fsdp-inspect compare "
            f"{Path(given) / names[0]} {Path(given) / name}"
        )


def _refuse_twins(given: list[str], opened: "list[StoredRun | list[StoredRun]]") -> None:
    """Reject a comparison of a run with itself or its copy."""
    seen: dict[TableOrigin, str] = {}
    for name, side in zip(given, opened, strict=True):
        for run in side if isinstance(side, list) else [side]:
            origin = run.manifest.origin()
            if origin in seen:
                raise typer.BadParameter(
                    f"{name!r} and {seen[origin]!r} contain the same run {origin.run_id!r}. "
                    "Expected different runs. Leave one out."
                )
            seen[origin] = name
