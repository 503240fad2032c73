"""Find gradients that the ranks do not combine, or shards that they combine twice.

- Seen: 64 values of up to 8 parameters and of their gradients, before each of the first 8 updates
  and of the later ones in steps that look at all parameters.
- Proof: ranks that hold the same part receive different gradients in each of these updates;
  replicas receive equal ones at first, and later differ in values and gradients; ranks that hold
  different parts, with different values, receive equal ones.
- Proof of no gradient: none of the optimizer's tensors had one in its first updates, and no sampled
  value ever changes. One that changes later refutes it.
- Proof of zero gradients: all sampled ones are exactly 0 before every sampled update. So are those
  of every cross entropy, or some were not 0 after at least three of the backwards before.
- Refuted by: different values at the start, if no sharder keeps the parameter on these ranks. They
  then hold experts, stages or models of their own. So may parameters outside all units, if the
  forward runs all-to-alls. Values that differ and are equal again later, as in local SGD. Gradients
  of one magnitude, as after clipping of each value, and copies of rows. Ranks in groups of other
  dimensions that exchange data are not compared. Training apart on purpose, with averages after
  more than the sampled updates, looks the same: hence "Probably".
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fsdp_inspect.analysis.correctness.faults import (
    SEQUENCE,
    Observed,
    TrainingCheck,
    TrainingFault,
)
from fsdp_inspect.analysis.correctness.samples import (
    APART,
    LEAST_UPDATES,
    NO_SAMPLES,
    Holders,
    differ,
    list_holders,
    values_change,
)
from fsdp_inspect.formatting import format_ranks, plural
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.correctness import OptimizerSeen, TrainingSeen, UpdateSeen
from fsdp_inspect.trace.sharders import DDP, traits_of

_EXPERT = "expert"
"""In the name of a parameter: each rank may hold an expert of its own."""


def check_gradients(observed: Observed) -> Iterator[TrainingFault]:
    """Find gradients that are not combined, or combined twice."""
    without = _check_without(observed)
    if without is not None:
        yield without
        return
    if not any(each.updates for each in observed.seen.values()):
        observed.not_checked[TrainingCheck.GRADIENTS] = NO_SAMPLES
        return
    holders = list(list_holders(observed))
    apart = _find_apart(observed, holders)
    if any(each.meets_again for each in apart):
        observed.not_checked[TrainingCheck.GRADIENTS] = APART
    elif apart and apart[0].parameter.unit == NO_UNIT and _exchanges_rows(observed):
        observed.not_checked[TrainingCheck.GRADIENTS] = (
            f"{apart[0].parameter.name} is outside all units and gets other gradients on each "
            "rank. The ranks exchange rows (all-to-all), so it may be an expert of its own."
        )
    elif apart and _is_left_out(observed, apart[0]):
        observed.not_checked[TrainingCheck.GRADIENTS] = (
            f"DDP was told to ignore {apart[0].parameter.name}, which each rank trains by itself."
        )
    elif apart:
        yield _not_reduced(observed, apart)
    else:
        since = ((each, _trains_alone_since(each)) for each in holders)
        late = next(((each, first) for each, first in since if first is not None), None)
        if late is not None:
            yield _no_longer_reduced(observed, *late)
    yield from _check_twice(observed)
    yield from _check_zero(observed)


def _find_apart(observed: Observed, holders: Sequence[Holders]) -> list[Holders]:
    """Parameters whose ranks should hold the same values, and get other gradients."""
    others = {tuple(each.updates) for each in holders if not each.starts_equal}
    apart = [
        each
        for each in holders
        if each.gradients_differ
        and _is_same(each)
        # Models of their own have some equal parameters, such as the weights of a norm.
        and not (_is_along_another(observed, each) and tuple(each.updates) in others)
    ]
    splitting = observed.list_splitting() if apart else ()
    if not splitting:
        return apart
    replicas = [each for each in apart if each.parameter.is_replica]
    if not replicas:
        names = ", ".join(sorted(name or "unknown" for name in splitting))
        observed.not_checked[TrainingCheck.GRADIENTS] = (
            f"{apart[0].parameter.name} gets other gradients on each rank, and the ranks may split "
            f"the model along other dimensions ({names})."
        )
    return replicas


def _is_left_out(observed: Observed, holders: Holders) -> bool:
    """Whether DDP was told to ignore a parameter: it is in no bucket, and the reducer knows all."""
    if holders.parameter.unit != NO_UNIT or observed.run.manifest.sharder != DDP:
        return False
    coverage = [observed.seen[rank].coverage for rank in holders.updates]
    return all(each is not None and not each.unreduced for each in coverage)


def _is_along_another(observed: Observed, holders: Holders) -> bool:
    """Whether the ranks differ along a dimension of an unknown purpose."""
    parts = {
        tuple(each for each in observed.model_part_of(rank) if each[0] != SEQUENCE)
        for rank in holders.updates
    }
    return len(parts) > 1


def _is_same(holders: Holders) -> bool:
    """Whether the ranks should hold the same values, if no dimension splits the model."""
    parameter = holders.parameter
    is_expert = _EXPERT in parameter.name.lower()
    return parameter.is_replica or (holders.starts_equal and not is_expert)


def _exchanges_rows(observed: Observed) -> bool:
    """Whether forwards run all-to-alls, as those of experts on other ranks."""
    events = observed.run.events(min(observed.seen), kinds=[int(EventKind.ALL_TO_ALL)])
    return bool((events.phase == Phase.FORWARD).any())


_TOLERANCE = 1e-5
_LEAST_LATE = 2
"""Samples of later updates are 100 steps apart."""


def _trains_alone_since(holders: Holders) -> int | None:
    """The first sampled update before which replicas differ: they trained apart from then on."""
    updates = range(holders.num_updates)
    first = next((n for n in updates if not holders.is_equal(n)), None)
    if not holders.parameter.is_replica or first is None or first < LEAST_UPDATES:
        return None
    was_reduced = not any(differ(holders.gradients(n)) for n in range(first - 1))
    later = updates[first:]
    is_alone = all(differ(holders.gradients(n)) and not holders.is_equal(n) for n in later)
    return first if was_reduced and is_alone and len(later) >= _LEAST_LATE else None


def _no_longer_reduced(observed: Observed, late: Holders, first: int) -> TrainingFault:
    ranks = sorted(late.updates)
    steps = [each.step for each in late.updates[ranks[0]]]
    num = plural(len(steps) - first, "sampled update")
    norms = ", ".join(f"{norm:.3g}" for norm in late.gradients(first)[:4] if norm is not None)
    return TrainingFault(
        TrainingCheck.GRADIENTS,
        tuple(ranks),
        "The ranks no longer combine their gradients: each trains alone.",
        f"Until step {steps[first - 1]}, {late.parameter.name} and its sampled gradients were "
        f"equal on {format_ranks(ranks)}. In each of {num} from step {steps[first]} on, both "
        f"differ: the norms of the gradients are {norms} in the first.",
        f"{_CHANGES.get(observed.run.manifest.sharder, _CHANGES[''])} If the ranks train apart and "
        "average later on purpose, ignore this.",
        observed.seen[ranks[0]].backward_place,
    )


def _not_reduced(observed: Observed, apart: Sequence[Holders]) -> TrainingFault:
    first = apart[0]
    parameter, ranks = first.parameter, sorted(first.updates)
    is_own = _is_along_another(observed, first)  # the ranks may search or be an ensemble
    norms = ", ".join(f"{norm:.3g}" for norm in first.gradients(0)[:4] if norm is not None)
    others = f" and of {plural(len(apart) - 1, 'other parameter')}" if len(apart) > 1 else ""
    last = apart[0].num_updates - 1
    began = ", which began with the same values" if first.starts_equal else ""
    ends = " Their values then differ too." if differ(first.values(last)) else ""
    if parameter.unit == NO_UNIT:
        sentence = "Gradients of parameters outside all units are not reduced."
        change = _ENCLOSED if _is_enclosed(observed, parameter.name) else _OUTSIDE
        if observed.run.manifest.sharder == DDP:
            change = _UNKNOWN_TO_DDP
    else:
        known = [each for each in first.gradients(0) if each is not None]
        are_groups = len(ranks) < len(observed.seen) or len(set(known)) < len(known)
        sentence = (
            "Gradients are combined in groups of ranks only."
            if are_groups
            else "The ranks combine only a part of their gradients."
            if _reduces(observed, ranks[0])
            else "The ranks do not combine their gradients: each trains alone."
        )
        change = _CHANGES.get(observed.run.manifest.sharder, _CHANGES[""])
    return TrainingFault(
        TrainingCheck.GRADIENTS,
        tuple(ranks),
        sentence,
        f"In each of {plural(first.num_updates, 'update')}, the gradients of {parameter.name}"
        f"{others} differ between {format_ranks(ranks)}{began}: the sampled norms are {norms} in "
        f"the first.{ends}",
        f"{change} If the ranks train {'models of their own, or ' if is_own else ''}apart and "
        "average later on purpose, ignore this.",
        observed.seen[ranks[0]].backward_place,
        is_note=is_own,
    )


def _is_enclosed(observed: Observed, name: str) -> bool:
    """Whether a parameter outside all units is in a module that is sharded."""
    modules = [module for unit in observed.run.manifest.units for module in unit.modules]
    return any(not module or name.startswith(f"{module}.") for module in modules)


def _reduces(observed: Observed, rank: int) -> bool:
    """Whether most steps with a backward reduce something between ranks in it."""
    kinds = [EventKind.ALL_REDUCE, EventKind.REDUCE_SCATTER, EventKind.BACKWARD]
    events = observed.run.events(rank, kinds=[int(kind) for kind in kinds])
    events = events.where(events.phase == Phase.BACKWARD)
    is_pass = events.kind == EventKind.BACKWARD
    groups = observed.run.manifest.process_groups
    shared = [each.index for each in groups if len(each.ranks) > 1]
    reduced = set(events.step[~is_pass & np.isin(events.group, shared)].tolist())
    return 2 * len(reduced) > len(set(events.step[is_pass].tolist()))


_ENCLOSED = (
    "fully_shard manages the parameters that a module has when it is called, without "
    "ignored_params: make the parameter before this call. Parameters that are left out on purpose "
    "need an all-reduce of their gradients before each update."
)
_OUTSIDE = (
    "Shard the whole model too, after its layers: fully_shard(model). Parameters that are left out "
    "on purpose need an all-reduce of their gradients before each update."
)
_UNKNOWN_TO_DDP = (
    "Call DDP(model) after the last parameter is added or unfrozen. Parameters that are left out "
    "on purpose need an all-reduce of their gradients before each update."
)
_CHANGES: Mapping[str, str] = {
    "ddp": "Call the wrapped model, not model.module. Leave no_sync() before the backward of the "
    "last microbatch of a step.",
    "": "Shard over a mesh that contains all data-parallel ranks. Reduce the gradients in the "
    "backward of the last microbatch of a step.",
}
"""The change by sharder."""


_REDUCE = (
    "Reduce the gradients in the backward of the last microbatch of a step: "
    "set_requires_gradient_sync(True) and set_requires_all_reduce(True), or leave no_sync()."
)
_OWN = "If the optimizer reads gradients of your own, such as main_grad, ignore this."
_REACH = (
    "Look for zero_grad() between backward() and step(), and for a loss without a graph to the "
    f"parameters, as after detach() or torch.tensor(). {_OWN}"
)


def _check_without(observed: Observed) -> TrainingFault | None:
    """Find updates without any gradient, because no backward of a step reduced them."""
    optimizers = {
        rank: next((each for each in seen.optimizers if each.num_of_model), None)
        for rank, seen in observed.seen.items()
    }
    without = {
        rank: each
        for rank, each in optimizers.items()
        if each is not None and not each.num_with_gradient and each.num_steps >= LEAST_UPDATES
    }
    is_off = observed.run.manifest.observed.get("gradient_sync") == "some microbatches"
    has_backwards = all(
        seen.num_trainable and len(seen.values.losses) >= LEAST_UPDATES
        for seen in observed.seen.values()
    )
    if not without or len(without) < len(observed.seen) or not (is_off or has_backwards):
        return None
    if any(len(seen.optimizers) > 1 for seen in observed.seen.values()):
        return None  # the backwards may be those of another model
    if any(map(_may_read_others, without.values())):
        return None
    if not all(map(_may_move, observed.seen.values())):
        return None
    first = without[min(without)]
    lacks_replicas = not is_off and _lacks_all_reduces(observed)
    sentence = "No gradient reaches the optimizer."
    remark = ", in spite of the backwards before them."
    if is_off:
        sentence = "No backward reduces gradients: the optimizer updates nothing."
        remark = ". The reduction was off in the backwards before them."
    elif lacks_replicas:
        sentence = "No backward reduces gradients over the replicas: nothing is updated."
        remark = ". The backwards before them ran reduce-scatters, and no all-reduce of units."
    return TrainingFault(
        TrainingCheck.GRADIENTS,
        tuple(sorted(without)),
        sentence,
        f"In {plural(first.num_steps, 'update')}, none of the optimizer's "
        f"{plural(first.num_tensors, 'tensor')} had a gradient{remark}",
        _REDUCE if is_off or lacks_replicas else _REACH,
        first.place,
        is_certain=is_off,
    )


def _may_read_others(optimizer: OptimizerSeen) -> bool:
    """Whether an optimizer reads gradients of its own: torch's make no state without a gradient."""
    return optimizer.keeps_state and not optimizer.began_with_state


def _may_move(seen: TrainingSeen) -> bool:
    """Whether an update with a gradient would change values, and none of the sampled ones did."""
    rates = [each.rate for each in seen.updates]
    rates += [] if seen.late is None else seen.late.rates.values()
    return not values_change(seen) and (not rates or max(rates) > 0)


def _lacks_all_reduces(observed: Observed) -> bool:
    """Whether units on a mesh with replicas run reduce-scatters only."""
    if not any(
        unit.replicate_group >= 0 <= unit.shard_group for unit in observed.run.manifest.units
    ):
        return False
    kinds = [int(EventKind.REDUCE_SCATTER), int(EventKind.ALL_REDUCE)]
    rows = observed.run.summary(ranks=[min(observed.seen)], kinds=kinds)
    of_units = rows.kind[rows.unit != NO_UNIT]
    return bool(len(of_units)) and EventKind.ALL_REDUCE not in of_units


def _check_zero(observed: Observed) -> Iterator[TrainingFault]:
    """Find gradients that are exactly zero before each update."""
    first = observed.seen[min(observed.seen)]
    if all(map(_stay_zero, observed.seen.values())):
        yield TrainingFault(
            TrainingCheck.GRADIENTS,
            tuple(sorted(observed.seen)),
            "The loss has the weight 0: sampled gradients are 0.",
            f"The gradients of {plural(len(first.losses), 'cross entropy', 'cross entropies')} are "
            f"exactly 0, and so are those of {plural(len(first.parameters), 'parameter')} before "
            f"{plural(len(first.updates), 'update')} that were looked at.",
            "Look at the mask, the weight and the scale of the loss.",
            first.losses[0].place,
        )
        return
    if not all(map(_become_zero, observed.seen.values())):
        return
    to_zero = next((each for each in first.clips if not each.limit), None)
    num_found = sum(any(each.weighted_before) for each in first.updates)
    yield TrainingFault(
        TrainingCheck.GRADIENTS,
        tuple(sorted(observed.seen)),
        "All sampled gradients are 0 before each update.",
        f"In each of {plural(len(first.updates), 'update')} that were looked at, the sampled "
        f"gradients of {plural(len(first.parameters), 'parameter')} are exactly 0. After "
        f"{plural(num_found, 'backward')} before them, they were not."
        + (" They are clipped to a norm or value of 0." if to_zero else ""),
        f"Pass a limit above 0. {_OWN}"
        if to_zero
        else f"Look for zero_grad() between backward() and step(). {_OWN}",
        to_zero.place if to_zero else observed.place_of_update(min(observed.seen)),
    )


def _stay_zero(seen: TrainingSeen) -> bool:
    """Whether the gradients of all losses of a rank are zero, and all sampled ones in each update.

    A layer without effect, whose own gradients are zero, leaves those of the loss.
    """
    scales = [loss.scale for loss in seen.losses]
    gradients = [norm for each in seen.updates for norm in each.gradients]
    is_known = min(len(scales), len(seen.updates)) >= LEAST_UPDATES and None not in gradients
    return is_known and not any(scales) and not any(gradients)


def _become_zero(seen: TrainingSeen) -> bool:
    """Whether gradients of a rank were not zero after backwards, and all are in each update."""
    are_zero = all(norm == 0 for each in seen.updates for norm in each.gradients)
    found = [any(each.weighted_before) for each in seen.updates]
    return are_zero and sum(found) >= LEAST_UPDATES


def _check_twice(observed: Observed) -> Iterator[TrainingFault]:
    """Find shards of different parts with equal gradients: they were reduced over their owners."""
    seen = {rank: each for rank, each in observed.seen.items() if each.updates}
    first = next(iter(seen.values()))
    num = min(len(each.updates) for each in seen.values())
    equal, is_equal = [], True
    for at, parameter in enumerate(first.parameters):
        same = [
            each
            for each in seen.values()
            if at < len(each.parameters) and each.parameters[at].name == parameter.name
        ]
        parts = {tuple(each.parameters[at].part) for each in same}
        if len(same) < len(seen) or len(parts) < len(seen) or not parameter.part:
            continue
        rounds = [[each.updates[n] for each in same] for n in range(num)]
        norms = [each.gradients[at] for updates in rounds for each in updates]
        if all(norms) and len({each.digests[at] for each in rounds[0]}) > 1:
            equal.append(parameter.name)
            is_equal &= all(_are_equal(each, at) for each in rounds)
    if len(seen) > 1 and num > 1 and len(equal) > 1 and is_equal:
        title = traits_of(observed.run.manifest.sharder).title
        yield TrainingFault(
            TrainingCheck.GRADIENTS,
            tuple(sorted(seen)),
            "Gradient shards are reduced twice: all ranks hold equal ones.",
            f"The sampled gradients of {equal[0]} and of "
            f"{plural(len(equal) - 1, 'other parameter')} are equal on "
            f"{format_ranks(sorted(seen))} in {plural(num, 'update')}, although each rank holds "
            "another part of them: a second reduction mixed the parts.",
            f"Remove the all-reduce of gradients from the loop: {title} has reduced them.",
            first.backward_place,
            is_certain=True,
        )


def _are_equal(updates: Sequence[UpdateSeen], at: int) -> bool:
    """Whether ranks have equal gradients, which are not all one number.

    Their norms are equal after clipping to one magnitude, too.
    """
    sums = {each.weighted[at] if each.weighted else None for each in updates}
    norms = {each.gradients[at] for each in updates}
    if len(norms) > 1 or len(sums) > 1:
        return False
    norm, total = norms.pop(), sums.pop()
    if norm is None or total is None:
        return not updates[0].weighted  # earlier recordings
    # n gradients of one value have the weighted sum 1.5 n, and the norm sqrt(n).
    number = (total / norm / 1.5) ** 2
    return abs(number - round(number)) > _TOLERANCE * number
