"""Compute the collectives that FSDP2 issues for the recorded forwards and backwards of a unit.

A unit holds either its shard or all of its parameters. A forward or a backward needs all of them,
and gathers if the unit holds its shard. The plan decides what the unit holds afterwards:

| after                     | the unit holds                                                      |
|---------------------------|---------------------------------------------------------------------|
| a forward                 | its shard; with `reshard_after_forward=False` all, until a backward |
| a forward that is repeated in backward (checkpointing) | all, until its own backward            |
| its backward              | its shard; all if it is kept between microbatches                   |
| the end of a backward pass | its shard, even if it took no part; all if it is kept as above     |

An integer `reshard_after_forward` leaves a shard of a smaller group: the backward gathers too.
Prefetch moves an all-gather, and never adds one. A unit with trainable parameters reduces once in
each backward pass that reaches it, if its microbatch synchronises gradients. A unit that is used
twice has its gradients only after the last of its backwards, because autograd adds them up.

A script may also gather a unit itself with `unshard()`, and return to the shard with `reshard()`.
No event shows the second call, so the all-gathers of such a unit are not computed.

Source: `_fsdp_param_group.py` (`unshard`, `post_forward`, `post_backward`) and `_fsdp_state.py`
(`_root_post_backward_final_callback`), torch 2.13.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.tables import EventTable

PASS_KINDS = (EventKind.FORWARD, EventKind.BACKWARD)
"""The event kinds that the replay needs."""

StepPhase = tuple[int, int]
"""A step and a `Phase` in it."""


@dataclass(frozen=True, slots=True)
class BackwardPasses:
    """The P backward passes of one rank, each over all units, as arrays of shape (P,), by end."""

    step: NDArray[np.int32]
    microbatch: NDArray[np.int16]
    end_ns: NDArray[np.int64]
    is_last: NDArray[np.bool_]
    """Whether each pass is the last one of its step."""

    @classmethod
    def of(cls, events: EventTable) -> Self:
        """Group the backwards of a rank's events by step and microbatch."""
        own = events.where((events.kind == EventKind.BACKWARD) & (events.unit != NO_UNIT))
        order = np.lexsort((own.end_ns, own.microbatch, own.step))
        own = own.where(order)
        changes = (own.step[1:] != own.step[:-1]) | (own.microbatch[1:] != own.microbatch[:-1])
        lasts = np.append(np.flatnonzero(changes), len(own) - 1) if len(own) else order
        step = own.step[lasts]
        is_last = np.append(step[1:] != step[:-1], True) if len(step) else np.empty(0, bool)
        return cls(step, own.microbatch[lasts], own.end_ns[lasts], is_last)

    def last_microbatch(self) -> dict[int, int]:
        """Return the microbatch of the last pass of each step."""
        lasts = self.is_last
        return dict(zip(self.step[lasts].tolist(), self.microbatch[lasts].tolist(), strict=True))


def count_needed_gathers(
    own: EventTable,
    passes: BackwardPasses,
    *,
    reshards: bool,
    keeps_between: bool = False,
    unshards_in_backward: bool = True,
) -> Counter[StepPhase]:
    """Count the all-gathers that one unit needs, by step and phase.

    Args:
        own: Forwards and backwards of the unit, evaluation included, from the start of the run.
        passes: The backward passes of the same rank.
        reshards: Whether the unit reshards after forward.
        keeps_between: Whether the unit stays unsharded from one microbatch to the next
            (`set_reshard_after_backward(False)` until the last microbatch).
        unshards_in_backward: Whether the unit's backward gathers at all.
    """
    resets = passes.end_ns[passes.is_last] if keeps_between else passes.end_ns
    last_microbatch = passes.last_microbatch()
    ordered = own.where(np.argsort(own.start_ns, kind="stable"))
    generation = np.searchsorted(np.sort(resets), ordered.start_ns, side="right")
    needed: Counter[StepPhase] = Counter()
    holds_all, seen, backward_end = False, 0, -1
    for row, resets_before in zip(_rows(ordered), generation.tolist(), strict=True):
        step, microbatch, phase, kind, start, end = row
        holds_all &= resets_before == seen
        seen = resets_before
        is_backward = kind == EventKind.BACKWARD
        if not is_backward and phase == Phase.BACKWARD and start < backward_end:
            continue  # repeated inside the unit's own backward, in which the unit is unsharded
        if not holds_all and (unshards_in_backward or not is_backward):
            needed[step, phase] += 1
        if is_backward:
            backward_end = end
            holds_all = keeps_between and microbatch != last_microbatch.get(step)
        else:
            holds_all = phase == Phase.BACKWARD or not reshards
    return needed


def find_unshards(gathers: EventTable) -> EventTable:
    """The all-gathers that the script issued with `unshard()`."""
    is_early = (gathers.flags & EventFlag.PREFETCHED) != 0
    return gathers.where(is_early & (gathers.issued_by == NO_UNIT))


def find_prefetches_in_vain(
    own: EventTable, gathers: EventTable, passes: BackwardPasses
) -> NDArray[np.bool_]:
    """Find the prefetches in backward that torch issues for a forward without a backward.

    Without prefetch lists, torch prefetches in the reverse order of all forwards since the last
    backward pass. An evaluation, a discarded forward or a frozen unit leaves a forward without a
    backward in this order. Its parameters are gathered and freed unused.

    Args:
        own: Forwards and backwards of the unit, evaluation included.
        gathers: The n all-gathers of the unit.
        passes: The backward passes of the same rank and FSDP root.

    Returns:
        Shape (n,).
    """
    is_forward = (own.kind == EventKind.FORWARD) & (own.phase != Phase.BACKWARD)
    forwards = np.sort(own.start_ns[is_forward])
    backwards = np.sort(own.start_ns[own.kind == EventKind.BACKWARD])
    in_vain: NDArray[np.bool_] = (gathers.flags & EventFlag.PREFETCHED) != 0
    in_vain &= (gathers.phase == Phase.BACKWARD) & (gathers.issued_by != NO_UNIT)
    ends = np.sort(passes.end_ns)
    for row in np.flatnonzero(in_vain).tolist():
        now = gathers.start_ns[row]
        place = int(np.searchsorted(ends, now))
        begin = ends[place - 1] if place else np.iinfo(np.int64).min
        end = ends[place] if place < len(ends) else np.iinfo(np.int64).max
        ran = int(((forwards > begin) & (forwards <= now)).sum())
        finished = int(((backwards > begin) & (backwards <= now)).sum())
        is_used = bool(((backwards > now) & (backwards <= end)).any())
        in_vain[row] = not is_used and ran > finished
    return in_vain


def count_needed_reductions(own: EventTable, reducing: set[tuple[int, int]]) -> Counter[int]:
    """Count the reductions that one unit with trainable parameters needs, by step.

    Args:
        own: Forwards and backwards of the unit.
        reducing: Step and microbatch of every pass that reduces gradients.
    """
    backward = own.where(own.kind == EventKind.BACKWARD)
    passes = set(zip(backward.step.tolist(), backward.microbatch.tolist(), strict=True))
    return Counter(step for step, _ in passes & reducing)


def passes_with(events: EventTable, kind: EventKind) -> set[tuple[int, int]]:
    """Return step and microbatch of every pass with a collective of this kind, of any unit.

    A collective after all backwards of a step belongs to the last one: a pipeline schedule reduces
    the gradients of all microbatches at once.
    """
    own = events.where((events.kind == kind) & (events.unit != NO_UNIT))
    is_later = own.phase == Phase.OUTSIDE
    inside = own.where(~is_later)
    found = set(zip(inside.step.tolist(), inside.microbatch.tolist(), strict=True))
    backwards = events.where(events.kind == EventKind.BACKWARD)
    for step, start in zip(own.step[is_later].tolist(), own.start_ns[is_later], strict=True):
        before = backwards.where((backwards.step == step) & (backwards.start_ns < start))
        if len(before):
            found.add((step, int(before.microbatch[np.argmax(before.start_ns)])))
    return found


def _rows(events: EventTable) -> list[tuple[int, int, int, int, int, int]]:
    columns = (
        events.step,
        events.microbatch,
        events.phase,
        events.kind,
        events.start_ns,
        events.end_ns,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))
