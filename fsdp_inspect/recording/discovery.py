"""Find the models that a script trains, at the first forward of a sharded model.

[Note: Discovery without interference]
A process that shards no model gets no hook; only the lines of `fully_shard` calls are noted (see
`sharding_calls`). The first call creates a subclass of `FSDPModule`, which the discovery sees
through `__init_subclass__`. `FullyShardedDataParallel` and `DistributedDataParallel` register the
module that they wrap, which the discovery sees too. For DeepSpeed it wraps the constructor of the
engine. After that, a global forward pre-hook checks each called module, until one contains units,
has trainable parameters and runs with gradients. The hook runs before that module's own hooks, so
the recorder is attached before the first unit is unsharded and before torch.compile traces
anything. A call of a module that is compiled in place reaches no such hook, so `nn.Module.__call__`
checks it. A function that calls the model may be compiled: before its first compilation, the
outermost module with units is taken. Then all of these are removed. The found model is the
outermost called module, which may itself be unsharded.

Other models with units that exist at that moment, such as a critic or a teacher, are part of the
recording. A model that is made later is not recorded, and the recording notes it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)

from fsdp_inspect.disabled_recorder import describe_unsupported
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.recording.import_hook import call_after_import
from fsdp_inspect.recording.models import Models, all_modules, class_name_of, name_models
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.process_life import note_process
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.torch_api.autograd import COMPILE_CALLBACKS

if TYPE_CHECKING:
    from fsdp_inspect.recording.recorder import Recorder

WRAPPERS = ("FullyShardedDataParallel", "DistributedDataParallel")
"""Names of the classes that wrap a model; making one begins the search like `fully_shard`."""
ENGINE_MODULE = "deepspeed.runtime.engine"

NO_GRADIENTS = (
    "a model was sharded or wrapped, but none ran a forward pass with gradients in this process. A "
    "recording begins with the first such pass."
)
NOT_SHARDED = (
    "no model was sharded in this process. Expected a call of fully_shard (FSDP2), or a model "
    "wrapped with FullyShardedDataParallel (FSDP1), DistributedDataParallel (DDP) or a DeepSpeed "
    "engine with ZeRO. If the script "
    "starts its ranks itself, start them with torchrun instead: "
    "torchrun --nproc-per-node N -m fsdp_inspect.record SCRIPT."
)
RECORDS_ITSELF = (
    "the script already records this model with fsdp_inspect.Recorder, and that recording "
    "continues. Start the script without `-m fsdp_inspect.record`."
)


class Discovery:
    """Waits for a model that trains, and opens one recording of it.

    Args:
        record: Attaches a recorder to the model it is given.
        say: Prints a message to the user.
    """

    def __init__(self, record: Callable[[nn.Module], Recorder], say: Callable[[str], None]) -> None:
        self.recorder: Recorder | None = None
        """The recording, once the model is found."""
        self._record = record
        self._say = say
        self._has_said_why = False
        self._is_searching = False
        self._search_patches = Patches()
        self._attached_patches = Patches()
        handle = register_module_module_registration_hook(self._note_wrapper)
        self._search_patches.on_undo(handle.remove)
        note_process()
        call_after_import("torch.distributed.fsdp", self._await_fully_shard)
        call_after_import(ENGINE_MODULE, self._await_engine)

    @property
    def is_over(self) -> bool:
        """Whether a model is recorded, or the reason why none is has been printed."""
        return self.recorder is not None or self._has_said_why

    def finish(self, error: BaseException | None) -> Path | None:
        """End the recording, or print the reason why there is none.

        Args:
            error: The exception that ended the script; None if it ended normally.

        Returns:
            The run folder.
        """
        self._search_patches.undo()
        self._attached_patches.undo()
        if self.recorder is not None:
            self.recorder.close(error)
            return self.recorder.run_folder
        if not self._has_said_why:
            why = self._why_nothing()
            if error is not None and not isinstance(error, SystemExit):
                why = f"the script failed first, with {type(error).__name__}."
            self._say(f"nothing was recorded: {why}")
        return None

    # --- searching

    def _note_wrapper(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        kind = type(module).__name__
        if kind in WRAPPERS:
            self._await_forward()

    def _await_fully_shard(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        from fsdp_inspect.recording.sharding_calls import note_sharding_calls

        note_sharding_calls()

        def follow(cls: type[FSDPModule], /, **kwargs: Any) -> None:
            super(FSDPModule, cls).__init_subclass__(**kwargs)
            self._await_forward()

        self._search_patches.set_attribute(FSDPModule, "__init_subclass__", classmethod(follow))

    def _await_engine(self) -> None:
        """Begin the search at the construction of a DeepSpeed engine, which registers no module."""
        engine: Any = sys.modules[ENGINE_MODULE].DeepSpeedEngine
        original = engine.__init__

        @functools.wraps(original)
        def created(*args: Any, **kwargs: Any) -> None:
            self._await_forward()
            original(*args, **kwargs)

        self._search_patches.set_attribute(engine, "__init__", created)

    def _await_forward(self) -> None:
        if self._is_searching:
            return
        self._is_searching = True
        handle = register_module_forward_pre_hook(self._look)
        self._search_patches.on_undo(handle.remove)
        self._search_patches.on_undo(_without_torch_compile_warning())
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Inside a module that is compiled in place, torch.compile traces the hook.
            if vars(module).get("_compiled_call_impl") is not None:
                self._look(module, args)
            return original(module, *args, **kwargs)

        self._search_patches.set_attribute(nn.Module, "__call__", functools.wraps(original)(call))
        self._search_patches.on_undo(call_after_import(COMPILE_CALLBACKS, self._await_compile))

    def _await_compile(self) -> None:
        handler: Any = getattr(sys.modules[COMPILE_CALLBACKS], "callback_handler", None)
        if not hasattr(handler, "register_start_callback"):  # an older torch
            return
        handler.register_start_callback(self._look_before_compile)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                handler.remove_start_callback(self._look_before_compile)

        self._search_patches.on_undo(stop)

    def _look_before_compile(self, _: object) -> None:
        """Find a model in a function that is compiled: its own call is not seen."""
        if not torch.is_grad_enabled():
            return
        try:
            found = next(filter(_can_communicate, self._find_outermost()), None)
        except Exception as error:  # an object of the script, such as a module without its state
            raise_if_of_signal(error)
            return
        if found is not None:
            self._search_patches.undo()
            self._attach(found, is_called=False)

    def _find_outermost(self) -> Iterator[nn.Module]:
        """The modules that contain units and trained parameters, and are in no other module."""
        modules = [each for each in all_modules() if "_modules" in vars(each)]  # it is complete
        inner = {id(part) for each in modules for part in each.children()}
        for module in modules:
            is_trained = any(part.requires_grad for part in module.parameters())
            if is_trained and id(module) not in inner and self._is_sharded(module):
                yield module

    def _look(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_sharded(module):
            return
        if torch.is_grad_enabled() and any(part.requires_grad for part in module.parameters()):
            self._search_patches.undo()
            self._attach(module)

    def _is_sharded(self, module: nn.Module) -> bool:
        try:
            from fsdp_inspect.recording.sharders.find import is_sharded

            return is_sharded(module)
        except Exception as error:  # a name that this version of torch has changed
            raise_if_of_signal(error)
            self._search_patches.undo()
            self._refuse_with(describe_unsupported(error))
            return False

    # --- found

    def _attach(self, model: nn.Module, *, is_called: bool = True) -> None:
        """Open the recording; the script continues after any error.

        `is_called`: whether the model runs already.
        """
        try:
            if _is_recorded_already(model):
                self._refuse(RECORDS_ITSELF)
                return
            others = find_other_models(model)
            if others:
                named = name_models([model, *others])
                model = Models(dict(zip(named, [model, *others], strict=True)))
            self.recorder = self._record(model)
            if is_called:  # torch has read the model's own `forward` already
                self.recorder.join_forward()
            self._watch_for_another(model)
        except FsdpInspectError as error:
            self._refuse(str(error))
        except Exception as error:
            raise_if_of_signal(error)
            self._refuse_with(describe_unsupported(error))

    def _refuse(self, reason: str) -> None:
        self._refuse_with(f"nothing is recorded: {reason}")

    def _refuse_with(self, sentence: str) -> None:
        self._has_said_why = True
        self._say(sentence)

    def _watch_for_another(self, model: nn.Module) -> None:
        """Report once when an unrecorded unit runs."""
        from fsdp_inspect.recording.sharders.find import find_sharder

        def on_another(modules: Sequence[nn.Module]) -> None:
            self._attached_patches.undo()
            self._note_another(model, modules)

        find_sharder(model).watch_for_another(self._attached_patches, on_another)

    def _note_another(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        assert self.recorder is not None
        names = ", ".join(type(module).__name__ for module in modules)
        sentence = (
            f"Another sharded model (with {names}) runs in this process and is ignored. A "
            "recording contains the models that exist when the first one trains: here "
            f"{class_name_of(model)}. To choose the models, attach fsdp_inspect.Recorder to them "
            "in the script."
        )
        self.recorder.note(sentence)
        self._say(sentence)

    # --- not found

    def _why_nothing(self) -> str:
        return NO_GRADIENTS if self._is_searching else NOT_SHARDED


def find_other_models(model: nn.Module) -> list[nn.Module]:
    """The other outermost modules in this process that a model's sharder has sharded.

    Models of process groups that are destroyed are left out.
    """
    from fsdp_inspect.recording.sharders.find import find_sharder

    sharder = type(find_sharder(model))
    gc.collect()  # a model that the script has dropped does not count
    own = set(map(id, model.modules()))
    found = [each for each in all_modules() if id(each) not in own and sharder.marks(each)]
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    return [each for each in found if id(each) not in inner and _can_communicate(each)]


def _can_communicate(model: nn.Module) -> bool:
    from fsdp_inspect.recording.sharders.find import find_sharder
    from fsdp_inspect.recording.torch_api.process_groups import is_live_process_group

    try:
        groups = find_sharder(model).process_groups()
    except FsdpInspectError:  # the module has no unit
        return False
    return all(group is None or is_live_process_group(group) for group, _ in groups)


def _is_recorded_already(model: nn.Module) -> bool:
    from fsdp_inspect.recording.sharders.find import find_sharder
    from fsdp_inspect.recording.units import find_recording

    return find_recording(find_sharder(model).units) is not None


def _without_torch_compile_warning() -> Callable[[], None]:
    """Silence torch.compile's warning about global hooks; returns the function that restores it.

    The warning says that the hook also fires for the module that torch.compile created. That is
    the module to attach to.
    """
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global")
    added = warnings.filters[0]

    def restore() -> None:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    return restore
