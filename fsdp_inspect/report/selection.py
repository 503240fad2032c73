"""Select the ranks and steps of a run for an export."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import EventTable

_STEPS_AT_ONCE = 32
"""The number of steps of one rank to hold in memory at a time."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Some ranks of a run, and some of their steps."""

    records: tuple[RankRecord, ...]
    """The records of the ranks, by rank."""
    steps: frozenset[int] | None
    """None: all steps, including an unfinished last one."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks."""
        return tuple(record.rank for record in self.records)


def select(
    run: RunSource, *, ranks: Collection[int] | None, steps: Collection[int] | None
) -> Selection:
    """Select ranks and steps; None selects all.

    Raises:
        IncompleteRunError: A rank or all steps are missing in the run.
    """
    known = {record.rank: record for record in sorted(run.ranks, key=lambda one: one.rank)}
    missing = sorted(set(ranks or ()) - set(known))
    if missing or not known:
        raise IncompleteRunError(
            f"Rank {missing[0] if missing else 0} not found in run {run.manifest.run_id!r}. "
            f"Expected one of its {len(known)} ranks: {_few(known)}. Choose with --ranks."
        )
    if steps is not None:
        _require_steps(run, known if ranks is None else ranks, steps)
    return Selection(
        records=tuple(record for rank, record in known.items() if ranks is None or rank in ranks),
        steps=None if steps is None else frozenset(steps),
    )


def event_blocks(run: RunSource, selection: Selection, rank: int) -> Iterator[EventTable]:
    """Read the events of one rank in blocks of steps, ordered by step."""
    finished = run.summary(ranks=[rank], kinds=[EventKind.STEP]).step
    if selection.steps is not None:
        chosen = sorted(selection.steps)
    elif len(finished):
        # Events after the last finished step belong to the next step.
        last = int(finished.max())
        chosen = [*np.unique(finished).tolist(), last + 1, last + 2]
    else:
        yield run.events(rank)
        return
    for first in range(0, len(chosen), _STEPS_AT_ONCE):
        yield run.events(rank, steps=chosen[first : first + _STEPS_AT_ONCE])


def steps_in(events: EventTable) -> Iterator[EventTable]:
    """Split events by step, in ascending order."""
    for step in np.unique(events.step).tolist():
        yield events.where(events.step == step)


def _require_steps(run: RunSource, ranks: Collection[int], steps: Collection[int]) -> None:
    finished = np.unique(run.summary(ranks=ranks, kinds=[EventKind.STEP]).step).tolist()
    begun = {*finished, *(step + 1 for step in finished[-1:])}
    if not set(steps) & begun:
        exist = f"{finished[0]} to {finished[-1]}" if finished else "none"
        raise IncompleteRunError(
            f"Steps {_few(sorted(steps))} not found in run {run.manifest.run_id!r}. Expected "
            f"finished steps: {exist}. Choose with --steps."
        )


def _few(numbers: Collection[int]) -> str:
    shown = [str(number) for number in list(numbers)[:8]]
    return ", ".join(shown) + (", ..." if len(numbers) > len(shown) else "") or "none"
