"""Observe in the first steps whether the training is right: optimizer, batches and loss.

Everything is read from values on the CPU, without a copy of a tensor and without a collective. What
is on a GPU, or compiled, is not observed. An error of an observation ends the observations, and
never the recording.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_inspect.recording.code_places import find_calling_line
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.trace.correctness import BatchSeen, LossSeen, OptimizerSeen, TrainingSeen

_STEPS = 8
_BATCHES = 16
_OPTIMIZERS = 16
"""With more optimizers, such as one for each parameter, none is observed."""
_TENSORS = 3
"""Tensors of a batch that its digest contains."""
_BYTES = 4096
"""Bytes of each of them."""


class Recording(Protocol):
    """What the observations need of a `Session`."""

    active: bool
    step: int
    microbatch: int

    def problem(self, sentence: str) -> None:
        """Store a limit of the recording in the run folder."""
        ...


class TrainingChecks:
    """The observations of one rank.

    Args:
        session: The recording.
        model: The recorded model, or models.
        shapes: The shape of each parameter before sharding.
        report: Called once with a sentence about a fault that is certain.
    """

    def __init__(
        self,
        session: Recording,
        model: nn.Module,
        shapes: Iterable[tuple[int, ...]],
        report: Callable[[str], None],
    ) -> None:
        self._session = session
        self._model = model
        self._shapes = Counter(shapes)
        self._report = report
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, OptimizerSeen] = (
            WeakKeyDictionary()
        )
        self._seen = TrainingSeen()
        self._mean: tuple[int, float, str] | None = None
        """The tokens, the value and the line of the last mean since the last backward."""
        self._is_over = False
        self._has_news = False

    def take_news(self) -> TrainingSeen | None:
        """What was observed until now; None: nothing since the last call."""
        if not self._has_news:
            return None
        self._has_news = False
        return self._seen.model_copy(update={"optimizers": list(self._optimizers.values())})

    def _observes(self) -> bool:
        return not self._is_over and self._session.active and self._session.step < _STEPS

    def _quietly(self, observe: Callable[[], None]) -> None:
        if not self._observes():
            return
        try:
            observe()
        except Exception as error:
            self._is_over = True
            self._session.problem(f"The training is not checked: {type(error).__name__}.")

    # --- the optimizer

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Observe the tensors of an optimizer that is about to step."""
        self._quietly(lambda: self._see_optimizer(optimizer))

    def _see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if len(self._optimizers) >= _OPTIMIZERS and optimizer not in self._optimizers:
            self._optimizers.clear()
            self._is_over = True
            return
        own = {id(each): each for each in self._model.parameters() if each.requires_grad}
        tensors = [each for group in optimizer.param_groups for each in group["params"]]
        shapes = Counter(tuple(each.shape) for each in tensors)
        before = self._optimizers.get(optimizer)
        with_gradient = sum(each.grad is not None for each in tensors)
        seen = OptimizerSeen(
            place=find_calling_line(sys._getframe(1)),
            num_steps=1 + (before.num_steps if before else 0),
            num_tensors=len(tensors),
            num_of_model=sum(id(each) in own for each in tensors),
            num_with_gradient=max(with_gradient, before.num_with_gradient if before else 0),
            num_alike=sum((shapes & self._shapes).values()),
        )
        self._optimizers[optimizer] = seen
        of_model = sum(each.grad is not None for each in own.values())
        known = {"num_trainable": len(own), "num_with_gradient": of_model}
        self._seen = self._seen.model_copy(update=known)
        self._has_news = True
        is_stale = not (seen.num_of_model or seen.num_with_gradient) and of_model
        if is_stale and seen.num_alike == seen.num_tensors and before is None:
            self._report(
                f"The optimizer updates no parameter of the model ({seen.place}): its "
                f"{seen.num_tensors} tensors are those of the model before it was sharded. Create "
                "the optimizer after the model is sharded."
            )

    # --- batches

    def note_batch(self, batch: Any) -> None:
        """Observe a batch that a DataLoader gives to the training thread."""
        self._quietly(lambda: self._see_batch(batch))

    def _see_batch(self, batch: Any) -> None:
        if len(self._seen.batches) >= _BATCHES:
            return
        digest, count = 0, 0
        for content in _first_values(batch):
            digest, count = zlib.crc32(content, digest), count + 1
            if count == _TENSORS:
                break
        if count:
            self._seen.batches.append(BatchSeen(step=self._session.step, digest=digest))
            self._has_news = True

    # --- the loss

    def attach(self, patches: Patches) -> None:
        """Observe the means of cross entropies."""
        original = nn.functional.cross_entropy

        @functools.wraps(original)
        def cross_entropy(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if not torch.compiler.is_compiling() and self._observes():
                self._quietly(lambda: self._see_mean(args, options, result))
            return result

        patches.set_attribute(nn.functional, "cross_entropy", cross_entropy)

    def _see_mean(self, args: Any, options: Any, result: Any) -> None:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = {**dict(zip(names, args, strict=False)), **options}
        target: Any = given.get("target")
        ignored = given.get("ignore_index", -100)
        is_mean = given.get("reduction", "mean") == "mean" and given.get("weight") is None
        if not (is_mean and _is_plain(target) and _is_plain(result) and result.requires_grad):
            return
        if target.is_floating_point():  # probabilities of classes
            return
        count = int((target.detach().numpy() != ignored).sum())
        value = float(result.detach())
        place = find_calling_line(sys._getframe(1))
        # Of several means before one backward, none is known to be the loss.
        self._mean = (0, 0.0, "") if self._mean is not None else (count, value, place)

    def before_backward(self, root: Any) -> None:
        """Observe the value that a backward starts from; None: it is unknown."""
        if self._mean is not None:
            self._quietly(lambda: self._see_backward(root))
            self._mean = None

    def _see_backward(self, root: Any) -> None:
        assert self._mean is not None
        count, value, place = self._mean
        if not (count and value) or not _is_plain(root) or root.numel() != 1:
            return
        session = self._session
        self._seen.losses.append(
            LossSeen(
                step=session.step,
                microbatch=session.microbatch,
                num_tokens=count,
                scale=float(root.detach()) / value,
                place=place,
            )
        )
        self._has_news = True


def _is_plain(tensor: Any) -> bool:
    """Whether its values can be read without waiting: a plain tensor on the CPU."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def _first_values(batch: Any) -> Iterator[bytes]:
    """The first bytes of each plain tensor with different values, in order."""
    if isinstance(batch, torch.Tensor):
        if _is_plain(batch) and batch.is_contiguous() and batch.numel() > 1:
            flat = batch.detach().view(-1)[: _BYTES // batch.element_size()]
            content = flat.view(torch.uint8).numpy().tobytes()
            if content != content[: batch.element_size()] * len(flat):
                yield content
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _first_values(each)
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _first_values(each)
