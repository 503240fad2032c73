"""Measure a recording with a budget in long windows: bare, bare again, recorded and profiled.

The recorder keeps its state between its windows, so each window is one of a long run: most of its
steps are plain, and blocks of detailed steps are spread over it. Its first window contains the
detailed steps at the start, and counts. The windows of a round are interleaved in parts of some
seconds, in random order, because the speed of a shared machine changes within minutes. The profiler
runs in one part of a round, because it keeps each event in memory; its cost is that of a step.

A run's own statement about its recorder (`measure_recorder_cost`) is printed next to the paired
measurement from outside.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_inspect.analysis.recorder_cost import measure_recorder_cost
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.runtime import Runtime
from tests.studies.benchmarks.figures import Figure, overhead_figure, times_figure
from tests.studies.benchmarks.overhead import (
    BARE,
    BARE_AGAIN,
    PROFILED,
    RECORDED,
    Bare,
    Mode,
    Profiled,
    Recorded,
    combine,
    cpu_ns,
    empty_samples,
    measure_window,
    wall_ns,
)
from tests.studies.benchmarks.pairs import median_ratio, overhead_ratio
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import NUM_BLOCKS, Workload

BUDGETS = ("1%", "3%")
_PART_STEPS = 50


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    workload = Workload.build(runtime)
    recorded = Recorded(workload, folder / "run", overhead=options["budget"])
    bare = workload.loop()
    modes: dict[str, Mode] = {
        BARE: Bare(bare),
        BARE_AGAIN: Bare(bare),
        RECORDED: recorded,
        PROFILED: Profiled(bare),
    }
    order, samples, step = random.Random(0), empty_samples(list(modes)), 0
    num_parts = options["steps"] // _PART_STEPS
    for _ in range(options["rounds"]):
        spent = {name: Counter[str]() for name in modes}
        profiled = order.randrange(num_parts)
        for part in range(num_parts):
            for name in order.sample(list(modes), len(modes)):
                if name != PROFILED or part == profiled:
                    spent[name].update(
                        measure_window(
                            modes[name], step, _PART_STEPS, runtime.device, recorded.keepers
                        )
                    )
                    step += 2 * _PART_STEPS
        for name, clocks in spent.items():
            steps = _PART_STEPS * (1 if name == PROFILED else num_parts)
            for clock, ns in clocks.items():
                samples[name][clock].append(ns // steps)
    recorded.close()
    return {"samples": samples}


def measure_budget(
    folder: Path, *, rounds: int, steps: int, budgets: Sequence[str] = BUDGETS
) -> list[Figure]:
    """Measure recordings with budgets on two gloo ranks, in windows of `steps` steps."""
    return [
        figure
        for budget in budgets
        for figure in _measure_one(folder / budget.strip("%"), budget, rounds, steps)
    ]


def _measure_one(folder: Path, budget: str, rounds: int, steps: int) -> Iterator[Figure]:
    options = {"rounds": rounds, "steps": steps, "budget": budget}
    samples = combine([answer["samples"] for answer in run_ranks(__name__, options, folder)])
    what = (
        f"Measured: {rounds} rounds of {steps} steps a mode in one session, {NUM_RANKS} gloo "
        f"ranks, trainer preset tiny with {NUM_BLOCKS} blocks, modes in random order in each part "
        f"of {_PART_STEPS} steps; the profiler runs in one part of a round; median ratio to the "
        "bare window of the same round, bootstrap over rounds."
    )
    for label, times in (("CPU time", cpu_ns(samples)), ("wall time", wall_ns(samples))):
        bare, again, own, profiled = (
            times[mode] for mode in (BARE, BARE_AGAIN, RECORDED, PROFILED)
        )
        for name, mode, aim in (
            ("recorder", own, f"<= {budget}"),
            ("bare against bare", again, ""),
            ("torch.profiler", profiled, ""),
        ):
            ratio = median_ratio(mode, bare)
            yield overhead_figure(f"{budget}: {name}, {label}", ratio, aim=aim, how=what)
        yield times_figure(
            f"{budget}: profiler's overhead over the recorder's, {label}",
            overhead_ratio(profiled, own, bare),
            aim=">= 10 x" if budget == "1%" else "",
            how=what,
        )
    cost = measure_recorder_cost(open_run(folder / "run"))
    if cost is None or cost.ratio is None or cost.interval is None:
        return
    low, high = cost.interval
    yield Figure(
        name=f"{budget}: recorder, as its run states it",
        value=f"{100 * cost.ratio:.2f} %",
        interval=f"{100 * low:.2f} % to {100 * high:.2f} %",
        how=(
            f"Measured by the recorder: {cost.num_detailed} of {cost.num_steps} steps in detail; "
            f"notes of a plain step {100 * cost.plain_ratio:.2f} %, own threads "
            f"{100 * cost.threads_ratio:.2f} %."
        ),
        numbers={"ratio": cost.ratio, "low": low, "high": high},
    )


if __name__ == "__main__":
    on_each_rank(_measure_rank)
