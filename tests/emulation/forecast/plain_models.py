"""Build common models for forecasts, each with one special property."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fsdp_inspect import ForecastTarget
from tests.torch_versions import placement_result_or_skip

WIDTH, VOCABULARY, BATCH, TOKENS, LAYERS = 64, 128, 2, 16, 3
EXPERTS = 4
Step = Callable[[Any, Any, torch.Tensor], None]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden) * self.scale.to(hidden.dtype)
        return hidden + self.drop(self.down(F.gelu(self.up(normed))))


class Model(nn.Module):
    def __init__(self, *, dropout: float = 0.0, tied: bool = False, repeats: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.repeats = repeats
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            if self.repeats:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Experts(nn.Module):
    """A mixture of experts in float32, by grouped matrix products, as in Transformers' Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, WIDTH)
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=rows.device)
        ends = ends * (len(rows) // EXPERTS)
        inner = F.gelu(torch._grouped_mm(rows, self.up, offs=ends))
        return hidden + torch._grouped_mm(inner, self.down, offs=ends).view_as(hidden)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def shard(model: Any, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def train(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def target(model: Any, step: Step = train) -> ForecastTarget:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return ForecastTarget(
        model=model, step=lambda: step(model, optimizer, tokens), optimizer=optimizer
    )


def plain() -> ForecastTarget:
    return target(shard(Model()))


def tied_weights() -> ForecastTarget:
    return target(shard(Model(tied=True)))


def dropout() -> ForecastTarget:
    return target(shard(Model(dropout=0.1)))


def experts_in_float32() -> ForecastTarget:
    model = Model()
    for layer in model.layers:
        layer.up = Experts()
        layer.down = nn.Identity()
    return target(shard(model))


def transformers_model(model_type: str, **sizes: int) -> ForecastTarget:
    """A model without masked attention; Transformers leaves such masks out."""
    from transformers import AutoConfig, AutoModel

    model = AutoModel.from_config(AutoConfig.for_model(model_type, vocab_size=32, **sizes))

    def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
        model(tokens).last_hidden_state.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for blocks in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block)
    return target(fully_shard(model), step)


def causal_mask() -> ForecastTarget:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return transformers_model("llama", hidden_size=16, intermediate_size=32, **heads)


def padding_mask() -> ForecastTarget:
    """A model that makes its own padding mask of ones."""
    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    return transformers_model("bart", d_model=16, max_position_embeddings=32, **sizes)


def mixed_precision() -> ForecastTarget:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return target(shard(Model(), mp_policy=policy))


def frozen() -> ForecastTarget:
    model = Model()
    for part in (model.embed, model.layers[0]):
        part.requires_grad_(False)
    return target(shard(model))


def low_rank() -> ForecastTarget:
    model = Model().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LowRank(layer.up), LowRank(layer.down)
    return target(shard(model))


def made_on_meta_with_parts_outside() -> ForecastTarget:
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer)
    model.to_empty(device="cpu")
    return target(model)


def ignored_parameters() -> ForecastTarget:
    model = Model()
    return target(shard(model, ignored_params=set(model.layers[0].norm.parameters())))


def several_modules_in_a_unit() -> ForecastTarget:
    model = Model()
    fully_shard([model.norm, model.head])
    return target(shard(model))


def several_groups_in_a_module() -> ForecastTarget:
    placement_result = placement_result_or_skip()
    whole = init_device_mesh("cpu", (4,))
    inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    large, small = FSDPMeshInfo(whole, 0), FSDPMeshInfo(inner, 0)

    def place(parameter: nn.Parameter) -> Any:
        return placement_result(Shard(0), small if parameter.ndim == 1 else large)

    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=whole, shard_placement_fn=place)
    fully_shard(model, mesh=whole)
    return target(model)


def checkpointed_by_function() -> ForecastTarget:
    return target(shard(Model(repeats=True)))


def optimizer_in_backward() -> ForecastTarget:
    model = shard(Model())
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return ForecastTarget(model=model, step=lambda: loss_of(model, tokens).backward())


def averaged_weights() -> ForecastTarget:
    model = shard(Model())
    kept = [parameter.detach().clone() for parameter in model.parameters()]

    def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
        train(model, optimizer, tokens)
        with torch.no_grad():
            for average, parameter in zip(kept, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.01)

    return target(model, step)


def loaded_weights() -> ForecastTarget:
    model = Model()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return target(shard(model))


def values_asked() -> ForecastTarget:
    """A DataLoader that draws a seed, a logged loss that is read, and a gradient scaler."""
    rows = DataLoader([torch.zeros(TOKENS, dtype=torch.int64)] * 64, batch_size=BATCH)
    batches, scaler = iter(rows), torch.amp.GradScaler("cpu")

    def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
        loss = loss_of(model, next(batches))
        if torch.isnan(loss):
            return
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert total.item() >= 0

    return target(shard(Model()), step)


ALIKE = (
    tied_weights,
    dropout,
    experts_in_float32,
    causal_mask,
    padding_mask,
    mixed_precision,
    frozen,
    low_rank,
    made_on_meta_with_parts_outside,
    ignored_parameters,
    several_modules_in_a_unit,
    several_groups_in_a_module,
    checkpointed_by_function,
    optimizer_in_backward,
    averaged_weights,
    loaded_weights,
    values_asked,
)
"""Builders whose real tensors take exactly the memory of their forecast."""


def offloaded() -> ForecastTarget:
    return target(shard(Model(), offload_policy=CPUOffloadPolicy()))


def sizes_by_value() -> ForecastTarget:
    def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
        train(model, optimizer, tokens.flatten()[tokens.flatten().nonzero()])

    return target(shard(Model()), step)


def written_for_cuda() -> ForecastTarget:
    """Code of a script that only runs on CUDA."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.device("cuda"):
        model = Model()
    shard(model.to(device).cuda(), mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64, device=device)

    def step() -> None:
        train(model, optimizer, tokens.to(0))
        torch.cuda.synchronize()

    return ForecastTarget(model=model, step=step, optimizer=optimizer)
