"""Which tuning rules are there, what sets each of them off, and what cannot be seen of it?

Rules are what is publicly known about tuning FSDP, numbered R1 to R34. A rule comes up as

- `finding`: before any plan; told from settings or from the trace (`advice.findings`);
- `change`: a change of the plan, played on the recorded run (`advice.plan_space`, `advice.search`);
- `check`: a run that does not do what its plan says (`analysis.plan_check.check`);
- `always`: part of how everything is measured, never said by itself.

`unseen` is what would set the rule off, too, but is in no run that is recorded or imported here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Comes = Literal["finding", "change", "check", "always"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the table."""

    title: str
    """What it says to do, in a few words."""
    comes: tuple[Comes, ...]
    trigger: str
    """What sets it off here."""
    unseen: str = ""
    """What would set it off, too, and why it cannot be seen; empty: nothing is missing."""


RULES: Mapping[str, Rule] = {
    "R1": Rule(
        "one unit for each block",
        ("finding", "change"),
        "One unit, or one with most parameters; a root that holds the blocks' parameters.",
    ),
    "R2": Rule(
        "merge small units",
        ("change",),
        "Played: fewer units take less time, since each collective costs latency.",
    ),
    "R3": Rule(
        "split the unit that is too large",
        ("finding", "change"),
        "A unit gathers more than twice what the median unit does, and 2 % of the peak more.",
    ),
    "R4": Rule(
        "keep the last unit unsharded after forward",
        ("change",),
        "Played: backward begins with it, so dropping it gathers it twice.",
    ),
    "R5": Rule(
        "let the last block reshard",
        ("check", "change"),
        "It stayed unsharded though declared to reshard; or resharding it is played to make room.",
    ),
    "R6": Rule(
        "keep parameters unsharded after forward",
        ("change",),
        "Played: backward without all-gathers is faster, and the peak stays within the limit.",
    ),
    "R7": Rule(
        "reshard to the node only (an integer reshard_after_forward)",
        ("finding", "change"),
        "All-gathers of backward cross nodes and are exposed; inside a node the bus is three times "
        "as fast.",
        "How fast a node is inside, where no collective ran there: then that is said.",
    ),
    "R8": Rule(
        "do not reshard the root when backward follows at once",
        ("check",),
        "A unit was gathered again in backward though declared to stay unsharded. The search "
        "plays other settings for units inside the root.",
    ),
    "R9": Rule(
        "prefetch one unit ahead in forward",
        ("change", "check"),
        "Played: an all-gather issued earlier is waited for less; or the plan's never ran.",
        "Synchronisations inside a unit (cudaStreamSynchronize): recorded runs hold no CUDA calls.",
    ),
    "R10": Rule(
        "prefetch deeper, or allow more reduce-scatter inputs",
        ("change",),
        "Played: uneven units, whose collectives find room behind another unit's compute.",
    ),
    "R11": Rule(
        "name what backward prefetches",
        ("change", "check"),
        "Played; or a unit is never gathered early in backward though the plan prefetches it.",
    ),
    "R12": Rule(
        "limit_all_gathers=True (FSDP1)",
        ("finding",),
        "An imported trace of FSDP1 with more than two all-gathers under way at once.",
        "Allocation retries of FSDP1: it has no place for a recorder, and a profiler's trace holds "
        "no counter of the allocator.",
    ),
    "R13": Rule(
        "reduce gradients in bfloat16",
        ("change",),
        "Played where bfloat16 is allowed (--allow-dtypes).",
    ),
    "R14": Rule(
        "gather in bfloat16",
        ("finding", "change", "check"),
        "Units gather in float32 on a GPU, or beside others in 16 bits; played where allowed.",
    ),
    "R15": Rule(
        "shard within a node, replicate across (HSDP)",
        ("change",),
        "Played where the run has an all-reduce to learn its time from, or the network is given.",
    ),
    "R16": Rule(
        "reduce gradients with the last microbatch only, or with each",
        ("change", "check"),
        "Played on runs that accumulate; or the steps accumulate otherwise than the plan says.",
    ),
    "R17": Rule(
        "keep parameters unsharded between microbatches",
        ("change",),
        "Played on runs that accumulate.",
    ),
    "R18": Rule(
        "activation checkpointing on, off or selective",
        ("change",),
        "Played where memory is limited and the memory step tells what the blocks hold.",
        "That a run could do without it: what its activations would hold is not known.",
    ),
    "R19": Rule(
        "give the host less to issue",
        ("finding",),
        "The compute stream starves for 10 % of the step.",
    ),
    "R20": Rule(
        "unset CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("finding",),
        "It is set, and reduce-scatter is exposed for 2 % of the step.",
    ),
    "R21": Rule(
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ("finding",),
        "A tenth of what is reserved lies unused at the peak, or the allocator freed its cache.",
    ),
    "R22": Rule(
        "gather asynchronously, with explicit prefetch",
        ("change",),
        "Played where the backend holds the host in its all-gathers.",
        "Memory that lies idle in the all-gather stream's pool: the allocator counts by device.",
    ),
    "R23": Rule(
        "communication buffers of the process group (symmetric memory)",
        ("finding",),
        "On GPUs communication slows the compute beside it by 5 % and more, for 2 % of the step.",
        "NVLink SHARP and how many channels NCCL uses: neither is recorded.",
    ),
    "R24": Rule(
        "count what communication costs the compute beside it",
        ("always",),
        "The same compute was recorded beside communication and alone, and differs clearly: of "
        "every wait that a plan hides (slowdown - 1) is paid in compute, and not promised.",
    ),
    "R25": Rule(
        "a communicator of its own for reduce-scatter",
        ("change",),
        "Played: all-gathers of backward no longer queue behind reductions.",
    ),
    "R26": Rule(
        "pin offloaded memory",
        ("finding",),
        "The plan offloads to pageable CPU memory on a GPU.",
    ),
    "R27": Rule(
        "tied weights in one unit",
        ("finding",),
        "Units hold more parameters than the model has.",
    ),
    "R28": Rule(
        "no all-gather in backward where no parameter is used",
        ("change", "check"),
        "Played for embeddings; or a unit was gathered for nobody.",
    ),
    "R29": Rule(
        "do not shard a frozen base",
        ("finding",),
        "Less than 5 % of the parameters are trained.",
    ),
    "R30": Rule(
        "avoid padding",
        ("finding",),
        "Padding is 1 % of a unit's all-gather, and 2 % of all that is gathered.",
    ),
    "R31": Rule(
        "keep parameters unsharded under a pipeline",
        ("finding",),
        "Ranks send to each other, and every microbatch gathers every unit again.",
    ),
    "R32": Rule(
        "mend the straggler first",
        ("finding",),
        "Waiting for one late rank costs 5 % of the step.",
    ),
    "R33": Rule(
        "an event behind the optimizer (set_post_optim_event)",
        ("finding",),
        "On a device the first all-gather waits for work that follows the optimizer.",
    ),
    "R34": Rule(
        "leave warm-up out",
        ("always",),
        "The first steps are never timed (`analysis.step_selection`).",
    ),
}


def title_of(rule: str) -> str:
    """What a rule says to do; empty for one that is not in the table."""
    return RULES[rule].title if rule in RULES else ""
