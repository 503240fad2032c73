"""Find the sharder of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_inspect.errors import FsdpInspectError, RecordingError
from fsdp_inspect.recording.models import Models, all_modules
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.recording.sharders.base import Sharder, ShardingHooks, wrap_model_forward
from fsdp_inspect.recording.sharders.zero import call_torch_for_collectives
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.torch_api import deepspeed_zero
from fsdp_inspect.recording.torch_api.engine_names import is_engine
from fsdp_inspect.recording.torch_api.marks import (
    has_sparse_gradients,
    is_composable_replica,
    sharder_name_of,
)
from fsdp_inspect.recording.torch_api.needs import find_missing_name, find_missing_part
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.trace.sharders import (
    DDP,
    DEEPSPEED,
    FSDP1,
    FSDP2,
    NO_UNITS,
    SIMPLE_FSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    traits_of,
)

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.patches import Patches
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups
    from fsdp_inspect.trace.run import Unit


_CLASSES = {
    FSDP2: "fsdp2.Fsdp2",
    FSDP1: "fsdp1.Fsdp1",
    DDP: "ddp.Ddp",
    ZERO1: "zero12.Zero1",
    ZERO2: "zero12.Zero2",
    ZERO3: "zero3.Zero3",
    SIMPLE_FSDP: "simple_fsdp.SimpleFsdp",
}
"""Every sharder that the recorder supports, with its class, which is imported for its first model:
another version of torch may lack a name that it needs."""


def find_sharder(model: nn.Module) -> Sharder[Any]:
    """Find the units of a model.

    Returns:
        The sharder with its units; `NoUnits` if this version of torch or DeepSpeed has changed a
        name that they need.

    Raises:
        RecordingError: The model has no units, or units of several sharders. The message has the
            kind of model and the remedy.
    """
    marked = {sharder_name_of(module) for module in model.modules()}
    if any(map(is_engine, model.modules())):
        marked.add(ZERO1)  # it refuses an engine without ZeRO
    searched = (_find(sharder, model) for sharder in _CLASSES if sharder in marked)
    found = [each for each in searched if each is not None]
    name = type(model).__name__
    if len(found) > 1:
        titles = " and ".join(each.title for each in found)
        raise RecordingError(
            f"{name} has units of {titles}. Expected one sharder in a recording. Record the models "
            "of each sharder in a run of their own."
        )
    if found:
        return found[0]
    engine = wrapper_around(model) if "deepspeed" in sys.modules else model
    if engine is not model:
        return find_sharder(engine)
    if any(map(is_composable_replica, model.modules())):
        raise RecordingError(
            f"{name} is replicated by torch's composable replicate, which is unsupported: it has "
            "neither units of fully_shard nor a DistributedDataParallel around it. Expected one of "
            "them. Wrap the model in DistributedDataParallel(model), which trains in the same way."
        )
    raise RecordingError(
        f"{name} is not sharded: fully_shard was never called on it or on a module in it, and it "
        "has no FullyShardedDataParallel, no DistributedDataParallel and no DeepSpeed engine. "
        "Attach the recorder after fully_shard(...) or after wrapping the model, and pass the "
        "model that was sharded or wrapped: with DeepSpeed, the engine."
    )


def _find(sharder: str, model: nn.Module) -> Sharder[Any] | None:
    """The units that a sharder has made of a model; None if it has made none."""
    missing = find_missing_name(sharder)
    if missing is not None:
        return NoUnits(model, sharder, missing)
    if sharder == DDP and has_sparse_gradients(model):  # the reducer fails for such a bucket
        missing = "it does not tell the buckets of sparse gradients"
        return NoUnits(model, sharder, missing, "To see the units, use Embedding(sparse=False).")
    module, _, name = _CLASSES[sharder].partition(".")
    try:
        kind = getattr(import_module(f"{__package__}.{module}"), name)
        found: Sharder[Any] | None = kind.find(model)
        if found is None:
            return None
        missing = find_missing_part(sharder, found.units[0])
    except FsdpInspectError:
        raise
    except Exception as error:  # a private name that has another meaning
        raise_if_of_signal(error)
        missing = " ".join(repr(error).split())
    return found if missing is None else NoUnits(model, sharder, missing)


def wrapper_around(model: nn.Module) -> nn.Module:
    """The FSDP1, DDP or DeepSpeed wrapper of a model; else the model itself.

    Training libraries pass the model that the user gave them, and keep the wrapper to themselves.
    With FSDP1 that model contains wrapped blocks, but the wrapper has the root's parameters.
    """
    if sharder_name_of(model) is not None:
        return model
    return next(
        (
            each
            for each in all_modules()
            if sharder_name_of(each) is not None and getattr(each, "module", None) is model
        ),
        model,
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether a module of the model belongs to a sharder."""
    return any(sharder_name_of(module) is not None for module in model.modules())


# --- Record a model whose units cannot be read: steps, collectives, memory and logged values.


class NoUnits(Sharder[Any]):
    """A sharded model without units, because torch or DeepSpeed lacks a name that they need."""

    name = NO_UNITS
    has_numerics = False

    def __init__(
        self, model: nn.Module, sharder: str, missing: str, remedy: str | None = None
    ) -> None:
        """Prepare the recording.

        Args:
            model: The model.
            sharder: The name of its sharder.
            missing: What is missing.
            remedy: What to do; None: another version.
        """
        super().__init__(())
        named = model.named_modules()
        self.wrappers: Sequence[tuple[str, Any]] = [
            (name, each) for name, each in named if sharder_name_of(each) == DDP
        ]
        """The wrapped models of DDP, with their names; see `ddp.WrappedModels`."""
        self._model = model
        self._title = traits_of(sharder).title
        library = "DeepSpeed" if sharder in DEEPSPEED else "torch"
        version = getattr(__import__(library.lower()), "__version__", "of an unknown version")
        self._engines = deepspeed_zero.find_engines(model)
        self._sees_buckets = sharder == DDP and find_missing_name(DDP) is None
        self._collectives = "the collectives of torch.distributed"
        if sharder == DDP and not self._sees_buckets:
            self._collectives += " without the all-reduces of DDP"
        part = ""
        if sharder in (FSDP1, ZERO3):
            part = "The number of parameters counts only those of the rank. "
        self.reason = (
            f"The units of {self._title} are not recorded with {library} {version}: {missing}. "
            f"Steps, memory, logged values and {self._collectives} are recorded, and the training "
            f"is unchanged. {part}"
        ) + (remedy or f"Install a newer fsdp-inspect, or a version of {library} that it supports.")
        """Why there are no units, what is recorded, and what to do."""

    @classmethod
    def find(cls, model: nn.Module) -> Self | None:
        """None: `find_sharder` makes it in the place of another sharder."""
        return None

    @property
    def title(self) -> str:
        """The model's sharder, as users call it."""
        return self._title

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the host for a model without parameters."""
        return next((each.device for each in self._model.parameters()), torch.device("cpu"))

    def optimizers(
        self, given: Sequence[torch.optim.Optimizer] | None
    ) -> Sequence[torch.optim.Optimizer] | None:
        """The given optimizers; of engines, those that DeepSpeed holds."""
        return deepspeed_zero.optimizers_of(self._engines) if self._engines else given

    def outer_optimizers(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        """The optimizers of engines."""
        return deepspeed_zero.outer_optimizers_of(self._engines)

    def note_backward(self) -> None:
        """Do nothing; see `ddp.WrappedModels`."""

    def update_units(self) -> None:
        """Do nothing; see `ddp.WrappedModels`."""

    def make_hooks(self, session: Session, memory: MemoryProbe) -> ShardingHooks:
        """Hooks on the forward of the model, or of each of several models."""
        session.problem(self.reason)
        if dist.get_rank() == 0:
            warn(self.reason)
        if self._sees_buckets:
            from fsdp_inspect.recording.sharders.ddp import BucketHooks

            return BucketHooks(session, self, memory)
        several = isinstance(self._model, Models)
        models = list(self._model.children()) if several else [self._model]
        return NoHooks(session, memory, models, uses_deepspeed=bool(self._engines))

    def mesh(self) -> dict[str, int]:
        """One dimension: how the ranks share the model is unknown."""
        return {"world": dist.get_world_size()}

    def meshes(self) -> list[DeviceMesh]:
        """The meshes of the parameters."""
        found = (each for each in self._model.parameters() if isinstance(each, DTensor))
        return list(dict.fromkeys(each.device_mesh for each in found))

    def process_groups(self) -> tuple[()]:
        """Empty: the groups of the units are unknown."""
        return ()

    def describe_unit(self, handle: Any, index: int, name: str, groups: ProcessGroups) -> Unit:
        """Never called: there is no unit."""
        raise NotImplementedError


class NoHooks:
    """The hooks of a model without units; see `ShardingHooks`."""

    def __init__(
        self,
        session: Session,
        memory: MemoryProbe,
        models: Sequence[nn.Module],
        *,
        uses_deepspeed: bool,
    ) -> None:
        self._session, self._memory, self._models = session, memory, models
        self._uses_deepspeed = uses_deepspeed
        self._reductions = Reductions()

    def attach(self, patches: Patches) -> None:
        """Wrap the forward of each model, and DeepSpeed's collectives."""
        if self._uses_deepspeed:
            call_torch_for_collectives(patches)
        for model in self._models:
            patches.set_attribute(model, "forward", self._wrap_forward(model))

    def reductions_of(self, unit: int) -> Reductions:
        """Reductions that no unit waits for."""
        return self._reductions

    def end_step(self) -> None:
        """Do nothing, because no reduction belongs to a unit."""

    def choose_detail(self, is_detailed: bool) -> None:
        """Do nothing: there are no units."""

    def close(self) -> None:
        """Do nothing."""

    def _wrap_forward(self, model: nn.Module) -> Callable[..., Any]:
        return wrap_model_forward(
            model.forward, self._session, self._memory, key=lambda: (id(model), model.training)
        )
