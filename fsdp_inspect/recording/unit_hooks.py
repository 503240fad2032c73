"""Time one FSDP unit by wrapping the methods of its communication group.

[Note: Where the recorder attaches]
A unit's boundaries come from wraps on the *instance* of torch's `FSDPParamGroup`: `unshard`,
`wait_for_unshard`, `pre_forward`, `post_forward`, `pre_backward`, `post_backward`,
`finalize_backward`. Compared with module and tensor hooks this has four advantages. The order of
the user's and of FSDP's hooks is not touched. The wait for an all-gather has its own boundary.
Methods registered with `register_fsdp_forward_method` and partly run grouped modules are recorded.
torch.compile never traces the recorder, because FSDP's own hooks are outside its graphs. The names
are private but the same from torch 2.6 to 2.15; `tests/recording` pins them. The collectives
themselves are timed through torch's public setters (see `collectives`).

The order of calls, torch 2.13 (`_fsdp_state.py`, `_fsdp_param_group.py`):

    pre_forward   [unshard [allocate, all_gather]  wait_for_unshard [wait, copy-out]]
                  unshard of the units named for forward prefetch
    ... forward ...
    post_forward
    pre_backward  [unshard  wait_for_unshard  unshard of the unit that runs next in backward]
    ... backward ...
    post_backward [wait for an earlier reduce-scatter, allocate, copy-in, allocate, reduce_scatter]
    finalize_backward, after the last backward: wait for every reduction that is left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_inspect.recording.collectives import (
    Communication,
    TimedWork,
    close_unwaited,
    is_recorded,
    recorded_all_gather,
    recorded_reduce_scatter,
    run_inside_collective,
    unrecorded,
)
from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.units import dtype_code
from fsdp_inspect.sharding.torch_fsdp import num_reduce_scatters_in_flight
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryPoint,
    Method,
    Phase,
    Stream,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.sharding.torch_fsdp import GroupHandle

# The hot path: in Python 3.11 an attribute of an Enum class costs 0.2 µs and arithmetic of flags
# 2 µs each time, so members are looked up once, and flags are plain integers.
_ALL_GATHER = EventKind.ALL_GATHER
_ALL_GATHER_COPY_IN = EventKind.ALL_GATHER_COPY_IN
_ALL_GATHER_COPY_OUT = EventKind.ALL_GATHER_COPY_OUT
_REDUCE_SCATTER = EventKind.REDUCE_SCATTER
_REDUCE_SCATTER_COPY_IN = EventKind.REDUCE_SCATTER_COPY_IN
_FORWARD, _BACKWARD = EventKind.FORWARD, EventKind.BACKWARD
_FORWARD_PHASE, _BACKWARD_PHASE = Phase.FORWARD, Phase.BACKWARD
_EVALUATION_PHASE = Phase.EVALUATION
_HOST_STREAM, _COPY_IN_STREAM = Stream.HOST, Stream.ALL_GATHER_COPY_IN
_ALL_GATHER_STREAM, _REDUCE_SCATTER_STREAM = Stream.ALL_GATHER, Stream.REDUCE_SCATTER
_MEASURED, _INFERRED = Method.MEASURED, Method.INFERRED
_AFTER_UNSHARD = MemoryPoint.AFTER_UNSHARD
_FORWARD_START, _FORWARD_END = MemoryPoint.FORWARD_START, MemoryPoint.FORWARD_END
_BACKWARD_START, _BACKWARD_END = MemoryPoint.BACKWARD_START, MemoryPoint.BACKWARD_END
_TORCH_FORWARD, _TORCH_PRE_BACKWARD = TrainingState.FORWARD, TrainingState.PRE_BACKWARD
_ASYNC, _PREFETCHED = int(EventFlag.ASYNC), int(EventFlag.PREFETCHED)
_RECOMPUTE, _NO_GRAD = int(EventFlag.RECOMPUTE), int(EventFlag.NO_GRAD)

WRAPPED_METHODS = (
    "unshard",
    "wait_for_unshard",
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "finalize_backward",
)
"""The methods of `FSDPParamGroup` that are wrapped on the instance."""


def _keeps_graph(session: Session) -> bool:
    """Whether a forward that starts now has a backward."""
    return torch.is_grad_enabled() or session.will_repeat


class Reductions:
    """Gradient reductions in flight, shared by the units of one `comm_ctx` (device streams)."""

    def __init__(self) -> None:
        self.reduce_scatters: deque[Communication] = deque()
        """In order of issue, like torch's `comm_ctx.reduce_scatter_states`."""
        self.all_reduces: deque[Communication] = deque()


class ReductionsByContext:
    """The reductions of each of torch's communication contexts.

    torch gives each FSDP root its own `FSDPCommContext`, and the units of one root wait for the
    reductions of that context only. A model without `fully_shard(model)` has as many roots as
    units. `share_comm_ctx` joins several roots.
    """

    def __init__(self) -> None:
        self._of_context: WeakKeyDictionary[FSDPCommContext, Reductions] = WeakKeyDictionary()

    def of(self, context: FSDPCommContext) -> Reductions:
        """The reductions of a context, empty at first."""
        return self._of_context.setdefault(context, Reductions())


class UnitHooks:
    """All hooks of the recorder on one unit."""

    def __init__(
        self,
        session: Session,
        handle: GroupHandle,
        index: int,
        reductions: ReductionsByContext,
        memory: MemoryProbe,
    ) -> None:
        self.index = index
        self._session = session
        self._clock = session.clock
        self._handle = handle
        self._group = handle.group
        self._all_reductions = reductions
        self._context: FSDPCommContext | None = None
        self._own_reductions = Reductions()
        """Of the context above; torch sets a unit's context at the first forward."""
        self._memory = memory
        self._gather: Communication | None = None
        """An all-gather that was issued and not yet waited for."""
        self._copy_in: tuple[Any, Any] | None = None
        """Start of the copy into the all-gather's input, and the stream it runs on."""
        self._reduces_at_once = False
        """Whether torch waits for this backward's reduction right after issuing it."""
        self._reduce_copied: Any = None
        """End of the copy into the reduce-scatter input of this backward."""
        self._reduce_copy_in: tuple[Any, Any] | None = None
        """Start of the copy into the reduce-scatter input, and the stream it runs on."""
        self._forwards: list[tuple[Any, Phase, int]] = []
        """Open forwards of this unit: start, phase, flags."""
        self._backward_start: Any = None
        self._outer_hooks: list[int] = []

    # --- attaching

    def attach(self, patches: Patches) -> str:
        """Wrap the group's methods and install the timed collectives.

        Returns:
            The way in which the collectives were installed; see `Unit.recorded_by`.
        """
        pairs: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], None] | None]] = {
            "unshard": (self._before_unshard, None),
            "wait_for_unshard": (self._before_wait, self._after_wait),
            "pre_forward": (self._before_pre_forward, self._after_pre_forward),
            "post_forward": (self._before_post_forward, None),
            "pre_backward": (self._before_pre_backward, self._after_pre_backward),
            "post_backward": (self._before_post_backward, self._after_post_backward),
            "finalize_backward": (self._before_finalize, None),
        }
        for name in WRAPPED_METHODS:
            before, after = pairs[name]
            wrapped = wrap_call(getattr(self._group, name), before, after, self._session)
            patches.set_attribute(self._group, name, wrapped)
        patches.on_undo(self._restore_collectives)
        return self.install_collectives()

    def install_collectives(self) -> str:
        """Replace the unit's all-gather and reduce-scatter unless already replaced.

        It runs again at each step, because a call of a torch setter may have replaced them.
        """
        gather = self._group._all_gather_comm
        if not is_recorded(gather):
            self._set_all_gather(recorded_all_gather(gather, self))
        reduce = self._group._reduce_scatter_comm
        if not is_recorded(reduce):
            self._set_reduce_scatter(recorded_reduce_scatter(reduce, self))
        return "custom_comm" if self._handle.num_groups == 1 else "param_group"

    def _restore_collectives(self) -> None:
        gather, reduce = self._group._all_gather_comm, self._group._reduce_scatter_comm
        if is_recorded(gather):
            self._set_all_gather(unrecorded(gather))
        if is_recorded(reduce):
            self._set_reduce_scatter(unrecorded(reduce))

    def _set_all_gather(self, comm: Any) -> None:
        if self._handle.num_groups == 1:
            self._handle.modules[0].set_custom_all_gather(comm)  # type: ignore[operator]
        else:  # torch's setter rejects a module with several groups
            self._group._all_gather_comm = comm

    def _set_reduce_scatter(self, comm: Any) -> None:
        if self._handle.num_groups == 1:
            self._handle.modules[0].set_custom_reduce_scatter(comm)  # type: ignore[operator]
        else:
            self._group._reduce_scatter_comm = comm

    # --- all-gather

    def _before_unshard(self, async_op: bool = False) -> None:
        group = self._group
        if group._all_gather_result is not None or group.is_unsharded:
            return
        if self._copy_in is not None:  # no all-gather followed: a group of one rank
            self._clock.release(self._copy_in[0])
        if self._session.on_host:
            self._copy_in = (self._clock.mark(), None)
        else:
            stream = self._copy_in_stream(async_op)
            self._copy_in = (self._clock.mark(stream), stream)

    def _copy_in_stream(self, async_op: bool) -> Any:
        """The stream on which torch copies the shards into the all-gather's input."""
        context = self._group.comm_ctx
        if not hasattr(context, "all_gather_copy_in_stream"):
            return self._clock.current_stream()
        return context.get_all_gather_streams(async_op, self._group._training_state)[0]

    def gather_allocated(self, buffer: torch.Tensor) -> None:
        """The all-gather's output buffer was allocated."""
        if self._session.watches_memory:
            self._memory.gather_buffer(buffer, self.index)

    def all_gather(
        self, collective: Callable[[], Any], output: torch.Tensor, group: dist.ProcessGroup
    ) -> Any:
        """Run and time the unit's all-gather; returns the original result."""
        work, start, number = self._run(collective, _ALL_GATHER, output, group)
        if start is None:
            return work
        try:
            return self._gather_issued(work, start, output, group, number)
        except Exception as error:
            self._session.fail(error)
            return work

    def _run(
        self,
        collective: Callable[[], Any],
        kind: int,
        message: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> tuple[Any, Any, int]:
        """Run a collective.

        Only the black box and the start are noted before the call. A hook between two pieces of
        torch's work finds cold processor caches, which cost more than the hook itself.

        Returns:
            Its result, a mark from right before it (None: inactive), its number in the black box.
        """
        session = self._session
        if not session.active:
            return collective(), None, 0
        try:
            code = dtype_code(message.dtype)
            number = session.note_issue(kind, self.index, group, message.nbytes, code)
            start = self._clock.mark()
        except Exception as error:
            session.fail(error)
            return collective(), None, 0
        return run_inside_collective(session, collective), start, number

    def _gather_issued(
        self, work: Any, start: Any, output: torch.Tensor, group: dist.ProcessGroup, number: int
    ) -> Any:
        session = self._session
        transfer = session.take_transfer()
        end = None if isinstance(work, dist.Work) else self._clock.mark()
        if self._gather is not None:
            self._drop_unused_gather()
        communication = Communication(session, _ALL_GATHER, self.index, _ALL_GATHER_STREAM)
        if session.hook_unit != self.index:
            communication.flags |= _PREFETCHED
        communication.begin(session, output, group, start)
        if transfer is not None:
            communication.follow(transfer)
        if self._copy_in is not None:
            self._add_copy_in(communication, *self._copy_in)
            self._copy_in = None
        self._gather = communication
        if end is None:
            communication.follow_in_black_box(session, number)
            return TimedWork(work, session, communication)
        if transfer is not None:
            return work
        communication.end = end
        communication.note_end(session, number)
        if session.on_host:
            communication.block_host()
            communication.write(session)
        return work

    def _add_copy_in(self, gather: Communication, start: Any, stream: Any) -> None:
        """Write the copy of the shards into the input of the all-gather just issued."""
        session, copied = self._session, gather.start
        if gather.transfer is not None:
            copied = gather.issue_ns  # the link may be free only later
        elif stream is not None and stream != self._clock.current_stream():
            # The all-gather's stream waited for this copy stream, and the copy was its last work.
            copied = self._clock.mark(stream)
        session.add(
            _ALL_GATHER_COPY_IN,
            start,
            copied,
            unit=self.index,
            issued_by=gather.issued_by,
            stream=_HOST_STREAM if session.on_host else _COPY_IN_STREAM,
            collective=gather.identity,
        )

    def _drop_unused_gather(self) -> None:
        """Write an earlier all-gather that no unit used, before the next one."""
        if self._gather is not None:
            close_unwaited(self._session, self._gather)
        self._gather = None

    # --- the wait for the all-gather, and the copy out of its buffer

    def _before_wait(self) -> Any:
        return None if self._group._all_gather_result is None else self._clock.mark()

    def _after_wait(self, begin: Any, result: None) -> None:
        if begin is None:
            return
        session, gather = self._session, self._gather
        self._gather = None
        copy_start: Any = begin
        if gather is not None:
            copy_start = self._close_gather(gather, begin)
        end = self._clock.mark()
        session.add(
            _ALL_GATHER_COPY_OUT,
            copy_start,
            end,
            unit=self.index,
            collective=-1 if gather is None else gather.identity,
            method=_MEASURED if session.on_host else _INFERRED,
        )
        if session.watches_memory:
            self._memory.unsharded(self._group, self.index)
            self._memory.sample(_AFTER_UNSHARD, self.index)

    def _close_gather(self, gather: Communication, begin: Any) -> Any:
        """Write an all-gather that is needed now; returns when the copy out of it began."""
        session = self._session
        if gather.wait is not None and not gather.flags & _ASYNC:
            return begin  # it blocked the host at its issue and is already written
        if gather.wait is None:
            gather.needed(begin)
        assert gather.wait is not None
        gather.write(session)
        return gather.wait[1]

    # --- forward

    def _before_pre_forward(self, module: Any, args: Any, kwargs: Any) -> bool:
        session = self._session
        self._outer_hooks.append(session.hook_unit)
        session.hook_unit = self.index
        if self._group._training_state is _TORCH_FORWARD and not self._close_evaluation():
            return False  # another module of the same unit has opened this forward
        if torch._C._current_graph_task_id() == -1:
            mark = self._clock.mark()
            phase = session.enter_forward(mark, grad_enabled=_keeps_graph(session))
            if not session.execution_known and phase == _FORWARD_PHASE:
                session.note_execution(self.index)
        if session.watches_memory:
            self._memory.inputs(args, kwargs)
        return True

    def _close_evaluation(self) -> bool:
        """Drop a forward that an evaluation has left open; whether there was one.

        If only some modules of a unit run last in an evaluation, torch ends this forward in the
        next pass. Its end is unknown.
        """
        is_left = bool(self._forwards) and self._forwards[-1][1] is _EVALUATION_PHASE
        if not is_left or not torch.is_grad_enabled():
            return False
        self._forwards.pop()
        self._session.close_unit(self.index)
        return True

    def _after_pre_forward(self, opened: bool, result: Any) -> None:
        session = self._session
        session.hook_unit = self._outer_hooks.pop() if self._outer_hooks else NO_UNIT
        if not opened:
            return
        flags = 0 if _keeps_graph(session) else _NO_GRAD
        if session.phase == _BACKWARD_PHASE:
            flags |= _RECOMPUTE
        self._forwards.append((self._clock.mark(), session.phase, flags))
        session.open_units.append(self.index)
        if session.watches_memory:
            self._memory.sample(_FORWARD_START, self.index)

    def _before_post_forward(self, *args: Any, **kwargs: Any) -> None:
        if not self._forwards:
            return
        session = self._session
        start, phase, flags = self._forwards.pop()
        end = self._clock.mark()
        if session.watches_memory:
            self._memory.sample(_FORWARD_END, self.index)
        if session.numerics is not None:
            session.numerics.outputs(args[-1] if args else kwargs.get("output"), self.index)
        session.close_unit(self.index)
        session.leave_forward(end)
        session.add(_FORWARD, start, end, unit=self.index, phase=phase, flags=flags)

    # --- backward

    def _before_pre_backward(self, *args: Any, **kwargs: Any) -> bool:
        if self._group._training_state is _TORCH_PRE_BACKWARD:
            return False
        session = self._session
        session.phase = _BACKWARD_PHASE
        self._outer_hooks.append(session.hook_unit)
        session.hook_unit = self.index
        return True

    def _after_pre_backward(self, opened: bool, result: Any) -> None:
        if not opened:
            return
        session = self._session
        session.hook_unit = self._outer_hooks.pop() if self._outer_hooks else NO_UNIT
        self._backward_start = self._clock.mark()
        session.open_units.append(self.index)
        if session.watches_memory:
            self._memory.sample(_BACKWARD_START, self.index)

    def _before_post_backward(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        end = self._clock.mark()
        if self._backward_start is not None:
            session.add(
                _BACKWARD,
                self._backward_start,
                end,
                unit=self.index,
                phase=_BACKWARD_PHASE,
            )
            self._backward_start = None
            if session.watches_memory:
                self._memory.unsharded_gradients(self._group, self.index)
                self._memory.sample(_BACKWARD_END, self.index)
            if session.numerics is not None:
                session.numerics.gradients(self._group, self.index)
        session.close_unit(self.index)
        self._outer_hooks.append(session.hook_unit)
        session.hook_unit = self.index
        self._reduce_copy_in = self._reduce_copied = None
        # torch 2.13, `post_backward`: a group of several modules of which only some ran.
        is_partial = len(self._group.modules) > 1
        self._reduces_at_once = is_partial and self._group._training_state is _TORCH_FORWARD
        return end

    def _after_post_backward(self, end: Any, result: None) -> None:
        session = self._session
        if session.watches_memory:
            self._memory.sharded_gradients(self._group, self.index)
        waiting = self.reductions.reduce_scatters
        if waiting:
            kept = num_reduce_scatters_in_flight(self._group)
            self._wait_for_reductions(end, len(waiting) - kept)
        if self._reduces_at_once and self._reduce_copied is not None:
            self._wait_for_all_reductions(self._reduce_copied)
        session.hook_unit = self._outer_hooks.pop() if self._outer_hooks else NO_UNIT

    # --- reduce-scatter

    def before_reduce_allocation(self) -> None:
        """The reduce-scatter's input or output is about to be allocated."""
        session = self._session
        if not session.active:
            return
        try:
            if self._reduce_copy_in is None:
                stream = self._clock.current_stream()
                self._reduce_copy_in = (self._clock.mark(), stream)
            else:
                start, stream = self._reduce_copy_in
                end = self._clock.mark() if stream is None else self._clock.mark(stream)
                self._reduce_copied = end
                session.add(
                    _REDUCE_SCATTER_COPY_IN,
                    start,
                    end,
                    unit=self.index,
                    phase=_BACKWARD_PHASE,
                )
        except Exception as error:
            session.fail(error)

    def reduce_allocated(self, buffer: torch.Tensor) -> None:
        """A buffer of the reduce-scatter was allocated."""
        if self._session.watches_memory:
            self._memory.reduce_buffer(buffer, self.index)

    def reduce_scatter(
        self, collective: Callable[[], Any], message: torch.Tensor, group: dist.ProcessGroup
    ) -> Any:
        """Run and time the unit's reduce-scatter; returns the original result."""
        work, start, number = self._run(collective, _REDUCE_SCATTER, message, group)
        if start is not None:
            try:
                self._reduction_issued(start, message, group, number)
            except Exception as error:
                self._session.fail(error)
        return work

    def _reduction_issued(
        self, start: Any, message: torch.Tensor, group: dist.ProcessGroup, number: int
    ) -> None:
        session, end = self._session, self._clock.mark()
        transfer = session.take_transfer()
        communication = Communication(session, _REDUCE_SCATTER, self.index, _REDUCE_SCATTER_STREAM)
        communication.begin(session, message, group, start)
        communication.end = end
        communication.note_end(session, number)
        if transfer is not None:
            communication.follow(transfer)
        if session.on_host and transfer is None:
            communication.block_host()
            communication.write(session)
        else:
            self.reductions.reduce_scatters.append(communication)

    def _wait_for_reductions(self, begin: Any, count: int) -> None:
        """Note the compute stream's wait, from `begin`, for the oldest `count` reduce-scatters."""
        for _ in range(count):
            oldest = self.reductions.reduce_scatters.popleft()
            begin = oldest.needed(begin)
            oldest.write(self._session)

    @property
    def reductions(self) -> Reductions:
        """The reductions that torch waits for together with this unit's."""
        context = self._group.comm_ctx
        if context is not self._context:
            self._context, self._own_reductions = context, self._all_reductions.of(context)
        return self._own_reductions

    def _before_finalize(self) -> None:
        """Begin the compute stream's wait for all remaining reductions."""
        if self.reductions.reduce_scatters or self.reductions.all_reduces:
            self._wait_for_all_reductions(self._clock.mark())

    def _wait_for_all_reductions(self, begin: Any) -> None:
        """Note the compute stream's wait, from `begin`, for all reductions of the unit's root."""
        reductions = self.reductions
        left = sorted(
            (*reductions.reduce_scatters, *reductions.all_reduces),
            key=lambda communication: communication.identity,
        )
        reductions.reduce_scatters.clear()
        reductions.all_reduces.clear()
        for communication in left:
            begin = communication.needed(begin)
            communication.write(self._session)

    # --- the end of a step

    def end_step(self) -> None:
        """Write an all-gather that no unit used for a whole step, and close open events.

        An all-gather issued in the step that just ended may belong to the next forward.
        """
        if self._gather is not None and self._gather.step < self._session.step - 1:
            self._drop_unused_gather()
        self._forwards.clear()
        self._outer_hooks.clear()
        self._backward_start = None

    def close(self) -> None:
        """Write an unused all-gather at the end of the recording."""
        self._drop_unused_gather()
