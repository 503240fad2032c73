"""Watch which batches the training thread reads, and the random state in which it uses them."""

from __future__ import annotations

import zlib
from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fsdp_inspect.recording.torch_api.autograd import is_shuffled
from fsdp_inspect.trace.correctness import BatchSeen, PassSeen, RandomSeen

_BATCHES = 16
_PASSES = 4
_FIRST = 8
"""The batches of each pass whose digests are kept."""
_VISITED = 64
"""Parts of a batch that are looked at."""
_TENSORS = 3
"""Tensors of a batch that its digest contains."""
_BYTES = 4096
"""Bytes of each of them."""


class BatchWatch:
    """The first batches of the training and of each pass over a loader."""

    def __init__(self) -> None:
        self.batches: list[BatchSeen] = []
        self.passes: list[PassSeen] = []
        self.random: list[RandomSeen] = []
        self.autocast = ""
        """The dtype of the autocast region around the first forward; empty: none."""
        self._pass_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The index in `passes` of the pass that an iterator runs."""
        self._last: int | None = None
        """The digest of the last batch since the last backward."""
        self._inputs: int | None = None
        """The digest of what the model received first since then."""
        self._state: tuple[torch.device, int] | None = None
        """The random state before the first forward since then."""
        self._has_begun = False
        self._num_batches = 0
        self._pending: int | None = None
        """The pass of a batch whose digest is kept, since the last backward."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next inputs of the model are worth reading after the first steps."""
        return self._pending is not None

    def note_batch(self, batch: Any, iterator: Any, *, is_early: bool) -> bool:
        """Note a batch of a loader's iterator; returns whether something new was seen.

        `is_early`: whether the step is one of the first.
        """
        self._num_batches += is_early
        index = self._pass_of.get(iterator)
        if index is None and len(self.passes) < _PASSES:
            self._pass_of[iterator] = index = len(self.passes)
            self.passes.append(PassSeen(is_shuffled=is_shuffled(iterator)))
        begins = index is not None and len(self.passes[index].digests) < _FIRST
        is_first = is_early and self._num_batches <= _BATCHES
        if not (begins or is_first):
            return False
        digest = _digest(batch)
        if is_first:
            self._last = digest
        if begins and index is not None:
            self.passes[index].digests.append(digest or 0)
            self._pending = index
        return begins

    def note_end(self, iterator: Any) -> None:
        """Note the end of a pass; a persistent worker's iterator may run the next one."""
        index = self._pass_of.pop(iterator, None)
        if index is not None:
            self.passes[index] = self.passes[index].model_copy(update={"has_ended": True})

    def note_inputs(self, inputs: Any, device: torch.device) -> None:
        """Note what a model receives first since the last backward, and the state before it."""
        if self._inputs is None:
            self._inputs = _digest(inputs)
        if self._has_begun:
            return
        self._has_begun = True
        state = _random_state(device)
        self._state = None if state is None else (device, state)
        if torch.is_autocast_enabled(device.type) and not self.random:
            self.autocast = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")

    def before_backward(self, step: int, *, is_first: bool) -> bool:
        """Keep the last batch, which a backward uses; returns whether something new was seen.

        `is_first`: whether it is the first backward of the step.
        """
        has_batch = self._last is not None
        if self._last is not None:
            self.batches.append(BatchSeen(step=step, digest=self._last, inputs=self._inputs))
        if self._state is not None and is_first:
            device, before = self._state
            is_used = _random_state(device) != before
            self.random.append(RandomSeen(step=step, before=before, is_used=is_used))
        self.forget()
        return has_batch or is_first

    def forget(self) -> None:
        """Forget the batch and the inputs: a backward used them."""
        if self._pending is not None:
            self.passes[self._pending].inputs.append(self._inputs or 0)
        self._last = self._inputs = self._state = self._pending = None
        self._has_begun = False


def _random_state(device: torch.device) -> int | None:
    """A digest of the random state of a device, which the host holds; None: it is unknown."""
    if device.type == "cpu":
        state = torch.get_rng_state()
    elif device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        state = torch.cuda.get_rng_state(device)
    else:
        return None
    return zlib.crc32(state.numpy().tobytes())


def is_plain(tensor: Any) -> bool:
    """Whether its values can be read without waiting: a plain tensor on the CPU."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def _leading(tensor: torch.Tensor) -> torch.Tensor:
    """Values of a tensor in one dimension, without a copy: all, or those of its first rows."""
    while not tensor.is_contiguous() and tensor.dim() > 1:
        tensor = tensor[0]
    return tensor.reshape(-1)


def _sample(values: torch.Tensor) -> bytes:
    """The first values, and others at even distances: batches may begin with one long prompt."""
    number = _BYTES // values.element_size() // 2
    parts = values[:number], values[:: -(-len(values) // number)]
    return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in parts)


def _digest(tensors: Any) -> int | None:
    """A digest of values of a few tensors; None: there is no readable one."""
    digest, count = 0, 0
    for content in _contents(tensors):
        digest, count = zlib.crc32(content, digest), count + 1
        if count == _TENSORS:
            break
    return digest if count else None


def _contents(batch: Any) -> Iterator[bytes]:
    """Sampled bytes of each plain tensor with different values, in order."""
    waiting: list[Any] = [batch]
    for _ in range(_VISITED):
        if not waiting:
            return
        each = waiting.pop(0)
        if isinstance(each, torch.Tensor):
            if is_plain(each) and each.numel() > 1:
                content = _sample(_leading(each.detach()))
                size = each.element_size()
                if content != content[:size] * (len(content) // size):
                    yield content
        elif isinstance(each, dict | UserDict):
            waiting[:0] = islice(each.values(), _VISITED)
        elif isinstance(each, list | tuple):
            waiting[:0] = each[:_VISITED]
