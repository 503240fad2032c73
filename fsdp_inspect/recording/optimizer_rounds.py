"""Decide which optimizer ends a step when several optimizers train.

A step is one round: every optimizer has stepped at least once. If the optimizers are not given,
they are learned: an optimizer that steps for the first time joins the round and does not end it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch

MOST_STEPS = 64
"""An optimizer that does not step while another one steps this often leaves the round."""


class OptimizerRound:
    """The optimizers of a training, and those that have stepped in this round.

    Args:
        optimizers: The optimizers of the training; None: learn them.
        note: Called with a sentence if an optimizer leaves the round.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        note: Callable[[str], None],
    ) -> None:
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet(optimizers or ())
        self._learns = optimizers is None
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The number of steps of each optimizer in this round."""
        self._note = note
        self.has_grown = False
        """Whether an optimizer joined in this round, which makes it longer than the others."""

    def is_complete(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count a step of an optimizer; True if it completes the round."""
        if optimizer not in self._known:
            is_first = not self._known
            if self._learns:
                self._known.add(optimizer)
            if not is_first:
                self._counts.clear()
                self.has_grown = True
                return False
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        missing = [each for each in self._known if each not in self._counts]
        if missing and self._counts[optimizer] >= MOST_STEPS:
            for each in missing:
                self._known.discard(each)
            self._note(
                f"{len(missing)} of the optimizers did not step while another one stepped "
                f"{MOST_STEPS} times: a step of the run ends without them."
            )
            missing = []
        if not missing:
            self._counts.clear()
        return not missing
