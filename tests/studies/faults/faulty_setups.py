"""A set-up with one injected fault: `faulty_setups.py FAULT --model SETUP --rank R --step S`.

The set-ups are sharders, meshes and frameworks. The faults are those that every loop can have:
two errors at once, errors before the first step, ends of epochs, signals. The loop runs epochs of
`EPOCH` batches.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.studies.faults.faulty_training import (
    FAULT_TIME,
    FAULTS,
    ORDERS,
    WIDTH,
    Batches,
    Block,
    Model,
)

EPOCH = 6
EXPERT_ORDERS = {"skip-equal": "0 2", "swap-equal": "1 0 2"}
LATE_S = 6.0
"""The delay of a late error, longer than `--hang-after`."""


class Experts(nn.Module):
    """Blocks, then two experts that each take half of the batch; `order` gives the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(3))
        self.order = "0 1 2"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the experts in `order`."""
        x = self.first(x)
        routed = [self.blocks[int(name)](x) for name in self.order.split()]  # fault: expert
        return torch.stack(routed).square().mean()


class Setup:
    """A sharded model, its optimizer and one optimizer step."""

    def __init__(self, kind: str, *, has_wrong_mesh: bool = False) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.has_wrong_mesh = has_wrong_mesh
        self.inner: Any = Experts() if kind == "moe" else Model()
        self.model: Any = self._shard(self.inner)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
        if kind == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            self.model, self.optimizer = accelerator.prepare(self.inner, self.optimizer)
            self.backward = accelerator.backward

    def _shard(self, model: Any) -> nn.Module:
        world = dist.get_world_size()
        if self.kind == "ddp":
            return DistributedDataParallel(model)
        if self.kind == "accelerate":
            return model
        if self.kind == "fsdp1":
            return FullyShardedDataParallel(
                model,
                device_id=torch.device("cpu"),
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                use_orig_params=True,
            )
        mesh = None
        if self.has_wrong_mesh:
            shape = (1, world) if self.kind == "hsdp" else (2, world // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        elif self.kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        elif self.kind == "tp":
            mesh = self._split_blocks(model, world)
        for block in [each for each in model.modules() if isinstance(each, Block)]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def _split_blocks(self, model: nn.Module, world: int) -> Any:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in [each for each in model.modules() if isinstance(each, Block)]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        return mesh["dp"]

    def step(self, batch: torch.Tensor, fault: str) -> None:
        """Train on one batch; `fault` is a fault of this rank in this step."""
        number = 2 if self.kind == "accumulation" else 1
        for micro in range(number):
            if number > 1:
                self.model.set_requires_gradient_sync(micro == number - 1)
            loss = self.model(batch)
            if fault == "nan-skip":
                return
            self.backward(loss)  # fault: nan-skip
        if fault == "critic":
            self.model(batch).backward()  # fault: critic
        self.optimizer.step()
        self.optimizer.zero_grad()


# --- faults of one rank in one step, before its forward


def refuse() -> None:
    """Raise an error of this rank's own; the rank after it fails 0.5 s later."""
    raise ConnectionRefusedError("feature store is not reachable")  # fault: refused


def break_pipe() -> None:
    """Write to a program that has ended."""
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as tool:
        tool.wait()
        assert tool.stdin is not None
        os.write(tool.stdin.fileno(), b"x" * 10)  # fault: pipe


def time_out_loader() -> None:
    """Wait for a worker of a data loader until its timeout."""
    loader = DataLoader(
        Batches(4, slow=0), num_workers=1, timeout=1, multiprocessing_context="fork"
    )
    next(iter(loader))  # fault: loader


def fail_later() -> None:
    """Let the others wait for longer than a hang takes, then raise."""
    time.sleep(LATE_S)
    raise RuntimeError("gave up")  # fault: gave-up


def run_out_later() -> None:
    """Let the others wait for longer than a hang takes, then fail to allocate."""
    time.sleep(LATE_S)
    raise MemoryError("no memory for the index of the data set")  # fault: index


def be_killed_later() -> None:
    """Let the others wait for longer than a hang takes, then die of SIGKILL."""
    time.sleep(LATE_S)  # fault: killed-later
    os.kill(os.getpid(), signal.SIGKILL)


def stop_then_be_killed() -> None:
    """Stop like under a debugger; another process kills this one later."""
    command = f"sleep {LATE_S}; kill -9 {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_in_open() -> None:
    """Wait for a writer of a pipe."""
    path = f"fifo-{os.getpid()}"
    os.mkfifo(path)
    Path(path).read_text()  # fault: open


OWN_FAULTS: dict[str, Callable[[], None]] = {
    **FAULTS,
    "own-refused": refuse,
    "own-pipe": break_pipe,
    "own-loader": time_out_loader,
    "late-dies": fail_later,
    "late-memory": run_out_later,
    "late-killed": be_killed_later,
    "stop-killed": stop_then_be_killed,
}
AFTER_EPOCH = {"epoch-hang": wait_in_open, "epoch-evaluation": FAULTS["evaluation"]}
"""Faults after the first epoch."""


class Loop:
    """The loop of one rank."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.rank = dist.get_rank()
        self.next_rank = (given.rank + 1) % dist.get_world_size()
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.step = 0
        self.setup: Any = None

    def act(self) -> str:
        """Apply the faults between two steps; returns the one within this step."""
        given, fault = self.given, self.given.fault
        if self.step != given.step:
            return ""
        if fault.startswith("restart"):
            self._fail_in_each_attempt()
            return ""
        self._act_on_all()
        if self.rank != given.rank:
            return ""
        Path(FAULT_TIME).write_text(str(time.monotonic()))
        if fault in OWN_FAULTS:
            OWN_FAULTS[fault]()
        elif fault in EXPERT_ORDERS:
            orders = EXPERT_ORDERS if self.setup.kind == "moe" else ORDERS["mlp"]
            self.setup.inner.order = orders[fault]
        elif fault == "nan-between":
            with torch.no_grad():
                for parameter in self.setup.inner.blocks[1].parameters():
                    getattr(parameter, "_local_tensor", parameter).fill_(float("nan"))
        return str(fault)

    def _act_on_all(self) -> None:
        """Apply what happens on other ranks than the faulty one."""
        fault = self.given.fault
        if fault == "own-refused" and self.rank == self.next_rank:
            time.sleep(0.5)
            raise ValueError("a later error")
        if fault == "interrupt-all":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
        elif fault == "terminate-all":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault == "slow-once":
            time.sleep(4.0 if self.rank == 0 else 0.0)

    def _fail_in_each_attempt(self) -> None:
        """Fail on the next rank in the first attempt, and on the faulty one in the second."""
        if self.attempt == 0 and self.rank == self.next_rank:
            raise ValueError("an error before the restart")
        name = self.given.fault.removeprefix("restart-")
        if self.attempt and self.rank == self.given.rank and name in OWN_FAULTS:
            Path(FAULT_TIME).write_text(str(time.monotonic()))
            OWN_FAULTS[name]()

    def train(self) -> None:
        """Train in epochs."""
        given = self.given
        is_wrong = given.fault == "start-mesh" and self.rank == given.rank
        self.setup = Setup(given.model, has_wrong_mesh=is_wrong)
        for epoch in range(-(-given.steps // EPOCH)):
            self._train_epoch(epoch)
            if given.fault in AFTER_EPOCH and self.rank == given.rank and epoch == 0:
                Path(FAULT_TIME).write_text(str(time.monotonic()))
                AFTER_EPOCH[given.fault]()
            if given.fault == "epochs":
                with torch.no_grad():
                    self.setup.model(torch.ones(1, WIDTH))
        if given.fault == "exit-quick":
            dist.barrier()
            os._exit(0)

    def _train_epoch(self, epoch: int) -> None:
        given = self.given
        is_faulty = self.rank == given.rank
        is_uneven = given.fault in ("join", "uneven") and is_faulty
        reader = self.rank // 2 if self.setup.kind == "tp" else self.rank
        batches = Batches(EPOCH - 2 if is_uneven else EPOCH, reader=reader)
        for number, batch in enumerate(DataLoader(batches)):
            if given.fault == "skip-batch" and is_faulty and (epoch, number) == (0, 3):
                continue  # fault: skip-batch
            self.setup.step(batch, self.act())
            self.step += 1
            time.sleep(given.pause)

    def train_joined(self) -> None:
        """Train with DDP's `Join`, which shadows the collectives of ranks without batches."""
        self.setup = Setup("ddp")
        with self.setup.model.join():
            self._train_epoch(0)


def train_with_lightning(given: argparse.Namespace) -> None:
    """Let Lightning run the loop."""
    import lightning.pytorch as lightning

    loop = Loop(given)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.inner, self.kind = self.model, "lightning"
            loop.setup = self

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loop.act()
            loop.step += 1
            time.sleep(given.pause)
            return self.model(batch)

        def on_train_epoch_end(self) -> None:
            if given.fault in AFTER_EPOCH and loop.rank == given.rank and self.current_epoch == 0:
                AFTER_EPOCH[given.fault]()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=-(-given.steps // EPOCH),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Batches(EPOCH * int(os.environ["WORLD_SIZE"]), reader=0)))
    if given.fault == "exit-quick":
        dist.barrier()
        os._exit(0)


def start(given: argparse.Namespace) -> None:
    """Make the process group and the model; faults `start-...` act on the faulty rank."""
    is_faulty = int(os.environ["RANK"]) == given.rank
    if is_faulty and given.fault.startswith("start"):
        Path(FAULT_TIME).write_text(str(time.monotonic()))
    if is_faulty and given.fault == "start-fails":
        raise FileNotFoundError("no data at /data/shards")  # fault: start-fails
    if is_faulty and given.fault == "start-stands":
        wait_in_open()
    if is_faulty and given.fault == "start-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    # A restart reads the addresses of the attempt before from the store of torchrun's agent.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if is_faulty and given.fault == "start-model":
        raise KeyError("layers.7.weight")  # fault: start-model


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault")
    parser.add_argument("--model", default="fsdp2", help="the set-up")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--pause", type=float, default=0.02)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start(given)
    if given.fault == "join":
        Loop(given).train_joined()
    elif given.model == "lightning":
        train_with_lightning(given)
    else:
        Loop(given).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
