"""Define a mistake of the training, and what the checks know of a run."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_inspect.analysis.context import remember
from fsdp_inspect.results import Result
from fsdp_inspect.trace.codes import EventKind, StepPart
from fsdp_inspect.trace.correctness import TrainingSeen
from fsdp_inspect.trace.run import RankRecord, RunSource

DATA_DIMENSIONS = ("replicate", "shard", "dp", "data")
"""Dimensions of the mesh whose ranks split the data."""
_WHOLE = frozenset({*DATA_DIMENSIONS, "world", "other", ""})

_TENSOR = "tp"
"""The dimension of the mesh whose ranks split tensors."""
SEQUENCE = "cp"
"""The dimension whose ranks hold the same parameters, and other parts of a sequence."""
_SPLIT = (_TENSOR, "ep", "pp")

LEAST_STREAK = 5
"""The fewest looked-at updates in a row that show a mistake which began late."""


class TrainingCheck(StrEnum):
    """The checks; the one whose fault makes most of the training useless first."""

    VALUES = "values"
    RESUME = "resume"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    MODE = "mode"
    REPLICAS = "replicas"
    ACCUMULATION = "accumulation"
    CLIPPING = "clipping"
    PRECISION = "precision"
    LOGGED = "logged"
    BATCHES = "batches"
    RANDOM = "random"
    LOSS = "loss"


@dataclass(frozen=True, slots=True)
class TrainingFault:
    """A mistake of the training."""

    check: TrainingCheck
    ranks: tuple[int, ...]
    """The ranks that show it."""
    sentence: str
    """The fault in at most 12 words."""
    why: str
    """What was seen."""
    change: str
    """What to change."""
    place: str = ""
    """The user's line, `file:line`; empty: unknown."""
    is_certain: bool = False
    is_note: bool = False
    """Whether it may well be intended, and costs little: the run is healthy all the same."""

    @property
    def headline(self) -> str:
        """The sentence, hedged unless the fault is certain."""
        if self.is_certain:
            return self.sentence
        first, rest = self.sentence[:1], self.sentence[1:]
        is_acronym = rest[:1].isupper()  # FSDP, DDP
        return f"Probably: {first if is_acronym else first.lower()}{rest}"


@dataclass(frozen=True, slots=True)
class Correctness(Result):
    """The faults of the training, and the checks without an answer."""

    faults: tuple[TrainingFault, ...]
    """The faults; the one that makes most of the training useless first."""
    notes: tuple[TrainingFault, ...]
    """What may be intended, and leaves the run healthy."""
    not_checked: Mapping[str, str]
    """The reason why a check has no answer, by check."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the ranks observed of their training."""

    run: RunSource
    seen: Mapping[int, TrainingSeen]
    records: Mapping[int, RankRecord]
    not_checked: dict[str, str] = field(default_factory=dict)
    """See `Correctness.not_checked`; the checks fill it."""

    def place_of(self, rank: int) -> tuple[int, ...]:
        """The position of a rank along the dimensions that split the data."""
        coordinates = self.records[rank].coordinates
        known = tuple(coordinates[name] for name in DATA_DIMENSIONS if name in coordinates)
        return known or (rank,)

    def list_peers(self) -> list[list[int]]:
        """The ranks that train the same part of the model on different data: two at least."""
        by_part: dict[object, list[int]] = {}
        for rank in sorted(self.seen):
            by_part.setdefault(self.model_part_of(rank), []).append(rank)
        return [
            ranks for ranks in by_part.values() if len({self.place_of(rank) for rank in ranks}) > 1
        ]

    def list_tensor_parallel(self) -> list[list[int]]:
        """The ranks of each tensor-parallel group: two at least."""
        return self.list_along(_TENSOR)

    def list_along(self, dimension: str) -> list[list[int]]:
        """The ranks that differ in one dimension only, by group: two at least."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in sorted(self.seen):
            coordinates = self.records[rank].coordinates
            if dimension in coordinates:
                others = tuple(sorted(each for each in coordinates.items() if each[0] != dimension))
                groups.setdefault(others, []).append(rank)
        return [ranks for ranks in groups.values() if len(ranks) > 1]

    def place_of_update(self, rank: int) -> str:
        """The line of the first optimizer of a rank that steps; empty: none was observed."""
        return next((each.place for each in self.seen[rank].optimizers), "")

    def model_part_of(self, rank: int) -> tuple[tuple[str, int], ...]:
        """The position of a rank along the dimensions that split the model or the sequence."""
        coordinates = self.records[rank].coordinates.items()
        return tuple(sorted(each for each in coordinates if each[0] not in _WHOLE))

    def parameters_part_of(self, rank: int) -> tuple[tuple[str, int], ...]:
        """The position of a rank along the dimensions that may split the parameters."""
        own = self.model_part_of(rank)
        return tuple(each for each in own if each[0] in self.list_splitting())

    def list_splitting(self) -> Set[str]:
        """The dimensions that may split the parameters; empty text: groups of the script.

        A dimension of an unknown purpose may, if its groups exchange data or nothing is known. So
        may all, if ranks send to each other, as stages do.
        """
        return remember(self.run, "dimensions that split parameters", self._find_splitting)

    def _find_splitting(self) -> Set[str]:
        manifest = self.run.manifest
        kinds = [int(StepPart.GROUP), int(EventKind.POINT_TO_POINT)]
        rows = self.run.summary(ranks=[min(self.seen)], kinds=kinds)
        sends = bool((rows.kind == EventKind.POINT_TO_POINT).any())
        used = set() if sends else set(rows.group.tolist())
        return {
            each.parallelism
            for each in manifest.process_groups
            if each.role == "other"
            and 1 < len(each.ranks) < manifest.world_size
            and each.parallelism not in (*DATA_DIMENSIONS, SEQUENCE)
            and (each.parallelism in _SPLIT or not used or each.index in used)
        }
