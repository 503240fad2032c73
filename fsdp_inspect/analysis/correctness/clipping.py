"""Find ranks that scale their gradients by factors of their own, as by the norm of a local shard.

- Seen: one factor for all sampled gradients of a rank between the last backward and the update.
- Proof: the factors of the ranks differ in at least three updates, and half of them.
- Refuted by: gradients of a rank that have no common factor, as after clipping of each parameter
  or of each value.
"""

from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import LEAST_UPDATES, differ
from fsdp_inspect.formatting import format_ranks, plural

_TOLERANCE = 0.01
"""Factors of ranks that differ by less are equal."""


def check_clipping(observed: Observed) -> Iterator[TrainingFault]:
    """Find ranks that scale their gradients by factors of their own."""
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
            False,
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


def _differ(factors: tuple[float | None, ...]) -> bool:
    known = [each for each in factors if each is not None]
    is_whole = len(known) == len(factors) > 1 and min(known) > 0
    return is_whole and differ(known, _TOLERANCE)
