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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_inspect.recording.collectives import (
    Communication,
    is_recorded,
    recorded_all_gather,
    recorded_reduce_scatter,
    unrecorded,
)
from fsdp_inspect.recording.patches import Patches, wrap_call
from fsdp_inspect.recording.unit_timing import Reductions, UnitTimer
from fsdp_inspect.sharding.torch_fsdp import num_reduce_scatters_in_flight
from fsdp_inspect.trace.codes import (
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

# Looked up once, because the hot path uses them; see `unit_timing`.
_ALL_GATHER_COPY_OUT = EventKind.ALL_GATHER_COPY_OUT
_REDUCE_SCATTER = EventKind.REDUCE_SCATTER
_REDUCE_SCATTER_COPY_IN = EventKind.REDUCE_SCATTER_COPY_IN
_BACKWARD_PHASE, _EVALUATION_PHASE = Phase.BACKWARD, Phase.EVALUATION
_REDUCE_SCATTER_STREAM = Stream.REDUCE_SCATTER
_MEASURED, _INFERRED = Method.MEASURED, Method.INFERRED
_AFTER_UNSHARD = MemoryPoint.AFTER_UNSHARD
_TORCH_FORWARD, _TORCH_PRE_BACKWARD = TrainingState.FORWARD, TrainingState.PRE_BACKWARD

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


class UnitHooks(UnitTimer):
    """All hooks of the recorder on one unit of FSDP2."""

    def __init__(
        self,
        session: Session,
        handle: GroupHandle,
        index: int,
        reductions: ReductionsByContext,
        memory: MemoryProbe,
    ) -> None:
        super().__init__(session, handle, index, memory)
        self._handle = handle
        self._group = handle.group
        self._all_reductions = reductions
        self._context: FSDPCommContext | None = None
        self._own_reductions = Reductions()
        """The reductions of the context above; torch sets a unit's context at the first forward."""
        self._reduces_at_once = False
        """Whether torch waits for this backward's reduction right after issuing it."""
        self._reduce_copied: Any = None
        """End of the copy into the reduce-scatter input of this backward."""
        self._reduce_copy_in: tuple[Any, Any] | None = None
        """Start of the copy into the reduce-scatter input, and the stream it runs on."""

    # --- attaching

    def attach(self, patches: Patches) -> None:
        """Wrap the group's methods and install the timed collectives."""
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
        self.install_collectives()

    def install_collectives(self) -> None:
        """Replace the unit's all-gather and reduce-scatter unless already replaced.

        It runs again at each step, because a call of a torch setter may have replaced them.
        """
        gather = self._group._all_gather_comm
        if not is_recorded(gather):
            self._set_all_gather(recorded_all_gather(gather, self))
        reduce = self._group._reduce_scatter_comm
        if not is_recorded(reduce):
            self._set_reduce_scatter(recorded_reduce_scatter(reduce, self))

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
        """Called after the all-gather's output buffer was allocated."""
        if self._session.watches_memory:
            self._memory.gather_buffer(buffer, self.index)

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
            self._memory.unsharded(self._unit, self.index)
            self._memory.sample(_AFTER_UNSHARD, self.index)

    # --- forward

    def _before_pre_forward(self, module: Any, args: Any, kwargs: Any) -> bool:
        self._enter_hook()
        if self._group._training_state is _TORCH_FORWARD and not self._close_evaluation():
            return False  # another module of the same unit has opened this forward
        self._begin_forward(args, kwargs)
        return True

    def _close_evaluation(self) -> bool:
        """Drop a forward that an evaluation left open; returns whether there was one.

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
        self._leave_hook()
        if opened:
            self._open_forward()

    def _before_post_forward(self, *args: Any, **kwargs: Any) -> None:
        self._close_forward(args[-1] if args else kwargs.get("output"))

    # --- backward

    def _before_pre_backward(self, *args: Any, **kwargs: Any) -> bool:
        if self._group._training_state is _TORCH_PRE_BACKWARD:
            return False
        self._session.phase = _BACKWARD_PHASE
        self._enter_hook()
        return True

    def _after_pre_backward(self, opened: bool, result: Any) -> None:
        if opened:
            self._leave_hook()
            self._open_backward()

    def _before_post_backward(self, *args: Any, **kwargs: Any) -> Any:
        end = self._close_backward()
        self._enter_hook()
        self._reduce_copy_in = self._reduce_copied = None
        # torch 2.13, `post_backward`: only some modules of the group ran.
        is_partial = len(self._group.modules) > 1
        self._reduces_at_once = is_partial and self._group._training_state is _TORCH_FORWARD
        return end

    def _after_post_backward(self, end: Any, result: None) -> None:
        session = self._session
        if session.watches_memory:
            self._memory.sharded_gradients(self._unit, self.index)
        waiting = self.reductions.reduce_scatters
        if waiting:
            kept = num_reduce_scatters_in_flight(self._group)
            self._wait_for_reductions(end, len(waiting) - kept)
        if self._reduces_at_once and self._reduce_copied is not None:
            self.reductions.wait_for_all(session, self._reduce_copied)
        self._leave_hook()

    # --- reduce-scatter

    def before_reduce_allocation(self) -> None:
        """Called before the reduce-scatter's input or output is allocated."""
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
        """Called after a buffer of the reduce-scatter was allocated."""
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
        """The reductions that torch awaits together with the reductions of this unit."""
        context = self._group.comm_ctx
        if context is not self._context:
            self._context, self._own_reductions = context, self._all_reductions.of(context)
        return self._own_reductions

    def _before_finalize(self) -> None:
        """Begin the compute stream's wait for all remaining reductions."""
        if self.reductions.reduce_scatters or self.reductions.all_reduces:
            self.reductions.wait_for_all(self._session, self._clock.mark())
