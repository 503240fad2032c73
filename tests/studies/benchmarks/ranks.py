"""Run a module on several ranks under torchrun; it returns JSON.

    outcome = run_ranks("tests.studies.benchmarks.overhead", {"rounds": 200}, folder)

Each rank calls `on_each_rank`, which passes the options to a function and writes its result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from instrumented_trainer.runtime import Runtime

NUM_RANKS = 2
ROOT = Path(__file__).parents[3]

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""One thread for each rank, because two ranks share two cores. gloo uses this machine only."""


def run_ranks(module: str, options: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run `module` on `NUM_RANKS` gloo ranks to its end.

    Args:
        module: A module whose `__main__` calls `on_each_rank`.
        options: Options of the module, as JSON values.
        folder: The folder for the ranks' files; made if missing.

    Returns:
        The result of each rank, in rank order.

    Raises:
        RuntimeError: A rank failed. The message has the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}"]
    done = subprocess.run(
        [*command, *torchrun, "-m", module, str(folder), json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(_answer_of(folder, rank).read_text()) for rank in range(NUM_RANKS)]


def on_each_rank(measure: Callable[[Runtime, Path, dict[str, Any]], dict[str, Any]]) -> None:
    """Run one rank's part: `measure(runtime, folder, options)` within a process group.

    The group uses the option `backend`. By default it is NCCL if the option `device` is `cuda`
    (additional ranks share the GPUs), else gloo.
    """
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    device = _device_of(options)
    default = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(options.get("backend", default))
    rank = dist.get_rank()
    runtime = Runtime(rank, rank, dist.get_world_size(), device)
    answer = measure(runtime, folder, options)
    _answer_of(folder, rank).write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
    release_process_groups()


def _device_of(options: Mapping[str, Any]) -> torch.device:
    if options.get("device") != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _answer_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
