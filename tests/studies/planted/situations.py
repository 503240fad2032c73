"""Record situations with a known remedy, and read the first advice for each.

    python -m tests.studies.planted.situations FOLDER
    torchrun --nproc-per-node 2 tests/studies/planted/situations.py FOLDER

The first command records all situations except the straggler in one process, on a virtual clock
(`tests.studies.validation.virtual_time`). Compute takes a fixed time, so the runs are equal on
every machine. The second command trains with a straggler on real ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_inspect.advice.advise import Advice
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.run import RunSource
from tests.importing.kineto_traces import TraceWriter

WORLD_SIZE, WIDTH = 8, 64
MIB = 1 << 20
LATENESS_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Emulated:
    """A training of rank 0 of 8 emulated ranks."""

    bandwidth: str
    latency: str
    compute_ns: int
    """The forward time of one block; the backward takes twice as long."""
    num_blocks: int = 6
    unwrapped: tuple[int, ...] = ()
    """Blocks that are not a unit, so that the root owns them."""
    vocabulary: int = 256
    trains_embedding: bool = True
    data_ns: int = 0
    """Wait for each batch."""
    num_steps: int = 8


@dataclass(frozen=True, slots=True)
class First:
    """The first advice: a finding that limits the step, or else a change of the plan."""

    rules: tuple[str, ...]
    words: str
    """The words of the change or the finding; empty: no change."""
    units: tuple[str, ...]
    saved_ratio: float | None
    """Predicted gain / step; None for a finding."""
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Situation:
    """A situation with the right first advice."""

    right: str
    """The right advice in words, for the table."""
    is_right: Callable[[First], bool]
    emulated: Emulated | None = None
    """None: the situation is recorded in another way."""
    request: Mapping[str, Any] = field(default_factory=dict)


def _says(*words: str) -> Callable[[First], bool]:
    return lambda first: any(each in first.words for each in words)


STRAGGLER, _LAUNCHES = "straggler", "launch-bound"
_MIDDLE = (2, 3, 4)
_ALL = tuple(range(6))
_LIMIT = round(1.9 * MIB)
SITUATIONS = {
    "unwrapped blocks": Situation(
        "make the blocks that the root holds units of their own",
        _says("Make every block a unit", "Make layers.2"),
        Emulated("300MB/s", "20us", 2_000_000, unwrapped=_MIDDLE),
    ),
    "one unit": Situation(
        "make every block a unit",
        _says("Make every block a unit"),
        Emulated("300MB/s", "20us", 2_000_000, unwrapped=_ALL),
    ),
    "slow network": Situation(
        "gather less: keep parameters unsharded after forward",
        lambda first: "R6" in first.rules,
        Emulated("50MB/s", "20us", 400_000),
    ),
    "latency-bound tiny units": Situation(
        "merge units",
        _says("one unit", "Merge"),
        Emulated("10GB/s", "3ms", 200_000, num_blocks=12),
    ),
    "fast network": Situation(
        "change nothing", lambda first: not first.words, Emulated("100GB/s", "1us", 2_000_000)
    ),
    "tight memory": Situation(
        "a plan whose peak is within the limit",
        lambda first: first.peak_bytes is not None and first.peak_bytes <= _LIMIT,
        Emulated("10GB/s", "20us", 2_000_000, unwrapped=_ALL),
        request={"memory_limit": _LIMIT},
    ),
    "data-bound": Situation(
        "speed up the input",
        _says("input-bound"),
        Emulated("10GB/s", "20us", 400_000, data_ns=20_000_000),
    ),
    "frozen large embedding": Situation(
        "gather the embedding less often, or not in backward",
        lambda first: "tok_embeddings" in (*first.units, first.words),
        Emulated("300MB/s", "20us", 1_000_000, vocabulary=16_384, trains_embedding=False),
    ),
    STRAGGLER: Situation("find out why that rank is late", _says("straggler")),
    _LAUNCHES: Situation("reduce the host's work", lambda first: "R19" in first.rules),
}


def first_of(run: RunSource, request: Mapping[str, Any]) -> First:
    """The first advice of `advise` for a run."""
    return _first(advise_run(run, AdviceRequest(**request)))


def _first(advice: Advice) -> First:
    limiting = next((each for each in advice.findings if each.limits), None)
    if limiting is not None:
        return First((limiting.rule,), limiting.sentence, limiting.units, None, None)
    assert advice.plan is not None, advice.refusal
    if not advice.plan.suggestions:
        return First((), "", (), None, advice.plan.replayed_peak_bytes)
    change = advice.plan.suggestions[0]
    return First(
        change.rules,
        change.what,
        change.units,
        change.saved_ns / advice.plan.replayed_step_ns,
        change.peak_bytes,
    )


def open_situations(folder: Path) -> dict[str, RunSource]:
    """The runs of a folder, by situation."""
    return {path.parent.name: open_run(path) for path in folder.glob("*/run")}


def _write_host_bound(path: Path) -> None:
    """Import a hand-written profiler trace whose kernels end before the next one is launched."""
    trace = TraceWriter()
    for step in range(4):
        at = 10_000.0 * step
        trace.annotate(f"ProfilerStep#{step}", at, at + 9_990)
        for unit in range(2):
            begin = at + 20 + 4_900 * unit
            trace.annotate(f"FSDP::pre_forward (layers.{unit})", begin, begin + 15)
            trace.annotate(f"FSDP::all_gather (layers.{unit})", begin + 1, begin + 10)
            trace.collective("_allgather_base", begin + 8, begin + 18, issued=begin + 5)
            for kernel in range(60):
                launched = begin + 30 + 80 * kernel
                trace.kernel("gemm", launched + 5, launched + 25, issued=launched)
    trace.write(path.parent / "trace.json")
    import_traces(path.parent / "trace.json", path)


# --- training


def record_all(folder: Path) -> None:
    """Record all situations except the straggler, which needs real ranks."""
    if not (folder / _LAUNCHES / "run").exists():
        (folder / _LAUNCHES).mkdir(parents=True)
        _write_host_bound(folder / _LAUNCHES / "run")
    for name, situation in SITUATIONS.items():
        if situation.emulated is not None:
            _train(folder / name / "run", situation.emulated, _pass_time)


def record_straggler(folder: Path) -> None:
    """Train on real ranks; the last rank has slow forwards."""
    is_late = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    real = Emulated("", "", LATENESS_NS, num_steps=14)

    def pass_time(duration_ns: int) -> None:
        if is_late and duration_ns == LATENESS_NS:
            time.sleep(duration_ns / 1e9)

    _train(folder / STRAGGLER / "run", real, pass_time)


def _train(path: Path, given: Emulated, pass_time: Callable[[int], None]) -> None:
    import torch
    import torch.distributed as dist

    from fsdp_inspect import Recorder
    from fsdp_inspect.emulation.network import parse_specification
    from fsdp_inspect.emulation.process import emulate

    link = f"world_size={WORLD_SIZE},bandwidth={given.bandwidth},latency={given.latency}"
    torch.manual_seed(0)
    emulated = emulate(parse_specification(link)) if given.bandwidth else nullcontext()
    with emulated:
        dist.init_process_group("gloo")
        model = _make_model(given, pass_time)
        _shard(model, given)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        with Recorder(model, optimizer=optimizer, path=path, print_verdict=False) as recorder:
            for _ in range(given.num_steps):
                with recorder.step():
                    with recorder.data():
                        pass_time(given.data_ns)
                        tokens = torch.randint(given.vocabulary, (2, 32))
                    model(tokens).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        dist.destroy_process_group()


def _make_model(given: Emulated, pass_time: Callable[[int], None]) -> Any:
    """A decoder without attention; its blocks take a fixed time."""
    import torch
    from torch import nn

    class Timed(torch.autograd.Function):
        """Takes a fixed time in forward, and twice that in backward."""

        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            pass_time(given.compute_ns)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            pass_time(2 * given.compute_ns)
            return gradients[0].clone()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.down(Timed.apply(torch.relu(self.up(hidden))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = nn.Embedding(given.vocabulary, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(given.num_blocks))
            self.head = nn.Linear(WIDTH, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.tok_embeddings(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return 1 * self.head(hidden)

    model = Model()
    model.tok_embeddings.requires_grad_(given.trains_embedding)
    return model


def _shard(model: Any, given: Emulated) -> None:
    from torch.distributed.fsdp import fully_shard

    if len(given.unwrapped) < given.num_blocks:
        fully_shard(model.tok_embeddings)
    for index, layer in enumerate(model.layers):
        if index not in given.unwrapped:
            fully_shard(layer)
    fully_shard(model)


def _pass_time(duration_ns: int) -> None:
    """Advance the virtual clock."""
    from fsdp_inspect.emulation import network

    network.sleep_until(time.perf_counter_ns() + duration_ns)


def main() -> None:
    """Train on real ranks, or on a virtual clock."""
    if "RANK" in os.environ:
        record_straggler(Path(sys.argv[1]))
        return
    from tests.studies.validation.virtual_time import VirtualClock, install

    install(VirtualClock())
    record_all(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
