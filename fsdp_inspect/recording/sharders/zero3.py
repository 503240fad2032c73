"""Record DeepSpeed engines with ZeRO-3.

[Note: Where the recorder attaches to ZeRO-3]
A unit is a sub-module that owns parameters. DeepSpeed's hooks fetch the parameters of a sub-module
before its forward and its backward, and release them afterwards. The parameter coordinator gathers
missing parameters, waits for them, and then prefetches the parameters of the next sub-modules.

One message may hold the parameters of several sub-modules. A gather counts for the unit that waits
for it, which is the first unit that uses it. A reduction counts for the unit of its first gradient.
The counts and bytes of a step are therefore exact, and some units have no collective.

A sub-module whose inputs need no gradient has no end of backward. It ends before DeepSpeed reduces
the last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdp_inspect.recording.collectives import Communication, TimedWork, run_inside_collective
from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.sharders.zero import Zero, ZeroHooks
from fsdp_inspect.recording.torch_api import deepspeed_zero
from fsdp_inspect.recording.torch_api.deepspeed_zero import (
    EPILOGUE,
    FETCH,
    GRADIENT,
    MODULE_HOOKS,
    REDUCE,
    ModuleHandle,
)
from fsdp_inspect.recording.torch_api.modules import original_class
from fsdp_inspect.recording.unit_timing import UnitTimer
from fsdp_inspect.recording.units import dtype_code, dtype_name
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryCategory,
    MemoryPoint,
    Phase,
    Stream,
    UseEvent,
)
from fsdp_inspect.trace.run import ModuleUse, Unit, UseOrder
from fsdp_inspect.trace.sharders import ZERO3

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups


class Zero3(Zero[ModuleHandle]):
    """The sub-modules of engines with ZeRO-3."""

    name = ZERO3
    stage = 3

    def find_units(self) -> list[ModuleHandle]:
        """The sub-modules that own parameters."""
        return [
            handle
            for prefix, engine in self.engines
            for handle in deepspeed_zero.find_module_handles(prefix, engine)
        ]

    def make_hooks(self, session: Session, memory: MemoryProbe) -> SubmoduleHooks:
        """Hooks on each sub-module."""
        return SubmoduleHooks(session, self, memory)

    def keep_order(
        self, modules: Iterable[Any], events: Sequence[tuple[UseEvent, int, int]]
    ) -> None:
        """Keep the order of uses for the manifest.

        Args:
            modules: The modules, in the order of their first use.
            events: As in `UseOrder`; a gradient has DeepSpeed's number of its parameter.
        """
        owned = [each for handle in self.units for each in handle.parameters]
        numbers = {int(each.ds_id): number for number, each in enumerate(owned)}
        units = {handle.module: unit for unit, handle in enumerate(self.units)}
        used = {each: deepspeed_zero.gathered_by(each) for each in modules}
        if not {own for each in used.values() for own in each} <= numbers.keys():
            return  # the units lack a parameter that was added later
        self.uses = UseOrder(
            modules=[
                ModuleUse(
                    unit=units.get(each, NO_UNIT), parameters=[numbers[own] for own in gathered]
                )
                for each, gathered in used.items()
            ],
            events=[
                (event, numbers[number] if event == UseEvent.GRADIENT else number, ns)
                for event, number, ns in events
            ],
        )
        self.num_changes += 1

    def describe_unit(
        self, handle: ModuleHandle, index: int, name: str, groups: ProcessGroups
    ) -> Unit:
        """Describe a sub-module."""
        parameters, numels = handle.parameters, handle.full_numels
        trained = sum(
            numel for each, numel in zip(parameters, numels, strict=True) if each.requires_grad
        )
        shards, itemsize = handle.shard_numels, handle.dtype.itemsize
        padded_trained = sum(
            numel for each, numel in zip(parameters, shards, strict=True) if each.requires_grad
        )
        dtype = handle.engine.optimizer.get_param_comm_dtype(parameters[0])
        return Unit(
            index=index,
            fqn=name,
            modules=[handle.name],
            module_class=original_class(handle.module).__name__,
            num_parameters=sum(numels),
            num_trainable_parameters=trained,
            num_tensors=len(parameters),
            parameters=handle.parameter_shapes,
            unsharded_bytes=sum(shards) * handle.world_size * itemsize,
            sharded_bytes=sum(shards) * itemsize,
            reduce_bytes=padded_trained * handle.world_size * dtype.itemsize,
            param_dtype=dtype_name(handle.dtype),
            reduce_dtype=dtype_name(dtype),
            reshard_after_forward=not handle.is_persistent,
            shard_group=groups.find(deepspeed_zero.group_of(handle.engine), "shard"),
            is_root=handle.name == "",
            offload=deepspeed_zero.offloads_parameters(handle.engine),
            recorded_by="zero_module",
        )

    def shared_buffers(self) -> list[tuple[MemoryCategory, torch.Tensor]]:
        """The gradient shards, the buckets and the optimizer's copies of the parameters."""
        return [
            each
            for _, engine in self.engines
            for each in deepspeed_zero.shared_buffers_of_stage_3(engine)
        ]


_EQUAL_STEPS, _MOST_STEPS, _MOST_EVENTS = 3, 30, 20_000
"""The equal steps whose order is kept. With more steps, or more events in a step, none is kept."""


class UseTracer:
    """Notes the order of uses in the first steps, until some of them are equal."""

    def __init__(self, session: Session, sharder: Zero3) -> None:
        self._session = session
        self._sharder = sharder
        self._modules: dict[Any, int] = {}
        self._events: list[tuple[UseEvent, int, int]] = []
        self._known: list[tuple[UseEvent, int, int]] = []
        """The events of the last step, each with its shortest time."""
        self._num_equal = self._num_steps = self._last_ns = 0
        self.is_over = len(sharder.engines) > 1

    def note(self, event: UseEvent, number: int = 0) -> None:
        """Note that an event begins."""
        if self.is_over:
            return
        now = self._session.clock.host_now()
        self._events.append((event, number, max(now - self._last_ns, 0)))
        self._last_ns = now

    def note_module(self, event: UseEvent, module: Any) -> None:
        """As `note`, for a module."""
        if not self.is_over:
            self.note(event, self._modules.setdefault(module, len(self._modules)))

    def settle(self) -> None:
        """Note that the hook of the last event ends."""
        if not self.is_over:
            self._last_ns = self._session.clock.host_now()

    def end_step(self) -> None:
        """Compare the order of a step with that of the last one."""
        events, self._events = self._events, []
        self.is_over |= len(events) > _MOST_EVENTS
        if self.is_over or not events:
            return
        self._num_steps += 1
        if [each[:2] for each in events] == [each[:2] for each in self._known]:
            pairs = zip(events, self._known, strict=True)
            self._known = [(*one[:2], min(one[2], two[2])) for one, two in pairs]
            self._num_equal += 1
        else:
            self._known, self._num_equal = events, 1
        if self._num_equal == _EQUAL_STEPS:
            self._sharder.keep_order(self._modules, self._known)
        self.is_over = self._num_equal == _EQUAL_STEPS or self._num_steps == _MOST_STEPS


class GatherWork(TimedWork):
    """The handle of a gather. Its row is written at the first wait for it."""

    def __init__(
        self,
        inner: dist.Work,
        session: Session,
        communication: Communication,
        on_wait: Callable[[Communication], None],
    ) -> None:
        super().__init__(inner, session, communication)
        self._on_wait = on_wait

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original handle does, and write the row."""
        communication, session = self._communication, self._session
        if communication.was_written or not session.active:
            return self._inner.wait(*args, **kwargs)
        result = super().wait(*args, **kwargs)
        try:
            self._on_wait(communication)
            communication.write(session)
        except Exception as error:
            session.fail(error)
        return result


class SubmoduleHooks(ZeroHooks):
    """The hooks on every unit; see [Note: Where the recorder attaches to ZeRO-3]."""

    _sharder: Zero3

    def __init__(self, session: Session, sharder: Zero3, memory: MemoryProbe) -> None:
        super().__init__(session, sharder, memory)
        self._timers = [
            UnitTimer(session, handle, index, memory) for index, handle in enumerate(sharder.units)
        ]
        self._timer_of = {
            handle.module: timer for handle, timer in zip(sharder.units, self._timers, strict=True)
        }
        self._unit_of = {
            int(parameter.ds_id): index
            for index, handle in enumerate(sharder.units)
            for parameter in handle.parameters
        }
        """The unit of each parameter, by DeepSpeed's number of the parameter."""
        self._fetching: list[Any] = []
        """The parameters that the coordinator gathers now, by number."""
        self._unused: set[int] = set()
        """The numbers of parameters that were gathered and not yet used."""
        self._uses = UseTracer(session, sharder)

    def attach_to(self, engine: Any, patches: Patches) -> None:
        """Wrap the coordinator's gather, the hooks of sub-modules and the reduction."""
        zero = engine.optimizer
        offload = zero.parameter_offload
        coordinator = offload.get_param_coordinator()
        fetch = self._wrap_fetch(getattr(coordinator, FETCH))
        patches.set_attribute(coordinator, FETCH, fetch)
        around = (
            (self._before_forward, self._after_pre_forward),
            (self._before_post_forward, None),
            (self._before_backward, self._after_pre_backward),
            (self._before_post_backward, None),
        )
        for method, (before, after) in zip(MODULE_HOOKS, around, strict=True):
            wrapped = wrap_call(getattr(offload, method), before, after, self._session)
            patches.set_attribute(offload, method, wrapped)

        def owner(dtype: torch.dtype, *unused: Any, **also: Any) -> int:
            members = zero.ipg_buckets[dtype].params
            return self._unit_of.get(int(members[0].ds_id), NO_UNIT) if members else NO_UNIT

        patches.set_attribute(zero, REDUCE, self.reducing(getattr(zero, REDUCE), owner))
        wrapped = wrap_call(
            getattr(zero, EPILOGUE), self._before_epilogue, self._after_epilogue, self._session
        )
        patches.set_attribute(zero, EPILOGUE, wrapped)
        wrapped = wrap_call(
            getattr(zero, GRADIENT), self._before_gradient, self._after_gradient, self._session
        )
        patches.set_attribute(zero, GRADIENT, wrapped)

    def begin_forward(self, engine: Any) -> None:
        """Note that DeepSpeed begins to fetch in the order of the model again."""
        self._uses.note(UseEvent.BEGIN)

    # --- all-gather

    def _wrap_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(params: Any, *args: Any, **kwargs: Any) -> Any:
            missing = [each for each in params if each.ds_status.name == "NOT_AVAILABLE"]
            self._fetching = sorted(missing, key=lambda each: int(each.ds_id))
            try:
                return original(params, *args, **kwargs)
            finally:
                self._fetching = []

        return fetch

    def gather(
        self, collective: Callable[[], Any], output: torch.Tensor, shard: torch.Tensor, group: Any
    ) -> Any:
        """Run a gather of the coordinator, or of persistent parameters after the update."""
        session = self._session
        try:
            members = self._take_members(output) or self._find_persistent(shard)
            if not members:
                return collective()
            communication, number = self._begin(members, output, group)
        except Exception as error:
            session.fail(error)
            return collective()
        work = run_inside_collective(session, collective)
        try:
            return self._issued(communication, number, work, output)
        except Exception as error:
            session.fail(error)
            return work

    def _take_members(self, output: torch.Tensor) -> list[Any]:
        """The fetched parameters in a message: all with one dtype, or the next single parameter."""
        waiting = [each for each in self._fetching if each.ds_tensor.dtype == output.dtype]
        sizes = [each.ds_tensor.ds_numel * each.ds_zero_partition_world_size for each in waiting]
        if sum(sizes) == output.numel():
            taken = waiting
        else:
            taken = [
                each for each, size in zip(waiting, sizes, strict=True) if size == output.numel()
            ][:1]
        self._fetching = [each for each in self._fetching if not any(each is one for one in taken)]
        return taken

    def _find_persistent(self, shard: torch.Tensor) -> list[Any]:
        """The parameter with this shard, if it is gathered alone."""
        return [
            parameter
            for handle in self._sharder.units
            for parameter in handle.parameters
            if parameter.ds_tensor.data_ptr() == shard.data_ptr() and shard.numel()
        ][:1]

    def _begin(
        self, members: Sequence[Any], output: torch.Tensor, group: Any
    ) -> tuple[Communication, int]:
        session = self._session
        self._unused.update(int(each.ds_id) for each in members)
        units = [self._unit_of.get(int(each.ds_id), NO_UNIT) for each in members]
        unit = max(units) if session.phase == Phase.BACKWARD else min(units)
        if session.hook_unit in units:
            unit = session.hook_unit
        num_bytes, dtype = output.nbytes, dtype_code(output.dtype)
        number = session.note_issue(EventKind.ALL_GATHER, unit, group, num_bytes, dtype)
        communication = Communication(session, EventKind.ALL_GATHER, unit, Stream.ALL_GATHER)
        if session.hook_unit != unit:
            communication.flags |= EventFlag.PREFETCHED
        communication.begin(session, (num_bytes, dtype, group, number, session.clock.mark()))
        return communication, number

    def _issued(
        self, communication: Communication, number: int, work: Any, output: torch.Tensor
    ) -> Any:
        session = self._session
        if session.watches_memory:
            self._memory.gather_buffer(output, communication.unit)
        if isinstance(work, dist.Work):
            communication.follow_in_black_box(session, number)
            return GatherWork(work, session, communication, self._waited)
        communication.end = session.clock.mark()
        communication.note_end(session, number)
        if session.on_host:
            communication.block_host()
        else:
            communication.need_from(communication.start, communication.end)
        communication.write(session)
        return work

    def _waited(self, communication: Communication) -> None:
        """Assign a gather to the unit that waited for it."""
        if self._session.hook_unit != NO_UNIT:
            communication.unit = self._session.hook_unit
        elif self._session.phase != Phase.OPTIMIZER:
            communication.flags |= EventFlag.UNUSED  # DeepSpeed cleans up before a forward

    # --- forward and backward

    def _before_forward(self, module: Any, *more: Any, **named: Any) -> UnitTimer | None:
        self._uses.note_module(UseEvent.ENTER_FORWARD, module)
        timer = self._timer_of.get(module)
        if timer is not None:
            timer._enter_hook()
            timer._begin_forward((), {})
        return timer

    def _after_pre_forward(self, timer: UnitTimer | None, result: Any) -> None:
        if timer is not None:
            self._gathered(timer)
            timer._leave_hook()
            timer._open_forward(self._note_use(timer))
        self._uses.settle()

    def _before_post_forward(self, module: Any, *more: Any, **named: Any) -> None:
        self._uses.note_module(UseEvent.LEAVE_FORWARD, module)
        timer = self._timer_of.get(module)
        if timer is not None:
            timer._close_forward(None)

    def _before_backward(self, module: Any, *more: Any, **named: Any) -> UnitTimer | None:
        self._uses.note_module(UseEvent.ENTER_BACKWARD, module)
        timer = self._timer_of.get(module)
        if timer is not None:
            self._session.phase = Phase.BACKWARD
            timer._enter_hook()
        return timer

    def _after_pre_backward(self, timer: UnitTimer | None, result: Any) -> None:
        if timer is not None:
            self._gathered(timer)
            timer._leave_hook()
            timer._open_backward(self._note_use(timer))
        self._uses.settle()

    def _before_post_backward(self, module: Any, *more: Any, **named: Any) -> None:
        self._uses.note_module(UseEvent.LEAVE_BACKWARD, module)
        timer = self._timer_of.get(module)
        if timer is not None:
            timer._close_backward()

    def _note_use(self, timer: UnitTimer) -> int:
        """Note that a unit uses its parameters. Returns the flags of its forward or backward."""
        used = {int(each.ds_id) for each in self._sharder.units[timer.index].parameters}
        was_gathered = not self._unused.isdisjoint(used)
        self._unused -= used
        return 0 if was_gathered else EventFlag.STILL_GATHERED

    def _gathered(self, timer: UnitTimer) -> None:
        """Note that the parameters of a unit are ready."""
        if self._session.watches_memory:
            self._memory.unsharded(self._sharder.units[timer.index], timer.index)
            self._memory.sample(MemoryPoint.AFTER_UNSHARD, timer.index)

    def _before_gradient(self, parameter: Any) -> None:
        self._uses.note(UseEvent.GRADIENT, int(parameter.ds_id))

    def _after_gradient(self, token: None, result: Any) -> None:
        self._uses.settle()

    # --- the end of backward

    def _before_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """Called before DeepSpeed reduces the remaining gradients."""
        self._uses.note(UseEvent.REDUCE_REST)
        for timer in self._timers:
            if timer._backward_start is not None:
                timer._close_backward()

    def _after_epilogue(self, token: Any, result: Any) -> None:
        session = self._session
        self._uses.settle()
        if self._reductions.reduce_scatters or self._reductions.all_reduces:
            self._reductions.wait_for_all(session, session.clock.mark())
        self.classify_gradients()

    def end_step(self) -> None:
        """Close open events."""
        self._uses.end_step()
        for timer in self._timers:
            timer.end_step()
