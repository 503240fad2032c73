"""Train models and loops that the recorder must support; one launch of torchrun runs all.

    torchrun --nproc-per-node 2 recorder_scenarios.py OUTPUT_FOLDER [SCENARIO...]

Each scenario trains twice from the same seed, without and with a recorder, and writes the data that
the tests compare: losses, the model before and after, and the warnings.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fsdp_inspect import Recorder
from fsdp_inspect.recording.torch_api import fsdp2
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

WIDTH = 32
STEPS = 5
SCENARIOS: dict[str, Callable[[], Scenario]] = {}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Scenario:
    """A sharded model and the code of one step."""

    model: nn.Module
    step: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor] | None = None
    after_step: Callable[[nn.Module, int], None] | None = None
    explicit_steps: bool = True
    options: dict[str, Any] | None = None


def scenario(make: Callable[[], Scenario]) -> Callable[[], Scenario]:
    SCENARIOS[make.__name__] = make
    return make


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> torch.Tensor:
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def shard_blocks(model: Net, **options: Any) -> Net:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.head], **options)
    fully_shard(model, **options)
    return model


# --- two ranks


@scenario
def blocks() -> Scenario:
    return Scenario(shard_blocks(Net()))


@scenario
def no_step_calls() -> Scenario:
    return Scenario(shard_blocks(Net()), explicit_steps=False)


@scenario
def unit_used_twice() -> Scenario:
    class Twice(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.layers[1](self.layers[0](self.embed(tokens))))
            return self.head(self.norm(self.layers[2](x)))

    return Scenario(shard_blocks(Twice()))


@scenario
def nested_units() -> Scenario:
    model = Net()
    for layer in model.layers:
        fully_shard(layer.up)
        fully_shard(layer)
    fully_shard(model)
    return Scenario(model)


@scenario
def no_root_unit() -> Scenario:
    model = Net()
    for module in (model.embed, *model.layers, model.norm, model.head):
        fully_shard(module)
    return Scenario(model)


@scenario
def frozen_blocks() -> Scenario:
    model = Net()
    for parameter in model.layers[:2].parameters():
        parameter.requires_grad_(False)
    return Scenario(shard_blocks(model))


@scenario
def checkpointed_inside_fsdp() -> Scenario:
    model = Net()
    for place, layer in enumerate(model.layers):
        model.layers[place] = checkpoint_wrapper(layer)
    return Scenario(shard_blocks(model))


@scenario
def checkpointed_outside_fsdp() -> Scenario:
    model = Net()
    for place, layer in enumerate(model.layers):
        fully_shard(layer)
        model.layers[place] = checkpoint_wrapper(layer)
    fully_shard(model)
    return Scenario(model)


@scenario
def accumulation_without_sync() -> Scenario:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
    ) -> torch.Tensor:
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            loss = loss_of(model(tokens), tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Scenario(shard_blocks(Net()), step)


@scenario
def evaluation_between_steps() -> Scenario:
    def evaluate(model: nn.Module, step: int) -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.zeros(2, 8, dtype=torch.long))
        model.train()

    return Scenario(shard_blocks(Net()), after_step=evaluate)


@scenario
def structured_outputs() -> Scenario:
    @dataclass
    class Output:
        logits: torch.Tensor
        extras: dict[str, tuple[torch.Tensor, ...]]

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 64)

        def forward(self, *, hidden: dict[str, torch.Tensor]) -> Output:
            return Output(self.linear(hidden["x"]), {"hidden": (hidden["x"],)})

    class Structured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = Head()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            output = self.head(hidden={"x": self.norm(x)})
            return output.logits + 0 * output.extras["hidden"][0].sum()

    model = Structured()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model.head)
    fully_shard(model)
    return Scenario(model)


@scenario
def clipping_and_loss_reduction() -> Scenario:
    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
    ) -> torch.Tensor:
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        handle = dist.all_reduce(torch.ones(4), async_op=True)
        handle.wait()
        dist.barrier()
        return mean

    return Scenario(shard_blocks(Net()), step)


@scenario
def asynchronous_prefetch() -> Scenario:
    model = shard_blocks(Net(blocks=4))
    model._set_unshard_async_op(True)
    layers = list(model.layers)
    for earlier, later in itertools.pairwise(layers):
        earlier.set_modules_to_forward_prefetch([later])
    return Scenario(model)


@scenario
def torch_setter_called_later() -> Scenario:
    def replace(model: nn.Module, step: int) -> None:
        if step == 1:
            model.layers[0].set_allocate_memory_from_process_group_for_comm(True)

    return Scenario(shard_blocks(Net()), after_step=replace)


@scenario
def bf16_with_fp32_reduction() -> Scenario:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return Scenario(shard_blocks(Net(), mp_policy=policy))


@scenario
def offloaded() -> Scenario:
    return Scenario(shard_blocks(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


@scenario
def several_groups_in_a_module() -> Scenario:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )

    model = Net()
    ranks = list(range(dist.get_world_size()))
    whole = init_device_mesh("cpu", (len(ranks),))
    other = DeviceMesh.from_group(dist.new_group(ranks), "cpu")
    apart = FSDPMeshInfo(mesh=other, shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        if any(parameter is expert for expert in experts):
            return ShardPlacementResult(placement=None, mesh_info=apart)
        return None

    experts = [layer.up.weight for layer in model.layers]
    for layer in model.layers:
        fully_shard(layer, mesh=whole, shard_placement_fn=place)
    fully_shard(model, mesh=whole)
    return Scenario(model)


@scenario
def hostile_unit_names() -> Scenario:
    model = Net()
    name = "<script>alert(1)</script> `x` $y$"
    model.add_module(name, nn.Linear(WIDTH, WIDTH))

    class Hooked(nn.Module):
        def __init__(self, inner: Net) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            inner = self.inner
            extra = getattr(inner, name)
            return inner.head(inner.norm(extra(inner.embed(tokens))))

    model.layers = nn.ModuleList()
    fully_shard(getattr(model, name))
    wrapper = Hooked(model)
    fully_shard(wrapper)
    return Scenario(wrapper)


# --- four ranks


@scenario
def hybrid_sharding_4() -> Scenario:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return Scenario(shard_blocks(Net(), mesh=mesh))


@scenario
def integer_reshard_4() -> Scenario:
    model = Net()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    return Scenario(model)


@scenario
def tensor_parallel_4() -> Scenario:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return Scenario(model)


# --- running the scenarios


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All state that the recorder may have changed, as comparable text."""
    hooks = {
        name: [list(map(repr, getattr(module, kind).values())) for kind in HOOKS]
        for name, module in model.named_modules()
    }
    groups = [
        {
            "instance": sorted(
                name for name, value in vars(handle.group).items() if callable(value)
            ),
            "gather": type(handle.group._all_gather_comm).__mro__[0].__module__,
            "scatter": type(handle.group._reduce_scatter_comm).__mro__[0].__module__,
        }
        for handle in fsdp2.find_groups(model)
    ]
    functions = [
        id(function)
        for function in (
            dist.all_reduce,
            dist.all_gather_into_tensor,
            dist.barrier,
            functional.all_reduce,
            functional.wait_tensor,
            torch.autograd.backward,
            torch.UntypedStorage.resize_,
            _BaseDataLoaderIter.__next__,
            torch.utils.checkpoint._recomputation_hook.__enter__,
        )
    ]
    return {"hooks": hooks, "groups": groups, "functions": functions}


HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def train(chosen: Scenario, path: Path | None) -> dict[str, Any]:
    """Train a scenario; with a path, under a recorder."""
    model = chosen.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    before = fingerprint(model)
    losses = []
    with Recorder(
        model,
        optimizer=optimizer if chosen.explicit_steps else None,
        path=path,
        enabled=path is not None,
        print_verdict=False,
        config={"scenario": "x", "device": torch.device("cpu")},
        **(chosen.options or {}),
    ) as recorder:
        for step in range(STEPS):
            tokens = torch.randint(0, 64, (4, 16), generator=generator)
            with recorder.step() if chosen.explicit_steps else contextlib.nullcontext():
                loss = (chosen.step or plain_step)(model, optimizer, tokens)
            recorder.log(loss=loss)
            losses.append(loss.item().hex())
            if chosen.after_step is not None:
                chosen.after_step(model, step)
        recording = recorder.is_recording
        problems = recorder.problems
    return {
        "losses": losses,
        "is_restored": before == fingerprint(model) or describe_difference(before, model),
        "was_recording": recording,
        "problems": problems,
    }


def describe_difference(before: dict[str, Any], model: nn.Module) -> list[str]:
    after = fingerprint(model)
    return [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
        found.extend(str(item.message) for item in caught if "fsdp_inspect" in str(item.message))


def main(folder: Path, names: Sequence[str]) -> None:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dist.init_process_group("gloo")
    wanted = dist.get_world_size() == 4
    for name in names or SCENARIOS:
        if name.endswith("_4") != wanted:
            continue
        make = SCENARIOS[name]
        torch.manual_seed(0)
        bare = train(make(), None)
        torch.manual_seed(0)
        with collected_warnings() as found:
            recorded = train(make(), folder / name)
        result = {"bare": bare, "recorded": recorded, "warnings": found}
        (folder / f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    release_process_groups()
