"""Inject faults into trainings and judge the diagnoses: `make faults`.

    make faults ARGS="--cases 300 --healthy 100"

Each case trains on 2 to 8 gloo ranks under the zero-code launcher, with one fault on one rank in
one step. When the recorder has reported it, or a rank has died, all ranks are ended like by
`torchrun`, and `fsdp-inspect diagnose` reads the run. A table compares its answers with the fault.
Healthy trainings must raise no alarm. Exits with 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.studies.faults.cases import EXPECTED, IN_SETUPS, LOOPS, MODELS, Case, make_cases
from tests.studies.faults.judging import RIGHT, UNKNOWN, WRONG, Verdict, judge
from tests.studies.faults.running import run_case, run_healthy

WANTED_CLASSES = 0.97
_PROGRESS_RUNS = 25
"""The number of healthy trainings between two lines of progress."""


def main() -> int:
    """Run the cases; returns the exit code."""
    given = _parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        verdicts = list(_judge_all(given, folder))
        alarms = list(_healthy_alarms(given, folder))
    text = render(verdicts, given.healthy, alarms)
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n")
    return 1 if _is_missed(verdicts, alarms) else 0


def _judge_all(given: argparse.Namespace, folder: Path) -> Iterator[Verdict]:
    cases = list(make_cases(given.cases, given.seed, given.models, given.faults))
    begun = time.monotonic()

    def run(numbered: tuple[int, Case]) -> Verdict | str:
        number, case = numbered
        own = folder / f"case-{number:03d}"
        shutil.rmtree(own, ignore_errors=True)
        try:
            verdict = judge(run_case(case, own))
        except Exception as error:  # the suite continues with the next case
            return f"{case.name}: {error!r}"
        if not given.folder:
            shutil.rmtree(own, ignore_errors=True)
        return verdict

    with ThreadPoolExecutor(given.parallel) as pool:
        for number, verdict in enumerate(pool.map(run, enumerate(cases)), 1):
            minutes, seconds = divmod(round(time.monotonic() - begun), 60)
            if isinstance(verdict, str):
                print(f"{minutes}:{seconds:02d} {number} NOT RUN {verdict}", file=sys.stderr)
                continue
            marks = f"class {verdict.problem}, rank {verdict.ranks}, line {verdict.line}"
            name = verdict.outcome.case.name
            print(f"{minutes}:{seconds:02d} {number} {name}: {marks}", file=sys.stderr, flush=True)
            if WRONG in (verdict.problem, verdict.ranks, verdict.line):
                certain = "CERTAIN: " if verdict.is_certain else ""
                said = verdict.outcome.found["sentence"]
                print(f"      {certain}{said}", file=sys.stderr, flush=True)
            yield verdict


def _healthy_alarms(given: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The alarms about healthy trainings; trainings that did not end in time raise none."""

    def run(number: int) -> str:
        own = folder / f"healthy-{number:04d}"
        shutil.rmtree(own, ignore_errors=True)
        model = given.models[number % len(given.models)]
        is_rich = model not in LOOPS and number % 2 == 1
        try:
            said = run_healthy(
                own,
                num_ranks=(2, 3, 4)[number // 2 % 3],
                model=model,
                fault="healthy" if is_rich else "none",
            )
        except TimeoutError as error:
            print(f"NOT RUN {number}: {error}", file=sys.stderr, flush=True)
            return ""
        shutil.rmtree(own, ignore_errors=True)
        if said:
            print(f"ALARM {number}: {said}", file=sys.stderr, flush=True)
        elif number % _PROGRESS_RUNS == 0:
            print(f"healthy training {number} of {given.healthy}", file=sys.stderr, flush=True)
        return said

    with ThreadPoolExecutor(given.parallel) as pool:
        yield from filter(None, pool.map(run, range(given.healthy)))


def render(verdicts: Sequence[Verdict], healthy: int, alarms: Sequence[str]) -> str:
    """The table in Markdown: one row for each fault, with right / wrong / unknown."""
    lines = [
        "| fault | cases | class | rank | line | seconds to the report, median (worst) |",
        "|---|---|---|---|---|---|",
    ]
    for fault in {**EXPECTED, **IN_SETUPS}:
        own = [each for each in verdicts if each.outcome.case.fault == fault]
        if own:
            lines.append(_row(fault, own))
    lines.append(_row("all", list(verdicts)))
    false = [each for each in verdicts if each.is_falsely_certain]
    lines += [
        "",
        "Each cell is right / wrong / unknown.",
        f"Wrong class or rank stated with certainty: {len(false)} of {len(verdicts)}.",
        f"Healthy trainings with an alarm: {len(alarms)} of {healthy}.",
    ]
    return "\n".join(lines)


def _row(name: str, verdicts: Sequence[Verdict]) -> str:
    columns = ("problem", "ranks", "line")
    counted = (
        " / ".join(
            str(sum(getattr(each, column) == mark for each in verdicts))
            for mark in (RIGHT, WRONG, UNKNOWN)
        )
        for column in columns
    )
    times = [
        each.outcome.said_after_s for each in verdicts if each.outcome.said_after_s is not None
    ]
    said = f"{statistics.median(times):.1f} ({max(times):.1f})" if times else "-"
    return f"| {name} | {len(verdicts)} | {' | '.join(counted)} | {said} |"


def _is_missed(verdicts: Sequence[Verdict], alarms: Sequence[str]) -> bool:
    if not verdicts:
        return bool(alarms)
    right = sum(each.problem == RIGHT for each in verdicts) / len(verdicts)
    is_false = any(each.is_falsely_certain for each in verdicts)
    return right < WANTED_CLASSES or is_false or bool(alarms)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--healthy", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=["mlp", "llama", "trainer"],
        help=f"models and loops, separated by commas, of {', '.join(MODELS)}; torchtitan must be "
        "installed (default: mlp,llama,trainer)",
    )
    parser.add_argument(
        "--faults",
        type=lambda text: text.split(","),
        default=[],
        help="only these faults, separated by commas (default: all)",
    )
    parser.add_argument("--parallel", type=int, default=2, help="trainings at a time")
    parser.add_argument("--folder", type=Path, help="keep the runs in this folder")
    parser.add_argument("--markdown", type=Path, help="write the table into this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
