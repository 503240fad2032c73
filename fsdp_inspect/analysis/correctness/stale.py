"""Find units that compute with parameters from before their last change.

- Seen: in the first steps, before each backward: values of unsharded parameters and their shards.
- Proof: they differ in at least three looks and half of all, and the unit then runs in more of the
  recorded steps than it is gathered in. torch gathers only what was resharded.
- Refuted by: a gather for each step, as after `reshard()` in the loop; a unit that does not run
  again; a reference model, whose shards do not change.
"""

from collections.abc import Iterator

import numpy as np

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import format_unit, plural
from fsdp_inspect.trace.codes import EventKind

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
        wrong = sorted(index for index in counts if _runs_without_gather(observed, rank, index))
        if wrong:
            yield _describe(observed, rank, wrong, counts[wrong[0]], seen.num_looks)
            return


def _runs_without_gather(observed: Observed, rank: int, unit: int) -> bool:
    kinds = [int(EventKind.FORWARD), int(EventKind.ALL_GATHER)]
    events = observed.run.events(rank, kinds=kinds)
    events = events.where(events.unit == unit)
    run, gathered = (np.unique(events.step[events.kind == kind]) for kind in kinds)
    return len(run) >= 2 and len(gathered) < len(run)


def _describe(
    observed: Observed, rank: int, wrong: list[int], count: int, num_looks: int
) -> TrainingFault:
    units = observed.run.manifest.units
    name = format_unit(units[wrong[0]].fqn)
    more = f" and {plural(len(wrong) - 1, 'other unit')}" if len(wrong) > 1 else ""
    is_trained = units[wrong[0]].num_trainable_parameters > 0
    because = (
        "It stays unsharded after the last backward of a step, so the next forward does not gather "
        "the update."
        if is_trained
        else "No backward reshards it, and torch keeps the root of a model unsharded after forward."
    )
    change = (
        "Call set_reshard_after_backward(is_last_microbatch) before each backward."
        if is_trained
        else "Pass reshard_after_forward=True to fully_shard for this model, also for its root, or "
        "call reshard() on it after its parameters change."
    )
    return TrainingFault(
        TrainingCheck.PARAMETERS,
        (rank,),
        True,
        f"{plural(len(wrong), 'unit')} {'computes' if len(wrong) == 1 else 'compute'} with old "
        "parameters.",
        f"Before {count} of {plural(num_looks, 'backward')}, {name}{more} was unsharded with "
        f"values from before a change of its shards, and it runs without an all-gather. {because}",
        change,
    )
