"""Measure the recorder's overhead: one model bare, recorded and profiled, alternating.

Each round runs every mode once, in a random order that is the same on all ranks. `bare again` is
the control, which shows the noise of the method. A window has a few steps of the trainer's loop,
after two steps that are not timed. Recording is on in its own windows only. Hooks are set before
the window. The window contains the steps, the background threads and one flush of all recorded data
to disk (the recorder flushes once a second by default). `torch.profiler` starts before its window
and stops after it. Nothing is exported, so only its collection is measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fsdp_inspect import Recorder
from fsdp_inspect.recording.devices import DeviceSampler
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.runtime import Runtime
from instrumented_trainer.trainer import TrainingLoop
from tests.benchmarks.figures import Figure, overhead_figure, times_figure
from tests.benchmarks.hot_path import HotPathCost
from tests.benchmarks.pairs import median_ratio, overhead_ratio
from tests.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.benchmarks.workload import Workload

BARE, BARE_AGAIN, RECORDED, PROFILED = "bare", "bare_again", "recorded", "profiled"
WARMUP_ROUNDS = 3
_LEAD_IN_STEPS = 2
"""Untimed steps at the start of each mode, because Python specialises its bytecode again after
patching."""
_DEVICE_INTERVAL_S = 0.5
"""The default of the recorder."""

Samples = dict[str, dict[str, list[int]]]
"""Mode to clock (`cpu`, `wall`) to the ns of each round."""


class Mode(Protocol):
    """One way to run steps."""

    @property
    def loop(self) -> TrainingLoop:
        """The training loop."""
        ...

    def around(self) -> Any:
        """A context outside of the window."""
        ...

    def finish(self) -> None:
        """Work that belongs into the window after its last step."""
        ...


@dataclass(frozen=True, slots=True)
class Bare:
    """Runs steps without any tool."""

    loop: TrainingLoop

    @contextmanager
    def around(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Profiled:
    """Runs steps under `torch.profiler` with the given activities, without shapes."""

    loop: TrainingLoop
    activities: Sequence[ProfilerActivity] = (ProfilerActivity.CPU,)

    @contextmanager
    def around(self) -> Iterator[None]:
        with profile(activities=self.activities, record_shapes=False):
            yield

    def finish(self) -> None:
        return


class Recorded:
    """Runs steps under the recorder, whose hooks are off between windows."""

    def __init__(self, workload: Workload, folder: Path, cuda_index: int | None = None) -> None:
        self.recorder = Recorder(
            workload.model,
            optimizer=workload.optimizer,
            path=folder,
            memory_steps=(),
            device_interval_s=0,  # the sampler would run in every mode; see `around`
            print_verdict=False,
        )
        self.loop = workload.loop(self.recorder)
        self._cuda_index = cuda_index
        # The recorder has no public switch, because only this comparison needs one.
        attachment = self.recorder._attachment
        assert attachment is not None
        self._instruments = attachment._instruments
        self._writer = attachment._writer
        self._instruments.detach()

    @contextmanager
    def around(self) -> Iterator[None]:
        sampler = DeviceSampler(
            self._writer.devices.append, _DEVICE_INTERVAL_S, cuda_index=self._cuda_index
        )
        sampler.start()
        self._instruments.attach()
        yield
        self._instruments.detach()
        sampler.stop()

    def finish(self) -> None:
        """Wait until all data is on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """End the recording.

        Raises:
            RuntimeError: The recording stopped or lost data, so its windows would be too cheap.
        """
        problems = self.recorder.problems
        if problems or not self.recorder.is_recording:
            raise RuntimeError(f"The recorder did not record all of it: {problems}")
        self.recorder.close()


def run_rounds(modes: dict[str, Mode], *, rounds: int, steps: int, device: torch.device) -> Samples:
    """Measure each mode once a round, each time `steps` steps.

    Returns:
        CPU time of the whole process and wall time of each window, ns, without warm-up rounds.
    """
    order = random.Random(0)  # equal on every rank
    names = list(modes)
    taken = _LEAD_IN_STEPS + steps
    samples: Samples = {name: {"cpu": [], "wall": []} for name in names}
    step = 0
    for number in range(WARMUP_ROUNDS + rounds):
        for name in order.sample(names, len(names)):
            cpu_ns, wall_ns = _window(modes[name], range(step, step + taken), device)
            step += taken
            if number >= WARMUP_ROUNDS:
                samples[name]["cpu"].append(cpu_ns)
                samples[name]["wall"].append(wall_ns)
    return samples


def _window(mode: Mode, steps: range, device: torch.device) -> tuple[int, int]:
    with mode.around():
        for step in steps[:_LEAD_IN_STEPS]:
            mode.loop.run_step(step)
        mode.finish()
        _settle(device)
        dist.barrier()
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        for step in steps[_LEAD_IN_STEPS:]:
            mode.loop.run_step(step)
        _settle(device)
        mode.finish()
        return time.process_time_ns() - cpu, time.perf_counter_ns() - wall


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_rank(runtime: Runtime, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    workload = Workload.build(runtime)
    recorded = Recorded(workload, folder / "run")
    bare = workload.loop()
    modes: dict[str, Mode] = {
        BARE: Bare(bare),
        BARE_AGAIN: Bare(bare),
        RECORDED: recorded,
        PROFILED: Profiled(bare),
    }
    samples = run_rounds(
        modes, rounds=options["rounds"], steps=options["steps"], device=runtime.device
    )
    recorded.close()
    return {"samples": samples}


def measure_overhead(
    folder: Path, hot_path: HotPathCost, *, rounds: int, steps: int
) -> list[Figure]:
    """Measure the cost of recording on two gloo ranks, and that of torch.profiler."""
    answers = run_ranks(__name__, {"rounds": rounds, "steps": steps}, folder)
    samples = combine([answer["samples"] for answer in answers])
    run = open_run(folder / "run")
    events = len(run.events(0)) / run.ranks[0].num_steps
    what = (
        f"Measured: {rounds} rounds of {steps} steps a mode in one session, {NUM_RANKS} gloo "
        "ranks, trainer preset tiny with 8 blocks, modes in random order within a round; median "
        "ratio to the bare window of the same round, bootstrap over rounds."
    )
    return [
        *compare_modes(samples, what),
        _arithmetic_figure(samples, hot_path, events_per_step=events, steps=steps),
    ]


def compare_modes(samples: Samples, what: str) -> list[Figure]:
    """Compare recorder and profiler with the bare step, by CPU and wall time, with the control."""
    figures = []
    for clock, label, meaning in (
        ("cpu", "CPU time", "CPU time is that of all threads of all ranks."),
        ("wall", "wall time", "Wall time is the mean over ranks."),
    ):
        bare, again, recorded, profiled = (
            samples[mode][clock] for mode in (BARE, BARE_AGAIN, RECORDED, PROFILED)
        )
        how = f"{what} {meaning}"
        is_cpu = clock == "cpu"
        figures += [
            overhead_figure(
                f"recorder, {label}",
                median_ratio(recorded, bare),
                aim="< 1 %" if is_cpu else "",
                how=how,
            ),
            overhead_figure(f"bare against bare, {label}", median_ratio(again, bare), how=how),
            overhead_figure(f"torch.profiler, {label}", median_ratio(profiled, bare), how=how),
            times_figure(
                f"profiler's overhead over the recorder's, {label}",
                overhead_ratio(profiled, recorded, bare),
                aim=">= 10 x" if is_cpu else "",
                how=how,
            ),
        ]
    return figures


def combine(ranks: Sequence[Samples]) -> Samples:
    """The sums over ranks, by round."""
    return {
        mode: {
            clock: [sum(values) for values in zip(*(r[mode][clock] for r in ranks), strict=True)]
            for clock in ranks[0][mode]
        }
        for mode in ranks[0]
    }


def _arithmetic_figure(
    samples: Samples, cost: HotPathCost, *, events_per_step: float, steps: int
) -> Figure:
    """Estimate events times their cost, relative to the bare step, without the windows' noise."""
    cpu, wall = (sorted(samples[BARE][clock]) for clock in ("cpu", "wall"))
    step_cpu_ns = cpu[len(cpu) // 2] / steps / NUM_RANKS
    step_wall_ns = wall[len(wall) // 2] / steps / NUM_RANKS
    recording_ns = events_per_step * (cost.hot_path_ns + cost.encoding_ns)
    sampling_ns = step_wall_ns / 1e9 / _DEVICE_INTERVAL_S * cost.device_sample_ns
    share = (recording_ns + sampling_ns) / step_cpu_ns
    return Figure(
        name="recorder, CPU time by arithmetic",
        value=f"{100 * share:.2f} %",
        aim="< 1 %",
        how=(
            f"Derived: {events_per_step:.0f} events a step x the cost of an event (below), and "
            f"{1 / _DEVICE_INTERVAL_S:.0f} device samples a second of "
            f"{cost.device_sample_ns / 1e3:.0f} µs, over the {step_cpu_ns / 1e6:.1f} ms CPU time "
            "of the median bare step."
        ),
        numbers={
            "share": share,
            "events_per_step": events_per_step,
            "step_cpu_ns": step_cpu_ns,
            "device_sample_ns": cost.device_sample_ns,
        },
    )


if __name__ == "__main__":
    on_each_rank(_measure_rank)
