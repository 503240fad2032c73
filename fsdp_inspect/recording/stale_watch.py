"""Watch in the first steps whether units compute with parameters from before their last change.

torch gathers a unit only if it was resharded. A unit that stays unsharded keeps its values when the
shards change: the root of a teacher, which no backward reshards, or any unit after
`set_reshard_after_backward(False)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.tensors import COMPARED_VALUES, local_part
from fsdp_inspect.recording.torch_api.autograd import version_of
from fsdp_inspect.recording.torch_api.overrides import unseen
from fsdp_inspect.recording.units import UnitHandle
from fsdp_inspect.trace.correctness import UnitsSeen

if TYPE_CHECKING:
    from fsdp_inspect.recording.torch_api.fsdp2 import GroupHandle

_UNITS = 16
"""Units that are looked at; those without trained parameters first."""


class StaleWatch:
    """Compares unsharded parameters with their shards, before backwards and after updates.

    It also notes which units without trained parameters change: by their values in the first steps
    and at the end, and by the version of their first parameter in between.

    Args:
        units: The units of the model. Only those of FSDP2 are looked at.
        late: Reads the results.
    """

    def __init__(self, units: Sequence[UnitHandle], late: LateValues) -> None:
        own = [
            (at, cast("GroupHandle", unit))
            for at, unit in enumerate(units)
            if hasattr(type(unit), "unsharded_and_sharded")  # another torch may lack the module
        ]
        self._units = sorted(own, key=lambda pair: _is_trained(pair[1]))[:_UNITS]
        self._late = late
        self._frozen: dict[int, _Frozen] = {}
        """Units without trained parameters that have not changed."""
        self._num_looks = 0
        self._stale: defaultdict[int, set[int]] = defaultdict(set)
        """The looks that found a unit with old values."""
        self._changed: set[int] = set()
        self._has_news = False

    @unseen
    def take_news(self) -> UnitsSeen | None:
        """What was seen until now; None: nothing new."""
        for index, frozen in list(self._frozen.items()):
            if version_of(frozen.parameter) != frozen.version:
                self._note_change(index)
        if not self._has_news:
            return None
        self._has_news = False
        stale = {str(index): len(looks) for index, looks in sorted(self._stale.items())}
        return UnitsSeen(num_looks=self._num_looks, stale=stale, changed=sorted(self._changed))

    @torch.no_grad()
    def before_backward(self) -> None:
        """Look at all units; a forward has just run."""
        if self._num_looks:
            self.look_at_frozen()
        else:
            for index, unit in self._units:
                if unit.local_parameters and not _is_trained(unit):
                    first = unit.local_parameters[0]
                    self._frozen[index] = _Frozen(first, version_of(first), _sample(first).clone())
        self._num_looks += 1
        self._has_news = True
        self.after_update()

    @unseen
    @torch.no_grad()
    def look_at_frozen(self) -> None:
        """Compare the values of units without trained parameters with the first ones."""
        self._read(
            {
                index: torch.ne(_sample(frozen.parameter), frozen.values).any()
                for index, frozen in self._frozen.items()
            },
            self._note_change,
        )

    @torch.no_grad()
    def after_update(self) -> None:
        """Look at the units that are unsharded."""
        differ = {}
        for index, unit in self._units:
            pairs = unit.unsharded_and_sharded()
            if pairs:
                differ[index] = torch.stack([torch.ne(old, new).any() for old, new in pairs]).any()
        self._read(differ, partial(self._note_stale, self._num_looks))

    def _read(self, differ: dict[int, torch.Tensor], note: Callable[[int], None]) -> None:
        """Call `note` with each unit whose values differ, when they have arrived."""

        def keep(found: torch.Tensor) -> None:
            for index, is_other in zip(differ, found.tolist(), strict=True):
                if is_other:
                    note(index)

        if differ:
            self._late.read(torch.stack(list(differ.values())), keep)

    def _note_stale(self, look: int, index: int) -> None:
        self._stale[index].add(look)
        self._has_news = True

    def _note_change(self, index: int) -> None:
        self._changed.add(index)
        self._frozen.pop(index, None)
        self._has_news = True


@dataclass(frozen=True, slots=True)
class _Frozen:
    """The first parameter of a unit without trained parameters, at the first look."""

    parameter: nn.Parameter
    version: int
    values: torch.Tensor


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    return local_part(parameter).flatten()[:COMPARED_VALUES]


def _is_trained(unit: GroupHandle) -> bool:
    return any(each.requires_grad for each in unit.local_parameters)
