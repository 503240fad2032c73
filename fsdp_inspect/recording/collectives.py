"""Time FSDP's collectives by replacing the units' communication objects.

Public setters of torch replace a unit's all-gather and reduce-scatter. The recorder installs an
instance of a subclass of the original class that shares the original's attributes. Torch's
isinstance checks and later calls of the setters therefore still work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from fsdp_inspect.recording.journal import (
    NOT_NEEDED,
    Completion,
    WorkEnd,
    host_ns_of,
    later_of,
)
from fsdp_inspect.recording.torch_api.overrides import without_functions
from fsdp_inspect.recording.units import code_and_size
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
    from fsdp_inspect.recording.emulated_network import Transfer
    from fsdp_inspect.recording.session import Session

# Looked up once, because the hot path uses them; see `unit_hooks`.
_MEASURED, _INFERRED, _HOST_BLOCKING = Method.MEASURED, Method.INFERRED, Method.HOST_BLOCKING
_HOST_STREAM = Stream.HOST
_WAIT_OF = {int(kind): int(wait) for kind, wait in WAIT_OF.items()}
_OTHER_WAIT = int(EventKind.OTHER_WAIT)
_ASYNC, _UNUSED = int(EventFlag.ASYNC), int(EventFlag.UNUSED)
_LATEST_END, _MEMORY_STEP = int(EventFlag.LATEST_END), int(EventFlag.MEMORY_STEP)
_OUTSIDE = Phase.OUTSIDE
_ALL_GATHER, _REDUCE_SCATTER = EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER

Issue: TypeAlias = tuple[int, int, dist.ProcessGroup, int, Any]
"""What is noted right before a collective: the bytes and the dtype of its message, its process
group, its number in the black box (0: none), and a mark."""
Allocation: TypeAlias = tuple[Sequence[int], torch.dtype]
"""The size and the dtype of a tensor."""


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
        "is_kept",
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
        session.num_collectives = self.identity = session.num_collectives + 1
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
        self.is_kept = session.detail
        """Whether it gets rows: it was issued in a detailed step."""
        self.is_background = False
        """Whether another thread than the training thread issued it. The training does not wait for
        it."""

    def leave_training(self) -> None:
        """Note that another thread than the training thread issues it."""
        self.is_background = True
        self.phase, self.issued_by = Phase.OUTSIDE, NO_UNIT

    def begin(self, session: Session, issue: Issue) -> None:
        """Note the message and the start."""
        self.bytes, self.dtype, group, _, self.start = issue
        self.group, self.sequence = session.process_groups.issue(group)
        self.issue_ns = host_ns_of(self.start)

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
        if self.transfer is not None:
            self.needed(start)
            return
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
        if not self.is_kept:
            if self.end is not None and type(self.end) is not int:
                session.journal.follow(self.identity, self.end)
            if self.start is not self.end and hasattr(self.start, "event"):
                session.clock.release(self.start)
            return
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


def write_blocking(
    session: Session, kind: int, unit: int, flags: int, issue: Issue, end: int
) -> int:
    """Write a collective that blocked the host, and the wait for it, at once.

    The rows are those of a `Communication` after `block_host`, without that object: see
    [Note: Cold code] in `unit_timing`.

    Args:
        session: The recording.
        kind: The kind of collective.
        unit: Its unit.
        flags: Its flags.
        issue: What was noted before it.
        end: Its end on the host, ns.

    Returns:
        The number that connects its rows.
    """
    num_bytes, dtype, group, number, start = issue
    if number and session.black_box is not None:
        session.black_box.finish(number, end)
    group_index, sequence = session.process_groups.issue(group)
    session.num_collectives = identity = session.num_collectives + 1
    issued_by = session.issuing_unit()
    step, microbatch, source = session.step, session.microbatch, session.source
    phase = session.phase
    if phase is _OUTSIDE:
        phase = session.communication_phase()
    if session.is_memory_step:
        flags |= _MEMORY_STEP
    append = session.append
    append(
        (
            step,
            microbatch,
            phase,
            kind,
            unit,
            issued_by,
            _HOST_STREAM,
            group_index,
            dtype,
            source,
            _HOST_BLOCKING,
            flags,
            sequence,
            identity,
            num_bytes,
            start,
            start,
            end,
            start,
        )
    )
    if session.numerics is not None:
        flags |= _MEMORY_STEP
    append(
        (
            step,
            microbatch,
            phase,
            _WAIT_OF.get(kind, _OTHER_WAIT),
            unit,
            issued_by,
            session.compute_stream,
            -1,
            0,
            source,
            _HOST_BLOCKING,
            flags & _MEMORY_STEP,
            -1,
            identity,
            -1,
            start,
            start,
            end,
            NOT_NEEDED,
        )
    )
    return identity


class UnrecordedEnd:
    """The end of a collective that has no rows, for the black box."""

    __slots__ = ("end", "identity")

    def __init__(self, identity: int, end: Any) -> None:
        self.identity = identity
        self.end = end


def run_plain(
    session: Session, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a collective of a plain step, which only the black box notes.

    Args:
        session: The recording.
        number: Its number in the black box; 0: none.
        original: Issues it.
        *args: Its arguments.
        **kwargs: Its arguments by name.

    Returns:
        The result of `original`.
    """
    result = run_inside_collective(session, original, *args, **kwargs)
    if number:
        end_plain(session, number, result)
    return result


def end_plain(session: Session, number: int, result: Any) -> None:
    """Note in the black box that a collective of a plain step has returned `result`."""
    box = session.black_box
    if box is None:
        return
    try:
        now = session.clock.host_now()
        if result is None and session.on_host:
            box.finish(number, now)
        else:
            end = WorkEnd(result) if isinstance(result, dist.Work) else session.clock.mark()
            session.num_collectives = identity = session.num_collectives + 1
            box.follow(number, UnrecordedEnd(identity, end))
            session.journal.follow(identity, end)
        if session.times_plain:
            session.count_plain(now)
    except Exception as error:
        session.fail(error)


def plain_note(
    session: Session, kind: int, unit: int
) -> Callable[[torch.Tensor, dist.ProcessGroup], int]:
    """Return a function that notes a collective of a unit in a plain step, before it is issued.

    It takes the message and the group, and returns the number in the black box; 0: it noted none.
    It keeps the size and dtype of the last message, and the line that issues it in a forward. It is
    one function for all of that: see [Note: Cold code] in `unit_timing`.
    """
    box, now = session.black_box, session.clock.host_now
    known_bytes, dtype, place = -1, 0, 0

    def note(message: torch.Tensor, group: dist.ProcessGroup) -> int:
        nonlocal known_bytes, dtype, place
        if box is None or not session.active:
            return 0
        begun = now() if session.times_plain else 0
        try:
            with without_functions():
                num_bytes = message.nbytes
            if known_bytes != num_bytes:
                place = session.places.last_of(unit)
                dtype, _ = code_and_size(message.dtype)
                known_bytes = num_bytes
            session.has_issued = True
            number = box.issue(
                kind,
                unit,
                group,
                num_bytes,
                dtype,
                session.phase,
                session.step,
                session.microbatch,
                session.backward_place if session.in_backward else place,
                0 if session.is_compared else 2,
            )
            if begun:
                session.plain_ns += now() - begun
            return number
        except Exception as error:
            session.fail(error)
            return 0

    return note


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

            try:
                inner.get_future().add_done_callback(done)
            except (RuntimeError, NotImplementedError):  # a backend without futures
                communication.end = None

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original handle does, between two marks on the compute stream."""
        session, communication = self._session, self._communication
        if not session.active:  # a mark would become part of a graph that is captured
            communication.was_written |= session.is_paused  # the run notes the pause
            return self._inner.wait(*args, **kwargs)
        before = session.clock.mark()
        result = self._inner.wait(*args, **kwargs)
        after = session.clock.mark()
        communication.waited(before, after)
        return result

    def get_future(self) -> Any:
        """The future of the original handle."""
        return self._inner.get_future()

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN_OF_TIMED_WORK:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)


_OWN_OF_TIMED_WORK = frozenset(
    {
        "wait",
        "get_future",
        "_futures",
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

    allocated: Allocation | None
    """The size and dtype of the message that is allocated for the next collective."""

    def before_collective(
        self, kind: int, message: torch.Tensor, group: dist.ProcessGroup
    ) -> Issue | None:
        """Note a collective that is issued next; None: the recording is inactive."""

    def plain_note(self, kind: int) -> Callable[[torch.Tensor, dist.ProcessGroup], int]:
        """The function that notes a collective of a plain step; see `plain_note`."""

    def after_all_gather(self, work: Any, issue: Issue) -> Any:
        """Record an all-gather that returned `work`; returns the handle to wait for."""

    def gather_allocated(self, buffer: torch.Tensor) -> None:
        """Classify the output buffer of the all-gather; only in a memory step."""

    def after_reduce_scatter(self, issue: Issue) -> None:
        """Record a reduce-scatter that has returned."""

    def before_reduce_allocation(self, size: Sequence[int], dtype: torch.dtype) -> None:
        """Called before the input or the output of the reduce-scatter is allocated."""

    def reduce_allocated(self, buffer: torch.Tensor) -> None:
        """Classify a buffer of the reduce-scatter; only in a memory step."""


def recorded_all_gather(inner: Any, session: Session, hooks: CollectiveHooks) -> Any:
    """Return an all-gather object like `inner` whose calls `hooks` times; see `choose_detail`."""
    original, original_allocate = type(inner).__call__, type(inner).allocate

    def call(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
        named = {**tensors, "group": group, "async_op": async_op}
        issue = hooks.before_collective(_ALL_GATHER, output_tensor, group)
        if issue is None:
            return original(self, **named)
        work = run_inside_collective(session, original, self, **named)
        return hooks.after_all_gather(work, issue)

    def allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        if not session.detail:
            return original_allocate(self, size, dtype=dtype, device=device)
        hooks.allocated = size, dtype
        buffer = original_allocate(self, size, dtype=dtype, device=device)
        if session.watches_memory:
            hooks.gather_allocated(buffer)
        return buffer

    plain = _plain_call(session, original, hooks.plain_note(_ALL_GATHER), is_input=False)
    detailed = {"__call__": call, "allocate": allocate}
    return _like(inner, {"__call__": plain}, detailed, is_detailed=session.wants_detail)


def recorded_reduce_scatter(inner: Any, session: Session, hooks: CollectiveHooks) -> Any:
    """Return a reduce-scatter like `inner` whose calls `hooks` times; see `choose_detail`."""
    original, original_allocate = type(inner).__call__, type(inner).allocate

    def call(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
        named = {**tensors, "group": group, "op": op, "async_op": async_op}
        issue = hooks.before_collective(_REDUCE_SCATTER, input_tensor, group)
        if issue is None:
            return original(self, **named)
        work = run_inside_collective(session, original, self, **named)
        hooks.after_reduce_scatter(issue)
        return work

    def allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        if not session.detail:
            return original_allocate(self, size, dtype=dtype, device=device)
        hooks.before_reduce_allocation(size, dtype)
        buffer = original_allocate(self, size, dtype=dtype, device=device)
        if session.watches_memory:
            hooks.reduce_allocated(buffer)
        return buffer

    plain = _plain_call(session, original, hooks.plain_note(_REDUCE_SCATTER), is_input=True)
    detailed = {"__call__": call, "allocate": allocate}
    return _like(inner, {"__call__": plain}, detailed, is_detailed=session.wants_detail)


def _plain_call(
    session: Session,
    original: Callable[..., Any],
    note: Callable[[torch.Tensor, dist.ProcessGroup], int],
    *,
    is_input: bool,
) -> Callable[..., Any]:
    """The call of a communication object in plain steps.

    It contains the body of `run_inside_collective`, and of `end_plain` for a collective that blocks
    the host: see [Note: Cold code] in `unit_timing`.

    Args:
        session: The recording.
        original: Issues the collective.
        note: Notes it before it is issued; see `plain_note`.
        is_input: Whether its message is the input; otherwise the output.
    """
    depths, box, now = session.depths, session.black_box, session.clock.host_now
    finish = box.finish if box is not None and session.on_host else None

    def call(
        self: Any,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        **named: Any,
    ) -> Any:
        begun, counted = now() if session.times_plain else 0, session.plain_ns
        number = note(input_tensor if is_input else output_tensor, group)
        thread = get_ident()
        depth = depths.get(thread, 0)
        depths[thread] = depth + 1  # the inner collectives are not noted
        if begun:
            session.plain_ns = counted + now() - begun  # with the note, which counts itself
        try:
            result = original(self, output_tensor, input_tensor, group, **named)
        finally:
            depths[thread] = depth
        if number and result is None and finish is not None:
            ended = now()
            finish(number, ended)
            if begun:
                session.plain_ns += now() - ended
        elif number:
            end_plain(session, number, result)
        return result

    return call


def run_inside_collective(
    session: Session, collective: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a collective without recording the inner collectives that it issues."""
    depths, thread = session.depths, get_ident()
    depth = depths.get(thread, 0)
    depths[thread] = depth + 1
    try:
        result = collective(*args, **kwargs)
    finally:
        depths[thread] = depth
    if session.tracker is not None and depth == 0 and not session.is_background():
        # An asynchronous collective, also a functional one, still uses its tensors.
        session.tracker.collective_ended(is_blocking=result is None)
    return result


def is_recorded(comm: object) -> bool:
    """Whether the recorder made this communication object."""
    return getattr(type(comm), "_fsdp_inspect_inner", None) is not None


def unrecorded(comm: Any) -> Any:
    """The original object that a recorder's communication object replaces."""
    return type(comm)._fsdp_inspect_inner


def choose_detail(comm: Any, *, is_detailed: bool) -> None:
    """Let a recorder's communication object work as a detailed or as a plain step needs."""
    comm.__class__ = type(comm)._fsdp_inspect_classes[is_detailed]


def _like(inner: Any, plain: dict[str, Any], detailed: dict[str, Any], *, is_detailed: bool) -> Any:
    """An instance of a subclass of `inner`'s class that shares `inner`'s attributes.

    Args:
        inner: The original object.
        plain: The methods in plain steps.
        detailed: The methods in detailed steps.
        is_detailed: Whether a detailed step runs.
    """
    base = type(inner)
    classes: list[Any] = []
    common = {"_fsdp_inspect_inner": inner, "_fsdp_inspect_classes": classes}
    classes += (type(base.__name__, (base,), {**each, **common}) for each in (plain, detailed))
    comm: Any = object.__new__(classes[is_detailed])
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
