"""Describe the sharders: their names, and their settings in the terms of their own API.

Advice for a run names the settings of the sharder that the run used. A field is None if a sharder
has no such setting.
"""

from dataclasses import dataclass, replace

FSDP2, FSDP1, DDP = "fsdp2", "fsdp1", "ddp"
"""`RunManifest.sharder`: `fully_shard`, `FullyShardedDataParallel`, `DistributedDataParallel`."""
ZERO1, ZERO2, ZERO3 = "zero1", "zero2", "zero3"
"""`RunManifest.sharder`: DeepSpeed's engine, by the stage of ZeRO."""
DEEPSPEED = frozenset({ZERO1, ZERO2, ZERO3})
SIMPLE_FSDP = "simple_fsdp"
"""`RunManifest.sharder`: parameters that a parametrization shards, for torch.compile."""
UNKNOWN = "unknown"
"""`RunManifest.sharder`, `.backend` and `.device_type` of ranks whose recording knows none."""
NO_UNITS = "no_units"
"""`RunManifest.sharder`: a sharder whose units could not be read; a note of the run says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharderTraits:
    """A sharder and the settings that its user can change."""

    title: str
    """The sharder as users call it: `FSDP1`."""
    why_not_simulated: str | None
    """The reason why no other plan is simulated, as a sentence; None: plans are simulated."""
    units_have_passes: bool
    """Whether a unit is a module, with its own forward and backward."""
    hide_single_unit: str
    """The advice for a unit that holds most of the model."""
    keep_gathered: str | None
    """The setting without all-gathers in backward."""
    prefetch_ahead: str | None
    """The setting that issues the all-gathers of forward earlier."""
    separate_communicator: str | None
    """The setting that gives reductions their own communicator."""
    reduce_in_16_bits: str
    """The setting that reduces gradients in 16 bits."""
    why_not_checked: str | None = None
    """The reason why no plan check is possible, if units have passes; None: a check is possible."""
    has_buckets: bool = False
    """Whether its units are buckets of gradients, whose size is simulated instead of a plan."""
    has_messages: bool = False
    """Whether its messages are simulated with other settings, instead of a plan."""
    backend_of_16_bits: str = ""
    """The only backend on which `reduce_in_16_bits` works; empty: any."""
    owns_all: bool = True
    """Whether every collective of the sharder belongs to a unit."""

    @property
    def is_simulated(self) -> bool:
        """Whether other plans of its runs can be simulated."""
        return self.why_not_simulated is None


def _zero_of_stages_1_and_2(title: str) -> SharderTraits:
    return SharderTraits(
        title=title,
        why_not_simulated="It has buckets, and no plan of FSDP: `fsdp-inspect simulate RUN "
        "--reduce-bucket-size 200000000` predicts other buckets, if its self-check holds.",
        units_have_passes=False,
        has_buckets=True,
        has_messages=True,
        hide_single_unit="Lower reduce_bucket_size and set overlap_comm, so that the first "
        "reduction begins earlier",
        keep_gathered=None,
        prefetch_ahead=None,
        separate_communicator=None,
        reduce_in_16_bits='"communication_data_type": "bf16"',
        owns_all=False,
    )


_TRAITS = {
    FSDP2: SharderTraits(
        title="FSDP2",
        why_not_simulated=None,
        units_have_passes=True,
        hide_single_unit="Call fully_shard on every transformer block, not only on the whole model",
        keep_gathered="reshard_after_forward=False",
        prefetch_ahead="Prefetch one unit ahead",
        separate_communicator="set_separate_reduce_scatter_group",
        reduce_in_16_bits="MixedPrecisionPolicy(reduce_dtype)",
    ),
    FSDP1: SharderTraits(
        title="FSDP1",
        why_not_simulated=None,
        units_have_passes=True,
        hide_single_unit="Wrap every transformer block: auto_wrap_policy=ModuleWrapPolicy({Block})",
        keep_gathered="sharding_strategy=ShardingStrategy.SHARD_GRAD_OP",
        prefetch_ahead="Prefetch one unit ahead (forward_prefetch=True)",
        separate_communicator=None,
        reduce_in_16_bits="MixedPrecision(reduce_dtype)",
    ),
    DDP: SharderTraits(
        title="DDP",
        why_not_simulated="It has buckets, and no plan of FSDP: `fsdp-inspect simulate RUN "
        "--bucket-cap 10` predicts other buckets, if its self-check holds.",
        units_have_passes=False,
        has_buckets=True,
        has_messages=True,
        hide_single_unit="Lower bucket_cap_mb, so that the first all-reduce begins earlier",
        keep_gathered=None,
        prefetch_ahead=None,
        separate_communicator=None,
        reduce_in_16_bits="register_comm_hook(None, bf16_compress_hook)",
        backend_of_16_bits="nccl",
        owns_all=False,
    ),
    ZERO1: _zero_of_stages_1_and_2("DeepSpeed ZeRO-1"),
    ZERO2: _zero_of_stages_1_and_2("DeepSpeed ZeRO-2"),
    ZERO3: SharderTraits(
        title="DeepSpeed ZeRO-3",
        why_not_simulated="It has no plan of FSDP: `fsdp-inspect simulate RUN "
        "--prefetch-bucket-size 50000000` predicts other settings of DeepSpeed, on CPU and if its "
        "self-check holds.",
        units_have_passes=True,
        has_messages=True,
        hide_single_unit="Gather smaller sub-modules: wrap fewer of them with set_z3_leaf_modules",
        keep_gathered="a larger stage3_max_reuse_distance and stage3_max_live_parameters",
        prefetch_ahead="Prefetch more parameters (stage3_prefetch_bucket_size)",
        separate_communicator=None,
        reduce_in_16_bits='"communication_data_type": "bf16"',
        why_not_checked="ZeRO-3 decides during training which parameters share a message",
        owns_all=False,
    ),
    SIMPLE_FSDP: SharderTraits(
        title="SimpleFSDP",
        why_not_simulated="The simulation models the schedule of FSDP2. The compiler orders the "
        "collectives of SimpleFSDP.",
        units_have_passes=False,
        hide_single_unit="Let the compiler overlap collectives: "
        "torch._inductor.config.reorder_for_compute_comm_overlap=True",
        keep_gathered=None,
        prefetch_ahead=None,
        separate_communicator=None,
        reduce_in_16_bits="a parametrization that casts gradients before their reduction",
        owns_all=False,
    ),
    NO_UNITS: SharderTraits(
        title="a sharder whose units were not recorded",
        why_not_simulated="The units were not recorded; the notes of the run say why.",
        units_have_passes=False,
        hide_single_unit="",
        keep_gathered=None,
        prefetch_ahead=None,
        separate_communicator=None,
        reduce_in_16_bits="",
        owns_all=False,
    ),
}


FSDP2_TRAITS = _TRAITS[FSDP2]
_TRAITS[UNKNOWN] = replace(FSDP2_TRAITS, title=UNKNOWN)


def traits_of(sharder: str) -> SharderTraits:
    """The traits of a sharder; for an unknown name, the traits of FSDP2."""
    return _TRAITS.get(sharder, FSDP2_TRAITS)


UNUSED_MAP = (
    "It also sums a map of the used parameters over the ranks, 4 bytes for each: the all-reduce of "
    "(no unit) in backward."
)
"""What DDP does with `find_unused_parameters` (reducer.cpp), as a sentence after its name."""


def ddp_code(setting: str, value: object) -> str:
    """The code that sets an argument of DistributedDataParallel, also in frameworks around it."""
    return (
        f"model = DistributedDataParallel(model, {setting}={value})\n"
        f"# Transformers: TrainingArguments(..., ddp_{setting}={value})\n"
        f"# Lightning: DDPStrategy({setting}={value})\n"
        f"# Accelerate: DistributedDataParallelKwargs({setting}={value})"
    )
