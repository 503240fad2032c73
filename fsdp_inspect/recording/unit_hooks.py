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

Since torch 2.15 the root makes this last wait before it finalizes its units: see `RootHooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from fsdp_inspect.recording.collectives import (
    Communication,
    Issue,
    choose_detail,
    is_recorded,
    recorded_all_gather,
    recorded_reduce_scatter,
    unrecorded,
    write_blocking,
)
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.torch_api.fsdp2 import (
    CONTEXT_STREAM_WAIT,
    END_BACKWARD,
    STREAM_WAIT,
    FSDPCommContext,
    FSDPState,
    TrainingState,
    comms_of,
    context_of,
    gather_result_of,
    num_reduce_scatters_in_flight,
    set_all_gather_comm,
    set_reduce_scatter_comm,
    training_state_of,
    waits_for_partial_units,
)
from fsdp_inspect.recording.unit_timing import Reductions, UnitTimer
from fsdp_inspect.trace.codes import (
    EventKind,
    MemoryPoint,
    Method,
    Phase,
    Stream,
)

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.torch_api.fsdp2 import GroupHandle

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
_FORWARD_ENDS = ("pre_forward", "post_forward")
_BACKWARD_ENDS = ("pre_backward", "post_backward")


class RootHooks:
    """What units share through torch's communication contexts, and the hooks on these.

    torch gives each FSDP root its own `FSDPCommContext`, and the units of one root wait for the
    reductions of that context only. A model without `fully_shard(model)` has as many roots as
    units. `share_comm_ctx` joins several roots.
    """

    def __init__(self) -> None:
        self._of_context: WeakKeyDictionary[FSDPCommContext, Reductions] = WeakKeyDictionary()
        self.gathering: UnitHooks | None = None
        """The unit whose `unshard` was called last, on a device."""

    def reductions_of(self, context: FSDPCommContext) -> Reductions:
        """The reductions of a context, empty at first."""
        return self._of_context.setdefault(context, Reductions())

    def attach(self, session: Session, patches: Patches) -> None:
        """Wrap the methods with which a root waits since torch 2.15, if there are any."""
        wraps: tuple[tuple[type, str, Callable[..., Any]], ...] = (
            (FSDPCommContext, CONTEXT_STREAM_WAIT, self._wrap_stream_wait),
            (FSDPState, END_BACKWARD, self._wrap_end),
        )
        for kind, name, wrap in wraps:
            original = getattr(kind, name, None)
            if original is not None:
                patches.set_attribute(kind, name, wrap(session, original))

    def _wrap_stream_wait(
        self, session: Session, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        def wait(context: FSDPCommContext, *args: Any, **kwargs: Any) -> Any:
            result = original(context, *args, **kwargs)
            if session.detail and self.gathering is not None:
                self.gathering.restart_copy_in()
            return result

        return wait

    def _wrap_end(self, session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
        """Begin the compute stream's wait for all remaining reductions.

        torch waits for them before it finalizes the units.
        """

        def end(state: FSDPState, *args: Any, **kwargs: Any) -> Any:
            if session.detail:
                try:
                    reductions = self._of_context.get(context_of(state))
                    if reductions is not None and reductions.has_any:
                        reductions.wait_for_all(session, session.clock.mark())
                except Exception as error:
                    session.fail(error)
            return original(state, *args, **kwargs)

        return end


class UnitHooks(UnitTimer):
    """All hooks of the recorder on one unit of FSDP2."""

    def __init__(
        self,
        session: Session,
        handle: GroupHandle,
        index: int,
        roots: RootHooks,
        memory: MemoryProbe,
    ) -> None:
        super().__init__(session, handle, index, memory)
        self._handle = handle
        self._group = handle.group
        self._roots = roots
        self._context: FSDPCommContext | None = None
        self._own_reductions = Reductions()
        """The reductions of the context above; torch sets a unit's context at the first forward."""
        self._reduces_at_once = False
        """Whether torch waits for this backward's reduction right after issuing it."""
        self._reduce_copied: Any = None
        """End of the copy into the reduce-scatter input of this backward."""
        self._reduce_copy_in: tuple[Any, Any] | None = None
        """Start of the copy into the reduce-scatter input, and the stream it runs on."""
        self._wraps: dict[str, Callable[..., Any]] = {}
        """The wrapped methods of the group that no other code had replaced."""
        self._removed: list[str] = []
        """Those that are not installed now."""

    # --- attaching

    def attach(self, patches: Patches) -> None:
        """Wrap the group's methods and install the timed collectives."""
        self._removed.clear()
        wraps: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
            "unshard": self._wrap_unshard,
            "wait_for_unshard": self._wrap_wait,
            "pre_forward": self._wrap_pre_forward,
            "post_forward": self._wrap_post_forward,
            "pre_backward": self._wrap_pre_backward,
            "post_backward": self._wrap_post_backward,
            "finalize_backward": self._wrap_finalize,
            STREAM_WAIT: self._wrap_stream_wait,
        }
        for name, wrap in wraps.items():
            if name in WRAPPED_METHODS or hasattr(self._group, name):
                is_first = name not in vars(self._group)
                wrapped = wrap(getattr(self._group, name))
                patches.set_attribute(self._group, name, wrapped)
                if is_first:
                    self._wraps[name] = wrapped
        patches.on_undo(self._restore_collectives)
        self.install_collectives()
        if not self._session.wants_detail:
            self.choose_detail(is_detailed=False)

    def choose_detail(self, is_detailed: bool) -> None:
        """Install the wraps that a detailed or a plain step needs; see `_needed_when_plain`."""
        for comm in comms_of(self._group):
            if is_recorded(comm):
                choose_detail(comm, is_detailed=is_detailed)
        attributes = vars(self._group)
        if is_detailed:
            for name in self._removed:
                if name not in attributes:
                    setattr(self._group, name, self._wraps[name])
            self._removed.clear()
        elif not self._removed:
            kept = self._needed_when_plain()
            for name, wrap in self._wraps.items():
                if name not in kept and attributes.get(name) is wrap:
                    delattr(self._group, name)
                    self._removed.append(name)

    def _needed_when_plain(self) -> set[str]:
        """The wraps that stay in plain steps.

        Needed are those of the units with which a forward begins or ends, those of units whose
        collectives do not show that they run, and those around an all-reduce of HSDP. A wrap that
        other code has wrapped stays, and with it the wrap of the other end of the pass.
        """
        attributes = vars(self._group)
        is_end = self.index in self._session.forward_ends
        shard_group = self._handle.shard_group
        is_shown = self.has_run and shard_group is not None and shard_group.size() > 1
        kept = set(() if is_shown and not is_end else _FORWARD_ENDS)
        if self._handle.replicate_group is not None:
            kept.update(_BACKWARD_ENDS)
        for names in (_FORWARD_ENDS, _BACKWARD_ENDS):
            if any(attributes.get(name) is not self._wraps.get(name) for name in names):
                kept.update(names)
        return kept

    def install_collectives(self) -> None:
        """Replace the unit's all-gather and reduce-scatter unless already replaced.

        It runs again at each step, because a call of a torch setter may have replaced them.
        """
        gather, reduce = comms_of(self._group)
        if not is_recorded(gather):
            self._set_all_gather(recorded_all_gather(gather, self._session, self))
        if not is_recorded(reduce):
            self._set_reduce_scatter(recorded_reduce_scatter(reduce, self._session, self))

    def _restore_collectives(self) -> None:
        gather, reduce = comms_of(self._group)
        if is_recorded(gather):
            self._set_all_gather(unrecorded(gather))
        if is_recorded(reduce):
            self._set_reduce_scatter(unrecorded(reduce))

    def _set_all_gather(self, comm: Any) -> None:
        if self._handle.num_groups == 1:
            self._handle.modules[0].set_custom_all_gather(comm)  # type: ignore[operator]
        else:  # torch's setter rejects a module with several groups
            set_all_gather_comm(self._group, comm)

    def _set_reduce_scatter(self, comm: Any) -> None:
        if self._handle.num_groups == 1:
            self._handle.modules[0].set_custom_reduce_scatter(comm)  # type: ignore[operator]
        else:
            set_reduce_scatter_comm(self._group, comm)

    # --- all-gather

    def _wrap_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, group = self._session, self._group

        def unshard(*args: Any, **kwargs: Any) -> Any:
            if session.detail and gather_result_of(group) is None and not group.is_unsharded:
                try:
                    if self._copy_in is not None:  # no all-gather followed: a group of one rank
                        self._clock.release(self._copy_in[0])
                    async_op = _given(args, kwargs, 0, "async_op", default=False)
                    stream = None if session.on_host else self._copy_in_stream(async_op)
                    start = self._mark() if stream is None else self._mark(stream)
                    self._copy_in = start, stream
                    if stream is not None:
                        self._roots.gathering = self
                except Exception as error:
                    session.fail(error)
            return original(*args, **kwargs)

        return unshard

    def _wrap_stream_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._session.detail:
                self.restart_copy_in()
            return result

        return wait

    def restart_copy_in(self) -> None:
        """Start the copy into the all-gather after its stream's wait for an earlier reshard.

        With `reshard_after_forward=<int>` the copy stream waits for the shards that the forward
        has made, so the copy begins later than the stream was free.
        """
        try:
            if self._copy_in is not None and self._copy_in[1] is not None:
                start, stream = self._copy_in
                self._clock.release(start)
                self._copy_in = self._mark(stream), stream
        except Exception as error:
            self._session.fail(error)

    def _copy_in_stream(self, async_op: bool) -> Any:
        """The stream on which torch copies the shards into the all-gather's input."""
        context = self._group.comm_ctx
        if not hasattr(context, "all_gather_copy_in_stream"):
            return self._clock.current_stream()
        return context.get_all_gather_streams(async_op, training_state_of(self._group))[0]

    def gather_allocated(self, buffer: torch.Tensor) -> None:
        """Classify the output buffer of the all-gather; only in a memory step."""
        self._memory.gather_buffer(buffer, self.index)

    # --- the wait for the all-gather, and the copy out of its buffer

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, group = self._session, self._group
        method = _MEASURED if session.on_host else _INFERRED

        def wait_for_unshard(*args: Any, **kwargs: Any) -> Any:
            if not session.detail or gather_result_of(group) is None:
                return original(*args, **kwargs)
            begin = None
            try:
                begin = self._mark()
            except Exception as error:
                session.fail(error)
            result = original(*args, **kwargs)
            if session.active:
                try:
                    gather, identity, self._gathered = self._gather, self._gathered, -1
                    if gather is not None:
                        self._gather, identity = None, gather.identity
                        begin = self._close_gather(gather, begin)
                    session.add(
                        _ALL_GATHER_COPY_OUT,
                        begin,
                        self._mark(),
                        unit=self.index,
                        collective=identity,
                        method=method,
                    )
                    if session.watches_memory:
                        self._memory.unsharded(self._unit, self.index)
                        self._memory.sample(_AFTER_UNSHARD, self.index)
                except Exception as error:
                    session.fail(error)
            return result

        return wait_for_unshard

    # --- forward

    def _wrap_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, group = self._session, self._group

        def pre_forward(*args: Any, **kwargs: Any) -> Any:
            if not session.active:
                return original(*args, **kwargs)
            begun = session.clock.host_now() if session.times_plain else 0
            outer, is_opened = session.hook_unit, False
            try:
                session.hook_unit = self.index
                # In the state of a forward, another module of the same unit has opened it.
                if training_state_of(group) is not _TORCH_FORWARD or self._close_evaluation():
                    is_opened = True
                    if session.detail or not session.open_units:
                        inputs = _given(args, kwargs, 1, "args", default=())
                        named = _given(args, kwargs, 2, "kwargs", default={})
                        self._begin_forward(inputs, named)
            except Exception as error:
                session.fail(error)
            session.count_plain(begun)
            result = original(*args, **kwargs)
            if session.active:
                begun = session.clock.host_now() if session.times_plain else 0
                try:
                    session.hook_unit = outer
                    if is_opened:
                        self._open_forward()
                except Exception as error:
                    session.fail(error)
                session.count_plain(begun)
            return result

        return pre_forward

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

    def _wrap_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        def post_forward(*args: Any, **kwargs: Any) -> Any:
            if session.active:
                begun = session.clock.host_now() if session.times_plain else 0
                try:
                    self._close_forward(_given(args, kwargs, 2, "output"))
                except Exception as error:
                    session.fail(error)
                session.count_plain(begun)
            return original(*args, **kwargs)

        return post_forward

    # --- backward

    def _wrap_pre_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, group = self._session, self._group

        def pre_backward(*args: Any, **kwargs: Any) -> Any:
            if not session.active or training_state_of(group) is _TORCH_PRE_BACKWARD:
                return original(*args, **kwargs)
            outer, session.hook_unit = session.hook_unit, self.index
            session.phase = _BACKWARD_PHASE
            result = original(*args, **kwargs)
            if session.active:
                begun = session.clock.host_now() if session.times_plain else 0
                try:
                    session.hook_unit = outer
                    self._open_backward()
                except Exception as error:
                    session.fail(error)
                session.count_plain(begun)
            return result

        return pre_backward

    def _wrap_post_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, group = self._session, self._group

        def post_backward(*args: Any, **kwargs: Any) -> Any:
            if not session.active:
                return original(*args, **kwargs)
            begun = session.clock.host_now() if session.times_plain else 0
            outer, end = session.hook_unit, None
            try:
                end = self._close_backward()
                session.hook_unit = self.index
                self._reduce_copied = self._reduce_copy_in = None
                # torch 2.13, `post_backward`: only some modules of the group ran.
                is_partial = len(group.modules) > 1 and waits_for_partial_units(group)
                self._reduces_at_once = is_partial and training_state_of(group) is _TORCH_FORWARD
            except Exception as error:
                session.fail(error)
            session.count_plain(begun)
            result = original(*args, **kwargs)
            if session.active:
                try:
                    if session.watches_memory:
                        self._memory.sharded_gradients(self._unit, self.index)
                    if end is not None and not self._blocks_host:
                        self._await_reductions(end)
                    session.hook_unit = outer
                except Exception as error:
                    session.fail(error)
            return result

        return post_backward

    def _await_reductions(self, end: Any) -> None:
        """Note the waits for earlier reductions in torch's `post_backward`, from `end` on."""
        waiting = self.reductions.reduce_scatters
        if waiting:
            kept = num_reduce_scatters_in_flight(self._group)
            self._wait_for_reductions(end, len(waiting) - kept)
        if self._reduces_at_once and self._reduce_copied is not None:
            self.reductions.wait_for_all(self._session, self._reduce_copied)

    # --- reduce-scatter

    def before_reduce_allocation(self, size: Sequence[int], dtype: torch.dtype) -> None:
        """Called before the reduce-scatter's input or output is allocated."""
        session = self._session
        if not session.detail:
            return
        try:
            if self._reduce_copy_in is None:
                self.allocated = size, dtype
                stream = None if session.on_host else self._clock.current_stream()
                self._reduce_copy_in = (self._mark(), stream)
            else:
                start, stream = self._reduce_copy_in
                end = self._mark() if stream is None else self._mark(stream)
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
        """Classify a buffer of the reduce-scatter; only in a memory step."""
        self._memory.reduce_buffer(buffer, self.index)

    def after_reduce_scatter(self, issue: Issue) -> None:
        """Record a reduce-scatter that has returned."""
        try:
            self._reduction_issued(issue)
        except Exception as error:
            self._session.fail(error)

    def _reduction_issued(self, issue: Issue) -> None:
        session, end = self._session, self._mark()
        if self._blocks_host:
            write_blocking(session, _REDUCE_SCATTER, self.index, 0, issue, end)
            return
        transfer = session.take_transfer()
        communication = Communication(session, _REDUCE_SCATTER, self.index, _REDUCE_SCATTER_STREAM)
        communication.begin(session, issue)
        communication.end = end
        communication.note_end(session, issue[3])
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
            self._context, self._own_reductions = context, self._roots.reductions_of(context)
        return self._own_reductions

    def _wrap_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Begin the compute stream's wait for all remaining reductions."""
        session = self._session

        def finalize_backward(*args: Any, **kwargs: Any) -> Any:
            if session.detail and not self._blocks_host:
                try:
                    if self.reductions.has_any:
                        self.reductions.wait_for_all(session, self._mark())
                except Exception as error:
                    session.fail(error)
            return original(*args, **kwargs)

        return finalize_backward


def _given(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None
) -> Any:
    """An argument of torch's call, by place or name; the default if another torch omits it."""
    return args[place] if len(args) > place else kwargs.get(name, default)
