"""Define the settings that a plan chooses, and list all combinations for a number of GPUs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from fsdp_inspect.simulation.planning.transformer import Checkpoint, Transformer

Dtype = Literal["bfloat16", "float32"]
CHECKPOINTS: tuple[Checkpoint, ...] = ("none", "selective", "full")
WRAPS = (1, 2)
"""Blocks in one unit."""
PREFETCHES = (0, 2)
"""Explicit prefetch depth; 0: torch's own order."""
TENSOR_PARALLEL = (1, 2, 4, 8)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Sequences of a microbatch, for each data-parallel rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One combination of settings."""

    batch_size: int = 1
    """Sequences of a microbatch, for each data-parallel rank."""
    microbatches: int = 1
    checkpointing: Checkpoint = "none"
    reshard_after_forward: bool = True
    blocks_per_unit: int = 1
    prefetch: int = 0
    offload: bool = False
    param_dtype: Dtype = "bfloat16"
    replicas: int = 1
    """Copies of the model that all-reduce their gradients (HSDP)."""
    tensor_parallel: int = 1

    @property
    def effort(self) -> int:
        """The number of settings that are not torch's or the trainer's default."""
        defaults = Candidate()
        names = (
            *("reshard_after_forward", "blocks_per_unit", "prefetch", "offload", "param_dtype"),
            *("replicas", "tensor_parallel"),
        )
        return sum(getattr(self, name) != getattr(defaults, name) for name in names)

    @property
    def kind(self) -> tuple[object, ...]:
        """The settings in which reported plans differ: not only in prefetch or grouping."""
        return (
            self.checkpointing,
            self.offload,
            self.param_dtype,
            self.replicas,
            self.tensor_parallel,
            self.reshard_after_forward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The training to plan."""

    model: Transformer
    gpus: int
    gpus_per_node: int
    seq_len: int
    tokens: float
    """Tokens of the whole training."""
    batch_tokens: int | None = None
    """Tokens of a step over all ranks; None: free, with one microbatch."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return -(-self.gpus // self.gpus_per_node)

    def tokens_of_step(self, candidate: Candidate) -> int:
        """Tokens of one step over all ranks."""
        ranks = self.gpus // candidate.tensor_parallel
        return ranks * candidate.batch_size * candidate.microbatches * self.seq_len


def list_candidates(job: Job, batch_sizes: Sequence[int] = BATCH_SIZES) -> Iterator[Candidate]:
    """All combinations that fit the number of GPUs, the model and the batch."""
    for tensor_parallel, replicas in _meshes(job):
        ranks = job.gpus // tensor_parallel
        for batch_size in batch_sizes:
            microbatches = _microbatches(job, batch_size * ranks)
            if microbatches is None:
                continue
            for checkpointing, reshard, blocks, prefetch, offload, dtype in product(
                CHECKPOINTS, (True, False), WRAPS, PREFETCHES, (False, True), _DTYPES
            ):
                if blocks > job.model.num_layers:
                    continue
                yield Candidate(
                    batch_size=batch_size,
                    microbatches=microbatches,
                    checkpointing=checkpointing,
                    reshard_after_forward=reshard,
                    blocks_per_unit=blocks,
                    prefetch=prefetch,
                    offload=offload,
                    param_dtype=dtype,
                    replicas=replicas,
                    tensor_parallel=tensor_parallel,
                )


_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")


def _meshes(job: Job) -> Iterator[tuple[int, int]]:
    """Tensor-parallel ranks within a node, and replicas of whole nodes."""
    heads = job.model.num_kv_heads
    for tensor_parallel in TENSOR_PARALLEL:
        is_inside = job.gpus_per_node % tensor_parallel == job.gpus % tensor_parallel == 0
        if not is_inside or heads % tensor_parallel:
            continue
        yield tensor_parallel, 1
        if job.num_nodes > 1 and job.gpus % job.gpus_per_node == 0:
            shards = job.gpus_per_node // tensor_parallel
            if shards > 1:
                yield tensor_parallel, job.num_nodes


def _microbatches(job: Job, sequences: int) -> int | None:
    """The microbatches that make the batch; None: no whole number does."""
    if job.batch_tokens is None:
        return 1
    count, rest = divmod(job.batch_tokens, sequences * job.seq_len)
    return count if count and not rest else None


# --- Define the keywords of a builder that a plan chooses, and list their combinations.


KNOBS: Mapping[str, tuple[Any, ...]] = {
    "batch_size": BATCH_SIZES,
    "checkpointing": ("full", "selective", "none"),
    "reshard_after_forward": ("true", "false"),
    "offload": ("cpu", "none"),
}
"""The keywords that a plan varies, each with its values from the least memory to the most."""
AS_BUILT = "as built"
"""A setting that the builder has no keyword for."""


@dataclass(frozen=True, slots=True)
class BuilderCandidate:
    """One combination of a builder's keywords."""

    items: tuple[tuple[str, Any], ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The keywords and their values."""
        return dict(self.items)

    @property
    def batch_size(self) -> int | None:
        """Sequences of a microbatch; None: as the builder has it."""
        value = self.settings.get("batch_size")
        return value if isinstance(value, int) else None

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return int(self.settings.get("microbatches", 1))

    @property
    def checkpointing(self) -> str:
        """The activation checkpointing."""
        return str(self.settings.get("checkpointing", AS_BUILT))

    @property
    def offload(self) -> bool:
        """Whether parameters, gradients and states are on the host."""
        return self.settings.get("offload") == "cpu"

    @property
    def reshards(self) -> bool | None:
        """Whether units are freed after forward; None: as the builder has it."""
        value = self.settings.get("reshard_after_forward")
        return None if value is None else value == "true"

    @property
    def effort(self) -> int:
        """The number of settings that are not torch's default."""
        return (self.reshards is False) + self.offload

    @property
    def kind(self) -> tuple[object, ...]:
        """The settings in which reported plans differ."""
        return (self.checkpointing, self.offload, self.reshards)

    def change(self, **changes: Any) -> "BuilderCandidate":
        """A copy with other values; a keyword that it lacks stays out."""
        kept = ((name, changes.get(name, value)) for name, value in self.items)
        return BuilderCandidate(tuple(kept))


def list_builder_candidates(
    knobs: Mapping[str, Collection[Any]],
) -> Iterator[BuilderCandidate]:
    """All combinations of the values."""
    for values in product(*knobs.values()):
        yield BuilderCandidate(tuple(zip(knobs, values, strict=True)))
