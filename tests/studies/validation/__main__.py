"""Compare predictions with runs: `make validate`, or `python -m tests.studies.validation`.

`--parts` selects parts:

- oracle: the schedule of streams, compared with torch's own FSDP2 code on virtual time;
- virtual: from one recorded baseline per shape, plans of a grid are predicted and then run under
  emulation on virtual time, where only the fixed compute and the network take time;
- emulated: the same on the machine's clock, where the host's work takes time as well;
- remade: on two nodes, resharding to a group within a node, and checkpointing, on and off, on
  virtual time;
- rewrapped: each wrap from a run with each other wrap, on virtual time;
- advised: the plan that `advise` ranks first, run on virtual time and on the machine's clock,
  compared with the best plan of the grid;
- real: a few plans with real compute;
- limited: plans on two real ranks over a network that the kernel limits;
- loops: models of Transformers and loops with chunked or several losses, with real compute;
- planned: the choice of `fsdp-inspect plan`, compared with all plans of a grid that run on virtual
  time, and its memory, compared with forecasts. It is not in the default, because it takes as long
  as all other parts.

On the machine's clock, a run of the recorded plan precedes each plan. Its difference from the
baseline is the machine's own error (A/A). This prints tables and a verdict, and exits with 1 if a
figure is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.distributed.limited_network import why_not
from tests.studies.validation.advised import judge_advice
from tests.studies.validation.emulated import VIRTUAL_STEPS, EmulationBench, judge_all, judge_grid
from tests.studies.validation.figures import RUN_PARTS, Results, all_figures, as_json
from tests.studies.validation.grid import REAL, draw, real_trials
from tests.studies.validation.limited import judge_limited
from tests.studies.validation.loops import LOOP_STEPS, all_loops, judge_loops
from tests.studies.validation.oracle import judge_played, judge_predicted
from tests.studies.validation.planned import judge_choices, judge_fits
from tests.studies.validation.remade import judge_remade
from tests.studies.validation.rewrapped import judge_rewrapped
from tests.studies.validation.tables import markdown, tables, verdict

PARTS = (
    "oracle",
    "virtual",
    "emulated",
    "advised",
    "remade",
    "rewrapped",
    "real",
    "limited",
    "loops",
    "planned",
)
USUAL_PARTS = PARTS[:-1]


def main() -> int:
    """Run the parts; returns the exit code."""
    options = _parse()
    begun = time.monotonic()

    def say(text: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - begun), 60)
        print(f"{minutes:2d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        results = _run(options, Path(folder), say)
    figures = all_figures(results)
    console = Console()
    for table in tables(results, figures):
        console.print(table, "")
    if options.json:
        options.json.write_text(json.dumps(as_json(results, figures), indent=2))
    if options.markdown:
        options.markdown.write_text(markdown(results, figures))
    console.print(verdict(results, figures), soft_wrap=True)
    return 1 if any(figure.is_missed for figure in figures) else 0


def _run(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> Results:
    results, parts = Results(), options.parts
    if "oracle" in parts:
        results.played = judge_played(options.cases, _counting(say, "played by torch"))
        recorded = judge_predicted(options.cases // 4, _counting(say, "predicted, then torch"))
        results.predicted = recorded
    bench = EmulationBench(folder / "emulated", options.steps, say)
    timeless = EmulationBench(folder / "virtual", VIRTUAL_STEPS, say, on_virtual_time=True)
    if "virtual" in parts:
        say("on virtual time:")
        results.virtual = judge_grid(timeless, options.trials)
    if "emulated" in parts:
        say("on this machine's time:")
        results.emulated = judge_grid(bench, options.trials)
    if "advised" in parts:
        say("what is advised, on virtual time:")
        results.advised = judge_advice(timeless, folder / "advised", say)
        say("what is advised, on this machine's time:")
        results.advised_in_time = judge_advice(bench, folder / "advised_in_time", say)
    if "remade" in parts:
        say("resharding to a node, and checkpointing:")
        results.remade = judge_remade(folder / "remade", say)
    if "rewrapped" in parts:
        say("each wrap from each other one:")
        results.rewrapped = judge_rewrapped(folder / "rewrapped", say)
    if "real" in parts:
        say(f"{REAL}:")
        trials = draw(real_trials(), options.real)
        results.real = judge_all(bench, trials)
    _run_without_grid(results, options, folder, say)
    return results


def _run_without_grid(
    results: Results, options: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> None:
    """The parts with plans of their own."""
    if "limited" in options.parts:
        _limited(results, folder / "limited", say)
    if "loops" in options.parts:
        say("models and loops of public projects:")
        results.loops = judge_loops(folder / "loops", options.loops, LOOP_STEPS, say)
    if "planned" in options.parts:
        say("all plans of a grid, forecast:")
        results.fits = judge_fits(folder / "fits", options.planned, say)
        say("all plans of a grid, on virtual time:")
        results.choices = judge_choices(folder / "choices", options.planned, say)


def _limited(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    reason = why_not()
    if reason is None:
        say("two ranks on a limited network:")
        try:
            results.limited = judge_limited(folder, say)
            return
        except subprocess.CalledProcessError as error:
            reason = str(error)
    results.skipped[RUN_PARTS["limited"]] = f"no network namespaces here ({reason})"
    say(f"skipped: {reason}")


def _counting(say: Callable[[str], None], what: str) -> Callable[[], None]:
    """Report every fiftieth call."""
    count = 0

    def on_case() -> None:
        nonlocal count
        count += 1
        if count % 50 == 0:
            say(f"{count} random plans {what}")

    return on_case


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make validate ARGS=...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=42, help="of the grid's 196 (default 42)")
    parser.add_argument("--real", type=int, default=6, help="with real compute (default 6)")
    parser.add_argument("--cases", type=int, default=240, help="for the oracle (default 240)")
    parser.add_argument(
        "--planned", type=int, default=64, help="plans of each planned grid (default 64: all)"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (default 20)")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=USUAL_PARTS,
        help=f"some of {','.join(PARTS)} (default all but planned)",
    )
    parser.add_argument(
        "--loops",
        type=lambda text: text.split(","),
        default=all_loops(),
        help=f"some of {','.join(all_loops())} (default all)",
    )
    parser.add_argument("--json", type=Path, help="also write all outcomes here")
    parser.add_argument("--markdown", type=Path, help="also write the figures here, as a table")
    options = parser.parse_args()
    for name, legal in (("parts", PARTS), ("loops", all_loops())):
        unknown = sorted(set(getattr(options, name)) - set(legal))
        if unknown:
            parser.error(f"--{name} has {', '.join(unknown)}. Expected some of {', '.join(legal)}.")
    return options


if __name__ == "__main__":
    sys.exit(main())
