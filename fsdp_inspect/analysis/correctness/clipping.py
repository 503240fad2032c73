"""Find clipping by the norm of a local shard, at the wrong moment, or of scaled gradients.

- Seen: one factor for all sampled gradients of a rank between the last backward and the update; the
  order of backwards, updates, and calls that clip or scale.
- Proof: the factors of the ranks differ in at least three updates, and half of them. Or all calls
  of a line come before a backward that adds to the clipped gradients, find no gradient, clip
  gradients after the update which are then cleared, or clip gradients that a scaler multiplied.
- Refuted by: gradients of a rank that have no common factor, as after clipping of each parameter
  or of each value; a limit that is multiplied by the scale; gradients that are clipped and then
  cleared in each microbatch, as for differential privacy; another call that is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import APART, LEAST_UPDATES, differ, list_holders
from fsdp_inspect.formatting import format_ranks, plural
from fsdp_inspect.trace.correctness import ClipSeen

_TOLERANCE = 0.01
"""Factors of ranks that differ by less are equal."""


def check_clipping(observed: Observed) -> Iterator[TrainingFault]:
    """Find clipping by a rank's own norm, at the wrong moment, or of scaled gradients."""
    yield from _wrong_calls(observed)
    if any(each.gradients_differ and each.meets_again for each in list_holders(observed)):
        observed.not_checked[TrainingCheck.CLIPPING] = APART
        return
    by_part: dict[object, dict[int, list[float | None]]] = {}
    for rank, each in observed.seen.items():
        if each.updates:
            own = by_part.setdefault(observed.model_part_of(rank), {})
            own[rank] = [update.factor for update in each.updates]
    shared = [ranks for ranks in by_part.values() if len(ranks) > 1]
    known = [each for ranks in shared for factors in ranks.values() for each in factors]
    if not any(each is not None for each in known):
        observed.not_checked[TrainingCheck.CLIPPING] = (
            "The gradients of fewer than two ranks that train the same part of the model were "
            "sampled both after a backward and before its update, and had one factor between."
        )
        return
    for factors in shared:
        rounds = list(zip(*factors.values(), strict=False))
        wrong = [each for each in rounds if _differ(each)]
        if len(wrong) < LEAST_UPDATES or 2 * len(wrong) < len(rounds):
            continue
        shown = ", ".join(f"{factor:.3g}" for factor in wrong[0][:4] if factor is not None)
        ranks = sorted(factors)
        yield TrainingFault(
            TrainingCheck.CLIPPING,
            tuple(ranks),
            "Each rank clips its gradients by a norm of its own.",
            f"In {len(wrong)} of {plural(len(rounds), 'update')}, {format_ranks(ranks)} scaled "
            f"all sampled gradients by different factors after the backward, such as {shown}. One "
            "model then gets parts of different gradients.",
            "Clip by the norm over all ranks: model.clip_grad_norm_() of FSDP1, "
            "torch.nn.utils.clip_grad_norm_ on the sharded parameters of FSDP2, or an all-reduce "
            "of the squared local norms.",
            observed.place_of_update(ranks[0]),
        )
        return


_TINY_LIMIT = 1e-3
"""A limit that is meant for gradients without their scale is smaller than it by more than this."""
_LARGE_LIMIT = 100.0
"""A limit above it allows for the scale of a loss, or only measures the norm."""


def _wrong_calls(observed: Observed) -> Iterator[TrainingFault]:
    """Find calls at the wrong moment, or on scaled gradients."""
    calls: dict[str, dict[int, ClipSeen]] = {}
    for rank, seen in observed.seen.items():
        if not any(each.num_with_gradient for each in seen.optimizers):
            continue  # without gradients, there is nothing to clip
        for each in (one for one in seen.clips if one.limit < _LARGE_LIMIT):
            calls.setdefault(each.place, {})[rank] = each
    for place, by_rank in calls.items():
        for wording in _WORDINGS:
            found = {rank: wording.count(each) for rank, each in by_rank.items()}
            if min(found.values()) < LEAST_UPDATES:
                continue
            ranks = tuple(sorted(found))
            first = by_rank[ranks[0]]
            yield TrainingFault(
                TrainingCheck.CLIPPING,
                ranks,
                wording.sentence,
                wording.why.format(found[ranks[0]], first.limit, scale=first.scale)
                + " Only the first updates were looked at.",
                wording.change,
                place,
                is_certain=wording.is_certain(first),
            )
            return


@dataclass(frozen=True, slots=True)
class _Wording:
    """A mistake that the order of the calls shows."""

    count: Callable[[ClipSeen], int]
    """The wrong calls of a line; 0: another call of it was right."""
    sentence: str
    why: str
    """With places for the number of calls, the limit and the scale."""
    change: str
    is_certain: Callable[[ClipSeen], bool] = lambda _: False


_WORDINGS = (
    _Wording(
        lambda each: each.num_scaled if each.num_scaled == each.num_calls and each.limit else 0,
        "Scaled gradients are clipped.",
        "In {} calls, the limit of {:.3g} was applied to gradients that the scaler had multiplied "
        "by its scale, up to {scale:,.6g}. They are divided by it later, and become that much "
        "smaller than the limit.",
        "Call scaler.unscale_(optimizer) before clipping. If the limit is multiplied by the scale, "
        "ignore this.",
        is_certain=lambda each: each.limit < _TINY_LIMIT * each.scale,
    ),
    _Wording(
        lambda each: each.num_early if 2 * each.num_early >= each.num_calls else 0,
        "Gradients are clipped before the last microbatch of a step.",
        "After {} calls with the limit {:.3g}, a backward of the same step added to the clipped "
        "gradients: the sum is not clipped, and earlier microbatches lose weight.",
        "Clip once in each step, between the last backward and optimizer.step(). If one part of "
        "the gradients is limited by itself on purpose, ignore this.",
    ),
    _Wording(
        lambda each: each.num_late if each.num_late + 1 >= each.num_calls else 0,
        "Gradients are clipped after the update, which used them unclipped.",
        "{} calls with the limit {:.3g} came between an update and clearing its gradients, "
        "without a backward before.",
        "Clip between the last backward and optimizer.step().",
    ),
    _Wording(
        lambda each: each.num_empty if each.num_empty == each.num_calls else 0,
        "Clipping finds no gradient.",
        "In {} calls with the limit {:.3g}, no parameter had a gradient: before the reduction of "
        "the gradients, the sharded parameters have none.",
        "Clip between the last backward, which reduces the gradients, and optimizer.step().",
    ),
)


def _differ(factors: tuple[float | None, ...]) -> bool:
    known = [each for each in factors if each is not None]
    is_whole = len(known) == len(factors) > 1 and min(known) > 0
    return is_whole and differ(known, _TOLERANCE)
