"""Find means over unequal numbers of tokens, and ranks that have no label.

- Seen: the labels that are not ignored in each cross entropy, and the gradient of its mean. A sum
  is a mean times its number of labels.
- Proof: the numbers differ between the ranks in half of the microbatches, or between the
  microbatches of a rank in half of its steps, and the gradients do not. All labels of a rank are
  ignored in each of at least three cross entropies.
- Refuted by: a sum, a mean scaled by its number of tokens, two means in one backward, means of two
  lines; one cross entropy of the rank with a label.
"""

from collections.abc import Iterator, Mapping
from statistics import median

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import capitalize, format_ranks, plural
from fsdp_inspect.trace.correctness import LossSeen

LEAST_RATIO = 2.0
"""Tokens on one rank that weigh this many times as much as on another are a fault."""
LEAST_HEAVY_RATIO = 0.75
"""A rank is named if its tokens weigh most in at least this part of the unequal microbatches."""
LEAST_LOSSES = 3
_SCALE_TOLERANCE = 0.01
_BY_ALL_TOKENS = (
    "Divide the sum of the losses by the number of tokens of all ranks and microbatches, times the "
    "number of ranks (in Transformers: num_items_in_batch)."
)


def check_loss(observed: Observed) -> Iterator[TrainingFault]:
    """Find means over unequal numbers of tokens, and ranks that have no label."""
    if unlabelled := _without_labels(observed):
        yield unlabelled
        return
    by_place: dict[tuple[int, int], dict[int, list[LossSeen]]] = {}
    for rank, each in observed.seen.items():
        for loss in each.losses:
            own = by_place.setdefault((loss.step, loss.microbatch), {}).setdefault(rank, [])
            own.append(loss)
    single = [
        {rank: own[0] for rank, own in each.items()}
        for each in by_place.values()
        if all(len(own) == 1 for own in each.values())
    ]
    shared = [
        each
        for each in single
        if len(each) > 1 and len({one.place for one in each.values()}) == 1  # of one task
    ]
    if len(shared) < LEAST_LOSSES:
        observed.not_checked[TrainingCheck.LOSS] = (
            "The loss is not one torch.nn.functional.cross_entropy on the CPU in each "
            "backward, or one rank only observed it."
        )
        return
    ratios = [_ratio_of(each) for each in shared]
    unequal = [each for each, ratio in zip(shared, ratios, strict=True) if ratio >= LEAST_RATIO]
    if 2 * len(unequal) < len(ratios):
        yield from _between_microbatches(observed)
        return
    heaviest = [_by_weight(each)[0] for each in unequal]
    often = max(heaviest, key=heaviest.count)
    is_named = heaviest.count(often) >= LEAST_HEAVY_RATIO * len(unequal)
    losses = max(
        (each for each in unequal if not is_named or _by_weight(each)[0] == often), key=_ratio_of
    )
    heavy, *_, light = _by_weight(losses)
    where = f"on rank {heavy}" if is_named else "of the shorter batch"
    yield TrainingFault(
        TrainingCheck.LOSS,
        (heavy,) if is_named else tuple(sorted(set(heaviest))),
        f"Tokens {where} weigh up to {_ratio_of(losses):.1f} times as much.",
        f"Each rank takes the mean over its own tokens: in step {losses[heavy].step}, "
        f"{losses[light].num_tokens} on rank {light} and {losses[heavy].num_tokens} on rank "
        f"{heavy}. The mean of the gradients over the ranks then weighs a token of the shorter "
        f"batch more: {median(ratios):.1f} times as much in the median of {len(ratios)} "
        f"microbatches, and at least {LEAST_RATIO:.0f} times in {len(unequal)} of them.",
        _BY_ALL_TOKENS,
        losses[heavy].place,
    )


def _between_microbatches(observed: Observed) -> Iterator[TrainingFault]:
    """Find microbatches of a step whose tokens weigh more than those of others."""
    steps = []
    for seen in observed.seen.values():
        by_step: dict[int, dict[int, LossSeen]] = {}
        places = {each.place for each in seen.losses}
        for each in seen.losses:
            by_step.setdefault(each.step, {})[each.microbatch] = each
        if len(places) == 1 and sum(map(len, by_step.values())) == len(seen.losses):
            steps += [each for each in by_step.values() if len(each) > 1]
    ratios = [_ratio_of(each) for each in steps]
    unequal = [each for each, ratio in zip(steps, ratios, strict=True) if ratio >= LEAST_RATIO]
    if len(steps) < LEAST_LOSSES or 2 * len(unequal) < len(steps):
        return
    losses = max(unequal, key=_ratio_of)
    heavy, *_, light = _by_weight(losses)
    yield TrainingFault(
        TrainingCheck.LOSS,
        tuple(sorted(observed.seen)),
        f"Tokens of short microbatches weigh up to {_ratio_of(losses):.1f} times as much.",
        f"Each microbatch takes the mean over its own tokens: in step {losses[heavy].step}, "
        f"{losses[light].num_tokens} in microbatch {light} and {losses[heavy].num_tokens} in "
        f"microbatch {heavy}, with equal weights. So it is in {len(unequal)} of {len(steps)} "
        f"steps (ranks count apart); the median is {median(ratios):.1f} times.",
        _BY_ALL_TOKENS,
        losses[heavy].place,
    )


def _without_labels(observed: Observed) -> TrainingFault | None:
    numbers = {
        rank: each.num_unlabelled
        for rank, each in observed.seen.items()
        if each.num_unlabelled >= LEAST_LOSSES and not each.losses
    }
    if not numbers:
        return None
    is_all = len(numbers) == len(observed.seen)
    who = "Every rank" if is_all else capitalize(format_ranks(sorted(numbers)))
    has = "has" if is_all or len(numbers) == 1 else "have"
    return TrainingFault(
        TrainingCheck.LOSS,
        tuple(sorted(numbers)),
        f"{who} {has} no label: all of them are ignored.",
        f"In each of {plural(min(numbers.values()), 'cross entropy', 'cross entropies')} of the "
        "first steps, all labels are ignored: these losses give no gradient.",
        "Look at the labels of a batch: padding only, a mask of the prompt that covers the answer, "
        "or answers that truncation removed.",
    )


def _by_weight(losses: Mapping[int, LossSeen]) -> list[int]:
    """The ranks that have tokens, the one with the heaviest tokens first."""
    ranks = [rank for rank, loss in losses.items() if loss.num_tokens]
    return sorted(ranks, key=lambda rank: losses[rank].num_tokens)


def _ratio_of(losses: Mapping[int, LossSeen]) -> float:
    """The largest weight of a token / the smallest one, over the ranks; 1 if scales differ."""
    scales = [abs(loss.scale) for loss in losses.values()]
    counts = [loss.num_tokens for loss in losses.values() if loss.num_tokens]
    if not counts or max(scales) - min(scales) > _SCALE_TOLERANCE * max(scales):
        return 1.0
    return max(counts) / min(counts)
