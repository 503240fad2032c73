"""Time the collectives that FSDP does not issue, by wrapping functions of `torch.distributed`.

Gradient clipping, loss reduction, HSDP's all-reduce and tensor parallelism call either the
functions of `torch.distributed` or the functional collectives that DTensor uses. Both are wrapped
while a recorder is attached. A function that the script imported into its own namespace before
that (`from torch.distributed import all_reduce`) is not recorded.

Asynchronous sends and receives are seen at `ProcessGroup.send` and `recv`. `isend` and `irecv`
cannot be replaced: a `P2POp` keeps the function, and torch compares it with `dist.isend`.

The backward of a functional collective calls an operator directly. It is seen at its `wait_tensor`,
which its caller identifies: the operator was issued right before.

Inside torch's `_coalescing_manager` a call only queues its tensors. The manager issues all of them
as one collective when its block ends, and the recorder records that collective.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fsdp_inspect.recording.code_places import read_variables
from fsdp_inspect.recording.collectives import (
    Communication,
    TimedWork,
    run_inside_collective,
    run_plain,
)
from fsdp_inspect.recording.dispatcher_kernels import observe
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.recording.journal import Completion
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.torch_api.autograd import (
    call_after_backward,
    current_graph_task_id,
    uses_compile,
)
from fsdp_inspect.recording.torch_api.c10d import (
    BROADCAST_COALESCED,
    COALESCING_MANAGER,
    FUNCTIONALS,
    FUNCTIONS,
    FUTURE,
    POINT_TO_POINT,
    TRACED,
    ArgumentPicker,
    address_of,
    bytes_of,
    functional,
    resolve_group,
    tensors_of,
)
from fsdp_inspect.recording.unit_timing import Reductions
from fsdp_inspect.recording.units import dtype_code
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Method, Phase, Stream

_KIND_OF_BACKWARD = {
    "all_reduce_backward": EventKind.ALL_REDUCE,
    "all_gather_into_tensor_backward": EventKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_backward": EventKind.ALL_GATHER,
    "all_to_all_single_backward": EventKind.ALL_TO_ALL,
}
"""The collective that each backward of torch's functional collectives issues, by its name."""
_BROADCAST = "c10d::broadcast_"
_STREAM_OF_REDUCTION = {
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.ALL_REDUCE,
}


class _OpenCalls(threading.local):
    """The open coalescing manager and functional collective of a thread."""

    queued: list[tuple[EventKind, list[torch.Tensor], Any]] | None = None
    """Kind, tensors and group of the calls that it has queued; None: no manager is open."""
    functional: Communication | None = None
    """The functional collective that is being called; torch may wait for it inside the call."""


class DistCalls:
    """Times the collectives that do not go through an FSDP unit's communication objects."""

    def __init__(
        self,
        session: Session,
        reductions_of: Callable[[int], Reductions],
        *,
        sees_functional: bool = True,
    ) -> None:
        """`reductions_of(unit)` returns the reductions that torch waits for with that unit's.

        With `sees_functional=False`, `graph_collectives` records functional collectives.
        """
        self._session = session
        self._sees_functional = sees_functional
        self._reductions_of = reductions_of
        self._unwaited: dict[int, Communication] = {}
        """Functional collectives in flight, by the address of their result."""
        self._waiting: deque[Communication] = deque()
        """Asynchronous calls of the script, by their issue; waited for or not."""
        self._of_thread = _OpenCalls()
        self._futures = _Futures(session)

    def attach(self, patches: Patches) -> None:
        """Wrap every supported function that this torch version has."""
        for name, (kind, argument) in {**FUNCTIONS, **POINT_TO_POINT}.items():
            original = getattr(dist, name, None)
            if original is None:
                continue
            recorded = self._wrap(original, kind, argument)
            patches.set_attribute(dist, name, recorded)
            patches.set_attribute(c10d, name, recorded)
            if original in TRACED:  # torch.compile finds the traced form of a collective by it
                patches.on_undo(functools.partial(TRACED.pop, recorded, None))
                TRACED[recorded] = TRACED[original]
        if self._sees_functional:
            self._attach_functional(patches)
        for name in ("send", "recv"):
            original = getattr(dist.ProcessGroup, name)
            patches.set_attribute(dist.ProcessGroup, name, self._wrap_message(original))
        broadcast = getattr(dist, BROADCAST_COALESCED, None)
        if broadcast is not None:
            patches.set_attribute(dist, BROADCAST_COALESCED, self._wrap_broadcast(broadcast))
        manager = getattr(c10d, COALESCING_MANAGER, None)
        if manager is not None:
            patches.set_attribute(dist, COALESCING_MANAGER, self._wrap_manager(manager))
            patches.set_attribute(c10d, COALESCING_MANAGER, self._wrap_manager(manager))
        patches.on_undo(observe(_BROADCAST, self._observe_broadcast))
        self._futures.attach(patches)

    def _attach_functional(self, patches: Patches) -> None:
        for name, kind in FUNCTIONALS.items():
            original = getattr(functional, name, None)
            if original is not None:
                patches.set_attribute(functional, name, self._wrap_functional(original, kind))
        patches.set_attribute(
            functional, "wait_tensor", self._wrap_wait_tensor(functional.wait_tensor)
        )

    def end_step(self) -> None:
        """Drop functional collectives of earlier steps: no later call waits for them."""
        stale = [
            address
            for address, communication in self._unwaited.items()
            if communication.step < self._session.step
        ]
        for address in stale:
            del self._unwaited[address]
            self._note_unwaited("A functional collective")
        self._close_waiting(self._session.step - 1)

    def close(self) -> None:
        """Write the asynchronous calls that the script has not waited for."""
        self._close_waiting(self._session.step + 1)

    def _close_waiting(self, before_step: int) -> None:
        """Write the calls of earlier steps; the wait for a call may come a step later."""
        session, waiting = self._session, self._waiting
        while waiting and waiting[0].step < before_step:
            communication = waiting.popleft()
            if communication.was_written:
                continue
            if communication.transfer is not None and communication.transfer.need_ns >= 0:
                communication.needed(communication.transfer.need_ns)
            if communication.end is None:  # no future marks it
                self._note_unwaited("An asynchronous collective or message of the script")
            else:
                communication.write(session)

    def _note_unwaited(self, what: str) -> None:
        self._session.problem(
            f"{what} was never waited for: its end is unknown and it is not recorded."
        )

    def _is_passing(self) -> bool:
        """Whether to call the original function without recording it."""
        session = self._session
        # torch.compile traces through the first check only.
        return torch.compiler.is_compiling() or not session.active or session.collective_depth > 0

    def _is_plain(self) -> bool:
        """Whether only the black box notes a call of the training thread that is issued now."""
        session = self._session
        return not (session.detail or self._of_thread.queued is not None or session.is_background())

    def _begin(
        self, kind: EventKind, message: Any, group: Any, *, is_functional: bool = False
    ) -> Communication | None:
        """Note the issue of a collective; None if this rank is not in its group."""
        group = group or dist.group.WORLD
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        session = self._session
        is_background = session.is_background()
        unit = NO_UNIT if is_background else self._reduced_unit(kind, group)
        communication = Communication(
            session, kind, unit, Stream.OTHER if unit == NO_UNIT else _STREAM_OF_REDUCTION[kind]
        )
        if is_background:
            communication.leave_training()
        tensors = tensors_of(message)
        dtype = dtype_code((tensors[0] if tensors else torch.empty(0)).dtype)
        communication.begin(session, (bytes_of(tensors), dtype, group, 0, session.clock.mark()))
        if not (is_functional and uses_compile()):
            self._note_issue(communication, group)
        return communication

    def _reduced_unit(self, kind: EventKind, group: dist.ProcessGroup) -> int:
        """The unit whose gradients it reduces: HSDP's all-reduce, and the reductions of FSDP1."""
        session = self._session
        in_reduction = (
            kind in _STREAM_OF_REDUCTION
            and session.hook_unit != NO_UNIT
            and session.phase == Phase.BACKWARD
            and session.process_groups.is_of_units(group)
        )
        return session.hook_unit if in_reduction else NO_UNIT

    def _note_plain(self, kind: EventKind, message: Any, group: Any) -> int:
        """Note a call in the black box only; returns its number, 0 if the rank is not in it."""
        group = group or dist.group.WORLD
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return 0
        session = self._session
        begun = session.clock.host_now() if session.times_plain else 0
        tensors = tensors_of(message)
        dtype = dtype_code((tensors[0] if tensors else torch.empty(0)).dtype)
        unit = self._reduced_unit(kind, group)
        number = session.note_issue(kind, unit, group, bytes_of(tensors), dtype)
        session.count_plain(begun)
        return number

    def _note_issue(self, communication: Communication, group: dist.ProcessGroup) -> None:
        """Note the collective in the black box, before torch issues it."""
        session = self._session
        number = session.note_issue(
            communication.kind,
            communication.unit,
            group,
            communication.bytes,
            communication.dtype,
            is_background=communication.is_background,
        )
        communication.follow_in_black_box(session, number)

    def _wrap(
        self, original: Callable[..., Any], kind: EventKind, argument: str | None
    ) -> Callable[..., Any]:
        pick = ArgumentPicker(original).pick

        session, depths = self._session, self._session.depths

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            # The first check is the one of `_is_passing` that is true for every call of FSDP.
            if depths.get(get_ident()) or self._is_passing():
                return original(*args, **kwargs)
            if self._is_plain():
                chosen = functools.partial(pick, argument, args, kwargs)
                number = self._guarded(
                    lambda: self._note_plain(kind, chosen(), pick("group", args, kwargs))
                )
                return run_plain(session, number or 0, original, *args, **kwargs)
            communication = None
            try:
                message, group = pick(argument, args, kwargs), pick("group", args, kwargs)
                if self._of_thread.queued is None:
                    communication = self._begin(kind, message, group)
                else:
                    self._of_thread.queued.append((kind, tensors_of(message), group))
            except Exception as error:
                self._session.fail(error)
            result = run_inside_collective(
                self._session, functools.partial(original, *args, **kwargs)
            )
            if communication is None:
                return result
            issued = functools.partial(self._issued, communication, result)
            return self._guarded(issued) or result

        return recorded

    def _wrap_message(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Time an asynchronous send or receive; its row is written at the first wait for it."""

        @functools.wraps(original)
        def recorded(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_passing():
                return original(group, tensors, *args, **kwargs)
            communication = None
            if self._of_thread.queued is None:
                begin = functools.partial(self._begin, EventKind.POINT_TO_POINT, tensors, group)
                communication = self._guarded(begin)
            else:
                self._of_thread.queued.append(
                    (EventKind.POINT_TO_POINT, tensors_of(tensors), group)
                )
            work = run_inside_collective(
                self._session, functools.partial(original, group, tensors, *args, **kwargs)
            )
            if communication is None or not isinstance(work, dist.Work):
                return work
            return self._script_work(communication, work)

        return recorded

    def _wrap_broadcast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Time the broadcast of DDP's buffers; torch issues it from C++ and waits for it there."""

        @functools.wraps(original)
        def recorded(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_passing():
                return original(group, tensors, *args, **kwargs)
            begin = functools.partial(self._begin, EventKind.BROADCAST, tensors, group)
            communication = self._guarded(begin)
            result = run_inside_collective(
                self._session, functools.partial(original, group, tensors, *args, **kwargs)
            )
            if communication is not None:
                self._guarded(functools.partial(self._issued, communication, None))
            return result

        return recorded

    def _observe_broadcast(self, arguments: tuple[Any, ...], issue: Callable[[], Any]) -> Any:
        """Record a broadcast that C++ issues and waits for: DDP sends its new buckets to all ranks.

        The wait in C++ is not seen, so the call counts as overlapped.
        """
        if self._is_passing():
            return issue()
        group = dist.ProcessGroup.unbox(arguments[1])
        begin = functools.partial(self._begin, EventKind.BROADCAST, arguments[0], group)
        communication = self._guarded(begin)
        result = run_inside_collective(self._session, issue)
        if communication is not None:
            work = dist.Work.unbox(result[1])
            self._guarded(functools.partial(self._script_work, communication, work))
        return result

    def _wrap_manager(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def recorded(*args: Any, **kwargs: Any) -> Iterator[Any]:
            if self._is_passing() or self._of_thread.queued is not None:
                with original(*args, **kwargs) as manager:
                    yield manager
                return
            self._of_thread.queued, communication = [], None
            try:
                with original(*args, **kwargs) as manager:
                    yield manager
                    communication = self._guarded(self._begin_coalesced)
                if communication is not None:
                    end = functools.partial(self._coalesced_issued, communication, manager)
                    self._guarded(end)
            finally:
                self._of_thread.queued = None

        return recorded

    def _begin_coalesced(self) -> Communication | None:
        """Note the issue of the manager's queued calls; None if there are none."""
        queued = self._of_thread.queued or []
        if not queued:
            return None
        kind, _, group = queued[0]
        return self._begin(kind, [tensor for _, tensors, _ in queued for tensor in tensors], group)

    def _coalesced_issued(self, communication: Communication, manager: Any) -> None:
        works = manager.works
        work = self._issued(communication, works[-1] if works else None)
        if work is not None:
            works[-1] = work

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """Run recorder code; an exception only ends the recording."""
        try:
            return action() if self._session.active else None
        except Exception as error:
            self._session.fail(error)
            return None

    def _issued(self, communication: Communication, result: Any) -> Any:
        """Record a collective that has returned; returns the handle to use instead of its own."""
        session = self._session
        transfer = session.take_transfer()
        is_handle = isinstance(result, dist.Work)
        if transfer is not None:
            communication.follow(transfer)
            if not is_handle or communication.unit != NO_UNIT:
                self._issued_emulated(communication, transfer)
                return None
        if is_handle:
            return self._script_work(communication, result)
        communication.end = session.clock.mark()
        if communication.is_background:
            communication.write(session)
            return None
        if session.on_host:
            communication.block_host()
        elif communication.unit != NO_UNIT:
            self._reductions_of(communication.unit).add(communication)
            return None
        else:  # the issuing stream itself waits for the collective
            communication.need_from(communication.start, communication.end)
        communication.write(session)
        return None

    def _script_work(self, communication: Communication, work: dist.Work) -> dist.Work:
        """The handle that records the script's wait for an asynchronous call."""
        self._waiting.append(communication)
        return ScriptWork(work, self._session, communication, self._futures)

    def _issued_emulated(self, communication: Communication, transfer: Transfer) -> None:
        """Record an emulated collective with known times; FSDP or this caller waits for it."""
        if communication.unit != NO_UNIT:
            self._reductions_of(communication.unit).add(communication)
            return
        communication.needed(transfer.need_ns)
        communication.write(self._session)

    def _wrap_functional(self, original: Callable[..., Any], kind: EventKind) -> Callable[..., Any]:
        pick = ArgumentPicker(original).pick

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_passing():
                return original(*args, **kwargs)
            communication = None
            try:
                message = args[0] if args else kwargs.get("self")
                group = resolve_group(pick("group", args, kwargs))
                communication = self._begin(kind, message, group, is_functional=True)
            except Exception as error:
                self._session.fail(error)
            self._of_thread.functional = communication
            try:
                result = run_inside_collective(
                    self._session, functools.partial(original, *args, **kwargs)
                )
            finally:
                self._of_thread.functional = None
            is_unwaited = communication is not None and not communication.was_written
            if communication is not None and is_unwaited and torch.is_tensor(result):
                self._functional_issued(communication, result)
                self._unwaited[address_of(result)] = communication
            return result

        return recorded

    def _functional_issued(self, communication: Communication, result: torch.Tensor) -> None:
        """Note the times and the message of a functional collective that torch has issued."""
        transfer = self._session.take_transfer()
        if transfer is not None:
            communication.follow(transfer)
        if communication.kind == EventKind.ALL_GATHER:
            communication.bytes = bytes_of([result])

    def _waited_tensor(self, tensor: torch.Tensor, caller: FrameType) -> Communication | None:
        """The functional collective that a `wait_tensor` waits for; None: it is not recorded.

        Args:
            tensor: The argument of `wait_tensor`.
            caller: The frame that calls it.
        """
        # Another collective may wait for its message: a stage sends what TP has reduced.
        communication = self._unwaited.pop(address_of(tensor), None)
        if communication is None and not self._session.collective_depth:
            return self._begin_backward(caller)
        if communication is None:
            # torch waits in the call if it gathers on another dimension than 0.
            communication = self._of_thread.functional
            self._of_thread.functional = None
            if communication is not None:
                self._functional_issued(communication, tensor)
        return communication

    def _wrap_wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recorded(tensor: Any) -> Any:
            session = self._session
            if not session.active or torch.compiler.is_compiling():
                return original(tensor)
            communication, before = None, None
            try:
                communication = self._waited_tensor(tensor, sys._getframe(1))
                before = session.clock.mark() if communication is not None else None
            except Exception as error:
                session.fail(error)
            result = original(tensor)
            if communication is not None:
                try:
                    if communication.transfer is None:
                        communication.end = session.clock.mark()
                        communication.method = Method.INFERRED
                        communication.flags |= EventFlag.LATEST_END
                    communication.needed(before)
                    communication.write(session)
                except Exception as error:
                    session.fail(error)
            return result

        return recorded

    def _begin_backward(self, caller: FrameType) -> Communication | None:
        """Note the collective of a functional collective's backward, which waits for it.

        Args:
            caller: The frame that calls `wait_tensor`.
        """
        kind = _KIND_OF_BACKWARD.get(caller.f_code.co_name)
        if kind is None or caller.f_globals is not vars(functional):
            return None
        of_message = "output" if kind == EventKind.ALL_GATHER else "grad_output"
        message, group_name = read_variables(
            caller, lambda found: (found[of_message], found["group_name"])
        )
        group = resolve_group(group_name)
        communication = self._begin(kind, message, group, is_functional=True)
        if communication is not None:
            communication.flags |= EventFlag.ASYNC
        return communication


class _Futures:
    """Records the waits for the futures of the script's asynchronous collectives.

    The reducer of DDP waits at the end of backward for the futures of a communication hook.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._collective_of: WeakKeyDictionary[Any, Communication] = WeakKeyDictionary()
        self._of_hooks: list[Communication] = []
        """The collectives of the communication hooks of this backward."""

    def attach(self, patches: Patches) -> None:
        """Wrap the methods of a future that wait for it or make another future of it."""
        wait, then = FUTURE.wait, FUTURE.then

        @functools.wraps(wait)
        def recorded_wait(future: Any) -> Any:
            communication = self._collective_of.get(future)
            if communication is None or communication.was_written or not self._session.active:
                return wait(future)
            before = self._session.clock.mark()
            result = wait(future)
            self._write(communication, before)
            return result

        @functools.wraps(then)
        def recorded_then(future: Any, callback: Callable[[Any], Any]) -> Any:
            result = then(future, callback)
            communication = self._collective_of.get(future)
            if communication is not None:
                self._collective_of[result] = communication
            return result

        patches.set_attribute(FUTURE, "wait", recorded_wait)
        patches.set_attribute(FUTURE, "then", recorded_then)

    def follow(self, future: Any, communication: Communication) -> None:
        """Note that the script took the future of a collective."""
        self._collective_of[future] = communication
        session = self._session
        if session.active and session.has_comm_hooks and current_graph_task_id() >= 0:
            if not self._of_hooks:
                call_after_backward(self._before_finalize)
            self._of_hooks.append(communication)

    def _before_finalize(self) -> None:
        """Called before the reducer waits for the futures of the hooks."""
        if self._session.active:
            after = functools.partial(self._after_finalize, self._session.clock.mark())
            call_after_backward(after)
        else:
            self._of_hooks.clear()

    def _after_finalize(self, begin: Any) -> None:
        for communication in self._of_hooks:
            if not communication.was_written:
                self._write(communication, begin)
                begin = communication.wait[1] if communication.wait else begin
        self._of_hooks.clear()

    def _write(self, communication: Communication, begin: Any) -> None:
        """Write the row of a collective that a wait from `begin` to now has ended."""
        session = self._session
        try:
            now = session.clock.mark()
            if isinstance(communication.end, Completion):
                communication.end.ended_by(now)
                communication.needed(begin)
            else:
                communication.waited(begin, now)
            communication.write(session)
        except Exception as error:
            session.fail(error)


class ScriptWork(TimedWork):
    """The handle of an asynchronous collective, send or receive of the training script.

    Its row is written at the first wait for it or for its future. On CPU the future of a collective
    marks its end.
    On CUDA, and for a message, the end of that wait is an upper bound.
    """

    def __init__(
        self,
        inner: dist.Work,
        session: Session,
        communication: Communication,
        futures: _Futures,
    ) -> None:
        self._futures = futures
        if communication.kind == EventKind.POINT_TO_POINT:  # gloo gives it no future
            dist.Work.__init__(self)
            self._inner, self._session, self._communication = inner, session, communication
            communication.flags |= EventFlag.ASYNC
        else:
            super().__init__(inner, session, communication)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original handle does, and write the row at the first wait."""
        communication, session = self._communication, self._session
        if communication.was_written:
            return self._inner.wait(*args, **kwargs)
        result = super().wait(*args, **kwargs)
        if session.active and not communication.was_written:
            try:
                communication.write(session)
            except Exception as error:
                session.fail(error)
        return result

    def get_future(self) -> Any:
        """The future of the original handle; a wait for it is recorded too."""
        future = super().get_future()
        if not self._communication.was_written:
            self._futures.follow(future, self._communication)
        return future
