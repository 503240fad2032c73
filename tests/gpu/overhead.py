"""Measure the recorder's overhead on a GPU: bare, recorded and profiled windows, alternating.

The rounds are those of `tests.benchmarks.overhead`. A few discarded rounds show how many rounds fit
into the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from tests.benchmarks.figures import Figure
from tests.benchmarks.overhead import (
    BARE,
    BARE_AGAIN,
    PROFILED,
    RECORDED,
    WARMUP_ROUNDS,
    Bare,
    Mode,
    Profiled,
    Recorded,
    compare_modes,
    run_rounds,
)
from tests.gpu.outcome import Row, shown
from tests.gpu.setting import ONE_NODE, Setting, emulated_training

_MODELS: dict[str, dict[str, Any]] = {
    "GPU-bound": {},
    "host-bound": {"preset": "tiny", "num_layers": 8, "seq_len": 16, "batch_size": 1},
}
"""Settings that replace those of `Setting.model`: kernels of milliseconds, and kernels that are
shorter than their launch."""
_STEPS = 3
_PILOT_ROUNDS = 2
_FEWEST_ROUNDS = 100
_MOST_ROUNDS = 300
_TIME_S = 80.0
_REST_S = 20.0
"""The part of a step's limit for starting, discarded rounds and the bootstrap."""


def measure(setting: Setting) -> Iterator[Row]:
    """Measure CPU and wall time of recorder and profiler, in pairs, for both models."""
    ends_s = time.monotonic() + setting.limit_s
    for place, (label, model) in enumerate(_MODELS.items()):
        left_s = (ends_s - time.monotonic()) / (len(_MODELS) - place)
        yield from _measure_model(setting, label, model, left_s)


def _measure_model(
    setting: Setting, label: str, model: dict[str, Any], limit_s: float
) -> Iterator[Row]:
    with emulated_training(setting, ONE_NODE, **model) as workload:
        device = workload.prepared.runtime.device
        index = device.index if setting.is_cuda else None
        folder = setting.scratch / label
        recorded = Recorded(workload, folder, index)
        bare = workload.loop()
        modes: dict[str, Mode] = {
            BARE: Bare(bare),
            BARE_AGAIN: Bare(bare),
            RECORDED: recorded,
            PROFILED: Profiled(bare, _activities(setting)),
        }
        rounds = 2 if setting.quick else _rounds_that_fit(limit_s, modes, device)
        samples = run_rounds(modes, rounds=rounds, steps=_STEPS, device=device)
        recorded.close()
    how = (
        f"Measured: {rounds} rounds of {_STEPS} steps a mode in one process on {setting.place}, a "
        f"{label} model, {ONE_NODE} emulated, modes in random order within a round; median ratio "
        "to the bare window of the same round, bootstrap over rounds. On a GPU a thread that waits "
        "for the device spins: that is CPU time too."
    )
    yield _rounds_row(setting, label, rounds)
    for figure in compare_modes(samples, how):
        yield _row(setting, replace(figure, name=f"{label}: {figure.name}"))


def _activities(setting: Setting) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_cuda else [])]


def _rounds_that_fit(limit_s: float, modes: dict[str, Mode], device: torch.device) -> int:
    start = time.perf_counter()
    run_rounds(modes, rounds=_PILOT_ROUNDS, steps=_STEPS, device=device)
    each_s = (time.perf_counter() - start) / (WARMUP_ROUNDS + _PILOT_ROUNDS)
    time_s = min(_TIME_S, limit_s - _REST_S)
    return max(_PILOT_ROUNDS, min(_MOST_ROUNDS, int(time_s / each_s) - WARMUP_ROUNDS))


def _rounds_row(setting: Setting, label: str, rounds: int) -> Row:
    return setting.judge.aimed(
        Figure(
            name=f"{label}: rounds of the overhead comparison",
            value=str(rounds),
            aim=f">= {_FEWEST_ROUNDS}",
            how=f"As many as fit into {_TIME_S:.0f} s or the rest of the call, to {_MOST_ROUNDS}.",
            numbers={"rounds": rounds},
        ),
        holds=rounds >= _FEWEST_ROUNDS,
    )


def _row(setting: Setting, figure: Figure) -> Row:
    """The row of a figure. An aim is missed if the whole interval misses it."""
    if figure.name.endswith(": recorder, wall time"):
        figure = replace(figure, aim="<= 0.5 %")
        return setting.judge.aimed(figure, holds=figure.numbers["ratio_low"] <= 1.005)
    if figure.aim == ">= 10 x":
        return setting.judge.aimed(figure, holds=figure.numbers["times_high"] >= 10)
    return shown(replace(figure, aim=""))
