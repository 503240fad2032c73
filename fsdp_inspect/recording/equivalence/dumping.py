"""Dump one step of the training in this process, then end the process.

[Note: What a dump observes]
The step begins at the first forward of a model with units after `settings.step` updates of such
models. The rank then saves their parameters (sharded run), or loads the parameters that the sharded
run saved (run without sharding). During the step, it takes fingerprints of the parameters that each
module uses, of the outputs of each unit, and of the gradients that enter a model. Gradients are
those after the last backward before the update. The process ends there, so that neither run writes
a checkpoint of a step that this tool has changed.

Without sharding, the updates before the step are left out: parameters come from the other run.

[Note: DeepSpeed]
An engine of ZeRO stays as it is in the run without sharding, where the hooks of the parameters give
each rank's own gradients before the engine reduces them. In the sharded run, each rank saves the
reduced gradients of the elements that it owns, right before the engine's update.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_inspect.recording.code_places import CodePlaces, find_calling_line
from fsdp_inspect.recording.equivalence.unsharded import cast_parameters, leave_models_whole
from fsdp_inspect.recording.tensors import local_part, local_values, tensors_in
from fsdp_inspect.recording.torch_api import ddp, deepspeed_zero, fsdp1, fsdp2
from fsdp_inspect.recording.torch_api.autograd import current_graph_task_id
from fsdp_inspect.recording.torch_api.modules import original_class, shard_offset
from fsdp_inspect.recording.torch_api.optimizers import updated_tensors
from fsdp_inspect.recording.units import dtype_name
from fsdp_inspect.trace.step_dump import (
    FINGERPRINT_LENGTH,
    FINGERPRINT_SAMPLES,
    INDEX_FILE,
    Array,
    Backward,
    DumpedParameter,
    DumpedUnit,
    DumpSettings,
    Progress,
    StepDump,
    assemble,
    narrower_dtype,
    rank_dump_folder,
    read_dumps,
    slices_of,
    write_index,
    write_progress,
)

_WAIT_S = 120.0
_POLL_S = 0.05
_WRAPPED = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)
_Print = tuple[str, int, Array]
"""A name, the number of the call, and the fingerprint."""


def install_dump(settings: DumpSettings) -> None:
    """Dump a step of this process; call it before the script shards a model."""
    if settings.sharded is not None:
        leave_models_whole()
    _Dumper(settings).install()


class _Dumper:
    """Observes the training of this process, and dumps one step."""

    def __init__(self, settings: DumpSettings) -> None:
        self._settings = settings
        self._rank = int(os.environ["RANK"])
        self._folder = rank_dump_folder(Path(settings.folder), self._rank)
        self._other = (
            None
            if settings.sharded is None
            else rank_dump_folder(Path(settings.sharded), self._rank)
        )
        self._updates = 0
        self._others = 0
        """Steps of optimizers that hold no parameter of these models."""
        self._place = ""
        """The user's line of the first of these."""
        self._loaders = 0
        self._models: dict[str, nn.Module] = {}
        """The models by name, in the order of their first forward; the first one has the empty
        name."""
        self._known: set[int] = set()
        """The modules of these models, by id."""
        self._is_active = False
        self._calls: Counter[str] = Counter()
        self._inputs: list[str] = []
        self._used: list[_Print] = []
        self._outputs: list[_Print] = []
        self._entered: list[_Print] = []
        self._kept: dict[int, torch.Tensor] = {}
        """Gradients of earlier steps that the script has not cleared."""
        self._backwards: list[Backward] = []
        self._sums: dict[int, torch.Tensor] = {}
        self._summed: set[int] = set()
        """The parameters whose gradients are summed, by id."""
        self._norms: dict[int, float] = {}
        self._narrow: dict[int, str] = {}
        self._taken: list[_Print] = []
        self._divided_at = ""
        self._notes: list[str] = []

    @property
    def _is_sharded(self) -> bool:
        return self._other is None

    def install(self) -> None:
        """Observe forwards, backwards, updates and data loaders of this process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self._write_progress)
        register_module_forward_pre_hook(self._find_model)
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        self._watch_backward()
        self._watch_loaders()
        if self._is_sharded:
            self._watch_divide_factor()

    # --- observations

    def _find_model(self, module: nn.Module, args: Any) -> None:
        """Take a called model with units, and begin the step at its forward."""
        if torch.compiler.is_compiling():
            return
        if id(module) not in self._known:
            parts = list(module.modules())
            engines = deepspeed_zero.find_zero_engines(module)
            if not engines and not any(isinstance(part, _WRAPPED) for part in parts):
                return
            for _, engine in engines:
                self._watch_update(engine.optimizer)
            kind = original_class(module).__name__
            prefix = f"{kind}-{len(self._models)}" if self._models else ""
            self._models[prefix] = module
            self._known.update(map(id, parts))
            if not self._is_sharded:
                cast_parameters(module)
            self._observe(prefix, module)
        if self._updates >= self._settings.step and not self._is_active:
            self._begin()

    def _observe(self, prefix: str, model: nn.Module) -> None:
        name_of = ddp.names_in(model)
        for name, module in model.named_modules():
            fqn = _join(prefix, name_of(name))
            if module._parameters:
                module.register_forward_pre_hook(self._parameter_watch(fqn))
            if module is model or issubclass(type(module), _WRAPPED):
                module.register_forward_hook(self._output_watch(fqn))
        model.register_forward_pre_hook(self._note_inputs, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._entry_watch(prefix))

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_active and torch.is_grad_enabled():
            self._inputs.append(digest(args, kwargs))

    def _entry_watch(self, fqn: str) -> Any:
        """Look at the gradients that enter a model, which the loss determines."""
        calls = 0

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal calls
            if not self._is_looking():
                return
            for tensor in map(local_part, tensors_in(output)):
                if tensor.requires_grad:
                    calls += 1
                    self._watch_entry(tensor, fqn, calls)

        return watch

    def _watch_entry(self, output: Any, fqn: str, call: int) -> None:
        def note(gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # DDP passes None for an output that the loss does not use
                self._entered.append((fqn, call, fingerprint(gradient)))

        output.register_hook(note)

    def _parameter_watch(self, fqn: str) -> Any:
        def watch(module: nn.Module, args: Any) -> None:
            if not self._is_looking():
                return
            self._calls[fqn] += 1
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    full = _join(fqn, name)
                    print_ = fingerprint(local_part(parameter))
                    self._used.append((full, self._calls[fqn], print_))

        return watch

    def _output_watch(self, fqn: str) -> Any:
        calls = 0

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal calls
            if self._is_looking():
                calls += 1
                self._outputs.append((fqn, calls, fingerprint_all(output)))

        return watch

    def _is_looking(self) -> bool:
        """Whether the step observes now: in its forwards, but not in repeated ones."""
        return (
            self._is_active
            and not torch.compiler.is_compiling()
            and torch.is_grad_enabled()
            and current_graph_task_id() == -1
        )

    def _watch_backward(self) -> None:
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_active:
                original(tensors, *args, **kwargs)
                return
            losses = [tensors] if torch.is_tensor(tensors) else list(tensors)
            factor = factor_of(losses[0]) if len(losses) == 1 else 1.0
            place = _place_of_caller()
            if not self._backwards:
                self._keep_gradients()
            original(tensors, *args, **kwargs)
            self._backwards.append(Backward(factor, place))
            self._dump_gradients()

        torch.autograd.backward = backward

    def _watch_loaders(self) -> None:
        """Start each data loader with the random states that it had in the sharded run."""
        from torch.utils.data import DataLoader

        original: Any = DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            self._loaders += 1
            self._share_random_states(f"loader-{self._loaders}")
            return original(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def _watch_divide_factor(self) -> None:
        original = FSDPModule.set_gradient_divide_factor

        def set_factor(module: FSDPModule, factor: float) -> None:
            self._divided_at = _place_of_caller()
            original(module, factor)

        FSDPModule.set_gradient_divide_factor = set_factor  # type: ignore[assignment, method-assign]

    def _share_random_states(self, name: str) -> None:
        if self._other is None:
            save_random_states(self._folder / "random", name)
        else:
            restore_random_states(self._other / "random", name)

    # --- the step

    def _begin(self) -> None:
        self._is_active = True
        if self._is_sharded:
            for at, part in enumerate(self._parameters()):
                self._save("parameters", at, part.values())
            for at, buffer in enumerate(self._buffers()):
                self._save("buffers", at, local_values(buffer))
        else:
            self._take_parameters()
        self._share_random_states("step")

    def _parameters(self) -> list[_Part]:
        """This rank's parts of the floating-point parameters of all models."""
        return [
            each._replace(name=_join(prefix, each.name))
            for prefix, model in self._models.items()
            for each in _sharded_parameters(model, is_whole=not self._is_sharded)
            if each.tensor.is_floating_point()
        ]

    def _buffers(self) -> list[torch.Tensor]:
        found = (each for model in self._models.values() for each in model.buffers())
        return [each for each in found if not each.is_complex()]

    def _keep_gradients(self) -> None:
        """Keep gradients of earlier steps, to which the backwards of this step add."""
        if not self._is_sharded:
            return
        for at, part in enumerate(self._parameters()):
            gradient = part.gradient()
            if part.fragment is None and gradient is not None and bool(gradient.any()):
                self._kept[at] = gradient.clone()

    def _take_parameters(self) -> None:
        assert self._settings.sharded is not None
        assert self._other is not None
        dumps = read_dumps(Path(self._settings.sharded))
        dumps.sort(key=lambda dump: dump.rank == self._rank)  # own values win over equal parts
        places = [{each.name: at for at, each in enumerate(dump.parameters)} for dump in dumps]
        for part in self._parameters():
            name, own = part.name, self._describe(part, None)
            held = [
                (dump.parameters[at[name]], dump.parameter(at[name]))
                for dump, at in zip(dumps, places, strict=True)
                if name in at
            ]
            whole = assemble(held, own.shape)
            if whole is None:
                self._notes.append(f"{name}: its values in the sharded run are not known.")
                continue
            local = part.values()
            taken = torch.from_numpy(np.ascontiguousarray(whole[slices_of(own)]))
            if part.fragment is not None:
                local = taken.to(local.dtype)
                part.fragment.take(local)
            else:
                local.data.copy_(taken.reshape(local.shape))
            self._taken.append((name, 0, fingerprint(local)))
            self._sum_gradients_of(part.tensor)
        for at, buffer in enumerate(self._buffers()):
            path = self._other / "buffers" / f"{at}.npy"
            if path.exists():
                values = torch.from_numpy(np.load(path, allow_pickle=False))
                local_values(buffer).copy_(values.reshape(local_values(buffer).shape))

    def _sum_gradients_of(self, tensor: nn.Parameter) -> None:
        """Sum the gradients of all backwards in float32, as FSDP does after each reduction."""
        key = id(tensor)
        if key in self._summed or not tensor.requires_grad or isinstance(tensor, DTensor):
            return

        def add(gradient: torch.Tensor) -> None:
            wide = gradient.detach().to(_wide(gradient.dtype))
            held = self._sums.get(key)
            self._sums[key] = wide.clone() if held is None else held.add_(wide)

        self._summed.add(key)
        tensor.register_hook(add)  # type: ignore[no-untyped-call]

    def _dump_gradients(self, *, of_zero: bool = False) -> None:
        for at, part in enumerate(self._parameters()):
            if of_zero != (part.fragment is not None):
                continue
            gradient = self._gradient_of(part)
            if gradient is not None and at in self._kept:
                gradient = gradient - self._kept[at]
            if gradient is not None:
                self._norms[at] = _norm(gradient)
                self._narrow[at] = _narrower(gradient)
                self._save("gradients", at, gradient)

    def _gradient_of(self, part: _Part) -> torch.Tensor | None:
        if not self._is_sharded and not isinstance(part.tensor, DTensor):
            return part.within_of(self._sums.get(id(part.tensor)))
        return part.gradient()

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """End at the update of the step. A closure (as of Lightning) runs the last backward."""
        updated = updated_tensors(optimizer)
        if not self._owns_any(updated):
            self._others += 1
            self._place = self._place or find_calling_line(sys._getframe(1))
            return None

        def gradients_are_known() -> None:
            if self._is_active:
                self._finish()
            elif not self._is_sharded:
                for parameter in updated:
                    parameter.grad = None  # the update is left out

        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            gradients_are_known()
            return None

        def run_closure() -> Any:
            result = closure()
            gradients_are_known()
            return result

        return (args[0],), {**kwargs, "closure": run_closure}

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._owns_any(updated_tensors(optimizer)):
            self._count_update()

    def _watch_update(self, optimizer: Any) -> None:
        """End at the update of a ZeRO optimizer, whose inner optimizers have other tensors."""
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self._is_active:
                self._dump_gradients(of_zero=True)
                self._finish()
            result = original(*args, **kwargs)
            self._count_update()
            return result

        optimizer.step = step

    def _count_update(self) -> None:
        self._updates += 1
        if self._updates <= self._settings.step:
            self._share_random_states(f"update-{self._updates}")

    def _owns_any(self, parameters: Iterable[Any]) -> bool:
        """Whether a model with units has one of the parameters."""
        own = {id(each) for model in self._models.values() for each in model.parameters()}
        return any(id(each) in own for each in parameters)

    def _write_progress(self) -> None:
        """Write why the step was not reached; `_finish` ends a process before this is called."""
        progress = Progress(bool(self._models), self._updates, self._others, self._place)
        write_progress(self._folder, progress)

    def _finish(self) -> None:
        """Write the index, wait for the other ranks, and end the process."""
        units: list[DumpedUnit] = []
        unit_of: dict[str, str] = {}
        for prefix, model in self._models.items() if self._is_sharded else ():
            own_units, own_parameters = self._units(prefix, model)
            units += own_units
            unit_of |= own_parameters
        parameters = []
        for at, part in enumerate(self._parameters()):
            unit, gradient = unit_of.get(part.name), part.gradient()
            if self._is_sharded and unit is None and gradient is not None:
                # The script may reduce it after the backward.
                self._norms[at] = _norm(gradient)
                self._save("gradients", at, gradient)
            parameters.append(self._describe(part, unit, at))
        write_index(
            StepDump(
                folder=self._folder,
                rank=self._rank,
                world_size=dist.get_world_size(),
                step=self._settings.step,
                parameters=tuple(parameters),
                units=tuple(units),
                inputs=tuple(self._inputs),
                used=self._save_prints("used", self._used),
                taken=self._save_prints("taken", self._taken),
                outputs=self._save_prints("outputs", self._outputs),
                entered=self._save_prints("entered", self._entered),
                backwards=tuple(self._backwards),
                divided_at=self._divided_at,
                notes=tuple(self._notes),
            )
        )
        self._await_others()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _await_others(self) -> None:
        """Wait until all ranks have ended their last collective, which needs every rank's store."""
        deadline = time.monotonic() + _WAIT_S
        parent = self._folder.parent
        others = [
            rank_dump_folder(parent, rank) / INDEX_FILE for rank in range(dist.get_world_size())
        ]
        while time.monotonic() < deadline and not all(path.exists() for path in others):
            time.sleep(_POLL_S)

    # --- descriptions

    def _describe(self, part: _Part, unit: str | None, at: int | None = None) -> DumpedParameter:
        gradient = part.gradient()
        now = None if gradient is None else _norm(gradient)
        before = None if at is None else self._norms.get(at)
        return DumpedParameter(
            name=part.name,
            shape=part.shape,
            offset=part.offset,
            local_shape=part.local_shape,
            dtype=_name(part.tensor.dtype),
            unit=unit,
            is_trained=part.tensor.requires_grad,
            has_gradient=before is not None,
            change_after_backward=now / before if now is not None and before else None,
            narrowed_to=self._narrowed_to(at, gradient),
        )

    def _narrowed_to(self, at: int | None, gradient: torch.Tensor | None) -> str:
        """The narrower dtype that the gradient fits now, but did not after the backward."""
        if at not in self._narrow or gradient is None or self._narrow[at]:
            return ""
        return _narrower(gradient)

    def _units(self, prefix: str, model: nn.Module) -> tuple[list[DumpedUnit], dict[str, str]]:
        """The units of a model, and the unit of each parameter."""
        units: list[DumpedUnit] = []
        unit_of: dict[str, str] = {}

        def add(
            own: str, parameters: Iterable[str], dtype: str, reduced: str, num_ranks: int
        ) -> None:
            name = _join(prefix, own)
            units.append(DumpedUnit(name, dtype, reduced, None, num_ranks))
            unit_of.update((_join(prefix, each), name) for each in parameters)

        for handle in fsdp2.find_groups(model):
            name, group = _join(prefix, handle.name), handle.group
            gathered = {_name(dtype) for dtype in map(fsdp2.gathered_dtype_of, group.fsdp_params)}
            sizes = fsdp2.mesh_sizes(group)
            units.append(
                DumpedUnit(
                    name=name,
                    param_dtype=", ".join(sorted(gathered)),
                    reduce_dtype=_name(handle.reduce_dtype),
                    divide_factor=group.gradient_divide_factor,
                    num_ranks=int(np.prod(list(sizes.values()))),
                )
            )
            own = fsdp2.parameter_shapes(handle)
            unit_of |= {_join(prefix, parameter): name for parameter in own}
        for one in fsdp1.find_flat_handles(model):
            groups = [each for each in (one.shard_group, one.replicate_group) if each is not None]
            num_ranks = math.prod(each.size() for each in groups)
            dtypes = _name(one.param_dtype), _name(one.reduce_dtype)
            add(one.name, one.parameter_shapes, *dtypes, num_ranks)
        for path, wrapper in ddp.find_wrappers(model):
            for bucket in ddp.find_buckets(path, wrapper):
                kept = ", ".join(sorted({_name(each.dtype) for each in bucket.parameters}))
                reduced = _name(ddp.reduced_dtype_of(bucket))
                add(bucket.name, bucket.parameter_shapes, kept, reduced, bucket.group.size())
        for path, engine in deepspeed_zero.find_zero_engines(model):
            num_ranks = deepspeed_zero.group_of(engine).size()
            reduced = _name(deepspeed_zero.communication_dtype_of(engine))
            for name, dtype, parameters in deepspeed_zero.find_reduced(path, engine):
                add(name, parameters, _name(dtype), reduced, num_ranks)
        return units, unit_of

    def _save_prints(self, kind: str, entries: Sequence[_Print]) -> tuple[tuple[str, int], ...]:
        """Save fingerprints; returns the name and the number of each."""
        prints = [each for *_, each in entries] or [np.zeros((0, FINGERPRINT_LENGTH))]
        np.save(self._folder / f"{kind}.npy", np.vstack(prints))
        return tuple((name, call) for name, call, _ in entries)

    def _save(self, kind: str, at: int, tensor: torch.Tensor) -> None:
        folder = self._folder / kind
        folder.mkdir(exist_ok=True)
        dtype = _wide(tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        # A copy: torch cannot free a storage that NumPy has seen.
        np.save(folder / f"{at}.npy", tensor.detach().to(dtype, copy=True).cpu().numpy())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")


class _Part(NamedTuple):
    """The part of one parameter that this rank holds."""

    name: str
    tensor: nn.Parameter
    """The parameter; in FSDP1, the flat parameter of its unit."""
    shape: tuple[int, ...]
    """The shape of the whole parameter. FSDP1 stores it as one dimension."""
    offset: tuple[int, ...]
    """The offset of the part in the whole parameter."""
    flat: tuple[torch.Tensor, slice] | None = None
    """In FSDP1, the shard of the unit and the elements of this parameter in it."""
    fragment: deepspeed_zero.Fragment | None = None
    """In ZeRO, the elements of this rank."""
    is_whole: bool = False
    """Whether the part is the whole parameter of ZeRO, of which the rank has its own gradient."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self.shape if self.is_whole else tuple(self.values().shape)

    def values(self) -> torch.Tensor:
        """This rank's values."""
        if self.fragment is not None:
            return self.fragment.values()
        return local_values(self.tensor) if self.flat is None else self.flat[0][self.flat[1]]

    def gradient(self) -> torch.Tensor | None:
        """This rank's gradient; None: there is none."""
        if self.fragment is not None:
            return None if self.is_whole else self.fragment.gradient()
        gradient = self.tensor.grad
        return None if gradient is None else self.within_of(local_values(gradient))

    def within_of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a tensor of the unit that belongs to this parameter."""
        if self.is_whole and tensor is not None:
            return tensor.reshape(-1)
        return tensor if tensor is None or self.flat is None else tensor[self.flat[1]]


def _sharded_parameters(model: nn.Module, *, is_whole: bool) -> list[_Part]:
    """The parts of all parameters of a model; `is_whole` as in `_Part`, for those of ZeRO.

    A unit of FSDP2 that is not resharded, for example after a forward without gradients, registers
    its full parameters: its sharded parameters count.
    """
    sharded = {
        name: parameter
        for handle in fsdp2.find_groups(model)
        for name, parameter in zip(
            fsdp2.parameter_shapes(handle),
            fsdp2.sharded_parameters_of(handle.group),
            strict=True,
        )
    }
    flats = fsdp1.find_flat_handles(model)
    fragments = [
        each
        for path, engine in deepspeed_zero.find_zero_engines(model)
        for each in deepspeed_zero.find_fragments(path, engine)
    ]
    flattened = {id(each) for one in flats for each in (one.flat_parameter, *one.local_parameters)}
    flattened |= {id(each.parameter) for each in fragments}
    named = [each for each in model.named_parameters() if id(each[1]) not in flattened]
    name_of = ddp.names_in(model)
    own = {name_of(name): each for name, each in named}
    own = {name: sharded.get(name, each) for name, each in own.items()}
    parts = [_Part(name, each, tuple(each.shape), _offset(each)) for name, each in own.items()]
    for one in flats:
        tensor, shard = one.flat_parameter, one.local_shard
        for piece in one.pieces:
            flat = (shard, piece.within)
            parts.append(_Part(piece.name, tensor, (piece.numel,), (piece.start,), flat))
    for each in fragments:
        part = _Part(each.name, each.parameter, (each.numel,), (0 if is_whole else each.start,))
        parts.append(part._replace(fragment=each, is_whole=is_whole))
    return parts


def _offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """The offset of this rank's part in the whole tensor."""
    found = shard_offset(tensor) if isinstance(tensor, DTensor) else ()
    return found or (0,) * tensor.ndim


def _narrower(gradient: torch.Tensor) -> str:
    if gradient.dtype != torch.float32:
        return dtype_name(gradient.dtype)
    return narrower_dtype(gradient.detach().clone().cpu().numpy())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else dtype_name(dtype)


def _place_of_caller() -> str:
    places = CodePlaces()
    places.find(sys._getframe(2))
    if not places.new:
        return ""
    _, place = places.new[0]
    return f"{place.file}:{place.line}"


# --- Reduce tensors to fingerprints, which show differences of two runs in little space.


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> Array:
    """Sum, sum of squares and evenly spaced values; shape: (FINGERPRINT_LENGTH,), float64."""
    flat = tensor.detach().reshape(-1)
    count = min(flat.numel(), FINGERPRINT_SAMPLES)
    found = np.zeros(FINGERPRINT_LENGTH)
    if count:
        wide = flat.double()
        wanted = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device=flat.device)
        found[0], found[1] = float(wide.sum()), float(wide.dot(wide))
        found[2 : 2 + count] = wide[wanted.round().long()].cpu().numpy()
    return found


def fingerprint_all(value: Any) -> Array:
    """One fingerprint of all floating tensors of an output: of their concatenation."""
    tensors = [
        each
        for each in map(local_part, tensors_in(value))
        if each.is_floating_point() and each.numel()
    ]
    if not tensors:
        return np.zeros(FINGERPRINT_LENGTH)
    return fingerprint(torch.cat([each.detach().reshape(-1).double() for each in tensors]))


def digest(*values: Any) -> str:
    """A checksum of all tensors in the values."""
    total = 0
    for tensor in map(local_part, tensors_in(values)):
        raw = tensor.detach().clone().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        total = zlib.crc32(raw.tobytes(), total)
    return f"{total:08x}"


# --- Read the constant factor of a loss from its autograd graph: 0.25 for `loss / 4`.

_SAME = ("AliasBackward0", "ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0")
_CONVERTED = ("ToCopyBackward0",)
_MOST_OPERATIONS = 32


def factor_of(loss: torch.Tensor) -> float:
    """The product of the constants that the last operations multiplied or divided a scalar by.

    Reading stops at the first operation of another kind. 1.0: no constant.
    """
    factor, node = 1.0, _node_of(loss)
    if loss.numel() != 1:
        return factor
    for _ in range(_MOST_OPERATIONS):
        name = type(node).__name__
        if name in _SAME + _CONVERTED and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
            continue
        step = _constant_of(node, name)
        if step is None:
            break
        factor *= step[0]
        node = step[1]
    return factor


def _node_of(tensor: torch.Tensor) -> Any:
    return tensor.grad_fn


def _constant_of(node: Any, name: str) -> tuple[float, Any] | None:
    """The factor of one operation, and the operation before it; None: it has no constant."""
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    inputs = [each[0] for each in node.next_functions]
    if name == "DivBackward0":
        value = _number(node, "_saved_other") if inputs[1] is None else None
        return None if not value else (1 / value, inputs[0])
    for constant, variable in ((1, 0), (0, 1)):
        if inputs[constant] is None and inputs[variable] is not None:
            value = _number(node, ("_saved_self", "_saved_other")[constant])
            return None if value is None else (value, inputs[variable])
    return None


def _number(node: Any, name: str) -> float | None:
    value = getattr(node, name, None)
    if torch.is_tensor(value):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


# --- Save the states of the random generators in one run, and restore them in the other.


def save_random_states(folder: Path, name: str) -> None:
    """Save the default generators of Python, NumPy and torch under a name."""
    folder.mkdir(parents=True, exist_ok=True)
    states = {f"torch-{at}": state.numpy() for at, state in enumerate(_torch_states())}
    _, keys, position, has_gauss, gauss = np.random.get_state()
    arrays: dict[str, Any] = {"numpy": keys, **states}
    np.savez(folder / f"{name}.npz", **arrays)
    text = json.dumps({"python": random.getstate(), "numpy": [position, has_gauss, gauss]})
    (folder / f"{name}.json").write_text(text)


def restore_random_states(folder: Path, name: str) -> None:
    """Restore the states saved under a name; without them, the generators stay unchanged."""
    path = folder / f"{name}.json"
    if not path.exists():
        return
    fields = json.loads(path.read_text())
    version, internal, gauss = fields["python"]
    random.setstate((version, tuple(internal), gauss))
    with np.load(folder / f"{name}.npz") as arrays:
        np.random.set_state(("MT19937", arrays["numpy"], *fields["numpy"]))
        torch.set_rng_state(torch.from_numpy(arrays["torch-0"]))
        for device in range(_num_devices()):
            if f"torch-{device + 1}" in arrays:
                state = torch.from_numpy(arrays[f"torch-{device + 1}"])
                torch.cuda.set_rng_state(state, device)


def _torch_states() -> list[torch.Tensor]:
    own = [torch.cuda.get_rng_state(device) for device in range(_num_devices())]
    return [torch.get_rng_state(), *own]


def _num_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
