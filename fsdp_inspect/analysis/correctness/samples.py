"""Compare the sampled parameters of ranks that hold the same part, and of those that do not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.analysis.correctness.faults import Observed
from fsdp_inspect.trace.correctness import ParameterSeen, TrainingSeen, UpdateSeen

LEAST_UPDATES = 3
"""Fewer updates prove nothing about all of them."""
NO_SAMPLES = "No update of a parameter in float32, bfloat16 or float16 was sampled."
APART = "The ranks train apart and make their values equal again, as in local SGD."
TOLERANCE = 1e-3
"""Norms of samples that differ by less are equal: kernels of other devices round differently."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold one part of a sampled parameter."""

    parameter: ParameterSeen
    at: int
    """Its place in the lists of an update."""
    updates: dict[int, list[UpdateSeen]]
    """The sampled updates by rank, equally many and in the same steps."""
    ends: dict[int, int]
    """The digests at the end by rank, of the ranks that know it."""

    @property
    def num_updates(self) -> int:
        """The sampled updates."""
        return min(len(each) for each in self.updates.values())

    @property
    def starts_equal(self) -> bool:
        """Whether the ranks held equal values before the first sampled update."""
        return self.num_updates > 0 and self.is_equal(0)

    def is_equal(self, update: int) -> bool:
        """Whether the ranks held equal values before one update."""
        return len({each[update].digests[self.at] for each in self.updates.values()}) == 1

    def sums(self, update: int, *, before: bool) -> list[float] | None:
        """The weighted sum on each rank in one update, or after the backward before it.

        None: a rank does not know its own.
        """
        lists = [
            each[update].weighted_before if before else each[update].weighted
            for each in self.updates.values()
        ]
        known = [each[self.at] if self.at < len(each) else None for each in lists]
        found = [each for each in known if each is not None]
        return found if len(found) == len(known) else None

    def gradients(self, update: int) -> list[float | None]:
        """The norm on each rank in one update."""
        return [each[update].gradients[self.at] for each in self.updates.values()]

    def values(self, update: int) -> list[float | None]:
        """The norm on each rank before one update."""
        return [each[update].values[self.at] for each in self.updates.values()]

    @property
    def meets_again(self) -> bool:
        """Whether the values of the ranks differ before one update, and are equal later."""
        updates = range(self.num_updates)
        apart = [n for n in updates if differ(self.values(n))]
        return bool(apart) and (
            self.ends_equal or any(self.is_equal(n) for n in updates if n > apart[0])
        )

    @property
    def ends_equal(self) -> bool:
        """Whether the ranks are known to hold equal values at the end."""
        return len(self.ends) == len(self.updates) and len(set(self.ends.values())) == 1

    @property
    def gradients_differ(self) -> bool:
        """Whether the gradients of the ranks differ in every update."""
        updates = range(self.num_updates)
        return len(updates) >= LEAST_UPDATES and all(differ(self.gradients(n)) for n in updates)


def differ(values: Sequence[float | None], tolerance: float = TOLERANCE) -> bool:
    """Whether known values differ by more than a fraction of the largest magnitude."""
    known = [each for each in values if each is not None]
    return len(known) > 1 and max(known) - min(known) > tolerance * max(map(abs, known))


def _align(updates: Mapping[int, list[UpdateSeen]]) -> dict[int, list[UpdateSeen]]:
    """Updates in the same steps on all ranks: of each common step the first, if a rank has more."""
    num = min(map(len, updates.values()))
    steps = {tuple(one.step for one in each[:num]) for each in updates.values()}
    if len(steps) == 1:
        return {rank: each[:num] for rank, each in updates.items()}
    firsts = {rank: {one.step: one for one in reversed(each)} for rank, each in updates.items()}
    common = sorted(set.intersection(*map(set, firsts.values())))
    return {rank: [each[step] for step in common] for rank, each in firsts.items()}


def values_change(seen: TrainingSeen) -> bool:
    """Whether the sampled values of a rank differ between its looks at them."""
    late = [] if seen.late is None else [seen.late.began, seen.late.digests]
    looks = [*(each.digests for each in seen.updates), *late]
    return len({tuple(each) for each in looks if each}) > 1


def list_holders(observed: Observed) -> Iterator[Holders]:
    """The ranks that hold the same part of each sampled parameter: at least two."""
    ranks_of: dict[tuple[object, ...], dict[int, int]] = {}
    for rank, each in observed.seen.items():
        for at, parameter in enumerate(each.parameters if each.updates else ()):
            part_of = (
                observed.model_part_of if parameter.is_replica else observed.parameters_part_of
            )
            key = (parameter.name, *parameter.part), part_of(rank)
            ranks_of.setdefault(key, {})[rank] = at
    for ranks in ranks_of.values():
        if len(ranks) > 1 and len(set(ranks.values())) == 1:
            first = min(ranks)
            late = {rank: observed.seen[rank].late for rank in ranks}
            yield Holders(
                observed.seen[first].parameters[ranks[first]],
                ranks[first],
                _align({rank: observed.seen[rank].updates for rank in ranks}),
                {
                    rank: each.digests[ranks[first]]
                    for rank, each in late.items()
                    if each and each.digests
                },
            )
