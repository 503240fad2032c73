"""Parts of a model last a given time, independent of the work inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_inspect.emulation.fixed_compute import FixedCompute
from fsdp_inspect.emulation.fixed_times import parse_fixed_times
from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.process import Emulation, emulate
from fsdp_inspect.errors import ConfigError

TIMES = parse_fixed_times("forward=10ms,backward=20ms")
MS = 1_000_000


@pytest.fixture
def emulation() -> Iterator[Emulation]:
    with emulate(parse_specification("world_size=4,bandwidth=10GB/s")) as emulation:
        dist.init_process_group()
        yield emulation
        dist.destroy_process_group()


def fixed_parts(emulation: Emulation, *modules: nn.Module) -> FixedCompute:
    fixed = FixedCompute(TIMES, emulation, torch.device("cpu"))
    fixed.attach({str(index): module for index, module in enumerate(modules)})
    return fixed


class Clock:
    """A clock that only advances by sleeping: computation takes no time, so durations are exact."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        self.now_ns = max(self.now_ns, deadline_ns)

    def duration_ns(self, action: Callable[[], object]) -> int:
        begin = self.now_ns
        action()
        return self.now_ns - begin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the parts. The clock of the network stays the machine's."""
    clock = Clock()
    name = "fsdp_inspect.emulation.fixed_compute"
    monkeypatch.setattr(f"{name}.time", SimpleNamespace(perf_counter_ns=clock.perf_counter_ns))
    monkeypatch.setattr(f"{name}.sleep_until", clock.sleep_until)
    return clock


def test_each_part_lasts_its_time_in_forward_and_backward(emulation: Emulation, clock: Clock):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    fixed = fixed_parts(emulation, first, second)
    x = torch.ones(2, 8, requires_grad=True)
    outputs: list[torch.Tensor] = []

    assert clock.duration_ns(lambda: outputs.append(second(first(x)).sum())) == 20 * MS
    assert clock.duration_ns(outputs[0].backward) == 40 * MS
    assert (fixed.num_spans, fixed.num_overruns) == (4, 0)


def test_a_part_whose_input_has_no_gradient_has_a_backward_too(emulation: Emulation, clock: Clock):
    embedding = nn.Embedding(8, 8)
    fixed = fixed_parts(emulation, embedding)
    loss = embedding(torch.zeros(2, dtype=torch.int64)).sum()

    assert clock.duration_ns(loss.backward) == 20 * MS
    assert fixed.num_spans == 2


def test_an_evaluation_has_no_backward(emulation: Emulation):
    linear = nn.Linear(8, 8)
    fixed = fixed_parts(emulation, linear)
    with torch.no_grad():
        linear(torch.ones(2, 8))

    assert fixed.num_spans == 1


def test_recomputation_lasts_a_forward_more(emulation: Emulation, clock: Clock):
    linear = nn.Linear(8, 8)
    fixed = fixed_parts(emulation, linear)
    x = torch.ones(2, 8, requires_grad=True)
    loss = checkpoint(linear, x, use_reentrant=False).sum()

    assert clock.duration_ns(loss.backward) == 30 * MS
    assert fixed.num_spans == 3


def test_fsdp_inside_a_part_is_not_counted_as_its_computation(emulation: Emulation):
    """The wait for the gather, 30 ms, is added to the part's own 10 ms."""
    inner = nn.Linear(8, 8)
    outer = nn.Sequential(inner)
    with emulate_slowly(emulation):
        fully_shard(inner)
        fully_shard(outer)
        fixed_parts(emulation, outer)
        begin = time.perf_counter()
        outer(torch.ones(2, 8))
        elapsed_s = time.perf_counter() - begin

    assert elapsed_s >= 0.04


def emulate_slowly(emulation: Emulation) -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    network = emulation.waits._network
    patch.setattr(network, "duration_ns", lambda *_: 30_000_000)
    return patch.context()


def test_a_part_that_computes_for_longer_is_counted(emulation: Emulation):
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.03)
            return super().forward(x)

    slow = Slow(8, 8)
    fixed = fixed_parts(emulation, slow)
    slow(torch.ones(2, 8))

    assert fixed.num_overruns == 1


def test_times_may_count_parameters():
    times = parse_fixed_times("forward=3ns/param, backward=0.5us/param")

    assert (times.forward.of(1000), times.backward.of(1000)) == (3_000, 500_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("forward=2ms", ["the key backward is missing", "Add backward=4ms"]),
        ("forwards=2ms,backward=4ms", ["'forwards'", "Nearest: 'forward'"]),
        ("forward=2,backward=4ms", ["forward to the invalid time '2'", "Give it a unit"]),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_is_legal(text: str, words: list[str]):
    with pytest.raises(ConfigError) as refused:
        parse_fixed_times(text)

    assert all(word in str(refused.value) for word in [text, "3ns/param", *words])
