"""`fsdp-inspect verify`: did a plan do what was predicted of it?"""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_inspect.cli.arguments import JsonOption, print_renderable

if TYPE_CHECKING:
    from fsdp_inspect.predictions.records import Prediction
    from fsdp_inspect.predictions.verification import Verification
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
            help="A run of the plan that it was predicted from, or a folder of them; may be given "
            "several times. The run that it was made from is looked for beside RUN unless given.",
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the outcome is kept; predictions.jsonl beside the baseline unless given.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a prediction against the run of its plan: step time, exposed time, peak memory.

    Judged is the change against the baseline. One process is not enough to tell small changes:
    with fewer than five on a side, less than 10% of a step is noise. The outcome is kept in a
    ledger beside the runs, which new advice shows.

    Exits with 0 where the prediction held or nothing can be told from noise, with 1 where it did
    not hold, with 2 where it cannot be judged: another plan ran, another machine, model or network,
    or a file that cannot be read. Then nothing is kept.

    Example: `fsdp-inspect verify plan.prediction.json runs/after --baseline runs/before`
    """
    from fsdp_inspect.errors import FsdpInspectError
    from fsdp_inspect.formatting import show_controls
    from fsdp_inspect.predictions.records import Ruling

    try:
        ruling = _verify(prediction, runs, baseline or [], ledger, as_json=as_json).ruling
    except FsdpInspectError as error:
        print(show_controls(f"fsdp-inspect: {error}"), file=sys.stderr)
        raise typer.Exit(CANNOT_BE_JUDGED) from error
    if ruling is Ruling.NOT_COMPARABLE:
        raise typer.Exit(CANNOT_BE_JUDGED)
    if ruling is Ruling.DID_NOT_HOLD:
        raise typer.Exit(DID_NOT_HOLD)


def _verify(
    prediction: Path, given: list[str], baseline: list[str], ledger: Path | None, *, as_json: bool
) -> "Verification":
    from fsdp_inspect.predictions.files import read_prediction
    from fsdp_inspect.predictions.verification import verify_prediction as verify_runs
    from fsdp_inspect.report.json import render_json
    from fsdp_inspect.report.verification import render_verification

    predicted = read_prediction(prediction)
    runs = _open_all(given)
    baselines = _open_all(baseline) if baseline else _find_baseline(predicted, runs[0])
    verification = verify_runs(predicted, runs, baselines)
    if as_json:
        print(render_json(verification))
    else:
        print_renderable(render_verification(verification))
    kept = _keep(verification, ledger, (baselines or runs)[0])
    print(kept, file=sys.stderr if as_json else sys.stdout)
    return verification


def _open_all(given: list[str]) -> "list[StoredRun]":
    from fsdp_inspect.cli.compare import open_side
    from fsdp_inspect.errors import FsdpInspectError

    sides = [open_side(one) for one in given]
    runs = [run for side in sides for run in (side if isinstance(side, list) else [side])]
    for run_id, count in Counter(run.manifest.run_id for run in runs).items():
        if count > 1:
            raise FsdpInspectError(
                f"Run {run_id!r} is given {count} times. Expected different runs: one that counts "
                "twice is no evidence. Leave it out."
            )
    return runs


def _find_baseline(prediction: "Prediction", run: "StoredRun") -> "list[StoredRun]":
    """The run that was predicted from, where it lies beside the new one."""
    from fsdp_inspect.store.folder import list_runs
    from fsdp_inspect.store.reader import open_run

    if "://" in run.path:
        return []
    for entry in list_runs(Path(run.path).absolute().parent):
        manifest = entry.manifest
        if manifest is not None and manifest.run_id == prediction.run_id:
            return [open_run(entry.path)]
    return []


def _keep(verification: "Verification", ledger: Path | None, beside: "StoredRun") -> str:
    """Write the outcome down; says where, or why not."""
    from fsdp_inspect.errors import PredictionError
    from fsdp_inspect.predictions.ledger import append_entries, find_ledger, read_ledger
    from fsdp_inspect.predictions.records import Ruling

    if verification.ruling is Ruling.NOT_COMPARABLE:
        return "Nothing is kept in the ledger."
    if ledger is None and "://" in beside.path:
        return "The outcome is not kept: the runs are behind a URL. Name a file: --ledger FILE."
    place = ledger or find_ledger(Path(beside.path))
    prediction = verification.prediction
    try:
        known = {each.prediction_id for each in read_ledger(place).predictions}
        new = [] if prediction.prediction_id in known else [prediction]
        append_entries(place, [*new, verification.outcome()])
    except PredictionError as error:
        return f"The outcome is not kept. {error}"
    return f"Kept in {place}."
