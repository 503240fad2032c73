"""Which model does a script train? The first `fully_shard` model that runs with gradients.

[Note: Looking without being in the way]
Nothing is hooked in a process that never calls `fully_shard`. Its first call makes a subclass of
`FSDPModule`, which is seen through `__init_subclass__`; from then on a global forward pre-hook
looks at each module that is called, until one holds FSDP modules, has parameters to train and runs
with gradients. It runs before that module's own hooks, so the recorder is attached before the first
unit is unsharded, and before torch.compile traces anything; then the hook is taken away. Being the
outermost module called, the model found may be one that is not sharded itself.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.patches import Patches

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from fsdp_inspect.recording.recorder import Recorder

WRAPPERS = {
    "FullyShardedDataParallel": (
        "the model is wrapped with FullyShardedDataParallel (FSDP1), which has no place to attach "
        "to per unit. Its collectives can be seen with torch.profiler, by rank and not by unit. "
        "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) to record it."
    ),
    "DistributedDataParallel": (
        "the model is wrapped with DistributedDataParallel, which has no FSDP units: every rank "
        "holds all of it. Shard it with torch.distributed.fsdp.fully_shard to record it."
    ),
}
"""What other wrappers mean for a recording, by class name; the first that was met is reported."""

NO_GRADIENTS = (
    "fully_shard was called, but no sharded model ran a forward pass with gradients in this "
    "process. A recording begins with the first such pass."
)
NOT_SHARDED = (
    "fully_shard was not called in this process. Models sharded with "
    "torch.distributed.fsdp.fully_shard (FSDP2) can be recorded. If the script starts its ranks "
    "itself, let torchrun start them: torchrun --nproc-per-node N -m fsdp_inspect.record SCRIPT."
)
RECORDS_ITSELF = (
    "the script records this model itself, with fsdp_inspect.Recorder: its own recording goes on. "
    "Start it without `-m fsdp_inspect.record`."
)


class Discovery:
    """Waits for a model that trains, and opens one recording of it.

    Args:
        record: Attaches a recorder to the model it is given.
        say: Tells the user something, once.
    """

    def __init__(self, record: Callable[[nn.Module], Recorder], say: Callable[[str], None]) -> None:
        self.recorder: Recorder | None = None
        """The recording, from the moment the model was found."""
        self._record = record
        self._say = say
        self._has_said_why = False
        self._is_fully_shard_called = False
        self._wrapper: str | None = None
        self._passed_over: WeakSet[nn.Module] = WeakSet()
        """Sharded models that ran without gradients."""
        self._looking = Patches()
        self._attached = Patches()
        handle = register_module_module_registration_hook(self._note_wrapper)
        self._looking.on_undo(handle.remove)
        call_after_import("torch.distributed.fsdp", self._await_fully_shard)

    def finish(self, error: BaseException | None) -> Path | None:
        """End the recording, or say why there is none.

        Args:
            error: What ended the script, if it did not end by itself.

        Returns:
            The run folder.
        """
        self._looking.undo()
        self._attached.undo()
        if self.recorder is not None:
            self.recorder.close(error)
            return self.recorder.run_folder
        if not self._has_said_why:
            self._say(f"nothing was recorded: {self._why_nothing()}")
        return None

    # --- looking

    def _note_wrapper(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        kind = type(module).__name__
        if kind in WRAPPERS and self._wrapper is None:
            self._wrapper = kind

    def _await_fully_shard(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        def follow(cls: type[FSDPModule], /, **kwargs: Any) -> None:
            super(FSDPModule, cls).__init_subclass__(**kwargs)
            self._await_forward()

        self._looking.set_attribute(FSDPModule, "__init_subclass__", classmethod(follow))

    def _await_forward(self) -> None:
        if self._is_fully_shard_called:
            return
        self._is_fully_shard_called = True
        handle = register_module_forward_pre_hook(self._look)
        self._looking.on_undo(handle.remove)
        self._looking.on_undo(_without_torch_compile_warning())

    def _look(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not _is_sharded(module):
            return
        if torch.is_grad_enabled() and any(part.requires_grad for part in module.parameters()):
            self._looking.undo()
            self._attach(module)
        else:
            self._passed_over.add(module)

    # --- found

    def _attach(self, model: nn.Module) -> None:
        """Open the recording; whatever goes wrong, the script goes on."""
        try:
            if _is_recorded_already(model):
                self._refuse(RECORDS_ITSELF)
                return
            self.recorder = self._record(model)
            self._watch_for_another(model)
        except FsdpInspectError as error:
            self._refuse(str(error))
        except Exception as error:
            self._refuse(f"the recorder could not be attached: {error!r}. The script goes on.")

    def _refuse(self, reason: str) -> None:
        self._has_said_why = True
        self._say(f"nothing is recorded: {reason}")

    def _watch_for_another(self, model: nn.Module) -> None:
        """Say so, once, when a unit that is not recorded works, or has worked before.

        torch calls `lazy_init` of each group in the first forward of its root.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        recorded = {id(group) for group in _groups(model)}
        passed_over = [group for other in self._passed_over for group in _groups(other)]
        for group in passed_over:
            if id(group) not in recorded:
                self._note_another(model, group)
                return
        original = FSDPParamGroup.lazy_init

        def lazy_init(group: FSDPParamGroup) -> None:
            if id(group) not in recorded:
                self._attached.undo()
                self._note_another(model, group)
            original(group)  # type: ignore[no-untyped-call]

        self._attached.set_attribute(FSDPParamGroup, "lazy_init", lazy_init)

    def _note_another(self, model: nn.Module, group: FSDPParamGroup) -> None:
        assert self.recorder is not None
        names = ", ".join(type(module).__name__ for module in group.modules)
        sentence = (
            f"Another fully_shard model (with {names}) runs in this process. A recording holds one "
            f"model, here {type(model).__name__}, the first that trained: the other is left out. "
            "To choose the model, attach fsdp_inspect.Recorder to it in the script."
        )
        self.recorder.note(sentence)
        self._say(sentence)

    # --- not found

    def _why_nothing(self) -> str:
        if self._wrapper is not None and not self._is_fully_shard_called:
            return WRAPPERS[self._wrapper]
        return NO_GRADIENTS if self._is_fully_shard_called else NOT_SHARDED


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in module.modules())


def _groups(model: nn.Module) -> list[FSDPParamGroup]:
    from fsdp_inspect.sharding.torch_fsdp import find_groups

    return [handle.group for handle in find_groups(model)]


def _is_recorded_already(model: nn.Module) -> bool:
    from fsdp_inspect.recording.collectives import is_recorded

    return any(is_recorded(group._all_gather_comm) for group in _groups(model))


def _without_torch_compile_warning() -> Callable[[], None]:
    """Silence what torch.compile says about any global hook; returns the way back.

    It warns that the hook also fires for the module that torch.compile made, which is the one to
    attach to.
    """
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global")
    added = warnings.filters[0]

    def restore() -> None:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    return restore
