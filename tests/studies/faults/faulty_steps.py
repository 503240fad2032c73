"""A longer loop with one injected fault: `python faulty_steps.py FAULT --rank R --step S`.

It accumulates gradients, clips them and evaluates, as users' loops do. The faults are those of such
loops: a part of a step that one rank does alone, twice or not at all. With the fault `healthy`, all
ranks do all of these parts in each step, and save checkpoints in the background.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader

from tests.studies.faults.faulty_training import (
    FAULT_TIME,
    FOREVER_S,
    LIMIT_BYTES,
    Batches,
    make_model,
)

HEALTHY = "healthy"


class Killed(Batches):
    """Batches; making one of them kills its process, like the kernel for memory."""

    def __getitem__(self, at: int) -> torch.Tensor:
        if at == self.slow:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(at)


class Greedy(torch.optim.AdamW):
    """An optimizer that keeps a large state from a given step."""

    is_greedy = False

    def step(self, closure: Any = None) -> Any:
        """Update, with a new state."""
        if self.is_greedy:
            self.extra = torch.zeros(LIMIT_BYTES)  # fault: optimizer
        return super().step(closure)


def sleep_in_hook(*_: object) -> None:
    """Stay in a hook of a module."""
    time.sleep(FOREVER_S)  # fault: hook


def fail_in_hook(*_: object) -> None:
    """Fail in the middle of a forward."""
    raise ValueError("a value is out of range")


class Loop:
    """The loop; `fault` is the fault of this rank in its step."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._is_faulty = dist.get_rank() == given.rank
        self._model = make_model(given.model, low_precision=False)
        inner = self._model.inner.model.layers if given.model == "llama" else self._model.blocks
        self._block: nn.Module = inner[1]
        self._optimizer = Greedy(self._model.parameters(), lr=1e-3)
        everyone = list(range(dist.get_world_size()))
        self._groups = [dist.new_group(everyone), dist.new_group(everyone)]
        self._saving = dist.new_group(everyone)
        self._saved: Any = None
        self._is_healthy = given.fault == HEALTHY
        self._fault = ""

    def _batches(self) -> Iterator[torch.Tensor]:
        given = self._given
        kills = given.fault == "worker-killed" and self._is_faulty
        data = (Killed if kills else Batches)(given.steps, given.step if kills else -1)
        workers = 2 if given.fault == "worker-killed" else 0
        context = "fork" if workers else None
        ahead = 1 if workers else None  # the first steps must have their batches
        yield from DataLoader(
            data, num_workers=workers, multiprocessing_context=context, prefetch_factor=ahead
        )

    def train(self) -> None:
        """Train."""
        given = self._given
        at = 0 if given.fault == "memory-first" else given.step
        for step, batch in enumerate(self._batches()):
            is_now = step == at
            self._fault = given.fault if is_now and self._is_faulty else ""
            if self._is_healthy:
                self._fault = HEALTHY
            elif self._fault:
                Path(FAULT_TIME).write_text(str(time.monotonic()))
            if given.fault == "save" and step >= at:
                self._save(step, None)
            elif self._is_healthy and step % 10 == 0:
                self._save(step, self._saving)
            try:
                self._step(batch)
            except ValueError:
                continue  # a damaged batch is skipped
            if is_now or self._is_healthy:
                self._evaluate(batch)
            time.sleep(given.pause)
        if self._is_healthy:
            self._saved.result()
        dist.barrier()

    def _step(self, batch: torch.Tensor) -> None:
        model, fault = self._model, self._fault
        if fault == "memory-first":
            batch = batch.repeat(LIMIT_BYTES // batch.numel() // 16, 1)
        with self._prepared():
            for number in range(2 if fault in ("accumulation", HEALTHY) else 1):
                loss = model(batch)  # fault: call
                if fault == "not-a-number":
                    return
                is_last = fault != HEALTHY or number == 1
                model.set_requires_gradient_sync(fault != "no-sync" and is_last)
                loss.backward()  # fault: backward
        self._update()

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Apply the faults of one block."""
        hooks = {"hook": sleep_in_hook, "swallowed": fail_in_hook}
        hook = hooks.get(self._fault)
        handle = None if hook is None else self._block.register_forward_hook(hook)
        if self._fault == "frozen":
            self._block.requires_grad_(requires_grad=False)
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def _update(self) -> None:
        model, fault = self._model, self._fault
        self._optimizer.is_greedy = fault == "memory-optimizer"
        if fault in ("clip", HEALTHY):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault: clip
        if self._given.fault == "two-groups":
            first, second = self._groups[::-1] if fault else self._groups
            dist.all_reduce(torch.zeros(2), group=first)
            dist.all_reduce(torch.zeros(2), group=second)
        if fault in ("full", HEALTHY):
            next(model.parameters()).full_tensor()  # fault: full
        if fault != "update":
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _evaluate(self, batch: torch.Tensor) -> None:
        """Evaluate, on all ranks or on one."""
        fault = self._given.fault
        if fault == "memory-evaluation" and self._fault:
            batch = batch.repeat(LIMIT_BYTES // batch.numel() // 16, 1)
        if fault == "memory-evaluation" or self._fault in ("evaluate", HEALTHY):
            self._model.eval()
            with torch.no_grad():
                self._model(batch)  # fault: evaluate
            self._model.train()

    def _save(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Save in the background; without a group, through the group of the training."""
        state = {"weight": torch.zeros(8)}
        if self._saved is not None:
            self._saved.result()
        self._saved = dcp.async_save(state, checkpoint_id=f"checkpoint-{step}", process_group=group)


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault")
    parser.add_argument("--model", choices=("mlp", "llama"), default="mlp")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.05)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Loop(given).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
