"""Which collectives run beside FSDP's own? Timed wraps around `torch.distributed`'s functions.

Gradient clipping, loss reduction, HSDP's all-reduce and tensor parallelism call either the
functions of `torch.distributed` or the functional collectives that DTensor uses. Both are wrapped
while a recorder is attached; a script that took a function into its own namespace before that
(`from torch.distributed import all_reduce`) is not seen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _resolve_process_group

from fsdp_inspect.recording.collectives import Communication, run_inside_collective
from fsdp_inspect.recording.journal import Completion
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.unit_hooks import Reductions
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Method, Phase, Stream

FUNCTIONS = {
    "all_reduce": (EventKind.ALL_REDUCE, "tensor"),
    "all_gather": (EventKind.ALL_GATHER, "tensor_list"),
    "all_gather_into_tensor": (EventKind.ALL_GATHER, "output_tensor"),
    "all_gather_single": (EventKind.ALL_GATHER, "output_tensor"),
    "reduce_scatter": (EventKind.REDUCE_SCATTER, "input_list"),
    "reduce_scatter_tensor": (EventKind.REDUCE_SCATTER, "input"),
    "reduce_scatter_single": (EventKind.REDUCE_SCATTER, "input"),
    "reduce": (EventKind.OTHER_COLLECTIVE, "tensor"),
    "gather": (EventKind.OTHER_COLLECTIVE, "tensor"),
    "scatter": (EventKind.OTHER_COLLECTIVE, "tensor"),
    "broadcast": (EventKind.BROADCAST, "tensor"),
    "all_to_all": (EventKind.ALL_TO_ALL, "input_tensor_list"),
    "all_to_all_single": (EventKind.ALL_TO_ALL, "input"),
    "barrier": (EventKind.BARRIER, None),
    "send": (EventKind.POINT_TO_POINT, "tensor"),
    "recv": (EventKind.POINT_TO_POINT, "tensor"),
}
"""Functions of `torch.distributed`: what they are, and the argument whose bytes travel."""

FUNCTIONALS = {
    "all_reduce": EventKind.ALL_REDUCE,
    "all_gather_single": EventKind.ALL_GATHER,
    "all_gather_tensor": EventKind.ALL_GATHER,
    "reduce_scatter_single": EventKind.REDUCE_SCATTER,
    "reduce_scatter_tensor": EventKind.REDUCE_SCATTER,
    "all_to_all_single": EventKind.ALL_TO_ALL,
    "broadcast": EventKind.BROADCAST,
}
"""Functional collectives: issued here, waited for through `wait_tensor`."""


class DistCalls:
    """Times the collectives that do not go through an FSDP unit's communication objects."""

    def __init__(self, session: Session, reductions: Reductions) -> None:
        self._session = session
        self._reductions = reductions
        self._unwaited: dict[int, Communication] = {}
        """Functional collectives on their way, by the address of their result."""

    def attach(self, patches: Patches) -> None:
        """Wrap every function that this torch has."""
        for name, (kind, argument) in FUNCTIONS.items():
            original = getattr(dist, name, None)
            if original is None:
                continue
            recorded = self._wrap(original, kind, argument)
            patches.set_attribute(dist, name, recorded)
            patches.set_attribute(c10d, name, recorded)
        for name, kind in FUNCTIONALS.items():
            original = getattr(functional, name, None)
            if original is not None:
                patches.set_attribute(functional, name, self._wrap_functional(original, kind))
        patches.set_attribute(
            functional, "wait_tensor", self._wrap_wait_tensor(functional.wait_tensor)
        )

    def end_step(self) -> None:
        """Forget functional collectives of earlier steps: nobody will wait for them now."""
        stale = [
            address
            for address, communication in self._unwaited.items()
            if communication.step < self._session.step
        ]
        for address in stale:
            del self._unwaited[address]
            self._session.problem(
                "A functional collective was never waited for: its end is unknown and it is "
                "left out."
            )

    def _is_passing(self) -> bool:
        """Whether this call is not ours to record."""
        session = self._session
        return not session.active or session.collective_depth > 0 or torch.compiler.is_compiling()

    def _begin(self, kind: EventKind, message: Any, group: Any) -> Communication | None:
        """Note the issue of a collective; None when this rank is not part of it."""
        group = group or dist.group.WORLD
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        session = self._session
        in_reduction = (
            kind == EventKind.ALL_REDUCE
            and session.hook_unit != NO_UNIT
            and session.phase == Phase.BACKWARD
        )
        communication = Communication(
            session,
            kind,
            session.hook_unit if in_reduction else NO_UNIT,
            Stream.ALL_REDUCE if in_reduction else Stream.OTHER,
        )
        tensors = _tensors(message)
        communication.begin(
            session, tensors[0] if tensors else torch.empty(0), group, session.clock.mark()
        )
        communication.bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return communication

    def _wrap(
        self, original: Callable[..., Any], kind: EventKind, argument: str | None
    ) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        def pick(name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name is None or name in kwargs:
                return kwargs.get(name) if name else None
            place = names.index(name)
            return args[place] if place < len(args) else None

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_passing():
                return original(*args, **kwargs)
            communication = None
            try:
                communication = self._begin(
                    kind, pick(argument, args, kwargs), pick("group", args, kwargs)
                )
            except Exception as error:
                self._session.fail(error)
            result = run_inside_collective(
                self._session, functools.partial(original, *args, **kwargs)
            )
            if communication is not None:
                try:
                    self._issued(communication, result)
                except Exception as error:
                    self._session.fail(error)
            return result

        return recorded

    def _issued(self, communication: Communication, result: Any) -> None:
        session = self._session
        if isinstance(result, dist.Work):
            self._issued_async(communication, result)
            return
        communication.end = session.clock.mark()
        if session.on_host:
            communication.block_host()
        elif communication.unit != NO_UNIT:
            self._reductions.all_reduces.append(communication)
            return
        else:  # the calling stream itself waits for the collective
            communication.need_from(communication.start, communication.end)
        communication.write(session)

    def _issued_async(self, communication: Communication, work: dist.Work) -> None:
        """An asynchronous call of the script: its end is known on CPU, through its future."""
        session = self._session
        communication.flags |= EventFlag.ASYNC
        if not session.on_host:
            session.problem(
                "Asynchronous collectives of the training script (async_op=True) have no end "
                "that can be recorded on CUDA; they are left out."
            )
            return
        communication.end = completion = Completion()

        def done(_: object) -> None:
            completion.ns = session.clock.host_now()

        work.get_future().add_done_callback(done)
        communication.write(session)

    def _wrap_functional(self, original: Callable[..., Any], kind: EventKind) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)
        group_place = names.index("group") if "group" in names else -1

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_passing():
                return original(*args, **kwargs)
            communication = None
            try:
                given = kwargs.get("group")
                if given is None and 0 <= group_place < len(args):
                    given = args[group_place]
                message = args[0] if args else kwargs.get("self")
                communication = self._begin(kind, message, _resolve(given))
            except Exception as error:
                self._session.fail(error)
            result = run_inside_collective(
                self._session, functools.partial(original, *args, **kwargs)
            )
            if communication is not None and torch.is_tensor(result):
                if kind == EventKind.ALL_GATHER:
                    communication.bytes = result.numel() * result.element_size()
                self._unwaited[_address(result)] = communication
            return result

        return recorded

    def _wrap_wait_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recorded(tensor: Any) -> Any:
            if self._is_passing():
                return original(tensor)
            session = self._session
            communication, before = None, None
            try:
                communication = self._unwaited.pop(_address(tensor), None)
                before = session.clock.mark() if communication is not None else None
            except Exception as error:
                session.fail(error)
            result = original(tensor)
            if communication is not None:
                try:
                    communication.end = session.clock.mark()
                    communication.method = Method.INFERRED
                    communication.need_from(before, communication.end)
                    communication.write(session)
                except Exception as error:
                    session.fail(error)
            return result

        return recorded


def _tensors(message: Any) -> list[torch.Tensor]:
    if message is None:
        return []
    members = message if isinstance(message, (list, tuple)) else [message]
    return [member for member in members if torch.is_tensor(member)]


def _address(tensor: Any) -> int:
    return int(getattr(tensor, "elem", tensor).data_ptr())


def _resolve(group: Any) -> dist.ProcessGroup | None:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    name = functional._resolve_group_name(group)
    return _resolve_process_group(name)
