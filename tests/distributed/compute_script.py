"""Train a small FSDP2 model with planted causes of slow compute, one run for each case.

    torchrun ... -m tests.distributed.compute_script FOLDER CASE ...

FOLDER/<case>/run is the run; FOLDER/<case>/seen<rank>.json has the losses and the true size of what
was planted, as the script itself measured it: seconds in each step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from fsdp_inspect.store.folder import ask_for_profile

WIDTH, BATCH, NUM_STEPS = 64, 16, 10
PROFILED = "6:8"
NUM_REQUESTED = 600
"""Steps of more than 10 ms, of which a request profiles three after some seconds."""


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
        self.other = torch.Generator().manual_seed(0)
        """For what is planted, so that the losses stay those of the plain loop."""
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


class WithRequest(Loop):
    """The dashboard asks for a profile in the run, under the default budget."""

    def run(self, path: Path | None) -> None:
        assert path is not None
        with Recorder(
            self.model, optimizer=self.optimizer, path=path, print_verdict=False
        ) as recorder:
            for step in range(NUM_REQUESTED):
                with recorder.step():
                    self.step(step)
                    time.sleep(0.01)
                if step == 40 and dist.get_rank() == 0:
                    ask_for_profile(path)


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


def _timed(loop: Loop, work: Callable[[], Any]) -> None:
    begun = time.perf_counter()
    work()
    loop.planted_s.append(time.perf_counter() - begun)


class WithItems(Loop):
    """Values are read one by one."""

    def run(self, path: Path | None) -> None:
        for _ in range(5):  # without the recorder
            _timed(self, self.read)
        super().run(path)

    def read(self) -> None:
        value = torch.zeros(())
        for _ in range(50_000):
            value.item()

    def step(self, step: int) -> None:
        super().step(step)
        self.read()


class WithMask(Loop):
    """A router selects the tokens of each expert by a boolean mask."""

    def step(self, step: int) -> None:
        super().step(step)
        tokens = torch.rand(60_000, 8, generator=self.other)
        expert = torch.randint(8, (60_000,), generator=self.other)
        masks = [expert == number for number in range(8)]
        _timed(self, lambda: [tokens[mask] for mask in masks for _ in range(12)])


class WithPrint(Loop):
    """The loss is printed over and over."""

    def step(self, step: int) -> None:
        super().step(step)
        loss = torch.rand(200, 6, generator=self.other)
        _timed(self, lambda: [f"loss {loss}" for _ in range(25)])


class WithCollections(Loop):
    """Rank 1 collects garbage in some steps."""

    def run(self, path: Path | None) -> None:
        self.kept = [[number] for number in range(600_000)] if dist.get_rank() == 1 else []
        super().run(path)
        self.kept = []

    def step(self, step: int) -> None:
        super().step(step)
        collects = dist.get_rank() == 1 and step % 3 == 0
        _timed(self, gc.collect if collects else lambda: None)


class WithTokens(Loop):
    """Rank 0 gets twice the tokens of the other ranks; the root unit has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(100, WIDTH), *(Block() for _ in range(3)))
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, step: int) -> None:
        length = 2048 if dist.get_rank() == 0 else 1024
        tokens = torch.randint(100, (2, length), generator=self.generator)
        loss = self.model(tokens).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class WithCompilations(Loop):
    """A compiled function sees a new Python value in every fifth step."""

    def __init__(self) -> None:
        super().__init__()
        torch._dynamo.reset()

        def scale(batch: torch.Tensor, factor: int) -> torch.Tensor:
            for _ in range(60):
                batch = batch * 0.5 + factor
            return batch

        def broken(batch: torch.Tensor) -> torch.Tensor:
            batch = batch + 1
            torch._dynamo.graph_break()
            return batch * 2

        self.scale = torch.compile(scale, backend="eager", dynamic=False)
        torch.compile(broken, backend="eager")(torch.ones(4))

    def step(self, step: int) -> None:
        super().step(step)
        _timed(self, lambda: self.scale(torch.ones(4), step // 5))


PLANTED: dict[str, Callable[[], Loop]] = {
    "items": WithItems,
    "mask": WithMask,
    "print": WithPrint,
    "collections": WithCollections,
    "tokens": WithTokens,
    "compilations": WithCompilations,
}
CASES: dict[str, Callable[[], Loop]] = {
    "plain": Loop,
    "profiled": lambda: Loop(profile_steps=PROFILED),
    "other_profiler": lambda: WithProfiler(profile_steps=PROFILED),
    "requested": WithRequest,
    "failing": lambda: WithFailure(profile_steps=PROFILED),
    **PLANTED,
}


def main(folder: Path, names: list[str]) -> None:
    """Run the cases one after the other."""
    dist.init_process_group("gloo")
    for name in names:
        loop = CASES[name]()
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        loop.run(None if name == "plain" else target / "run")
        patched = [name for name in ("item", "__getitem__") if name in vars(torch.Tensor)]
        seen = {"losses": loop.losses, "planted_s": loop.planted_s, "patched": patched}
        (target / f"seen{dist.get_rank()}.json").write_text(json.dumps(seen))
        dist.barrier()
    dist.destroy_process_group()
    release_process_groups()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
