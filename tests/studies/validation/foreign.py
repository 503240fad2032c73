"""Measure the first suggestion for loops of other projects: a table for docs/figures.md.

    python -m tests.studies.validation.foreign [LOOP ...]

Each loop of `tests.distributed.foreign_loops` trains on gloo ranks, with and without a recorder,
next to a counter of collectives. It then runs on eight emulated ranks on virtual time, where a
block takes a fixed time. The recorded plan is simulated, the first suggestion of `advise` runs, and
both are compared with the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fsdp_inspect.advice.suggestions import Suggestion
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.run import Run, open_run
from fsdp_inspect.simulation.recorded import measure_work
from tests.distributed.foreign_loops import LOOPS, RANKS
from tests.distributed.test_foreign_loops import recorded_counts

_SCRIPT = Path(__file__).parents[2] / "distributed" / "foreign_loops.py"
_EMULATION = (
    "tests.studies.validation.virtual_time",
    "fsdp_inspect.emulate",
    *("--world-size=8", "--bandwidth=300MB/s", "--latency=200us", "--no-verdict"),
)
_UNEMULATED = {
    "tp_sp_fsdp": "not emulated: emulated ranks have no tensor-parallel peers",
    "ddp_hook_zero1": "not simulated: DDP",
}
_COLUMNS = (
    "loop",
    "parameters after training, counts, bytes",
    "unchanged simulation: step, peak",
    "first suggestion",
    "exposed: predicted, measured",
    "step: predicted, measured",
    "peak: predicted, measured",
)


def main() -> None:
    """Print the table."""
    names = sys.argv[1:] or list(LOOPS)
    print(_row(_COLUMNS))
    print(_row(["---"] * len(_COLUMNS)))
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(_row([name, *_measure(name, Path(folder))]), flush=True)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _measure(name: str, folder: Path) -> list[str]:
    """The cells of a loop."""
    equal = _compare(name, folder / "gloo")
    if name in _UNEMULATED:
        return [equal, _UNEMULATED[name], *["-"] * 4]
    run = _emulate(name, folder / "recorded")
    try:
        unchanged = run.simulate()
    except FsdpInspectError as error:
        return [equal, str(error), *["-"] * 4]
    memory = unchanged.memory_error
    same = f"{unchanged.replay_error:+.2%}, " + ("unknown" if memory is None else f"{memory:+.2%}")
    advice = run.advise()
    suggestions = advice.plan.suggestions if advice.plan is not None else ()
    if not suggestions:
        return [equal, same, "change nothing", *["-"] * 3]
    return [equal, same, suggestions[0].what, *_judge(name, run, suggestions[0], folder)]


def _compare(name: str, folder: Path) -> str:
    """Which of the parameters, counts and bytes are equal on gloo ranks."""
    folder.mkdir()
    ranks = ("torch.distributed.run", f"--nproc-per-node={RANKS.get(name, 2)}")
    _python(*ranks, "--local-addr=127.0.0.1", str(_SCRIPT), str(folder), name)
    alone, recorded = json.loads((folder / f"{name}.json").read_text())
    rows = recorded_counts(open_run(folder / name).source)
    pairs = [
        (alone["checksum"], recorded["checksum"]),
        *(
            (
                {kind: each[at] for kind, each in counts.items()}
                for counts in (alone["counts"], rows)
            )
            for at in range(2)
        ),
    ]
    return ", ".join("equal" if one == other else "different" for one, other in pairs)


def _emulate(name: str, folder: Path, *plan: str) -> Run:
    folder.mkdir()
    _python(*_EMULATION, str(_SCRIPT), str(folder), name, *plan)
    return open_run(folder / name)


def _judge(name: str, run: Run, suggestion: Suggestion, folder: Path) -> list[str]:
    """Run the plan of a suggestion; exposed time, step time and peak, predicted and measured."""
    plan_file = folder / "plan.toml"
    suggestion.plan.dump(plan_file)
    predicted = run.simulate(suggestion.plan)
    actual = _emulate(name, folder / "suggested", str(plan_file))
    exposed, work = actual.exposed().exposed, measure_work(actual.source)
    assert exposed is not None
    return [
        _pair(predicted.predicted.exposed_ns, exposed.exposed_ns),
        _pair(predicted.step_time_ns, work.step_time_ns),
        f"{_size(predicted.peak_bytes)}, {_size(work.peak_bytes)}",
    ]


def _pair(predicted_ns: int, measured_ns: int) -> str:
    error = predicted_ns / measured_ns - 1 if measured_ns else 0.0
    return f"{format_ns(predicted_ns)}, {format_ns(measured_ns)} ({error:+.1%})"


def _size(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value)


def _python(*words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "-m", *words]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=root)


if __name__ == "__main__":
    main()
