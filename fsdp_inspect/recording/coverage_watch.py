"""Watch in the first updates which parameters the optimizers hold, and which get gradients."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_inspect.recording.accumulation_watch import EVERY, Mark, extend, mark_of, state_of
from fsdp_inspect.recording.tensors import local_part
from fsdp_inspect.recording.torch_api.ddp import BucketHandle
from fsdp_inspect.recording.torch_api.optimizers import updated_tensors
from fsdp_inspect.trace.correctness import CoverageSeen, StreakSeen

if TYPE_CHECKING:
    from fsdp_inspect.recording.units import UnitHandle

_OPTIMIZERS = 4
_NAMES = 64
"""The most names that are kept."""


class CoverageWatch:
    """Compares the parameters of a model with those that the optimizers hold.

    Args:
        model: The recorded model, or models.
        units: Its units.
        graph_units: The units whose first forward kept a graph; the set grows.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[UnitHandle], graph_units: set[int]
    ) -> None:
        self._model = model
        self._units = units
        self._graph_units = graph_units
        self.seen = CoverageSeen()
        self._held: set[int] = set()
        self._known: dict[int, int] = {}
        """The number of tensors of each optimizer that has stepped, by its id."""
        self._with_gradient: set[int] = set()
        self._states: dict[int, Mark] = {}
        """Parameters that no optimizer held at the last update."""
        self._changed: set[int] = set()
        """Those of them that changed all the same."""
        self._used: dict[int, Mark] = {}
        """The gradients that an update has used since the last backward, by parameter."""
        self._has_closure = False
        """Whether a backward ran in the update, as for LBFGS."""
        self._with_state: set[tuple[int, ...]] = set()
        """The tensors for which an optimizer has left state, as in `_tensors_of`."""
        self._num_looks = 0
        self._looked_at: set[int] = set()
        """The ids of the optimizers whose units were looked at."""
        self._streaks: dict[int, StreakSeen] = {}
        """See `LateSeen.units_without`."""

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer, or one with these tensors, has not stepped before."""
        return self._known.get(id(optimizer)) != _count_tensors(optimizer)

    @property
    def units_without(self) -> dict[str, StreakSeen]:
        """See `LateSeen.units_without`."""
        return {str(index): each for index, each in self._streaks.items() if each.number}

    def before_backward(self) -> None:
        """Forget which gradients an update has used: a backward changes them."""
        self._used.clear()
        self._has_closure = True

    def hold(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Note the parameters that an optimizer holds, and return them."""
        own = updated_tensors(optimizer)
        self._held |= {id(each) for each in own}
        return own

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, *, is_late: bool = False) -> None:
        """Look at the parameters that an optimizer is about to update.

        `is_late`: after the first updates, when backwards are no longer seen.
        """
        self._known[id(optimizer)] = _count_tensors(optimizer)
        if is_late:
            self._used.clear()
        self._has_closure = False
        begins_again = not _has_state(optimizer) and _tensors_of(optimizer) in self._with_state
        own = self.hold(optimizer)
        # The model of a unit that stays unsharded has other parameters than the optimizer.
        self._with_gradient |= {id(each) for each in own if each.grad is not None}
        repeated = _reads_gradients(type(optimizer)) and sum(
            each.grad is not None and self._used[id(each)] == mark_of(each.grad)
            for each in own
            if id(each) in self._used
        )
        missing, names = [], []
        for name, each in self._model.named_parameters():
            if not each.requires_grad:
                continue
            if each.grad is not None:
                self._with_gradient.add(id(each))
            if id(each) in self._held:
                continue
            state = state_of(each)
            if self._states.setdefault(id(each), state) != state:
                self._changed.add(id(each))
            is_empty = not local_part(each).numel()  # FSDP1 gives other ranks all its values
            is_trained = id(each) in self._with_gradient or is_empty
            if is_trained and id(each) not in self._changed:
                missing.append(each)
                names.append(name)
        self.seen = CoverageSeen(
            # Of later updates, only the first one of an optimizer is seen.
            num_updates=self.seen.num_updates + (not (is_late and begins_again)),
            num_repeated=self.seen.num_repeated + (repeated > 0),
            num_without_state=self.seen.num_without_state + (begins_again and not is_late),
            missing=names[:_NAMES],
            num_missing=len(missing),
            missing_values=sum(each.numel() for each in missing),
            held_values=self._count_held() if missing else 0,
            units_without=self._units_without(),
            unreduced=self._find_unreduced()[:_NAMES],
        )

    def _find_unreduced(self) -> list[str]:
        buckets = [each for each in self._units if isinstance(each, BucketHandle)]
        known = {id(each) for bucket in buckets for each in bucket.local_parameters}
        return [
            name
            for wrapper in {id(each.wrapper): each.wrapper for each in buckets}.values()
            for name, each in wrapper.module.named_parameters()
            if each.requires_grad and id(each) in self._held & self._with_gradient - known
            if name not in wrapper.parameters_to_ignore
        ]

    def look_at_units(self, optimizer: torch.optim.Optimizer, step: int, *, is_early: bool) -> None:
        """Note which units of an optimizer have no gradient, in early updates and one of five."""
        self._num_looks += 1
        if not is_early and self._num_looks % EVERY:
            return
        self._looked_at.add(id(optimizer))
        if len(self._looked_at) > _OPTIMIZERS:  # such as one for each parameter
            return
        own = {id(each) for each in updated_tensors(optimizer)}
        has_gradient = {}
        for index in self._graph_units:
            trained = self._trained(index)
            if trained and own.issuperset(map(id, trained)):
                has_gradient[index] = any(each.grad is not None for each in trained)
        if any(has_gradient.values()):
            for index, has in has_gradient.items():
                self._streaks[index] = extend(self._streaks.get(index, StreakSeen()), not has, step)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that an update has used, and whether it left state."""
        if _has_state(optimizer):
            self._with_state.add(_tensors_of(optimizer))
        if self._has_closure or not _reads_gradients(type(optimizer)):
            return
        self._used |= {
            id(each): mark_of(each.grad)
            for group in optimizer.param_groups
            for each in group["params"]
            if each.grad is not None
        }

    def _count_held(self) -> int:
        trainable = (each for each in self._model.parameters() if each.requires_grad)
        return sum(each.numel() for each in trainable if id(each) in self._held)

    def _units_without(self) -> list[int]:
        """Units that ran with a graph, are held by an optimizer and never got a gradient."""
        found = []
        for index in sorted(self._graph_units):
            trained = {id(each) for each in self._trained(index)}
            if trained and trained <= self._held and not self._with_gradient & trained:
                found.append(index)
        return found

    def _trained(self, index: int) -> list[nn.Parameter]:
        """The parameters of a unit that get gradients, as the optimizers hold them."""
        own = self._units[index].local_parameters if index < len(self._units) else []
        return [each for each in own if each.requires_grad]


def _reads_gradients(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a method of a class of optimizers, except `zero_grad`, has the name `grad`.

    A proximal step, a decay or a projection may be one without it.
    """
    own = kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]
    codes: list[CodeType] = [
        inspect.unwrap(each).__code__
        for base in own
        for name, each in vars(base).items()
        if inspect.isfunction(each) and name != "zero_grad"
    ]
    for code in codes:
        if "grad" in code.co_names:
            return True
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return not codes


def _count_tensors(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _tensors_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """The ids of the first tensor of each group, and the number of all."""
    firsts = (id(each) for group in optimizer.param_groups for each in group["params"][:1])
    return _count_tensors(optimizer), *firsts


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    return any(optimizer.state.values())
