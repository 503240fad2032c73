"""Measure what a plain step costs where the recorder runs: around collectives, and in the loop.

Windows of some steps (`budget`) have more noise than a plain step costs. So each call of a unit's
communication object is timed on the clock of the thread, without torch's own call of the process
group and the wait inside it. The same calls are timed without the recorder in windows that
alternate with those with it, and the difference of the means is its cost. Hooks of the loop have no
such pair, and count in full. What the recorder pushes out of the processor's caches, to the cost of
others, is not in this figure.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from fsdp_inspect.recording.attachment import Attachment
from fsdp_inspect.recording.overhead import DetailSchedule, OverheadControl
from instrumented_trainer.runtime import Runtime
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.overhead import BARE, RECORDED, Bare, Mode, Recorded
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import NUM_BLOCKS, Workload

_LEAD_IN_STEPS = 3
_FIRST_STEPS = 40
"""Steps before the first window. The first ones are detailed."""
_NUM_DETAILED = 12
_STEPS = 20
_KEPT = 0.95
"""The share of the shortest calls that is averaged: an interrupt of the system is no cost."""
_GATHER, _REDUCE, _LOOP, _STEP = "all-gather", "reduce-scatter", "loop", "step"
_now = time.thread_time_ns


class _Times:
    """The times of calls by mode and kind, ns of the thread."""

    def __init__(self) -> None:
        self.mode = ""
        """The mode of the window that runs; empty between windows."""
        self.of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._inner_ns = self._depth = 0

    def add(self, kind: str, ns: int) -> None:
        """Add one call."""
        if self.mode:
            self.of[self.mode][kind].append(ns)

    def leave_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time does not count in the call around it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            try:
                return call(*args, **kwargs)
            finally:
                self._inner_ns += _now() - start

        return timed

    def time(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its outermost calls are timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            self._inner_ns, self._depth = 0, 1
            start = _now()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth = 0
                self.add(kind, _now() - start - self._inner_ns)

        return timed


class _TimedComm:
    """A unit's communication object, with its calls timed."""

    def __init__(self, comm: Any, call: Callable[..., Any]) -> None:
        self._comm, self._call = comm, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


@contextmanager
def _timed(times: _Times) -> Iterator[None]:
    """Time the calls that torch makes on the units' communication objects, and the loop's hooks."""

    def with_timed(function: Callable[..., Any], kind: str, base: type) -> Callable[..., Any]:
        def wrap(value: Any) -> Any:
            is_comm = isinstance(value, base)
            return _TimedComm(value, times.time(kind, value.__call__)) if is_comm else value

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(wrap, args), **{name: wrap(each) for name, each in kwargs.items()})

        return call

    fsdp = _fsdp_param_group
    of_comms = (
        ("foreach_all_gather", _GATHER, fsdp.AllGather),
        ("foreach_reduce", _REDUCE, fsdp.ReduceScatter),
    )
    of_torch = ((ProcessGroup, ("_allgather_base", "_reduce_scatter_base")), (Work, ("wait",)))
    with ExitStack() as stack:

        def replace(target: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(target, name, value))

        for target, names in of_torch:
            for name in names:
                replace(target, name, times.leave_out(getattr(target, name)))
        for name in ("_guarded", "_optimizer_stepped"):
            replace(Attachment, name, times.time(_LOOP, getattr(Attachment, name)))
        for name, kind, base in of_comms:
            replace(fsdp, name, with_timed(getattr(fsdp, name), kind, base))
        replace(DetailSchedule, "is_detailed", lambda self, step: step < _NUM_DETAILED)
        yield


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    workload, times, step = Workload.build(runtime), _Times(), 0
    recorded = Recorded(workload, folder / "run", overhead="1%")
    modes: dict[str, Mode] = {BARE: Bare(workload.loop()), RECORDED: recorded}

    def run(mode: Mode, count: int) -> None:
        nonlocal step
        for _ in range(count):
            mode.loop.run_step(step)
            step += 1

    with _timed(times):
        with recorded.around():
            run(recorded, _FIRST_STEPS)
        for _ in range(options["rounds"]):
            for name, mode in modes.items():
                with mode.around():
                    run(mode, _LEAD_IN_STEPS)
                    dist.barrier()
                    times.mode, start = name, _now()
                    run(mode, _STEPS)
                    times.add(_STEP, _now() - start)
                    times.mode = ""
    session = recorded.recorder._attachment.session  # type: ignore[union-attr]
    with patch.object(OverheadControl, "choose", _choose_timed), recorded.around():
        run(recorded, _LEAD_IN_STEPS)
        before_ns = session.plain_ns
        run(recorded, _STEPS)
        stated_ns = session.plain_ns - before_ns
    recorded.close()
    return {"times": times.of, "stated_ns": stated_ns / _STEPS}


def _choose_timed(control: OverheadControl, step: int, *, needs_detail: bool) -> bool:
    """Choose a plain step, whose notes the recorder times, as it does once in each block."""
    control._session.times_plain = True
    return False


def measure_plain(folder: Path, *, rounds: int) -> list[Figure]:
    """Measure plain steps on two gloo ranks; in each round, `_STEPS` steps bare and recorded."""
    answers = run_ranks(__name__, {"rounds": rounds}, folder)
    num_steps = rounds * _STEPS * NUM_RANKS

    def mean_us(mode: str, kind: str) -> float:
        found = sorted(ns for answer in answers for ns in answer["times"][mode].get(kind, ()))
        return float(np.mean(found[: max(round(_KEPT * len(found)), 1)])) / 1e3 if found else 0.0

    def per_step(kind: str) -> float:
        calls = sum(len(answer["times"][RECORDED].get(kind, ())) for answer in answers)
        return calls / num_steps

    added = {kind: mean_us(RECORDED, kind) - mean_us(BARE, kind) for kind in (_GATHER, _REDUCE)}
    added[_LOOP] = mean_us(RECORDED, _LOOP)
    total_us = sum(us * per_step(kind) for kind, us in added.items())
    step_us = mean_us(BARE, _STEP) / _STEPS
    how = (
        f"Measured: {rounds} rounds of {_STEPS} steps a mode in one session, {NUM_RANKS} gloo "
        f"ranks, trainer preset tiny with {NUM_BLOCKS} blocks; CPU time of the training thread in "
        f"the call, without torch's call of the group; mean of the shortest {_KEPT:.0%}, recorded "
        "without bare."
    )
    figures = [
        Figure(
            name=f"plain step: {per_step(kind):.0f} calls, {kind}",
            value=f"{us:.1f} µs a call",
            how=how,
            numbers={"us": us, "calls_per_step": per_step(kind)},
        )
        for kind, us in added.items()
    ]
    stated_us = float(np.mean([answer["stated_ns"] for answer in answers])) / 1e3
    for name, us in (("all of it", total_us), ("what the run times of it", stated_us)):
        figures.append(
            Figure(
                name=f"plain step: {name}",
                value=f"{us / 1e3:.2f} ms, {us / step_us:.2%} of {step_us / 1e3:.0f} ms",
                how=f"{how} As a part of the training thread's CPU time in a bare step.",
                numbers={"us": us, "ratio": us / step_us},
            )
        )
    return figures


if __name__ == "__main__":
    on_each_rank(_measure_rank)
