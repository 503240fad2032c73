"""Watch in the first steps whether units compute with parameters from before their last change.

torch gathers a unit only if it was resharded. A unit that stays unsharded keeps its values when the
shards change: the root of a teacher, which no backward reshards, or any unit after
`set_reshard_after_backward(False)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch

from fsdp_inspect.recording.late_values import LateValues
from fsdp_inspect.recording.torch_api.autograd import versions_of
from fsdp_inspect.recording.torch_api.fsdp2 import GroupHandle
from fsdp_inspect.recording.units import UnitHandle
from fsdp_inspect.trace.correctness import UnitsSeen

_UNITS = 64
"""Units that are looked at; those without trained parameters first."""


class StaleWatch:
    """Compares unsharded parameters with their shards, before backwards and after updates.

    Args:
        units: The units of the model. Only those of FSDP2 are looked at.
        late: Reads the results.
    """

    def __init__(self, units: Sequence[UnitHandle], late: LateValues) -> None:
        own = [(at, unit) for at, unit in enumerate(units) if isinstance(unit, GroupHandle)]
        self._units = sorted(own, key=lambda pair: _is_trained(pair[1]))[:_UNITS]
        self._late = late
        self._frozen: list[tuple[int, GroupHandle]] = []
        """Units without trained parameters that have not changed."""
        self._versions: dict[int, list[tuple[int, int]]] = {}
        self._num_looks = 0
        self._stale: defaultdict[int, set[int]] = defaultdict(set)
        """The looks that found a unit with old values."""
        self._changed: set[int] = set()
        self._has_news = False

    def take_news(self) -> UnitsSeen | None:
        """What was seen until now; None: nothing new. Changes are seen in all steps."""
        moved = [index for index, unit in self._frozen if self._has_moved(index, unit)]
        if not (moved or self._has_news):
            return None
        self._changed.update(moved)
        self._frozen = [pair for pair in self._frozen if pair[0] not in self._changed]
        self._has_news = False
        stale = {str(index): len(looks) for index, looks in sorted(self._stale.items())}
        return UnitsSeen(num_looks=self._num_looks, stale=stale, changed=sorted(self._changed))

    def _has_moved(self, index: int, unit: GroupHandle) -> bool:
        return index in self._versions and _versions_of(unit) != self._versions[index]

    def before_backward(self) -> None:
        """Look at all units; a forward has just run."""
        if not self._num_looks:
            self._frozen = [pair for pair in self._units if not _is_trained(pair[1])]
            self._versions = {index: _versions_of(unit) for index, unit in self._frozen}
        self._num_looks += 1
        self._has_news = True
        self.after_update()

    @torch.no_grad()
    def after_update(self) -> None:
        """Look at the units that are unsharded."""
        for index, unit in self._units:
            differ = [torch.ne(old, new).any() for old, new in unit.unsharded_and_sharded()]
            if differ:
                keep = partial(self._note, index, self._num_looks)
                self._late.read(torch.stack(differ).any(), keep)

    def _note(self, index: int, look: int, is_stale: torch.Tensor) -> None:
        if is_stale:
            self._stale[index].add(look)
            self._has_news = True


def _is_trained(unit: GroupHandle) -> bool:
    return any(each.requires_grad for each in unit.local_parameters)


def _versions_of(unit: GroupHandle) -> list[tuple[int, int]]:
    return [versions_of(each) for each in unit.local_parameters]
