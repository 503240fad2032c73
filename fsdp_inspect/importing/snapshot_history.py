"""Convert the trace of a snapshot to an allocation history.

Blocks that existed before the trace come first, in the order of their addresses, because the order
in which they were allocated is unknown. A block that another stream still uses counts until its
free is complete. Each pair of stream and memory pool is one stream of the history.
"""

from collections.abc import Iterator

import numpy as np

from fsdp_inspect.importing.snapshot_contents import Action, BlockState, DeviceMemory
from fsdp_inspect.trace.allocations import MAX_EVENTS, MAX_STREAM, AllocationHistory


def read_history(device: DeviceMemory) -> AllocationHistory | None:
    """The allocation history of a device; None without a trace, or if it is too long."""
    trace = device.trace
    if device.is_profile or not len(trace) or len(trace) + len(device.blocks.size) > MAX_EVENTS:
        return None
    streams = _Streams()
    resting = [
        (address, size, streams.number(stream, pool))
        for address, size, stream, pool in sorted(_blocks_before(device))
    ]
    rows = [*resting, *_events(device, streams)]
    if len(streams.numbers) > MAX_STREAM:
        return None
    storage, num_bytes, on_stream = np.array(rows, dtype=np.int64).reshape(-1, 3).T.copy()
    return AllocationHistory(storage, num_bytes, on_stream, num_resting=len(resting))


class _Streams:
    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], int] = {(0, 0): 0}

    def number(self, stream: int, pool: int) -> int:
        return self.numbers.setdefault((stream, pool), len(self.numbers))


def _blocks_before(device: DeviceMemory) -> Iterator[tuple[int, int, int, int]]:
    """Address, requested bytes, stream and pool of each block that existed before the trace."""
    trace, blocks, segments = device.trace, device.blocks, device.segments
    seen: set[int] = set()
    columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool)
    for action, *row in zip(*(column.tolist() for column in columns), strict=True):
        if action > Action.FREE_COMPLETED or row[0] in seen:
            continue
        seen.add(row[0])
        if action != Action.ALLOC and row[1] > 0:
            yield row[0], row[1], row[2], row[3]
    for block in np.flatnonzero(blocks.state != BlockState.INACTIVE).tolist():
        address, segment = int(blocks.address[block]), int(blocks.segment[block])
        if address not in seen:
            size = int(blocks.requested[block]) or int(blocks.size[block])
            yield address, size, int(segments.stream[segment]), int(segments.pool[segment])


def _events(device: DeviceMemory, streams: _Streams) -> Iterator[tuple[int, int, int]]:
    trace = device.trace
    completes = bool((trace.action == Action.FREE_COMPLETED).any())
    frees = Action.FREE_COMPLETED if completes else Action.FREE_REQUESTED
    columns = (trace.action, trace.address, trace.size, trace.stream, trace.pool)
    for action, address, size, stream, pool in zip(*(c.tolist() for c in columns), strict=True):
        if action == Action.ALLOC and size > 0:
            yield address, size, streams.number(stream, pool)
        elif action == frees:
            yield address, -1, 0
