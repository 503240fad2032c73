"""Train DeepSpeed's real ZeRO-3 engine in virtual time, and predict it with other settings.

    python -m tests.studies.frameworks.zero3_virtual [FILE]

The process group is torch's fake one of several ranks. A module takes a given time on the host, and
a message a given time on the link. Nothing else takes time, so a prediction can be exact. It prints
a Markdown table of predicted and true step times and bytes. With FILE, it writes some of the runs
and the true steps, for `tests/simulation/test_zero3_messages.py`.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.simulation.buckets import (
    BucketChanges,
    BucketStep,
    FetchWork,
    change_buckets,
    measure_buckets,
)
from fsdp_inspect.simulation.network import KINDS as MESSAGES, CostLine, Network
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.tables import EventTable
from tests.builders import InMemoryRun, RunBuilder

WORLD_SIZE, NUM_STEPS, WARMUP = 4, 7, 3
LATENCY_NS, NS_PER_BYTE = 300_000, 20
MS = 1_000_000
NETWORK = Network(
    {
        kind: CostLine(LATENCY_NS, bus_factor(kind, WORLD_SIZE) / NS_PER_BYTE * 1e9)
        for kind in MESSAGES
    }
)
"""The link, which the messages of a run may not show: see [Note: unknown latency]."""


class VirtualHost:
    """The host's clock, and one link that sends messages in the order of their issue."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self._free_ns = 0

    def spend(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def transfer(self, num_bytes: int) -> VirtualWork:
        start = max(self.now_ns, self._free_ns)
        self._free_ns = start + LATENCY_NS + NS_PER_BYTE * num_bytes
        return VirtualWork(self, self._free_ns)


class VirtualWork(dist.Work):
    """An asynchronous message."""

    def __init__(self, host: VirtualHost, end_ns: int) -> None:
        super().__init__()
        self._host, self._end_ns = host, end_ns

    def wait(self, *args: Any) -> bool:
        self._host.now_ns = max(self._host.now_ns, self._end_ns)
        return True

    def get_future(self) -> Any:
        return self

    def add_done_callback(self, done: Callable[[Any], None]) -> None:
        """Call back at the end of the message."""
        now, self._host.now_ns = self._host.now_ns, self._end_ns
        done(self)
        self._host.now_ns = now


class VirtualClock(HostClock):
    """The recorder's clock."""

    def __init__(self, host: VirtualHost) -> None:
        self.mark = self.host_now = lambda: host.now_ns  # type: ignore[method-assign]


HOST = VirtualHost()


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, duration_ns: int) -> torch.Tensor:
        ctx.duration_ns = duration_ns
        HOST.spend(duration_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        HOST.spend(2 * ctx.duration_ns)
        return gradients[0], None


class Timed(nn.Module):
    """A module whose forward takes a given time, and its backward twice it."""

    def __init__(self, inner: nn.Module, duration_ns: int) -> None:
        super().__init__()
        self.inner = inner
        self.duration_ns = duration_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Spend.apply(self.inner(x), self.duration_ns)


def timed_linear(inputs: int, outputs: int, ms: float) -> nn.Module:
    """A linear module that spends its time itself, so that it belongs to its unit."""

    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Spend.apply(super().forward(x), int(ms * MS))

    return Linear(inputs, outputs)


class Block(nn.Module):
    """Modules with and without parameters, of different sizes and times."""

    def __init__(self, width: int, ms: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = timed_linear(width, 2 * width, ms)
        self.act = Timed(nn.GELU(), int(0.3 * ms * MS))
        self.second = timed_linear(2 * width, width, 0.7 * ms)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.second(self.act(self.first(self.norm(x)))))


class Model(nn.Module):
    """An embedding, blocks of different sizes, and a head."""

    def __init__(self, *, width: int, repeats: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(120, width)
        self.blocks = nn.ModuleList(Block(width, ms) for ms in (1.0, 3.0, 0.5, 2.0))
        self.head = timed_linear(width, 120, 1.0)
        if tied:
            self.head.weight = self.embed.weight
        self.repeats = repeats

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.repeats else block(x)
        return self.head(x)


@contextmanager
def virtual_messages(host: VirtualHost) -> Iterator[None]:
    """Give the collectives of `torch.distributed` the times of the virtual link."""
    places = {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "all_reduce": 0}
    saved = {name: getattr(dist, name) for name in places}

    def timed(name: str) -> Callable[..., Any]:
        @functools.wraps(saved[name])
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            work = host.transfer(given[places[name]].nbytes)
            saved[name](*args, **kwargs)
            if async_op:
                return work
            work.wait()
            return None

        return call

    for name in places:
        setattr(dist, name, timed(name))
    try:
        yield
    finally:
        for name, original in saved.items():
            setattr(dist, name, original)


@dataclass(frozen=True)
class Setup:
    """A training."""

    prefetch_bucket_size: int = 6_000
    max_live_parameters: int = 10**9
    max_reuse_distance: int = 0
    param_persistence_threshold: int = 0
    reduce_bucket_size: int = 9_000
    microbatches: int = 1
    repeats: bool = False
    reduce_scatter: bool = True
    width: int = 32
    tied: bool = False
    frozen: bool = False
    """Only the biases are trained, as with an adapter."""
    bf16: bool = False
    leaf: bool = False
    """Each block is a leaf module, which gathers all its parameters at once."""


def _make(setup: Setup) -> tuple[nn.Module, dict[str, Any]]:
    """The model and DeepSpeed's configuration."""
    import deepspeed

    torch.manual_seed(0)
    zero = {
        "stage": 3,
        "stage3_prefetch_bucket_size": setup.prefetch_bucket_size,
        "stage3_max_live_parameters": setup.max_live_parameters,
        "stage3_max_reuse_distance": setup.max_reuse_distance,
        "stage3_param_persistence_threshold": setup.param_persistence_threshold,
        "reduce_bucket_size": setup.reduce_bucket_size,
        "reduce_scatter": setup.reduce_scatter,
        "overlap_comm": False,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": setup.microbatches,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if setup.bf16:
        config["bf16"] = {"enabled": True}
    model = Model(width=setup.width, repeats=setup.repeats, tied=setup.tied)
    if setup.leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not setup.frozen or "bias" in name)
    return model, config


def record(setup: Setup) -> InMemoryRun:
    """Train with the recorder."""
    import deepspeed

    model, config = _make(setup)
    optimizer = torch.optim.SGD(
        [each for each in model.parameters() if each.requires_grad], lr=1e-6
    )
    with virtual_messages(HOST):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        sharder = find_sharder(engine)
        groups = ProcessGroups()
        sharder.register_groups(groups)
        rows: list[tuple[int, ...]] = []
        session = Session(VirtualClock(HOST), rows.append, groups)
        probe = MemoryProbe(session, lambda row: None, None)
        optimizers = sharder.optimizers(None)
        instruments = Instruments(session, sharder, probe, optimizers, lambda optimizer: None)
        instruments.attach()
        session.open_step()
        for _ in range(NUM_STEPS):
            for _ in range(setup.microbatches):
                tokens = torch.randint(0, 120, (2, 8))
                loss = engine(tokens).float().square().mean()
                engine.backward(loss)
                engine.step()
            HOST.spend(int(0.4 * MS))
            session.end_step()
            instruments.end_step()
        settings = sharder.settings()
        units = sharder.describe_units(groups)
        instruments.detach()
    assert session.journal.settle(60.0) == 0
    assert session.active, session.problems
    table = np.array(rows, dtype=np.int64).T
    events = EventTable.from_columns(dict(zip(EventTable.DTYPES, table, strict=True)))
    builder = RunBuilder([unit.fqn for unit in units], world_size=WORLD_SIZE,
        warmup_steps=WARMUP, sharder="zero3", observed=settings, uses=sharder.uses,
        process_groups=groups.describe())  # fmt: skip
    for unit in units:
        builder.units[unit.fqn] = unit
    builder.rank(0)
    built = builder.build()
    return InMemoryRun(built.manifest, built.ranks, {0: events})


CHANGES: Sequence[dict[str, Any]] = [
    {},
    {"prefetch_bucket_size": 0},
    {"prefetch_bucket_size": 2_000},
    {"prefetch_bucket_size": 50_000},
    {"max_live_parameters": 3_000},
    {"max_live_parameters": 12_000},
    {"max_reuse_distance": 4_000},
    {"max_reuse_distance": 10**9},
    {"param_persistence_threshold": 100},
    {"param_persistence_threshold": 2_500},
    {"reduce_bucket_size": 3_000},
    {"reduce_bucket_size": 10**6},
    {"prefetch_bucket_size": 3_000, "param_persistence_threshold": 64,
     "max_reuse_distance": 10**9, "reduce_bucket_size": 5_000},
]  # fmt: skip
KINDS: Sequence[dict[str, Any]] = [
    {},
    {"microbatches": 2},
    {"repeats": True},
    {"reduce_scatter": False, "width": 31},
    {"param_persistence_threshold": 100, "max_reuse_distance": 5_000, "microbatches": 2},
    {"tied": True},
    {"frozen": True},
    {"frozen": True, "repeats": True, "param_persistence_threshold": 100},
    {"bf16": True},
    {"leaf": True, "prefetch_bucket_size": 20_000},
]
WRITTEN = (KINDS[0], KINDS[3], KINDS[4], KINDS[5], KINDS[7])
"""The runs that `write` writes."""


def begin() -> None:
    """Make this process rank 0 of the fake group."""
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(WORLD_SIZE))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)


@functools.cache
def recorded(setup: Setup) -> InMemoryRun:
    """The recorded run of a set-up."""
    return record(setup)


def truth_of(setup: Setup) -> FetchWork:
    """The measured step of a set-up, with the known link."""
    return replace(measure_buckets(recorded(setup)), network=NETWORK)


def compare() -> Iterator[str]:
    """Predict each pair: rows of a table."""
    yield "| run | change | recorded | predicted | true | error | bytes | equal messages |"
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    for kind in KINDS:
        for after in CHANGES:
            work, truth = truth_of(Setup(**kind)), truth_of(Setup(**{**kind, **after}))
            found = change_buckets(work, BucketChanges(**after)).predicted
            real = truth.simulate(truth.recorded)
            error = found.step_time_ns / truth.step_time_ns - 1
            size = sum(each.message_bytes for each in found.buckets)
            is_equal = _sizes(found) == _sizes(real)
            yield (
                f"| {_name(kind)} | {_name(after)} | {work.step_time_ns / MS:.2f} ms | "
                f"{found.step_time_ns / MS:.2f} ms | {truth.step_time_ns / MS:.2f} ms | "
                f"{error:+.2%} | {size:,} | {'yes' if is_equal else 'no'} |"
            )


def _sizes(step: BucketStep) -> list[tuple[str, int]]:
    return [(each.name, each.message_bytes) for each in step.buckets]


def _name(values: Mapping[str, Any]) -> str:
    texts = (f"{name} {value:,}" if value is not True else name for name, value in values.items())
    return ", ".join(texts) or "unchanged"


def write(path: Path) -> None:
    """Write two steps of some runs, and the true steps with each change."""
    found = []
    for kind in WRITTEN:
        run = recorded(Setup(**kind))
        events = run.events(0, steps=[NUM_STEPS - 2, NUM_STEPS - 1])
        setups = [Setup(**{**kind, **after}) for after in CHANGES]
        found.append(
            {
                "name": _name(kind),
                "manifest": run.manifest.model_dump(mode="json"),
                "events": {name: each.tolist() for name, each in events.columns().items()},
                "truths": [
                    {
                        "changes": after,
                        "step_time_ns": truth_of(setup).step_time_ns,
                        "messages": [each[1:] for each in _seen(recorded(setup))],
                    }
                    for after, setup in zip(CHANGES, setups, strict=True)
                ],
            }
        )
    text = json.dumps(found, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _seen(run: InMemoryRun) -> list[tuple[int, int, int]]:
    """The recorded messages of units in the last step, in order: number, kind, bytes."""
    events = run.events(0, steps=[NUM_STEPS - 1], kinds=[int(kind) for kind in MESSAGES])
    events = events.where(events.unit >= 0)
    rows = zip(events.sequence.tolist(), events.kind.tolist(), events.bytes.tolist(), strict=True)
    return sorted(rows, key=itemgetter(0))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    begin()
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
    else:
        for line in compare():
            print(line, flush=True)
