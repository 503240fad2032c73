"""What is in memory at a unit's boundary? Allocator counters, and names for tracked storages.

On CUDA the allocator's counters are read at the boundaries of every step, in host order, without
ever resetting the user's own peaks. In a memory step, on every device, the storage tracker is told
what each storage is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from fsdp_inspect.trace.codes import NO_UNIT, MemoryCategory, MemoryPoint, Method
from fsdp_inspect.trace.tables import MISSING_INT, MemoryTable

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from fsdp_inspect.recording.session import Session

_CATEGORY_COLUMNS = tuple(category.label for category in MemoryCategory)
_NO_CATEGORIES = (MISSING_INT,) * len(_CATEGORY_COLUMNS)
assert tuple(MemoryTable.DTYPES)[-len(_CATEGORY_COLUMNS) :] == _CATEGORY_COLUMNS


AllocatorReading = tuple[int, int, int, int, int, int, int, int]
"""In the column order of `MemoryTable`, in bytes: allocated, reserved, active, peak allocated, peak
reserved, inactive split; then two counts: allocation retries, failed requests."""


class AllocatorCounters(Protocol):
    """A device allocator's counters; tests replay a known course through it."""

    def read(self) -> AllocatorReading:
        """All counters at one moment."""
        ...


class CudaAllocator:
    """The counters of torch's CUDA caching allocator, as `torch.cuda.memory_stats` names them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> AllocatorReading:
        """All counters at one moment, in one call that reads them together."""
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
        )


class MemoryProbe:
    """Samples memory at the boundaries, and names storages for the tracker in memory steps.

    Needs calling only while `session.watches_memory`; at other times it does nothing.
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
        session.has_memory_counters = session.watches_memory = counters is not None
        self._inputs_step = -1

    def sample(self, point: MemoryPoint, unit: int = NO_UNIT) -> None:
        """Note what is allocated at this boundary."""
        session = self._session
        if session.tracker is not None:
            session.tracker.mark(point, session.microbatch)
        elif self._counters is not None:
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
                    *self._counters.read(),
                    MISSING_INT,  # peak_compute
                    *_NO_CATEGORIES,
                )
            )

    # --- names for the storages of a memory step

    def gather_buffer(self, buffer: torch.Tensor, unit: int) -> None:
        """The output of an all-gather."""
        self._name((buffer,), MemoryCategory.ALL_GATHER_BUFFER, unit)

    def reduce_buffer(self, buffer: torch.Tensor, unit: int) -> None:
        """The input, or the output, of a reduce-scatter; an output may become a gradient."""
        self._name((buffer,), MemoryCategory.REDUCE_SCATTER_BUFFER, unit)

    def inputs(self, args: Any, kwargs: Any) -> None:
        """The arguments of the first forward of a step."""
        session = self._session
        if session.tracker is None or self._inputs_step == session.step or session.open_units:
            return
        self._inputs_step = session.step
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        self._name(leaves, MemoryCategory.INPUT, NO_UNIT)

    def unsharded(self, group: FSDPParamGroup, unit: int) -> None:
        """A unit's parameters were made full."""
        if self._session.tracker is None:
            return
        for place, param in enumerate(group.fsdp_params):
            self._name(param.all_gather_outputs, MemoryCategory.UNSHARDED_PARAMETER, unit)
            full = getattr(param, "_unsharded_param", None)
            if full is not None:
                self._name((full,), MemoryCategory.UNSHARDED_PARAMETER, unit)
                self._session.tracker.follow_uses(full, place)

    def unsharded_gradients(self, group: FSDPParamGroup, unit: int) -> None:
        """A unit's backward is done; its full gradients are about to be reduced."""
        if self._session.tracker is None:
            return
        for param in group.fsdp_params:
            full = getattr(param, "_unsharded_param", None)
            for gradient in (
                None if full is None else full.grad,
                param.unsharded_accumulated_grad,
            ):
                if gradient is not None:
                    self._name((gradient,), MemoryCategory.UNSHARDED_GRADIENT, unit)

    def sharded_gradients(self, group: FSDPParamGroup, unit: int) -> None:
        """A unit's gradients are reduced."""
        if self._session.tracker is None:
            return
        for param in group.fsdp_params:
            if param.sharded_param.grad is not None:
                self._name((param.sharded_param.grad,), MemoryCategory.SHARDED_GRADIENT, unit)
        self._session.tracker.mark(MemoryPoint.AFTER_REDUCE, self._session.microbatch)

    def _name(self, tensors: Iterable[torch.Tensor], category: MemoryCategory, unit: int) -> None:
        tracker = self._session.tracker
        if tracker is None:
            return
        tracker.classify(tensors, category, unit)
