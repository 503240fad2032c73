"""Find gradients that are a sum over the ranks where a mean is expected, and the reverse.

- Seen: weighted sums of sampled gradients after the last backward and before the update, the
  divide factor that the script set for FSDP2, and the gradient of each mean cross entropy.
- Proof: gradients that all ranks hold equally are multiplied by the number of ranks before the
  update; the loop adds the gradients of the ranks, or FSDP2 divides them by another number than
  that of the ranks, and each rank's losses are whole means; gradients that the sharder has averaged
  are divided by the number of ranks again.
- Noted: units that the same ranks reduce are divided by different numbers.
- Refuted by: losses that are divided by a total over all ranks, or by the number of ranks; an
  all-reduce of gradients that are divided by the number of ranks before it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import (
    LEAST_UPDATES,
    Holders,
    differ,
    list_holders,
)
from fsdp_inspect.formatting import format_ranks, listed, plural
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.correctness import TrainingSeen

_TOLERANCE = 0.02
_LEAST_FOR_LOSS = 3
"""With fewer ranks, a loss that is divided by their number may have that weight on purpose."""


def check_scales(observed: Observed) -> Iterator[TrainingFault]:
    """Find a sum over the ranks where a mean is expected, and the reverse."""
    found = list(_find_scales(observed))
    yield from found or _divided_unequally(observed)


def _find_scales(observed: Observed) -> Iterator[TrainingFault]:
    peers = [ranks for ranks in observed.list_peers() if len(ranks) == len(observed.seen)]
    if not peers:
        return
    ranks = peers[0]
    weights = [_weight_of(observed.seen[rank]) for rank in ranks]
    are_whole = all(each is not None and abs(each - 1) < _TOLERANCE for each in weights)
    holders = [each for each in list_holders(observed) if len(each.updates) == len(ranks)]
    again = _summed_again(observed, holders)
    if again is not None:
        yield again
        return
    if are_whole:
        yield from _summed_by_hand(observed, holders)
        yield from _divided_by_another(observed, ranks)
    yield from _divided_twice(observed, ranks, weights)


def _weight_of(seen: TrainingSeen) -> float | None:
    """The sum of a rank's means in each step; None: it varies, or is unknown."""
    found = list(_weights_by_step(seen).values())
    if len(found) < LEAST_UPDATES - 1 or differ(found, _TOLERANCE):
        return None
    return median(found)


def _weights_by_step(seen: TrainingSeen) -> dict[int, float]:
    by_step: dict[int, float] = {}
    for loss in seen.losses:
        by_step[loss.step] = by_step.get(loss.step, 0.0) + loss.scale
    if len(by_step) > 1:
        by_step.popitem()  # it may be incomplete
    return by_step


def _weigh_one_mean(observed: Observed, ranks: Sequence[int]) -> bool:
    """Whether the weights of all ranks add up to 1 in each step, as of one mean over all tokens."""
    by_rank = [_weights_by_step(observed.seen[rank]) for rank in ranks]
    steps = set.intersection(*(set(each) for each in by_rank))
    totals = [sum(each[step] for each in by_rank) for step in steps]
    is_one = all(abs(each - 1) < _TOLERANCE for each in totals)
    return len(totals) >= LEAST_UPDATES - 1 and is_one


def _are_equal(sums: Sequence[float]) -> bool:
    return len(sums) > 1 and not differ(sums) and any(sums)


def _summed_again(observed: Observed, holders: Sequence[Holders]) -> TrainingFault | None:
    """Find gradients that were equal on all ranks, and were added over them once more."""
    for each in holders:
        num_ranks = len(each.updates)
        num = _count(each, partial(_is_multiple, num_ranks))
        if not num or not _reduces(observed):
            continue
        return TrainingFault(
            TrainingCheck.GRADIENTS,
            tuple(sorted(each.updates)),
            f"Gradients are reduced twice: they are {num_ranks} times the mean.",
            f"In {plural(num, 'update')}, the gradient of {each.parameter.name} is equal on "
            f"{format_ranks(sorted(each.updates))} after the backward, and {num_ranks} times as "
            "large before the update: the loop adds it over the ranks again.",
            "Remove the all-reduce of gradients from the loop: the backward has averaged them.",
            observed.place_of_update(min(each.updates)),
        )
    return None


def _reduces(observed: Observed) -> bool:
    """Whether the loop issues collectives of its own that reduce in most steps."""
    for record in observed.run.ranks:
        rows = observed.run.events(record.rank, kinds=[EventKind.ALL_REDUCE])
        own = (rows.unit == NO_UNIT) & (rows.phase != Phase.BACKWARD)
        if len(set(rows.step[own].tolist())) < LEAST_UPDATES:
            return False
    return True


def _summed_by_hand(observed: Observed, holders: Sequence[Holders]) -> Iterator[TrainingFault]:
    """Find gradients of each rank that the loop adds up without a division."""
    for each in holders:
        num = _count(each, _is_sum)
        if not num:
            continue
        num_ranks = len(each.updates)
        yield TrainingFault(
            TrainingCheck.GRADIENTS,
            tuple(sorted(each.updates)),
            f"The loop adds the gradients of {num_ranks} ranks, without a mean.",
            f"In {plural(num, 'update')}, the gradient of {each.parameter.name} is the sum of "
            f"those that {format_ranks(sorted(each.updates))} have after the backward, and each "
            f"rank's loss is a mean over its own batch: it is {num_ranks} times the mean.",
            f"Divide the gradients by the {num_ranks} ranks, or reduce them with ReduceOp.AVG. If "
            "the learning rate allows for the sum, ignore this.",
            observed.place_of_update(min(each.updates)),
        )
        return


def _count(holders: Holders, holds: Callable[[Sequence[float], Sequence[float]], bool]) -> int:
    """The updates of which this holds for the sums before and now; 0: not for all that are known.

    The gradients before the first sampled update are not known.
    """
    pairs = [
        (before, now)
        for n in range(holders.num_updates)
        if (before := holders.sums(n, before=True)) and (now := holders.sums(n, before=False))
    ]
    return len(pairs) if len(pairs) >= LEAST_UPDATES and all(holds(*each) for each in pairs) else 0


def _is_multiple(number: int, before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether equal sums became as many times as large."""
    times = [new - number * old for old, new in zip(before, now, strict=True)]
    largest = max(map(abs, now))
    return _are_equal(before) and max(map(abs, times)) <= _TOLERANCE * largest


def _is_sum(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether different sums became their total on all ranks."""
    is_total = abs(sum(before) - now[0]) <= _TOLERANCE * abs(now[0])
    return differ(before) and _are_equal(now) and is_total


def _divided_by_another(observed: Observed, ranks: Sequence[int]) -> Iterator[TrainingFault]:
    """Find a divide factor of FSDP2 that makes no mean of whole means."""
    scaled = _factor_of(observed, ranks)
    if scaled is None:
        return
    wrong = {
        each.divide_factor
        for rank in ranks
        for each in observed.seen[rank].parameters
        if each.divide_factor and abs(len(ranks) * scaled / each.divide_factor - 1) > _TOLERANCE
    }
    if len(wrong) != 1:
        return
    [factor] = wrong
    times = len(ranks) * scaled / factor
    windows = observed.seen[ranks[0]].windows
    if windows.num_backwards > 1 and abs(times * windows.scale - 1) <= _TOLERANCE:
        return  # the factor divides by the microbatches, too
    yield TrainingFault(
        TrainingCheck.GRADIENTS,
        tuple(ranks),
        f"Gradients are {times:.3g} times the mean over the ranks.",
        f"The script makes FSDP divide the sum over {len(ranks)} ranks by {factor:g}, and each "
        "rank's loss is a mean over its own batch.",
        "Remove set_gradient_divide_factor, or divide the loss by a total over all ranks. If the "
        "learning rate allows for the sum, ignore this.",
        observed.seen[ranks[0]].losses[0].place,
    )


def _divided_unequally(observed: Observed) -> Iterator[TrainingFault]:
    """Note units whose gradients FSDP2 divides by another number than those of others."""
    units = {unit.index: unit for unit in observed.run.manifest.units}
    sizes = {each.index: len(each.ranks) for each in observed.run.manifest.process_groups}
    by_groups: dict[tuple[int, int], dict[float, list[str]]] = {}
    for each in observed.seen[min(observed.seen)].parameters:
        if (unit := units.get(each.unit)) is not None:
            groups = unit.shard_group, unit.replicate_group
            num_ranks = math.prod(sizes.get(group, 1) for group in groups)
            of_factor = by_groups.setdefault(groups, {})
            of_factor.setdefault(each.divide_factor or num_ranks, []).append(each.name)
    for of_factor in by_groups.values():
        if len(of_factor) < 2:
            continue
        few = min(of_factor, key=lambda factor: len(of_factor[factor]))
        names = listed(of_factor.pop(few), 1)
        others = " or ".join(f"{factor:g}" for factor in of_factor)
        yield TrainingFault(
            TrainingCheck.GRADIENTS,
            tuple(sorted(observed.seen)),
            "FSDP divides the gradients of some units by another number.",
            f"Sums over the same ranks are divided by {few:g} for {names}, and by {others} for "
            "other sampled parameters.",
            "Call set_gradient_divide_factor on all units, as in a loop over model.modules(), or "
            "on none. If these parts should learn at another rate, ignore this.",
            is_note=True,
        )


def _divided_twice(
    observed: Observed, ranks: Sequence[int], weights: Sequence[float | None]
) -> Iterator[TrainingFault]:
    """Find averages that the loss or the loop divides by the number of ranks again."""
    scaled = _factor_of(observed, ranks)
    averages = all(
        each.divide_factor in (None, len(ranks)) and each.unit != NO_UNIT
        for rank in ranks
        for each in observed.seen[rank].parameters
    )
    if scaled is None or not averages:
        return
    # A loop may divide by the number of its own backwards.
    rounds = {one.num_backwards for rank in ranks for one in observed.seen[rank].rounds}
    by_loop = (
        weights[0] is not None
        and None not in weights
        and abs(weights[0] - 1) < _TOLERANCE
        and abs(len(ranks) * scaled - 1) < _TOLERANCE
        and len(ranks) not in rounds
    )
    by_loss = (
        len(ranks) >= _LEAST_FOR_LOSS
        and abs(scaled - 1) < _TOLERANCE
        and _weigh_one_mean(observed, ranks)
    )
    if not (by_loop or by_loss):
        return
    what = "The loop divides the gradients" if by_loop else "The loss is divided"
    total = "" if by_loop or None not in weights else ", or by the tokens of all ranks"
    yield TrainingFault(
        TrainingCheck.GRADIENTS,
        tuple(ranks),
        f"Gradients are divided by the {len(ranks)} ranks twice.",
        f"{what} by {len(ranks)}, the number of ranks{total}, and the backward averages the "
        "gradients over them already.",
        "Multiply the loss by the number of ranks, or remove the division by it. If the factor is "
        "meant, ignore this.",
        observed.seen[ranks[0]].losses[0].place,
    )


def _factor_of(observed: Observed, ranks: Sequence[int]) -> float | None:
    """The one factor of all sampled gradients between backward and update; None: it varies."""
    found = [each.factor for rank in ranks for each in observed.seen[rank].updates]
    known = [each for each in found if each is not None]
    if len(known) < max(LEAST_UPDATES, len(found) - len(ranks)) or differ(known, _TOLERANCE):
        return None
    return median(known)
