"""Train the small decoder with ZeRO-3 and with FSDP2, and profile DeepSpeed's stages.

    torchrun --nproc-per-node 2 -m tests.studies.frameworks.zero_driver FOLDER

Rank 0 writes FOLDER/results.json: the gradients of the first step with both sharders, and for each
stage the collectives of the last step by kind and bytes, according to torch.profiler. Each rank
writes the trace of the last step of each stage.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_inspect import Recorder
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.parallelize import build_parallel_model
from instrumented_trainer.progress import make_reporter
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import NoRecorder, TrainingLoop, prepare
from tests.distributed.marked_waits import mark_waits
from tests.distributed.profiled_sharders import LATE_S
from tests.distributed.sharder_driver import SMALL, gradients_of
from tests.studies.frameworks.deepspeed_driver import config
from tests.studies.frameworks.small_models import llama, token_rows

NUM_STEPS = 5
KEPT_DISTANCE = 200_000
OF_ZERO_3 = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
}
"""The kind of each operator, and the index of its message."""
OF_ZERO_1_AND_2 = {
    "gloo:all_reduce": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
}
"""The profiler does not show the shapes of `c10d::allreduce_`, but those of gloo's own event. gloo
has the same event for a reduce-scatter, which these stages do not use."""


def first_gradients(sharding: str, runtime: Any) -> dict[str, list[float]]:
    run = prepare(check_settings({**SMALL, "sharding": sharding, "record": False}), runtime)
    model: Any = build_parallel_model(run.recipe, run.parallelism, runtime)
    optimizer: Any = None if sharding == "zero3" else make_optimizer(model, run.config)
    reporter = make_reporter(1, 0, is_first=False)
    TrainingLoop(run, model, optimizer, NoRecorder(), reporter).accumulate(0)
    if sharding != "zero3":
        return gradients_of(model)
    return {
        name: safe_get_full_grad(parameter).flatten().tolist()
        for name, parameter in model.module.named_parameters()
    }


def sizes_of(profiler: Any, stage: int) -> list[tuple[str, int]]:
    """Kind and bytes of each collective; all messages of DeepSpeed here are float32."""
    operators = OF_ZERO_3 if stage == 3 else OF_ZERO_1_AND_2
    found = []
    for event in profiler.events():
        if event.name in operators:
            kind, place = operators[event.name]
            found.append((kind, 4 * torch.Size(event.input_shapes[place]).numel()))
    return sorted(found)


def train_stage(stage: int, folder: Path, name: str = "", **settings: Any) -> list[tuple[str, int]]:
    """Train with marks around all waits; rank 0 is late in each step."""
    name = name or f"zero{stage}"
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = config(stage)
    given["zero_optimization"].update(settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    rows = torch.tensor(token_rows(2 * 2 * 2 * NUM_STEPS)).chunk(2)[dist.get_rank()]
    batches = rows.split(2)
    seen: list[tuple[str, int]] = []
    end_marks = mark_waits()
    with Recorder(engine, path=folder / name, print_verdict=False):
        for number in range(NUM_STEPS):
            with (
                profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
                record_function("ProfilerStep#0"),
            ):
                time.sleep(LATE_S if dist.get_rank() == 0 else 0.0)
                for batch in batches[2 * number : 2 * number + 2]:
                    loss = engine(input_ids=batch, labels=batch).loss
                    engine.backward(loss)
                    engine.step()
            seen = sizes_of(profiler, stage)
    end_marks()
    traces = folder / f"{name}-traces"
    traces.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(traces / f"rank{dist.get_rank()}.json"))
    return seen


def main(folder: Path) -> None:
    runtime = read_runtime()
    results: dict[str, Any] = {}
    with process_group(runtime):
        for sharding in ("fsdp2", "zero3"):
            results[sharding] = first_gradients(sharding, runtime)
        for stage in (1, 2, 3):
            results[f"stage {stage}"] = sorted(Counter(train_stage(stage, folder)).items())
        kept = train_stage(3, folder, "zero3-kept", stage3_max_reuse_distance=KEPT_DISTANCE)
        results["kept"] = sorted(Counter(kept).items())
    if runtime.is_first:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if dist.is_initialized():
        dist.destroy_process_group()
