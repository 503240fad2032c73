"""Train models wrapped with FSDP1 or DDP for the recorder, on gloo ranks in one launch.

    torchrun --nproc-per-node 2 wrapped_scenarios.py OUTPUT_FOLDER [SCENARIO...]

Each scenario trains twice from the same seed, without and with a recorder. torch's flight recorder
counts the collectives of the last step of each training, independently of the recorder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _runtime_utils,
    fully_sharded_data_parallel,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect import Recorder
from tests.distributed.recorder_scenarios import (
    HOOKS,
    STEPS,
    Block,
    Net,
    collected_warnings,
    loss_of,
)

SCENARIOS: dict[str, Callable[[], Scenario]] = {}
SIZES = {"Float": 4, "BFloat16": 2, "Half": 2, "Int": 4, "Long": 8, "Byte": 1}
"""Bytes of an element, by torch's name of the dtype in the flight recorder."""


@dataclass
class Scenario:
    """A wrapped model and the code of one step."""

    model: nn.Module
    backward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    """The passes of one step; None: one forward and backward."""
    explicit_steps: bool = True
    undo: Callable[[], None] | None = None


def num_ranks_of(name: str) -> int:
    """The number of ranks in a name: 3 for `ddp_one_bucket_3`; 2 for a name without a number."""
    last = name.rpartition("_")[2]
    return int(last) if last.isdecimal() else 2


def scenario(make: Callable[[], Scenario]) -> Callable[[], Scenario]:
    SCENARIOS[make.__name__] = make
    return make


def passes(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    return loss


def accumulated(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Two microbatches; only the second one reduces its gradients."""
    with model.no_sync():
        passes(model, tokens)
    return passes(model, tokens)


# --- FSDP1


def flat(model: nn.Module | None = None, **options: Any) -> nn.Module:
    settings = {"auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
    return FullyShardedDataParallel(model or Net(), device_id=torch.device("cpu"), **settings)


@scenario
def fsdp1_full_shard() -> Scenario:
    return Scenario(flat())


@scenario
def fsdp1_shard_grad_op() -> Scenario:
    return Scenario(flat(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


@scenario
def fsdp1_no_shard() -> Scenario:
    return Scenario(flat(sharding_strategy=ShardingStrategy.NO_SHARD))


@scenario
def fsdp1_original_parameters() -> Scenario:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=4000)
    return Scenario(flat(use_orig_params=True, auto_wrap_policy=policy), explicit_steps=False)


@scenario
def fsdp1_root_only() -> Scenario:
    return Scenario(flat(auto_wrap_policy=None))


@scenario
def fsdp1_mixed_precision() -> Scenario:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return Scenario(flat(mixed_precision=precision, use_orig_params=True))


@scenario
def fsdp1_forward_prefetch() -> Scenario:
    return Scenario(flat(forward_prefetch=True, limit_all_gathers=False))


@scenario
def fsdp1_late_backward_prefetch() -> Scenario:
    return Scenario(flat(backward_prefetch=BackwardPrefetch.BACKWARD_POST))


@scenario
def fsdp1_without_prefetch() -> Scenario:
    return Scenario(flat(backward_prefetch=None))


@scenario
def fsdp1_no_sync() -> Scenario:
    return Scenario(flat(), backward=accumulated)


@scenario
def fsdp1_checkpointed() -> Scenario:
    model = flat()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return Scenario(model)


@scenario
def fsdp1_frozen() -> Scenario:
    model = Net()
    model.layers[1].requires_grad_(False)
    return Scenario(flat(model))


@scenario
def fsdp1_offload() -> Scenario:
    """Offload; torch 2.13 pins memory and synchronises a stream here, which a CPU cannot do."""
    pin = torch.Tensor.pin_memory
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    torch.cpu.Stream.synchronize = lambda stream: None  # type: ignore[attr-defined]

    def undo() -> None:
        torch.Tensor.pin_memory = pin  # type: ignore[method-assign]
        del torch.cpu.Stream.synchronize  # type: ignore[attr-defined]

    return Scenario(flat(cpu_offload=CPUOffload(offload_params=True)), undo=undo)


@scenario
def fsdp1_clipped() -> Scenario:
    def clip(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss = passes(model, tokens)
        model.clip_grad_norm_(0.5)
        return loss

    return Scenario(flat(), backward=clip)


@scenario
def fsdp1_hybrid_4() -> Scenario:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return Scenario(flat(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD))


@scenario
def fsdp1_hybrid_grad_op_4() -> Scenario:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy._HYBRID_SHARD_ZERO2
    return Scenario(flat(device_mesh=mesh, sharding_strategy=strategy))


# --- DDP, on three ranks: a division by 3 shows a changed order of operations


class Partly(Net):
    """A model that leaves out its second block in every other step."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        self.calls += 1
        for index, layer in enumerate(self.layers):
            if index != 1 or self.calls % 2:
                x = layer(x)
        return self.head(self.norm(x))


def replicated(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return DistributedDataParallel(model or Net(), **{"bucket_cap_mb": 0.02, **options})


@scenario
def ddp_small_buckets_3() -> Scenario:
    return Scenario(replicated())


@scenario
def ddp_one_bucket_3() -> Scenario:
    return Scenario(replicated(bucket_cap_mb=25), explicit_steps=False)


@scenario
def ddp_unused_parameters_3() -> Scenario:
    return Scenario(replicated(Partly(), find_unused_parameters=True))


@scenario
def ddp_static_graph_3() -> Scenario:
    return Scenario(replicated(static_graph=True))


@scenario
def ddp_no_sync_3() -> Scenario:
    return Scenario(replicated(), backward=accumulated)


@scenario
def ddp_bucket_views_3() -> Scenario:
    return Scenario(replicated(gradient_as_bucket_view=True))


@scenario
def ddp_bfloat16_buffers_3() -> Scenario:
    """Buffers in bfloat16 show each rounding; a buffer is broadcast before each forward."""
    model = Net().to(torch.bfloat16)
    model.register_buffer("scale", torch.ones(8))
    return Scenario(replicated(model))


@scenario
def ddp_comm_hook_3() -> Scenario:
    model: Any = replicated()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Scenario(model)


# --- running the scenarios


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All state that the recorder may have changed, as comparable values."""
    handles = [
        module._handle
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle
    ]
    functions = [
        value
        for module in (_runtime_utils, fully_sharded_data_parallel, dist, dist.distributed_c10d)
        for value in vars(module).values()
        if callable(value)
    ]
    return {
        "hooks": {
            name: [list(map(repr, getattr(module, kind).values())) for kind in HOOKS]
            for name, module in model.named_modules()
        },
        "methods": [
            sorted(name for name, value in vars(each).items() if callable(value))
            for each in [*handles, model]
        ],
        "functions": [id(value) for value in functions],
        "kernel": torch._C._dispatch_dump("c10d::allreduce_"),
    }


def count_collectives() -> list[Any]:
    """The collectives so far according to torch's flight recorder: name, input and output bytes."""
    dumped = json.loads(_dump_fr_trace_json(True, False))
    return [
        [
            entry["profiling_name"],
            sum(map(_bytes, entry["input_sizes"], entry["input_dtypes"])),
            sum(map(_bytes, entry["output_sizes"], entry["output_dtypes"])),
        ]
        for entry in dumped.get("entries", [])
    ]


def _bytes(size: list[int], dtype: str) -> int:
    return torch.Size(size).numel() * SIZES[dtype]


def train(chosen: Scenario, path: Path | None) -> dict[str, Any]:
    """Train a scenario; with a path, under a recorder."""
    model = chosen.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    before = fingerprint(model)
    losses: list[str] = []
    collectives: list[Any] = []
    with Recorder(
        model,
        optimizer=optimizer if chosen.explicit_steps else None,
        path=path,
        enabled=path is not None,
        print_verdict=False,
        device_interval_s=0,
    ) as recorder:
        for _ in range(STEPS):
            counted = len(count_collectives())
            tokens = torch.randint(0, 64, (4, 16), generator=generator)
            with recorder.step() if chosen.explicit_steps else contextlib.nullcontext():
                loss = (chosen.backward or passes)(model, tokens)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            collectives = count_collectives()[counted:]
        recording, problems = recorder.is_recording, recorder.problems
    after = fingerprint(model)
    return {
        "losses": losses,
        "collectives": collectives,
        "changed": [key for key in before if before[key] != after[key]],
        "was_recording": recording,
        "problems": problems,
    }


def main(folder: Path, names: Sequence[str]) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo")
    for name in names or SCENARIOS:
        if num_ranks_of(name) != dist.get_world_size():
            continue
        result: dict[str, Any] = {}
        for kind, path in (("bare", None), ("recorded", folder / name)):
            torch.manual_seed(0)
            chosen = SCENARIOS[name]()
            with collected_warnings() as found:
                result[kind] = train(chosen, path)
            result["warnings"] = found
            if chosen.undo is not None:
                chosen.undo()
        (folder / f"{name}.rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
