"""Another loop with one injected fault: `python faulty_loops.py LOOP FAULT --rank R --step S`.

The loop is that of our trainer or of torchtitan, and nothing in it is changed. The fault is in a
hook of every module, which acts before the forward of the whole model. Faults that every script can
have are those of `faulty_training`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as all_reduce_by_name
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.studies.faults.faulty_training import FAULT_TIME, FAULTS, ORDERS, lock_up

NUM_LAYERS = 4


class Fault:
    """A fault on one rank in one step, in an unmodified loop."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._step = -1
        self._apart: Any = None

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Act before the forward of the whole model, if it trains."""
        if not (isinstance(module, FSDPModule) and hasattr(module, "layers")):
            return
        if not torch.is_grad_enabled():
            return
        given = self._given
        time.sleep(given.pause)
        rank = dist.get_rank()
        if self._apart is None:
            self._apart = dist.new_group(list(range(dist.get_world_size())))
        self._step += 1
        if self._step == given.step:
            if rank == given.rank:
                Path(FAULT_TIME).write_text(str(time.monotonic()))
            if rank == given.rank or given.fault in ("all-slow", "all-lock"):
                self._inject(module)
            elif given.fault == "foreign-absent":
                dist.all_reduce(torch.zeros(3), group=self._apart)  # fault: absent
            elif given.fault == "foreign-hidden":
                all_reduce_by_name(torch.zeros(3), group=self._apart)  # fault: hidden
        is_larger = given.fault == "user-size" and self._step == given.step and rank == given.rank
        dist.all_reduce(torch.zeros(5 if is_larger else 4))  # fault: user

    def _inject(self, model: nn.Module) -> None:
        fault = self._given.fault
        if fault in ORDERS["llama"]:
            reorder(model, ORDERS["llama"][fault])
        elif fault == "all-slow":
            time.sleep(self._given.slow)  # fault: slow
        elif fault == "all-lock":
            lock_up()
        elif fault in FAULTS:
            FAULTS[fault]()


def reorder(model: Any, order: str) -> None:
    """Make the model call its first four layers in another order."""
    layers = model.layers
    if isinstance(layers, nn.ModuleDict):
        every = list(layers.values())
        chosen = [*(every[int(name)] for name in order.split()), *every[NUM_LAYERS:]]
        model.layers = nn.ModuleDict({str(at): layer for at, layer in enumerate(chosen)})
    else:
        chosen = [layers[int(name)] for name in order.split()]
        model.layers = nn.ModuleList(chosen)


def train_with_trainer(given: argparse.Namespace) -> None:
    """Run our trainer, without its own recorder."""
    from instrumented_trainer.__main__ import main as train

    low = ["--param-dtype", "bfloat16"] if is_low(given) else []
    shape = ["--num-layers", str(NUM_LAYERS), "--dim", "32", "--ffn-dim", "64", "--seq-len", "32"]
    data = ["--data", str(Path(__file__).resolve()), "--batch-size", "2"]
    sys.exit(train(["--no-record", "--steps", str(given.steps), *shape, *data, *low]))


def train_with_torchtitan(given: argparse.Namespace) -> None:
    """Run torchtitan's own training command."""
    from tests.studies.frameworks import torchtitan_cpu

    torchtitan_cpu.install()
    from torchtitan.train import main as train

    low = ["--training.mixed-precision-param", "bfloat16"] if is_low(given) else []
    sys.argv[1:] = [
        *("--module", "tests.studies.frameworks.torchtitan_configs", "--config", "small"),
        *("--metrics.folder", ".", "--dump-folder", f"titan-{os.environ['RANK']}"),
        *("--parallelism.spmd-backend", "partial_dtensor"),
        *("--training.steps", str(given.steps)),
        *low,
    ]
    train()


def is_low(given: argparse.Namespace) -> bool:
    """Whether this rank trains in another dtype."""
    return given.fault == "dtype" and os.environ["RANK"] == str(given.rank)


LOOPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "trainer": train_with_trainer,
    "torchtitan": train_with_torchtitan,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault")
    parser.add_argument("--model", choices=LOOPS, required=True, help="the loop")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each forward")
    parser.add_argument("--slow", type=float, default=600.0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    fault = Fault(given)
    register_module_forward_pre_hook(fault.before_forward)
    LOOPS[given.model](given)


if __name__ == "__main__":
    main()
