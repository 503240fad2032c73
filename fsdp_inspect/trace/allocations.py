"""Define the allocation history of a rank: each allocation and free, in the order of the program.

Arrays have shape (E,), one row for each event. Sizes are the requested bytes, before an allocator's
rounding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

COMPUTE_STREAM = 0
"""The stream of all memory that no other stream allocates."""
ALL_GATHER_STREAM = 1
"""FSDP2 allocates all-gather buffers on its copy-in stream."""
REDUCE_SCATTER_STREAM = 2
"""FSDP2 allocates reduced gradients on its reduce-scatter stream."""


@dataclass(frozen=True, slots=True)
class AllocationHistory:
    """Allocations and frees of one device."""

    storage: Int64Array
    """The storage of each event. A free belongs to the last allocation with the same number."""
    bytes: Int64Array
    """Requested bytes of an allocation, positive; a free is negative, of any size."""
    stream: Int64Array
    """The stream that allocates; a number such as `COMPUTE_STREAM`. Ignored for frees."""
    num_resting: int = 0
    """The first events, which allocate what exists before the step."""

    def __len__(self) -> int:
        return len(self.storage)
