"""Measure the published figures: `make bench`, or `python -m tests.studies.benchmarks`.

This takes about half an hour with the defaults, and requires an otherwise idle machine. Nothing
passes or fails here: the numbers are printed next to the project's aims.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.studies.benchmarks.figures import Figure, render_table, to_json
from tests.studies.benchmarks.machine import describe_machine

SAMPLES = Path(__file__).parents[3] / "samples"


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen benchmarks, print one table; returns the exit code."""
    options = _parse(arguments)
    machine = describe_machine()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="fsdp-inspect-bench-") as folder:
        for name in options.only or BENCHMARKS:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            figures += BENCHMARKS[name](options, Path(folder) / name)
    print(render_table(machine, figures))
    if options.json:
        options.json.write_text(json.dumps(to_json(machine, figures), indent=2) + "\n")
    return 0


def _overhead(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.hot_path import event_figures, measure_hot_path
    from tests.studies.benchmarks.overhead import measure_overhead

    cost = measure_hot_path(options.repeats)
    measured = measure_overhead(folder, cost, rounds=options.rounds, steps=options.steps_per_window)
    return [*measured, *event_figures(cost, options.repeats)]


def _budget(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.budget import measure_budget

    return measure_budget(
        folder,
        rounds=options.budget_rounds,
        steps=options.budget_steps,
        budgets=options.budgets,
    )


def _plain(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.plain import measure_plain

    return measure_plain(folder, rounds=options.plain_rounds)


def _stops(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.stops import measure_stops

    return measure_stops(folder, steps=options.stops_steps)


def _accuracy(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.accuracy import measure_accuracy

    return measure_accuracy(folder, steps=options.accuracy_steps)


def _size(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.sizes import measure_sizes

    return measure_sizes(folder, short=options.size_steps // 6, long=options.size_steps)


def _startup(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.sizes import record_run
    from tests.studies.benchmarks.startup import measure_startup

    run = options.sample or _first_sample() or record_run(folder, steps=30)
    return measure_startup(run, repeats=options.startup_repeats)


def _scale(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.scale import measure_scale

    return measure_scale(folder, ranks=options.ranks)


def _growth(_: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.growth import measure_growth

    return measure_growth(folder)


def _imports(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.imports import measure_imports

    return measure_imports(folder, num_events=options.trace_events, rounds=options.import_rounds)


def _dask_import(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.dask_import import measure_dask_import

    return measure_dask_import(
        folder,
        ranks=options.import_ranks,
        events_per_trace=options.rank_events,
        rounds=options.import_rounds,
    )


def _dashboard(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.dashboard import FULL, QUICK, measure_dashboard

    return measure_dashboard(folder, QUICK if options.quick else FULL)


def _gate(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.gate import measure_gate

    return measure_gate(folder, runs=options.gate_runs, checks=options.gate_checks)


def _order(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.order_check import measure_order_check

    return measure_order_check((8, 64, options.ranks), (2, 8, 64), rounds=20)


def _allocator(options: argparse.Namespace, _: Path) -> list[Figure]:
    from tests.studies.benchmarks.allocator import measure_allocator_model

    return measure_allocator_model(options.snapshots)


def _search(options: argparse.Namespace, folder: Path) -> list[Figure]:
    from tests.studies.benchmarks.search import measure_search

    samples = (
        [options.sample]
        if options.sample
        else sorted(path.parent for path in SAMPLES.glob("*/run.json"))
    )
    return measure_search(
        folder, samples, ranks=options.ranks, steps=options.search_steps, repeats=5
    )


BENCHMARKS: dict[str, Callable[[argparse.Namespace, Path], list[Figure]]] = {
    "overhead": _overhead,
    "budget": _budget,
    "plain": _plain,
    "stops": _stops,
    "accuracy": _accuracy,
    "size": _size,
    "startup": _startup,
    "imports": _imports,
    "dask-import": _dask_import,
    "scale": _scale,
    "growth": _growth,
    "dashboard": _dashboard,
    "gate": _gate,
    "order": _order,
    "allocator": _allocator,
    "search": _search,
}


def _first_sample() -> Path | None:
    found = sorted(manifest.parent for manifest in SAMPLES.glob("*/**/run.json"))
    return found[0] if found else None


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    _add_count(parser, "--rounds", 120, "paired rounds of the overhead benchmark")
    _add_count(parser, "--steps-per-window", 8, "steps of one mode in one round")
    parser.add_argument("--budgets", nargs="+", default=["1%", "3%"], metavar="BUDGET")
    _add_count(parser, "--budget-rounds", 12, "paired rounds of the budget benchmark")
    _add_count(parser, "--budget-steps", 500, "steps of one mode in one of these rounds", 100)
    _add_count(parser, "--plain-rounds", 12, "paired rounds of the benchmark of plain steps")
    _add_count(parser, "--stops-steps", 300, "steps of each part of the stops benchmark")
    _add_count(parser, "--repeats", 1000, "pairs of the event benchmark")
    _add_count(parser, "--accuracy-steps", 20, "profiled steps of the accuracy benchmark")
    _add_count(parser, "--size-steps", 120, "steps of the longer run of the size benchmark", 6)
    _add_count(parser, "--startup-repeats", 20, "fresh interpreters of the startup benchmark")
    _add_count(parser, "--ranks", 1000, "ranks of the scale, order and search benchmarks", 8)
    _add_count(parser, "--search-steps", 100, "steps of the large run of the search benchmark", 5)
    _add_count(parser, "--trace-events", 200_000, "least events of the trace that is imported")
    _add_count(
        parser, "--import-rounds", 5, "rounds of the import benchmarks, of each mode in turn"
    )
    _add_count(parser, "--import-ranks", 64, "traces of the import with Dask", 8)
    _add_count(parser, "--rank-events", 100_000, "least events of each of these traces")
    parser.add_argument(
        "--quick", action="store_true", help="the dashboard benchmark once, on small runs"
    )
    _add_count(parser, "--gate-runs", 30, "recorded runs that the checks of the gate draw from", 10)
    _add_count(parser, "--gate-checks", 50, "checks of each kind of an unchanged program")
    parser.add_argument(
        "--sample", type=Path, metavar="RUN", help="run to summarise; default: the first sample"
    )
    parser.add_argument(
        "--snapshots",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="memory snapshots for the allocator benchmark, next to the recorded ones",
    )
    return parser.parse_args(arguments)


def _add_count(
    parser: argparse.ArgumentParser, flag: str, default: int, meaning: str, minimum: int = 1
) -> None:
    def count(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    count.__name__ = f"whole number from {minimum}"  # argparse prints the name in its message
    parser.add_argument(
        flag, type=count, default=default, metavar="N", help=f"{meaning} (default {default})"
    )


if __name__ == "__main__":
    sys.exit(main())
