"""Record DeepSpeed engines with ZeRO-1, ZeRO-2 or ZeRO-3: the parts that all stages share.

[Note: Where the recorder attaches to DeepSpeed]
DeepSpeed calls `torch.distributed` through its communication backend. The backend looks up most
functions at each call, so `dist_calls` sees them. It keeps references to two functions, all-gather
and reduce-scatter. These two are replaced on the backend.

The reductions of gradients are ordinary calls inside methods of the ZeRO optimizer. While such a
method runs, the bucket's unit is the unit whose hook runs, so `dist_calls` records the collective
for it. ZeRO-1, and the last bucket of each stage, reduce after autograd has returned. They count as
part of that backward.

The step of the ZeRO optimizer reduces the norm, steps a torch optimizer for each group of
parameters, and gathers the parameters (ZeRO-1 and ZeRO-2). It counts as one optimizer step.

DeepSpeed is never imported: a model with an engine has imported it.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.sharders.base import Sharder, wrap_model_forward
from fsdp_inspect.recording.torch_api import deepspeed_zero
from fsdp_inspect.recording.torch_api.marks import stage_of
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.trace.codes import NO_UNIT, Phase

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import UnitHandle

HandleT = TypeVar("HandleT", bound="UnitHandle")


class Zero(Sharder[HandleT]):
    """The units of DeepSpeed engines of one stage."""

    stage: ClassVar[int]
    has_numerics = False

    def __init__(self, engines: Sequence[tuple[str, Any]]) -> None:
        self.engines = engines
        super().__init__(self.find_units())

    @abstractmethod
    def find_units(self) -> list[HandleT]:
        """The current units of all engines."""

    @classmethod
    def find(cls, model: nn.Module) -> Self | None:
        """The units of a model; see `Sharder.find`."""
        engines = deepspeed_zero.find_engines(model)
        stages = {stage_of(engine) for _, engine in engines}
        if engines and stages - {1, 2, 3}:
            names = ", ".join(type(engine.optimizer).__name__ for _, engine in engines)
            raise RecordingError(
                f"The optimizer of the DeepSpeed engine is {names}, which the recorder does not "
                'support. Expected ZeRO stage 1, 2 or 3: {"zero_optimization": {"stage": 3}}.'
            )
        if cls.stage not in stages:
            return None
        if len(stages) > 1:
            found = " and ".join(f"ZeRO-{stage}" for stage in sorted(stages, key=str))
            raise RecordingError(
                f"The engines use {found}. Expected one stage in a recording. Record the models of "
                "each stage in a run of their own."
            )
        return cls(engines)

    @property
    def device(self) -> torch.device:
        """The device of compute."""
        return torch.device(self.engines[0][1].device)

    def mesh(self) -> dict[str, int]:
        """One dimension: the ranks that share parameters, gradients or optimizer states."""
        return {"shard": deepspeed_zero.group_of(self.engines[0][1]).size()}

    def process_groups(self) -> list[tuple[dist.ProcessGroup | None, str]]:
        """The group of each engine."""
        return [(deepspeed_zero.group_of(engine), "shard") for _, engine in self.engines]

    def optimizers(
        self, given: Sequence[torch.optim.Optimizer] | None
    ) -> list[torch.optim.Optimizer]:
        """The torch optimizers inside the engines; DeepSpeed replaces the user's optimizers."""
        return deepspeed_zero.optimizers_of(self.engines)

    def outer_optimizers(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        """The ZeRO optimizers."""
        return deepspeed_zero.outer_optimizers_of(self.engines)

    def settings(self) -> dict[str, str]:
        """The settings of the first engine."""
        return deepspeed_zero.zero_settings_of(self.engines[0][1])


class ZeroHooks:
    """The hooks on engines; see [Note: Where the recorder attaches to DeepSpeed]."""

    def __init__(self, session: Session, sharder: Zero[Any], memory: MemoryProbe) -> None:
        self._session = session
        self._sharder = sharder
        self._memory = memory
        self._reductions = Reductions()

    def attach(self, patches: Patches) -> None:
        """Install the hooks; see `ShardingHooks.attach`."""
        call_torch_for_collectives(patches, self._gather_with(_all_gather))
        for _, engine in self._sharder.engines:
            patches.set_attribute(engine, "forward", self._wrap_forward(engine))
            self.attach_to(engine, patches)

    @abstractmethod
    def attach_to(self, engine: Any, patches: Patches) -> None:
        """Install the hooks of a stage on an engine."""

    @abstractmethod
    def gather(
        self, collective: Callable[[], Any], output: torch.Tensor, shard: torch.Tensor, group: Any
    ) -> Any:
        """Run an all-gather of DeepSpeed, and record it for its unit.

        Args:
            collective: Runs it. `dist_calls` records it without a unit, unless it runs inside
                `run_inside_collective`.
            output: The gathered message.
            shard: This rank's part.
            group: The process group; None means the default group.
        """

    def begin_forward(self, engine: Any) -> None:
        """Called when the forward of an engine begins."""

    def reductions_of(self, unit: int) -> Reductions:
        """The reductions that DeepSpeed waits for at the end of backward."""
        return self._reductions

    def end_step(self) -> None:
        """Do nothing, because each stage closes its own events."""

    def choose_detail(self, is_detailed: bool) -> None:
        """Do nothing: the hooks return early in a plain step."""

    def close(self) -> None:
        """Do nothing, because each stage closes its own events."""

    def reducing(
        self,
        original: Callable[..., Any],
        unit_of: Callable[..., int],
        after: Callable[[int], None] | None = None,
    ) -> Callable[..., Any]:
        """Wrap a method that reduces gradients; its collectives belong to `unit_of(*arguments)`."""
        session = self._session

        def enter(*args: Any, **kwargs: Any) -> tuple[int, int, Phase, int]:
            outer = (session.hook_unit, session.phase, session.microbatch)
            unit = unit_of(*args, **kwargs)
            if unit != NO_UNIT:
                session.hook_unit = unit
            if session.phase == Phase.OUTSIDE:  # autograd has returned
                session.phase = Phase.BACKWARD
                session.microbatch = max(session.microbatch - 1, 0)
            return (unit, *outer)

        def leave(token: tuple[int, int, Phase, int] | None, result: Any) -> None:
            if token is None:
                return
            unit, session.hook_unit, session.phase, session.microbatch = token
            if after is not None:
                after(unit)

        return wrap_call(original, enter, leave, session)

    def _gather_with(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        def all_gather_into_tensor(
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            def collective() -> Any:
                return original(output_tensor, input_tensor, group, *args, **kwargs)

            if not session.active or session.collective_depth:
                return collective()
            return self.gather(collective, output_tensor, input_tensor, group or dist.group.WORLD)

        return all_gather_into_tensor

    def _wrap_forward(self, engine: Any) -> Callable[..., Any]:
        begin = functools.partial(self.begin_forward, engine)
        return wrap_model_forward(engine.forward, self._session, self._memory, on_begin=begin)

    def classify_gradients(self) -> None:
        """Classify the gradients of all units after a backward, in a memory step."""
        session = self._session
        if session.tracker is None:
            return
        for category, tensor in self._sharder.shared_buffers():
            session.tracker.classify([tensor], category, NO_UNIT)


def call_torch_for_collectives(patches: Patches, gather: Callable[..., Any] | None = None) -> None:
    """Make DeepSpeed look up its collectives in `torch.distributed`, where they are recorded.

    DeepSpeed keeps references to the functions, which a wrap of `torch.distributed` misses.

    Args:
        patches: Undoes it.
        gather: Called in the place of `torch.distributed.all_gather_into_tensor`; None: that.
    """
    backend = deepspeed_zero.communication_backend()
    patches.set_attribute(backend, "all_gather_function", gather or _all_gather)
    patches.set_attribute(backend, "reduce_scatter_function", _reduce_scatter)


def _all_gather(*args: Any, **kwargs: Any) -> Any:
    return dist.all_gather_into_tensor(*args, **kwargs)


def _reduce_scatter(*args: Any, **kwargs: Any) -> Any:
    return dist.reduce_scatter_tensor(*args, **kwargs)
