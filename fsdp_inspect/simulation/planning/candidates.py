"""Define the settings that a plan chooses, and list all combinations for a number of GPUs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args, get_type_hints

from fsdp_inspect.error_text import shorten, suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.simulation.planning.transformer import Checkpoint, Transformer

Dtype = Literal["bfloat16", "float32"]
Sync = Literal["every", "last"]
Products = Literal["param_dtype", "float8", "float8_rowwise", "mxfp8", "nvfp4"]
"""The format of matrix products; `param_dtype`: as the parameters in compute."""
Loss = Literal["whole", "compiled", "chunked", "fused", "linear"]
"""`whole`: float32 copies of all logits, as torch's cross_entropy. `compiled`: the same through
torch.compile, without the copies (torchtitan since 2025). `chunked`: float32 copies of an
eighth at a time (TorchTune, torchtitan). `fused`: one kernel on the bfloat16 logits, which become
their gradient (flash-attn's, llm-foundry). `linear`: fused with the output projection, so the
logits never exist (Liger)."""
Attention = Literal["flash1", "flash2", "cudnn"]
"""The kernel of attention: FlashAttention's first or second version, or cuDNN's on Hopper."""
Optimizer = Literal["adamw", "adamw_8bit", "in_backward"]
"""`in_backward`: each parameter is updated and its gradient freed inside the backward."""
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
    accumulation_sync: Sync = "every"
    """When gradients are reduced; until then they are unsharded."""
    checkpointing: Checkpoint = "none"
    checkpoint_every: int = 1
    """Only every n-th block has the checkpointing."""
    reshard_after_forward: bool = True
    blocks_per_unit: int = 1
    prefetch: int = 0
    offload: bool = False
    param_dtype: Dtype = "bfloat16"
    """The dtype of parameters in compute."""
    master_dtype: Dtype = "float32"
    """The dtype of sharded parameters, gradients and AdamW's states."""
    reduce_dtype: Dtype = "float32"
    products: Products = "param_dtype"
    float8_gather: bool = False
    """Float8 parameters are gathered in float8."""
    compiled: bool = False
    """torch.compile of each block fuses elementwise operations."""
    attention: Attention = "flash2"
    loss: Loss = "whole"
    optimizer: Optimizer = "adamw"
    adapter_rank: int = 0
    """LoRA: the rank of the trained matrices beside frozen ones; 0: all parameters are trained."""
    is_quantized: bool = False
    """QLoRA: frozen matrices have 4 bits."""
    is_sharded: bool = True
    """False: every rank holds all parameters in the dtype of compute, as in DDP or on one GPU."""
    replicas: int = 1
    """Copies of the model that all-reduce their gradients (HSDP)."""
    tensor_parallel: int = 1
    async_tensor_parallel: bool = False
    """Messages of tensor parallelism overlap with its matrix products."""
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @property
    def ranks_of_sequences(self) -> int:
        """The ranks that share one sequence."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def effort(self) -> int:
        """The number of settings that are not torch's or the trainer's default."""
        defaults = Candidate()
        names = (
            *("reshard_after_forward", "blocks_per_unit", "prefetch", "offload", "param_dtype"),
            *("replicas", "tensor_parallel", "accumulation_sync"),
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
        ranks = self.gpus // candidate.ranks_of_sequences
        return ranks * candidate.batch_size * candidate.microbatches * self.seq_len


def read_candidate(given: Mapping[str, Any]) -> Candidate:
    """A candidate with the given settings; the others are the defaults.

    Raises:
        ConfigError: A setting is unknown or has an invalid value.
    """
    hints = get_type_hints(Candidate)
    for name, value in given.items():
        if name not in hints:
            raise ConfigError(
                f"Unknown setting {shorten(name)!r}. {suggest(name, list(hints), what='settings')} "
                f"Expected one of {', '.join(hints)}. Correct --set."
            )
        _check_value(name, value, hints[name])
    candidate = replace(Candidate(), **given)
    if candidate.is_quantized and not candidate.adapter_rank:
        raise ConfigError(
            "Invalid --set is_quantized=true: parameters of 4 bits cannot be trained. Expected "
            "LoRA beside them. Add --set adapter_rank=16."
        )
    return candidate


def _check_value(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint)
    if choices:
        is_valid, expected = value in choices, " or ".join(map(str, choices))
    elif hint is bool:
        is_valid, expected = isinstance(value, bool), "true or false"
    else:
        least = 0 if name in ("prefetch", "adapter_rank") else 1
        is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
        expected = f"a whole number from {least}"
    if not is_valid:
        raise ConfigError(
            f"Invalid --set {name}={shorten(str(value))}. Expected {expected}. Correct the value."
        )


def fix_candidate(job: Job, given: Mapping[str, Any]) -> Candidate:
    """The one candidate of the given settings, with the microbatches that make the batch.

    Raises:
        ConfigError: A setting is invalid, or the mesh or the batch do not fit the number of GPUs.
    """
    candidate = read_candidate(given)
    ranks = candidate.ranks_of_sequences
    if not candidate.is_sharded:
        candidate = replace(candidate, replicas=max(job.gpus // ranks, 1))
    if (job.model.experts or 1) % candidate.expert_parallel:
        raise ConfigError(
            f"Invalid --set expert_parallel={candidate.expert_parallel}: {job.model.name} has "
            f"{job.model.experts} experts. Expected a divisor of them. Change the value."
        )
    if job.gpus % (ranks * candidate.replicas):
        raise ConfigError(
            f"Invalid mesh: {candidate.replicas} replicas and {ranks} ranks for each sequence do "
            f"not divide {job.gpus} GPUs. Expected sizes whose product does. Change --set or "
            "--gpus."
        )
    if "microbatches" in given:
        tokens = job.tokens_of_step(candidate)
        if job.batch_tokens not in (None, tokens):
            raise ConfigError(
                f"Invalid --set microbatches={candidate.microbatches}: a step of all ranks then "
                f"has {tokens} tokens. Expected --batch-tokens {job.batch_tokens}. Leave one of "
                "the two out."
            )
        return candidate
    whole = with_whole_batch(job, candidate)
    if whole is None:
        raise ConfigError(
            f"Invalid --batch-tokens {job.batch_tokens}: a microbatch of all ranks has "
            f"{job.tokens_of_step(candidate)} tokens. Expected a multiple of it. Change "
            "--batch-tokens, or --set batch_size."
        )
    return whole


def with_whole_batch(job: Job, candidate: Candidate) -> Candidate | None:
    """The candidate with the microbatches that make the batch of the job; None: no number does."""
    if job.batch_tokens is None:
        return candidate
    ranks = job.gpus // candidate.ranks_of_sequences
    count = _microbatches(job, candidate.batch_size * ranks)
    return None if count is None else replace(candidate, microbatches=count)


_MESH = ("tensor_parallel", "replicas")


def narrow_candidates(job: Job, given: Mapping[str, Any]) -> list[Candidate]:
    """All combinations that have the given settings.

    Raises:
        ConfigError: A setting is invalid.
    """
    read_candidate(given)
    sizes = (given["batch_size"],) if "batch_size" in given else BATCH_SIZES
    of_batch = () if job.batch_tokens is None else ("microbatches",)
    fixed = [name for name in (*_MESH, *of_batch) if name in given]
    listed = (
        replace(each, **given)
        for each in list_candidates(job, batch_sizes=sizes)
        if all(getattr(each, name) == given[name] for name in fixed)
    )
    beyond = ("context_parallel", "pipeline_parallel", "expert_parallel", "is_sharded")
    ways = [name for name in beyond if name in given]
    if ways:
        raise ConfigError(
            f"Invalid --set {ways[0]}: the search does not vary the mesh around it. Expected "
            "--fixed with all settings of one plan. Add --fixed."
        )
    return list(dict.fromkeys(listed))


def list_candidates(job: Job, batch_sizes: Sequence[int] = BATCH_SIZES) -> Iterator[Candidate]:
    """All combinations that fit the number of GPUs, the model and the batch."""
    for tensor_parallel, replicas in _meshes(job):
        ranks = job.gpus // tensor_parallel
        for batch_size in batch_sizes:
            microbatches = _microbatches(job, batch_size * ranks)
            if microbatches is None:
                continue
            syncs = _SYNCS if microbatches > 1 else _SYNCS[:1]
            for checkpointing, reshard, blocks, prefetch, offload, dtype, sync in product(
                CHECKPOINTS, (True, False), WRAPS, PREFETCHES, (False, True), _DTYPES, syncs
            ):
                if blocks > job.model.num_layers:
                    continue
                yield Candidate(
                    batch_size=batch_size,
                    microbatches=microbatches,
                    accumulation_sync=sync,
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
_SYNCS: tuple[Sync, ...] = ("every", "last")


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
REMEDIES: tuple[Mapping[str, Any], ...] = (
    {"reshard_after_forward": "true"},
    {"checkpointing": "selective"},
    {"checkpointing": "full"},
    {"checkpointing": "full", "reshard_after_forward": "true", "wrap": "block"},
    {"checkpointing": "full", "batch_size": 1},
    {"checkpointing": "full", "batch_size": 1, "offload": "cpu"},
)
"""Changes to try if a step does not fit, sorted by their cost in step time."""
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
