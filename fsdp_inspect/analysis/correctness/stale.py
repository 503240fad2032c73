"""Find units that compute with parameters from before their last change.

- Seen: in the first steps: values of unsharded parameters and of their shards.
- Proof: they differ around at least three backwards and half of all, and the forwards of the unit
  gather it in fewer of the recorded steps than it runs in. torch gathers only what was resharded.
- Refuted by: a gather for each step, as after `reshard()` in the loop; a unit that does not run
  again; a reference model, whose shards do not change.
"""

from collections.abc import Iterator

import numpy as np

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import format_unit, plural
from fsdp_inspect.trace.codes import EventKind, Phase

_LEAST_LOOKS = 3


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
            yield _describe(observed, rank, wrong, counts[wrong[0]], seen.num_looks)
            return


def _run_without_gather(observed: Observed, rank: int, units: list[int]) -> list[int]:
    kinds = [int(EventKind.FORWARD), int(EventKind.ALL_GATHER)]
    events = observed.run.events(rank, kinds=kinds)
    events = events.where(events.phase == Phase.FORWARD)
    found = []
    for unit in units:
        own = events.where(events.unit == unit)
        run, gathered = (np.unique(own.step[own.kind == kind]) for kind in kinds)
        if len(run) >= 2 and len(gathered) < len(run):
            found.append(unit)
    return found


def _describe(
    observed: Observed, rank: int, wrong: list[int], count: int, num_looks: int
) -> TrainingFault:
    units = observed.run.manifest.units
    name = format_unit(units[wrong[0]].fqn)
    more = f" and {plural(len(wrong) - 1, 'other unit')}" if len(wrong) > 1 else ""
    verb, was, its = ("computes", "was", "its") if not more else ("compute", "were", "their")
    because = (
        "No backward reshards it, and torch keeps the root of a model unsharded after forward."
    )
    change = (
        "Pass reshard_after_forward=True to fully_shard for this model, also for its root, or call "
        "reshard() on it after its parameters change."
    )
    if units[wrong[0]].num_trainable_parameters:
        because = (
            f"{its.capitalize()} parameters stay unsharded after the last backward of a step, so "
            "the next forward does not gather the update."
        )
        change = "Call set_reshard_after_backward(is_last_microbatch) before each backward."
    return TrainingFault(
        TrainingCheck.PARAMETERS,
        (rank,),
        True,
        f"{plural(len(wrong), 'unit')} {verb} with parameters from before their change.",
        f"Around {count} of {plural(num_looks, 'backward')}, {name}{more} {was} unsharded with "
        f"values from before a change of {its} shards, and {its} forwards do not gather the new "
        f"ones. {because}",
        change,
    )
