"""Compute the bus bandwidth of collectives, as nccl-tests defines it.

Bus bandwidth is message x factor / duration. The factor is (N-1)/N for all-gather and
reduce-scatter and 2 (N-1)/N for all-reduce, where N is the size of the process group. Other
collectives have no bus bandwidth here. The result is comparable with the bandwidth of the link
for any number of ranks.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import EventFlag, EventKind
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable

_RING_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


def bus_factor(kind: int, num_ranks: int) -> float:
    """Bus bytes for each byte of a message; 0 if the collective moves no bytes over the link.

    Args:
        kind: An `EventKind`.
        num_ranks: Size of the process group; 0 without a group.
    """
    if num_ranks < 2 or kind not in _RING_KINDS:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    return 2 * share if kind == EventKind.ALL_REDUCE else share


def bus_bytes_per_s(events: EventTable, groups: Sequence[ProcessGroup]) -> NDArray[np.float64]:
    """Compute the bus bandwidth of each event.

    Args:
        events: Any events.
        groups: The manifest's process groups.

    Returns:
        Shape (len(events),), bytes per second. NaN for events that are not ring collectives, for
        an unknown group, a group of one rank, an unknown message or an empty duration, and if
        the duration is only an upper bound (`EventFlag.LATEST_END`).
    """
    sizes = {group.index: len(group.ranks) for group in groups}
    group_size = np.array([sizes.get(group, 0) for group in events.group.tolist()], dtype=np.int64)
    duration = events.end_ns - events.start_ns
    moves = np.isin(events.kind, _RING_KINDS) & (group_size > 1) & (duration > 0)
    moves &= (events.bytes >= 0) & ((events.flags & EventFlag.LATEST_END) == 0)
    factor = np.where(events.kind == EventKind.ALL_REDUCE, 2.0, 1.0)
    rates = np.full(len(events), np.nan)
    size = group_size[moves]
    rates[moves] = events.bytes[moves] * factor[moves] * (size - 1) / size / duration[moves] * 1e9
    return rates
