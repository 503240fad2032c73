"""How busy was the link during a collective? Bus bandwidth as nccl-tests defines it.

Message x (N-1)/N / duration for all-gather and reduce-scatter, 2 (N-1)/N for all-reduce, 1 for the
others; N is the size of the group that communicates. It compares with the link's own bandwidth,
whatever the number of ranks.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import EventKind, Method
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable

_RING_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


def bus_factor(kind: int, num_ranks: int) -> float:
    """Bus bytes for each byte of a message; 0 where nothing travels.

    Args:
        kind: An `EventKind`.
        num_ranks: Size of the group that communicates; 0 if there is none.
    """
    if num_ranks < 2 or kind not in _RING_KINDS:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    return 2 * share if kind == EventKind.ALL_REDUCE else share


def bus_bytes_per_s(events: EventTable, groups: Sequence[ProcessGroup]) -> NDArray[np.float64]:
    """Bus bandwidth of each event.

    Args:
        events: Any events.
        groups: The manifest's process groups.

    Returns:
        Shape (len(events),), bytes per second; NaN where nothing travels (not a ring collective,
        an unknown group, a group of one rank, an unknown message, no duration), and where only an
        upper bound of the duration is known (`Method.INFERRED`).
    """
    sizes = {group.index: len(group.ranks) for group in groups}
    group_size = np.array([sizes.get(group, 0) for group in events.group.tolist()], dtype=np.int64)
    duration = events.end_ns - events.start_ns
    moves = np.isin(events.kind, _RING_KINDS) & (group_size > 1) & (duration > 0)
    moves &= (events.bytes >= 0) & (events.method != Method.INFERRED)
    factor = np.where(events.kind == EventKind.ALL_REDUCE, 2.0, 1.0)
    rates = np.full(len(events), np.nan)
    size = group_size[moves]
    rates[moves] = events.bytes[moves] * factor[moves] * (size - 1) / size / duration[moves] * 1e9
    return rates
