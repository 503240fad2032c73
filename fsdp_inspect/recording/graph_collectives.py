"""Time the collectives of compiled graphs, which call no function of `torch.distributed`.

A graph of torch.compile holds functional collectives as operators. Each of them reaches a process
group through an operator of `c10d`, in eager mode, with `aot_eager` and with inductor. That
operator returns the handle of the collective, whose future shows the end on CPU. The graph waits in
`_c10d_functional::wait_tensor`. Both are observed in the dispatcher. While torch traces a graph, it
calls the functional operators with fake tensors, and never those of `c10d`.

Collectives inside a call that the recorder already times are part of that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_inspect.recording.collectives import Communication, run_inside_collective
from fsdp_inspect.recording.dispatcher_kernels import Issue, observe
from fsdp_inspect.recording.journal import Completion
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.torch_api.c10d import address_of, bytes_of, tensors_of
from fsdp_inspect.recording.torch_api.dispatch import FakeTensor
from fsdp_inspect.recording.units import dtype_code
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Stream

_OPERATORS = {
    "c10d::allgather_into_tensor_coalesced_": (EventKind.ALL_GATHER, 0, 0, 2),
    "c10d::_allgather_base_": (EventKind.ALL_GATHER, 0, 0, 2),
    "c10d::reduce_scatter_tensor_coalesced_": (EventKind.REDUCE_SCATTER, 1, 0, 2),
    "c10d::_reduce_scatter_base_": (EventKind.REDUCE_SCATTER, 1, 0, 2),
    "c10d::allreduce_": (EventKind.ALL_REDUCE, 0, 0, 1),
    "c10d::allreduce_coalesced_": (EventKind.ALL_REDUCE, 0, 0, 1),
    "c10d::alltoall_base_": (EventKind.ALL_TO_ALL, 1, 0, 2),
    "c10d::broadcast_": (EventKind.BROADCAST, 0, 0, 1),
}
"""The kind of each operator, and the places of its message, its result and its group."""
_WAIT = "_c10d_functional::wait_tensor"
_FUNCTIONAL = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out",
)
"""The functional operators. Only collectives inside one of them belong to a graph."""
_STREAMS = {
    EventKind.ALL_GATHER: Stream.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.ALL_REDUCE,
}


class GraphUnits(Protocol):
    """The interface of a sharder whose collectives are in graphs."""

    def unit_of(self, kind: EventKind, numel: int) -> int:
        """The unit of a collective before its issue; -1: none, or unknown."""

    def waited(self) -> None:
        """Called after the compute stream has waited for a collective."""


class GraphCollectives:
    """Times collectives in the dispatcher."""

    def __init__(self, session: Session, units: GraphUnits | None = None) -> None:
        """Without `units`, the collectives belong to no unit, and the order check ignores them."""
        self._session = session
        self._units = units
        self._unwaited: dict[int, Communication] = {}
        """Collectives in flight, by the address of their result."""
        self._functional_depth = 0
        self.is_attached = False

    def attach(self, patches: Patches) -> None:
        """Observe the operators."""
        self.is_attached = True
        for operator, (kind, message, result, group) in _OPERATORS.items():
            observer = self._observer(kind, message, result, group)
            # A sharder that observes an operator itself records its calls first.
            patches.on_undo(observe(operator, observer, is_innermost=True))
        patches.on_undo(observe(_WAIT, self._wait))
        for name in _FUNCTIONAL:
            if hasattr(torch.ops._c10d_functional, name):
                patches.on_undo(observe(f"_c10d_functional::{name}", self._functional))

    def _functional(self, arguments: tuple[Any, ...], issue: Issue) -> Any:
        """Note that a functional operator runs."""
        self._functional_depth += 1
        try:
            return issue()
        finally:
            self._functional_depth -= 1

    def end_step(self) -> None:
        """Drop unwaited collectives of earlier steps."""
        session = self._session
        stale = [key for key, each in self._unwaited.items() if each.step < session.step - 1]
        for key in stale:
            self._unwaited.pop(key)
            session.problem(
                "A collective of a compiled graph was never waited for: it is not recorded."
            )

    def _observer(
        self, kind: EventKind, message: int, result: int, group: int
    ) -> Callable[[tuple[Any, ...], Issue], Any]:
        def observer(arguments: tuple[Any, ...], issue: Issue) -> Any:
            session = self._session
            is_own = self._functional_depth and not session.collective_depth
            if not (session.active and is_own):
                return issue()
            communication, number = None, 0
            try:
                members = dist.ProcessGroup.unbox(arguments[group])
                communication, number = self._begin(kind, arguments[message], members)
            except Exception as error:
                session.fail(error)
            returned = run_inside_collective(session, issue)
            if communication is not None:
                try:
                    self._issued(communication, number, arguments[result], returned)
                except Exception as error:
                    session.fail(error)
            return returned

        return observer

    def _begin(
        self, kind: EventKind, message: Any, group: dist.ProcessGroup
    ) -> tuple[Communication, int]:
        session, tensors, number = self._session, tensors_of(message), 0
        unit = NO_UNIT
        if self._units is not None:
            unit = self._units.unit_of(kind, sum(each.numel() for each in tensors))
        stream = _STREAMS.get(kind, Stream.OTHER) if unit != NO_UNIT else Stream.OTHER
        communication = Communication(session, kind, unit, stream)
        communication.flags |= EventFlag.ASYNC
        if unit != NO_UNIT:
            communication.flags |= EventFlag.UNIT_INFERRED
        num_bytes, dtype = bytes_of(tensors), dtype_code(tensors[0].dtype)
        communication.begin(session, (num_bytes, dtype, group, 0, session.clock.mark()))
        if self._units is not None:
            number = session.note_issue(kind, unit, group, num_bytes, dtype)
        return communication, number

    def _issued(
        self, communication: Communication, number: int, result: Any, returned: Any
    ) -> None:
        session = self._session
        communication.follow_in_black_box(session, number)
        work = dist.Work.unbox(returned[1] if isinstance(returned, tuple) else returned)
        if session.on_host:
            communication.end = _completion_of(work, session)
        self._unwaited[address_of(tensors_of(result)[0])] = communication

    def _wait(self, arguments: tuple[Any, ...], issue: Issue) -> Any:
        session = self._session
        (tensor,) = arguments
        if not session.active or isinstance(tensor, FakeTensor):
            return issue()
        communication = before = None
        try:
            communication = self._unwaited.pop(address_of(tensor), None)
            before = session.clock.mark() if communication is not None else None
        except Exception as error:
            session.fail(error)
        result = issue()
        if communication is not None:
            try:
                self._waited(communication, before)
            except Exception as error:
                session.fail(error)
        return result

    def _waited(self, communication: Communication, before: Any) -> None:
        session = self._session
        after = session.clock.mark()
        communication.waited(before, after)
        communication.write(session)
        if self._units is not None:
            self._units.waited()


def _completion_of(work: dist.Work, session: Session) -> Completion | None:
    """The end of a collective; None: only the wait shows it, as for gloo's reduce-scatter."""
    try:
        future = work.get_future()
    except RuntimeError:
        return None
    completion, clock = Completion(), session.clock

    def done(_: object) -> None:
        completion.ended_by(clock.host_now())

    future.add_done_callback(done)
    return completion
