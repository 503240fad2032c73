"""`fsdp-inspect demo`: record two short runs that differ in one setting, and compare them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.app import serve
from fsdp_inspect.cli.arguments import print_renderable, whole_number

if TYPE_CHECKING:
    from fsdp_inspect.store.reader import StoredRun

DEFAULT_STEPS = 30
_NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class _DemoRun:
    """One recording of the demo."""

    name: str
    settings: tuple[str, ...]


_RUNS = (
    _DemoRun("demo-reshard", ("--reshard-after-forward", "true")),
    _DemoRun("demo-keep", ("--reshard-after-forward", "false")),
)


def demo(
    runs_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for the two runs.")
    ] = Path("runs"),
    steps: Annotated[
        int, typer.Option(help="Steps of each run.", parser=whole_number(1))
    ] = DEFAULT_STEPS,
    should_serve: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Serve the dashboard afterwards.")
    ] = True,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the dashboard; default the first free one.", parser=whole_number(1, 65535)
        ),
    ] = None,
) -> None:
    """Record two short 2-rank runs that differ in one setting, and compare them.

    The demo trains the `tiny` preset on two GPUs, or on CPU if there are fewer. One run reshards
    parameters after forward, the other keeps them.

    Example: `fsdp-inspect demo --no-serve`
    """
    from fsdp_inspect.analysis.summary import measure_summary
    from fsdp_inspect.cli.child import require_trainer
    from fsdp_inspect.comparison.comparison import compare_runs
    from fsdp_inspect.report.comparison import render_comparison
    from fsdp_inspect.report.text import render_summary

    require_trainer("The demo")
    environment = _environment()
    recorded = [_record(run, runs_dir, steps, environment) for run in _RUNS]
    for run in recorded:
        print_renderable(render_summary(measure_summary(run), run=str(run.path)))
        print()
    print_renderable(render_comparison(compare_runs(*recorded)))
    print(f"\nShow a run again: fsdp-inspect show {recorded[0].path}", flush=True)
    if should_serve:
        serve(runs_dir, port=port)


def _record(
    run: _DemoRun, runs_dir: Path, steps: int, environment: Mapping[str, str]
) -> "StoredRun":
    """Train in a child process, and open the recorded run."""
    from fsdp_inspect.cli.child import run_child
    from fsdp_inspect.errors import NotARunError
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    before = {entry.id for entry in list_runs(runs_dir)}
    log = runs_dir / ".logs" / f"{run.name}.log"
    took_s = run_child(
        _command(run, runs_dir, steps),
        what=f"Recording {run.name} ({' '.join(run.settings)})",
        log=log,
        environment=environment,
    )
    new = [entry for entry in list_runs(runs_dir) if entry.id not in before]
    if not new:
        raise NotARunError(
            f"The training of {run.name} ended without an error, but no run was found in "
            f"{runs_dir}. Expected a new run folder. Check its output in {log}."
        )
    print(f"Recorded {new[0].path} in {took_s:.0f} s: {' '.join(run.settings)}", flush=True)
    return open_run(new[0].path)


def _command(run: _DemoRun, runs_dir: Path, steps: int) -> list[str]:
    from fsdp_inspect.cli.child import TRAINER, torchrun_words

    return [
        *torchrun_words(_NUM_RANKS),
        *("-m", TRAINER, "--preset", "tiny", "--steps", str(steps)),
        *("--runs-dir", str(runs_dir), "--name", run.name, *run.settings),
    ]


def _environment() -> dict[str, str]:
    """The environment of this process, with the settings for ranks on one machine."""
    import os

    from fsdp_inspect.cli.child import training_environment

    environment = training_environment(_NUM_RANKS)
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        print(
            f"The demo has {_NUM_RANKS} ranks and found one GPU, so it trains on CPU.", flush=True
        )
    return {**os.environ, **environment}
