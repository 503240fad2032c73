"""Find units that compute with parameters from before their last change.

- Seen: in the first steps: values of unsharded parameters and of their shards.
- Proof: they differ around at least three backwards and half of all, and forwards of the unit in at
  least two recorded steps use a gather from before the last update. torch gathers only what was
  resharded.
- Refuted by: a gather after each update, as after `reshard()` in the loop; a unit that does not run
  again; a reference model, whose shards do not change.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import format_unit, plural
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase

_LEAST_LOOKS = 3
_LEAST_STEPS = 2


class _Old(NamedTuple):
    """A unit whose forwards use a gather from before the last update."""

    unit: int
    is_after_backward: bool
    """Whether no backward ran between this gather and the update."""


def check_stale(observed: Observed) -> Iterator[TrainingFault]:
    """Find units whose unsharded parameters are older than their shards."""
    for rank, each in sorted(observed.seen.items()):
        seen = each.units
        if seen is None:
            continue
        counts = {
            int(index): count
            for index, count in seen.stale.items()
            if count >= _LEAST_LOOKS and 2 * count >= seen.num_looks
        }
        wrong = _run_without_gather(observed, rank, sorted(counts)) if counts else []
        if wrong:
            yield _describe(observed, rank, wrong, counts[wrong[0].unit], seen.num_looks)
            return


def _run_without_gather(observed: Observed, rank: int, units: list[int]) -> list[_Old]:
    kinds = [EventKind.FORWARD, EventKind.ALL_GATHER, EventKind.OPTIMIZER, EventKind.BACKWARD]
    events = observed.run.events(rank, kinds=[int(kind) for kind in kinds])
    updates = np.sort(events.end_ns[events.kind == EventKind.OPTIMIZER])
    is_pass = (events.kind == EventKind.BACKWARD) & (events.unit == NO_UNIT)
    backwards = np.sort(events.end_ns[is_pass])
    found = []
    for unit in units:
        own = events.where(events.unit == unit)
        gathers = np.sort(own.start_ns[own.kind == EventKind.ALL_GATHER])
        forwards = own.where((own.kind == EventKind.FORWARD) & (own.phase == Phase.FORWARD))
        after = np.searchsorted(updates, forwards.start_ns)
        last = np.searchsorted(gathers, forwards.end_ns)
        is_known = (after > 0) & (last > 0)
        gathered = gathers[last[is_known] - 1]
        updated = updates[after[is_known] - 1]
        is_old = gathered < updated
        if len(np.unique(forwards.step[is_known][is_old])) >= _LEAST_STEPS:
            first = np.argmax(is_old)
            between = (backwards > gathered[first]) & (backwards < updated[first])
            found.append(_Old(unit, is_after_backward=not between.any()))
    return found


def _describe(
    observed: Observed, rank: int, wrong: list[_Old], count: int, num_looks: int
) -> TrainingFault:
    units = observed.run.manifest.units
    name = format_unit(units[wrong[0].unit].fqn)
    more = f" and {plural(len(wrong) - 1, 'other unit')}" if len(wrong) > 1 else ""
    verb, was, its = ("computes", "was", "its") if not more else ("compute", "were", "their")
    because = (
        "No backward reshards it, and torch keeps the root of a model unsharded after forward."
    )
    change = (
        "Pass reshard_after_forward=True to fully_shard for this model, also for its root, or call "
        "reshard() on it after its parameters change."
    )
    if units[wrong[0].unit].num_trainable_parameters:
        because = (
            f"{its.capitalize()} parameters stay unsharded after the last backward of a step, so "
            "the next forward does not gather the update."
        )
        change = "Call set_reshard_after_backward(is_last_microbatch) before each backward."
        if wrong[0].is_after_backward:
            because = (
                f"A forward between the backward and the update gathers {its} parameters, and no "
                "backward reshards them, so the next forward does not gather the update."
            )
            change = (
                "Run forwards without a backward after optimizer.step(), or call reshard() on the "
                "model before its next forward."
            )
    return TrainingFault(
        TrainingCheck.PARAMETERS,
        (rank,),
        f"{plural(len(wrong), 'unit')} {verb} with parameters from before their change.",
        f"Around {count} of {plural(num_looks, 'backward')}, {name}{more} {was} unsharded with "
        f"values from before a change of {its} shards, and {its} forwards do not gather the new "
        f"ones. {because}",
        change,
        is_certain=True,
    )
