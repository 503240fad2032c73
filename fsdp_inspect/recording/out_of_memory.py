"""Limit the memory of the device, and report the live memory when an allocation fails.

On CUDA the allocator itself limits reserved memory. On CPU the storage tracker limits the bytes of
live storages: it follows every step, and `FailedAllocation` is attached to the exception that it
raises, so that the report shows the moment of the failure and not that of its handling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_inspect.error_text import causes_of
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.quantities import parse_bytes
from fsdp_inspect.recording.failure import frames_of, local_bytes
from fsdp_inspect.recording.memory import AllocatorCounters
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.storage_log import Moment, StorageLog
from fsdp_inspect.recording.storage_tracker import FailedAllocation
from fsdp_inspect.recording.units import UnitHandle
from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory, Phase
from fsdp_inspect.trace.live_memory import (
    MOST_CHANGES,
    RESTING,
    STORAGE_TRACKER,
    TENSORS,
    LiveBytes,
    LiveHistory,
    LiveMoment,
    LiveOwner,
    OutOfMemoryRecord,
    keep_largest,
)
from fsdp_inspect.trace.run import Unit

_REQUEST = re.compile(r"[Tt]ried to allocate (?P<size>[\d.]+ [KMGT]?i?B(?:ytes)?|\d+ bytes)")
_ATTRIBUTE = "fsdp_inspect_failure"
_MOST_ROWS_OF_A_MOMENT = 300
"""The row limit of a moment: every rank of a run writes these rows for each phase."""


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """A complete step with followed storages."""

    step: int
    log: StorageLog

    def at(self, position: int, moment: Moment, name_place: Callable[[int], str]) -> LiveMoment:
        """The live memory after the first `position` events, which end at `moment`."""
        live = live_rows(self.log, position, name_place)
        return LiveMoment(
            step=self.step,
            phase=Phase(moment.phase).label,
            unit=moment.unit,
            bytes=sum(row.bytes for row in live),
            live=live,
        )

    def at_begin(self, name_place: Callable[[int], str]) -> LiveMoment:
        """The live memory at the start of the step."""
        position = self.log.begin_position
        return self.at(position, Moment(NO_UNIT, Phase.OUTSIDE, 0), name_place)

    def highest_moments(
        self, name_place: Callable[[int], str], host_units: Collection[int] = ()
    ) -> list[LiveMoment]:
        """The highest moment of each phase, and the end of the step as phase `RESTING`.

        Args:
            name_place: Returns the line of code with a number of the log.
            host_units: Units whose shards are on the host; they are left out.
        """
        log = self.log.on_device(host_units)
        peaks = [(Phase(moment.phase).label, at, moment) for at, moment in log.phase_peaks()]
        moments = []
        for phase, position, moment in [*peaks, (RESTING, *log.end)]:
            known = FollowedStep(self.step, log).at(position, moment, name_place)
            live = keep_largest(known.live, _MOST_ROWS_OF_A_MOMENT)
            moments.append(known.model_copy(update={"phase": phase, "live": live}))
        return moments

    def history(
        self, name_place: Callable[[int], str], host_units: Collection[int] = ()
    ) -> LiveHistory | None:
        """Every change of the step; None for more than `MOST_CHANGES`. Arguments as above."""
        start, changes = self.log.on_device(host_units).changes()
        if len(changes) > MOST_CHANGES:
            return None
        keys = list(dict.fromkeys([*start, *(key for _, key, _ in changes)]))
        owners = [LiveOwner(unit=u, category=c.label, place=name_place(p)) for u, c, p in keys]
        numbers = {key: number for number, key in enumerate(keys)}
        return LiveHistory(
            step=self.step,
            owners=owners,
            start_bytes=[start.get(key, 0) for key in keys],
            time_ns=[time_ns for time_ns, _, _ in changes],
            owner=[numbers[key] for _, key, _ in changes],
            change_bytes=[change for _, _, change in changes],
        )

    def highest(self, unit: int, phase: int, name_place: Callable[[int], str]) -> LiveMoment:
        """The highest moment in a unit and phase, or else the peak of the step."""
        return self.at(*self.log.highest(unit, phase), name_place)


@dataclass(frozen=True, slots=True)
class LimitFailure:
    """A failed allocation under a limit, with its position in the training."""

    step: int
    microbatch: int
    limit_bytes: int
    failed: FailedAllocation


def make_limit_error(failure: LimitFailure) -> torch.OutOfMemoryError:
    """The exception of an allocation that passes the requested limit."""
    failed = failure.failed
    error = torch.OutOfMemoryError(
        f"Tried to allocate {format_bytes(failed.num_bytes)}. The device memory is limited to "
        f"{format_bytes(failure.limit_bytes)} by --device-memory of FSDP Inspect, of which "
        f"{format_bytes(failed.live_bytes)} are allocated."
    )
    setattr(error, _ATTRIBUTE, failure)
    return error


def find_limit_failure(error: BaseException) -> LimitFailure | None:
    """The failure that caused an exception, also if it was raised again as another exception."""
    failures = (getattr(each, _ATTRIBUTE, None) for each in causes_of(error))
    return next((each for each in failures if isinstance(each, LimitFailure)), None)


class CudaLimit:
    """Limits the memory that torch's CUDA allocator reserves in this process."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._before: float | None = None

    def start(self) -> str | None:
        """Set the limit; returns the reason if it has no effect, else None."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        if self._limit_bytes >= total:
            return (
                f"The requested device memory of {format_bytes(self._limit_bytes)} has no effect: "
                f"{self._device} has {format_bytes(total)}."
            )
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        self._before = 1.0 if ask is None else float(ask(self._device))
        torch.cuda.set_per_process_memory_fraction(self._limit_bytes / total, self._device)
        return None

    def stop(self) -> None:
        """Restore the earlier fraction; a second call does nothing."""
        if self._before is not None:
            before, self._before = self._before, None
            torch.cuda.set_per_process_memory_fraction(before, self._device)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state of a recording for the report of a failed allocation."""

    session: Session
    units: Sequence[Unit]
    handles: Sequence[UnitHandle]
    optimizers: Sequence[torch.optim.Optimizer]
    counters: AllocatorCounters | None
    device: torch.device
    limit_bytes: int | None
    """The requested limit."""
    followed: FollowedStep | None
    """The last complete step, under a limit."""
    resting_before: LiveMoment | None
    """The memory at the start of an early step, under a limit."""
    resting_bytes: tuple[int, ...]
    """The live bytes after each of the last steps, under a limit."""
    memory_step_peak: LiveMoment | None
    """The peak of the last memory step."""
    name_place: Callable[[int], str]
    """Returns `file:line` of a line of code with a number of the storage tracker."""


def make_record(
    error: BaseException, identity: dict[str, Any], where: Surroundings, location: str
) -> OutOfMemoryRecord:
    """Describe a failed allocation.

    Args:
        error: The out-of-memory error.
        identity: `run_id`, `rank` and `attempt` of the record.
        where: The state of the recording.
        location: The user's line that the error passed; empty: none.
    """
    message = " ".join(str(error).split())
    failure = find_limit_failure(error)
    if failure is not None:
        return _of_limit(failure, message, identity, where, location)
    session = where.session
    unit, phase = session.position(frames_of(error))
    live = list(_kept_tensors(where))
    return OutOfMemoryRecord(
        **identity,
        message=message[:2000],
        requested_bytes=parse_request(message),
        is_limit_requested=where.limit_bytes is not None,
        step=session.step,
        microbatch=session.microbatch,
        phase=Phase(phase).label,
        unit=unit,
        location=location,
        live_from=TENSORS if live else "",
        live=keep_largest(live),
        reference=where.memory_step_peak,
        **_allocator_state(where),
    )


def _of_limit(
    failure: LimitFailure,
    message: str,
    identity: dict[str, Any],
    where: Surroundings,
    location: str,
) -> OutOfMemoryRecord:
    failed = failure.failed
    log = failed.log.until(failed.position, failed.moment)
    step, name_place = FollowedStep(failure.step, log), where.name_place
    unit, phase = failed.moment.unit, failed.moment.phase
    good = where.followed
    return OutOfMemoryRecord(
        **identity,
        message=message[:2000],
        requested_bytes=failed.num_bytes,
        limit_bytes=failure.limit_bytes,
        is_limit_requested=True,
        allocated_bytes=failed.live_bytes,
        step=failure.step,
        microbatch=failure.microbatch,
        phase=Phase(phase).label,
        unit=unit,
        location=name_place(failed.place) or location,
        live_from=STORAGE_TRACKER,
        live=live_rows(log, failed.position, name_place),
        reference=None if good is None else good.highest(unit, phase, name_place),
        resting_before=where.resting_before,
        resting_now=step.at_begin(name_place),
        resting_bytes=list(where.resting_bytes),
    )


def live_rows(log: StorageLog, position: int, name_place: Callable[[int], str]) -> list[LiveBytes]:
    """The rows of a moment; places that differ only in their position in a line are joined."""
    found: dict[tuple[int, str, str], LiveBytes] = {}
    for each in log.alive_at(position):
        key = (each.owner_unit, each.category.label, name_place(each.place))
        known = found.get(key)
        found[key] = LiveBytes(
            unit=key[0],
            category=key[1],
            place=key[2],
            bytes=each.num_bytes + (known.bytes if known else 0),
            count=each.num_storages + (known.count if known else 0),
        )
    return keep_largest(list(found.values()))


def parse_request(message: str) -> int | None:
    """The requested bytes in torch's message, to its three digits; None if there are none."""
    found = _REQUEST.search(message)
    return None if found is None else parse_bytes(found["size"].replace("bytes", "B"))


def _allocator_state(where: Surroundings) -> dict[str, int | None]:
    """The fields of the record that the CUDA allocator provides; empty without it."""
    if where.counters is None:
        return {}
    allocated, reserved, *_ = where.counters.read()
    free, total = torch.cuda.mem_get_info(where.device)
    blocks = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        for block in segment["blocks"]
        if block["state"] == "inactive" and segment["device"] == (where.device.index or 0)
    ]
    return {
        "limit_bytes": min(total, where.limit_bytes or total),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "device_free_bytes": free,
        "largest_free_block_bytes": max(blocks, default=0),
    }


def _kept_tensors(where: Surroundings) -> Iterable[LiveBytes]:
    """The tensors that FSDP and the optimizer keep, by unit: parameters, gradients, states."""
    states = {
        id(parameter): list(state.values())
        for optimizer in where.optimizers
        for parameter, state in optimizer.state.items()
    }
    for unit, handle in enumerate(where.handles):
        parameters = handle.local_parameters
        kept: dict[MemoryCategory, Sequence[Any]] = {
            MemoryCategory.SHARDED_PARAMETER: parameters,
            MemoryCategory.SHARDED_GRADIENT: [each.grad for each in parameters],
            MemoryCategory.OPTIMIZER_STATE: [
                value for each in parameters for value in states.get(id(each), ())
            ],
        }
        sizes = {category: local_bytes(tensors) for category, tensors in kept.items()}
        if handle.is_unsharded:
            sizes[MemoryCategory.UNSHARDED_PARAMETER] = where.units[unit].unsharded_bytes
        for category, size in sizes.items():
            if size:
                yield LiveBytes(unit=unit, category=category.label, bytes=size)
