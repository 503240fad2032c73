"""Measure the cost of single acts of the recorder and the emulation on the training thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fsdp_inspect.emulation.collectives import SpinningDevice
from fsdp_inspect.emulation.process import active_emulation
from fsdp_inspect.recording.clocks import CudaClock, CudaMark, HostClock, TorchCudaBackend
from fsdp_inspect.recording.memory import CudaAllocator
from tests.gpu.outcome import Row, shown, unavailable
from tests.gpu.setting import NEEDS_CUDA, ONE_NODE, Setting, emulated_training
from tests.studies.benchmarks.figures import Figure

_REPEATS = 2_000
_SPINS = 50
_SPIN_NS = 2_000_000
_PRODUCTS = 8
_BATCH = 50
"""The acts between two readings of the host's clock, and the number of marks that exist
together."""


def measure(setting: Setting) -> Iterator[Row]:
    """Measure the allocator, a mark, its reading, and a spin, after a model has trained."""
    repeats = 4 * _BATCH if setting.quick else _REPEATS
    with emulated_training(setting, ONE_NODE) as workload:
        loop = workload.loop()
        for step in range(3):
            loop.run_step(step)
        device = workload.prepared.runtime.device
        if not setting.is_cuda:
            yield _row(setting, "one mark of the host's clock", HostClock().mark, repeats)
            yield unavailable("cost of one allocator reading", NEEDS_CUDA)
            return
        yield _row(setting, "one allocator reading", CudaAllocator(device).read, repeats)
        yield from _clock_rows(setting, CudaClock(TorchCudaBackend(device)), repeats)
        emulation = active_emulation()
        assert emulation is not None
        spinning = emulation.spinning_device(device)
        stream = spinning.current_stream()
        yield _spin_row(setting, spinning, stream, emulation.notes)
        yield _row(
            setting, "issuing one emulated collective", lambda: spinning.spin(0, stream), repeats
        )


def _clock_rows(setting: Setting, clock: CudaClock, repeats: int) -> Iterator[Row]:
    marks: list[CudaMark] = []
    taking: list[float] = []
    reading: list[float] = []
    for _ in range(repeats // _BATCH):
        marks.clear()
        taking.append(_time_ns(lambda: marks.append(clock.mark())))
        clock.advance()
        torch.cuda.synchronize()
        reading.append(_time_ns(partial(_read_next, clock, iter(marks))))
    yield _costs_row(setting, "one mark on a stream", taking)
    yield _costs_row(setting, "reading one mark", reading)


def _spin_row(setting: Setting, spinning: SpinningDevice, stream: Any, notes: list[str]) -> Row:
    """The duration of spins while matrix products on another stream lower the clock."""
    busy = spinning.new_stream()
    matrix = torch.ones(8192, 8192, dtype=torch.bfloat16, device=busy.device)
    torch.cuda.synchronize()
    errors = []
    for _ in range(_SPINS):
        with torch.cuda.stream(busy):
            for _ in range(_PRODUCTS):
                matrix @ matrix
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        spinning.spin(_SPIN_NS, stream)
        end.record(stream)
        end.synchronize()
        errors.append(start.elapsed_time(end) * 1e6 / _SPIN_NS - 1)
    torch.cuda.synchronize()
    middle = statistics.median(errors)
    return setting.judge.within(
        "error of emulated transfers on a busy GPU",
        middle,
        0.03,
        interval=f"{100 * min(errors):+.2f} % to {100 * max(errors):+.2f} %",
        how=(
            f"Measured: {_SPINS} spins of {_SPIN_NS / 1e6:g} ms on {setting.place} beside "
            f"matrix products on another stream, by events around them; median and range. "
            f"{' '.join(notes) or 'Timed by the timer of the GPU.'}"
        ),
        numbers={"median_ratio": middle, "lowest": min(errors), "highest": max(errors)},
    )


def _read_next(clock: CudaClock, marks: Iterator[CudaMark]) -> None:
    clock.read(next(marks))


def _row(setting: Setting, what: str, act: Callable[[], object], repeats: int) -> Row:
    return _costs_row(setting, what, [_time_ns(act) for _ in range(repeats // _BATCH)])


def _time_ns(act: Callable[[], object]) -> float:
    """The time of one act, as the mean over a batch."""
    start = time.perf_counter_ns()
    for _ in range(_BATCH):
        act()
    return (time.perf_counter_ns() - start) / _BATCH


def _costs_row(setting: Setting, what: str, costs_ns: list[float]) -> Row:
    middle = statistics.median(costs_ns)
    return shown(
        Figure(
            name=f"cost of {what}",
            value=f"{middle / 1e3:.2f} µs",
            interval=f"{min(costs_ns) / 1e3:.2f} to {max(costs_ns) / 1e3:.2f} µs",
            how=(
                f"Measured: host time on {setting.place}, median and range over "
                f"{len(costs_ns)} batches of {_BATCH}, behind three steps of training."
            ),
            numbers={"median_ns": middle},
        )
    )
