"""Train a few steps under a torch with one changed name, with or without the recorder.

`changed_torch.py CHANGE RECORD FOLDER RANK WORLD`: `CHANGES` maps a change to code that makes it
before the import of the recorder. It prints the losses as hexadecimal numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param as flat_param, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

PRIVATE = "torch.distributed.fsdp._fully_shard"


def remove(owner: Any, name: str) -> None:
    delattr(owner, name)


def add_argument(owner: Any, name: str) -> None:
    """torch passes one more argument, which the original ignores."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(self: Any, *args: Any, new_option: bool = False, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    setattr(owner, name, changed)


class Hidden:
    """A method or an attribute that has another name for all but torch."""

    def __init__(self, name: str, original: Any) -> None:
        self._name, self._original = name, original

    def __get__(self, instance: Any, owner: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("fsdp_inspect"):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        if self._original is not None:
            return self._original.__get__(instance, owner)
        known = instance.__dict__
        return known.get(f"renamed{self._name}", known.get(self._name))

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[f"renamed{self._name}"] = value


def hide(owner: Any, name: str) -> None:
    setattr(owner, name, Hidden(name, getattr(owner, name, None)))


def return_another_type(owner: Any, name: str) -> None:
    """What torch returns is wrapped, and torch unwraps it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        caller = sys._getframe(1).f_globals["__name__"]
        return object() if caller.startswith("fsdp_inspect") else result

    setattr(owner, name, changed)


CHANGES: dict[str, tuple[str, Callable[[], object]]] = {
    "fsdp2 class is missing": ("fsdp2", lambda: remove(_fsdp_common, "TrainingState")),
    "fsdp2 module is missing": (
        "fsdp2",
        lambda: sys.modules.update({f"{PRIVATE}._fsdp_param_group": None}),  # type: ignore[dict-item]
    ),
    "fsdp2 method is renamed": ("fsdp2", lambda: hide(FSDPParamGroup, "finalize_backward")),
    "fsdp2 method has an argument": ("fsdp2", lambda: add_argument(FSDPParamGroup, "unshard")),
    "fsdp2 attribute is renamed": ("fsdp2", lambda: hide(FSDPParamGroup, "_all_gather_comm")),
    "fsdp2 state is renamed": ("fsdp2", lambda: hide(FSDPParamGroup, "_training_state")),
    "fsdp2 method returns another type": (
        "fsdp2",
        lambda: return_another_type(_fsdp_state, "_get_module_fsdp_state"),
    ),
    "fsdp1 class is missing": ("fsdp1", lambda: remove(flat_param, "FlatParamHandle")),
    "fsdp1 method is renamed": (
        "fsdp1",
        lambda: hide(flat_param.FlatParamHandle, "_all_gather_flat_param"),
    ),
    "fsdp1 attribute is renamed": (
        "fsdp1",
        lambda: hide(flat_param.FlatParamHandle, "_sharding_strategy"),
    ),
    "ddp reducer is renamed": ("ddp", lambda: hide(DistributedDataParallel, "reducer")),
    "ddp attribute is renamed": (
        "ddp",
        lambda: hide(DistributedDataParallel, "_module_parameters"),
    ),
}


def make_model(sharder: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    if sharder == "ddp":
        return DistributedDataParallel(model)
    if sharder == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def main(change: str, record: str, folder: str, rank: str, world: str) -> None:
    sharder, apply = CHANGES[change]
    store = dist.FileStore(f"{folder}-store-{record}", int(world))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    model = make_model(sharder)
    apply()
    from fsdp_inspect import Recorder

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(
        model, optimizer=optimizer, path=folder, enabled=record == "yes", print_verdict=False
    ) as recorder:
        for step in range(4):
            with recorder.step():
                loss = model(torch.full((2, 8), (step + int(rank)) / 7)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            recorder.log(loss=loss)
            print(loss.item().hex())
    dist.destroy_process_group()
    from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

    release_process_groups()


if __name__ == "__main__":
    main(*sys.argv[1:])
