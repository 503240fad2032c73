"""Note ranks that draw the same random numbers, or that should and do not.

- Seen: a digest of the random state before the first forward of each step, and whether the forward
  changes it, as dropout does.
- Proof: in each step, the states of ranks with different data are equal; those of tensor-parallel
  ranks differ.
- Refuted by: a forward that draws no number. Both can be intended: dropout masks that agree cost
  little, and ranks that split a sequence draw their own. Hence a note.
"""

from collections.abc import Iterator

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.formatting import capitalize, format_ranks, plural

_LEAST_STEPS = 3


def check_random(observed: Observed) -> Iterator[TrainingFault]:
    """Note ranks that draw the same random numbers, or that should and do not."""
    states = {
        rank: {each.step: each.before for each in seen.random if each.is_used}
        for rank, seen in observed.seen.items()
    }
    if not any(seen.random for seen in observed.seen.values()):
        observed.not_checked[TrainingCheck.RANDOM] = (
            "No random state was observed: the first forward of a step was not seen."
        )
        return
    for ranks in observed.list_peers():
        rounds = _rounds(states, ranks)
        if len(rounds) >= _LEAST_STEPS and all(len(set(each)) == 1 for each in rounds):
            yield TrainingFault(
                TrainingCheck.RANDOM,
                tuple(ranks),
                f"{capitalize(format_ranks(ranks))} draw the same random numbers.",
                f"In {plural(len(rounds), 'step')}, the random states of these ranks are equal "
                "before the forward, which draws from them: their dropout masks agree.",
                "Seed each rank differently after the model is made: "
                "torch.manual_seed(seed + rank).",
                is_note=True,
            )
            break
    for ranks in observed.list_tensor_parallel():
        rounds = _rounds(states, ranks)
        if len(rounds) >= _LEAST_STEPS and all(len(set(each)) > 1 for each in rounds):
            yield TrainingFault(
                TrainingCheck.RANDOM,
                tuple(ranks),
                f"Tensor-parallel {format_ranks(ranks)} draw different random numbers.",
                f"In {plural(len(rounds), 'step')}, the random states of these ranks differ before "
                "the forward, which draws from them. Dropout of an activation that all of them "
                "hold then differs.",
                "Give the ranks of one tensor-parallel group one seed. If they split the sequence "
                "where they draw, ignore this.",
                is_note=True,
            )
            return


def _rounds(states: dict[int, dict[int, int]], ranks: list[int]) -> list[list[int]]:
    """The states of the ranks in each step in which all of them draw."""
    own = [states[rank] for rank in ranks]
    return [[each[step] for each in own] for step in sorted(set.intersection(*map(set, own)))]
