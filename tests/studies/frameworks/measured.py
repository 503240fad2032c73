"""Train with a framework three times and measure every cell of the matrix.

The first training runs without the recorder, under torch's profiler, which counts the collectives.
The second one records the unmodified script. The third one uses the framework's callback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fsdp_inspect
from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.trace.codes import COLLECTIVES, EventKind
from fsdp_inspect.trace.run import RunStatus
from tests.studies.frameworks.counted import KINDS
from tests.studies.frameworks.entries import Entry
from tests.studies.frameworks.losses import read_losses

COMMANDS = ("summary", "exposed", "memory", "advise", "simulate", "check")
NUM_RANKS = 2
TIMEOUT_S = 600
PLAN_FAILS = "does not follow its plan"


@dataclass(frozen=True, slots=True)
class Recording:
    """One way of recording a framework, with the fault of each part; an empty text is no fault."""

    losses: str
    """The losses, compared with those of the training without the recorder."""
    counts: str
    """The collectives of each step, compared with torch's profiler."""
    recording: str
    """The state of the run, and the parts that the recorder could not record."""
    plan: str
    """The plan check, and its part in the verdict."""
    commands: dict[str, str] = field(default_factory=dict)
    replay_error: float | None = None
    """The error of the simulated step against the recorded one."""
    memory_error: float | None = None
    """The error of the simulated peak against the recorded one."""
    advice: str = ""
    """The reason why no plan was ranked; empty if plans were ranked."""
    num_collectives: int = 0
    """The number of compared collectives."""

    @property
    def faults(self) -> dict[str, str]:
        """All faults, by part."""
        parts = {name: getattr(self, name) for name in ("losses", "counts", "recording", "plan")}
        return {name: text for name, text in {**parts, **self.commands}.items() if text}


@dataclass(frozen=True, slots=True)
class Measured:
    """The row of a framework."""

    name: str
    versions: dict[str, str]
    zero_code: Recording
    callback: Recording


class TrainingError(Exception):
    """A training ended with an error; the message has the end of its output."""


def measure(entry: Entry, folder: Path) -> Measured:
    """Train three times in a folder and judge both recordings.

    Raises:
        TrainingError: A training failed.
    """
    plain, zero, call = (folder / name for name in ("plain", "zero_code", "callback"))
    for each in (plain, zero, call):
        each.mkdir(parents=True)
    script = str(entry.driver)
    given = entry.arguments
    _train("-m", "tests.studies.frameworks.counted", plain, script, plain, *given)
    _train("-m", "fsdp_inspect.record", "--out", zero / "runs", script, zero, *given)
    _train(script, call, *given, "--callback")
    runs = list((zero / "runs").glob("*")) if (zero / "runs").exists() else []
    if len(runs) != 1:
        raise TrainingError(f"{entry.name}: the unmodified script has {len(runs)} recordings.")
    return Measured(
        entry.name,
        {name: version(name) for name in entry.packages},
        _judge(entry, runs[0], plain, zero, by_callback=False),
        _judge(entry, call / "run", plain, call, by_callback=True),
    )


def write(measured: Measured, path: Path) -> None:
    """Write a row as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(measured), indent=1))


def read(path: Path) -> Measured:
    """Read a row that `write` wrote."""
    row = json.loads(path.read_text())
    ways = {name: Recording(**row.pop(name)) for name in ("zero_code", "callback")}
    return Measured(**row, **ways)


def _train(*arguments: str | Path) -> None:
    local = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
    launcher = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}")
    done = subprocess.run(
        [*launcher, *local, *map(str, arguments)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "PYTHONPATH": str(
                Path(__file__).parents[3]
            ),  # the drivers import tests.studies.frameworks
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise TrainingError(f"{' '.join(map(str, arguments))}\n{done.stderr[-6000:]}")


# --- judging


def _judge(entry: Entry, path: Path, plain: Path, trained: Path, *, by_callback: bool) -> Recording:
    run = fsdp_inspect.open_run(path)
    scalars = entry.scalars if by_callback else frozenset[str]()
    ends = entry.callback_ends if by_callback else entry.ends
    first_compared = 1 if by_callback else entry.first_compared
    losses = read_losses(plain)
    same = bool(losses) and len(losses) == NUM_RANKS and losses == read_losses(trained)
    counts, compared = _compare_counts(run, plain, ends, first_compared)
    simulation = run.simulate() if entry.is_simulated else None
    refusal = run.advise().refusal or ""
    return Recording(
        losses="" if same else "the losses differ",
        counts=counts,
        recording=_judge_recording(run, scalars),
        plan=_judge_plan(run, is_checked=entry.is_plan_checked),
        commands=_run_commands(path, trained, is_simulated=entry.is_simulated),
        replay_error=None if simulation is None else simulation.replay_error,
        memory_error=None if simulation is None else simulation.memory_error,
        advice=refusal.split(": ")[-1],
        num_collectives=compared,
    )


def _judge_recording(run: Any, scalars: frozenset[str]) -> str:
    if run.source.status is not RunStatus.COMPLETE:
        return f"the run is {run.source.status.name}"
    problems = {problem for rank in run.source.ranks for problem in rank.problems}
    missing = scalars - set(run.source.ranks[0].scalar_names)
    if missing:
        problems.add(f"not recorded: {', '.join(sorted(missing))}.")
    return " ".join(sorted(problems))


def _judge_plan(run: Any, *, is_checked: bool) -> str:
    check = check_plan(run.source)
    verdict = str(run.summary().verdict)
    if check.is_consistent is not (True if is_checked else None):
        return check.sentence
    return "the verdict reports a failed plan check" if PLAN_FAILS in verdict else ""


def _compare_counts(
    run: Any, plain: Path, ends: tuple[int, int], first_compared: int
) -> tuple[str, int]:
    """Compare the collectives of every step except the first ones, where the recording begins."""
    first, distance = ends
    compared = 0
    for rank in run.source.ranks:
        counted = json.loads((plain / f"counts-{rank.rank}.json").read_text())
        events = run.source.events(rank.rank)
        for step in range(first_compared, rank.num_steps):
            begin = first + distance * (step - 1) + 1
            expected: Counter[str] = Counter()
            for one in counted[begin : begin + distance]:
                expected.update(one)
            kinds = events.kind[events.step == step].tolist()
            names = [EventKind(kind).label for kind in kinds if EventKind(kind) in COLLECTIVES]
            observed = Counter(name for name in names if name in set(KINDS.values()))
            if observed != expected:
                recorded, counted_ones = dict(observed), dict(expected)
                return (
                    f"rank {rank.rank}, step {step}: {recorded} recorded, {counted_ones} counted",
                    compared,
                )
            compared += expected.total()
    return ("" if compared else "nothing was compared"), compared


def _run_commands(path: Path, folder: Path, *, is_simulated: bool) -> dict[str, str]:
    baseline = folder / "baseline.json"
    _run("check", path, "--baseline", baseline, "--update")
    options: dict[str, tuple[str | Path, ...]] = {"check": ("--baseline", baseline)}
    found = {name: _run(name, path, *options.get(name, ())) for name in COMMANDS}
    if not is_simulated:  # only settings of the sharder are, if the self-check holds
        reasons = ("cannot be simulated", "cannot be predicted: the simulation of the recorded")
        if any(each in found["simulate"] for each in reasons):
            found["simulate"] = ""
    return found


def _run(*arguments: str | Path) -> str:
    """The fault of a command: its exit code, or a traceback in its output."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0 or "Traceback" in done.stderr:
        return f"exit code {done.returncode}: {done.stderr[-2000:] or done.stdout[-2000:]}"
    return "" if done.stdout.strip() else "no output"
