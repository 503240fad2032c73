"""Watch in the first steps whether units compute with parameters from before their last change.

torch gathers a unit only if it was resharded. A unit that stays unsharded keeps its values when the
shards change: the root of a teacher, which no backward reshards, or any unit after
`set_reshard_after_backward(False)`.
"""

from __future__ import annotations

from collections import Counter
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
    """Compares the unsharded parameters of units with their shards before each backward.

    Args:
        units: The units of the model. Only those of FSDP2 are looked at.
        late: Reads the results.
    """

    def __init__(self, units: Sequence[UnitHandle], late: LateValues) -> None:
        own = [(at, unit) for at, unit in enumerate(units) if isinstance(unit, GroupHandle)]
        self._units = sorted(own, key=lambda pair: _is_trained(pair[1]))[:_UNITS]
        self._late = late
        self._versions: dict[int, list[tuple[int, int]]] = {}
        self._num_looks = 0
        self._stale: Counter[int] = Counter()
        self._changed: set[int] = set()

    @property
    def seen(self) -> UnitsSeen:
        """What was seen until now."""
        stale = {str(index): count for index, count in sorted(self._stale.items())}
        return UnitsSeen(num_looks=self._num_looks, stale=stale, changed=sorted(self._changed))

    @torch.no_grad()
    def before_backward(self) -> None:
        """Look at all units; a forward has just run."""
        self._num_looks += 1
        for index, unit in self._units:
            if not _is_trained(unit):
                versions = [versions_of(each) for each in unit.local_parameters]
                if self._versions.setdefault(index, versions) != versions:
                    self._changed.add(index)
            differ = [torch.ne(old, new).any() for old, new in unit.unsharded_and_sharded()]
            if differ:
                self._late.read(torch.stack(differ).any(), partial(self._note, index))

    def _note(self, index: int, is_stale: torch.Tensor) -> None:
        self._stale[index] += bool(is_stale)


def _is_trained(unit: GroupHandle) -> bool:
    return any(each.requires_grad for each in unit.local_parameters)
