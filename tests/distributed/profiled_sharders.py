"""Record ranks with our recorder and torch.profiler together, for each sharder and each mesh.

    torchrun ... -m tests.distributed.profiled_sharders FOLDER CASE ...

For each case the recording goes to FOLDER/<case>/run and the traces to FOLDER/<case>/traces.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from instrumented_trainer.simple_fsdp import shard_by_parametrization
from tests.distributed import dimension_driver
from tests.distributed.dimension_driver import BATCH, LAYOUTS, WIDTH, Feedforward, Model, Training
from tests.distributed.marked_waits import mark_final_wait, mark_waits

WARMUP_STEPS = 3
PROFILED_STEPS = 4


def _training(model: nn.Module, trained: nn.Module | None = None) -> Training:
    def step(rows: torch.Tensor) -> float:
        loss = (trained or model)(rows).square().mean()
        loss.backward()
        return float(loss)

    return Training(model, step)


def fsdp2() -> Training:
    """A unit for each layer, and the root."""
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return _training(model)


def compiled_fsdp2() -> Training:
    """As `fsdp2`, with each layer compiled."""
    training = fsdp2()
    for layer in training.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    return training


def fsdp1() -> Training:
    """A unit for each layer, and the root."""
    policy = ModuleWrapPolicy({Feedforward})
    return _training(
        FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    )


def ddp() -> Training:
    """Several buckets."""
    model = Model()
    trained = DistributedDataParallel(model, bucket_cap_mb=0.001)
    mark = mark_final_wait(model.stem.weight)

    def step(rows: torch.Tensor) -> float:
        output = trained(rows)
        mark(output)
        loss = output.square().mean()
        loss.backward()
        return float(loss)

    return Training(trained, step)


def simple_fsdp() -> Training:
    """The parametrization without a compiler."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    return _training(shard_by_parametrization(Model(), mesh))


def compiled_simple_fsdp() -> Training:
    """The parametrization in one graph."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = shard_by_parametrization(Model(), mesh)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    return _training(compiled)


SHARDERS: dict[str, Callable[[], Training]] = {
    each.__name__: each
    for each in (fsdp2, compiled_fsdp2, fsdp1, ddp, simple_fsdp, compiled_simple_fsdp)
}

MARKED = ("ddp", "simple_fsdp", "compiled_simple_fsdp", "pipeline")
"""Cases whose waits only marks of the test show; see `marked_waits`. Rank 0 is late in a step."""
LATE_S = 0.03


def main(folder: Path, *cases: str) -> None:
    """Run this rank's part of every case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dimension_driver.SLOW_S = 0.0
    for case in cases:
        (folder / case / "traces").mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        make = SHARDERS[case] if case in SHARDERS else LAYOUTS[case]
        end_marks = mark_waits() if case in MARKED else None
        _watch(make(), folder / case, late_s=LATE_S if end_marks and dist.get_rank() == 0 else 0.0)
        if end_marks:
            end_marks()
        dist.barrier()
    dist.destroy_process_group()


def _watch(training: Training, folder: Path, *, late_s: float) -> None:
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step(recorder: Recorder) -> None:
        with recorder.step():
            time.sleep(late_s)
            training.step(torch.randn(BATCH, WIDTH, generator=generator))
            optimizer.step()
            optimizer.zero_grad()

    with Recorder(
        training.model,
        optimizer=optimizer,
        path=folder / "run",
        memory_steps=(),
        print_verdict=False,
    ) as recorder:
        for _ in range(WARMUP_STEPS):
            step(recorder)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=0, active=PROFILED_STEPS),
            record_shapes=True,
        ) as profiler:
            for number in range(PROFILED_STEPS):
                step(recorder)
                if number < PROFILED_STEPS - 1:
                    profiler.step()
    profiler.export_chrome_trace(str(folder / "traces" / f"rank{dist.get_rank()}.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    release_process_groups()
