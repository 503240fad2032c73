"""Predict steps of ZeRO-1 and ZeRO-2 with other buckets, and measure them.

    python -m tests.studies.frameworks.zero_buckets FOLDER

It records a small Llama with each stage and several `reduce_bucket_size` on two gloo ranks, twice
each, and predicts the second recording of each set-up from the first recording of each other one.
Each all-reduce sleeps, like one on a slow network, so that its duration does not depend on the free
cores. It prints a Markdown table of predicted and measured step times.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

SIZES = (40_000, 80_000, 1_000_000)
LATENCY_S, S_PER_BYTE = 3e-3, 5e-9
ACCUMULATION = 2
NUM_STEPS = 24


def train(folder: Path, stage: int, size: int) -> None:
    """Train one set-up for some steps."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from fsdp_inspect import Recorder
    from tests.studies.frameworks.deepspeed_driver import config
    from tests.studies.frameworks.small_models import llama

    original = dist.all_reduce

    @functools.wraps(original)
    def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        time.sleep(LATENCY_S + S_PER_BYTE * tensor.nbytes)
        return result

    dist.all_reduce = slow
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given: dict[str, Any] = config(stage)
    zero = {"stage": stage, "reduce_bucket_size": size, "overlap_comm": False}
    given |= {"gradient_accumulation_steps": ACCUMULATION, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    options: dict[str, Any] = {"memory_steps": (), "print_verdict": False, "overhead": None}
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Recorder(engine, path=folder, **options):
        for _ in range(NUM_STEPS * ACCUMULATION):
            rows = torch.randint(0, 256, (2, 32), generator=generator)
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            engine.step()
    dist.destroy_process_group()


def launch(folder: Path, stage: int, size: int) -> None:
    """Record one set-up on two ranks."""
    import subprocess

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    local = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = ["-m", "tests.studies.frameworks.zero_buckets", str(folder), str(stage), str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, *local, *script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def compare(folder: Path) -> list[str]:
    """Record each set-up twice, and predict each from each other: rows of a table."""
    from fsdp_inspect import open_run

    kinds = [(stage, size) for stage in (1, 2) for size in SIZES]
    for number in (0, 1):
        for stage, size in kinds:
            run = folder / f"{stage}-{size}-{number}"
            if not run.exists():
                launch(run, stage, size)
    lines = [
        "| recorded | predicted set-up | predicted step (interval) | measured | error | inside |",
        "|---|---|---|---|---|---|",
    ]
    for source in kinds:
        recorded = open_run(folder / "{}-{}-0".format(*source))
        for stage, size in kinds:
            truth = open_run(folder / f"{stage}-{size}-1").simulate_buckets()
            found = recorded.simulate_buckets(reduce_bucket_size=size, zero_stage=stage)
            measured, predicted = truth.recorded_step_ns, found.predicted.step_time_ns
            is_inside = found.low_ns <= measured <= found.high_ns
            low, middle, high = (each / 1e6 for each in (found.low_ns, predicted, found.high_ns))
            lines.append(
                f"| ZeRO-{source[0]}, {source[1]:,} | ZeRO-{stage}, {size:,} | {middle:.1f} ms "
                f"({low:.1f} to {high:.1f}) | {measured / 1e6:.1f} ms | "
                f"{predicted / measured - 1:+.1%} | {'yes' if is_inside else 'no'} |"
            )
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        print("\n".join(compare(Path(sys.argv[1]))))
