"""Define the spans of one rank as columns, on the rank's own clock."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Spans:
    """Sorted by lane and start, disjoint inside a lane; arrays of shape (n,)."""

    lane: NDArray[np.int32]
    """Index among the rank's lanes."""
    look: NDArray[np.int8]
    """Index into `LOOKS`."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    event: NDArray[np.int32]
    """Index among the rank's events of the step."""

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def num_bytes(self) -> int:
        """The memory of the columns."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def where(self, mask: NDArray[np.generic] | slice) -> Self:
        """The spans that a mask, an index array or a slice selects."""
        return replace(
            self, **{field.name: getattr(self, field.name)[mask] for field in fields(self)}
        )

    def by_start(self) -> Self:
        """Sort the spans of one lane by start; returns self if they are sorted."""
        if np.all(self.start_ns[1:] >= self.start_ns[:-1]):
            return self
        return self.where(np.argsort(self.start_ns, kind="stable"))

    @classmethod
    def concat(cls, members: Sequence[Self]) -> Self:
        """All spans, in the given order."""
        return cls(
            **{
                field.name: np.concatenate([getattr(member, field.name) for member in members])
                for field in fields(cls)
            }
        )
