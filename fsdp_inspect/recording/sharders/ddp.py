"""Record models that are wrapped with `DistributedDataParallel` (DDP).

[Note: Where the recorder attaches to DDP]
A unit is a bucket of the reducer. The reducer issues the all-reduce of a bucket from C++, in the
order of the buckets, as soon as its gradients are ready. The recorder observes these calls in the
dispatcher (see `dispatcher_kernels`). The future of a call shows its end.

The reducer waits for all buckets in a callback of autograd, after the last gradient. The recorder
queues its own callback when it sees the first bucket, so that it runs right before, and then one
that runs right after. In between, the compute stream (CPU: the main thread) waits for the buckets
one by one. These waits are inferred: the copies of reduced gradients between two of them count as
waiting.

A bucket is not a module, so it has neither a forward nor a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect.recording.collectives import Communication, run_inside_collective
from fsdp_inspect.recording.dispatcher_kernels import Issue, observe_all_reduces
from fsdp_inspect.recording.journal import Completion, later_of
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.sharders.base import Sharder, wrap_model_forward
from fsdp_inspect.recording.tensors import strided_parts
from fsdp_inspect.recording.torch_api.autograd import call_after_backward, current_graph_task_id
from fsdp_inspect.recording.torch_api.c10d import bytes_of
from fsdp_inspect.recording.torch_api.ddp import (
    BucketHandle,
    comm_hooks_of,
    ddp_settings_of,
    find_buckets,
    find_wrappers,
    has_final_buckets,
    has_rebuilt_buckets,
    is_joined,
    leaves_parameters_unused,
)
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.recording.units import dtype_code, dtype_name
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Method, Phase, Stream
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.sharders import DDP

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import ProcessGroups

_ALL_REDUCE = EventKind.ALL_REDUCE
_ASYNC = int(EventFlag.ASYNC)
_NO_BACKWARD = -1
"""torch's id of the running backward if none runs."""


class Ddp(Sharder[BucketHandle]):
    """The buckets of a model."""

    name = DDP

    def __init__(self, wrappers: Sequence[tuple[str, DistributedDataParallel]]) -> None:
        self.wrappers = wrappers
        self._num_rebuilt = self._count_rebuilt()
        self._unused = ""
        """Whether a backward left parameters unused: `none` or `some`; empty: unknown."""
        super().__init__(self._find_units())

    @classmethod
    def find(cls, model: nn.Module) -> Self | None:
        """The buckets of a model; see `Sharder.find`."""
        wrappers = find_wrappers(model)
        return cls(wrappers) if wrappers else None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.wrappers[0][1].parameters()).device

    def make_hooks(self, session: Session, memory: MemoryProbe) -> BucketHooks:
        """Hooks on each wrapped model and on the all-reduces."""
        if any(is_joined(wrapper) for _, wrapper in self.wrappers):
            session.stop_comparing()
        return BucketHooks(session, self, memory)

    def mesh(self) -> dict[str, int]:
        """One dimension: every rank has a replica of the model."""
        return {"replicate": self.units[0].group.size()}

    def process_groups(self) -> list[tuple[dist.ProcessGroup | None, str]]:
        """The group of each wrapped model."""
        return [(wrapper.process_group, "replicate") for _, wrapper in self.wrappers]

    def describe_unit(
        self, handle: BucketHandle, index: int, name: str, groups: ProcessGroups
    ) -> Unit:
        """Describe a bucket; its parameters are whole on every rank."""
        parameters = handle.parameters
        num_parameters = sum(handle.full_numels)
        num_bytes = sum(each.numel() * each.element_size() for each in parameters)
        return Unit(
            index=index,
            fqn=name,
            modules=list(handle.fqns),
            num_parameters=num_parameters,
            num_trainable_parameters=num_parameters,  # no bucket has a frozen parameter
            num_tensors=len(parameters),
            parameters=handle.parameter_shapes,
            unsharded_bytes=num_bytes,
            sharded_bytes=num_bytes,
            reduce_bytes=handle.num_bytes,
            param_dtype=dtype_name(parameters[0].dtype),
            reduce_dtype=dtype_name(handle.dtype),
            reshard_after_forward=False,
            replicate_group=groups.find(handle.group, "replicate"),
            recorded_by="reducer",
        )

    def settings(self) -> dict[str, str]:
        """The settings of the first wrapped model."""
        unused = {"unused_parameters": self._unused} if self._unused else {}
        return ddp_settings_of(self.wrappers[0][1]) | unused

    def note_backward(self) -> None:
        """Note whether the backward that ends now used every parameter of the first model."""
        first = self.wrappers[0][1]
        if first.find_unused_parameters and self._unused != "some":
            unused = "some" if leaves_parameters_unused(first) else "none"
            self.num_changes += unused != self._unused
            self._unused = unused

    def update_units(self) -> None:
        """Find the buckets again if a reducer has assigned parameters to other buckets.

        Call it after a forward, when a reducer does so. In backward it would never return, because
        the reducer holds its lock while it issues an all-reduce.
        """
        num_rebuilt = self._count_rebuilt()
        if num_rebuilt != self._num_rebuilt:
            self._num_rebuilt = num_rebuilt
            self.units[:] = self._find_units()
            self.num_changes += 1

    def _count_rebuilt(self) -> int:
        return sum(has_rebuilt_buckets(wrapper) for _, wrapper in self.wrappers)

    def _find_units(self) -> list[BucketHandle]:
        return [
            bucket for prefix, wrapper in self.wrappers for bucket in find_buckets(prefix, wrapper)
        ]


class WrappedModels(Protocol):
    """What the hooks need: `Ddp`, or `NoUnits` if the buckets cannot be read."""

    wrappers: Sequence[tuple[str, DistributedDataParallel]]
    units: list[BucketHandle]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        ...

    def update_units(self) -> None:
        """Find the buckets again if a reducer has changed them."""
        ...

    def note_backward(self) -> None:
        """Called before the reducer waits for its buckets."""
        ...


class BucketHooks:
    """The hooks on all buckets; without known buckets, the all-reduces have no unit.

    See [Note: Where the recorder attaches to DDP].
    """

    def __init__(self, session: Session, sharder: WrappedModels, memory: MemoryProbe) -> None:
        self._session = session
        self._clock = session.clock
        self._sharder = sharder
        self._memory = memory
        self._reductions = Reductions()
        self._backward = _NO_BACKWARD
        """The backward whose buckets are reduced now."""
        self._issued: dict[DistributedDataParallel, int] = {}
        """The number of buckets that this backward has issued, by wrapped model."""
        self._last_ends: dict[int, Any] = {}
        """The end of the last all-reduce of a process group, on a device."""
        self._side_stream: Any = None
        self._waiting: list[Completion] = []
        """The ends of the buckets that the reducer waits for now, on CPU."""

    def attach(self, patches: Patches) -> None:
        """Install the hooks; see `ShardingHooks.attach`."""
        for _, wrapper in self._sharder.wrappers:
            forward = self._wrap_forward(wrapper)
            patches.set_attribute(wrapper, "forward", forward)
            self._watch_unwrapped(wrapper.module, patches)
            for name in comm_hooks_of(wrapper):
                self._session.has_comm_hooks = True
                self._session.problem(
                    f"The model has the communication hook {name}: its collectives are recorded, "
                    "but not by bucket."
                )
        patches.on_undo(observe_all_reduces(self._observe))

    def reductions_of(self, unit: int) -> Reductions:
        """The reductions that the reducer waits for at the end of backward."""
        return self._reductions

    def end_step(self) -> None:
        """Do nothing, because a backward has waited for all its buckets."""

    def choose_detail(self, is_detailed: bool) -> None:
        """Do nothing: the hooks return early in a plain step."""

    def close(self) -> None:
        """Drop the marks of device streams."""
        self._last_ends.clear()

    # --- forward

    def _wrap_forward(self, wrapper: DistributedDataParallel) -> Callable[..., Any]:
        def begin() -> None:
            if torch.is_grad_enabled() and not wrapper.require_backward_grad_sync:
                self._session.skips_reduction = True

        return wrap_model_forward(
            wrapper.forward,
            self._session,
            self._memory,
            key=lambda: (id(wrapper), wrapper.training),
            on_begin=begin,
            on_end=self._sharder.update_units,
        )

    def _watch_unwrapped(self, module: nn.Module, patches: Patches) -> None:
        """Time an evaluation that calls the module inside the wrapper, as that of transformers.

        The new method is bound, so a copy of the module keeps its own weights and is not timed.
        torch.compile may trace it.
        """
        if not isinstance(module.forward, MethodType) or module.forward.__self__ is not module:
            return
        session, original = self._session, module.forward.__func__
        evaluate = wrap_model_forward(
            module.forward, session, self._memory, key=lambda: (id(module), module.training)
        )

        @functools.wraps(original)
        def forward(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() or torch.compiler.is_compiling():
                return original(self_, *args, **kwargs)  # torch.compile guards nothing else
            is_unwrapped = self_ is module and session.phase == Phase.OUTSIDE
            return evaluate(*args, **kwargs) if is_unwrapped else original(self_, *args, **kwargs)

        patches.set_attribute(module, "forward", MethodType(forward, module))

    # --- all-reduce

    def _observe(self, tensors: list[torch.Tensor], group: dist.ProcessGroup, issue: Issue) -> Any:
        """Run an all-reduce; time it if it belongs to a bucket."""
        session = self._session
        backward = current_graph_task_id()
        if not session.active or session.collective_depth or backward == _NO_BACKWARD:
            return issue()[0]
        communication = number = None
        begun = self._clock.host_now() if session.times_plain else 0
        try:
            self._begin_backward(backward)
            if self._is_recorded(group):
                unit = self._find_bucket(tensors[0], group)
                communication, number = self._begin(unit, tensors[0], group)
        except Exception as error:
            session.fail(error)
        if communication is None:
            return issue()[0]
        session.count_plain(begun)
        result, work = run_inside_collective(session, issue)
        begun = self._clock.host_now() if session.times_plain else 0
        try:
            self._follow(communication, work, number or 0)
        except Exception as error:
            session.fail(error)
        session.count_plain(begun)
        return result

    def _begin_backward(self, backward: int) -> None:
        if backward == self._backward:
            return
        self._backward = backward
        self._issued.clear()
        call_after_backward(self._before_finalize)

    def _is_recorded(self, group: dist.ProcessGroup) -> bool:
        name = group.group_name
        return any(each.process_group.group_name == name for _, each in self._sharder.wrappers)

    def _find_bucket(self, message: torch.Tensor, group: dist.ProcessGroup) -> int:
        """The unit of an all-reduce: the next bucket of the only matching model.

        There is no unit if the reducer is about to replace the bucket, or if the message is not a
        bucket, such as the map of used parameters.
        """
        found = []
        for unit, handle in enumerate(self._sharder.units):
            is_next = handle.bucket == self._issued.get(handle.wrapper, 0)
            is_of_group = handle.group.group_name == group.group_name
            if is_next and is_of_group and sum(handle.full_numels) == message.numel():
                found.append(unit)
        if len(found) > 1:
            self._session.problem(
                "Several DDP models have buckets of equal size, and one backward reduces them: "
                "these all-reduces are recorded without a bucket."
            )
        if len(found) != 1:
            return NO_UNIT
        handle = self._sharder.units[found[0]]
        self._issued[handle.wrapper] = handle.bucket + 1
        handle.buffer.note(message)
        return found[0] if has_final_buckets(handle.wrapper) else NO_UNIT

    def _begin(
        self, unit: int, message: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[Communication, int]:
        session = self._session
        if session.watches_memory:
            self._memory.reduce_buffer(message, unit)
        dtype = dtype_code(message.dtype)
        number = session.note_issue(_ALL_REDUCE, unit, group, bytes_of([message]), dtype)
        num_bytes = bytes_of(strided_parts(message))  # of a sparse gradient, other on each rank
        communication = Communication(session, _ALL_REDUCE, unit, Stream.ALL_REDUCE)
        communication.flags |= _ASYNC
        communication.wait_method = Method.INFERRED
        communication.begin(session, (num_bytes, dtype, group, number, self._clock.mark()))
        return communication, number

    def _follow(self, communication: Communication, work: dist.Work, number: int) -> None:
        """Choose the source of the end of a call that was just issued."""
        session = self._session
        future = work.get_future()
        if session.on_host:
            communication.end = completion = Completion()
            clock = session.clock

            def done(_: object) -> None:
                completion.ended_by(clock.host_now())

            future.add_done_callback(done)
        else:
            # The communicator runs its collectives in order, on a separate stream.
            last = self._last_ends.get(communication.group)
            if last is not None:
                communication.start = later_of(communication.start, last)
                communication.method = Method.INFERRED
            communication.end = self._mark_end(future)
            self._last_ends[communication.group] = communication.end
        communication.follow_in_black_box(session, number)
        self._reductions.add(communication)

    def _mark_end(self, future: Any) -> Any:
        """A mark at the end of a collective, on a stream that waits for nothing else."""
        if self._side_stream is None:
            self._side_stream = torch.Stream(self._sharder.device)
        with self._side_stream:
            future.wait()
            return self._clock.mark()

    # --- the end of backward

    def _before_finalize(self) -> None:
        """Called before the reducer waits for its buckets."""
        session = self._session
        self._backward = _NO_BACKWARD
        if not session.active:
            return
        try:
            self._sharder.note_backward()
            self._waiting = [
                each.end
                for each in self._reductions.all_reduces
                if isinstance(each.end, Completion)
            ]
            self._reductions.wait_for_all(session, self._clock.mark())
            call_after_backward(self._after_finalize)
        except Exception as error:
            session.fail(error)

    def _after_finalize(self) -> None:
        """Called after the gradients that the optimizer sees are reduced."""
        session = self._session
        if not session.active:
            return
        try:
            if self._waiting:
                now = self._clock.host_now()
                for end in self._waiting:
                    end.ended_by(now)
                self._waiting.clear()
            if not session.watches_memory:
                return
            for unit, handle in enumerate(self._sharder.units):
                self._memory.sharded_gradients(handle, unit)
        except Exception as error:
            session.fail(error)
