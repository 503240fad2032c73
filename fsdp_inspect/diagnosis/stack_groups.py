"""Group the ranks whose training threads are at the same place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump, StackFrame


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks with the same stack of the training thread."""

    ranks: tuple[int, ...]
    source: DumpSource
    """The reason for writing the stacks."""
    frames: tuple[StackFrame, ...]
    """Frames, outermost first."""
    num_shared: int
    """The number of outer frames that all groups share; 0 with a single group."""
    statements: tuple[tuple[str, str], ...]
    """Recorded lines of the user's source, by place."""


def group_stacks(dumps: Mapping[int, Sequence[StackDump]]) -> tuple[StackGroup, ...]:
    """The distinct stacks of the training threads, those of the fewest ranks first.

    Args:
        dumps: The stack dumps by rank. The first dump with a training thread counts.
    """
    ranks: dict[tuple[StackFrame, ...], list[int]] = {}
    chosen: dict[tuple[StackFrame, ...], StackDump] = {}
    for rank in sorted(dumps):
        dump = next((each for each in dumps[rank] if each.training is not None), None)
        if dump is None or dump.training is None:
            continue
        frames = tuple(reversed(dump.training.frames))
        ranks.setdefault(frames, []).append(rank)
        chosen.setdefault(frames, dump)
    shared = _num_shared(list(ranks))
    groups = [
        StackGroup(tuple(each), chosen[frames].source, frames, shared, chosen[frames].statements)
        for frames, each in ranks.items()
    ]
    return tuple(sorted(groups, key=lambda group: (len(group.ranks), group.ranks)))


def _num_shared(stacks: Sequence[tuple[StackFrame, ...]]) -> int:
    if len(stacks) < 2:
        return 0
    shared = 0
    for frames in zip(*stacks, strict=False):
        if len(set(frames)) > 1:
            break
        shared += 1
    return shared
