"""Find updates that are too small for the stored parameters, and dtypes that lose precision.

- Seen: 64 values of up to 8 parameters before and after each sampled update; the dtypes of the
  units, of an autocast region around the first forward, and of the loss.
- Proof: at least half of the values with a gradient are the same after the updates; an autocast
  region casts to another dtype of 16 bits than the one of the gathered parameters. Notes: a loss in
  16 bits, a reduction in bfloat16 over at least 64 ranks, frozen parameters that are stored in
  float32 and computed in 16 bits.
- Refuted by: a learning rate that still rises, because later updates are larger; values in
  float32 that change in other updates, as with accumulation inside `step`; an optimizer that
  keeps the parameters in higher precision, compensates for rounding or rounds at random; autocast
  to the dtype of the parameters, or over parameters in float32.
"""

import itertools
import math
import operator
from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import LEAST_UPDATES
from fsdp_inspect.formatting import format_bytes, format_count, format_ranks, format_ratio, plural
from fsdp_inspect.trace.correctness import TrainingSeen
from fsdp_inspect.trace.run import Unit

LOW_PRECISION = frozenset({"bfloat16", "float16"})
MOST_LOST_RATIO = 0.5
"""If at least this fraction of all updates is rounded away, most parameters stop changing."""
_ALL_LOST = 0.95
"""The same for a dtype of full precision, whose updates are rarely lost."""
_STILL_RATIO = 0.75
"""Rounding to the nearest leaves the same values in each update (0.95 of them and more were left by
all, with AdamW and SGD); random rounding leaves others each time."""

_MANY_RANKS = 64
"""Over fewer ranks, the rounding of a sum in bfloat16 is small against the noise of gradients."""


def check_precision(observed: Observed) -> Iterator[TrainingFault]:
    """Find updates that are too small for the stored parameters, and dtypes that lose precision."""
    for find in (_autocast, _loss_dtype, _reduction, _frozen):
        found = find(observed)
        if found is not None:
            yield found
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
    if any(_change_elsewhere(observed.seen[rank]) for rank in wrong):
        observed.not_checked[TrainingCheck.PRECISION] = (
            "Sampled updates changed no stored value, and values changed in between: in other "
            "updates, or outside of them."
        )
        return
    if any(_is_rising(observed.seen[rank]) for rank in wrong):
        observed.not_checked[TrainingCheck.PRECISION] = (
            "Sampled updates changed no stored value, but their learning rate was unknown, 0 or "
            "still rising."
        )
        return
    if any(_moves(observed.seen[rank], ratio) for rank, ratio in wrong.items()):
        observed.not_checked[TrainingCheck.PRECISION] = (
            "Most values do not change in an update, but other updates change them: rounding may "
            "be random."
        )
        return
    seen = observed.seen[min(wrong)]
    dtypes = ", ".join(sorted({each.dtype for each in seen.parameters} & LOW_PRECISION))
    cause, change = "", _UNKNOWN
    if _is_low(seen):
        cause, change = f": they may be smaller than the rounding of {dtypes}", _ROUNDED
    yield TrainingFault(
        TrainingCheck.PRECISION,
        tuple(sorted(wrong)),
        f"{format_ratio(max(wrong.values()))} of the updates change no stored parameter.",
        f"On {format_ranks(sorted(wrong))}, the sampled values of "
        f"{plural(len(seen.parameters), 'parameter')} with a gradient were mostly the same after "
        f"each of {plural(len(seen.updates), 'update')} that were looked at{cause}. The learning "
        f"rate was {_format_rates(seen)} in them.",
        change,
    )


_ROUNDED = (
    "Keep the parameters in float32, and compute in bfloat16 by MixedPrecisionPolicy or autocast. "
    "If the learning rate is meant to be this small, or step() updates in some calls only, ignore "
    "this."
)
_UNKNOWN = (
    "Look at what step() does, at the learning rate and at the limit of clipping: float32 loses "
    "only updates below 6e-8 of a value. If step() updates in some calls only, ignore this."
)


def _format_rates(seen: TrainingSeen) -> str:
    least, most = (pick(each.rate for each in seen.updates) for pick in (min, max))
    return f"{most:.3g}" if least == most else f"{least:.3g} to {most:.3g}"


def _change_elsewhere(seen: TrainingSeen) -> bool:
    """Whether values in full precision change that no sampled update changed."""
    last = [seen.late.digests] if seen.late is not None and seen.late.digests else []
    digests = [each.digests for each in seen.updates] + last
    changed = [one != other for one, other in itertools.pairwise(digests)]
    lost = [each.num_lost == each.num_meant for each in seen.updates]
    return not _is_low(seen) and any(map(operator.and_, lost, changed))


def _autocast(observed: Observed) -> TrainingFault | None:
    gathered = {each.param_dtype for each in observed.run.manifest.units} & LOW_PRECISION
    others = {rank: each.autocast for rank, each in observed.seen.items()}
    ranks = [rank for rank, each in others.items() if each in LOW_PRECISION - gathered]
    if not ranks or len(gathered) != 1:
        return None
    [own], other = gathered, others[ranks[0]]
    return TrainingFault(
        TrainingCheck.PRECISION,
        tuple(ranks),
        f"Autocast to {other} casts parameters that are gathered in {own}.",
        f"The units gather their parameters in {own}, and the forward runs in an autocast region "
        f"of {other}. Each value is rounded to both: it has the range of float16 and the precision "
        "of bfloat16.",
        "Use one of them: remove the autocast region, or give both the same dtype.",
    )


def _loss_dtype(observed: Observed) -> TrainingFault | None:
    losses = {
        rank: next((loss for loss in each.losses if loss.dtype in LOW_PRECISION), None)
        for rank, each in observed.seen.items()
    }
    wrong = {rank: loss for rank, loss in losses.items() if loss is not None}
    if not wrong:
        return None
    first = wrong[min(wrong)]
    values = [abs(loss) for rank in wrong for loss in observed.seen[rank].values.losses.values()]
    bits = 7 if first.dtype == "bfloat16" else 10
    largest = max(values, default=0.0)
    steps = (
        f" Values near {largest:.3g} come in steps of {_spacing(largest, bits):.3g}."
        if largest
        else ""
    )
    return TrainingFault(
        TrainingCheck.PRECISION,
        tuple(sorted(wrong)),
        f"The loss is computed in {first.dtype}.",
        f"The result of cross_entropy has this dtype.{steps}",
        "Convert the logits before the loss: logits.float().",
        first.place,
        is_note=True,
    )


def _spacing(value: float, bits: int) -> float:
    """The distance between numbers of a dtype near a value, by the bits of its fraction."""
    return float(2.0 ** (math.floor(math.log2(value)) - bits))


def _reduction(observed: Observed) -> TrainingFault | None:
    manifest = observed.run.manifest
    sizes = {group.index: len(group.ranks) for group in manifest.process_groups}
    found = [
        (sizes.get(each.shard_group, 1) * sizes.get(each.replicate_group, 1), each.fqn)
        for each in manifest.units
        if each.reduce_dtype == "bfloat16" and each.num_trainable_parameters
    ]
    num = max(found, default=(0, ""))[0]
    if num < _MANY_RANKS:
        return None
    return TrainingFault(
        TrainingCheck.PRECISION,
        tuple(sorted(observed.seen)),
        f"Gradients are reduced in bfloat16 over {num} ranks.",
        f"{plural(len(found), 'unit')} of {len(manifest.units)} add up the gradients of {num} "
        "ranks in bfloat16, which keeps 8 bits of each partial sum.",
        "Reduce in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32). The messages are "
        "then twice as long.",
        is_note=True,
    )


def _frozen(observed: Observed) -> TrainingFault | None:
    units = observed.run.manifest.units
    found = [
        each
        for each in units
        if each.param_dtype in LOW_PRECISION
        and each.num_trainable_parameters < each.num_parameters
        and _stored_width(observed, each) >= _WIDTH_OF_FLOAT32
    ]
    num = sum(each.num_parameters - each.num_trainable_parameters for each in found)
    num_trained = sum(each.num_trainable_parameters for each in units)
    if num <= num_trained or not num_trained:  # a small part, such as an embedding
        return None
    num_bytes = num * (_WIDTH_OF_FLOAT32 - 2)
    return TrainingFault(
        TrainingCheck.PRECISION,
        tuple(sorted(observed.seen)),
        "Frozen parameters are stored in float32.",
        f"{format_count(num)} frozen parameters compute in {found[0].param_dtype}, and nothing "
        f"updates their float32 values: they take {format_bytes(num_bytes)} more over all ranks.",
        f"Convert the frozen parameters to {found[0].param_dtype} before the model is sharded.",
        is_note=True,
    )


_WIDTH_OF_FLOAT32 = 4


def _stored_width(observed: Observed, unit: Unit) -> float:
    """Bytes of a stored value, with padding."""
    groups = {group.index: len(group.ranks) for group in observed.run.manifest.process_groups}
    return unit.sharded_bytes * groups.get(unit.shard_group, 1) / unit.num_parameters


def _lost(seen: TrainingSeen) -> float | None:
    """Lost / intended updates of the sampled values; None if that shows nothing."""
    if any(each.keeps_copy for each in seen.parameters) or len(seen.updates) < LEAST_UPDATES:
        return None
    meant = sum(each.num_meant for each in seen.updates)
    return sum(each.num_lost for each in seen.updates) / meant if meant else None


def _moves(seen: TrainingSeen, lost: float) -> bool:
    """Whether the sampled updates together changed what each of them left."""
    last = seen.updates[-1]
    if last.num_still is None or not last.num_meant:
        return False
    return last.num_still / last.num_meant < _STILL_RATIO * lost


def _is_rising(seen: TrainingSeen) -> bool:
    """Whether the learning rate is unknown, or rose until the last sampled update or later."""
    rates = [each.rate for each in seen.updates]
    late = [] if seen.late is None else seen.late.rates.values()
    return rates[-1] <= 0 or max((rates[-1], *late)) > rates[0]


def _is_low(seen: TrainingSeen) -> bool:
    return any(each.dtype in LOW_PRECISION for each in seen.parameters)
