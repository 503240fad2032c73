"""Measure the recorder's overhead: one model bare, recorded and profiled, alternating.

Each round runs every mode once, in a random order that is the same on all ranks. `bare again` is
the control, which shows the noise of the method. A window has a few steps of the trainer's loop,
after two steps that are not timed. Recording is on in its own windows only. Hooks are set before
the window. The window contains the steps, the background threads and one flush of all recorded data
to disk (the recorder flushes once a second by default). `torch.profiler` starts before its window
and stops after it. Nothing is exported, so only its collection is measured.

[Note: CPU time by thread]
The clock of the whole process is too noisy: the threads of gloo vary by more than the recorder
costs. So the CPU time is the sum of three parts. The training thread is compared between two
windows of a round. The recorder's threads, and its process that keeps the black box, count in full
in the recorded windows, and not in the others, although they run there too. The other threads count
as in the bare window of the round; a row of the table compares them.
"""

from __future__ import annotations

import random
import threading
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
from tests.studies.benchmarks.figures import Figure, overhead_figure, times_figure
from tests.studies.benchmarks.hot_path import HotPathCost
from tests.studies.benchmarks.pairs import median_ratio, overhead_ratio
from tests.studies.benchmarks.ranks import NUM_RANKS, on_each_rank, run_ranks
from tests.studies.benchmarks.workload import Workload

BARE, BARE_AGAIN, RECORDED, PROFILED = "bare", "bare_again", "recorded", "profiled"
WARMUP_ROUNDS = 3
_LEAD_IN_STEPS = 2
"""Untimed steps at the start of each mode, because Python specialises its bytecode again after
patching."""
_DEVICE_INTERVAL_S = 0.5
"""The default of the recorder."""

_TRAINING, _OWN, _OTHERS, _WALL = "training", "own", "others", "wall"
"""The clocks of a window: the training thread, the threads of the recorder, all other threads of
the process, and the wall. On CUDA, autograd has threads, so `training` contains the others."""
_THREADS = "fsdp-inspect"
"""How the names of the recorder's threads begin."""

_CPU_MEANING = (
    "CPU time is that of all ranks: the training thread, compared with the bare window of the "
    "round, and in full the recorder's threads and the process that keeps the black box. Other "
    "threads count as in the bare window."
)

Samples = dict[str, dict[str, list[int]]]
"""Mode to clock to the ns of each round."""


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

    def __init__(
        self,
        workload: Workload,
        folder: Path,
        cuda_index: int | None = None,
        overhead: str | None = None,
    ) -> None:
        """Without `overhead`, each step is recorded in detail."""
        self.recorder = Recorder(
            workload.model,
            optimizer=workload.optimizer,
            path=folder,
            memory_steps=(),
            device_interval_s=0,  # the sampler would run in every mode; see `around`
            overhead=overhead,
            hang_after_s=3600.0,  # it sees nothing in the windows of the other modes
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

    @property
    def keepers(self) -> list[int]:
        """The process that keeps the black box, by id; empty if this system has none."""
        box = self._instruments._session.black_box
        keeper = None if box is None else box._keeper
        return [] if keeper is None else [keeper.pid]

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
        The times of each window by clock, ns, without warm-up rounds.
    """
    keepers = [pid for mode in modes.values() if isinstance(mode, Recorded) for pid in mode.keepers]
    order = random.Random(0)  # equal on every rank
    names = list(modes)
    taken = _LEAD_IN_STEPS + steps
    samples, step = empty_samples(names), 0
    for number in range(WARMUP_ROUNDS + rounds):
        for name in order.sample(names, len(names)):
            spent = measure_window(modes[name], step, steps, device, keepers)
            step += taken
            if number >= WARMUP_ROUNDS:
                for clock, ns in spent.items():
                    samples[name][clock].append(ns)
    return samples


def empty_samples(modes: Sequence[str]) -> Samples:
    """No window yet of each mode."""
    return {name: {clock: [] for clock in (_TRAINING, _OWN, _OTHERS, _WALL)} for name in modes}


def measure_window(
    mode: Mode, first: int, num_steps: int, device: torch.device, keepers: Sequence[int]
) -> dict[str, int]:
    """The times of a window of steps from `first` on, after untimed ones; ns, by clock."""
    steps = range(first, first + _LEAD_IN_STEPS + num_steps)
    with mode.around():
        for step in steps[:_LEAD_IN_STEPS]:
            mode.loop.run_step(step)
        mode.finish()
        _settle(device)
        dist.barrier()
        clocks = Clocks(device, keepers)
        for step in steps[_LEAD_IN_STEPS:]:
            mode.loop.run_step(step)
        _settle(device)
        mode.finish()
        return clocks.read()


class Clocks:
    """The clocks of one window, from its start on; see [Note: CPU time by thread]."""

    def __init__(self, device: torch.device, keepers: Sequence[int]) -> None:
        """Start the clocks; `keepers` are the processes that keep a black box, by id."""
        self._is_cuda = device.type == "cuda"
        self._threads = [
            time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.name.startswith(_THREADS) and thread.ident is not None
        ]
        self._keepers = [Path(f"/proc/{pid}/schedstat") for pid in keepers]
        self._start = self._now()

    def read(self) -> dict[str, int]:
        """The ns since the start, by clock."""
        training, own, process, wall = (
            now - start for now, start in zip(self._now(), self._start, strict=True)
        )
        return {_TRAINING: training, _OWN: own, _OTHERS: process - training, _WALL: wall}

    def _now(self) -> tuple[int, int, int, int]:
        threads_ns = sum(map(time.clock_gettime_ns, self._threads))
        keepers_ns = sum(int(each.read_text().split()[0]) for each in self._keepers)
        process_ns = time.process_time_ns() - threads_ns
        training_ns = process_ns if self._is_cuda else time.thread_time_ns()
        return training_ns, threads_ns + keepers_ns, process_ns, time.perf_counter_ns()


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
        "ranks, trainer preset tiny with 8 blocks, modes in random order within a round; hooks are "
        f"set and {_LEAD_IN_STEPS} steps run untimed before each window; median ratio to the bare "
        "window of the same round, bootstrap over rounds."
    )
    return [
        *compare_modes(samples, what),
        _arithmetic_figure(samples, hot_path, events_per_step=events, steps=steps),
    ]


def compare_modes(samples: Samples, what: str) -> list[Figure]:
    """Compare recorder and profiler with the bare step, by CPU and wall time, with the control."""
    figures = []
    for label, times, meaning in (
        ("CPU time", cpu_ns(samples), _CPU_MEANING),
        ("wall time", wall_ns(samples), "Wall time is the mean over ranks."),
    ):
        is_cpu = label == "CPU time"
        bare, again, recorded, profiled = (
            times[mode] for mode in (BARE, BARE_AGAIN, RECORDED, PROFILED)
        )
        how = f"{what} {meaning}"
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
    return [*figures, *_parts_of_cpu(samples, what)]


def cpu_ns(samples: Samples) -> dict[str, list[int]]:
    """The CPU time of each window by mode; see [Note: CPU time by thread]."""
    others = samples[BARE][_OTHERS]
    return {
        mode: [
            training + other + (own if mode == RECORDED else 0)
            for training, other, own in zip(clocks[_TRAINING], others, clocks[_OWN], strict=True)
        ]
        for mode, clocks in samples.items()
    }


def wall_ns(samples: Samples) -> dict[str, list[int]]:
    """The wall time of each window by mode."""
    return {mode: clocks[_WALL] for mode, clocks in samples.items()}


def _parts_of_cpu(samples: Samples, what: str) -> list[Figure]:
    """The parts of the recorder's CPU time, each relative to the CPU time of the bare window."""
    bare = cpu_ns(samples)[BARE]
    figures = []
    parts = (_TRAINING, "training thread"), (_OWN, "own threads"), (_OTHERS, "other threads")
    for clock, label in parts:
        before = [0] * len(bare) if clock == _OWN else samples[BARE][clock]
        with_part = [
            whole + recorded - reference
            for whole, recorded, reference in zip(
                bare, samples[RECORDED][clock], before, strict=True
            )
        ]
        figures.append(
            overhead_figure(
                f"recorder, part of CPU time: {label}",
                median_ratio(with_part, bare),
                how=f"{what} The part of this clock, relative to the CPU time of the bare window.",
            )
        )
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
    cpu, wall = sorted(cpu_ns(samples)[BARE]), sorted(samples[BARE][_WALL])
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
