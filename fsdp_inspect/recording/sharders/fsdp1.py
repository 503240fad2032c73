"""Record models that are wrapped with `FullyShardedDataParallel` (FSDP1).

[Note: Where the recorder attaches to FSDP1]
A unit is a `FlatParamHandle`. Its all-gather is a method of the handle, which is wrapped on the
instance. The boundaries of a forward and a backward are module functions of torch
(`runtime.py`), which are replaced while a recorder is attached. Each function names its
handle, and handles of models that are not recorded pass through. The reductions are calls of
`torch.distributed` inside these functions: `dist_calls` times them for the unit whose hook runs.

The order of calls, torch 2.13; the names are pinned in `tests/recording/test_fsdp1.py`:

    _pre_forward         [pre_unshard  _all_gather_flat_param]  wait  _prefetch_handle
    ... forward ...
    _post_forward        reshard
    _pre_backward_hook   [pre_unshard  _all_gather_flat_param]  wait  _prefetch_handle
    ... backward ...
    _post_backward_hook  reshard  _prefetch_handle  [pad  reduce_scatter  all_reduce]
    _post_backward_final_callback, after the last backward: wait for every reduction

The compute stream waits for the whole unshard stream, or for the whole stream of the reductions.
There is no copy out of the all-gather, because the parameters are views of its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as _wrapper_module

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.collectives import Communication
from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.sharders.base import Sharder
from fsdp_inspect.recording.torch_api.fsdp1 import (
    ALL_GATHER,
    CALLED_BY_WRAPPER,
    HOOKED_FUNCTIONS,
    PRE_BACKWARD,
    FlatHandle,
    FlatParamHandle,
    find_flat_handles,
    has_begun_backward,
    is_handle_running,
    observe_flat_plan,
    runtime,
    schedule_of,
    training_state_of,
)
from fsdp_inspect.recording.torch_api.modules import original_class
from fsdp_inspect.recording.unit_timing import Reductions, UnitTimer
from fsdp_inspect.recording.units import dtype_name
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, MemoryPoint, Phase, Stream
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import FLAT_PARAM, Unit
from fsdp_inspect.trace.sharders import FSDP1

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups

# Looked up once, because the hot path uses them; see `unit_timing`.
_ALL_GATHER_COPY_IN = EventKind.ALL_GATHER_COPY_IN
_REDUCE_SCATTER_COPY_IN = EventKind.REDUCE_SCATTER_COPY_IN
_HOST_STREAM, _COPY_IN_STREAM = Stream.HOST, Stream.ALL_GATHER_COPY_IN
_REDUCE_SCATTER_STREAM = Stream.REDUCE_SCATTER
_BACKWARD_PHASE = Phase.BACKWARD
_AFTER_UNSHARD = MemoryPoint.AFTER_UNSHARD


class Fsdp1(Sharder[FlatHandle]):
    """The `FlatParamHandle`s of a model."""

    name = FSDP1

    @classmethod
    def find(cls, model: nn.Module) -> Self | None:
        """The handles of a model; see `Sharder.find`."""
        handles = find_flat_handles(model)
        if handles:
            return cls(handles)
        if any(map(cls.marks, model.modules())):
            raise RecordingError(
                f"{type(model).__name__} has FullyShardedDataParallel modules but none of them "
                "manages a parameter. Expected at least one unit with parameters. Wrap the modules "
                "that own them."
            )
        return None

    @property
    def device(self) -> torch.device:
        """The device of compute and communication of the first unit."""
        return torch.device(self.units[0].handle.device)

    def make_hooks(self, session: Session, memory: MemoryProbe) -> FlatParamHooks:
        """Hooks on each handle and on torch's functions."""
        return FlatParamHooks(session, self.units, memory)

    def mesh(self) -> dict[str, int]:
        """The sizes of `replicate` and `shard`, if the first unit has them."""
        unit = self.units[0]
        sizes = {"replicate": unit.replicate_group, "shard": unit.shard_group}
        return {name: group.size() for name, group in sizes.items() if group is not None}

    def process_groups(self) -> list[tuple[dist.ProcessGroup | None, str]]:
        """The groups of each unit's collectives."""
        return [
            pair
            for unit in self.units
            for pair in ((unit.shard_group, "shard"), (unit.replicate_group, "replicate"))
        ]

    def describe_unit(
        self, handle: FlatHandle, index: int, name: str, groups: ProcessGroups
    ) -> Unit:
        """Describe a handle."""
        shapes = handle.parameter_shapes
        return Unit(
            index=index,
            fqn=name,
            modules=list(handle.fqns),
            module_class=original_class(handle.wrapper).__name__,
            num_parameters=sum(handle.full_numels),
            num_trainable_parameters=handle.trainable_numel,
            num_tensors=len(shapes),
            parameters=shapes,
            unsharded_bytes=handle.shard_numel * handle.shard_size * handle.param_dtype.itemsize,
            sharded_bytes=handle.shard_numel * handle.original_dtype.itemsize,
            reduce_bytes=handle.reduced_numel * handle.reduce_dtype.itemsize,
            param_dtype=dtype_name(handle.param_dtype),
            reduce_dtype=dtype_name(handle.reduce_dtype),
            reshard_after_forward=handle.reshards_after_forward,
            shard_group=groups.find(handle.shard_group, "shard"),
            replicate_group=groups.find(handle.replicate_group, "replicate"),
            is_root=handle.is_root,
            offload=handle.offloads_to_cpu,
            recorded_by=FLAT_PARAM,
        )

    def observe_plan(self, model: nn.Module) -> Plan:
        """The plan of the wrappers."""
        return observe_flat_plan(model, self.mesh())

    def settings(self) -> dict[str, str]:
        """The settings of the first wrapper; torch requires most of them to be equal."""
        return self.units[0].settings


class FlatParamHooks:
    """The hooks on every unit; see [Note: Where the recorder attaches to FSDP1]."""

    def __init__(
        self, session: Session, handles: Sequence[FlatHandle], memory: MemoryProbe
    ) -> None:
        self._session = session
        self._reductions: WeakKeyDictionary[Any, Reductions] = WeakKeyDictionary()
        """The reductions of each root, by its schedule."""
        self._units = [
            FlatUnitTimer(session, handle, index, memory) for index, handle in enumerate(handles)
        ]
        self._timers: dict[FlatParamHandle | None, FlatUnitTimer] = {
            unit.handle: unit for unit in self._units
        }
        session.running_units = lambda: [
            index for index, unit in enumerate(self._units) if is_handle_running(unit.handle)
        ]

    def attach(self, patches: Patches) -> None:
        """Install the hooks; see `ShardingHooks.attach`."""
        pairs: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], None] | None]] = {
            "_pre_forward": (self._before_pre_forward, _after_pre_forward),
            "_post_forward": (self._before_post_forward, None),
            "_prefetch_handle": (self._before_prefetch, None),
            "_pre_backward_hook": (self._before_pre_backward, _after_pre_backward),
            "_post_backward_hook": (self._before_post_backward, _after_post_backward),
            "_post_backward_reshard_only_hook": (self._before_post_backward, _after_post_backward),
            "_get_reduce_scatter_tensors": (self._before_padding, self._after_padding),
            "_post_backward_final_callback": (self._before_final, None),
        }
        for name in HOOKED_FUNCTIONS:
            before, after = pairs[name]
            wrapped = wrap_call(getattr(runtime, name), before, after, self._session)
            patches.set_attribute(runtime, name, wrapped)
            if name in CALLED_BY_WRAPPER:
                patches.set_attribute(_wrapper_module, name, wrapped)
        for unit in self._units:
            unit.attach(patches)

    def reductions_of(self, unit: int) -> Reductions:
        """The reductions of a unit's root; the compute stream waits for all of them together."""
        return self._of_schedule(schedule_of(self._units[unit].wrapper))

    def end_step(self) -> None:
        """Close open events."""
        for unit in self._units:
            unit.end_step()

    def choose_detail(self, is_detailed: bool) -> None:
        """Do nothing: the hooks return early in a plain step."""

    def close(self) -> None:
        """Write unused all-gathers."""
        for unit in self._units:
            unit.close()

    def _of_schedule(self, schedule: object) -> Reductions:
        return self._reductions.setdefault(schedule, Reductions())

    # --- forward and backward

    def _before_pre_forward(
        self,
        state: Any,
        handle: FlatParamHandle | None,
        unshard: Any,
        module: Any,
        args: Any,
        kwargs: Any,
        *more: Any,
        **named: Any,
    ) -> FlatUnitTimer | None:
        timer = self._timers.get(handle)
        # In a recompute of a unit that is already in backward, torch does nothing here.
        if timer is None or training_state_of(timer.handle) is PRE_BACKWARD:
            return None
        timer.before_pre_forward(args, kwargs)
        return timer

    def _before_post_forward(
        self,
        state: Any,
        handle: FlatParamHandle | None,
        reshard: Any,
        module: Any,
        inputs: Any,
        output: Any,
        *more: Any,
        **named: Any,
    ) -> None:
        timer = self._timers.get(handle)
        if timer is not None and training_state_of(timer.handle) is not PRE_BACKWARD:
            timer.before_post_forward(output)

    def _before_prefetch(
        self, state: Any, handle: FlatParamHandle | None, *more: Any, **named: Any
    ) -> None:
        timer = self._timers.get(handle)
        if timer is not None:
            timer.unsharded()

    def _before_pre_backward(
        self, state: Any, module: Any, handle: FlatParamHandle | None, *more: Any, **named: Any
    ) -> FlatUnitTimer | None:
        timer = self._timers.get(handle)
        if timer is None or has_begun_backward(timer.handle):
            return None
        timer.before_pre_backward()
        return timer

    def _before_post_backward(
        self, state: Any, handle: FlatParamHandle | None, *more: Any, **named: Any
    ) -> FlatUnitTimer | None:
        timer = self._timers.get(handle)
        if timer is not None:
            timer.before_post_backward()
        return timer

    # --- reductions

    def _running(self) -> FlatUnitTimer | None:
        """The unit whose hook is on the host's stack."""
        unit = self._session.hook_unit
        return None if unit == NO_UNIT else self._units[unit]

    def _before_padding(
        self, state: Any, gradient: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[FlatUnitTimer, torch.Tensor, Any] | None:
        timer = self._running() if self._session.detail else None
        return None if timer is None else (timer, gradient, self._session.clock.mark())

    def _after_padding(
        self, begun: tuple[FlatUnitTimer, torch.Tensor, Any] | None, result: Any
    ) -> None:
        if begun is not None:
            timer, gradient, start = begun
            timer.padded(start, gradient, *result)

    def _before_final(self, state: Any, *more: Any, **named: Any) -> None:
        reductions = self._of_schedule(schedule_of(state))
        if reductions.reduce_scatters or reductions.all_reduces:
            reductions.wait_for_all(self._session, self._session.clock.mark())


class FlatUnitTimer(UnitTimer):
    """The recorder's hooks on one `FlatParamHandle`."""

    def __init__(
        self, session: Session, handle: FlatHandle, index: int, memory: MemoryProbe
    ) -> None:
        super().__init__(session, handle, index, memory)
        self.handle = handle.handle
        self.wrapper = handle.wrapper
        self._copies_before_gather = handle.copies_before_gather
        self._asked_ns = 0
        """The host's time when torch asked its limiter for the last all-gather."""
        self._need: Any = None
        """The time at which the compute stream began to wait for the all-gather; None: no wait."""

    def attach(self, patches: Patches) -> None:
        """Wrap the methods of the handle."""
        handle, session = self.handle, self._session
        gather = getattr(handle, ALL_GATHER)

        def recorded(output: torch.Tensor, *more: Any, **named: Any) -> Any:
            issue = functools.partial(gather, output, *more, **named)
            return self.all_gather(issue, output, handle.process_group)

        patches.set_attribute(handle, ALL_GATHER, recorded)
        for name, before, after in (
            ("pre_unshard", self._before_pre_unshard, self._after_pre_unshard),
            ("post_unshard", _nothing, self._after_post_unshard),
        ):
            wrapped = wrap_call(getattr(handle, name), before, after, session)
            patches.set_attribute(handle, name, wrapped)

    # --- unshard

    def _before_pre_unshard(self, *more: Any, **named: Any) -> None:
        session = self._session
        # On a device, torch's limiter may hold the host between this moment and the all-gather.
        is_seen = session.detail and (self._copies_before_gather or not session.on_host)
        if not (is_seen and self.handle.needs_unshard()):
            return
        if self._copy_in is not None:  # no all-gather followed
            self._clock.release(self._copy_in[0])
        self._copy_in = (self._clock.mark(), None)

    def _after_pre_unshard(self, token: None, result: bool) -> None:
        if self._copy_in is not None and self._copy_in[1] is None:
            self._copy_in = (self._copy_in[0], self._clock.mark())
            self._asked_ns = self._clock.host_now()

    def _add_copy_in(self, gather: Communication, start: Any, end: Any) -> None:
        """Write the work before the all-gather just issued, which may be empty.

        Its issue is the moment at which the host has issued it, before the limiter.
        """
        self._session.add(
            _ALL_GATHER_COPY_IN,
            start,
            end,
            unit=self.index,
            issued_by=gather.issued_by,
            stream=_HOST_STREAM if self._session.on_host else _COPY_IN_STREAM,
            collective=gather.identity,
            issue_ns=self._asked_ns,
        )

    def _after_post_unshard(self, token: None, result: None) -> None:
        """Called after the unshard is issued."""
        if self._session.watches_memory:
            self._memory.unsharded(self._unit, self.index)
            self._memory.kept_buffers(self._unit, self.index)

    def unsharded(self) -> None:
        """Note that the compute stream waited for the unshard stream, if this unit runs next."""
        if self._session.hook_unit != self.index or self._need is None:
            return
        gather, self._gather = self._gather, None
        begin, self._need = self._need, None
        if gather is None:
            self._clock.release(begin)
        else:
            self._close_gather(gather, begin)
        if self._session.watches_memory:
            self._memory.sample(_AFTER_UNSHARD, self.index)

    # --- forward

    def before_pre_forward(self, args: Any, kwargs: Any) -> None:
        """Called before torch unshards the unit for its forward."""
        self._enter_hook()
        self._begin_forward(args, kwargs)
        self._need = self._clock.mark() if self._session.detail else None

    def after_pre_forward(self) -> None:
        """Called when the forward of the wrapped module begins."""
        self._leave_hook()
        self._open_forward()

    def before_post_forward(self, output: Any) -> None:
        """Called when the forward of the wrapped module has ended."""
        self._close_forward(output)

    # --- backward

    def before_pre_backward(self) -> None:
        """Called before torch unshards the unit for its backward."""
        self._session.phase = _BACKWARD_PHASE
        self._enter_hook()
        self._need = self._clock.mark() if self._session.detail else None

    def after_pre_backward(self) -> None:
        """Called when the backward of the wrapped module begins."""
        self._leave_hook()
        self._open_backward()

    def before_post_backward(self) -> None:
        """Called when the gradient of the flat parameter is complete."""
        self._close_backward()
        self._enter_hook()

    def after_post_backward(self) -> None:
        """Called after the reduction is issued."""
        if self._session.watches_memory:
            self._memory.sharded_gradients(self._unit, self.index)
        self._leave_hook()

    # --- reductions

    def padded(
        self, start: Any, gradient: torch.Tensor, message: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Called with the message of the reduce-scatter; without padding it is the gradient."""
        session, is_copy = self._session, message is not gradient
        if is_copy:
            end = self._clock.mark()
            session.add(
                _REDUCE_SCATTER_COPY_IN,
                start,
                end,
                unit=self.index,
                phase=_BACKWARD_PHASE,
                stream=_HOST_STREAM if session.on_host else _REDUCE_SCATTER_STREAM,
            )
        else:
            self._clock.release(start)
        if session.watches_memory:
            self._memory.full_gradient(gradient, self.index)
            self._memory.reduce_buffer(output, self.index)
            if is_copy:
                self._memory.reduce_buffer(message, self.index)


def _after_pre_forward(timer: FlatUnitTimer | None, result: Any) -> None:
    if timer is not None:
        timer.after_pre_forward()


def _after_pre_backward(timer: FlatUnitTimer | None, result: Any) -> None:
    if timer is not None:
        timer.after_pre_backward()


def _after_post_backward(timer: FlatUnitTimer | None, result: Any) -> None:
    if timer is not None:
        timer.after_post_backward()


def _nothing(*more: Any, **named: Any) -> None:
    """Do nothing before a call."""
