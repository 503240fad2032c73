"""Find runs that would be better off with another sharder: DDP instead of FSDP, or the reverse.

R35 applies to a sharded run whose model, gradients, optimizer state and activations fit one device,
and to which DDP would save time. A DDP run states what FSDP would save of its memory. Both numbers
are inferred (`analysis.memory.sharding_worth`).
"""

from collections.abc import Iterator

from fsdp_inspect.advice.evidence import Effect, Evidence, Finding
from fsdp_inspect.analysis.memory.sharding_worth import (
    FITS_RATIO,
    ReplicationSaving,
    WholeMemory,
    describe_replication_saving,
)
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.comparison.noise import WORTH_NAMING_RATIO
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio

_MEMORY_LIMITS = (Limit.MEMORY, Limit.MEMORY_CREEP)


def find_other_sharders(evidence: Evidence) -> Iterator[Finding]:
    """DDP for a model that fits one device; FSDP for the memory of a DDP run."""
    memory, saving = evidence.whole_memory, evidence.replication
    if memory is None:
        return
    if memory.is_sharded:
        yield from _replicate(evidence, memory, saving)
    else:
        yield from _shard(evidence, memory)


def _replicate(
    evidence: Evidence, memory: WholeMemory, saving: ReplicationSaving | None
) -> Iterator[Finding]:
    is_short_of_memory = evidence.verdict.limit in _MEMORY_LIMITS
    if not memory.fits or is_short_of_memory or saving is None:
        return
    assert memory.total_bytes is not None
    if saving.high_ns is None:
        yield from _unknown_saving(evidence, memory, saving)
        return
    assert saving.low_ns is not None
    assert saving.all_reduce_ns is not None
    if saving.high_ns <= 0 or not evidence.is_worth_naming(saving.high_ns):
        return
    added = memory.total_bytes - (evidence.peak_bytes or memory.total_bytes)
    yield Finding(
        "R35",
        (),
        f"Sharding is not needed for memory: {memory.sentence.removesuffix('.')}.",
        f"{memory.parts}. FSDP's collectives are exposed for {format_ns(saving.exposed_ns)} a "
        f"step; one all-reduce of the gradients takes {format_ns(saving.all_reduce_ns)}, inferred "
        "from the fitted link.",
        ("Train with DistributedDataParallel, and compare the two runs.",),
        {"exposed_ns": saving.exposed_ns},
        effect=Effect(
            sentence=describe_replication_saving(saving),
            saved_low_ns=max(saving.low_ns, 0),
            saved_high_ns=saving.high_ns,
            added_low_bytes=max(added, 0),
            added_high_bytes=max(added, 0),
            is_exposed=True,
        ),
        assumptions=(
            "DDP uses gradient_as_bucket_view=True and the dtype of the weights.",
            "Waits for late ranks do not count, because DDP has them too.",
            "At best backward hides all buckets of the gradients but the last one, at worst none.",
            f"At most {format_ratio(FITS_RATIO)} of the device is used.",
        ),
        snippet="model = DistributedDataParallel(model, gradient_as_bucket_view=True)",
    )


def _unknown_saving(
    evidence: Evidence, memory: WholeMemory, saving: ReplicationSaving
) -> Iterator[Finding]:
    """The model fits one device, but the time of DDP's all-reduce is unknown."""
    if evidence.is_worth_naming(saving.exposed_ns):
        yield Finding(
            "R35",
            (),
            f"Sharding is not needed for memory: {memory.sentence.removesuffix('.')}.",
            f"{memory.parts}. FSDP's collectives are exposed for {format_ns(saving.exposed_ns)} a "
            "step.",
            ("Record the same training with DistributedDataParallel, and compare the two runs.",),
            {},
            effect=Effect(sentence=describe_replication_saving(saving)),
        )


def _shard(evidence: Evidence, memory: WholeMemory) -> Iterator[Finding]:
    freed, peak = memory.freed_bytes, evidence.peak_bytes
    if freed is None or not peak or freed < WORTH_NAMING_RATIO * peak:
        return
    yield Finding(
        "R35",
        (),
        f"Sharding would free at most {format_bytes(freed)} on each rank.",
        f"{memory.parts}. FSDP divides all but the last of these by {memory.num_ranks}.",
        ("If memory limits the batch or the model, shard it with fully_shard.",),
        effect=Effect(
            sentence=memory.sentence,
            added_low_bytes=-freed,
            added_high_bytes=0,
        ),
        assumptions=("The gathered units and their buffers take a part of the saving.",),
        snippet=(
            "for block in model.layers:  # the blocks of your model\n"
            "    fully_shard(block, mesh=mesh)\n"
            "fully_shard(model, mesh=mesh)"
        ),
    )
