"""Sum up a tuning session: the fastest measured plan, and the outcomes of the predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from fsdp_inspect.advice.evidence import Finding
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.comparison.verification.verification import Verification, verify_prediction
from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import StoreError
from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.reading import MAX_JSON_BYTES, InvalidTextError, parse_json, read_regular
from fsdp_inspect.simulation.predictions.records import Outcome, Prediction, Ruling, now
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.records import Record
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.version import __version__
from fsdp_inspect.writing import replace_file


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan of a session with its runs."""

    number: int
    prediction: Prediction
    plan_file: str
    runs: tuple[RunSource, ...]
    failure: str | None
    """The reason why a run of the plan failed; None: no run failed."""


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """A plan of a session: predicted and measured."""

    number: int
    what: str
    plan_file: str
    prediction: Prediction
    ruling: Ruling | None
    """None: the plan has not run yet."""
    verification: Verification | None
    """None: the plan has not run, or not to completion."""
    outcome: Outcome | None
    failure: str | None
    is_faster: bool
    """Measured to be significantly faster than the baseline."""

    @property
    def is_measured(self) -> bool:
        """Whether the step was measured under the circumstances of the prediction."""
        change = self.verification.measured_change if self.verification else None
        return change is not None and self.ruling is not Ruling.NOT_COMPARABLE

    @property
    def has_other_cause(self) -> bool:
        """Whether something other than the plan may have changed the times."""
        return self.verification is not None and self.verification.has_other_cause


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of a session."""

    answer: str
    """One sentence with the number that matters."""
    findings: tuple[Finding, ...]
    """Problems that no plan can fix."""
    baseline_run_ids: tuple[str, ...]
    baseline_step_ns: int | None
    """Measured: the median over the baseline's runs of their typical steps."""
    same_error: float | None
    """A/A: slowest / fastest run of the baseline, - 1; None with one run."""
    plans: tuple[TunedPlan, ...]
    best: TunedPlan | None
    """The fastest of the faster plans; None: no plan is faster."""
    num_held: int
    num_judged: int
    """Held or did not hold."""
    is_whole: bool
    """True if all runs of the session are complete."""


def measure_tuning(
    trials: Sequence[Trial],
    baselines: Sequence[RunSource],
    findings: Sequence[Finding],
    *,
    memory_limit: int | None,
    is_whole: bool,
) -> Tuning:
    """Verify every plan of a session against the session's own baseline runs.

    Args:
        trials: The plans, in the order of their choice.
        baselines: Runs of the baseline. The predictions start from the first one.
        findings: Problems that no plan can fix.
        memory_limit: Bytes that the best plan's measured peak must not exceed.
        is_whole: Whether all runs of the session are complete.
    """
    plans = tuple(_judge(trial, baselines) for trial in trials)
    steps = [_step_of(run) for run in baselines]
    known = [step for step in steps if step is not None]
    best = _fastest(plans, memory_limit)
    return Tuning(
        answer=_answer(plans, best),
        findings=tuple(findings),
        baseline_run_ids=tuple(run.manifest.run_id for run in baselines),
        baseline_step_ns=median(known),
        same_error=max(known) / min(known) - 1 if len(known) > 1 else None,
        plans=plans,
        best=best,
        num_held=sum(plan.ruling is Ruling.HELD for plan in plans),
        num_judged=sum(plan.ruling in (Ruling.HELD, Ruling.DID_NOT_HOLD) for plan in plans),
        is_whole=is_whole,
    )


def _judge(trial: Trial, baselines: Sequence[RunSource]) -> TunedPlan:
    verification, outcome, ruling = None, None, None
    if trial.failure is not None:
        ruling = Ruling.FAILED
        outcome = _failed(trial, baselines)
    elif trial.runs:
        verification = verify_prediction(trial.prediction, trial.runs, baselines)
        ruling = verification.ruling
        outcome = verification.outcome() if ruling is not Ruling.NOT_COMPARABLE else None
    is_known = ruling is not Ruling.NOT_COMPARABLE and not (
        verification and verification.has_other_cause
    )
    high = verification.measured_change_high if verification and is_known else None
    return TunedPlan(
        number=trial.number,
        what=trial.prediction.what,
        plan_file=trial.plan_file,
        prediction=trial.prediction,
        ruling=ruling,
        verification=verification,
        outcome=outcome,
        failure=trial.failure,
        is_faster=high is not None and high < 0,
    )


def _failed(trial: Trial, baselines: Sequence[RunSource]) -> Outcome:
    return Outcome(
        prediction_id=trial.prediction.prediction_id,
        tool_version=__version__,
        **now(),
        ruling=Ruling.FAILED,
        sentence=f"The plan did not run to completion: {trial.failure}",
        run_ids=[run.manifest.run_id for run in trial.runs],
        baseline_run_ids=[run.manifest.run_id for run in baselines],
        failure=trial.failure,
    )


def _step_of(run: RunSource) -> int | None:
    times = measure_step_times(run).step_time_ns
    return times.typical if times else None


def _fastest(plans: Sequence[TunedPlan], memory_limit: int | None) -> TunedPlan | None:
    faster = [plan for plan in plans if plan.is_faster and _fits(plan, memory_limit)]
    return min(faster, key=_change, default=None)


def _fits(plan: TunedPlan, memory_limit: int | None) -> bool:
    peak = plan.outcome.peak_bytes if plan.outcome else None
    return memory_limit is None or peak is None or peak <= memory_limit


def _change(plan: TunedPlan) -> float:
    change = plan.verification.measured_change if plan.verification else None
    return change if change is not None else 0.0


def _answer(plans: Sequence[TunedPlan], best: TunedPlan | None) -> str:
    if not plans:
        return "Change nothing: no plan has a large enough predicted gain."
    if best is not None and best.ruling is not None:
        return (
            f"Plan {best.number} is the fastest measured plan: {_saving(best)} a step. "
            f"Its prediction of {_percent(best.prediction.change)} {_HOW[best.ruling]}."
        )
    measured = [plan for plan in plans if plan.is_measured]
    if not measured:
        return "No plan ran to completion, so no result is known."
    first = min(measured, key=_change)
    if _change(first) < 0 and first.has_other_cause:
        return (
            f"Cannot tell whether a plan is faster. The fastest measured plan is plan "
            f"{first.number}, {_saving(first)} a step, but something else may have changed the "
            "times. Tune again on a quiet machine."
        )
    return (
        f"No plan is significantly faster than the baseline. The fastest measured plan is plan "
        f"{first.number}, {_saving(first)} a step. To detect smaller changes, use --repeats "
        f"{RUNS_FOR_A_TEST}."
    )


_HOW = {
    Ruling.HELD: "held",
    Ruling.DID_NOT_HOLD: "did not hold",
    Ruling.CANNOT_BE_TOLD: "is neither confirmed nor refuted",
}


def _saving(plan: TunedPlan) -> str:
    step = plan.verification.quantities[0] if plan.verification else None
    if step is None or plan.verification is None:
        return ""
    return (
        f"{_percent(_change(plan))} ({format_ns(step.measured)}, baseline "
        f"{format_ns(step.baseline)})"
    )


def _percent(change: float) -> str:
    sign = "-" if change < 0 else "+"
    return f"{sign}{format_ratio(abs(change))}"


# --- Read and write the state of a tuning session. A session can be resumed from its folder.
#
# `session.json` is replaced after each run. The folder also contains the runs, the plans
# (`plan-1.toml`) and their predictions (`plan-1.prediction.json`).

SESSION_FILE = "session.json"
SESSION_VERSION = 1
BASELINE = 0
"""The number of the unchanged plan."""


class TriedRun(Record):
    """One finished training of the session."""

    plan: NonNegativeInt
    """From 1; `BASELINE`: the sharding of the user's own command."""
    round: NonNegativeInt
    folder: str | None = None
    """The run folder, relative to the session's folder; None: there is no run."""
    failure: str | None = None
    """The reason why the training failed; None: it succeeded."""
    took_s: float


class TuningSession(Record):
    """The settings and the progress of a session."""

    session_version: int = SESSION_VERSION
    command: list[str]
    """Command of a training, with the placeholders `{plan}`, `{runs}`, `{name}` and `{config}`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of a training, in addition to the user's own."""
    budget: PositiveInt
    """The highest number of plans to run."""
    repeats: PositiveInt
    """Rounds: the number of runs of each plan."""
    memory_limit: int | None = None
    allow_dtypes: bool = False
    num_plans: int | None = None
    """The number of chosen plans; None: not chosen yet."""
    tried: list[TriedRun] = Field(default_factory=list)

    def find(self, plan: int, round_: int) -> TriedRun | None:
        """The training of a plan in a round; None: it has not finished."""
        return next((t for t in self.tried if (t.plan, t.round) == (plan, round_)), None)

    def of_plan(self, plan: int) -> list[TriedRun]:
        """All trainings of a plan."""
        return [tried for tried in self.tried if tried.plan == plan]


def write_session(folder: Path, session: TuningSession) -> None:
    """Write the session file.

    Raises:
        StoreError: The folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = session.model_dump_json(indent=1)
        replace_file(folder / SESSION_FILE, f"{text}\n".encode())
    except OSError as error:
        raise StoreError(
            f"Cannot write the session {str(folder)!r}: {error.strerror or error}. Expected a "
            "writable folder. Choose another --runs-dir."
        ) from error


def read_session(folder: Path) -> TuningSession:
    """Read a session.

    Raises:
        StoreError: The file is missing or invalid.
    """
    path = folder / SESSION_FILE
    try:
        session = TuningSession.model_validate(parse_json(read_regular(path, MAX_JSON_BYTES)))
    except OSError as error:
        raise StoreError(
            f"Tuning session not found at {str(folder)!r}: {error.strerror or error} "
            f"({SESSION_FILE}). Expected the folder that `fsdp-inspect tune` printed. Pass that "
            "folder, or start a new session."
        ) from error
    except (InvalidTextError, ValidationError) as error:
        problem = (
            describe_validation_error(error) if isinstance(error, ValidationError) else f"{error}."
        )
        raise StoreError(
            f"Invalid session {str(path)!r}: {problem} Restore the file, "
            "or start a new session with fsdp-inspect tune."
        ) from error
    if session.session_version > SESSION_VERSION:
        raise StoreError(
            f"The session {str(path)!r} has version {session.session_version}. This fsdp-inspect "
            f"reads up to version {SESSION_VERSION}. Update fsdp-inspect."
        )
    return session


def plan_file(folder: Path, plan: int) -> Path:
    """The path of a plan of a session."""
    return folder / f"plan-{plan}.toml"
