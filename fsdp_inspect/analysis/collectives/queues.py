"""Which collective stood ahead of another on its communicator, and when did its own turn come?

Collectives of one process group run one after the other, in the order in which the host issued
them, whatever streams they were issued on (NCCL; gloo as far as one context has one thread to
spare). The event that marks a start lies on the stream that issues, so a collective that queues
behind another one seems to run: its turn comes when the one ahead has ended.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.tables import EventTable

NOTHING_AHEAD = -1
"""The position of the collective ahead where there is none."""
_LONG_AGO = np.iinfo(np.int64).min // 4
_GROUP_BITS = 16
"""What the number of a process group takes."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The place of each collective in the queue of its communicator; arrays of shape (n,)."""

    ahead: NDArray[np.int64]
    """Position of the collective right ahead of it, or `NOTHING_AHEAD`."""
    ahead_end_ns: NDArray[np.int64]
    """When the one ahead ended; long ago where there is none."""
    same_stream_end_ns: NDArray[np.int64]
    """When the last one before it on its own stream and communicator ended: the order of a stream
    holds with any number of communicators."""
    turn_ns: NDArray[np.int64]
    """From when on its own bytes can have travelled: its start, or the end of the one ahead."""


def queue_up(collectives: EventTable, *, apart: NDArray[np.integer] | None = None) -> Queue:
    """The queues of all communicators of one rank.

    Args:
        collectives: Collectives of one rank, in any order. One without a process group is alone on
            a communicator of its own. One that ended before the one issued before it did was not
            queued behind it: the backend runs several at a time.
        apart: Shape (n,), not negative. Where two differ in it neither is ahead of the other, as
            in steps that are looked at one by one.
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
    """Write into `previous` the member of the same key that comes before, by `order`."""
    by_key = order[np.argsort(keys[order], kind="stable")]
    same = keys[by_key[1:]] == keys[by_key[:-1]]
    previous[by_key[1:][same]] = by_key[:-1][same]


def _ended_before(
    collectives: EventTable, previous: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The predecessors that ended no later than their successors, and their ends."""
    if len(collectives) == 0:
        return previous, np.empty(0, dtype=np.int64)
    ends = collectives.end_ns[previous]
    queued = (previous != NOTHING_AHEAD) & (ends <= collectives.end_ns)
    return np.where(queued, previous, NOTHING_AHEAD), np.where(queued, ends, _LONG_AGO)
