"""Describe the position of a failure of the training, and the contents of its memory."""

from __future__ import annotations

import dis
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_inspect.formatting import format_bytes, format_unit
from fsdp_inspect.recording.code_places import package_of
from fsdp_inspect.recording.memory import AllocatorCounters
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.tensors import strided_parts
from fsdp_inspect.recording.torch_api.cuda import (
    is_history_enabled,
    start_history,
    stop_history,
    take_snapshot,
)
from fsdp_inspect.recording.units import UnitHandle
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.live_memory import HOST_ALLOCATION_FAILED
from fsdp_inspect.trace.run import Unit

SNAPSHOT_FILE = "memory_snapshot.pickle"
MAX_HISTORY_ENTRIES = 50_000
"""Length of a snapshot's history of allocations and frees: a few KB each, about 100 MB."""
_RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})
"""Instructions of Python code that raises an error itself."""
_MAX_ERROR = 2000
_OWN_FOLDER = f"{Path(__file__).parent}{os.sep}"
_SNAPSHOT_PROTOCOL = 4  # the pickle protocol that torch's memory_viz page reads


class MemoryHistory:
    """CUDA's history of allocations, which adds Python stacks to a memory snapshot.

    torch's defaults keep Python and C++ stacks of every allocation without a limit, and an entry
    takes several KB of host memory. This class keeps the Python stacks of the last
    `MAX_HISTORY_ENTRIES` only.
    """

    def __init__(self) -> None:
        self._is_ours = False

    def start(self) -> None:
        """Begin the history; does nothing if the training script records its own history."""
        if is_history_enabled():
            return
        start_history(MAX_HISTORY_ENTRIES)
        self._is_ours = True

    def stop(self) -> None:
        """End the history that `start` began; a second call does nothing."""
        if self._is_ours:
            self._is_ours = False
            stop_history()


def is_out_of_memory(error: BaseException, device: torch.device) -> bool:
    """Whether the error is an out-of-memory of the device on which the model trains."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_of_host = isinstance(error, MemoryError) or HOST_ALLOCATION_FAILED.search(_text_of(error))
    return device.type == "cpu" and bool(is_of_host)


def describe_failure(error: BaseException, session: Session, units: Sequence[Unit]) -> str:
    """Describe the error with its step, phase and unit, in one sentence."""
    unit, phase = session.position(frames_of(error))
    place = "" if phase == Phase.OUTSIDE else f", {Phase(phase).label}"
    if unit >= 0:
        place = f"{place or ','} of {format_unit(units[unit].fqn)}"
    text = _text_of(error)  # a KeyboardInterrupt has none
    message = f": {text}" if text else ""
    return f"{type(error).__name__} at step {session.step}{place}{message}"


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames of the functions that an error has ended, the innermost first."""
    running = {frame for frame, _ in traceback.walk_stack(sys._getframe())}
    passed = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame for frame in reversed(passed) if frame not in running]


def _text_of(error: BaseException) -> str:
    """The text of an error of the script; empty if its `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return ""


def find_failing_line(error: BaseException) -> str:
    """The innermost line of the user's code in an error's traceback, `file:line`; empty: none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if package_of(frame) == "":
            found = f"{frame.f_code.co_filename}:{line}"
    return found


def find_communication_error(error: BaseException) -> str:
    """The text of an error that arose in a collective or in the store; empty: none did.

    The error itself, its causes and the errors that were being handled count.
    """
    for each in _chain(error):
        if isinstance(each, RuntimeError) and _may_be_of_torch(each):
            return _text_of(each)[:_MAX_ERROR]
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then the errors that it follows from."""
    seen = set()
    place: BaseException | None = error
    while place is not None and id(place) not in seen:
        seen.add(id(place))
        yield place
        place = place.__cause__ or (None if place.__suppress_context__ else place.__context__)


def _may_be_of_torch(error: BaseException) -> bool:
    """Whether native code or `torch.distributed` raised the error, and no other Python code."""
    place, last = error.__traceback__, None
    while place is not None:
        if not place.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            last = place
        place = place.tb_next
    if last is None:
        return False
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    return module.startswith("torch.distributed") or dis.opname[instruction] not in _RAISES


def hide_own_frames(error: BaseException) -> None:
    """Remove the recorder's wraps from an error's tracebacks, and from those of its causes.

    Python then prints what it prints without the recorder. A frame of the recorder stays if the
    error arose in it.
    """
    left: list[BaseException | None] = [error]
    seen = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _without_own_frames(each.__traceback__)
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _without_own_frames(first: TracebackType | None) -> TracebackType | None:
    places, place = [], first
    while place is not None:
        places.append(place)
        place = place.tb_next
    kept = None
    for place in reversed(places):
        if kept is None or not place.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            place.tb_next = kept
            kept = place
    return kept


def describe_allocated(
    handles: Sequence[UnitHandle],
    units: Sequence[Unit],
    optimizers: Sequence[torch.optim.Optimizer],
    counters: AllocatorCounters,
) -> str:
    """Describe the currently allocated memory by content, largest first.

    Parameters, gradients and optimizer state are counted tensor by tensor (measured). The rest of
    the allocator's counter is activations, communication buffers and temporaries together
    (inferred).
    """
    allocated, reserved, _, peak, *_ = counters.read()
    unsharded = [unit for handle, unit in zip(handles, units, strict=True) if handle.is_unsharded]
    parameters = [p for handle in handles for p in handle.local_parameters]
    known = {
        f"unsharded parameters of {len(unsharded)} of {len(units)} units": sum(
            unit.unsharded_bytes for unit in unsharded
        ),
        "sharded parameters": local_bytes(parameters),
        "sharded gradients": local_bytes([p.grad for p in parameters]),
        "optimizer state": local_bytes(
            [
                value
                for optimizer in optimizers
                for state in optimizer.state.values()
                for value in state.values()
            ]
        ),
    }
    known["activations, buffers and temporaries"] = max(allocated - sum(known.values()), 0)
    listed = sorted(known.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in listed if size)
    return (
        f"Allocated {format_bytes(allocated)} (peak {format_bytes(peak)}, reserved "
        f"{format_bytes(reserved)}): {parts}."
    )


def keep_snapshot(folder: Path) -> Path:
    """Write CUDA's memory snapshot into the rank's folder; torch's memory_viz page opens it.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: There is no CUDA device.
    """
    target = folder / SNAPSHOT_FILE
    snapshot = take_snapshot()
    with target.open("wb") as file:
        pickle.dump(snapshot, file, protocol=_SNAPSHOT_PROTOCOL)
    return target


def local_bytes(values: Sequence[Any]) -> int:
    """Bytes of this rank's part of all tensors in the values; a shared storage counts once."""
    sizes: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            for storage in (each.untyped_storage() for each in strided_parts(local)):
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
