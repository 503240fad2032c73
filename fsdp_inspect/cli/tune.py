"""`fsdp-inspect tune`: run the best plans on this machine and verify the predictions."""

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import (
    JsonOption,
    parse_memory,
    print_renderable,
    require_new_file,
    whole_number,
)
from fsdp_inspect.cli.cluster import DaskOption, require_cluster

if TYPE_CHECKING:
    from fsdp_inspect.advice.tuning import Tuning, TuningSession
    from fsdp_inspect.cli.tuner import Tuner

_BUDGET, _REPEATS = 3, 1
_BEST_PLAN = "best-plan.toml"


def tune(  # noqa: PLR0913 - one argument an option
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="Your training command. {plan}, {runs} and {name} are replaced by the plan file, "
            "the folder of runs and the name of the run. For the baseline, {plan} and the option "
            "before it are removed.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings of instrumented_trainer, as TOML.", metavar="FILE"),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            help=f"Largest number of plans to run. [default: {_BUDGET}]",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help=f"Runs of each plan; changes below 10% require 5. [default: {_REPEATS}]",
            parser=whole_number(1),
            metavar="N",
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks on this machine; default 2.", parser=whole_number(1), metavar="N"),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            help="Run the trainer as rank 0 of many emulated ranks: "
            "world_size=8,bandwidth=50GB/s,latency=20us.",
            metavar="SPEC",
        ),
    ] = None,
    fixed_compute: Annotated[
        str | None,
        typer.Option(
            help="Compute times under emulation: forward=2ms,backward=4ms.", metavar="TIMES"
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each run.", parser=whole_number(1), metavar="N")
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            help="Largest peak memory of a plan, for example 80GiB.",
            metavar="SIZE",
            parser=parse_memory,
        ),
    ] = None,
    allow_dtypes: Annotated[
        bool, typer.Option("--allow-dtypes", help="Allow plans with bfloat16 messages.")
    ] = False,
    runs_dir: Annotated[
        Path,
        typer.Option(help="Parent folder of the tuning session's folder.", metavar="DIR"),
    ] = Path("runs"),
    write: Annotated[
        Path | None,
        typer.Option(
            help=f"File for the best plan; default {_BEST_PLAN} in the session's folder.",
            metavar="FILE",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the tuning session in this folder.", metavar="DIR"),
    ] = None,
    dask: DaskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record a run, get advice, run the best plans and the baseline, and verify the predictions.

    `tune` records the baseline, simulates plans from it, and runs the best plans and the baseline
    in turn. It writes each prediction before its plan runs, and each outcome to predictions.jsonl.
    If a plan crashes or runs out of memory, its outcome is "failed". At the end, `tune` writes the
    fastest plan to a file, if its gain is larger than process noise. Ctrl-C keeps all completed
    runs.

    With `--dask`, workers simulate several plans at once. The trainings run on this machine.

    Give either your own command, or settings of the trainer with `--config`.

    Example: `fsdp-inspect tune --budget 3 -- torchrun train.py --plan {plan} --runs-dir {runs}`
    """
    from fsdp_inspect.advice.tuning import TuningSession

    require_new_file("--write", write)
    require_cluster(dask)
    if resume is not None:
        _refuse_with_resume(
            {
                "a command": command,
                "--config": config,
                "--emulate": emulate,
                "--fixed-compute": fixed_compute,
                "--budget": budget,
                "--nproc-per-node": nproc_per_node,
                "--steps": steps,
                "--memory-limit": memory_limit,
                "--allow-dtypes": allow_dtypes,
            }
        )
        folder, session = resume, _resumed(resume, repeats)
    else:
        options = {"emulate": emulate, "fixed-compute": fixed_compute, "steps": steps}
        words, environment = _command(command, config, nproc_per_node, options)
        folder = runs_dir / f"tune-{datetime.now():%Y%m%d-%H%M%S}"
        session = TuningSession(
            command=words,
            environment=environment,
            budget=budget or _BUDGET,
            repeats=repeats or _REPEATS,
            memory_limit=memory_limit,
            allow_dtypes=allow_dtypes,
        )
        _begin(folder, session, config)
    _run(folder, session, write, dask, as_json=as_json)


def _refuse_with_resume(given: dict[str, object]) -> None:
    named = [name for name, value in given.items() if value]
    if named:
        raise typer.BadParameter(
            f"--resume cannot be combined with {', '.join(named)}: a session keeps its settings. "
            "Expected --repeats at most. Omit the other options, or start a new session.",
            param_hint="--resume",
        )


def _resumed(folder: Path, repeats: int | None) -> "TuningSession":
    from fsdp_inspect.advice.tuning import read_session

    session = read_session(folder)
    return session if repeats is None else session.model_copy(update={"repeats": repeats})


def _command(
    command: list[str] | None,
    config: Path | None,
    num_ranks: int | None,
    options: dict[str, str | int | None],
) -> tuple[list[str], dict[str, str]]:
    """The training command with placeholders, and the variables to add to its environment."""
    from fsdp_inspect.cli.child import require_trainer, training_environment
    from fsdp_inspect.cli.tuner import complaint_about, trainer_command

    given = {f"--{name}": str(value) for name, value in options.items() if value is not None}
    if command:
        if config is not None or num_ranks is not None or given:
            raise typer.BadParameter(
                "Both a command and settings of the trainer were given. Expected one of them. Put "
                "the settings into the command.",
                param_hint="COMMAND",
            )
        complaint = complaint_about(command)
        if complaint is not None:
            raise typer.BadParameter(complaint, param_hint="COMMAND")
        return command, {"PYTHONUNBUFFERED": "1"}
    if config is None:
        raise typer.BadParameter(
            "Nothing to train: --config and a command are missing. Expected --config FILE with the "
            "settings of the reference trainer, or your training command after --, with {plan} "
            "and {runs} in it. Write a settings file with: python -m instrumented_trainer "
            "--print-config > config.toml",
            param_hint="--config",
        )
    require_trainer("Tuning without a command")
    words = [word for pair in given.items() for word in pair]
    filled, ranks = trainer_command(config, num_ranks=num_ranks, options=words)
    return filled, training_environment(ranks)


def _begin(folder: Path, session: "TuningSession", config: Path | None) -> None:
    from fsdp_inspect.advice.tuning import write_session
    from fsdp_inspect.cli.tuner import write_configs
    from fsdp_inspect.errors import StoreError

    if folder.exists():
        raise StoreError(
            f"There is a session at {str(folder)!r} already. Expected a new folder. Wait a second "
            "and start again."
        )
    write_session(folder, session)
    if config is not None:
        write_configs(config, folder)


def _run(
    folder: Path, session: "TuningSession", write: Path | None, dask: str | None, *, as_json: bool
) -> None:
    """Run the rest of the session, and show the results, also after Ctrl-C."""
    from fsdp_inspect.cli.tuner import Tuner, how_to_resume
    from fsdp_inspect.simulation.predictions.ledger import LEDGER_FILE

    tuner = Tuner(folder, session, folder.absolute().parent / LEDGER_FILE, dask=dask)
    try:
        tuner.run()
    except KeyboardInterrupt:
        print(f"\nStopped. Continue with: {how_to_resume(folder)}", file=sys.stderr, flush=True)
        _show(tuner, folder, write, as_json=as_json)
        raise
    _show(tuner, folder, write, as_json=as_json)


def _show(tuner: "Tuner", folder: Path, write: Path | None, *, as_json: bool) -> None:
    from fsdp_inspect.report.json import render_json
    from fsdp_inspect.report.verification import render_tuning
    from fsdp_inspect.results import to_plain

    tuning = tuner.result()
    best = _write_best(tuning, write or folder / _BEST_PLAN)
    if as_json:
        paths = {"session": str(folder), "best_plan_file": str(best) if best else None}
        print(render_json({**to_plain(tuning), **paths}))
        return
    print_renderable(render_tuning(tuning, _next_steps(tuning, folder, best)))


def _write_best(tuning: "Tuning", path: Path) -> Path | None:
    from fsdp_inspect.trace.plan import Plan

    if tuning.best is None:
        return None
    Plan.load(tuning.best.plan_file).dump(path)
    return path


def _next_steps(tuning: "Tuning", folder: Path, best: Path | None) -> list[str]:
    import shlex

    from fsdp_inspect.cli.tuner import how_to_resume
    from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST

    steps = []
    if best is not None:
        steps.append(f"Train with the best plan: --plan {shlex.quote(str(best))}")
        steps.append("  or fsdp_inspect.apply_plan(model, fsdp_inspect.Plan.load(FILE), mesh)")
    if not tuning.is_whole:
        steps.append(f"Go on: {how_to_resume(folder)}")
    elif tuning.plans and len(tuning.baseline_run_ids) <= RUNS_FOR_A_TEST:
        steps.append(f"Detect smaller changes: {how_to_resume(folder)} --repeats {RUNS_FOR_A_TEST}")
    steps.append(f"Open the runs: fsdp-inspect app {shlex.quote(str(folder))}")
    return steps
