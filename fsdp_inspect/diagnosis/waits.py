"""Find out which ranks wait in which collective, and which ranks they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.store.reduction.collective_order import (
    Issued,
    members_by_communicator,
    read_entry,
)
from fsdp_inspect.trace.black_box import BlackBox

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective that some ranks have issued and that has not finished."""

    communicator: str
    members: tuple[int, ...]
    """All ranks of the communicator."""
    issued: Issued
    """The collective as the rank with the longest wait issued it."""
    waiting: tuple[int, ...]
    """The ranks that have issued it and have not seen its end."""
    absent: tuple[int, ...]
    """The ranks that have not issued it, or whose device had not started it (`has_unstarted`)."""
    held: Mapping[int, Issued]
    """By rank in `absent`: an earlier collective that has not ended for this rank only."""
    unknown: tuple[int, ...]
    """The ranks whose black box is missing."""
    seconds: float
    """The longest wait, up to the last sign of life of its rank."""
    behind: tuple[int, ...] = ()
    """Ranks in `waiting` that have not finished an earlier collective, which others have."""


def find_waits(boxes: Mapping[int, BlackBox]) -> list[Wait]:
    """The unfinished collectives of all communicators, the longest wait first.

    Collectives of a background thread come last, because the training does not wait for them.
    """
    members = members_by_communicator(boxes)
    found = [_find_wait(boxes, name, ranks) for name, ranks in members.items()]
    return sorted(
        (each for each in found if each is not None),
        key=lambda wait: (wait.issued.is_background, -wait.seconds),
    )


def _find_wait(boxes: Mapping[int, BlackBox], name: str, members: tuple[int, ...]) -> Wait | None:
    rows = {rank: box.of_group(name) for rank, box in boxes.items()}
    open_at = {}
    for rank, each in rows.items():
        unfinished = _unfinished(each, boxes[rank].header.step)
        if len(unfinished):
            open_at[rank] = unfinished[0]
    if not open_at:
        return None
    # A rank that waits at a later position has finished the earlier ones, so all ranks have issued
    # them.
    position = max(int(row["sequence"]) for row in open_at.values())
    waiting = {rank: row for rank, row in open_at.items() if _num_issued(rows[rank]) > position}
    known = [rank for rank in members if rank in boxes]
    absent = [rank for rank in known if _num_issued(rows[rank]) <= position]
    seconds = {
        rank: (boxes[rank].header.sign_ns - int(row["issued_ns"])) / _NS
        for rank, row in waiting.items()
        if int(row["sequence"]) == position
    }
    first = max(seconds, key=lambda rank: seconds[rank])
    return Wait(
        communicator=name,
        members=members,
        issued=read_entry(boxes[first], waiting[first]),
        waiting=tuple(sorted(waiting)),
        absent=tuple(absent),
        held={rank: read_entry(boxes[rank], open_at[rank]) for rank in absent if rank in open_at},
        unknown=tuple(rank for rank in members if rank not in boxes),
        seconds=max(seconds[first], 0.0),
        behind=tuple(r for r in sorted(waiting) if int(waiting[r]["sequence"]) < position),
    )


def _unfinished(rows: NDArray[np.void], step: int) -> NDArray[np.void]:
    """The last collectives of a communicator, which have not finished.

    The end of an asynchronous collective is not always recorded. It has ended if a later collective
    of its communicator has ended, or if the rank is two steps further.
    """
    finished = rows["sequence"][rows["finished_ns"] != 0]
    last = int(finished.max()) if len(finished) else -1
    is_open = (rows["finished_ns"] == 0) & (rows["sequence"] > last)
    chosen: NDArray[np.void] = rows[is_open & (rows["step"] >= step - 1)]
    return chosen


def _num_issued(rows: NDArray[np.void]) -> int:
    """The number of issued collectives, also for a damaged black box with entries out of order."""
    return int(rows["sequence"].max()) + 1 if len(rows) else 0


def root_ranks(waits: list[Wait]) -> tuple[Wait, tuple[int, ...]] | None:
    """The wait at the end of the chain, and the ranks that it waits for.

    A rank that is absent from one collective may wait in another one. The ranks at the end of such
    a chain wait in no collective. None: there is no wait, or the ranks wait for each other in a
    circle.
    """
    for wait in waits:
        is_background = wait.issued.is_background
        alike = [each for each in waits if each.issued.is_background == is_background]
        in_some = {rank for each in alike for rank in each.waiting}
        free = tuple(rank for rank in wait.absent if rank not in in_some)
        if free:
            return wait, free
    return None


def seconds_since_last_collective(box: BlackBox) -> float | None:
    """Seconds between the last issue or end of a collective and the rank's last sign of life."""
    if not len(box.entries):
        return None
    last = max(int(box.entries["issued_ns"].max()), int(box.entries["finished_ns"].max()))
    return max((box.header.sign_ns - last) / _NS, 0.0)
