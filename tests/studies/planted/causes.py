"""Plant one cause of a slow step, of known size, in a training loop on two ranks.

    torchrun --nproc-per-node 2 tests/studies/planted/causes.py FOLDER [CAUSE]...
    python -m tests.studies.planted.causes FOLDER [CAUSE]...

The first command trains on gloo ranks and plants sleeps, collections and a missing core. The second
one emulates two ranks on a virtual clock and plants the rest: gloo blocks the host, so the order of
its collectives has no effect. Each loop counts its steps and its cause without the
recorder, and writes the means to FOLDER/CAUSE/counted-RANK.json.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

MS = 1_000_000
WIDTH, BLOCKS, STEPS = 64, 4, 12
VOCABULARIES = {
    "huge embedding in the root": 20_000,
    "latency": 2_000,
    "latency without": 2_000,
    "resharded root": 2_000,
    "resharded root without": 2_000,
}
BLOCK_NS = 12 * MS
"""The forward of a block. Its backward takes twice as long."""
CAUSE_NS = 120 * MS
WARM_UP = 4
ON_RANKS = (
    "slow rank",
    "data",
    "garbage collection",
    "checkpoint between steps",
    "core starvation",
)
LINKS = {
    "recomputation": "bandwidth=10GB/s,latency=20us",
    "latency": "bandwidth=50MB/s,latency=4ms",
    "huge embedding in the root": "bandwidth=50MB/s,latency=20us",
    "backward prefetch order": "bandwidth=15MB/s,latency=20us",
    "resharded root": "bandwidth=50MB/s,latency=20us",
}
"""The network of each emulated cause. Its size is the difference to the step of the same loop
without the cause, FOLDER/CAUSE without."""
WITHOUT = " without"


class Slow:
    """An object whose serialization takes a known time."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(CAUSE_NS / 1e9)
        return Slow, ()


class Counter:
    """The times of the steps and of the cause, counted by the loop."""

    def __init__(self) -> None:
        self.steps_ns: list[int] = []
        self.causes_ns: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step."""
        self.causes_ns.append(0)
        begin = time.perf_counter_ns()
        yield
        self.steps_ns.append(time.perf_counter_ns() - begin)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Code that is the cause."""
        begin = time.perf_counter_ns()
        yield
        self.add(time.perf_counter_ns() - begin)

    def add(self, duration_ns: int) -> None:
        """Add time of the cause to the running step."""
        self.causes_ns[-1] += duration_ns

    def write(self, path: Path) -> None:
        """Write the means over the steps after warm-up."""
        means = {
            name: sum(each[WARM_UP:]) / len(each[WARM_UP:])
            for name, each in (("step_ns", self.steps_ns), ("size_ns", self.causes_ns))
        }
        path.write_text(json.dumps(means))


def train(folder: Path, cause: str, pass_time: Callable[[int], None]) -> None:
    """Train with a planted cause, and write its counted size."""
    import torch
    import torch.distributed as dist

    from fsdp_inspect import Recorder

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, counter = dist.get_rank(), Counter()
    model = make_model(cause, pass_time, counter, is_here=rank == 1 or cause != "slow rank")
    shard(model, cause)
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[Any] = []
    with (
        one_core() if cause == "core starvation" else nullcontext(),
        Recorder(model, optimizer=optimizer, path=folder / "run", print_verdict=False) as recorder,
    ):
        for _ in range(STEPS):
            waited_ns = waited_for_core_ns()
            with counter.step(), recorder.step():
                if cause == "data":
                    with recorder.data(), counter.around():
                        pass_time(CAUSE_NS)
                tokens = torch.randint(256, (2, 32))
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if cause == "garbage collection":
                    kept = make_cycles(kept)
                    with counter.around():
                        gc.collect()
            if cause == "core starvation":
                counter.add(waited_for_core_ns() - waited_ns)
            if cause == "checkpoint between steps":
                with counter.around():
                    torch.save(Slow(), io.BytesIO())
    counter.write(folder / f"counted-{rank}.json")


def make_cycles(kept: list[Any]) -> list[Any]:
    """Objects that the collector visits, for about the size of a cause."""
    if kept:
        return kept
    return [[[] for _ in range(10)] for _ in range(60_000)]


@contextmanager
def one_core() -> Iterator[None]:
    """Give all ranks the same core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def make_model(
    cause: str, pass_time: Callable[[int], None], counter: Counter, *, is_here: bool
) -> Any:
    """A decoder whose blocks take a fixed time, with a planted cause in them."""
    import torch
    from torch import nn

    vocabulary = VOCABULARIES.get(cause, 256)
    num_blocks = 8 if "order" in cause else BLOCKS

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            pass_time(BLOCK_NS)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            pass_time(2 * BLOCK_NS)
            return gradients[0].clone()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            plant_in_block(cause if is_here else "", pass_time, counter)
            return hidden + self.down(Timed.apply(torch.relu(self.up(hidden))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
            self.head = nn.Linear(WIDTH, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return 1 * self.head(hidden)

    return Model()


def shard(model: Any, cause: str) -> None:
    """Make each block and the root a unit, with the settings of the cause."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    if cause == "recomputation":
        model.layers = type(model.layers)(checkpoint_wrapper(layer) for layer in model.layers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=cause == "resharded root")
    if "order" in cause or "resharded" in cause:
        for unit, following in pairwise([model, *model.layers]):
            unit.set_modules_to_forward_prefetch([following])
    if cause == "backward prefetch order":
        for layer, following in pairwise([*model.layers, model.layers[0]]):
            layer.set_modules_to_backward_prefetch([following])


def plant_in_block(cause: str, pass_time: Callable[[int], None], counter: Counter) -> None:
    """Plant a cause in the forward of a block."""
    if cause == "slow rank":
        with counter.around():
            pass_time(CAUSE_NS // BLOCKS)
    if cause == "core starvation":
        compute(2 * BLOCK_NS)


def compute(duration_ns: int) -> None:
    """Use a core for a time."""
    used = time.thread_time_ns()
    while time.thread_time_ns() - used < duration_ns:
        pass


def waited_for_core_ns() -> int:
    """How long this thread was ready to run and had no core, by Linux."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def main() -> None:
    """Train on real ranks, or on a virtual clock."""
    folder, *causes = sys.argv[1:]
    if "RANK" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for cause in causes or ON_RANKS:
            path = Path(folder) / cause
            path.mkdir(parents=True, exist_ok=True)
            train(path, cause, lambda duration_ns: time.sleep(duration_ns / 1e9))
        dist.destroy_process_group()
        return
    from tests.studies.validation.virtual_time import VirtualClock, install

    install(VirtualClock())
    import torch.distributed as dist

    from fsdp_inspect.emulation import network
    from fsdp_inspect.emulation.process import emulate

    def pass_time(duration_ns: int) -> None:
        network.sleep_until(time.perf_counter_ns() + duration_ns)

    for cause in causes or [name + end for name in LINKS for end in ("", WITHOUT)]:
        path = Path(folder) / cause
        path.mkdir(parents=True, exist_ok=True)
        link = LINKS[cause.removesuffix(WITHOUT)]
        if cause == "latency" + WITHOUT:
            link = link.replace("4ms", "1us")
        with emulate(network.parse_specification(f"world_size=2,{link}")):
            dist.init_process_group("gloo")
            train(path, cause, pass_time)
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
