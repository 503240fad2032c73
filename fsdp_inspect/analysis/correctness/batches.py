"""Find ranks that read the same batches or must do so, and epochs with the same order.

- Seen: a digest of values of each batch of a `DataLoader` in the first steps, and of the first 8
  batches of up to 4 passes.
- Proof: at least three different batches are equal on ranks that split the data, or six of a later
  pass, with a backward after each. A note: a sampler shuffles, and two passes in a row begin with
  the same six different batches, or the loaders of a pipeline's first and last stage differ in each
  of the first batches. What the models of the ranks of one tensor-parallel group receive differs in
  all of the first batches.
- Refuted by: one batch in all steps, as in a benchmark; ranks of one context-parallel group; what
  the model receives differs between the ranks, because each takes another part of the batch; a
  sampler that does not shuffle.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.mesh_dimensions import STAGES
from fsdp_inspect.formatting import capitalize, format_ranks, plural
from fsdp_inspect.trace.run import RunSource

LEAST_BATCHES = 3
"""Fewer equal batches may be equal by chance, or because they are padding."""
_SPLIT = frozenset({"replicate", "shard", "world", "other"})
"""Roles and dimensions of the groups in which the ranks can read different batches."""


_LEAST_FIRST = 6
"""Fewer equal batches at the start of two passes may be chance."""


def check_batches(observed: Observed) -> Iterator[TrainingFault]:
    """Find ranks that read the same batches, and epochs with the same order."""
    yield from _same_order(observed)
    yield from _differ_in_tensor_parallel(observed)
    yield from _differ_in_stages(observed)
    read = {
        rank: tuple(batch.digest for batch in each.batches) for rank, each in observed.seen.items()
    }
    of_rank = {rank: own for rank, own in read.items() if len(set(own)) >= LEAST_BATCHES}
    if len({observed.place_of(rank) for rank in of_rank}) < 2:
        observed.not_checked[TrainingCheck.BATCHES] = (
            f"Fewer than two ranks that split the data gave {LEAST_BATCHES} different batches from "
            "a DataLoader to the training thread, as tensors on the CPU."
        )
        return
    inputs = {
        rank: tuple(batch.inputs for batch in each.batches) for rank, each in observed.seen.items()
    }
    fault = _find_alike(observed, of_rank, inputs)
    if fault is None and TrainingCheck.BATCHES not in observed.not_checked:
        fault = _same_later(observed)
    if fault is not None:
        yield fault


def _same_later(observed: Observed) -> TrainingFault | None:
    """Find a later pass whose batches are equal on ranks, all of which a backward followed."""
    num = min(len(each.passes) for each in observed.seen.values())
    for number in range(1, num):
        passes = {rank: each.passes[number] for rank, each in observed.seen.items()}
        length = min(min(len(each.digests), len(each.inputs)) for each in passes.values())
        read = {rank: tuple(each.digests[:length]) for rank, each in passes.items()}
        if all(len({*own} - {0}) >= _LEAST_FIRST for own in read.values()):
            inputs = {rank: tuple(each.inputs[:length]) for rank, each in passes.items()}
            where = f" of pass {number + 1} over a DataLoader"
            fault = _find_alike(observed, read, inputs, where)
            if fault is not None:
                return fault
    return None


def _find_alike(
    observed: Observed,
    of_rank: Mapping[int, tuple[int, ...]],
    inputs: Mapping[int, tuple[int | None, ...]],
    where: str = "",
) -> TrainingFault | None:
    """Find ranks with equal batches, by digests of these and of what the models received."""
    length = min(len(digests) for digests in of_rank.values())
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, digests in of_rank.items():
        alike.setdefault(digests[:length], []).append(rank)
    for digests, ranks in alike.items():
        places = {observed.place_of(rank) for rank in ranks}
        if len(places) > 1 and _share_a_group(observed.run, ranks):
            observed.not_checked[TrainingCheck.BATCHES] = (
                "The ranks with equal batches are in one group, such as context-parallel ranks, "
                "which read the same batches."
            )
        elif len({inputs[rank][:length] for rank in ranks}) > 1:
            observed.not_checked[TrainingCheck.BATCHES] = (
                "The ranks read the same batches, and give the model different parts of them."
            )
        elif len(places) > 1 and len(set(digests)) >= LEAST_BATCHES:
            is_all = len(ranks) == len(of_rank) > 2
            who = "All ranks" if is_all else capitalize(format_ranks(ranks))
            return TrainingFault(
                TrainingCheck.BATCHES,
                tuple(sorted(ranks)),
                f"{who} read the same batches.",
                f"The sampled values of {plural(length, 'batch', 'batches')}{where} are equal "
                f"on {format_ranks(sorted(ranks))}, and {len(set(digests))} of these batches "
                "differ from each other. Unless each rank then uses another part of them, these "
                "ranks do the work of one.",
                "Give each rank a part of the data of its own: a DistributedSampler, or a seed "
                "that contains the rank. If the ranks share batches on purpose, ignore this.",
                "",
            )
    return None


def _same_order(observed: Observed) -> Iterator[TrainingFault]:
    """Note two passes in a row that read the same batches, although a sampler shuffles."""
    ranks = []
    for rank, each in observed.seen.items():
        shuffled = [one for one in each.passes if one.is_shuffled]
        for first, second in pairwise(shuffled):
            num = min(len(first.digests), len(second.digests))
            is_same = first.digests[:num] == second.digests[:num]
            if is_same and len({*first.digests[:num]} - {0}) >= _LEAST_FIRST:
                ranks.append(rank)
                break
    if ranks:
        yield TrainingFault(
            TrainingCheck.BATCHES,
            tuple(sorted(ranks)),
            "Two epochs read the batches in the same order.",
            f"On {format_ranks(sorted(ranks))}, two passes over the data in a row begin with the "
            "same batches, although their sampler shuffles.",
            "Call sampler.set_epoch(epoch) of the DistributedSampler before each epoch, or seed "
            "the sampler's generator once.",
            is_note=True,
        )


def _differ_in_tensor_parallel(observed: Observed) -> Iterator[TrainingFault]:
    """Find ranks of one tensor-parallel group whose models receive different batches."""
    for ranks in observed.list_tensor_parallel():
        received = [[each.inputs for each in observed.seen[rank].batches] for rank in ranks]
        rounds = list(zip(*received, strict=False))
        if len(rounds) < LEAST_BATCHES:
            continue
        if all(None not in each and len(set(each)) == len(ranks) for each in rounds):
            yield TrainingFault(
                TrainingCheck.BATCHES,
                tuple(ranks),
                f"{capitalize(format_ranks(ranks))} share tensors, and train on different batches.",
                "These ranks are one tensor-parallel group: each computes a part of every "
                f"activation. In {plural(len(rounds), 'batch', 'batches')}, their models received "
                "different values.",
                "Give all ranks of a tensor-parallel group the same batch: create the sampler with "
                "the size and the rank of the data-parallel dimension of the mesh.",
            )
            return


def _differ_in_stages(observed: Observed) -> Iterator[TrainingFault]:
    """Note the first and the last stage of a pipeline whose loaders give different batches."""
    for ranks in observed.list_along(STAGES):
        ranks.sort(key=lambda rank: observed.records[rank].coordinates[STAGES])
        ends = ranks[0], ranks[-1]
        read = [[each.digest for each in observed.seen[rank].batches] for rank in ends]
        rounds = list(zip(*read, strict=False))
        if len(rounds) < LEAST_BATCHES or not all(first != last for first, last in rounds):
            continue
        yield TrainingFault(
            TrainingCheck.BATCHES,
            ends,
            "The first and the last stage of a pipeline read different batches.",
            f"The DataLoaders of {format_ranks(ends)} gave other values in each of "
            f"{plural(len(rounds), 'batch', 'batches')}. The last stage compares the outputs for "
            "the first stage's batch with the labels of its own.",
            "Give all stages the same batches: create the sampler with the size and the rank of "
            "the data-parallel dimension. If the last stage reads labels only, ignore this.",
            is_note=True,
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
