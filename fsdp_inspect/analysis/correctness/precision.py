"""Find updates that are too small for the stored parameters, without a numerics step.

- Seen: 64 values of up to 8 parameters before and after each sampled update.
- Proof: at least half of the values with a gradient are the same after the updates.
- Refuted by: a learning rate that still rises, because later updates are larger; an optimizer that
  keeps the parameters in higher precision, compensates for rounding or rounds at random.
"""

from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import LEAST_UPDATES
from fsdp_inspect.formatting import format_ranks, format_ratio, plural
from fsdp_inspect.trace.correctness import TrainingSeen

LOW_PRECISION = frozenset({"bfloat16", "float16"})
MOST_LOST_RATIO = 0.5
"""If at least this fraction of all updates is rounded away, most parameters stop changing."""
_ALL_LOST = 0.99
"""The same for a dtype of full precision, whose updates are rarely lost."""


def check_precision(observed: Observed) -> Iterator[TrainingFault]:
    """Find updates that are too small for the stored parameters."""
    if not any(each.updates for each in observed.seen.values()):
        observed.not_checked[TrainingCheck.PRECISION] = "No update was sampled."
        return
    lost = {rank: ratio for rank, each in observed.seen.items() if (ratio := _lost(each))}
    wrong = {
        rank: ratio
        for rank, ratio in lost.items()
        if ratio >= (MOST_LOST_RATIO if _is_low(observed.seen[rank]) else _ALL_LOST)
    }
    if not wrong:
        return
    if any(_is_rising(observed.seen[rank]) for rank in wrong):
        observed.not_checked[TrainingCheck.PRECISION] = (
            "Sampled updates changed no stored value, but their learning rate was unknown, 0 or "
            "still rising."
        )
        return
    seen = observed.seen[min(wrong)]
    dtypes = ", ".join(sorted({each.dtype for each in seen.parameters}))
    yield TrainingFault(
        TrainingCheck.PRECISION,
        tuple(sorted(wrong)),
        False,
        f"{format_ratio(max(wrong.values()))} of the updates change no stored parameter.",
        f"On {format_ranks(sorted(wrong))}, the sampled values of "
        f"{plural(len(seen.parameters), 'parameter')} with a gradient were mostly the same after "
        f"{plural(len(seen.updates), 'update')}: the updates are smaller than the rounding of "
        f"{dtypes}. The largest learning rate was {seen.updates[-1].rate:.3g}.",
        "Keep the parameters in float32, and compute in bfloat16 by MixedPrecisionPolicy or "
        "autocast. If the learning rate is meant to be this small, ignore this.",
    )


def _lost(seen: TrainingSeen) -> float | None:
    """Lost / intended updates of the sampled values; None if that shows nothing."""
    if any(each.keeps_copy for each in seen.parameters) or len(seen.updates) < LEAST_UPDATES:
        return None
    meant = sum(each.num_meant for each in seen.updates)
    return sum(each.num_lost for each in seen.updates) / meant if meant else None


def _is_rising(seen: TrainingSeen) -> bool:
    """Whether the learning rate is unknown, or rose until the last sampled update."""
    rates = [each.rate for each in seen.updates]
    return rates[-1] <= 0 or rates[-1] > rates[0]


def _is_low(seen: TrainingSeen) -> bool:
    return any(each.dtype in LOW_PRECISION for each in seen.parameters)
