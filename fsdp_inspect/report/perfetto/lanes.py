"""Assign each slice to a track and to a lane of the track.

Perfetto draws one row of slices per thread, and draws nested slices below their parent. Two slices
that overlap without being nested cannot share a row, so they use different lanes of their track.
Each lane is a thread, with a number that sorts it.
"""

from dataclasses import dataclass, field

from fsdp_inspect.trace.codes import NamedCode

RANK_PID = 1000
"""Process number of rank 0; the ranks follow."""
ABOUT_PID = 1
"""Process number of the facts about the whole trace."""
_LANES_PER_TRACK = 400
_TRACKS_PER_RANK = 20


class RankTrack(NamedCode):
    """The tracks of a rank, from top to bottom."""

    STEP = 0
    DATA_AND_OPTIMIZER = 1
    HOST_ISSUE = 2
    MAIN_THREAD = 3
    COMPUTE_STREAM = 4
    ALL_GATHER_COPY_IN = 5
    ALL_GATHER = 6
    REDUCE_SCATTER = 7
    ALL_REDUCE = 8
    OTHER_COLLECTIVES = 9
    MEMORY_COPIES = 10
    GARBAGE_COLLECTION = 11


TRACK_NAMES = {
    RankTrack.STEP: "step",
    RankTrack.DATA_AND_OPTIMIZER: "data, optimizer",
    RankTrack.HOST_ISSUE: "host issue (moments)",
    RankTrack.MAIN_THREAD: "main thread",
    RankTrack.COMPUTE_STREAM: "compute stream",
    RankTrack.ALL_GATHER_COPY_IN: "all-gather copy-in",
    RankTrack.ALL_GATHER: "all-gather",
    RankTrack.REDUCE_SCATTER: "reduce-scatter",
    RankTrack.ALL_REDUCE: "all-reduce",
    RankTrack.OTHER_COLLECTIVES: "other collectives",
    RankTrack.MEMORY_COPIES: "memory copies by the device",
    RankTrack.GARBAGE_COLLECTION: "garbage collection",
}

NESTED_TRACKS = frozenset(
    {RankTrack.STEP, RankTrack.DATA_AND_OPTIMIZER, RankTrack.MAIN_THREAD, RankTrack.COMPUTE_STREAM}
)
"""Tracks on which slices may be nested: a unit's forward is inside its parent's forward."""


def pid_of(rank: int) -> int:
    """Process number of a rank."""
    return RANK_PID + rank


@dataclass(slots=True)
class _Lane:
    """One row of slices."""

    open_ends: list[int] = field(default_factory=list)
    latest_start: int = -(1 << 62)

    def takes(self, start: int, end: int, *, may_nest: bool) -> bool:
        """Add the slice to this lane if it fits; returns whether it fits."""
        if start < self.latest_start:
            return False
        self.latest_start = start
        while self.open_ends and self.open_ends[-1] <= start:
            self.open_ends.pop()
        if self.open_ends and (not may_nest or end > self.open_ends[-1]):
            return False
        if end > start:
            self.open_ends.append(end)
        return True


class RankLanes:
    """The lanes of one rank; slices are placed in the order of their starts, long ones first."""

    def __init__(self, rank: int) -> None:
        self.pid = pid_of(rank)
        self._lanes: dict[RankTrack, list[_Lane]] = {}

    def place(self, track: RankTrack, start: int, end: int) -> tuple[int, str | None] | None:
        """The thread for a slice, and the thread's name if this is its first slice.

        None if too many slices overlap on the track to be readable.
        """
        lanes = self._lanes.setdefault(track, [])
        may_nest = track in NESTED_TRACKS
        for number, lane in enumerate(lanes):
            if lane.takes(start, end, may_nest=may_nest):
                return self._tid(track, number), None
        number = len(lanes)
        if number == _LANES_PER_TRACK:
            return None
        lanes.append(_Lane())
        lanes[number].takes(start, end, may_nest=may_nest)
        more = f" ({number + 1})" if number else ""
        return self._tid(track, number), TRACK_NAMES[track] + more

    def _tid(self, track: RankTrack, lane: int) -> int:
        # Unique over all processes, and ascending from top to bottom: Perfetto sorts by it.
        return (self.pid * _TRACKS_PER_RANK + track) * _LANES_PER_TRACK + lane
