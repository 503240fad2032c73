"""Read allocator counters at unit boundaries, and classify storages for the storage tracker.

On CUDA the counters are read in host order, and the user's own peaks are never reset. torch 2.13
has one way to read them. It builds a dictionary of about 200 entries and costs the host tens of
microseconds. The unit boundaries are therefore sampled in some steps only: the first steps, every
tenth step, and each step after one in which the peak rose. All steps are sampled after the
optimizer and at their end, where the peak counter also covers the time between the samples.

In a memory step, on every device, this module gives the storage tracker each storage's category.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.tensors import describe_tensors, local_values
from fsdp_inspect.recording.torch_api.dispatch import tree_leaves
from fsdp_inspect.recording.torch_api.overrides import call_unseen
from fsdp_inspect.trace.codes import (
    NO_UNIT,
    EventFlag,
    EventKind,
    MemoryCategory,
    MemoryPoint,
    Method,
    Phase,
    Stream,
)
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable

if TYPE_CHECKING:
    from fsdp_inspect.recording.session import Session
    from fsdp_inspect.recording.units import UnitHandle

_OF_PASSES = (
    MemoryPoint.FORWARD_START,
    MemoryPoint.FORWARD_END,
    MemoryPoint.BACKWARD_START,
    MemoryPoint.BACKWARD_END,
)
"""Samples of the unit whose pass begins or ends."""

_CATEGORY_COLUMNS = tuple(category.label for category in MemoryCategory)
_NO_CATEGORIES = (MISSING_INT,) * len(_CATEGORY_COLUMNS)
assert tuple(MemoryTable.DTYPES)[-len(_CATEGORY_COLUMNS) :] == _CATEGORY_COLUMNS


_FIRST_DETAILED_STEPS = 4
"""The number of steps at the start of the recording in which unit boundaries are sampled."""
_DETAILED_EVERY = 10
"""After the first steps, one step of this many is sampled."""

AllocatorReading = tuple[int, int, int, int, int, int, int, int, int]
"""Values in the column order of `MemoryTable`, in bytes: allocated, reserved, active, peak
allocated, peak reserved, inactive split; then counts: allocation retries, failed requests. The last
value has no column: the allocations by the driver."""
_PEAK_ALLOCATED, _DEVICE_ALLOCATIONS = 3, 8


class AllocatorCounters(Protocol):
    """A device allocator's counters; tests replay known values through it."""

    def read(self) -> AllocatorReading:
        """All counters at one moment."""
        ...


class CudaAllocator:
    """The counters of torch's CUDA caching allocator, from `torch.cuda.memory_stats`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> AllocatorReading:
        """All counters at one moment, read in one call."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return (
            allocated["current"],
            reserved["current"],
            stats["active_bytes"]["all"]["current"],
            allocated["peak"],
            reserved["peak"],
            stats["inactive_split_bytes"]["all"]["current"],
            stats["num_alloc_retries"],
            stats["num_ooms"],
            stats.get("num_device_alloc", 0),  # since torch 2.3
        )


class MemoryProbe:
    """Samples memory at unit boundaries, and classifies storages for the tracker in memory steps.

    Call it only while `session.watches_memory`; at other times it does nothing.
    """

    def __init__(
        self,
        session: Session,
        append: Callable[[tuple[int, ...]], None],
        counters: AllocatorCounters | None,
    ) -> None:
        self._session = session
        self._append = append
        self._counters = counters
        session.samples_boundaries = counters is not None
        session.watch_memory()
        self._inputs_seen = (-1, True)
        """The step of the last named inputs, and whether their forward had gradients."""
        self._highest_bytes = 0
        self._last_read = (-2, 0)
        """The step of the last reading, and the allocations by the driver until then."""
        self._peak_rose = False
        """Whether the current step has raised the highest peak so far."""
        self._outputs: dict[str, int] = {}
        """See `RankRecord.output_bytes`."""

    def begin_step(self) -> None:
        """Decide whether to sample the unit boundaries of the step that begins now."""
        if self._counters is None:
            return
        session = self._session
        is_regular = session.step < _FIRST_DETAILED_STEPS or session.step % _DETAILED_EVERY == 0
        session.samples_boundaries = is_regular or self._peak_rose
        session.watch_memory()
        self._peak_rose = False

    def sample(self, point: MemoryPoint, unit: int = NO_UNIT) -> None:
        """Sample the allocated memory at this boundary."""
        session = self._session
        if session.tracker is not None:
            session.tracker.mark(point, session.microbatch, unit if point in _OF_PASSES else None)
            return
        reading = self._read()
        if reading is not None:
            self._append(
                (
                    session.step,
                    session.microbatch,
                    session.phase,
                    point,
                    unit,
                    MISSING_INT,  # parameter
                    Method.MEASURED,
                    session.clock.host_now(),
                    *reading[:_DEVICE_ALLOCATIONS],
                    MISSING_INT,  # peak_compute
                    *_NO_CATEGORIES,
                )
            )

    def _read(self) -> AllocatorReading | None:
        """The counters; None if the allocator has none, which is reported once."""
        if self._counters is None:
            return None
        try:
            reading = self._counters.read()
        except Exception as error:
            raise_if_of_signal(error)
            self._counters = None
            self._session.samples_boundaries = False
            self._session.watch_memory()
            self._session.problem(
                f"Memory is not sampled: the allocator of this device has no statistics "
                f"({str(error).splitlines()[0]}). Expected torch's CUDA caching allocator. Run "
                "without the pluggable allocator to sample memory, or use memory steps."
            )
            return None
        peak = reading[_PEAK_ALLOCATED]
        if peak > self._highest_bytes:
            self._highest_bytes, self._peak_rose = peak, True
        self._note_allocations(reading[_DEVICE_ALLOCATIONS])
        return reading

    def _note_allocations(self, count: int) -> None:
        """Mark this moment if the driver has allocated since a reading in this step or the last."""
        session, (step, before) = self._session, self._last_read
        self._last_read = session.step, count
        if count > before and session.step - step <= 1:
            now, flags = session.clock.host_now(), int(EventFlag.LATEST_END)
            session.add(EventKind.DEVICE_ALLOCATION, now, now, stream=Stream.HOST, flags=flags)

    # --- categories for the storages of a memory step

    def gather_buffer(self, buffer: torch.Tensor, unit: int) -> None:
        """Classify the output of an all-gather."""
        self._name((buffer,), MemoryCategory.ALL_GATHER_BUFFER, unit)

    def reduce_buffer(self, buffer: torch.Tensor, unit: int) -> None:
        """Classify the input or output of a reduce-scatter; an output may become a gradient."""
        self._name((buffer,), MemoryCategory.REDUCE_SCATTER_BUFFER, unit)

    def full_gradient(self, gradient: torch.Tensor, unit: int) -> None:
        """Classify a gradient that is about to be reduced."""
        self._name((gradient,), MemoryCategory.UNSHARDED_GRADIENT, unit)

    def inputs(self, args: Any, kwargs: Any) -> None:
        """Classify the arguments of the first forward of a step, and of the first with gradients.

        A forward without gradients, as in an evaluation, describes the inputs only until another.
        """
        session = self._session
        now = (session.step, torch.is_grad_enabled())
        if session.tracker is None or now <= self._inputs_seen or session.open_units:
            return
        self._inputs_seen = now
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        if torch.is_grad_enabled() or not session.inputs:
            session.inputs = call_unseen(describe_tensors, leaves)
        self._name(leaves, MemoryCategory.INPUT, NO_UNIT)

    def output(self, value: Any, unit: int) -> None:
        """Note the size of a unit's output for which backward computes a gradient."""
        session = self._session
        if session.tracker is None or session.phase != Phase.FORWARD:
            return

        def measure() -> int:
            leaves = {id(each): each for each in tree_leaves(value) if torch.is_tensor(each)}
            found = [local_values(each) for each in leaves.values() if each.requires_grad]
            is_known = all(each.layout is torch.strided for each in found)
            return sum(each.nbytes for each in found) if is_known else 0

        try:
            size = call_unseen(measure)
        except Exception as error:  # such as of a class of tensors
            raise_if_of_signal(error)
            size = 0
        if self._outputs.setdefault(str(unit), size) != size:
            self._outputs[str(unit)] = 0

    def take_outputs(self) -> dict[str, int]:
        """The sizes of outputs since the last call; see `RankRecord.output_bytes`."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def unsharded(self, handle: UnitHandle, unit: int) -> None:
        """Classify a unit's parameters after its unshard."""
        tracker = self._session.tracker
        if tracker is None:
            return
        self._name(handle.gathered_parameters, MemoryCategory.UNSHARDED_PARAMETER, unit)
        for place, full in handle.followed_parameters:
            tracker.follow_uses(full, place)

    def kept_buffers(self, handle: UnitHandle, unit: int) -> None:
        """Classify a unit's buffers for communication that exist between steps."""
        if self._session.tracker is not None:
            for category, buffer in handle.kept_buffers:
                self._name((buffer,), category, unit)

    def unsharded_gradients(self, handle: UnitHandle, unit: int) -> None:
        """Classify a unit's full gradients, after its backward and before their reduction."""
        if not handle.reduces_gradients:
            self._session.skips_reduction = True
        if self._session.tracker is not None:
            self._name(handle.full_gradients, MemoryCategory.UNSHARDED_GRADIENT, unit)

    def sharded_gradients(self, handle: UnitHandle, unit: int) -> None:
        """Classify a unit's reduced gradients."""
        if self._session.tracker is None:
            return
        self._name(handle.reduced_gradients, MemoryCategory.SHARDED_GRADIENT, unit)
        self._session.tracker.mark(MemoryPoint.AFTER_REDUCE, self._session.microbatch)

    def _name(self, tensors: Iterable[torch.Tensor], category: MemoryCategory, unit: int) -> None:
        tracker = self._session.tracker
        if tracker is None:
            return
        tracker.classify(tensors, category, unit)
