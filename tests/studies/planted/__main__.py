"""Check planted regressions and unchanged reruns, and write the tables of a page: `make planted`.

    make planted RERUNS=50

The ranks of all plants start once. Each rerun starts its ranks again, like a training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_inspect.comparison.gate.baseline import Baseline, make_baseline
from fsdp_inspect.comparison.gate.measurements import read_runs
from fsdp_inspect.formatting import format_bytes, format_category
from fsdp_inspect.store.reader import open_run
from tests.forked_ranks import run_ranks
from tests.studies.planted import situations, training
from tests.studies.planted.pages import replace_section
from tests.studies.planted.regressions import (
    EXPECTED,
    FORECAST,
    RECORDED,
    WORLD_SIZE,
    Outcome,
    check_all,
    check_reruns,
    forecast_all,
    read,
)
from tests.studies.planted.situations import SITUATIONS, First, first_of, open_situations
from tests.studies.planted.training import PLANTS, folder_of

RUNS_OF_A_LEARNED_BASELINE = 4
"""Enough to learn the tolerance of memory. From 5 runs on, a baseline also gates times, which a
single run cannot be judged by."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reruns", type=int, default=50, help="unchanged reruns (default: 50)")
    parser.add_argument("--folder", type=Path, default=Path("build/planted"), help="for the runs")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    recorded, forecasts = folder / RECORDED, folder / FORECAST
    recorded.mkdir(parents=True)
    forecasts.mkdir()
    _train(
        recorded, [word for plant in PLANTS if plant != "nothing" for word in ("--plant", plant)]
    )
    forecast_all(forecasts)
    outcomes = [*check_all(recorded, RECORDED), *check_all(forecasts, FORECAST)]
    for number in range(arguments.reruns):
        again = folder / f"again-{number}"
        again.mkdir()
        _train(again, [])
        (again / folder_of("nothing")).rename(recorded / f"rerun-{number:03}")
    alarms, summary = _summarize_reruns(recorded)
    problems = [
        f"{one.kind}, {one.plant}: {problem}" for one in outcomes for problem in one.problems()
    ]
    firsts = _advise_all(folder / "situations")
    problems += [
        f"{name}: {first}" for name, first in firsts.items() if not SITUATIONS[name].is_right(first)
    ]
    print("\n".join([*problems, summary]))
    if arguments.page is not None:
        page = replace_section(arguments.page.read_text(), "regressions", _table(outcomes))
        page = replace_section(page, "reruns", summary)
        arguments.page.write_text(replace_section(page, "situations", _situation_table(firsts)))
    return int(bool(problems or alarms))


def _advise_all(folder: Path) -> dict[str, First]:
    """Record each situation, and take the first advice for it."""
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", situations.__name__, str(folder)]
    subprocess.run(command, check=True)
    logs = folder / "logs"
    logs.mkdir()
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    done, ended = run_ranks(
        (situations.__file__, str(folder)),
        num_ranks=2,
        timeout_s=600,
        cwd=folder,
        logs=logs,
        environment=environment,
    )
    if not ended or done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    runs = open_situations(folder)
    return {name: first_of(runs[name], each.request) for name, each in SITUATIONS.items()}


def _situation_table(firsts: Mapping[str, First]) -> str:
    """A row for each situation."""
    lines = ["| situation | right answer | first answer | predicted gain |", "|---|---|---|---|"]
    for name, first in firsts.items():
        gain = "" if first.saved_ratio is None else f"{first.saved_ratio:.1%}"
        rules = ", ".join(rule for rule in first.rules if rule)
        said = f"{first.words or 'change nothing'}{f' [{rules}]' if rules else ''}"
        lines.append(f"| {name} | {SITUATIONS[name].right} | {said} | {gain} |")
    return "\n".join(lines)


def _train(folder: Path, arguments: Sequence[str]) -> None:
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    done, ended = run_ranks(
        (training.__file__, str(folder), *arguments),
        num_ranks=2,
        timeout_s=1200,
        cwd=folder,
        logs=logs,
        environment=environment,
    )
    shutil.rmtree(logs)
    if done.returncode or not ended:
        raise SystemExit(f"The training failed: exit code {done.returncode}. {done.stderr[-3000:]}")


# --- tables


def _table(outcomes: Sequence[Outcome]) -> str:
    found = {(one.kind, one.plant): one for one in outcomes}
    lines = [
        f"| planted | recorded, 2 ranks | forecast, {WORLD_SIZE} ranks | stated cause | growth |",
        "|---|---|---|---|---|",
    ]
    for plant in EXPECTED:
        kinds = [found.get((kind, plant)) for kind in (RECORDED, FORECAST)]
        worst = next((one for one in kinds if one and one.result.exit_code), None)
        cells = [plant, *(_verdict(one) for one in kinds)]
        cells += ["", ""] if worst is None else [_cause(worst), _grew(worst)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(one: Outcome | None) -> str:
    if one is None:
        return ""
    metric = one.result.metrics[0]
    failed = [each for each in one.result.metrics if each.outcome.value == "regression"]
    if not failed:
        return "passes"
    metric = failed[0]
    change = metric.change or 0
    name = "" if metric.name == "peak_allocated_bytes" else f" ({metric.name})"
    return f"+{change / metric.before:.2%}{name}" if metric.before else f"+{format_bytes(change)}"


def _cause(one: Outcome) -> str:
    causes = list(one.result.causes)
    causes += [f"{each.metric}: unknown" for each in one.result.others if causes]
    return "; ".join(causes) or "unknown"


def _grew(one: Outcome) -> str:
    most = one.result.growth[0]
    return f"{format_category(most.category)} of {most.where} +{format_bytes(most.increase)}"


def _summarize_reruns(folder: Path) -> tuple[int, str]:
    """The number of alarms, and a sentence with the measured spread."""
    one = make_baseline(read(folder / folder_of("nothing")))
    paths = sorted(folder.glob("rerun-*"))
    if not paths:
        return 0, "No rerun was recorded."
    alarms = _alarms(folder, one)
    peaks = [read(path).memory["peak_allocated_bytes"] for path in paths]
    first = one.memory["peak_allocated_bytes"]
    spread = max(abs(peak - first) for peak in peaks)
    text = (
        f"{len(paths)} unchanged reruns, each in new processes: {alarms} alarms with the default "
        f"tolerance. The largest difference of the peak is {format_bytes(spread)} "
        f"({spread / first:.3%})."
    )
    if len(paths) > RUNS_OF_A_LEARNED_BASELINE:
        learned = make_baseline(
            read_runs([open_run(path) for path in paths[:RUNS_OF_A_LEARNED_BASELINE]])
        )
        later = [
            result.exit_code
            for path, result in zip(paths, check_reruns(folder, learned), strict=True)
            if path not in paths[:RUNS_OF_A_LEARNED_BASELINE]
        ]
        count = sum(code != 0 for code in later)
        alarms += count
        text += (
            f" With a baseline of the first {RUNS_OF_A_LEARNED_BASELINE}, the other {len(later)} "
            f"raise {count} alarms."
        )
    return alarms, text


def _alarms(folder: Path, baseline: Baseline) -> int:
    return sum(result.exit_code != 0 for result in check_reruns(folder, baseline))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
