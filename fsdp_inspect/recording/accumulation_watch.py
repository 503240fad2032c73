"""Watch between updates how gradients are accumulated and cleared: the first, and then some."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_inspect.recording.tensors import local_part, strided_parts
from fsdp_inspect.recording.torch_api.autograd import versions_of
from fsdp_inspect.recording.torch_api.dispatch import storage_key
from fsdp_inspect.trace.correctness import RoundSeen, StreakSeen, WindowSeen, WindowsSeen

_PARAMETERS = 8
_VALUES = 8
_SPREAD = 64
_UPDATES = 8
_OPTIMIZERS = 4
_USUAL = 4
"""The count of usual updates is stored until this number, and with each short one."""
_SHORT = 8
_COUNTED = 8
_LATER = 3
"""After the first updates, one in so many of these parameters is looked at."""
EVERY = 5
"""Of the later updates, one in so many is looked at: this number meets each of 4 optimizers."""

Mark = tuple[object, ...] | None
"""The storage, the versions and the first values of a gradient; None: there is none."""


@dataclass(slots=True)
class _Round:
    """What happened to a few parameters of an optimizer since its last update."""

    parameters: list[nn.Parameter]
    marks: list[Mark]
    """The gradients after the last backward of these parameters, or after the update."""
    states: list[Mark]
    """The parameters at that moment."""
    before: list[Mark] = field(default_factory=list)
    """The gradients before the backward that runs."""
    num_backwards: int = 0
    num_cleared: int = 0
    num_moved: int = 0
    is_kept: bool = False
    is_blind: bool = False
    """Whether a look could not read values, so that zeros were not seen."""
    num_seen: int = 0
    """Backwards of any parameters."""
    is_stale: bool = False
    """Whether the last of them found gradients of the update before, and left them."""
    rates: list[float] = field(default_factory=list)


class AccumulationWatch:
    """The rounds of each optimizer, from one update to the next."""

    def __init__(self) -> None:
        self.rounds: list[RoundSeen] = []
        self.kept = self.unused = StreakSeen()
        """See `LateSeen`."""
        self._chosen: WeakKeyDictionary[torch.optim.Optimizer, list[nn.Parameter]] = (
            WeakKeyDictionary()
        )
        self._num_updates = 0
        self._open: WeakKeyDictionary[torch.optim.Optimizer, _Round] = WeakKeyDictionary()
        self._num_batches = 0
        self._loaders: set[int] = set()
        self._is_over = False

    def note_batch(self, loader: int) -> None:
        """Count a batch of a DataLoader."""
        self._num_batches += 1
        self._loaders.add(loader)

    @torch.no_grad()
    def before_backward(self, *, may_read: bool) -> None:
        """Look at the gradients that the last backward left; `may_read` their values, too."""
        for each in self._open.values():
            gradients = [parameter.grad for parameter in each.parameters]
            each.before = [mark_of(gradient) for gradient in gradients]
            each.is_blind |= not may_read
            if may_read and all(map(_is_zero, gradients)):
                each.before = [None] * len(gradients)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Look at the gradients that this backward changed."""
        for optimizer, own in self._open.items():
            if not own.before:
                continue
            marks = [mark_of(parameter.grad) for parameter in own.parameters]
            is_touched = marks != own.before
            own.num_seen += 1
            own.is_stale = not is_touched and any(marks) and marks == own.marks
            if is_touched or len(self._open) == 1:
                rate = optimizer.param_groups[0].get("lr")
                own.rates += [float(rate)] if isinstance(rate, int | float) else []
            if is_touched:
                self._count(own, marks)

    @staticmethod
    def _count(own: _Round, marks: list[Mark]) -> None:
        is_kept = own.before == own.marks and any(own.marks)
        states = [state_of(each) for each in own.parameters]
        if own.num_backwards == 0:
            own.is_kept = is_kept
        elif any(own.marks) and not any(own.before):
            own.num_cleared += 1
        own.num_moved += states != own.states
        own.num_backwards += 1
        own.marks, own.states = marks, states

    @torch.no_grad()
    def after_update(self, optimizer: torch.optim.Optimizer, step: int, *, is_early: bool) -> None:
        """Close the round of an optimizer, and open its next one.

        `is_early`: whether the step is one of the first.
        """
        if self._is_over:
            return
        own = self._open.pop(optimizer, None)
        if own is not None and not own.is_blind:
            if is_early and len(self.rounds) < _UPDATES:
                self.rounds.append(self._describe(own, step))
            is_stale = own.is_stale and not own.num_backwards
            is_unused = is_stale or next(_with_gradient(optimizer), None) is None
            if own.num_seen and any(each.requires_grad for each in own.parameters):
                is_kept = own.num_backwards > 0 and own.is_kept and not own.num_cleared
                self.kept = extend(self.kept, is_kept, step)
                self.unused = extend(self.unused, is_unused, step)
        self._num_batches = 0
        self._loaders.clear()
        if len(self._open) >= _OPTIMIZERS:
            self._is_over = True
            self._open.clear()
            return
        self._num_updates += 1
        is_early = is_early and len(self.rounds) < _UPDATES
        if not is_early and self._num_updates % EVERY:
            return
        chosen = self._chosen.get(optimizer, [])[::_LATER]
        if is_early or not chosen:
            held = [*_with_gradient(optimizer)]
            chosen = held[:: max(len(held) // _PARAMETERS, 1)][:_PARAMETERS]
            self._chosen[optimizer] = chosen
        if chosen:
            marks = [mark_of(each.grad) for each in chosen]
            self._open[optimizer] = _Round(chosen, marks, [state_of(each) for each in chosen])

    def _describe(self, own: _Round, step: int) -> RoundSeen:
        return RoundSeen(
            step=step,
            num_backwards=own.num_backwards,
            num_batches=self._num_batches,
            num_loaders=len(self._loaders),
            num_cleared=own.num_cleared,
            num_moved=own.num_moved,
            is_kept=own.is_kept,
            num_rates=len(set(own.rates)),
            num_passes=len(own.rates),
        )


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if each.grad is not None)


def extend(seen: StreakSeen, is_one: bool, step: int) -> StreakSeen:
    """The streak after another update."""
    if is_one:
        since = step if seen.since is None else seen.since
        return StreakSeen(since=since, number=seen.number + 1, num_before=seen.num_before)
    if seen.since is None and seen.num_before >= _COUNTED:
        return seen
    return StreakSeen(num_before=min(seen.num_before + seen.number + 1, _COUNTED))


class RateWatch:
    """The learning rates of updates, as far as the host knows them."""

    def __init__(self) -> None:
        self.idle = StreakSeen()
        self.last: dict[int, float] = {}
        """The largest one in each of the last steps."""

    def note_update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Note the rates of an update."""
        rates = [rate_on_host(group.get("lr")) for group in optimizer.param_groups]
        known = [each for each in rates if each is not None]
        self.idle = extend(self.idle, len(known) == len(rates) and not any(known), step)
        if known:
            self.last[step] = max(known)
            if len(self.last) > _COUNTED:
                del self.last[next(iter(self.last))]


def rate_on_host(rate: object) -> float | None:
    """A finite learning rate; None: it is another one, or on a device."""
    is_known = isinstance(rate, int | float)
    if isinstance(rate, torch.Tensor):
        is_known = rate.device.type == "cpu"
    number = float(rate) if is_known else math.nan  # type: ignore[arg-type]
    return number if math.isfinite(number) else None


class WindowWatch:
    """The backwards of each update of a training with one optimizer."""

    def __init__(self) -> None:
        self.seen = WindowsSeen()
        self._optimizer: int | None = None
        """The id of the optimizer."""
        self._is_over = False
        self._number = self._num_batches = 0
        self._scale = 0.0
        self._ends_pass = self._was_short = False

    @property
    def is_open(self) -> bool:
        """Whether the scale of the next mean is worth reading."""
        return not self._is_over and len(self.seen.short) < _SHORT

    def stop(self) -> None:
        """Observe no further window, because the scale of a loss is not known."""
        self._is_over = True

    def note_batch(self) -> None:
        """Count a batch of a DataLoader."""
        self._num_batches += 1

    def note_end_of_pass(self) -> None:
        """Note that a pass over a DataLoader has ended: before the last update, or right after."""
        if self._number or self._num_batches:
            self._ends_pass = True
        elif self._was_short:
            *others, last = self.seen.short
            last = last.model_copy(update={"ends_pass": True})
            self.seen = self.seen.model_copy(update={"short": [*others, last]})

    def note_scale(self, scale: float) -> None:
        """Add the gradient of a mean loss."""
        self._scale += scale if math.isfinite(scale) else 0.0

    def note_backward(self) -> None:
        """Count a backward."""
        self._number += 1

    def note_update(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Close the window of an update; returns whether something new was seen."""
        number, scale = self._number, self._scale
        has_all = self._num_batches <= number  # else a batch had no backward
        ends = self._ends_pass and has_all
        self._number, self._num_batches, self._scale = 0, 0, 0.0
        self._ends_pass = self._was_short = False
        self._optimizer = self._optimizer or id(optimizer)
        self._is_over |= id(optimizer) != self._optimizer
        seen = self.seen
        if self._is_over or number == 0:
            return False
        if number > seen.num_backwards:
            self.seen = WindowsSeen(num_backwards=number, num_usual=1, scale=scale)
        elif number == seen.num_backwards:
            known = {"num_usual": seen.num_usual + 1, "scale": scale}
            self.seen = seen.model_copy(update=known)
        elif len(seen.short) < _SHORT:
            short = WindowSeen(step=step, num_backwards=number, scale=scale, ends_pass=ends)
            self.seen = seen.model_copy(update={"short": [*seen.short, short]})
            self._was_short = has_all
            return True
        return self.seen.num_usual <= _USUAL


def mark_of(gradient: torch.Tensor | None) -> Mark:
    """What changes when a gradient is replaced, or changed in place.

    FSDP1 adds to a gradient through `.data`, which the versions do not show: the values do, on CPU.
    """
    if gradient is None:
        return None
    local = strided_parts(local_part(gradient))[-1]
    return storage_key(local.untyped_storage()), *versions_of(gradient), *_first_values(local)


def state_of(parameter: torch.Tensor) -> Mark:
    """What changes when a parameter is changed in place, also through `.data` on CPU."""
    local = local_part(parameter)
    return *versions_of(parameter), *_read(local, max(local.numel() // _SPREAD, 1), _SPREAD)


def _first_values(local: torch.Tensor) -> list[float]:
    """A few values; none if reading them would wait or copy."""
    return _read(local, 1, _VALUES)


def _read(local: torch.Tensor, distance: int, most: int) -> list[float]:
    """Values at equal distances; none if reading them would wait or copy, or if torch cannot."""
    is_readable = type(local) in (torch.Tensor, torch.nn.Parameter)  # float8 weights have no values
    is_readable = is_readable and local.device.type == "cpu" and local.is_contiguous()
    is_readable = is_readable and local.untyped_storage().size() > 0  # FSDP1 frees storages
    return local.detach().view(-1)[::distance][:most].tolist() if is_readable else []


def _is_zero(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is absent, or its first values on the CPU are 0."""
    if gradient is None:
        return True
    values = _first_values(strided_parts(local_part(gradient))[-1])
    return bool(values) and not any(values)
