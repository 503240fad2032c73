"""`fsdp-inspect show`: the verdict of a run, or sections of its results.

`SECTIONS` lists the sections. Each is a function that opens the run, asks for one result, and
prints it as JSON or as tables. Its parameters are the options of `show` that apply to it.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    RunArgument,
    open_run_argument,
    print_renderable,
    show_result,
    whole_number,
)
from fsdp_inspect.cli.cluster import DaskOption, open_tasks, show_bars
from fsdp_inspect.error_text import shorten

if TYPE_CHECKING:
    from fsdp_inspect.analysis.mesh_grid import MeshGrid
    from fsdp_inspect.run import Run


RankOption = Annotated[
    int | None,
    typer.Option(help="The rank to show; default the median rank.", parser=whole_number(0)),
]


StepOption = Annotated[
    int | None,
    typer.Option(
        help="Show the parts of this step; default the typical step.", parser=whole_number(0)
    ),
]


def summary(
    run: RunArgument,
    rank: RankOption = None,
    step: StepOption = None,
    as_json: JsonOption = False,
    verdict: Annotated[bool, typer.Option("--verdict", help="Show only the verdict.")] = False,
    dask: DaskOption = None,
) -> None:
    """Show the whole summary of a run; the former name of `show RUN summary`."""
    if rank is not None or step is not None:
        breakdown(run, rank, step, as_json)
    else:
        _show_summary(run, "verdict" if verdict else "summary", as_json=as_json, dask=dask)


def _show_summary(
    run: str, part: str, *, as_json: bool, dask: str | None, at_end: bool = False
) -> None:
    """Show one part of the summary: `first`, `verdict` or `summary`."""
    from fsdp_inspect.report.json import render_run_json

    if at_end:
        from fsdp_inspect.store.compaction import compact_at_end

        compact_at_end(Path(run))
    with open_tasks(dask) as tasks:
        opened = open_run_argument(run, show_bars(tasks))
        measured = opened.summary()
        found = None if as_json else opened.diagnose(with_plans=False)
    if found is None:
        print(render_run_json(opened.source, measured.verdict if part == "verdict" else measured))
        return
    from fsdp_inspect.report.diagnosis import render_diagnosis
    from fsdp_inspect.report.layout import dim
    from fsdp_inspect.report.text import render_first_lines, render_summary, render_verdict

    if found.is_problem:
        print_renderable(render_diagnosis(found, brief=True, run=run))
        print()
    if part == "verdict":
        print_renderable(render_verdict(measured.verdict, run=run))
        if measured.recorder_sentence is not None:
            print_renderable(dim(f"  {measured.recorder_sentence}"))
    elif part == "first":
        print_renderable(render_first_lines(measured, _sections_of(opened), run=run))
    else:
        print_renderable(render_summary(measured, run=run))


def _sections_of(run: "Run") -> list[str]:
    """The sections that add to the output without a section, and for which the run has data."""
    from fsdp_inspect.analysis.context import try_measure
    from fsdp_inspect.analysis.kernels import find_profile
    from fsdp_inspect.analysis.numerics import measure_numerics

    lacking = {"verdict", "nccl"}  # NCCL's own times require logs
    if find_profile(run.source) is None:
        lacking.add("kernels")
    if try_measure(measure_numerics, run.source, []) is None:
        lacking.add("numerics")
    if run.manifest.source == "imported":
        lacking.add("lifetime")
    return [name for name in SECTIONS if name not in lacking]


def breakdown(
    run: RunArgument, rank: RankOption = None, step: StepOption = None, as_json: JsonOption = False
) -> None:
    """Show the parts of a step, which add up to it, and the causes of its exposed waits."""
    from fsdp_inspect.report.text import render_breakdown

    opened = open_run_argument(run)
    show_result(
        opened.breakdown(rank=rank, step=step), render_breakdown, as_json=as_json, run=opened.source
    )


def lifetime(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(help="The rank to show; default the lowest rank.", parser=whole_number(0)),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the wall time of a run by phase, with restarts, and its goodput.

    Goodput is the time of the phase training, divided by the wall time. The first step of each
    attempt and steps lost at a restart do not belong to this phase.

    Example: `fsdp-inspect show runs/demo lifetime`
    """
    from fsdp_inspect.report.text import render_lifetime

    opened = open_run_argument(run)
    life = opened.lifetime(rank=rank)
    show_result(life, render_lifetime, as_json=as_json, run=opened.source)


def exposed(
    run: RunArgument,
    rank: RankOption = None,
    unit: Annotated[
        str | None,
        typer.Option(help="The unit to show in detail.", metavar="FQN"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show exposed communication by unit and cause, prefetch, bandwidth and the longest waits.

    Each exposed wait is split into causes, which add up to it. The longest waits are listed with
    their step and time, so that you can find them in the timeline.

    Example: `fsdp-inspect show runs/demo exposed --unit layers.1`
    """
    from fsdp_inspect.report.exposed import render_waits

    opened = open_run_argument(run)
    waits = opened.exposed(unit=unit, rank=rank)
    show_result(waits, render_waits, as_json=as_json, run=opened.source)


def units(
    run: RunArgument,
    rank: RankOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the cost of each FSDP unit per step: collectives, exposed waits, copies, compute.

    Example: `fsdp-inspect show runs/demo units --rank 1`
    """
    from fsdp_inspect.report.text import render_units

    opened = open_run_argument(run)
    costs = opened.units(rank=rank)
    show_result(costs, render_units, as_json=as_json, run=opened.source)


def kernels(
    run: RunArgument,
    rank: RankOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show kernels by kind, unit and phase: time, count, gaps, share of the device's peak.

    Works on imported traces, and on runs recorded with `--profile-steps 20:23`
    (`Recorder(profile_steps="20:23")`). On a CPU it shows operators.

    Example: `fsdp-inspect show runs/demo kernels --rank 1`
    """
    from fsdp_inspect.report.text import render_kernels

    opened = open_run_argument(run)
    show_result(opened.kernels(rank=rank), render_kernels, as_json=as_json, run=opened.source)


def nccl(
    run: RunArgument,
    inspector: str | None = None,
    rank: int | None = None,
    as_json: bool = False,
) -> None:
    """NCCL's own times of the collectives, from logs of NCCL Inspector."""
    from fsdp_inspect.report.text import render_nccl

    if inspector is None:
        raise typer.BadParameter(
            "The section nccl needs the logs of NCCL Inspector. Expected --inspector LOGS.",
            param_hint="SECTION",
        )
    opened = open_run_argument(run)
    show_result(opened.nccl(inspector, rank=rank), render_nccl, as_json=as_json, run=opened.source)


def numerics(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the numerics of each unit: norms, values that are not finite, lost updates.

    Record them with `--numerics-every N` (`Recorder(numerics_every=N)`). A lost update changed no
    stored parameter, because it is smaller than the rounding of the parameter's dtype.

    Example: `fsdp-inspect show runs/demo numerics`
    """
    from fsdp_inspect.errors import MissingDataError
    from fsdp_inspect.report.text import render_numerics

    opened = open_run_argument(run)
    found = opened.numerics()
    if found is None:
        raise MissingDataError(
            f"Run {opened.id} has no numerics step. Expected a run recorded with --numerics-every "
            "N, or Recorder(numerics_every=N). Record it again with that option."
        )
    show_result(found, render_numerics, as_json=as_json, run=opened.source)


def memory(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            help="The rank to show; default the rank with the highest peak.", parser=whole_number(0)
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show memory at the peak by unit, phase and category, the device limit, and growth.

    Works on recorded runs and on imported memory snapshots.

    Example: `fsdp-inspect show runs/demo memory --rank 1`
    """
    from fsdp_inspect.report.memory_wording import render_memory

    opened = open_run_argument(run)
    found = opened.memory(rank=rank)
    show_result(found, render_memory, as_json=as_json, run=opened.source)


def ranks(
    run: RunArgument,
    rank: Annotated[
        int | None,
        typer.Option(
            help="The rank to show; default all, or those with the most and the least work."
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Rows and columns of the grid: two dimensions, such as `pp,tp` or `node,tp`; "
            "`auto` takes the outermost two that fill a grid.",
            metavar="ROWS,COLUMNS",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="The metric of --grid: own_work_ns, exposed_ns, ...")
    ] = "own_work_ns",
    as_json: JsonOption = False,
) -> None:
    """Compare the ranks: the straggler, the reason for its lateness, and its cost per step.

    Clocks of different machines are aligned by the collectives that they share. If that is
    impossible, the output states the reason and shows the results that need no clock.

    On a mesh of several dimensions, the output names the late ranks along each dimension: a late
    rank delays its TP group, and the group then delays other groups along `shard`.

    With `--grid`, the ranks are shown as a grid. Rows and columns are mesh dimensions, nodes or
    local ranks. This locates a slow node, group or stage.

    Example: `fsdp-inspect show runs/demo ranks --grid node,tp`
    """
    from fsdp_inspect.analysis.step_selection import timed_rank
    from fsdp_inspect.report.json import render_run_json

    opened = open_run_argument(run)
    if rank is not None:
        timed_rank(opened.source, rank)  # raises an error if the run lacks this rank
    measured = opened.ranks()
    laid_out = _lay_out(opened, grid, metric)
    if as_json:
        plain = measured.to_dict()
        if laid_out is not None:
            plain["mesh_grid"] = laid_out.to_dict()
        print(render_run_json(opened.source, plain))
        return
    from fsdp_inspect.report.ranks_wording import render_ranks

    print_renderable(render_ranks(measured, rank=rank, grid=laid_out))


def _lay_out(run: "Run", grid: str | None, metric: str) -> "MeshGrid | None":
    """The grid of the given dimensions; None: not requested."""
    if grid is None:
        return None
    rows, _, columns = grid.partition(",")
    try:
        if grid == "auto":
            return run.mesh_grid(metric=metric)
        return run.mesh_grid(metric=metric, rows=rows.strip(), columns=columns.strip() or None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--grid") from error


def _verdict(
    run: str, as_json: bool = False, dask: str | None = None, at_end: bool = False
) -> None:
    """What limits the step, why, and what to try next."""
    _show_summary(run, "verdict", as_json=as_json, dask=dask, at_end=at_end)


def _whole(run: str, as_json: bool = False, dask: str | None = None) -> None:
    """All parts of the summary."""
    _show_summary(run, "summary", as_json=as_json, dask=dask)


SECTIONS: Mapping[str, Callable[..., None]] = {
    "verdict": _verdict,
    "summary": _whole,
    "breakdown": breakdown,
    "exposed": exposed,
    "units": units,
    "kernels": kernels,
    "nccl": nccl,
    "memory": memory,
    "ranks": ranks,
    "numerics": numerics,
    "lifetime": lifetime,
}
"""The sections of `show`. A section takes the options of `show` that its function names."""


def show(  # noqa: PLR0913 - one argument an option
    run: RunArgument,
    sections: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION...]",
            help=f"What to show: {', '.join(SECTIONS)}. Default: the verdict, the parts of the "
            "step and the longest waits.",
            show_default=False,
        ),
    ] = None,
    rank: RankOption = None,
    step: StepOption = None,
    unit: Annotated[
        str | None, typer.Option(help="Only waits of this unit (exposed).", metavar="FQN")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Lay out the ranks by two dimensions, such as `node,tp`, or `auto` (ranks).",
            metavar="ROWS,COLUMNS",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric of --grid: own_work_ns, exposed_ns, ...",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    inspector: Annotated[
        str | None,
        typer.Option(
            help="A log of NCCL Inspector, or the folder of the logs (nccl).", metavar="LOGS"
        ),
    ] = None,
    dask: DaskOption = None,
    as_json: JsonOption = False,
    at_end: Annotated[
        bool,
        typer.Option(
            "--at-end",
            hidden=True,
            help="For the end of a training: wait for ranks that still write, and compact the run.",
        ),
    ] = False,
) -> None:
    """Show a run: what limits its step, and sections on request.

    If the run hung, died or went wrong, the diagnosis comes first (`fsdp-inspect diagnose`). Times
    are those of the typical step of the median rank. Warm-up, memory and numerics steps are not
    timed.

    `--rank` and `--step` without a section show the parts of one step. `--json` prints the whole
    summary, or one section. A run that has not ended has no summary yet: `--dask` reads the events
    of its ranks on several workers.

    Example: `fsdp-inspect show runs/demo`

    Example: `fsdp-inspect show runs/demo exposed memory --rank 1`
    """
    given = {"rank": rank, "step": step, "unit": unit, "grid": grid, "metric": metric,
             "inspector": inspector, "dask": dask}  # fmt: skip
    options: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    chosen = sections or (["breakdown"] if {"rank", "step"} & options.keys() else [])
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        raise typer.BadParameter(
            f"Unknown section {shorten(unknown[0])!r}. Expected {', '.join(SECTIONS)}.",
            param_hint="SECTION",
        )
    accepted = {name: _options_of(SECTIONS[name]) for name in chosen}
    for option in options:
        if option != "dask" and not any(option in each for each in accepted.values()):
            takers = [name for name, each in SECTIONS.items() if option in _options_of(each)]
            raise typer.BadParameter(
                f"The chosen sections do not use it. Expected one of these sections with it: "
                f"{', '.join(takers)}.",
                param_hint=f"--{option}",
            )
    if as_json and len(chosen) > 1:
        raise typer.BadParameter(
            "Several sections. Expected at most one with --json.", param_hint="--json"
        )
    if at_end:
        options["at_end"] = True
    if not chosen:
        _show_summary(run, "first", as_json=as_json, dask=dask, at_end=at_end)
    for number, name in enumerate(chosen):
        if number:
            print()
        own = {key: value for key, value in options.items() if key in accepted[name]}
        SECTIONS[name](run, as_json=as_json, **own)


def _options_of(section: Callable[..., None]) -> Mapping[str, object]:
    return inspect.signature(section).parameters
