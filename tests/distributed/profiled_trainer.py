"""Record a rank of the trainer with our recorder and torch.profiler together, step by step.

    torchrun ... -m tests.distributed.profiled_trainer FOLDER

For each case the recording goes to FOLDER/<case>/run and the traces to FOLDER/<case>/traces.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from instrumented_trainer.runtime import Runtime
from tests.studies.benchmarks.workload import Workload

WARMUP_STEPS = 2
PROFILED_STEPS = 4

_SHAPE = {"dim": 256, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 704, "num_layers": 3}
CASES = {
    "synchronous": _SHAPE,
    "asynchronous": {
        **_SHAPE,
        "unshard_async_op": True,
        "forward_prefetch": 1,
        "backward_prefetch": 1,
    },
}


def main(folder: Path) -> None:
    """Run this rank's part of every case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    runtime = Runtime(rank, rank, dist.get_world_size(), torch.device("cpu"))
    for case, settings in CASES.items():
        (folder / case / "traces").mkdir(parents=True, exist_ok=True)
        _watch(Workload.build(runtime, **settings), folder / case, rank)
    dist.barrier()
    dist.destroy_process_group()


def _watch(workload: Workload, folder: Path, rank: int) -> None:
    with Recorder(
        workload.model,
        optimizer=workload.optimizer,
        path=folder / "run",
        memory_steps=(),
        print_verdict=False,
    ) as recorder:
        loop = workload.loop(recorder)
        for step in range(WARMUP_STEPS):
            loop.run_step(step)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=0, active=PROFILED_STEPS),
            record_shapes=True,
        ) as profiler:
            for step in range(WARMUP_STEPS, WARMUP_STEPS + PROFILED_STEPS):
                loop.run_step(step)
                if step < WARMUP_STEPS + PROFILED_STEPS - 1:
                    profiler.step()
    profiler.export_chrome_trace(str(folder / "traces" / f"rank{rank}.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    release_process_groups()
