"""A training loop with one planted fault: `equivalence_script.py FAULT [SETTING ...]`."""

import contextlib
import sys

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_inspect.recording.equivalence.start import start

start()  # forked ranks have no `sitecustomize`

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

FAULT, *SETTINGS = sys.argv[1:] or ["none"]
WIDTH, BATCH, BLOCKS = 16, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1 if "dropout" in SETTINGS else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        output = self.head(x)
        return (output, 2 * x) if "outputs" in SETTINGS else output


def shard(model: Model) -> None:
    """Shard each block and the root, with the planted fault."""
    dtypes = [torch.bfloat16, torch.float32] if "bf16" in SETTINGS else [None, None]
    policy = MixedPrecisionPolicy(*dtypes)
    ignored = {model.scale} if FAULT == "ignored" else None
    mesh = None
    if "tp" in SETTINGS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], styles)
        mesh = mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for part in [*model.layers, model]:
        part.set_force_sum_reduction_for_comms(True)  # gloo supports no other division
    if FAULT == "divisor":
        model.layers[1].set_gradient_divide_factor(3.0 * dist.get_world_size())
    sums = {"sum": [*model.layers, model], "sum-of-one": [model.layers[1]]}
    for part in sums.get(FAULT, []):
        part.set_gradient_divide_factor(1.0)
    if FAULT == "dtype":
        for parameter in model.layers[1].parameters():
            parameter.register_post_accumulate_grad_hook(round_gradient)


def wrap(model: Model) -> nn.Module:
    """Wrap the model for DDP or FSDP1, with the planted fault."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()] if FAULT == "alone" else None
    if "ddp" in SETTINGS:
        return nn.parallel.DistributedDataParallel(
            model,
            process_group=group,
            gradient_as_bucket_view="views" in SETTINGS,
            static_graph="static" in SETTINGS,
            find_unused_parameters="outputs" in SETTINGS,
        )
    dtypes = [torch.bfloat16, torch.float32] if "bf16" in SETTINGS else [None, None]
    options = {
        "process_group": group,
        "device_id": torch.device("cpu"),
        "use_orig_params": "orig" in SETTINGS,
        "mixed_precision": MixedPrecision(*dtypes),
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP if "grad-op" in SETTINGS else None,
    }
    for at, layer in enumerate(model.layers):
        model.layers[at] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def train_wrapped(model: nn.Module) -> None:
    """Train a model of DDP or FSDP1 for three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    microbatches = 2 if "accumulate" in SETTINGS else 1
    for _ in range(3):
        for microbatch in range(microbatches):
            is_last = microbatch == microbatches - 1 and FAULT != "no-sync"
            with contextlib.nullcontext() if is_last else model.no_sync():
                x = torch.randn(BATCH, WIDTH)
                output = model(x)
                output = output[0] if "outputs" in SETTINGS else output
                loss = (output - x.roll(1, 0)).float().square().mean() / microbatches
                if FAULT == "twice":
                    loss = loss / dist.get_world_size()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def round_gradient(parameter: nn.Parameter) -> None:
    """Lose the precision of a gradient."""
    if parameter.grad is not None:
        local = parameter.grad.to_local()
        local.copy_(local.bfloat16())


def skip_reduction(model: Model) -> None:
    """Replace the reduction of a block by the rank's own part of its own gradient."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    class Own(_fsdp_collectives.DefaultReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            size = output_tensor.numel()
            start = dist.get_rank(group) * size
            output_tensor.copy_(input_tensor[start : start + size])

    model.layers[1].set_custom_reduce_scatter(Own())


def keep_stale(model: Model) -> None:
    """Compute a block with the parameters of its first forward."""
    kept: dict[str, torch.Tensor] = {}

    def use_kept(module: nn.Module, args: object) -> None:
        for name, parameter in module.named_parameters():
            kept.setdefault(name, parameter.detach().clone())
            parameter.data.copy_(kept[name])

    model.layers[1].register_forward_pre_hook(use_kept)


def backward(model: Model, step: int) -> None:
    """Run the forwards and backwards of a step."""
    microbatches = 2 if "accumulate" in SETTINGS else 1
    scale = 0.5 if "closure" in SETTINGS else 1.0
    for microbatch in range(microbatches):
        is_last = microbatch == microbatches - 1
        model.layers[1].set_requires_gradient_sync(is_last)
        if FAULT == "missing" and step:
            model.layers[2].set_requires_gradient_sync(False)
        x = torch.randn(BATCH, WIDTH)
        noise = numpy.random.default_rng().random() if FAULT == "labels" else 0.0
        loss = (model(x) - x.roll(1, 0) - noise).float().square().mean() * scale / microbatches
        if FAULT == "twice":
            loss = loss / dist.get_world_size()
        loss.backward()


def change_gradients(model: Model) -> None:
    """Change gradients between backward and update."""
    if "reduce" in SETTINGS:
        dist.all_reduce(model.scale.grad, op=dist.ReduceOp.SUM)
        model.scale.grad /= dist.get_world_size()
    if FAULT == "twice-later":
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()
    if FAULT == "dtype-later":
        for parameter in model.layers[0].parameters():
            round_gradient(parameter)
    if "clip" in SETTINGS:
        nn.utils.clip_grad_norm_(model.layers.parameters(), 0.1)


def main() -> None:
    """Train for three steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    if {"ddp", "fsdp1"} & {*SETTINGS}:
        model = wrap(model)
        torch.manual_seed(dist.get_rank())
        train_wrapped(model)
        dist.destroy_process_group()
        return
    early = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shard(model)
    if FAULT == "own":
        skip_reduction(model)
    if FAULT == "stale":
        keep_stale(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if FAULT != "early" else early
    torch.manual_seed(dist.get_rank() // (2 if "tp" in SETTINGS else 1))
    for step in range(3):
        if "closure" in SETTINGS:
            backward(model, step)
            optimizer.step(lambda step=step: backward(model, step))
            optimizer.zero_grad()
            continue
        backward(model, step)
        change_gradients(model)
        optimizer.step()
        if "keep" not in SETTINGS:
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
