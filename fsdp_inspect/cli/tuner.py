"""Run a tuning session: the baseline, predictions, then plans and baseline in turn.

Each outcome is written at once, so Ctrl-C loses the current run only. Rounds alternate (baseline,
plans, baseline, plans in reverse order, ...), so that drift of the machine does not favour a plan.
"""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fsdp_inspect.advice.tuning import (
    BASELINE,
    TriedRun,
    TuningSession,
    plan_file,
    write_session,
)
from fsdp_inspect.cli.child import TRAINER, ChildError, reason_in, run_child, torchrun_words
from fsdp_inspect.cli.cluster import open_tasks, show_progress
from fsdp_inspect.errors import FsdpInspectError, NotARunError
from fsdp_inspect.formatting import format_signed, show_controls
from fsdp_inspect.reading import MAX_TOML_BYTES, InvalidTextError, parse_toml, read_regular
from fsdp_inspect.simulation.predictions.ledger import (
    append_entries,
    prediction_file_of,
    read_prediction,
    write_prediction,
)
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.plan import DECIDED_BY_PLAN
from fsdp_inspect.trace.run import RunStatus

if TYPE_CHECKING:
    from fsdp_inspect.advice.tuning import Tuning


_KILLED = -9


@dataclass(frozen=True, slots=True)
class _Turn:
    """One planned training of a session."""

    plan: int
    round: int


class Tuner:
    """Runs a session, new or resumed."""

    def __init__(
        self, folder: Path, session: TuningSession, ledger: Path, *, dask: str | None = None
    ) -> None:
        """Prepare the session without running anything.

        Args:
            folder: The folder of the session.
            session: The settings of the session, and its completed trainings.
            ledger: The prediction history, which keeps predictions and outcomes.
            dask: The cluster that simulates the plans; None: this process.
        """
        self._folder = folder
        self._session = session
        self._ledger = ledger
        self._dask = dask

    def run(self) -> None:
        """Run all trainings that are not completed.

        Raises:
            FsdpInspectError: The baseline fails, or it cannot be simulated.
            KeyboardInterrupt: Ctrl-C was pressed. Completed trainings are kept.
        """
        if self._session.find(BASELINE, 0) is None:
            self._train(_Turn(BASELINE, 0))
        if not self._baselines():
            failure = self._session.of_plan(BASELINE)[0].failure
            raise FsdpInspectError(
                f"The baseline recorded no run to predict from: {failure}. Expected a training "
                f"that is recorded to its end. Its output is in {self._log(_Turn(BASELINE, 0))}."
            )
        if self._session.num_plans is None:
            self._choose_plans()
        for turn in self._turns():
            if self._session.find(turn.plan, turn.round) is None and not self._failed(turn.plan):
                self._train(turn)

    def result(self) -> "Tuning":
        """The results so far. The outcomes are added to the prediction history."""
        from fsdp_inspect.advice.run_advice import find_findings
        from fsdp_inspect.advice.tuning import Trial, measure_tuning

        baselines = self._baselines()
        trials = [
            Trial(
                number=number,
                prediction=read_prediction(self._prediction_file(number)),
                plan_file=str(plan_file(self._folder, number)),
                runs=tuple(self._runs_of(number)),
                failure=self._failed(number),
            )
            for number in range(1, (self._session.num_plans or 0) + 1)
        ]
        tuning = measure_tuning(
            trials,
            baselines,
            find_findings(baselines[0]) if baselines else (),
            memory_limit=self._session.memory_limit,
            is_whole=not any(self._is_open(turn) for turn in self._turns()),
        )
        outcomes = [plan.outcome for plan in tuning.plans if plan.outcome is not None]
        if outcomes:
            append_entries(self._ledger, outcomes)
        return tuning

    # --- planned trainings

    def _turns(self) -> Iterator[_Turn]:
        """All trainings in order, including those of failed plans."""
        yield _Turn(BASELINE, 0)
        plans = list(range(1, (self._session.num_plans or 0) + 1))
        for round_ in range(1, self._session.repeats + 1) if plans else ():
            for plan in plans if round_ % 2 else plans[::-1]:
                yield _Turn(plan, round_)
            yield _Turn(BASELINE, round_)

    def _is_open(self, turn: _Turn) -> bool:
        is_done = self._session.find(turn.plan, turn.round) is not None
        return not is_done and not self._failed(turn.plan)

    def _failed(self, plan: int) -> str | None:
        """The failure because of which a plan does not run again; None for the baseline."""
        tried = self._session.of_plan(plan) if plan != BASELINE else []
        return next((each.failure for each in tried if each.failure is not None), None)

    # --- plans

    def _choose_plans(self) -> None:
        """Simulate plans on the baseline, and write the best ones with their predictions."""
        from fsdp_inspect.advice.prediction_creation import PredictionOrigin, make_prediction
        from fsdp_inspect.advice.request import AdviceRequest
        from fsdp_inspect.advice.run_advice import find_plans
        from fsdp_inspect.simulation.simulate import simulate_plan

        run = self._baselines()[0]
        request = AdviceRequest(
            memory_limit=self._session.memory_limit, allow_dtypes=self._session.allow_dtypes
        )
        with open_tasks(self._dask) as tasks, show_progress() as on_progress:
            chosen = find_plans(
                run, request, self._session.budget, on_progress=on_progress, tasks=tasks
            )
        predictions = []
        for number, proposal in enumerate((each.proposal for each in chosen.plans), 1):
            origin = PredictionOrigin(
                made_by="tune",
                what=proposal.what,
                assumptions=proposal.assumptions,
                paid=proposal.paid,
            )
            prediction = make_prediction(run, simulate_plan(run, proposal.plan), origin)
            proposal.plan.dump(plan_file(self._folder, number))
            write_prediction(prediction, self._prediction_file(number))
            predictions.append(prediction)
            change = format_signed(prediction.change)
            _say(f"Plan {number}: {proposal.what}: {change} a step predicted.")
        if predictions:
            append_entries(self._ledger, predictions)
        self._save(num_plans=len(predictions))

    def _prediction_file(self, number: int) -> Path:
        return prediction_file_of(plan_file(self._folder, number))

    # --- trainings

    def _train(self, turn: _Turn) -> None:
        """Run one training. The failure of a plan is an outcome and does not end the session."""
        before = {entry.id for entry in list_runs(self._folder)}
        started, failure = time.monotonic(), None
        try:
            run_child(
                fill_placeholders(
                    self._session.command,
                    folder=self._folder,
                    name=self._name(turn),
                    plan=None if turn.plan == BASELINE else plan_file(self._folder, turn.plan),
                ),
                what=self._describe(turn),
                log=self._log(turn),
                environment={**os.environ, **self._session.environment},
            )
        except ChildError as error:
            reason = reason_in(self._log(turn))
            failure = reason or _say_code(error.code)
            if not self._session.tried:
                if reason is None:
                    raise
                raise FsdpInspectError(
                    f"The baseline did not run to its end: {failure}. Expected a training that is "
                    f"recorded to its end. Its output is in {self._log(turn)}."
                ) from error
        new = [entry for entry in list_runs(self._folder) if entry.id not in before]
        if not new and failure is None:
            failure = (
                "it ended without an error, but recorded no run in the folder of the session "
                "({runs})"
            )
        tried = TriedRun(
            plan=turn.plan,
            round=turn.round,
            folder=new[0].id if new else None,
            failure=failure,
            took_s=time.monotonic() - started,
        )
        self._save(tried=[*self._session.tried, tried])
        if failure is not None:
            _say(f"  did not run to its end: {failure}. Its output is in {self._log(turn)}.")

    def _save(self, **changes: object) -> None:
        self._session = self._session.model_copy(update=changes)
        write_session(self._folder, self._session)

    def _name(self, turn: _Turn) -> str:
        name = "baseline" if turn.plan == BASELINE else f"plan-{turn.plan}"
        return f"{name}-{turn.round}"

    def _log(self, turn: _Turn) -> Path:
        return self._folder / ".logs" / f"{self._name(turn)}.log"

    def _describe(self, turn: _Turn) -> str:
        """`[3/7] plan 2 (about 40 s left)`."""
        name = "the baseline" if turn.plan == BASELINE else f"plan {turn.plan}"
        if self._session.num_plans is None:
            return f"[1] {name}"
        turns = list(self._turns())
        left = sum(self._is_open(each) for each in turns)
        times = [tried.took_s for tried in self._session.tried]
        seconds = left * sum(times) / len(times)
        return f"[{len(turns) - left + 1}/{len(turns)}] {name} (about {_duration(seconds)} left)"

    # --- runs

    def _baselines(self) -> list[StoredRun]:
        return self._runs_of(BASELINE)

    def _runs_of(self, plan: int) -> list[StoredRun]:
        """The ended runs of a plan; failed runs count for plans, but not for the baseline."""
        runs = []
        for tried in self._session.of_plan(plan):
            if tried.folder is None or (plan == BASELINE and tried.failure is not None):
                continue
            try:
                run = open_run(self._folder / tried.folder)
            except NotARunError:
                continue
            if run.status is not RunStatus.RUNNING:
                runs.append(run)
        return runs


def _say_code(code: int) -> str:
    killed = ", probably killed by the kernel for lack of memory" if code == _KILLED else ""
    return f"it ended with exit code {code}{killed}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(text: str) -> None:
    print(show_controls(text), file=sys.stderr, flush=True)


def how_to_resume(folder: Path) -> str:
    """The command that continues a session."""
    return f"fsdp-inspect tune --resume {shlex.quote(str(folder))}"


# --- Build the training command of a plan or of the baseline.
#
# A command is a list of words with placeholders: `{plan}` (the plan file), `{runs}` (the folder for
# the recorded run), `{name}` (the name of the run) and `{config}` (settings of the trainer). The
# baseline has no plan file: its command omits the words with `{plan}` and the options before them.

PLAN, RUNS, NAME, CONFIG = "{plan}", "{runs}", "{name}", "{config}"
_CONFIG_FILE, _CONFIG_UNDER_PLAN = "config.toml", "config-under-plan.toml"
_EMULATE = "emulate"


def fill_placeholders(
    command: Sequence[str], *, folder: Path, name: str, plan: Path | None
) -> list[str]:
    """The command with values in place of its placeholders.

    Args:
        command: The command with placeholders.
        folder: The folder of the session.
        name: The name of the run.
        plan: The plan file; None: the baseline.
    """
    words = list(command) if plan is not None else _without_plan(command)
    config = folder / (_CONFIG_FILE if plan is None else _CONFIG_UNDER_PLAN)
    values = {PLAN: str(plan), RUNS: str(folder), NAME: name, CONFIG: str(config)}
    for placeholder, value in values.items():
        words = [word.replace(placeholder, value) for word in words]
    return words


def trainer_command(
    config: Path | None, *, num_ranks: int | None, options: Sequence[str]
) -> tuple[list[str], int]:
    """The trainer's command with placeholders, and its number of ranks.

    Args:
        config: A TOML file of settings; None: the defaults.
        num_ranks: The number of processes; None: one under emulation, else two.
        options: Further settings, as `--key`, `value`.

    Raises:
        FsdpInspectError: The file cannot be read.
    """
    is_emulated = f"--{_EMULATE}" in options or _setting(config, _EMULATE) is not None
    ranks = num_ranks or (1 if is_emulated else 2)
    start = [sys.executable] if is_emulated else torchrun_words(ranks)
    settings = ["--config", CONFIG] if config is not None else []
    kept = ["--record", "--runs-dir", RUNS, "--name", NAME, "--plan", PLAN]
    return [*start, "-m", TRAINER, *settings, *options, *kept], ranks


def write_configs(config: Path, folder: Path) -> None:
    """Write the settings to a session: unchanged, and without the settings that a plan decides."""
    settings = read_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG_FILE).write_text(tomli_w.dumps(settings))
    (folder / _CONFIG_UNDER_PLAN).write_text(tomli_w.dumps(_left_to_plan(settings)))


def read_config(config: Path) -> dict[str, Any]:
    """The settings of a file.

    Raises:
        FsdpInspectError: The file is unreadable or not TOML.
    """
    try:
        return parse_toml(read_regular(config, MAX_TOML_BYTES))
    except (OSError, InvalidTextError) as error:
        raise FsdpInspectError(
            f"No settings can be read from {str(config)!r}: {error}. Expected a TOML file of the "
            f"trainer's settings. Write one with: python -m {TRAINER} --print-config"
        ) from error


def complaint_about(command: Sequence[str]) -> str | None:
    """The reason why a plan cannot be passed to the user's command; None: it can."""
    if any(PLAN in word for word in command):
        return None
    return (
        f"{PLAN} is missing in the command {' '.join(command)!r}, so it cannot receive a plan. "
        f"Expected {PLAN} for the plan file, and {RUNS} for the folder of runs. Write, for "
        f"example: -- torchrun --nproc-per-node 8 train.py --plan {PLAN} --runs-dir {RUNS}"
    )


def _without_plan(command: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in command:
        if PLAN not in word:
            words.append(word)
        elif word == PLAN and words and words[-1].startswith("-"):
            words.pop()
    return words


def _setting(config: Path | None, name: str) -> Any:
    """A setting of a file, at its top level or in a table; None: it is not set."""
    if config is None:
        return None
    settings = read_config(config)
    tables = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return next((table[name] for table in tables if name in table), None)


def _left_to_plan(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _left_to_plan(value) if isinstance(value, dict) and name != "hf_config" else value
        for name, value in settings.items()
        if name not in DECIDED_BY_PLAN
    }
