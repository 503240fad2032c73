"""Measure whether sharding is worth its communication: memory and time with DDP instead.

A sharded run shows what DDP would need: parameters, gradients and optimizer state of all ranks on
each rank, plus what a rank holds anyway (activations, buffers, inputs, temporaries) at the peak of
the memory step. Parameters of no unit are whole on each rank, so they count once. A DDP run shows
what FSDP would divide by the number of ranks. Both are inferred.

DDP replaces all exposed all-gathers and reduce-scatters by one all-reduce of the gradients, in
buckets. Backward may hide all buckets but the last one, or none. The duration comes from the run's
own fit of latency and bandwidth.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdp_inspect.analysis.bandwidth import KindBandwidth, measure_bandwidth
from fsdp_inspect.analysis.link_fit import LinkFit
from fsdp_inspect.analysis.memory.fit import FitVerdict, judge_fit
from fsdp_inspect.analysis.memory.peak import CategoryBytes, PeakMoment
from fsdp_inspect.analysis.wait_causes import Cause
from fsdp_inspect.formatting import format_bytes, format_ns, format_ratio, plural
from fsdp_inspect.trace.codes import ITEMSIZE, NO_UNIT, EventKind, MemoryCategory
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import RunManifest, RunSource
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2, ZERO3

FITS_RATIO = 0.9
"""The fraction of a device that tensors are certain to get. The allocator and the backend may need
the rest."""
BUCKET_BYTES = 25 << 20
"""DDP's default `bucket_cap_mb`."""
FIRST_BUCKET_BYTES = 1 << 20
"""DDP's first bucket is smaller, so that its reduction begins early."""
_SHARDED = (FSDP2, FSDP1, ZERO3)
_KEPT = (
    MemoryCategory.ACTIVATION,
    MemoryCategory.INPUT,
    MemoryCategory.BUFFER,
    MemoryCategory.TEMPORARY,
)
"""Categories that a rank holds at the peak with any sharder."""


@dataclass(frozen=True, slots=True)
class WholeMemory:
    """The memory of a rank with whole parameters, gradients and optimizer states."""

    num_ranks: int
    """The number of ranks that share the model, or would share it under FSDP."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    """Optimizer states; None: no memory step records them."""
    other_bytes: int | None
    """Activations, inputs, buffers and temporaries at the peak."""
    device_bytes: int | None
    is_sharded: bool
    """Whether the run shards the model. The memory is then that of DDP instead."""
    num_frozen: int = 0
    """The parameters that no bucket of DDP has. They count as float32 among the parameters."""
    bucket_bytes: int = 0
    """The buckets of the recorded DDP, which hold a copy of the gradients. FSDP has none."""
    step: int | None = None
    """The memory step; None: there is none."""

    @property
    def state_bytes(self) -> int | None:
        """Parameters, gradients and optimizer states of all ranks together."""
        if self.optimizer_bytes is None:
            return None
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int | None:
        """The memory of a rank without sharding."""
        state = self.state_bytes
        return None if state is None or self.other_bytes is None else state + self.other_bytes

    @property
    def freed_bytes(self) -> int | None:
        """The memory that sharding frees on each rank, without the units that it gathers."""
        state = self.state_bytes
        if state is None:
            return None
        return state - math.ceil(state / self.num_ranks) + self.bucket_bytes

    @property
    def verdict(self) -> FitVerdict:
        """Whether a rank fits its device without sharding."""
        if self.total_bytes is None or self.device_bytes is None:
            return FitVerdict.UNKNOWN
        return judge_fit(self.total_bytes, self.total_bytes / FITS_RATIO, self.device_bytes)

    @property
    def sentence(self) -> str:
        """The answer in one sentence, or the reason why it is unknown."""
        return self._of_sharded() if self.is_sharded else self._of_replicated()

    @property
    def parts(self) -> str:
        """`parameters 4.0 GiB, gradients 4.0 GiB, ...`."""
        named = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "buckets": self.bucket_bytes or None,
            "activations and the rest": self.other_bytes,
        }
        return ", ".join(
            f"{name} {format_bytes(size)}" for name, size in named.items() if size is not None
        )

    def _of_sharded(self) -> str:
        if self.total_bytes is None:
            return (
                "Whether the model fits one device without sharding: cannot tell, because no "
                "memory step shows the optimizer state and the activations."
            )
        needs = (
            f"Without sharding, each rank needs about {format_bytes(self.total_bytes)}, as of step "
            f"{self.step} (DDP with gradient_as_bucket_view=True)"
        )
        if self.device_bytes is None:
            return (
                f"{needs}. Whether it fits: cannot tell, because the memory of the device is "
                "unknown."
            )
        device = format_bytes(self.device_bytes)
        if self.verdict is FitVerdict.UNKNOWN:
            return (
                f"{needs}. Whether it fits into {device}: cannot tell, because the allocator and "
                f"the backend need up to {format_ratio(1 - FITS_RATIO)} of it."
            )
        fits = "fits" if self.verdict is FitVerdict.FITS else "does not fit"
        return f"{needs}, which {fits} into {device}."

    def _of_replicated(self) -> str:
        if self.freed_bytes is None:
            return (
                "How much memory FSDP would save: cannot tell, because no memory step shows the "
                "optimizer state."
            )
        return (
            f"FSDP would save at most {format_bytes(self.freed_bytes)} per rank on "
            f"{self.num_ranks} ranks, less the units that it gathers.{self._frozen}"
        )

    @property
    def _frozen(self) -> str:
        if not self.num_frozen:
            return ""
        number = plural(self.num_frozen, "parameter")
        return f" This counts {number} outside the buckets, such as frozen ones, as float32."


@dataclass(frozen=True, slots=True)
class ReplicationSaving:
    """The time that DDP would save in each step, or the reason why it is unknown."""

    low_ns: int | None
    """Saved time if no bucket of gradients is hidden. It may be negative."""
    high_ns: int | None
    """Saved time if all buckets but the last one are hidden."""
    exposed_ns: int
    """Current exposed time of FSDP's all-gathers, reduce-scatters and all-reduces, without waits
    for late ranks."""
    all_reduce_ns: int | None
    """Time of the all-reduces of all gradient buckets."""
    reason: str
    """The reason why the time is unknown; empty: it is known."""


def measure_whole_memory(
    manifest: RunManifest, peak: PeakMoment | None, device_bytes: int | None
) -> WholeMemory | None:
    """Compute the memory without sharding, for a recorded FSDP or DDP run.

    Returns:
        None for other runs, for a run with one rank and for a run without units.
    """
    is_sharded = manifest.sharder in _SHARDED
    if manifest.source == "imported" or not manifest.units:
        return None
    if not (is_sharded or manifest.sharder == DDP):
        return None
    groups = {group.index: len(group.ranks) for group in manifest.process_groups}
    unit = manifest.units[0]
    num_ranks = groups.get(unit.shard_group if is_sharded else unit.replicate_group, 1)
    if num_ranks == 1:
        return None
    parts = _by_label(peak.categories if peak is not None else ())
    copies = num_ranks if is_sharded else 1
    frozen = 0 if is_sharded else manifest.num_outside_units
    outside = _measure_outside(manifest, peak) if is_sharded else _Outside()
    optimizer = parts.get(MemoryCategory.OPTIMIZER_STATE.label)
    if optimizer is not None:
        optimizer = copies * (optimizer - outside.optimizer_bytes) + outside.optimizer_bytes
    of_frozen = frozen * ITEMSIZE["float32"] + outside.parameter_bytes
    gradients = copies * sum(
        unit.sharded_bytes * unit.num_trainable_parameters // max(unit.num_parameters, 1)
        for unit in manifest.units
    )
    has_buckets = manifest.observed.get("gradient_as_bucket_view") == "False"
    return WholeMemory(
        num_ranks=num_ranks,
        parameter_bytes=copies * sum(unit.sharded_bytes for unit in manifest.units) + of_frozen,
        gradient_bytes=outside.gradient_bytes + gradients,
        optimizer_bytes=optimizer,
        other_bytes=sum(parts.get(each.label, 0) for each in _KEPT) if parts else None,
        device_bytes=device_bytes,
        is_sharded=is_sharded,
        num_frozen=frozen,
        bucket_bytes=gradients if has_buckets else 0,
        step=None if peak is None else peak.step,
    )


@dataclass(frozen=True, slots=True)
class _Outside:
    """The state of a sharded run's parameters of no unit, which each rank holds whole."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


def _measure_outside(manifest: RunManifest, peak: PeakMoment | None) -> _Outside:
    if peak is None or not manifest.num_outside_units:
        return _Outside()
    held = _by_label(row for one in peak.owners if one.unit == NO_UNIT for row in one.categories)
    whole = held.get(MemoryCategory.SHARDED_PARAMETER.label, 0)
    in_units = sum(unit.num_trainable_parameters for unit in manifest.units)
    trained = max(manifest.model.num_trainable_parameters - in_units, 0)
    gradient = whole * trained // manifest.num_outside_units
    optimizer = held.get(MemoryCategory.OPTIMIZER_STATE.label, 0) if gradient else 0
    return _Outside(whole, gradient, optimizer)


def _by_label(rows: Iterable[CategoryBytes]) -> dict[str, int]:
    return {row.category: row.bytes for row in rows}


def measure_replication_saving(
    run: RunSource,
    memory: WholeMemory,
    exposed_by_kind_ns: Mapping[str, int],
    causes_ns: Mapping[str, int] | None = None,
) -> ReplicationSaving:
    """Compute the time that DDP would save in each step of a sharded run.

    Args:
        run: The run.
        memory: The memory of the run without sharding.
        exposed_by_kind_ns: The exposed time of the typical step, by kind of collective.
        causes_ns: The exposed time by cause. DDP waits for late ranks too.
    """
    kinds = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
    late = (causes_ns or {}).get(Cause.STRAGGLER.label, 0)
    exposed = max(sum(exposed_by_kind_ns.get(kind.label, 0) for kind in kinds) - late, 0)
    reason = _why_unknown(run.manifest, memory)
    link = None if reason else _find_link(run, memory.num_ranks)
    if link is None:
        reason = reason or "no reduce-scatter or all-gather of these ranks has a measured duration"
        return ReplicationSaving(None, None, exposed, None, reason)
    is_gloo = "gloo" in run.manifest.backend and "nccl" not in run.manifest.backend
    kind = EventKind.REDUCE_SCATTER if is_gloo else EventKind.ALL_REDUCE
    factor = bus_factor(kind, memory.num_ranks)  # gloo runs a reduce-scatter as an all-reduce

    def duration_ns(message_bytes: int) -> int:
        return round(link.latency_ns + message_bytes * factor / link.bus_bytes_per_s * 1e9)

    first = min(memory.gradient_bytes, FIRST_BUCKET_BYTES)
    full, rest = divmod(memory.gradient_bytes - first, BUCKET_BYTES)
    buckets = [first, *full * [BUCKET_BYTES], *([rest] if rest else [])]
    all_reduce = sum(map(duration_ns, buckets))
    last = duration_ns(buckets[-1])
    return ReplicationSaving(exposed - all_reduce, exposed - last, exposed, all_reduce, "")


def _why_unknown(manifest: RunManifest, memory: WholeMemory) -> str:
    if memory.num_ranks != manifest.world_size:
        return "the run has replicas too, and the link between all ranks is not measured"
    if any(
        unit.unsharded_bytes != unit.sharded_bytes * memory.num_ranks for unit in manifest.units
    ):
        return "the run gathers in another dtype than that of its weights, which DDP would use"
    return ""


def _find_link(run: RunSource, num_ranks: int) -> LinkFit | None:
    """The fit of the reductions of these ranks, or of their gathers if there are no reductions."""
    bandwidth = measure_bandwidth(run)
    rows: dict[str, KindBandwidth] = {}
    for row in bandwidth.kinds if bandwidth is not None else ():
        if row.group_size == num_ranks and row.group_role == "shard":
            rows[row.kind] = row
    kinds = (EventKind.REDUCE_SCATTER, EventKind.ALL_GATHER)
    links = (rows[kind.label].link for kind in kinds if kind.label in rows)
    return next((link for link in links if link is not None and link.bus_bytes_per_s), None)


def describe_replication_saving(saving: ReplicationSaving) -> str:
    """The saving in one sentence, or the reason why it is unknown."""
    if saving.low_ns is None or saving.high_ns is None:
        return f"What DDP would save per step: cannot tell, because {saving.reason}."
    if saving.high_ns <= 0:
        return (
            "Whether DDP would save time: cannot tell, because its all-reduce is inferred to take "
            f"{format_ns(saving.all_reduce_ns or 0)}, and FSDP's collectives are exposed for "
            f"{format_ns(saving.exposed_ns)}."
        )
    if saving.low_ns < 0:
        return (
            f"DDP would save at most {format_ns(saving.high_ns)} a step. If backward hides no "
            f"all-reduce, it is {format_ns(-saving.low_ns)} slower."
        )
    if saving.low_ns == saving.high_ns:
        return f"DDP would save about {format_ns(saving.low_ns)} a step."
    return f"DDP would save {format_ns(saving.low_ns)} to {format_ns(saving.high_ns)} a step."
