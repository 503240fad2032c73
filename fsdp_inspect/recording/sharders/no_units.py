"""Record a model whose units cannot be read: steps, collectives, memory and logged values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.models import Models
from fsdp_inspect.recording.patches import warn
from fsdp_inspect.recording.sharders.base import Sharder, ShardingHooks
from fsdp_inspect.recording.sharders.model_forward import wrap_model_forward
from fsdp_inspect.recording.sharders.zero import call_torch_for_collectives
from fsdp_inspect.recording.torch_api import deepspeed_zero
from fsdp_inspect.recording.torch_api.marks import sharder_name_of
from fsdp_inspect.recording.torch_api.needs import find_missing_name
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.trace.sharders import DDP, FSDP1, NO_UNITS, ZERO3, traits_of

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.patches import Patches
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups
    from fsdp_inspect.trace.run import Unit


class NoUnits(Sharder[Any]):
    """A sharded model without units, because torch or DeepSpeed lacks a name that they need."""

    name = NO_UNITS
    has_numerics = False

    def __init__(self, model: nn.Module, sharder: str, missing: str) -> None:
        """`sharder` is the name of the model's sharder, `missing` says what is missing."""
        super().__init__(())
        named = model.named_modules()
        self.wrappers: Sequence[tuple[str, Any]] = [
            (name, each) for name, each in named if sharder_name_of(each) == DDP
        ]
        """The wrapped models of DDP, with their names; see `ddp.WrappedModels`."""
        self._model = model
        self._title = traits_of(sharder).title
        library = "DeepSpeed" if sharder.startswith("zero") else "torch"
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
            f"is unchanged. {part}Install a newer fsdp-inspect, or a version of {library} that it "
            "supports."
        )
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

    def close(self) -> None:
        """Do nothing."""

    def _wrap_forward(self, model: nn.Module) -> Callable[..., Any]:
        return wrap_model_forward(
            model.forward, self._session, self._memory, key=lambda: (id(model), model.training)
        )
