"""Track every live storage of one training step, with its owning unit and category.

`StorageTracker` is a context around one step (a *memory step*), or under a limit of memory around
all steps. On CPU and on CUDA, it sees every storage that an operation returns or takes, the resizes
by which FSDP frees and restores unsharded parameters, and the release of each storage. It changes
nothing: it adds no hook to the model, and the step computes the same results with and without it.

[Note: The limit]
With a `MemoryLimit`, an allocation above the limit raises an error, as on a device of that size.
The tracker sees a result after the operation has run, so the result is dropped. Workspaces inside
an operation are not seen and do not count.

[Note: What is counted]
The tracker counts the bytes of each live storage once, for any number of views, without rounding.
It does not count memory that no operation returns: workspaces inside kernels and libraries (cuBLAS,
NCCL, gloo), the caching allocator's reserve, and the inside of a compiled region (`torch.compile`),
which still runs compiled. A storage that existed before the step counts from `register_known` or
`register_earlier`, or else from its first use.

[Note: Storages and their Python objects]
The Python object of a storage lives as long as the storage itself (torch keeps object and storage
together). The callback of a weak reference to the object therefore runs exactly when the memory is
freed. That may happen inside any line of Python and on autograd's own threads, so the callback only
appends to a list.

[Note: Threads of a backend]
A thread of gloo keeps the tensors of a collective for some microseconds after the collective has
ended; on a busy machine, for longer. The peak of a step would randomly depend on this. After a
blocking collective, the tracker therefore waits until the number of references is as before, for at
most `_LONGEST_RELEASE_S`.
"""

import functools
import gc
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Self
from weakref import ref

import torch

from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.signal_errors import raise_if_of_signal
from fsdp_inspect.recording.storage_log import (
    Moment,
    StorageEvent,
    StorageLog,
    TrackedStepMemory,
    TrackedStorage,
    UnitPass,
)
from fsdp_inspect.recording.tensors import strided_parts
from fsdp_inspect.recording.torch_api.autograd import current_graph_task_id
from fsdp_inspect.recording.torch_api.dispatch import (
    DEVICE_QUERY,
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    count_references,
    device_of_fake,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
    schema_of,
    storage_key,
)
from fsdp_inspect.recording.torch_api.overrides import modes_of_training, unseen
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint

TensorLike = torch.Tensor | torch.UntypedStorage
"""An object with a storage; a tensor subclass (DTensor) represents the tensors inside it."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types that are never wrappers; checked first because they are frequent."""

_BEGIN_OF_PASS = (MemoryPoint.FORWARD_START, MemoryPoint.BACKWARD_START)
_END_OF_PASS = (MemoryPoint.FORWARD_END, MemoryPoint.BACKWARD_END)

_OF_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
"""The namespaces of collectives, whose arguments are tensors of the caller."""

_LONGEST_RELEASE_S = 0.05

_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """An allocation that would exceed the limit."""

    num_bytes: int
    live_bytes: int
    """Live bytes before the allocation."""
    place: int
    """The number of the user's line; 0: unknown."""
    moment: Moment
    position: int
    """The number of events in `log` before the allocation."""
    log: StorageLog
    """The log of its step, which continues."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of the live bytes. See [Note: The limit]."""

    num_bytes: int
    make_error: Callable[[FailedAllocation], BaseException]
    """Makes the exception of an allocation that would exceed the limit."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows all live storages during one step; enter it once, at the step's begin.

    `classify` may be called at any time; its last call counts for the storage's whole life.
    An unclassified storage gets its category from its lifetime (`StorageLog.categories`), and
    belongs to the unit at whose position it was allocated. A step on fake tensors needs a tracker
    that was made under the same fake mode.

    Args:
        position: Returns the current innermost unit (-1: none) and the `Phase`. It is called at
            every allocation and release, from any thread: it must be quick and touch no tensor.
        device_type: Count only storages on this device (`cpu`, `cuda`); None: all but `meta`.
        is_in_collective: Returns whether a collective runs now. Storages that a backend creates
            during it, such as gloo's copy of a reduce-scatter's input, are buffers of
            communication.
        host_units: Units whose shards, gradients and optimizer state count as on the host although
            the tensors' devices do not show it (on fake ranks).
        find_place: Returns the number of the user's line of a frame; None: no lines.
        limit: The limit of the live bytes; None: no limit.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        position: Callable[[], tuple[int, int]],
        *,
        device_type: str | None = None,
        is_in_collective: Callable[[], bool] = lambda: False,
        host_units: Collection[int] = (),
        find_place: Callable[[FrameType], int] | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._find_place = find_place
        self._limit = limit
        self._live_bytes = 0
        self._late_frees: list[_LiveStorage] | None = None
        """Storages that are freed while `end_step` runs; None at other times."""
        self._position = position
        self._device_type = device_type
        self._is_in_collective = is_in_collective
        self._host_units = host_units
        self._log = StorageLog()
        self._live: dict[int, _LiveStorage] = {}
        """Live storages by the address of torch's own storage object, which is unique among live
        ones."""
        self._follow_lock = threading.RLock()
        self._on_free = _free_callback(self)
        self._sent: dict[int, int] = {}
        """The storages of the current collective: the number of references before it, by
        address."""
        self._passes: dict[int, UnitPass] = {}
        """The open pass of each unit, by unit."""
        self._patches = Patches()
        self._fake_mode = active_fake_mode()
        self._begun = False
        self._ended = False
        self.problem: str | None = None
        """The reason why the result is invalid, if an internal error stopped the tracking."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled. Otherwise the first memory step would disable them."""
        return True

    # --- calls of the recorder

    def register_known(
        self,
        category: MemoryCategory,
        tensors: TensorLike | Iterable[TensorLike],
        owner_unit: int,
    ) -> None:
        """Register storages from before the step: parameters, buffers, states, gradients."""
        self.classify(tensors, category, owner_unit)

    def register_earlier(self, known: Mapping[int, ref[torch.UntypedStorage]]) -> None:
        """Follow the storages of all tensors in Python objects: earlier steps may keep some.

        Single numbers, such as the step counters of an optimizer, are left out.

        Args:
            known: Storages to leave out, by their key: those from before the recording, such as a
                data set. See `find_storages`.
        """
        for tensor, storage in _live_storages():
            earlier = known.get(storage_key(storage))
            is_new = earlier is None or earlier() is not storage
            is_number = isinstance(tensor, torch.Tensor) and tensor.dim() == 0
            if is_new and not is_number:
                self._follow(tensor, storage)

    @property
    def live_bytes(self) -> int:
        """The live bytes."""
        return self._live_bytes

    def classify(
        self,
        tensors: TensorLike | Iterable[TensorLike],
        category: MemoryCategory,
        owner_unit: int,
    ) -> None:
        """Set the category and owning unit (-1: none) of storages, for their whole life.

        Storages not seen before count from now on. After the step this does nothing.
        """
        if self._ended:
            return
        several = (
            tensors if isinstance(tensors, torch.Tensor | torch.UntypedStorage) else [*tensors]
        )
        for tensor, storage in _storages_in(several):
            live = self._live.get(storage_key(storage)) or self._follow(tensor, storage)
            if live is not None:
                tracked = self._log.storages[live.index]
                tracked.category = category
                tracked.owner_unit = owner_unit

    def mark(self, point: MemoryPoint, microbatch: int = 0, unit: int | None = None) -> None:
        """Add a mark with the currently live bytes.

        Args:
            point: The moment.
            microbatch: The microbatch that runs.
            unit: The unit that begins or ends; None: the innermost unit. A unit may end while the
                root is innermost, because the root's backward began later at the same output.
        """
        if not self._begun or self._ended:
            return
        moment = self._now()
        if unit is not None:
            moment = moment._replace(unit=unit)
        self._log.mark(point, microbatch, moment)
        if point in _BEGIN_OF_PASS:
            self._passes[moment.unit] = self._log.begin_pass(moment.unit, microbatch)
        elif point in _END_OF_PASS and (ended := self._passes.pop(moment.unit, None)) is not None:
            self._log.end_pass(ended)

    def follow_uses(self, tensor: torch.Tensor, parameter: int) -> None:
        """Record the first use of this full parameter in a pass of its unit. It must be classified.

        Args:
            tensor: The full parameter.
            parameter: Its index among the unit's parameters.
        """
        for _, storage in _storages_in(tensor):
            if (live := self._live.get(storage_key(storage))) is not None:
                live.parameter = parameter

    def collective_ended(self, *, is_blocking: bool) -> None:
        """Wait until the backend has released the storages of the collective that has ended.

        See [Note: Threads of a backend]. An asynchronous collective is not waited for.
        """
        sent, self._sent = self._sent, {}
        if is_blocking:
            deadline = time.monotonic() + _LONGEST_RELEASE_S
            self._guarded(self._await_release, sent, deadline)

    @property
    def log(self) -> StorageLog:
        """The log of the step."""
        return self._log

    def end_step(self) -> StorageLog:
        """End the step and begin the next one, which the tracker follows too.

        Returns:
            The log of the step that has ended.
        """
        with self._follow_lock:
            moment, finished, following = self._now(), self._log, StorageLog()
            finished.finish(moment)
            categories = finished.categories()
            self._late_frees = []
            for live in list(self._live.values()):
                tracked = replace(finished.storages[live.index], category=categories[live.index])
                live.index = len(following.storages)
                following.storages.append(tracked)
                following.events.append(StorageEvent(live.index, live.num_bytes, moment))
            following.begin(moment)
            self._log, late, self._late_frees = following, self._late_frees, None
            self._passes.clear()
            self._live_bytes = sum(live.num_bytes for live in list(self._live.values()))
            for live in late:
                self._note_free(live)
        return finished

    def result(self) -> TrackedStepMemory:
        """The memory of the step.

        Raises:
            RecordingError: The step has not run, has not ended, or could not be tracked.
        """
        if self.problem is not None:
            raise RecordingError(
                f"The storages of this step could not be tracked: {self.problem}. Expected every "
                "storage to be seen. Ignore the memory samples of this step and report the error."
            )
        if not self._ended:
            raise RecordingError(
                f"The memory step is {'still running' if self._begun else 'not begun'}. Its result "
                "exists after the `with tracker:` block. Call result() there."
            )
        return self._log.summarize(host_units=self._host_units)

    def rows(self, step: int) -> Iterator[tuple[int, ...]]:
        """The step as rows in the column order of `MemoryTable`; see `TrackedStepMemory.rows`."""
        return self.result().rows(step)

    # --- the step

    def __enter__(self) -> Self:
        if self._begun:
            raise RecordingError(
                "This storage tracker has already tracked a step. One tracker tracks one step. "
                "Make a new StorageTracker for each memory step."
            )
        self._begun = True
        self._catch_up()
        self._log.begin(self._now())
        self._patch_resize()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if modes_of_training()[-1:] != [self]:
            self.problem = "another dispatch mode began or ended inside it and hid a part of it"
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
        # A wrapper subclass (DTensor) handles the call first and repeats it on its inner tensors.
        if any(map(_is_wrapper, types)):
            return NotImplemented
        if func is DEVICE_QUERY:
            return device_of_fake(args[0])
        kwargs = kwargs or {}
        if func.namespace in _OF_COLLECTIVES:
            self._guarded(self._note_sent, (args, kwargs))
        result = func(*args, **kwargs)
        try:
            self._guarded(self._observe, func, (args, kwargs), result)
        except _LimitPassed as passed:
            failed = passed.failed
        else:
            return result
        del result  # the traceback keeps this frame
        raise self._error(failed)

    # --- observing

    def _observe(self, func: Any, arguments: object, result: object) -> None:
        """Note the storages that an operation used for the first time, resized or allocated."""
        for tensor, storage in _storages_in(arguments):
            live = self._live.get(storage_key(storage))
            if live is None:
                self._follow(tensor, storage, self._category_of_argument(func, tensor))
            elif live.num_bytes != storage.nbytes():
                self._note_size(live, storage)
            elif live.parameter is not None and not getattr(func, "is_view", False):
                self._note_use(live, live.parameter)
        for tensor, storage in _storages_in(result):
            if storage_key(storage) not in self._live:
                self._check_limit(tensor, storage.nbytes())
                self._follow(tensor, storage)

    def _check_limit(self, tensor: TensorLike, added_bytes: int) -> None:
        """Check that additional bytes fit under the limit.

        Raises:
            _LimitPassed: The bytes do not fit.
        """
        limit = self._limit
        if limit is None or self._live_bytes + added_bytes <= limit.num_bytes or added_bytes <= 0:
            return
        with self._follow_lock:
            # Other threads free storages at the same time, so the running sum may be too high.
            self._live_bytes = sum(live.num_bytes for live in list(self._live.values()))
            if self._live_bytes + added_bytes > limit.num_bytes and self._counts(tensor):
                raise _LimitPassed(
                    FailedAllocation(
                        added_bytes,
                        self._live_bytes,
                        self._place(),
                        self._now(),
                        len(self._log.events),
                        self._log,
                    )
                )

    def _error(self, failed: FailedAllocation) -> BaseException:
        assert self._limit is not None
        return self._limit.make_error(failed)

    def _place(self) -> int:
        """The number of the running line of the user's code; 0: unknown, or before the step."""
        if self._find_place is None or not self._begun:
            return 0
        return self._find_place(sys._getframe(1))

    def _note_sent(self, arguments: object) -> None:
        """Count the references to the storages of a collective before it begins."""
        if count_references is not None and self._is_in_collective():
            for tensor, storage in _storages_in(arguments):
                if tensor.device.type == "cpu":
                    self._sent.setdefault(
                        storage_key(storage), count_references(storage_key(storage))
                    )

    def _await_release(self, sent: Mapping[int, int], deadline: float) -> None:
        count = count_references
        assert count is not None
        for address, allowed in sent.items():
            while (live := self._live.get(address)) is not None:
                storage = live()  # keeps it alive while its references are counted
                if storage is None or count(address) <= allowed:
                    break
                del storage
                if time.monotonic() > deadline:
                    return
                time.sleep(0)

    def _category_of_argument(self, func: Any, tensor: TensorLike) -> MemoryCategory | None:
        """The category of an unknown storage in an argument of an operation."""
        if self._is_in_collective() and getattr(func, "namespace", "") not in _OF_COLLECTIVES:
            return MemoryCategory.REDUCE_SCATTER_BUFFER
        return _category_of_argument(func, tensor)

    def _follow(
        self,
        tensor: TensorLike,
        storage: torch.UntypedStorage,
        category: MemoryCategory | None = None,
    ) -> "_LiveStorage | None":
        """Follow a storage from now on; None if it does not count."""
        if not self._counts(tensor):
            return None
        # Backward runs on one thread per device; several threads may see new storages at once.
        with self._follow_lock:
            if (known := self._live.get(storage_key(storage))) is not None:
                return known
            moment = self._now()
            live = _LiveStorage(storage, self._on_free)
            live.key, live.index = storage_key(storage), len(self._log.storages)
            live.num_bytes = storage.nbytes()
            live.parameter = None
            if category is MemoryCategory.REDUCE_SCATTER_BUFFER and self._is_in_collective():
                self._sent[live.key] = 1  # the backend's own copy: only the weak reference remains
            self._log.storages.append(TrackedStorage(moment.unit, category, self._place()))
            self._live[live.key] = live
            self._live_bytes += live.num_bytes
            self._log.events.append(StorageEvent(live.index, live.num_bytes, moment))
            return live

    @unseen
    def _counts(self, tensor: TensorLike) -> bool:
        """Whether this is real memory on the tracked device."""
        # DTensor computes its layouts on fake tensors of the global shape, which use no memory. If
        # the step itself runs on fake tensors, only the tensors of its own mode count.
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fake_mode:
            return False
        if tensor.device.type == "meta":
            # A bare storage of a fake tensor does not contain its simulated device.
            return isinstance(tensor, torch.UntypedStorage) and self._fake_mode is not None
        return self._device_type in (None, tensor.device.type)

    def _note_size(self, live: "_LiveStorage", storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._live_bytes += num_bytes - live.num_bytes
        if not live.num_bytes:  # FSDP reuses a storage, which belongs to the line that fills it
            self._log.storages[live.index].place = self._place()
        live.num_bytes = num_bytes
        self._log.events.append(StorageEvent(live.index, live.num_bytes, self._now()))

    def _note_use(self, live: "_LiveStorage", parameter: int) -> None:
        """Note the first use in a pass, except in a recompute.

        Views do not count, because they compute nothing, and checkpointing creates views outside of
        a recompute.
        """
        unit_pass = self._passes.get(self._log.storages[live.index].owner_unit)
        if unit_pass is not None and parameter not in unit_pass.uses:
            moment = self._now()
            if not moment.recompute:
                self._log.use(unit_pass, parameter, moment)

    def _note_resize(self, storage: torch.UntypedStorage) -> None:
        live = self._live.get(storage_key(storage))
        if live is None:
            self._follow(storage, storage)
        elif live.num_bytes != storage.nbytes():
            self._note_size(live, storage)

    def _note_free(self, live: "_LiveStorage") -> None:
        if self._late_frees is not None:
            self._late_frees.append(live)
            return
        if self._live.get(live.key) is live:
            del self._live[live.key]
        if live.num_bytes:
            self._live_bytes -= live.num_bytes
            self._log.events.append(StorageEvent(live.index, 0, self._now()))

    def _now(self) -> Moment:
        unit, phase = self._position()
        # Backward runs without grad mode, unless it repeats a forward (checkpointing).
        recompute = torch.is_grad_enabled() and current_graph_task_id() != -1
        return Moment(unit, phase, time.perf_counter_ns(), recompute)

    def _catch_up(self) -> None:
        """Note resizes between `register_known` and the step."""
        for live in list(self._live.values()):
            storage = live()
            if storage is not None and live.num_bytes != storage.nbytes():
                self._note_size(live, storage)

    def _patch_resize(self) -> None:
        """Observe resizes of storages, which are not operations and reach no dispatch mode."""
        original = torch.UntypedStorage.resize_
        tracker_of = ref(self)

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            tracker = tracker_of()
            if tracker is not None:
                try:
                    tracker._guarded(tracker._check_limit, storage, size - storage.nbytes())
                except _LimitPassed as passed:
                    raise tracker._error(passed.failed) from None
            result = original(storage, size)
            if tracker is not None:
                tracker._guarded(tracker._note_resize, storage)
            return result

        self._patches.set_attribute(torch.UntypedStorage, "resize_", resize_)

    def _guarded(self, note: Callable[..., None], *args: Any) -> None:
        """Run the tracker's code; its failure ends the tracking and never the training.

        Raises:
            _LimitPassed: The code checks the requested limit, and the limit is exceeded.
        """
        if self._ended or self.problem is not None:
            return
        try:
            note(*args)
        except _LimitPassed:
            raise
        except Exception as error:
            raise_if_of_signal(error)
            self.problem = repr(error)


class _LimitPassed(Exception):
    """An allocation would exceed the limit."""

    def __init__(self, failed: FailedAllocation) -> None:
        super().__init__()
        self.failed = failed


class _LiveStorage(ref[torch.UntypedStorage]):
    """A weak reference to a live storage, with its tracked properties."""

    __slots__ = ("index", "key", "num_bytes", "parameter")

    key: int
    index: int
    num_bytes: int
    parameter: int | None
    """For a full parameter, its index among the unit's parameters."""


def _free_callback(tracker: StorageTracker) -> Callable[[ref[torch.UntypedStorage]], None]:
    """Return the callback for a freed storage; it refers to the tracker weakly."""
    tracker_of = ref(tracker)

    def note(live: ref[torch.UntypedStorage]) -> None:
        tracker = tracker_of()
        if tracker is not None and isinstance(live, _LiveStorage):
            tracker._guarded(tracker._note_free, live)

    return note


def _category_of_argument(func: Any, tensor: TensorLike) -> MemoryCategory | None:
    """The category of an unknown storage in an argument: an input, unless it was just computed.

    Results of code that torch cannot see (a compiled region, an extension) are written to, or
    require a gradient. A leaf that requires one is no result, but a parameter of another model.
    `torch.tensor` lifts its new tensor. These results get the category of storages that are
    allocated in a step.
    """
    schema = schema_of(func)
    written = schema is not None and schema.is_mutable
    lifted = func is torch.ops.aten.lift_fresh.default
    computed = isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf
    return None if written or lifted or computed else MemoryCategory.INPUT


def find_storages() -> dict[int, ref[torch.UntypedStorage]]:
    """The storages of all tensors in Python objects, by their key."""
    return {storage_key(storage): ref(storage) for _, storage in _live_storages()}


def _live_storages() -> Iterator[tuple[TensorLike, torch.UntypedStorage]]:
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            try:
                yield from _storages_in(each)
            except Exception as error:  # a tensor of another library without a storage
                raise_if_of_signal(error)


@unseen
def _storages_in(value: object) -> list[tuple[TensorLike, torch.UntypedStorage]]:
    """All plain tensors and storages inside a value, each with its storage."""
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
                pending.extend(each for each in strided_parts(item) if each is not item)
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, torch.UntypedStorage):
            found.append((item, item))
    return found
