"""Measure what the recorder spends on lines that stop the host and on sizes of batches.

The cost is too small for pairs of windows: their noise is larger than the aim. So the methods that
do this work are timed where they run, in detailed steps of a training on two gloo ranks, with
caches as cold as there. Of a wrapped read, the time of torch's own method is taken off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fsdp_inspect import Recorder
from fsdp_inspect.recording.host_stops import StopCounter
from instrumented_trainer.runtime import Runtime
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import NUM_BLOCKS, Workload

READS = (0, 20)
"""Reads of a value in each step, besides those of the trainer."""
_LEAD_IN_STEPS = 20
_METHODS = ("note_inputs", "note_stop", "end_step")
_AIM_RATIO = 0.002


class _Timer:
    """The time inside the counter in the step that runs, ns."""

    def __init__(self) -> None:
        self.spent_ns = self.inner_ns = 0
        self._depth = 0
        self.clock_ns = self._time_nothing()

    def time(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose outermost calls are timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start_ns = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent_ns += time.perf_counter_ns() - start_ns - self.clock_ns

        return timed

    def leave_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time does not count if a timed function calls it."""

        @functools.wraps(call)
        def inner(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                if self._depth == 1:
                    self.spent_ns -= time.perf_counter_ns() - start_ns + self.clock_ns

        return inner

    def _time_nothing(self) -> int:
        self.clock_ns, times = 0, []
        nothing = self.time(lambda: None)
        for _ in range(1000):
            self.spent_ns = 0
            nothing()
            times.append(self.spent_ns)
        self.spent_ns = 0
        return round(median(times))


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    timer = _Timer()
    for name in _METHODS:
        setattr(StopCounter, name, timer.time(getattr(StopCounter, name)))
    # The wraps have no public switch, because only this measurement needs one.
    wrap = StopCounter._wrap

    def wrap_timed(self: StopCounter, original: Callable[..., Any], *rest: Any) -> Any:
        return timer.time(wrap(self, timer.leave_out(original), *rest))

    StopCounter._wrap = wrap_timed  # type: ignore[method-assign]
    workload = Workload.build(runtime)
    recorder = Recorder(
        workload.model,
        optimizer=workload.optimizer,
        path=folder / "run",
        memory_steps=(),
        overhead=None,
        print_verdict=False,
    )
    loop, value = workload.loop(recorder), torch.ones(())
    found: dict[str, list[tuple[int, int]]] = {}
    step = 0
    for reads in READS:
        rows = found.setdefault(str(reads), [])
        for _ in range(_LEAD_IN_STEPS + options["steps"]):
            timer.spent_ns, cpu_ns = 0, time.thread_time_ns()
            loop.train_step(step)
            for _ in range(reads):
                value.item()
            rows.append((timer.spent_ns, time.thread_time_ns() - cpu_ns))
            step += 1
        del rows[:_LEAD_IN_STEPS]
    recorder.close()
    return found


def measure_stops(folder: Path, *, steps: int) -> list[Figure]:
    """Measure the counter in `steps` detailed steps, without and with further reads."""
    answers = run_ranks(__name__, {"steps": steps}, folder)
    figures = []
    for reads in READS:
        rows = [row for answer in answers for row in answer[str(reads)]]
        spent_ns, cpu_ns = (median(column) for column in zip(*rows, strict=True))
        figures.append(
            Figure(
                name=f"lines that stop the host, {reads} further reads in each step",
                value=f"{100 * spent_ns / cpu_ns:.3f} % of CPU time",
                interval="",
                aim=f"<= {100 * _AIM_RATIO} %",
                how=(
                    f"Measured: {spent_ns / 1000:.1f} µs of a detailed step of "
                    f"{cpu_ns / 1e6:.1f} ms of CPU time of the training thread, medians of {steps} "
                    f"steps on {NUM_RANKS} gloo ranks, trainer preset tiny with {NUM_BLOCKS} "
                    "blocks; timed where it runs, without torch's own reads. Plain steps cost less."
                ),
                numbers={"ns": spent_ns, "step_ns": cpu_ns},
            )
        )
    return figures


if __name__ == "__main__":
    on_each_rank(_measure_rank)
