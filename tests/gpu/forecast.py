"""Compare the forecast peak with the allocator's, for three models on emulated ranks.

The allocator's peak of one step after warm-up is compared with the forecast of the same settings.
Only the allocator's peak contains its rounding and the workspace of kernels (cuBLAS). The
difference is the error. Reserved memory beyond the peak is the allowance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_inspect import forecast_memory
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.forecasting import build
from instrumented_trainer.trainer import NoRecorder
from tests.benchmarks.figures import Figure
from tests.gpu.outcome import Row, unavailable
from tests.gpu.setting import (
    EIGHT_NODES,
    NEEDS_CUDA,
    ONE_NODE,
    Setting,
    emulated_training,
    make_recorder,
)

_AIM = 0.03
_STEPS = 4
_WORLD_SIZES = {ONE_NODE: 8, EIGHT_NODES: 64}


@dataclass(frozen=True, slots=True)
class Model:
    """A model as settings of the trainer."""

    name: str
    settings: dict[str, Any]


MODELS = (
    Model("llama-1b", {"preset": "llama-1b", "batch_size": 1}),
    Model(
        "llama-8b, 8 blocks, selective checkpointing",
        {"preset": "llama-8b", "num_layers": 8, "batch_size": 1, "checkpointing": "selective"},
    ),
    Model(
        "llama-8b, 4 blocks, 2 microbatches",
        {"preset": "llama-8b", "num_layers": 4, "seq_len": 4096, "microbatches": 2},
    ),
)
_QUICK = Model("tiny, 4 blocks", {"preset": "tiny", "num_layers": 4, "batch_size": 2})


def measure(setting: Setting) -> Iterator[Row]:
    """Measure each model on 8 and on 64 ranks."""
    models = (_QUICK,) if setting.quick else MODELS
    emulations = (ONE_NODE,) if setting.quick else (ONE_NODE, EIGHT_NODES)
    for number, model in enumerate(models):
        for emulation in emulations:
            folder = setting.scratch / f"{number}-{_WORLD_SIZES[emulation]}"
            folder.mkdir()
            predicted = _forecast(setting, model, emulation, folder / "forecast")
            yield _row(setting, model, emulation, predicted, folder)
    if not setting.is_cuda:
        yield unavailable("allowance beyond the forecast", NEEDS_CUDA)


def _forecast(setting: Setting, model: Model, emulation: str, path: Path) -> int:
    forecast_memory(
        build,
        path,
        world_size=_WORLD_SIZES[emulation],
        device_type=setting.device,
        settings={
            **setting.model,
            **model.settings,
            "param_dtype": "bfloat16" if setting.is_cuda else "float32",
        },
    )
    return _peak(path)


def _peak(path: Path) -> int:
    peak = measure_memory(open_run(path)).peak_allocated_bytes
    if peak is None:
        raise RuntimeError(f"Nothing is known of the memory of {path.name}.")
    return peak


def _row(setting: Setting, model: Model, emulation: str, predicted: int, folder: Path) -> Row:
    measured, reserved = _measure_peak(setting, model, emulation, folder / "recorded")
    error = predicted / measured - 1
    beyond = "" if reserved is None else f", {format_bytes(reserved)} reserved"
    counted = "the allocator's peak" if setting.is_cuda else "the storage tracker's peak"
    figure = Figure(
        name=f"{emulation}, forecast of {model.name}",
        value=f"{100 * error:+.2f} %",
        interval=f"{format_bytes(predicted)} against {format_bytes(measured)}{beyond}",
        aim=f"within {100 * _AIM:.0f} %",
        how=f"Forecast on fake tensors / {counted} of a step on {setting.place}, - 1.",
        numbers={
            "ratio": error,
            "forecast_bytes": predicted,
            "peak_allocated_bytes": measured,
            "peak_reserved_bytes": -1 if reserved is None else reserved,
        },
    )
    if not setting.is_cuda:
        return setting.judge.exact(figure, holds=predicted == measured)
    return setting.judge.aimed(figure, holds=abs(error) < _AIM)


def _measure_peak(
    setting: Setting, model: Model, emulation: str, path: Path
) -> tuple[int, int | None]:
    """Allocated bytes at the peak of a step after warm-up, and reserved bytes."""
    with emulated_training(setting, emulation, **model.settings) as workload:
        if not setting.is_cuda:
            with make_recorder(workload, path, memory_steps=(1,)) as recorder:
                loop = workload.loop(recorder)
                for step in range(2):
                    loop.run_step(step)
            return _peak(path), None
        loop = workload.loop(NoRecorder())
        for step in range(_STEPS):
            torch.cuda.reset_peak_memory_stats()
            loop.run_step(step)
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
