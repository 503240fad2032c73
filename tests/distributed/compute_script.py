"""Train a small FSDP2 model with planted causes of slow compute, one run for each case.

    torchrun ... -m tests.distributed.compute_script FOLDER CASE ...

FOLDER/<case>/run is the run; FOLDER/<case>/seen<rank>.json has the losses and the true size of what
was planted, as the script itself measured it: seconds in each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH, BATCH, NUM_STEPS = 64, 16, 14
PROFILED = "6:8"


class Block(nn.Module):
    """A norm and two matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.down(torch.nn.functional.gelu(self.up(self.norm(batch))))


class Loop:
    """A training whose parts a case changes."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(3)))
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.options = options
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []
        self.planted_s: list[float] = []

    def run(self, path: Path | None) -> None:
        """Train with the recorder, or without it if there is no path."""
        if path is None:
            for step in range(NUM_STEPS):
                self.step(step)
            return
        options = {"print_verdict": False, "overhead": None, **self.options}
        with Recorder(self.model, optimizer=self.optimizer, path=path, **options) as recorder:
            for step in range(NUM_STEPS):
                with recorder.step():
                    self.step(step)

    def step(self, step: int) -> None:
        """One step."""
        batch = torch.randn(BATCH, WIDTH, generator=self.generator)
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach().item())


class WithProfiler(Loop):
    """The script runs a profiler of its own in a profiled step."""

    def step(self, step: int) -> None:
        if step == 6:
            with torch.profiler.profile() as profiler:
                super().step(step)
            assert profiler.events()
        else:
            super().step(step)


def _refuse(*arguments: Any, **keywords: Any) -> None:
    raise RuntimeError("the disk is full")


class WithFailure(Loop):
    """The trace of the profiler cannot be written."""

    def run(self, path: Path | None) -> None:
        original = torch.profiler.profile.export_chrome_trace
        torch.profiler.profile.export_chrome_trace = _refuse
        try:
            super().run(path)
        finally:
            torch.profiler.profile.export_chrome_trace = original


CASES: dict[str, Callable[[], Loop]] = {
    "plain": Loop,
    "profiled": lambda: Loop(profile_steps=PROFILED),
    "other_profiler": lambda: WithProfiler(profile_steps=PROFILED),
    "failing": lambda: WithFailure(profile_steps=PROFILED),
}


def main(folder: Path, names: list[str]) -> None:
    """Run the cases one after the other."""
    dist.init_process_group("gloo")
    for name in names:
        loop = CASES[name]()
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        loop.run(None if name == "plain" else target / "run")
        seen = {"losses": loop.losses, "planted_s": loop.planted_s}
        (target / f"seen{dist.get_rank()}.json").write_text(json.dumps(seen))
        dist.barrier()
    dist.destroy_process_group()
    release_process_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
