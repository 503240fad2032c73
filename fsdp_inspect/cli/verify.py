"""`fsdp-inspect verify`: compare a prediction with the run of its plan."""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, show_result

if TYPE_CHECKING:
    from fsdp_inspect.comparison.verification.verification import Verification
    from fsdp_inspect.simulation.predictions.records import Prediction
    from fsdp_inspect.store.reader import StoredRun

DID_NOT_HOLD = 1
CANNOT_BE_JUDGED = 2


def verify(
    prediction: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTION",
            help="File that `simulate --write-prediction` or `advise --write` wrote.",
            show_default=False,
        ),
    ],
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Runs of the predicted plan, or a folder of them.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="A run of the baseline plan, or a folder of them. Repeat the option for more "
            "runs. Default: the run that the prediction comes from, if it is next to RUN.",
        ),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prediction history, to which the outcome is added. Default: predictions.jsonl "
            "next to the baseline.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a prediction with the run of its plan: step time, exposed time, peak memory.

    The measured change from the baseline is compared with the predicted change. With fewer than
    five runs on each side, changes below 10% of a step are within noise. The outcome is added to a
    file next to the runs, and `advise --details` shows it.

    Exit code 0: the prediction held, or the change is not significant. 1: the prediction did not
    hold. 2: "cannot tell", because something else may have changed the times, such as a busier
    machine; or it cannot be judged, because the plan, machine, model or network differs or a file
    is unreadable. What cannot be judged is not written.

    Example: `fsdp-inspect verify plan.prediction.json runs/after --baseline runs/before`
    """
    from fsdp_inspect.errors import FsdpInspectError
    from fsdp_inspect.formatting import show_controls
    from fsdp_inspect.simulation.predictions.records import Ruling

    try:
        found = _verify(prediction, runs, baseline or [], history, as_json=as_json)
    except FsdpInspectError as error:
        print(show_controls(f"fsdp-inspect: {error}"), file=sys.stderr)
        raise typer.Exit(CANNOT_BE_JUDGED) from error
    is_unknown = found.ruling is Ruling.CANNOT_BE_TOLD and found.has_other_cause
    if is_unknown or found.ruling is Ruling.NOT_COMPARABLE:
        raise typer.Exit(CANNOT_BE_JUDGED)
    if found.ruling is Ruling.DID_NOT_HOLD:
        raise typer.Exit(DID_NOT_HOLD)


def _verify(
    prediction: Path, given: list[str], baseline: list[str], ledger: Path | None, *, as_json: bool
) -> "Verification":
    from fsdp_inspect.comparison.verification.verification import verify_prediction as verify_runs
    from fsdp_inspect.report.verification import render_verification
    from fsdp_inspect.simulation.predictions.ledger import read_prediction

    predicted = read_prediction(prediction)
    runs = _open_all(given)
    baselines = _open_all(baseline) if baseline else _find_baseline(predicted, runs[0])
    verification = verify_runs(predicted, runs, baselines)
    show_result(verification, render_verification, as_json=as_json)
    kept = _keep(verification, ledger, (baselines or runs)[0])
    print(kept, file=sys.stderr if as_json else sys.stdout)
    return verification


def _open_all(given: list[str]) -> "list[StoredRun]":
    from fsdp_inspect.cli.compare import open_side
    from fsdp_inspect.errors import FsdpInspectError

    sides = [open_side(one) for one in given]
    runs = [run for side in sides for run in (side if isinstance(side, list) else [side])]
    for origin, count in Counter(run.manifest.origin() for run in runs).items():
        if count > 1:
            raise FsdpInspectError(
                f"Run {origin.run_id!r} is given {count} times. Expected different runs, "
                "because a repeated run is no further evidence. Give it once."
            )
    return runs


def _find_baseline(prediction: "Prediction", run: "StoredRun") -> "list[StoredRun]":
    """Find the run of the prediction next to the new run."""
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    if "://" in run.path:
        return []
    for entry in list_runs(Path(run.path).absolute().parent):
        manifest = entry.manifest
        if manifest is not None and manifest.has_id(prediction.run_id):
            return [open_run(entry.path)]
    return []


def _keep(verification: "Verification", ledger: Path | None, beside: "StoredRun") -> str:
    """Write the outcome. Return a sentence with its file, or with the reason for no file."""
    from fsdp_inspect.errors import PredictionError
    from fsdp_inspect.simulation.predictions.ledger import append_entries, find_ledger, read_ledger
    from fsdp_inspect.simulation.predictions.records import Ruling

    if verification.ruling is Ruling.NOT_COMPARABLE:
        return "No outcome is written."
    if ledger is None and "://" in beside.path:
        return "The outcome is not written: the runs are at a URL. Add --history FILE."
    place = ledger or find_ledger(Path(beside.path))
    prediction = verification.prediction
    try:
        known = {each.prediction_id for each in read_ledger(place).predictions}
        new = [] if prediction.prediction_id in known else [prediction]
        append_entries(place, [*new, verification.outcome()])
    except PredictionError as error:
        return f"The outcome is not written. {error}"
    return f"Wrote the outcome to {place}."
