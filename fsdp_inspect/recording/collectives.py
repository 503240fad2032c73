"""Time FSDP's collectives by replacing the units' communication objects.

Public setters of torch replace a unit's all-gather and reduce-scatter. The recorder installs an
instance of a subclass of the original class that shares the original's attributes. Torch's
isinstance checks and later calls of the setters therefore still work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from fsdp_inspect.recording.journal import NOT_NEEDED, Completion, host_ns_of, later_of
from fsdp_inspect.recording.units import dtype_code
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    WAIT_OF,
    EventFlag,
    EventKind,
    Method,
    Phase,
    Stream,
)

if TYPE_CHECKING:
    from fsdp_inspect.emulation.network import Transfer
    from fsdp_inspect.recording.session import Session

# Looked up once, because the hot path uses them; see `unit_hooks`.
_MEASURED, _INFERRED, _HOST_BLOCKING = Method.MEASURED, Method.INFERRED, Method.HOST_BLOCKING
_HOST_STREAM = Stream.HOST
_WAIT_OF = {int(kind): int(wait) for kind, wait in WAIT_OF.items()}
_OTHER_WAIT = int(EventKind.OTHER_WAIT)
_ASYNC, _UNUSED = int(EventFlag.ASYNC), int(EventFlag.UNUSED)
_LATEST_END, _MEMORY_STEP = int(EventFlag.LATEST_END), int(EventFlag.MEMORY_STEP)


class Communication:
    """One collective between its issue and its need."""

    __slots__ = (
        "bytes",
        "dtype",
        "end",
        "flags",
        "group",
        "identity",
        "is_background",
        "issue_ns",
        "issued_by",
        "kind",
        "method",
        "microbatch",
        "need",
        "phase",
        "sequence",
        "start",
        "step",
        "stream",
        "transfer",
        "unit",
        "wait",
        "wait_method",
        "was_written",
    )

    def __init__(self, session: Session, kind: int, unit: int, stream: int) -> None:
        self.kind = int(kind)
        self.unit = unit
        self.stream = stream
        self.step = session.step
        self.microbatch = session.microbatch
        self.phase = session.communication_phase()
        self.issued_by = session.issuing_unit()
        self.identity = session.next_collective()
        self.flags = _MEMORY_STEP if session.is_memory_step else 0
        self.method = _MEASURED
        self.group = -1
        self.sequence = -1
        self.dtype = 0
        self.bytes = -1
        self.start: Any = None
        self.issue_ns = 0
        self.end: Any = None
        self.need: Any = NOT_NEEDED
        self.transfer: Transfer | None = None
        """Its times on an emulated link, in host time; None on a real network and on CUDA."""
        self.wait: tuple[Any, Any] | None = None
        """The begin and the end of the wait of the compute stream."""
        self.wait_method: int | None = None
        """The method of the wait; None: that of the collective, or on a device inferred."""
        self.was_written = False
        self.is_background = False
        """Whether another thread than the training thread issued it. The training does not wait for
        it."""

    def leave_training(self) -> None:
        """Note that another thread than the training thread issues it."""
        self.is_background = True
        self.phase, self.issued_by = Phase.OUTSIDE, NO_UNIT

    def begin(
        self, session: Session, message: torch.Tensor, group: dist.ProcessGroup, start: Any
    ) -> None:
        """Note the message and the start: `start` is a mark taken right before the collective."""
        self.bytes = message.nbytes
        self.dtype = dtype_code(message.dtype)
        self.group, self.sequence = session.process_groups.issue(group)
        self.start = start
        self.issue_ns = host_ns_of(start)

    def block_host(self) -> None:
        """Note that it blocked the host: needed from its start, waited for until its end."""
        self.method = _HOST_BLOCKING
        self.stream = _HOST_STREAM
        self.need = self.start
        self.wait = (self.start, self.end)

    def follow(self, transfer: Transfer) -> None:
        """Take its times from an emulated link instead of the recorder's marks."""
        self.transfer = transfer
        self.issue_ns = transfer.issue_ns
        self.start, self.end = transfer.start_ns, transfer.end_ns

    def needed(self, begin: Any) -> Any:
        """Note that the compute stream waits for it from `begin`; emulation may correct `begin`.

        Returns:
            The end of that wait.
        """
        if self.transfer is not None and self.transfer.need_ns >= 0:
            begin = self.transfer.need_ns
        end = later_of(begin, self.end)
        self.need_from(begin, end)
        return end

    def need_from(self, start: Any, end: Any) -> None:
        """Note that the compute stream waited for it between these two marks."""
        self.need = start
        self.wait = (start, end)

    def waited(self, start: Any, end: Any) -> None:
        """Note a wait for it that has returned: it ends then at the latest."""
        self.need_from(start, end)
        if isinstance(self.end, Completion):
            self.end.ended_by(end)
        if self.end is None:
            self.end = end
            self.method = _INFERRED
            self.flags |= _LATEST_END

    def note_end(self, session: Session, number: int) -> None:
        """Report the end to the black box: now on the host, or on a device when the end is read."""
        if number and session.black_box is not None:
            if type(self.end) is int:
                session.black_box.finish(number, self.end)
            else:
                session.black_box.follow(number, self)

    def follow_in_black_box(self, session: Session, number: int) -> None:
        """Report to the black box that the end comes later."""
        if number and session.black_box is not None:
            session.black_box.follow(number, self)

    def write(self, session: Session) -> None:
        """Write its row, and the row of the wait for it if there was one."""
        self.was_written = True
        if session.black_box is not None and type(self.end) is int:
            session.black_box.ended(self.identity, self.end)
        session.journal.add(
            (
                self.step,
                self.microbatch,
                self.phase,
                self.kind,
                self.unit,
                self.issued_by,
                self.stream,
                self.group,
                self.dtype,
                session.source,
                self.method,
                self.flags,
                self.sequence,
                self.identity,
                self.bytes,
                self.issue_ns,
                self.start,
                self.end,
                self.need,
            )
        )
        if self.wait is not None:
            began, ended = self.wait
            method = self.method if session.on_host else _INFERRED
            if session.on_host and self.flags & _LATEST_END:
                method = _MEASURED  # the wait is known, and the end of the collective is not
            session.add(
                _WAIT_OF.get(self.kind, _OTHER_WAIT),
                began,
                ended,
                step=self.step,
                microbatch=self.microbatch,
                phase=self.phase,
                unit=self.unit,
                issued_by=session.issuing_unit(),
                method=method if self.wait_method is None else self.wait_method,
                collective=self.identity,
            )


class TimedWork(dist.Work):
    """The handle of an asynchronous collective that records when the host waits for it.

    On CPU the collective ends when its future completes. On CUDA no event marks the end, because
    the collective runs on a stream of its process group. The recorder takes the end of the wait
    instead. That end is exact if the compute stream waited, and too late if the collective was
    hidden. Such a collective is inferred and flagged `LATEST_END`: its duration is an upper bound,
    and no network measurement uses it.
    """

    def __init__(self, inner: dist.Work, session: Session, communication: Communication) -> None:
        super().__init__()
        self._inner = inner
        self._session = session
        self._communication = communication
        communication.flags |= _ASYNC
        if session.on_host and communication.transfer is None:
            communication.end = completion = Completion()
            clock = session.clock

            def done(_: object) -> None:
                completion.ended_by(clock.host_now())

            inner.get_future().add_done_callback(done)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original handle does, between two marks on the compute stream."""
        clock, communication = self._session.clock, self._communication
        before = clock.mark()
        result = self._inner.wait(*args, **kwargs)
        after = clock.mark()
        communication.waited(before, after)
        return result

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN_OF_TIMED_WORK:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)


_OWN_OF_TIMED_WORK = frozenset(
    {
        "wait",
        "_inner",
        "_session",
        "_communication",
        "_on_wait",
        "__class__",
        "__init__",
        "__dict__",
    }
)


class CollectiveHooks(Protocol):
    """The callbacks for a unit's collectives; `UnitHooks` implements them."""

    def all_gather(
        self, collective: Callable[[], Any], output: torch.Tensor, group: dist.ProcessGroup
    ) -> Any:
        """Run and time the unit's all-gather; returns the original result."""

    def gather_allocated(self, buffer: torch.Tensor) -> None:
        """Called after the output buffer of the all-gather was allocated."""

    def reduce_scatter(
        self, collective: Callable[[], Any], message: torch.Tensor, group: dist.ProcessGroup
    ) -> Any:
        """Run and time the unit's reduce-scatter; returns the original result."""

    def before_reduce_allocation(self) -> None:
        """Called before the input or the output of the reduce-scatter is allocated."""

    def reduce_allocated(self, buffer: torch.Tensor) -> None:
        """Called after a buffer of the reduce-scatter was allocated."""


def recorded_all_gather(inner: Any, hooks: CollectiveHooks) -> Any:
    """Return an all-gather object like `inner` whose calls `hooks` times."""
    base = type(inner)

    def call(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        def collective() -> Any:
            return base.__call__(
                self,
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                async_op=async_op,
            )

        return hooks.all_gather(collective, output_tensor, group)

    def allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        buffer = base.allocate(self, size, dtype=dtype, device=device)
        hooks.gather_allocated(buffer)
        return buffer

    return _like(inner, {"__call__": call, "allocate": allocate})


def recorded_reduce_scatter(inner: Any, hooks: CollectiveHooks) -> Any:
    """Return a reduce-scatter object like `inner` whose calls `hooks` times."""
    base = type(inner)

    def call(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        def collective() -> Any:
            return base.__call__(
                self,
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                op=op,
                async_op=async_op,
            )

        return hooks.reduce_scatter(collective, input_tensor, group)

    def allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        hooks.before_reduce_allocation()
        buffer = base.allocate(self, size, dtype=dtype, device=device)
        hooks.reduce_allocated(buffer)
        return buffer

    return _like(inner, {"__call__": call, "allocate": allocate})


def run_inside_collective(session: Session, collective: Callable[[], Any]) -> Any:
    """Call a collective without recording the inner collectives that it issues."""
    depth = session.depth
    depth.collectives += 1
    try:
        result = collective()
    finally:
        depth.collectives -= 1
    is_outer = session.tracker is not None and depth.collectives == 0
    if is_outer and session.tracker is not None and not session.is_background():
        # An asynchronous collective, also a functional one, still uses its tensors.
        session.tracker.collective_ended(is_blocking=result is None)
    return result


def is_recorded(comm: object) -> bool:
    """Whether the recorder made this communication object."""
    return getattr(type(comm), "_fsdp_inspect_inner", None) is not None


def unrecorded(comm: Any) -> Any:
    """The original object that a recorder's communication object replaces."""
    return type(comm)._fsdp_inspect_inner


def _like(inner: Any, methods: dict[str, Any]) -> Any:
    """An instance of a subclass of `inner`'s class that shares `inner`'s attributes."""
    base = type(inner)
    recorded = type(base.__name__, (base,), {**methods, "_fsdp_inspect_inner": inner})
    comm: Any = object.__new__(recorded)
    comm.__dict__ = inner.__dict__
    return comm


def close_unwaited(session: Session, communication: Communication) -> None:
    """Write a collective whose result no unit used, unless it is already written."""
    if communication.was_written:
        return
    if communication.end is None:
        session.problem(
            "An asynchronous all-gather was never waited for: its end is unknown and it is not "
            "recorded."
        )
        return
    communication.flags |= _UNUSED
    communication.write(session)
