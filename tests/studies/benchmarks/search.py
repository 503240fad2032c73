"""Measure the search of plans: the time of `advise`, and the plans that it evaluates in a minute.

The large run is synthetic (`simulated_run`). `advise` runs in fresh processes. The rate is that of
the search alone: in one process, and with two workers of `--dask local:2`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.advice.plan_scores import PlanScorer
from fsdp_inspect.advice.plan_simulator import Slowdown
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.search import Search
from fsdp_inspect.formatting import format_bytes, format_ns
from fsdp_inspect.parallel.dask_tasks import connect_dask
from fsdp_inspect.parallel.tasks import InProcess, Tasks
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.store.reader import open_run
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.large_run import Shape
from tests.studies.benchmarks.scale import AIMED_RANKS, NUM_CPUS, run_command
from tests.studies.benchmarks.simulated_run import write_simulated_run

NUM_UNITS = 100
MEMORY_LIMIT = 80 << 30
"""The memory limit of the searches; it limits the plans of the large run."""
AIM = "> 10,000"
SLOWDOWN = Slowdown(1.2, 1.1, 1.4)
"""A slowdown of compute by communication. With one, each simulated step needs its spans."""


@dataclass(frozen=True, slots=True)
class SearchCost:
    """The cost of one search."""

    num_plans: int
    wall_ns: int

    @property
    def per_minute(self) -> float:
        """The plans that the search evaluates in a minute."""
        return self.num_plans / self.wall_ns * 60e9


def measure_search(
    folder: Path, samples: Sequence[Path], *, ranks: int, steps: int, repeats: int
) -> list[Figure]:
    """The time of `advise` on a large run, and the rate of the search on it and on samples.

    Args:
        folder: The folder for the large run.
        samples: Recorded runs.
        ranks: Ranks of the large run.
        steps: Steps of each of its ranks.
        repeats: Fresh processes, and searches of each run.
    """
    shape = Shape(ranks, steps, NUM_UNITS)
    large = write_simulated_run(folder / "run", shape)
    figures = [_advise_figure(large, shape, repeats)]
    with _one_process() as alone, connect_dask(f"local:{NUM_CPUS}") as pair:
        for where, tasks, aim in (
            (f"one of {NUM_CPUS} CPUs", alone, AIM),
            (f"--dask local:{NUM_CPUS}", pair, ""),
        ):
            for path, what, slowdown in (
                *((sample, sample.name, None) for sample in samples),
                (large, f"{NUM_UNITS} units", None),
                (large, f"{NUM_UNITS} units with a slowdown of compute", SLOWDOWN),
            ):
                costs = _search_repeatedly(path, tasks, slowdown, repeats)
                figures.append(_rate_figure(f"{what}, {where}", aim, costs))
    return figures


@contextmanager
def _one_process() -> Iterator[Tasks]:
    yield InProcess()


def _advise_figure(run: Path, shape: Shape, repeats: int) -> Figure:
    arguments = ["advise", str(run), "--json"]
    _, answer = run_command(arguments, run.parent)  # compiles the imported modules
    costs = [run_command(arguments, run.parent)[0] for _ in range(repeats)]
    plan = json.loads(answer)["plan"]
    wall_ns = statistics.median(cost.wall_ns for cost in costs)
    cpu_ns = statistics.median(cost.cpu_ns for cost in costs)
    peak_bytes = max(cost.peak_bytes for cost in costs)
    return Figure(
        name=(
            f"fsdp-inspect advise, {shape.num_units} units x {shape.num_ranks:,} ranks x "
            f"{shape.num_steps} steps, {plan['num_plans']:,} plans"
        ),
        value=f"{format_ns(wall_ns)} ({format_ns(cpu_ns)}), {format_bytes(peak_bytes)}",
        aim="< 5 s" if shape.num_ranks == AIMED_RANKS else "",
        how=(
            f"Measured: wall time (CPU time in brackets; medians of {repeats}) and highest "
            f"resident memory of fresh processes on {NUM_CPUS} CPUs, warm file cache, on a made-up "
            "run whose step follows FSDP's schedule, with a memory step and a summary for every "
            "rank. The ranks share their events."
        ),
        numbers={
            "plans": plan["num_plans"],
            "wall_ns": wall_ns,
            "cpu_ns": cpu_ns,
            "peak_bytes": peak_bytes,
        },
    )


def _search_repeatedly(
    path: Path, tasks: Tasks, slowdown: Slowdown | None, repeats: int
) -> list[SearchCost]:
    _search(path, tasks, slowdown)  # loads scipy, and the package in the workers
    return [_search(path, tasks, slowdown) for _ in range(repeats)]


def _rate_figure(name: str, aim: str, costs: Sequence[SearchCost]) -> Figure:
    rate = statistics.median(cost.per_minute for cost in costs)
    num_plans = costs[0].num_plans
    return Figure(
        name=f"plans a minute, {name}",
        value=f"{rate:,.0f} ({num_plans:,} plans)",
        aim=aim,
        how=(
            f"Measured: all plans of a search that also tries bfloat16 and has a memory limit of "
            f"{format_bytes(MEMORY_LIMIT)}, with its choice of the plans, by its wall time (median "
            f"of {len(costs)}). Plans with equal schedules are simulated once."
        ),
        numbers={"per_minute": rate, "plans": num_plans},
    )


def _search(path: Path, tasks: Tasks, slowdown: Slowdown | None) -> SearchCost:
    run = open_run(path)
    work = measure_work(run)
    began = time.perf_counter_ns()
    scorer = PlanScorer(run, slowdown=slowdown, work=work, tasks=tasks)
    Search(scorer, AdviceRequest(memory_limit=MEMORY_LIMIT, allow_dtypes=True)).run()
    return SearchCost(len(scorer.scores), time.perf_counter_ns() - began)
