"""Find the previous collective on the communicator of each collective, and the start of its turn.

Collectives of one process group run one after the other in the order of issue, on any streams
(NCCL; gloo if a context has one thread). The event that marks a start is on the issuing stream, so
a queued collective seems to run. Its turn starts when the previous collective ends.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.tables import EventTable

NOTHING_AHEAD = -1
"""The value of `Queue.ahead` if there is no previous collective."""
_LONG_AGO = np.iinfo(np.int64).min // 4
_GROUP_BITS = 16
"""Number of bits for the index of a process group."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The place of each collective in the queue of its communicator, as arrays of shape (n,)."""

    ahead: NDArray[np.int64]
    """Position of the previous collective, or `NOTHING_AHEAD`."""
    ahead_end_ns: NDArray[np.int64]
    """End of the previous collective; a very early time if there is none."""
    same_stream_end_ns: NDArray[np.int64]
    """End of the previous collective on the same stream and communicator. A stream has a fixed
    order for any number of communicators."""
    turn_ns: NDArray[np.int64]
    """Moment from which its own bytes can travel: the later of its start and `ahead_end_ns`."""


def queue_up(collectives: EventTable, *, apart: NDArray[np.integer] | None = None) -> Queue:
    """Compute the queues of all communicators of one rank.

    Args:
        collectives: Collectives of one rank, in any order. A collective without a process group has
            its own communicator. A collective was not queued if it ends before the previously
            issued one: the backend runs several at a time.
        apart: Shape (n,), not negative. Collectives with different values are never in one queue,
            for example collectives of steps that are analysed separately.
    """
    nothing = np.full(len(collectives), NOTHING_AHEAD, dtype=np.int64)
    in_group = nothing.copy()
    on_stream = nothing.copy()
    order = np.lexsort((collectives.sequence, collectives.issue_ns))
    order = order[collectives.group[order] >= 0]
    communicator = collectives.group.astype(np.int64)
    if apart is not None:
        communicator = communicator + (apart.astype(np.int64) << _GROUP_BITS)
    _link(in_group, order, communicator)
    _link(on_stream, order, communicator * 256 + collectives.stream)
    ahead, ahead_end_ns = _ended_before(collectives, in_group)
    return Queue(
        ahead=ahead,
        ahead_end_ns=ahead_end_ns,
        same_stream_end_ns=_ended_before(collectives, on_stream)[1],
        turn_ns=np.maximum(collectives.start_ns, ahead_end_ns),
    )


def _link(previous: NDArray[np.int64], order: NDArray[np.int64], keys: NDArray[np.integer]) -> None:
    """Write the previous member with the same key into `previous`, in the order of `order`."""
    by_key = order[np.argsort(keys[order], kind="stable")]
    same = keys[by_key[1:]] == keys[by_key[:-1]]
    previous[by_key[1:][same]] = by_key[:-1][same]


def _ended_before(
    collectives: EventTable, previous: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the predecessors that end no later than their successors, and their ends."""
    if len(collectives) == 0:
        return previous, np.empty(0, dtype=np.int64)
    ends = collectives.end_ns[previous]
    queued = (previous != NOTHING_AHEAD) & (ends <= collectives.end_ns)
    return np.where(queued, previous, NOTHING_AHEAD), np.where(queued, ends, _LONG_AGO)
