"""Compare the forecast peak with the allocator's, for three models on emulated ranks.

The allocator's peaks of one step after warm-up are compared with the forecast of the same settings,
as the model of the caching allocator rounds and reserves it. The workspaces of cuBLAS, which stay
allocated after their first use, are measured and subtracted. On CPU, the storage tracker's peak is
compared with the forecast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_inspect import forecast_memory
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.memory.reserved import predict_reserved
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.forecasting import build
from instrumented_trainer.trainer import NoRecorder
from tests.gpu.outcome import Row, unavailable
from tests.gpu.setting import (
    EIGHT_NODES,
    NEEDS_CUDA,
    ONE_NODE,
    Setting,
    emulated_training,
    make_recorder,
)
from tests.studies.benchmarks.figures import Figure

_RESERVED_AIM = 0.02
_STEPS = 4
_WORLD_SIZES = {ONE_NODE: 8, EIGHT_NODES: 64}


@dataclass(frozen=True, slots=True)
class Peak:
    """Highest bytes of a step."""

    allocated: int
    reserved: int | None = None
    """None on CPU."""
    workspaces: int = 0
    """The part of both that the workspaces of cuBLAS take."""


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
            measured = _measure_peak(setting, model, emulation, folder / "recorded")
            yield from _rows(setting, f"{emulation}, forecast of {model.name}", predicted, measured)
    if not setting.is_cuda:
        yield unavailable("forecast of reserved memory", NEEDS_CUDA)


def _forecast(setting: Setting, model: Model, emulation: str, path: Path) -> Peak:
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
    if not setting.is_cuda:
        return Peak(_tracked_peak(path))
    prediction = predict_reserved(open_run(path), rank=0, compares_expandable=False)
    if prediction is None:
        raise RuntimeError(f"The forecast {path.name} has no allocation history.")
    return Peak(prediction.peak_allocated_bytes, prediction.peak_reserved_bytes)


def _tracked_peak(path: Path) -> int:
    peak = measure_memory(open_run(path)).peak_allocated_bytes
    if peak is None:
        raise RuntimeError(f"Nothing is known of the memory of {path.name}.")
    return peak


def _rows(setting: Setting, name: str, predicted: Peak, measured: Peak) -> Iterator[Row]:
    allocated = measured.allocated - measured.workspaces
    workspaces = format_bytes(measured.workspaces)
    counted = (
        f"the allocator's peak of a step on {setting.place}, less {workspaces} of workspaces"
        if setting.is_cuda
        else f"the storage tracker's peak of a step on {setting.place}"
    )
    yield setting.judge.exact(
        Figure(
            name=f"{name}: allocated",
            value=f"{predicted.allocated - allocated:+,d} bytes",
            interval=f"{format_bytes(predicted.allocated)} against {format_bytes(allocated)}",
            aim="equal",
            how=f"Forecast on fake tensors - {counted}.",
            numbers={
                "ratio": predicted.allocated / allocated - 1,
                "forecast_bytes": predicted.allocated,
                "peak_allocated_bytes": measured.allocated,
                "workspace_bytes": measured.workspaces,
            },
        ),
        holds=predicted.allocated == allocated,
    )
    if predicted.reserved is None or measured.reserved is None:
        return
    reserved = measured.reserved - measured.workspaces
    error = predicted.reserved / reserved - 1
    yield setting.judge.within(
        f"{name}: reserved",
        error,
        _RESERVED_AIM,
        interval=f"{format_bytes(predicted.reserved)} against {format_bytes(reserved)}",
        how=f"Forecast on fake tensors, with the allocator's model / {counted}, - 1.",
        numbers={
            "ratio": error,
            "forecast_bytes": predicted.reserved,
            "peak_reserved_bytes": measured.reserved,
        },
    )


def _measure_peak(setting: Setting, model: Model, emulation: str, path: Path) -> Peak:
    """The peaks of a step after warm-up."""
    with emulated_training(setting, emulation, **model.settings) as workload:
        if not setting.is_cuda:
            with make_recorder(workload, path, memory_steps=(1,)) as recorder:
                loop = workload.loop(recorder)
                for step in range(2):
                    loop.run_step(step)
            return Peak(_tracked_peak(path))
        loop = workload.loop(NoRecorder())
        for step in range(_STEPS):
            torch.cuda.reset_peak_memory_stats()
            loop.run_step(step)
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Peak(*peaks, _release_workspaces())


def _release_workspaces() -> int:
    """Release the workspaces of cuBLAS; returns their bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
