"""Judge from the first steps whether the training is right, before its speed.

Each check states what it saw. It is silent if a legal loop could look the same, or if what it needs
was not observed: then `not_checked` has the reason. The recorder observes (`trace.correctness`).

| check     | fault                                            | legal loops that look alike    |
|-----------|--------------------------------------------------|--------------------------------|
| optimizer | no tensor of any optimizer is a parameter of the | the optimizer of another       |
|           | model or has a gradient, and the model has some  | model: its tensors have some   |
| batches   | ranks that split the data read the same batches  | one batch in all steps (a      |
|           |                                                  | benchmark), context parallel   |
| loss      | ranks take means over unequal numbers of tokens  | the mean is scaled by the      |
|           |                                                  | number of tokens, or a sum     |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_high

from fsdp_inspect.formatting import capitalize, format_ranks, plural
from fsdp_inspect.results import Result
from fsdp_inspect.trace.correctness import LossSeen, TrainingSeen
from fsdp_inspect.trace.run import RankRecord, RunSource

LEAST_BATCHES = 3
"""Fewer equal batches may be equal by chance, or because they are padding."""
LEAST_RATIO = 2.0
"""Tokens on one rank that weigh this many times as much as on another are a fault."""
LEAST_LOSSES = 3
_DATA = ("replicate", "shard")
"""Dimensions of the mesh whose ranks split the data."""
_SPLIT = frozenset({*_DATA, "world", "other"})
"""Roles and dimensions of the groups in which the ranks can read different batches."""
_SCALE_TOLERANCE = 0.01


class TrainingCheck(StrEnum):
    """The checks."""

    OPTIMIZER = "optimizer"
    BATCHES = "batches"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class TrainingFault:
    """A mistake of the training."""

    check: TrainingCheck
    ranks: tuple[int, ...]
    """The ranks that show it."""
    is_certain: bool
    sentence: str
    """The fault in at most 12 words."""
    why: str
    """What was seen."""
    change: str
    """What to change."""
    place: str
    """The user's line, `file:line`; empty: unknown."""

    @property
    def headline(self) -> str:
        """The sentence, hedged unless the fault is certain."""
        first, rest = self.sentence[:1], self.sentence[1:]
        return self.sentence if self.is_certain else f"Probably: {first.lower()}{rest}"


@dataclass(frozen=True, slots=True)
class Correctness(Result):
    """The faults of the training, and the checks without an answer."""

    faults: tuple[TrainingFault, ...]
    """The faults; the one that makes most of the training useless first."""
    not_checked: Mapping[str, str]
    """The reason why a check has no answer, by check."""


def check_training(run: RunSource) -> Correctness:
    """Judge what the ranks observed in the first steps."""
    seen = {record.rank: record.training for record in run.ranks if record.training is not None}
    records = {record.rank: record for record in run.ranks}
    if not seen:
        reason = "No rank observed its first steps: an import, a forecast or an earlier recording."
        return Correctness((), dict.fromkeys((each.value for each in TrainingCheck), reason))
    not_checked: dict[str, str] = {}
    faults = [
        *_check_optimizer(seen, not_checked),
        *_check_batches(run, seen, records, not_checked),
        *_check_loss(seen, not_checked),
    ]
    return Correctness(tuple(faults), not_checked)


def _check_optimizer(
    seen: Mapping[int, TrainingSeen], not_checked: dict[str, str]
) -> Iterator[TrainingFault]:
    if not any(each.optimizers for each in seen.values()):
        not_checked[TrainingCheck.OPTIMIZER] = (
            "No update of a torch optimizer was observed, or more than 16 optimizers step."
        )
    stale = {
        rank: each
        for rank, each in seen.items()
        if each.num_with_gradient
        and each.optimizers
        and not any(one.num_of_model or one.num_with_gradient for one in each.optimizers)
    }
    if not stale:
        return
    first = stale[min(stale)]
    optimizer = first.optimizers[0]
    is_old = all(
        one.num_tensors == one.num_alike > 0 for each in stale.values() for one in each.optimizers
    )
    origin = (
        " They have the shapes of the parameters before the model was sharded." if is_old else ""
    )
    yield TrainingFault(
        TrainingCheck.OPTIMIZER,
        tuple(sorted(stale)),
        is_old,
        "The optimizer updates no parameter of the model.",
        f"None of its {plural(optimizer.num_tensors, 'tensor')} is a parameter of the model or had "
        f"a gradient in {plural(optimizer.num_steps, 'update')}, while "
        f"{first.num_with_gradient} of the model's {first.num_trainable} parameters have gradients."
        f"{origin}",
        "Create the optimizer after the model is sharded, from the parameters that it then has.",
        optimizer.place,
    )


def _check_batches(
    run: RunSource,
    seen: Mapping[int, TrainingSeen],
    records: Mapping[int, RankRecord],
    not_checked: dict[str, str],
) -> Iterator[TrainingFault]:
    read = {rank: tuple(batch.digest for batch in each.batches) for rank, each in seen.items()}
    of_rank = {rank: own for rank, own in read.items() if len(set(own)) >= LEAST_BATCHES}
    if len({_place_of(records[rank]) for rank in of_rank}) < 2:
        not_checked[TrainingCheck.BATCHES] = (
            f"Fewer than two ranks that split the data gave {LEAST_BATCHES} different batches from "
            "a DataLoader to the training thread, as tensors on the CPU."
        )
        return
    length = min(len(digests) for digests in of_rank.values())
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, digests in of_rank.items():
        alike.setdefault(digests[:length], []).append(rank)
    for digests, ranks in alike.items():
        places = {_place_of(records[rank]) for rank in ranks}
        if len(places) > 1 and _share_a_group(run, ranks):
            not_checked[TrainingCheck.BATCHES] = (
                "The ranks with equal batches are in one group, such as context-parallel ranks, "
                "which read the same batches."
            )
        elif len(places) > 1 and len(set(digests)) >= LEAST_BATCHES:
            is_all = len(ranks) == len(of_rank) > 2
            who = "All ranks" if is_all else capitalize(format_ranks(ranks))
            yield TrainingFault(
                TrainingCheck.BATCHES,
                tuple(sorted(ranks)),
                False,
                f"{who} read the same batches.",
                f"The first values of {plural(length, 'batch', 'batches')} are equal on "
                f"{format_ranks(sorted(ranks))}, and {len(set(digests))} of these batches differ "
                "from each other. Unless each rank then uses another part of them, these ranks do "
                "the work of one.",
                "Give each rank a part of the data of its own: a DistributedSampler, or a seed "
                "that contains the rank. If the ranks share batches on purpose, ignore this.",
                "",
            )
            return


def _share_a_group(run: RunSource, ranks: Sequence[int]) -> bool:
    """Whether the ranks are in one group that is neither of FSDP nor the world."""
    return any(
        set(ranks) <= {*group.ranks}
        for group in run.manifest.process_groups
        if group.role == "other" and group.parallelism not in _SPLIT and group.ranks
        if len(group.ranks) < run.manifest.world_size
    )


def _place_of(record: RankRecord) -> tuple[int, ...]:
    """The position of a rank along the dimensions that split the data."""
    known = tuple(record.coordinates[name] for name in _DATA if name in record.coordinates)
    return known or (record.rank,)


def _check_loss(
    seen: Mapping[int, TrainingSeen], not_checked: dict[str, str]
) -> Iterator[TrainingFault]:
    by_place: dict[tuple[int, int], dict[int, list[LossSeen]]] = {}
    for rank, each in seen.items():
        for loss in each.losses:
            own = by_place.setdefault((loss.step, loss.microbatch), {}).setdefault(rank, [])
            own.append(loss)
    single = [
        {rank: own[0] for rank, own in each.items()}
        for each in by_place.values()
        if all(len(own) == 1 for own in each.values())
    ]
    shared = [each for each in single if len(each) > 1]
    if len(shared) < LEAST_LOSSES:
        not_checked[TrainingCheck.LOSS] = (
            "The loss is not one mean of torch.nn.functional.cross_entropy on the CPU in each "
            "backward, or one rank only observed it."
        )
        return
    ratios = [_ratio_of(each) for each in shared]
    if 2 * sum(ratio >= LEAST_RATIO for ratio in ratios) < len(ratios):
        return
    place = max(range(len(shared)), key=lambda index: ratios[index])
    losses = shared[place]
    heavy, *_, light = sorted(losses, key=lambda rank: losses[rank].num_tokens)
    typical = median_high(ratios)
    yield TrainingFault(
        TrainingCheck.LOSS,
        (heavy,),
        False,
        f"Tokens on rank {heavy} weigh up to {max(ratios):.1f} times as much.",
        f"Each rank takes the mean over its own tokens: in step {losses[heavy].step}, "
        f"{losses[light].num_tokens} on rank {light} and {losses[heavy].num_tokens} on rank "
        f"{heavy}. The mean of the gradients over the ranks then weighs a token of the shorter "
        f"batch more: {typical:.1f} times as much in the median of {len(ratios)} microbatches.",
        "Divide the sum of the losses by the number of tokens of all ranks and microbatches, times "
        "the number of ranks (in Transformers: num_items_in_batch).",
        losses[heavy].place,
    )


def _ratio_of(losses: Mapping[int, LossSeen]) -> float:
    """The largest weight of a token / the smallest one, over the ranks; 1 if scales differ."""
    scales = [abs(loss.scale) for loss in losses.values()]
    counts = [loss.num_tokens for loss in losses.values() if loss.num_tokens]
    if not counts or max(scales) - min(scales) > _SCALE_TOLERANCE * max(scales):
        return 1.0
    return max(counts) / min(counts)
