"""Follow whether the models train in evaluation mode, in which dropout is off."""

from __future__ import annotations

from torch import nn

from fsdp_inspect.recording.models import Models, class_name_of
from fsdp_inspect.recording.torch_api.modules import BatchNorm, Dropout
from fsdp_inspect.trace.correctness import ModeSeen

_COUNTED = 8
"""Updates in a row are counted until this number."""


class ModeWatch:
    """The mode of each model in the updates of its parameters.

    Args:
        model: The recorded model, or models.
    """

    def __init__(self, model: nn.Module) -> None:
        models = [*model.children()] if isinstance(model, Models) else [model]
        modal = [(each, _changed_by_mode(each)) for each in models]
        self._models = [pair for pair in modal if pair[1]]
        self.seen = [ModeSeen(model=class_name_of(each)) for each, _ in self._models]

    def note_update(self, step: int) -> bool:
        """Note the modes in an update; returns whether something new was seen."""
        has_news = False
        for at, (model, modal) in enumerate(self._models):
            before = self.seen[at]
            if any(each.training and _has_effect(each) for each in modal):
                after = _note_on(before)
            elif before.num_off < _COUNTED:
                after = _note_off(before, step, model, modal)
            else:
                continue
            self.seen[at] = after
            has_news |= after is not before
        return has_news


def _note_on(seen: ModeSeen) -> ModeSeen:
    if seen.since is None and seen.num_on >= _COUNTED:
        return seen
    return ModeSeen(model=seen.model, num_on=seen.num_on + 1)


def _note_off(seen: ModeSeen, step: int, model: nn.Module, modal: list[nn.Module]) -> ModeSeen:
    own = [each for each in modal if _has_effect(each)]
    rates = [each.p for each in own if isinstance(each, Dropout)]
    # While the model is in training mode, frozen statistics are usual.
    is_off = bool(rates or (own and not model.training))
    if not is_off or all(each.grad is None for each in model.parameters()):
        return seen
    return ModeSeen(
        model=seen.model,
        num_on=seen.num_on,
        since=step if seen.since is None else seen.since,
        num_off=seen.num_off + 1,
        num_dropouts=len(rates),
        largest_dropout=max(rates, default=0.0),
        num_batch_norms=len(own) - len(rates),
    )


def _changed_by_mode(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that compute something else in evaluation mode."""
    return [
        each
        for each in model.modules()
        if isinstance(each, Dropout)
        or (isinstance(each, BatchNorm) and each.running_mean is not None)
    ]


def _has_effect(module: nn.Module) -> bool:
    return not isinstance(module, Dropout) or module.p > 0
