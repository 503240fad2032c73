"""Which storages are alive at this moment, and whose are they? One training step, byte by byte.

`StorageTracker` is a context around one step (a *memory step*). It sees every storage that an
operation returns or takes, the resizes by which FSDP frees and restores unsharded parameters, and
the death of each storage, on CPU and on CUDA alike. It changes nothing: it adds no hook to the
model, and the step computes what it would have computed without it.

[Note: What is counted]
The bytes of each live storage, once, however many tensors view it; no rounding. Not counted, as no
operation returns them: workspaces inside kernels and libraries (cuBLAS, NCCL, gloo), what the
caching allocator holds in reserve, and the inside of a compiled region (`torch.compile`), which
goes on running compiled. A storage that existed before the step counts from `register_known`, or
else from its first use on.

[Note: Storages and their Python objects]
The Python object of a storage lives as long as the storage itself, whoever holds it (torch keeps
object and storage together), so a weak reference to it is called back exactly when the memory is
freed. That may happen inside any line of Python and on autograd's own threads: all that is done
then is one append to a list.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Self
from weakref import ref

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.storage_log import (
    Moment,
    StorageEvent,
    StorageLog,
    TrackedStepMemory,
    TrackedStorage,
    UnitPass,
)
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint

TensorLike = torch.Tensor | torch.UntypedStorage
"""Something with a storage; a tensor subclass (DTensor) stands for the tensors inside it."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types known to be no wrappers, to ask less in the frequent case."""

_BEGIN_OF_PASS = (MemoryPoint.FORWARD_START, MemoryPoint.BACKWARD_START)
_END_OF_PASS = (MemoryPoint.FORWARD_END, MemoryPoint.BACKWARD_END)

_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows all live storages during one step; enter it at the step's begin, once.

    What a storage is may be said at any time: the last `classify` counts, for the storage's whole
    life. Storages nobody classifies are decided by when they lived (`StorageLog.categories`) and
    belong to the unit at whose position they were allocated. A step on fake tensors is followed by
    a tracker that was made under the same fake mode.

    Args:
        position: The innermost unit (-1: none) and the `Phase` at this moment; called at every
            allocation and release, from any thread, so it must be quick and touch no tensor.
        device_type: Count only storages there (`cpu`, `cuda`); None: everywhere but `meta`.
        host_units: Units whose shards, gradients and optimizer state count as the host's, where
            the tensors' devices cannot tell: on fake ranks.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        position: Callable[[], tuple[int, int]],
        *,
        device_type: str | None = None,
        host_units: Collection[int] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._position = position
        self._device_type = device_type
        self._host_units = host_units
        self._log = StorageLog()
        self._live: dict[int, _LiveStorage] = {}
        """By the address of torch's own storage object, which is unique among live ones."""
        self._meeting = threading.RLock()
        self._on_death = _death_of(self)
        self._passes: dict[int, UnitPass] = {}
        """The units' passes that are under way, by unit."""
        self._patches = Patches()
        self._fake_mode = active_fake_mode()
        self._begun = False
        self._ended = False
        self.problem: str | None = None
        """Why the result cannot be trusted, when a bug of ours stopped the tracking."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled: otherwise the first memory step would undo them."""
        return True

    # --- what the recorder says

    def register_known(
        self,
        category: MemoryCategory,
        tensors: TensorLike | Iterable[TensorLike],
        owner_unit: int,
    ) -> None:
        """Say what exists before the step: parameters, buffers, optimizer state, gradients."""
        self.classify(tensors, category, owner_unit)

    def classify(
        self,
        tensors: TensorLike | Iterable[TensorLike],
        category: MemoryCategory,
        owner_unit: int,
    ) -> None:
        """Say what storages are and which unit they belong to (-1: none), for their whole life.

        Storages not seen before count from now on. After the step this does nothing.
        """
        if self._ended:
            return
        several = (
            tensors if isinstance(tensors, torch.Tensor | torch.UntypedStorage) else [*tensors]
        )
        for tensor, storage in _storages_in(several):
            live = self._live.get(storage._cdata) or self._meet(tensor, storage)
            if live is not None:
                tracked = self._log.storages[live.index]
                tracked.category = category
                tracked.owner_unit = owner_unit

    def mark(self, point: MemoryPoint, microbatch: int = 0) -> None:
        """Keep what is alive at this moment as a sample of its own."""
        if not self._begun or self._ended:
            return
        moment = self._now()
        self._log.mark(point, microbatch, moment)
        if point in _BEGIN_OF_PASS:
            self._passes[moment.unit] = self._log.begin_pass(moment.unit, microbatch)
        elif point in _END_OF_PASS and (ended := self._passes.pop(moment.unit, None)) is not None:
            self._log.end_pass(ended)

    def follow_uses(self, tensor: torch.Tensor, parameter: int) -> None:
        """Note when a pass of its unit first uses this full parameter, of known category.

        Args:
            tensor: The full parameter.
            parameter: Its place among the unit's parameters.
        """
        for _, storage in _storages_in(tensor):
            if (live := self._live.get(storage._cdata)) is not None:
                live.parameter = parameter

    def result(self) -> TrackedStepMemory:
        """What the step did to memory.

        Raises:
            RecordingError: The step has not run, has not ended, or could not be followed.
        """
        if self.problem is not None:
            raise RecordingError(
                f"The storages of this step could not be followed: {self.problem}. Expected every "
                "storage to be seen. Leave the memory samples of this step out and report this."
            )
        if not self._ended:
            raise RecordingError(
                f"A memory step is {'still running' if self._begun else 'not begun'}. Its result "
                "exists after the `with tracker:` block. Ask for it there."
            )
        return self._log.summarize(host_units=self._host_units)

    def rows(self, step: int) -> Iterator[tuple[int, ...]]:
        """The step as rows in the column order of `MemoryTable`; see `StepMemory.rows`."""
        return self.result().rows(step)

    # --- the step

    def __enter__(self) -> Self:
        if self._begun:
            raise RecordingError(
                "This storage tracker has already followed a step. One tracker follows one step. "
                "Make a new StorageTracker for each memory step."
            )
        self._begun = True
        self._catch_up()
        self._log.begin(self._now())
        self._patch_resize()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if _get_current_dispatch_mode() is not self:
            self.problem = "another dispatch mode began or ended inside it, and hid a part of it"
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()
        self._guarded(lambda: self._log.finish(self._now()))
        self._ended = True
        # Dropping the weak references drops their callbacks: the log is complete.
        self._live.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A wrapper subclass (DTensor) goes first and comes back with operations on what is inside.
        if any(map(_is_wrapper, types)):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._guarded(self._observe, func, (args, kwargs), result)
        return result

    # --- observing

    def _observe(self, func: Any, arguments: object, result: object) -> None:
        """Note the storages that an operation used for the first time, resized or made."""
        for tensor, storage in _storages_in(arguments):
            live = self._live.get(storage._cdata)
            if live is None:
                self._meet(tensor, storage, _category_of_argument(func, tensor))
            elif live.num_bytes != storage.nbytes():
                self._note_size(live, storage)
            elif live.parameter is not None and not getattr(func, "is_view", False):
                self._note_use(live, live.parameter)
        for tensor, storage in _storages_in(result):
            if storage._cdata not in self._live:
                self._meet(tensor, storage)

    def _meet(
        self,
        tensor: TensorLike,
        storage: torch.UntypedStorage,
        category: MemoryCategory | None = None,
    ) -> "_LiveStorage | None":
        """Follow a storage from now on; None when it is not one that counts."""
        if not self._counts(tensor):
            return None
        # Backward runs on a thread of its own for each device; both may meet storages at once.
        with self._meeting:
            if (known := self._live.get(storage._cdata)) is not None:
                return known
            moment = self._now()
            live = _LiveStorage(storage, self._on_death)
            live.key, live.index = storage._cdata, len(self._log.storages)
            live.num_bytes = storage.nbytes()
            live.parameter = None
            self._log.storages.append(TrackedStorage(moment.unit, category))
            self._live[live.key] = live
            self._log.events.append(StorageEvent(live.index, live.num_bytes, moment))
            return live

    def _counts(self, tensor: TensorLike) -> bool:
        """Whether this memory exists, and on the device that is watched."""
        # DTensor works out its layouts on fake tensors of the global shape, which are no memory;
        # where the step itself runs on fake tensors, those of its own mode are what counts.
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fake_mode:
            return False
        if tensor.device.type == "meta":
            # A bare storage of a fake tensor does not know the device it stands for.
            return isinstance(tensor, torch.UntypedStorage) and self._fake_mode is not None
        return self._device_type in (None, tensor.device.type)

    def _note_size(self, live: "_LiveStorage", storage: torch.UntypedStorage) -> None:
        live.num_bytes = storage.nbytes()
        self._log.events.append(StorageEvent(live.index, live.num_bytes, self._now()))

    def _note_use(self, live: "_LiveStorage", parameter: int) -> None:
        """The first in a pass counts; what checkpointing repeats is not a pass's own.

        Views compute nothing, and checkpointing makes some that look like the pass's own.
        """
        unit_pass = self._passes.get(self._log.storages[live.index].owner_unit)
        if unit_pass is not None and parameter not in unit_pass.uses:
            moment = self._now()
            if not moment.recompute:
                self._log.use(unit_pass, parameter, moment)

    def _note_resize(self, storage: torch.UntypedStorage) -> None:
        live = self._live.get(storage._cdata)
        if live is None:
            self._meet(storage, storage)
        elif live.num_bytes != storage.nbytes():
            self._note_size(live, storage)

    def _note_death(self, live: "_LiveStorage") -> None:
        if self._live.get(live.key) is live:
            del self._live[live.key]
        if live.num_bytes:
            self._log.events.append(StorageEvent(live.index, 0, self._now()))

    def _now(self) -> Moment:
        unit, phase = self._position()
        # Backward runs without grad mode, unless it repeats a forward (checkpointing).
        recompute = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        return Moment(unit, phase, time.perf_counter_ns(), recompute)

    def _catch_up(self) -> None:
        """Note what was resized between `register_known` and the step."""
        for live in list(self._live.values()):
            storage = live()
            if storage is not None and live.num_bytes != storage.nbytes():
                self._note_size(live, storage)

    def _patch_resize(self) -> None:
        """See resizes of storages: they are no operations and reach no dispatch mode."""
        original = torch.UntypedStorage.resize_
        tracker_of = ref(self)

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker = tracker_of()
            if tracker is not None:
                tracker._guarded(tracker._note_resize, storage)
            return result

        self._patches.set_attribute(torch.UntypedStorage, "resize_", resize_)

    def _guarded(self, note: Callable[..., None], *args: Any) -> None:
        """Run our own bookkeeping; its failure ends the tracking and never the training."""
        if self._ended or self.problem is not None:
            return
        try:
            note(*args)
        except Exception as error:
            self.problem = repr(error)


class _LiveStorage(ref[torch.UntypedStorage]):
    """A weak reference to a live storage, with what we know about it."""

    __slots__ = ("index", "key", "num_bytes", "parameter")

    key: int
    index: int
    num_bytes: int
    parameter: int | None
    """Of a full parameter: its place among the unit's."""


def _death_of(tracker: StorageTracker) -> Callable[[ref[torch.UntypedStorage]], None]:
    """What to call when a storage dies; holds the tracker weakly, so that both can go."""
    tracker_of = ref(tracker)

    def note(live: ref[torch.UntypedStorage]) -> None:
        tracker = tracker_of()
        if tracker is not None and isinstance(live, _LiveStorage):
            tracker._guarded(tracker._note_death, live)

    return note


def _category_of_argument(func: Any, tensor: TensorLike) -> MemoryCategory | None:
    """What a storage is that nobody saw being made: an input, unless it was just computed.

    Results of code that torch cannot see (a compiled region, an extension) carry a gradient or
    are written to, and `torch.tensor` lifts what it has just made; those are left to the rule for
    what is allocated in a step.
    """
    schema = getattr(func, "_schema", None)
    written = schema is not None and schema.is_mutable
    lifted = func is torch.ops.aten.lift_fresh.default
    computed = isinstance(tensor, torch.Tensor) and tensor.requires_grad
    return None if written or lifted or computed else MemoryCategory.INPUT


def _storages_in(value: object) -> list[tuple[TensorLike, torch.UntypedStorage]]:
    """Every plain tensor (or storage) inside a value, with its storage."""
    found: list[tuple[TensorLike, torch.UntypedStorage]] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            if type(item) not in _PLAIN and is_traceable_wrapper_subclass(item):
                pending.extend(getattr(item, name) for name in item.__tensor_flatten__()[0])
                continue
            try:
                found.append((item, item.untyped_storage()))
            except (NotImplementedError, RuntimeError):
                pending.extend(_dense_parts(item))
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, torch.UntypedStorage):
            found.append((item, item))
    return found


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Where a tensor without a storage of its own keeps its numbers; empty where torch hides it."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return []
