"""Predict steps of ZeRO-3 with other settings, and measure them on two gloo ranks.

    python -m tests.studies.frameworks.zero3_gloo FOLDER

It records a small Llama with each set-up twice, and predicts the second recording of each set-up
from the first recording of the base. A link sends one message at a time, with a latency and a
bandwidth, so that durations do not depend on the free cores. It prints a Markdown table.
"""

from __future__ import annotations

import functools
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist

LATENCY_S, S_PER_BYTE = 1e-3, 5e-9
NUM_STEPS = 24
NAMES = (
    "prefetch_bucket_size",
    "max_live_parameters",
    "max_reuse_distance",
    "param_persistence_threshold",
    "reduce_bucket_size",
)
BASE = (100_000, 10**9, 0, 0, 80_000)
SETUPS: dict[str, dict[str, int]] = {
    "base": {},
    "no prefetch": {"prefetch_bucket_size": 0},
    "prefetch 400,000": {"prefetch_bucket_size": 400_000},
    "live 100,000": {"max_live_parameters": 100_000},
    "reuse 1,000,000": {"max_reuse_distance": 1_000_000},
    "persistence 200": {"param_persistence_threshold": 200},
    "persistence 17,000": {"param_persistence_threshold": 17_000},
    "reduce 30,000": {"reduce_bucket_size": 30_000},
    "reduce 1,000,000": {"reduce_bucket_size": 1_000_000},
}


class Link(threading.Thread):
    """Sends the messages of one rank in the order of their issue."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._jobs: queue.Queue[Any] = queue.Queue()

    def send(self, job: Callable[[], Any], num_bytes: int) -> SlowWork:
        work = SlowWork()
        self._jobs.put((work, job, num_bytes, time.perf_counter()))
        return work

    def run(self) -> None:
        free = 0.0
        while True:
            work, job, num_bytes, issued = self._jobs.get()
            inner = job()
            if inner is not None:
                inner.wait()
            free = max(free, issued) + LATENCY_S + S_PER_BYTE * num_bytes
            time.sleep(max(free - time.perf_counter(), 0))
            work.finish()


class SlowWork(dist.Work):
    """The handle of a message."""

    def __init__(self) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()

    def finish(self) -> None:
        self._future.set_result(None)

    def wait(self, *args: Any) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future


def slow_down(link: Link) -> None:
    """Send the messages of `torch.distributed` over the link."""
    places = {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "all_reduce": 0}
    for name, place in places.items():
        original = getattr(dist, name)

        def slow(
            *args: Any, original: Any = original, place: int = place, async_op: bool = False,
            **kwargs: Any,
        ) -> Any:  # fmt: skip
            size = [*args, *kwargs.values()][place].nbytes
            call = functools.partial(original, *args, async_op=True, **kwargs)
            work = link.send(call, size)
            return work if async_op else work.wait() and None

        setattr(dist, name, functools.wraps(original)(slow))


def train(folder: Path, values: list[int]) -> None:
    """Train one set-up for some steps."""
    import deepspeed

    from fsdp_inspect import Recorder
    from tests.studies.frameworks.deepspeed_driver import config
    from tests.studies.frameworks.small_models import llama

    link = Link()
    link.start()
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given: dict[str, Any] = config(3)
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False}
    for name, value in zip(NAMES, values, strict=True):
        zero[name if name.startswith("reduce") else f"stage3_{name}"] = value
    given |= {"gradient_accumulation_steps": 1, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    slow_down(link)
    options: dict[str, Any] = {"memory_steps": (), "print_verdict": False, "overhead": None}
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Recorder(engine, path=folder, **options):
        for _ in range(NUM_STEPS):
            rows = torch.randint(0, 256, (8, 32), generator=generator)
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            engine.step()
    os._exit(0)  # the link's thread and gloo's must not race at the end


def launch(folder: Path, changes: dict[str, int]) -> None:
    """Record one set-up on two ranks."""
    values = [str(changes.get(name, value)) for name, value in zip(NAMES, BASE, strict=True)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    local = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    script = ["-m", "tests.studies.frameworks.zero3_gloo", str(folder), *values]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, *local, *script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def compare(folder: Path) -> list[str]:
    """Record each set-up twice, and predict each from the base: rows of a table."""
    from fsdp_inspect import open_run

    for number in (0, 1):
        for name, changes in SETUPS.items():
            run = folder / f"{name.replace(' ', '-')}-{number}"
            if not run.exists():
                launch(run, changes)
    base = open_run(folder / "base-0")
    lines = [
        "| setting | predicted step (interval) | measured | error | inside | messages |",
        "|---|---|---|---|---|---|",
    ]
    for name, changes in SETUPS.items():
        truth = open_run(folder / f"{name.replace(' ', '-')}-1").simulate_buckets()
        found = base.simulate_buckets(**changes)
        measured, predicted = truth.recorded_step_ns, found.predicted.step_time_ns
        is_inside = found.low_ns <= measured <= found.high_ns
        low, middle, high = (each / 1e6 for each in (found.low_ns, predicted, found.high_ns))
        lines.append(
            f"| {name} | {middle:.1f} ms ({low:.1f} to {high:.1f}) | {measured / 1e6:.1f} ms | "
            f"{predicted / measured - 1:+.1%} | {'yes' if is_inside else 'no'} | "
            f"{len(found.predicted.buckets)}, {len(truth.replayed.buckets)} |"
        )
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]])
    else:
        print("\n".join(compare(Path(sys.argv[1]))))
