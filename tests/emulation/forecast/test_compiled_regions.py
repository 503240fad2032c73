"""A forecast counts the tensors that the compiler of torch 2.13 saves for backward."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp_inspect import ForecastTarget, forecast_memory
from fsdp_inspect.analysis.memory.peak import Memory, measure_memory
from fsdp_inspect.emulation.forecast import compiled_regions
from fsdp_inspect.store.reader import open_run
from tests.torch_versions import needs_torch

WIDTH, TOKENS, BLOCKS = 64, 32, 3
DECOMPOSED = "aot_eager_decomp_partition"


class Gated(nn.Module):
    """The second half of a Llama block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.RMSNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(tokens)
        return tokens + self.drop(self.down(F.silu(self.gate(normed)) * self.up(normed)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.mixed(self.norm(tokens)).unflatten(-1, (3, 4, -1)).movedim(-3, 0)
        query, key, value = heads.transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return tokens + mixed.transpose(1, 2).flatten(-2)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.projection(tokens).float().flatten(0, 1)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def saved_bytes(make: Callable[[], nn.Module], backend: str | None, dtype: torch.dtype) -> int:
    """The bytes that one forward of real tensors saves for backward, without parameters."""
    torch._dynamo.reset()
    block = make().to(dtype)
    known = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    if backend is not None:
        block.compile(backend=backend)
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    batch = torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(batch)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [Gated, Attention, Head])
def test_the_partition_is_that_of_the_code_generator(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    generated = saved_bytes(make, "inductor", dtype)
    assert saved_bytes(make, DECOMPOSED, dtype) == generated
    assert saved_bytes(make, None, dtype) != 0


def build(
    make: Callable[[], nn.Module] = Gated, *, is_compiled: bool = True, fullgraph: bool = False
) -> ForecastTarget:
    model = nn.Sequential(*(make() for _ in range(BLOCKS)))
    for block in model:
        if is_compiled:
            block.compile(fullgraph=fullgraph)
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(2, TOKENS, WIDTH, requires_grad=True)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return ForecastTarget(model=model, step=step, optimizer=optimizer)


def forecast(path: Path, builder: Callable[..., ForecastTarget]) -> Memory:
    forecast_memory(builder, path, world_size=2, device_type="cpu")
    return measure_memory(open_run(path))


def bytes_per_block(memory: Memory) -> int:
    """The memory by which the last block's forward exceeds that of the block before."""
    highest = {row.fqn: row.bytes for row in memory.positions if row.phase == "forward"}
    return highest[str(BLOCKS - 1)] - highest[str(BLOCKS - 2)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")  # of `saved_bytes`
@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_blocks_save_what_the_compiler_saves(fullgraph: bool, tmp_path: Path) -> None:
    needs_torch("2.11", "cannot compile on the fake tensors of a forecast")
    eager = forecast(tmp_path / "eager", partial(build, is_compiled=False))
    compiled = forecast(tmp_path / "compiled", partial(build, fullgraph=fullgraph))

    assert bytes_per_block(eager) == saved_bytes(Gated, None, torch.float32)
    assert bytes_per_block(compiled) == saved_bytes(Gated, DECOMPOSED, torch.float32)
    assert bytes_per_block(compiled) < bytes_per_block(eager)
    assert any("Compiled regions save" in note for note in open_run(tmp_path / "compiled").notes)
    assert torch.compiler.is_compiling() is False


@pytest.mark.slow
def test_regions_that_fail_to_compile_run_as_eager_code_and_a_note_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_torch("2.11", "cannot compile on the fake tensors of a forecast")

    def fail(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        raise ZeroDivisionError("planted")

    eager = forecast(tmp_path / "eager", partial(build, is_compiled=False))
    monkeypatch.setattr(compiled_regions, "_BACKEND", fail)
    failed = forecast(tmp_path / "failed", build)

    assert failed.peak == eager.peak
    [note] = (one for one in open_run(tmp_path / "failed").notes if "torch.compile failed" in one)
    assert "planted" in note


def test_a_compiler_that_compiles_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does torch 2.9 under the fake tensors of a forecast."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: None)
    monkeypatch.setattr("fsdp_inspect.emulation.forecast.forecast.is_compiled", lambda model: True)
    forecast(tmp_path / "run", build)
    [note] = (one for one in open_run(tmp_path / "run").notes if "torch.compile" in one)
    assert "it compiled no region" in note
