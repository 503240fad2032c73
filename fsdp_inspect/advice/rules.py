"""The table of tuning rules: the title, the trigger and the limits of each rule.

The rules collect public knowledge about tuning FSDP. They have the ids R1 to R38. A rule is

- `finding`: a problem from settings or from the trace (`advice.findings`);
- `change`: a change of the plan, simulated on the recorded run (`advice.plan_space`,
  `advice.search`);
- `check`: a difference between the run and its plan (`analysis.plan_check.check`);
- `always`: part of every measurement, never shown alone.

`unseen` describes a further trigger that recorded and imported runs do not contain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Comes = Literal["finding", "change", "check", "always"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the table."""

    title: str
    """The recommendation in a few words."""
    comes: tuple[Comes, ...]
    trigger: str
    """The condition under which the rule applies."""
    unseen: str = ""
    """A further trigger, and why no run shows it; empty: there is none."""


RULES: Mapping[str, Rule] = {
    "R1": Rule(
        "one unit for each block",
        ("finding", "change"),
        "One unit holds most parameters, or the root unit holds the parameters of the blocks.",
    ),
    "R2": Rule(
        "merge small units",
        ("change",),
        "Simulated: fewer units take less time, because each collective has a latency.",
    ),
    "R3": Rule(
        "split a unit that is too large",
        ("finding", "change"),
        "A unit gathers more than twice the bytes of the median unit, and the difference is at "
        "least 2% of the peak.",
    ),
    "R4": Rule(
        "keep the last unit unsharded after forward",
        ("change",),
        "Simulated: backward begins with this unit, so resharding it means gathering it twice.",
    ),
    "R5": Rule(
        "let the last block reshard",
        ("check", "change"),
        "Simulated: resharding the last block lowers the peak. Or the last block stayed unsharded, "
        "although its plan reshards it.",
    ),
    "R6": Rule(
        "keep parameters unsharded after forward",
        ("change",),
        "Simulated: backward without all-gathers is faster, and the peak stays within the limit.",
    ),
    "R7": Rule(
        "reshard within the node only (an integer reshard_after_forward)",
        ("finding", "change"),
        "All-gathers of backward cross nodes and are exposed, and the bus within a node is at "
        "least three times as fast.",
        "The bandwidth within a node, if no collective ran there. The finding then states it.",
    ),
    "R8": Rule(
        "do not reshard the root when backward follows at once",
        ("change", "check"),
        "Simulated: backward begins with the root, so resharding it means gathering it twice. Or a "
        "unit was gathered again in backward, although its plan keeps it unsharded.",
    ),
    "R9": Rule(
        "prefetch one unit ahead in forward",
        ("change", "check"),
        "Simulated: an all-gather that is issued earlier causes a shorter wait. Or a prefetch of "
        "the plan never ran.",
        "The idle time of a device after a read of a value inside a unit. Imported traces show it "
        "by line; a recorded run lists the reads (`fsdp-inspect show RUN`), without that time.",
    ),
    "R10": Rule(
        "prefetch deeper, or allow more reduce-scatter inputs",
        ("change",),
        "Simulated: for uneven units, collectives are hidden behind the compute of another unit.",
    ),
    "R11": Rule(
        "set the units that backward prefetches",
        ("change", "check"),
        "Simulated: these all-gathers are issued earlier. Or a backward prefetch of the plan never "
        "ran, or torch's default prefetch gathers a unit that is not needed.",
    ),
    "R12": Rule(
        "limit_all_gathers=True (FSDP1)",
        ("finding",),
        "A run of FSDP1 has more than two all-gathers in flight at once.",
        "Allocation retries in imported traces: profiler traces have no allocator counters.",
    ),
    "R13": Rule(
        "reduce gradients in bfloat16",
        ("change",),
        "Simulated only with --allow-dtypes.",
    ),
    "R14": Rule(
        "gather in bfloat16",
        ("finding", "change", "check"),
        "Units gather in float32 on a GPU, or next to units in 16 bits. Simulated only with "
        "--allow-dtypes.",
    ),
    "R15": Rule(
        "shard within a node, replicate across (HSDP)",
        ("change",),
        "Simulated if the run contains an all-reduce, or if --bandwidth and --latency are set.",
    ),
    "R16": Rule(
        "reduce gradients with the last microbatch only, or with each one",
        ("change", "check", "finding"),
        "Simulated for runs that accumulate. Or the steps accumulate differently from the plan. "
        "DDP: every bucket is reduced in each microbatch, and the loop only adds up gradients.",
    ),
    "R17": Rule(
        "keep parameters unsharded between microbatches",
        ("change",),
        "Simulated for runs that accumulate.",
    ),
    "R18": Rule(
        "activation checkpointing on, off or selective",
        ("change",),
        "Simulated if memory is limited and the memory step records the memory of the blocks.",
        "Whether a run fits without its checkpointing: the size of the activations is unknown.",
    ),
    "R19": Rule(
        "reduce the host's work",
        ("finding",),
        "The compute stream is host-bound for 10% of the step.",
    ),
    "R20": Rule(
        "unset CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("finding",),
        "The variable is set, and reduce-scatter is exposed for 2% of the step.",
    ),
    "R21": Rule(
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        ("finding",),
        "10% of the reserved memory is unused at the peak, or the allocator retried an allocation.",
    ),
    "R22": Rule(
        "gather asynchronously, with explicit prefetch",
        ("change",),
        "Simulated if the backend blocks the host in its all-gathers.",
        "Unused memory in the pool of the all-gather stream: the allocator's counters are those of "
        "the whole device.",
    ),
    "R23": Rule(
        "communication buffers of the process group (symmetric memory)",
        ("finding",),
        "On GPUs, communication slows compute by at least 5%, for at least 2% of the step.",
        "NVLink SHARP and the number of NCCL channels: neither is recorded.",
    ),
    "R24": Rule(
        "count the slowdown of compute by communication",
        ("always",),
        "The same compute took clearly longer during communication than alone. If a plan hides a "
        "wait, compute then takes (slowdown - 1) times the hidden time longer.",
    ),
    "R25": Rule(
        "a separate communicator for reduce-scatter",
        ("change",),
        "Simulated: all-gathers of backward no longer queue behind reductions.",
    ),
    "R26": Rule(
        "pin offloaded memory",
        ("finding",),
        "The plan offloads to pageable CPU memory on a GPU.",
    ),
    "R27": Rule(
        "tied weights in one unit",
        ("finding",),
        "The units hold more parameters than the model has.",
    ),
    "R28": Rule(
        "no all-gather in backward if no parameter is used",
        ("change", "check"),
        "Simulated for embeddings. Or a unit was gathered, and nothing waited for it.",
    ),
    "R29": Rule(
        "do not shard a frozen base",
        ("finding",),
        "Less than 5% of the parameters are trained.",
    ),
    "R30": Rule(
        "avoid padding",
        ("finding",),
        "Padding is at least 1% of a unit's all-gather, and 2% of all gathered bytes.",
    ),
    "R31": Rule(
        "keep parameters unsharded under a pipeline",
        ("finding",),
        "Ranks send to each other, and every microbatch gathers every unit again.",
    ),
    "R32": Rule(
        "fix the straggler first",
        ("finding",),
        "Waiting for a straggler or a slow group costs 5% of the step.",
    ),
    "R33": Rule(
        "record an event after the optimizer (set_post_optim_event)",
        ("finding",),
        "On a device, the first all-gather waits for work that follows the optimizer.",
    ),
    "R34": Rule(
        "ignore warm-up steps",
        ("always",),
        "The first steps of a run (2 by default) are not timed.",
    ),
    "R35": Rule(
        "choose between DDP and FSDP by memory",
        ("finding",),
        "FSDP: the model, its gradients and its optimizer state fit one device, and DDP would save "
        "2% of the step. DDP: sharding would free 2% of the peak.",
    ),
    "R36": Rule(
        "do not search for unused parameters",
        ("finding",),
        "DDP with find_unused_parameters, without static_graph: every backward of the recorded "
        "ranks used all parameters.",
    ),
    "R37": Rule(
        "gather fewer and larger messages under ZeRO-3",
        ("finding",),
        "At least half of the modules that ZeRO-3 gathers have less than 128 KiB, and waits for "
        "all-gathers take 2% of the step.",
    ),
    "R38": Rule(
        "choose the size of the buckets of DDP, ZeRO-1 or ZeRO-2",
        ("finding",),
        "Another bucket_cap_mb or reduce_bucket_size is predicted to save time, and the lower end "
        "of the interval is above 2% of the step.",
    ),
}


def title_of(rule: str) -> str:
    """The title of a rule; empty for an unknown id."""
    return RULES[rule].title if rule in RULES else ""
