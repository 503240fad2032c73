"""Measure the recorder's overhead on a GPU: bare, recorded and profiled windows, alternating.

The rounds are those of `tests.studies.benchmarks.overhead`. A few discarded rounds show how many
rounds fit into the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from tests.gpu.outcome import Row, shown
from tests.gpu.setting import ONE_NODE, Setting, emulated_training
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.overhead import (
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

_MODELS: dict[str, dict[str, Any]] = {
    "GPU-bound": {},
    "host-bound": {"preset": "tiny", "num_layers": 16, "seq_len": 16, "batch_size": 1},
}
"""Settings beyond `Setting.model`. Kernels of the second model are shorter than their launch."""
_WALL_AIMS = {
    "recorder, wall time": "<= 0.5 %",
    "profiler's overhead over the recorder's, wall time": ">= 10 x",
}
_MOST_RATIO = {"< 1 %": 1.01, "<= 0.5 %": 1.005}
_STEPS = 3
_PILOT_ROUNDS = 2
_FEWEST_ROUNDS = 100
_MOST_ROUNDS = 300
_TIME_S = 120.0
_REST_S = 60.0
"""The part of a step's limit for starting, discarded rounds and the bootstrap."""


def measure(setting: Setting) -> Iterator[Row]:
    """Measure wall and CPU time of recorder and profiler, in pairs, on two models."""
    for name, settings in _MODELS.items():
        yield from _measure_model(setting, name, settings)


def _measure_model(setting: Setting, name: str, settings: dict[str, Any]) -> Iterator[Row]:
    with emulated_training(setting, ONE_NODE, **settings) as workload:
        device = workload.prepared.runtime.device
        index = device.index if setting.is_cuda else None
        recorded = Recorded(workload, setting.scratch / name, index)
        bare = workload.loop()
        modes: dict[str, Mode] = {
            BARE: Bare(bare),
            BARE_AGAIN: Bare(bare),
            RECORDED: recorded,
            PROFILED: Profiled(bare, _activities(setting)),
        }
        rounds = 2 if setting.quick else _rounds_that_fit(setting, modes, device)
        samples = run_rounds(modes, rounds=rounds, steps=_STEPS, device=device)
        recorded.close()
    how = (
        f"Measured: {name} model, {rounds} rounds of {_STEPS} steps a mode in one process on "
        f"{setting.place}, {ONE_NODE} emulated, modes in random order within a round; median ratio "
        "to the bare window of the same round, bootstrap over rounds. On a GPU a thread that waits "
        "for the device spins: that is CPU time too."
    )
    yield _rounds_row(setting, name, rounds)
    for figure in compare_modes(samples, how):
        yield _row(setting, name, figure)


def _activities(setting: Setting) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_cuda else [])]


def _rounds_that_fit(setting: Setting, modes: dict[str, Mode], device: torch.device) -> int:
    start = time.perf_counter()
    run_rounds(modes, rounds=_PILOT_ROUNDS, steps=_STEPS, device=device)
    each_s = (time.perf_counter() - start) / (WARMUP_ROUNDS + _PILOT_ROUNDS)
    time_s = min(_TIME_S, setting.limit_s - _REST_S) / len(_MODELS)
    return max(_PILOT_ROUNDS, min(_MOST_ROUNDS, int(time_s / each_s) - WARMUP_ROUNDS))


def _rounds_row(setting: Setting, name: str, rounds: int) -> Row:
    return setting.judge.aimed(
        Figure(
            name=f"{name}: rounds of the overhead comparison",
            value=str(rounds),
            aim=f">= {_FEWEST_ROUNDS}",
            how=(
                f"As many as fit into half of {_TIME_S:.0f} s or of the rest of the call, to "
                f"{_MOST_ROUNDS}."
            ),
            numbers={"rounds": rounds},
        ),
        holds=rounds >= _FEWEST_ROUNDS,
    )


def _row(setting: Setting, name: str, figure: Figure) -> Row:
    """The row of a figure. An aim is missed if the whole interval misses it."""
    named = replace(
        figure, name=f"{name}: {figure.name}", aim=_WALL_AIMS.get(figure.name, figure.aim)
    )
    if named.aim in _MOST_RATIO:
        holds = named.numbers["ratio_low"] <= _MOST_RATIO[named.aim]
        return setting.judge.aimed(named, holds=holds)
    if named.aim == ">= 10 x":
        return setting.judge.aimed(named, holds=named.numbers["times_high"] >= 10)
    return shown(named)
