"""Time the all-gathers, passes and reductions of one unit of any sharder.

The hooks of a sharder call these methods at the boundaries of a unit. The methods turn the marks
into rows: see `sharders.fsdp2` and `sharders.fsdp1` for the order of the calls.

[Note: Cold code]
A hook runs between two long operations of torch, which evict Python's code and objects from the
processor's caches. Each function, object and dictionary that the hook then touches costs about a
microsecond, several times its cost in a loop. So the methods that run for each unit call few
functions, use slots and local variables, and write their rows without intermediate objects.
`tests/studies/benchmarks/hot_path.py` measures them with cold caches, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdp_inspect.recording.collectives import (
    Allocation,
    Communication,
    Issue,
    TimedWork,
    close_unwaited,
    plain_note,
    run_inside_collective,
    run_plain,
    write_blocking,
)
from fsdp_inspect.recording.torch_api.autograd import current_graph_task_id
from fsdp_inspect.recording.units import code_and_size
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryPoint,
    Phase,
    Stream,
)

if TYPE_CHECKING:
    from fsdp_inspect.recording.memory import MemoryProbe
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import UnitHandle

# The hot path: in Python 3.11 an attribute of an Enum class costs 0.2 µs and arithmetic of flags
# 2 µs each time, so members are looked up once, and flags are plain integers.
_ALL_GATHER = EventKind.ALL_GATHER
_ALL_GATHER_COPY_IN = EventKind.ALL_GATHER_COPY_IN
_REDUCE_SCATTER = EventKind.REDUCE_SCATTER
_FORWARD, _BACKWARD = EventKind.FORWARD, EventKind.BACKWARD
_FORWARD_PHASE, _BACKWARD_PHASE = Phase.FORWARD, Phase.BACKWARD
_HOST_STREAM, _COPY_IN_STREAM = Stream.HOST, Stream.ALL_GATHER_COPY_IN
_ALL_GATHER_STREAM = Stream.ALL_GATHER
_FORWARD_START, _FORWARD_END = MemoryPoint.FORWARD_START, MemoryPoint.FORWARD_END
_BACKWARD_START, _BACKWARD_END = MemoryPoint.BACKWARD_START, MemoryPoint.BACKWARD_END
_ASYNC, _PREFETCHED = int(EventFlag.ASYNC), int(EventFlag.PREFETCHED)
_RECOMPUTE, _NO_GRAD = int(EventFlag.RECOMPUTE), int(EventFlag.NO_GRAD)
_is_grad_enabled = torch.is_grad_enabled


class Reductions:
    """Gradient reductions in flight that torch waits for together."""

    def __init__(self) -> None:
        self.reduce_scatters: deque[Communication] = deque()
        """The reduce-scatters in order of issue, like torch's `comm_ctx.reduce_scatter_states`."""
        self.all_reduces: deque[Communication] = deque()

    def add(self, communication: Communication) -> None:
        """Note a reduction that was just issued."""
        is_scatter = communication.kind == _REDUCE_SCATTER
        (self.reduce_scatters if is_scatter else self.all_reduces).append(communication)

    @property
    def has_any(self) -> bool:
        """Whether torch has a reduction to wait for."""
        return bool(self.reduce_scatters or self.all_reduces)

    def wait_for_all(self, session: Session, begin: Any) -> None:
        """Note the compute stream's wait, from `begin`, for all reductions in order of issue."""
        for communication in self._take_all():
            begin = communication.needed(begin)
            communication.write(session)

    def ran_on_compute_stream(self, session: Session) -> None:
        """Note that the compute stream itself ran all reductions, and stood still for each."""
        for communication in self._take_all():
            communication.need_from(communication.start, communication.end)
            communication.write(session)

    def _take_all(self) -> list[Communication]:
        """Remove all reductions; in order of issue."""
        left = sorted(
            (*self.reduce_scatters, *self.all_reduces),
            key=lambda communication: communication.identity,
        )
        self.reduce_scatters.clear()
        self.all_reduces.clear()
        return left


class UnitTimer:
    """The open all-gather, forward and backward of one unit."""

    def __init__(
        self, session: Session, handle: UnitHandle, index: int, memory: MemoryProbe
    ) -> None:
        self.index = index
        self._session = session
        self._clock = session.clock
        self._mark = session.clock.mark
        self._blocks_host = session.on_host and session.emulation is None
        """Whether a collective without a handle has ended when it returns."""
        self.allocated: Allocation | None = None
        """The message that is allocated for the next collective; None: unknown."""
        self._gathered = -1
        """The number of the unit's last all-gather that blocked the host."""
        self._unit = handle
        self._module = next(iter(handle.owned_modules), None)
        self._memory = memory
        self._gather: Communication | None = None
        """An all-gather that was issued and not yet waited for."""
        self._copy_in: tuple[Any, Any] | None = None
        """Start of the copy into the all-gather's input, and the stream it runs on."""
        self._forwards: list[tuple[Any, Phase, int]] = []
        """Open forwards of this unit: start, phase, flags."""
        self._backward_start: Any = None
        self._backward_flags = 0
        self._outer_hooks: list[int] = []
        self._plain_notes: dict[int, Callable[[torch.Tensor, dist.ProcessGroup], int]] = {}
        """For each kind of collective, the function that notes it in a plain step."""
        self.has_run = False
        """Whether a forward of it was seen."""

    # --- a hook of this unit on the host's stack

    def _enter_hook(self) -> None:
        session = self._session
        self._outer_hooks.append(session.hook_unit)
        session.hook_unit = self.index

    def _leave_hook(self) -> None:
        self._session.hook_unit = self._outer_hooks.pop() if self._outer_hooks else NO_UNIT

    # --- all-gather

    def all_gather(
        self, collective: Callable[[], Any], output: torch.Tensor, group: dist.ProcessGroup
    ) -> Any:
        """Run and time the unit's all-gather; returns the original result."""
        if not self._session.detail:
            number = self.plain_note(_ALL_GATHER)(output, group)
            return run_plain(self._session, number, collective)
        issue = self.before_collective(_ALL_GATHER, output, group)
        if issue is None:
            return collective()
        return self.after_all_gather(run_inside_collective(self._session, collective), issue)

    def plain_note(self, kind: int) -> Callable[[torch.Tensor, dist.ProcessGroup], int]:
        """The function that notes a collective of a plain step; see `collectives.plain_note`."""
        note = self._plain_notes.get(kind)
        if note is None:
            note = self._plain_notes[kind] = plain_note(self._session, kind, self.index)
        return note

    def before_collective(
        self, kind: int, message: torch.Tensor, group: dist.ProcessGroup
    ) -> Issue | None:
        """Note a collective that is issued next; None: the recording is inactive.

        Only the black box and the start are noted before it: see [Note: Cold code].
        """
        session = self._session
        if not session.active:
            return None
        try:
            # The sizes from Python: attributes of a tensor take 12 µs with cold caches.
            size, dtype_of_message = self.allocated or (message.shape, message.dtype)
            self.allocated = None
            dtype, itemsize = code_and_size(dtype_of_message)
            num_bytes = prod(size) * itemsize
            number = session.note_issue(kind, self.index, group, num_bytes, dtype)
            return num_bytes, dtype, group, number, self._mark()
        except Exception as error:
            session.fail(error)
            return None

    def after_all_gather(self, work: Any, issue: Issue) -> Any:
        """Record the unit's all-gather, which returned `work`; returns the handle to wait for."""
        session = self._session
        try:
            if work is not None or not self._blocks_host:
                return self._gather_issued(work, issue)
            end, start = self._mark(), issue[-1]
            if self._gather is not None:
                self._drop_unused_gather()
            unit = self.index
            flags = 0 if session.hook_unit == unit else _PREFETCHED
            self._gathered = write_blocking(session, _ALL_GATHER, unit, flags, issue, end)
            if self._copy_in is not None:
                copy_start, self._copy_in = self._copy_in[0], None
                session.add(
                    _ALL_GATHER_COPY_IN,
                    copy_start,
                    start,
                    unit=unit,
                    issued_by=session.issuing_unit(),
                    collective=self._gathered,
                )
        except Exception as error:
            session.fail(error)
        return work

    def _gather_issued(self, work: Any, issue: Issue) -> Any:
        session, number = self._session, issue[3]
        transfer = session.take_transfer()
        end = None if isinstance(work, dist.Work) else self._clock.mark()
        if self._gather is not None:
            self._drop_unused_gather()
        communication = Communication(session, _ALL_GATHER, self.index, _ALL_GATHER_STREAM)
        if session.hook_unit != self.index:
            communication.flags |= _PREFETCHED
        communication.begin(session, issue)
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
            copied = gather.issue_ns  # the link may become free later
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

    def _close_gather(self, gather: Communication, begin: Any) -> Any:
        """Write an all-gather that is needed now; returns the begin of the copy out of it."""
        session = self._session
        if gather.wait is not None and not gather.flags & _ASYNC:
            return begin  # it blocked the host at its issue and is already written
        if gather.wait is None:
            gather.needed(begin)
        assert gather.wait is not None
        gather.write(session)
        return gather.wait[1]

    # --- forward and backward

    def _begin_forward(self, args: Any, kwargs: Any) -> None:
        """Begin a forward: the unshard of its parameters."""
        session = self._session
        if not session.detail and session.open_units:
            return
        if current_graph_task_id() == -1:
            self.has_run = True
            mark = self._mark()
            is_training = self._module is None or self._module.training
            phase = session.enter_forward(
                mark,
                grad_enabled=_is_grad_enabled() or session.will_repeat,
                key=(self.index, is_training),
            )
            if not session.execution_known and phase == _FORWARD_PHASE:
                session.note_execution(self.index)
            checks = session.checks
            if checks is not None and not (session.open_units or checks.is_over):
                checks.note_inputs(args, kwargs)
            if session.stops is not None and not session.open_units:
                session.stops.note_inputs(args, kwargs, self.index)
        if session.watches_memory:
            self._memory.inputs(args, kwargs)

    def _open_forward(self, flags: int = 0) -> None:
        """Begin the unit's own forward: its parameters are ready."""
        session = self._session
        phase = session.phase
        if not session.detail:
            self._forwards.append((None, phase, 0))
            session.open_units.append(self.index)
            return
        if not (_is_grad_enabled() or session.will_repeat):
            flags |= _NO_GRAD
        if phase is _BACKWARD_PHASE:
            flags |= _RECOMPUTE
        self._forwards.append((self._mark(), phase, flags))
        session.open_units.append(self.index)
        if session.watches_memory:
            self._memory.sample(_FORWARD_START, self.index)

    def _close_forward(self, output: Any) -> None:
        """End the innermost open forward: its output is computed."""
        if not self._forwards:
            return
        session = self._session
        start, phase, flags = self._forwards.pop()
        if not session.detail:
            session.close_unit(self.index)
            if not session.open_units:
                session.leave_forward(self._mark(), self.index)
            return
        end = self._mark()
        if session.watches_memory:
            self._memory.sample(_FORWARD_END, self.index)
            self._memory.output(output, self.index)
        if session.numerics is not None:
            session.numerics.outputs(output, self.index)
        session.close_unit(self.index)
        session.leave_forward(end, self.index)
        session.add(_FORWARD, start, end, unit=self.index, phase=phase, flags=flags)

    def _open_backward(self, flags: int = 0) -> None:
        """Begin the unit's own backward: its parameters are ready."""
        session = self._session
        if not session.detail:
            session.open_units.append(self.index)
            return
        self._backward_flags = flags
        self._backward_start = self._mark()
        session.open_units.append(self.index)
        if session.watches_memory:
            self._memory.sample(_BACKWARD_START, self.index)

    def _close_backward(self) -> Any:
        """End the backward: the gradients are complete. Returns the mark of that moment.

        In a plain step it returns None.
        """
        session = self._session
        if not session.detail:
            session.close_unit(self.index)
            return None
        end = self._mark()
        if self._backward_start is not None:
            session.add(
                _BACKWARD,
                self._backward_start,
                end,
                unit=self.index,
                phase=_BACKWARD_PHASE,
                flags=self._backward_flags,
            )
            self._backward_start = None
            if session.watches_memory:
                self._memory.unsharded_gradients(self._unit, self.index)
                self._memory.sample(_BACKWARD_END, self.index)
            if session.numerics is not None:
                session.numerics.gradients(self._unit, self.index)
        session.close_unit(self.index)
        return end

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
