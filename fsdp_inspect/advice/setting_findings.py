"""Find costs of settings: units, dtypes, the environment, the allocator and offload.

The findings come from the manifest, the plan check and the allocator's counters.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from fsdp_inspect.advice.evidence import AND_HOST_WORK, SIMULATED_PLANS, Effect, Evidence, Finding
from fsdp_inspect.analysis.plan_check.unit_waste import padding_bytes
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.analysis.verdict.facts import DOMINANT_UNIT_RATIO, OVERSIZED_RATIO
from fsdp_inspect.analysis.verdict.words import FRAGMENTED_RATIO
from fsdp_inspect.comparison.noise import WORTH_NAMING_RATIO
from fsdp_inspect.formatting import (
    format_bytes,
    format_ns,
    format_ratio,
    format_unit,
    listed,
    plural,
)
from fsdp_inspect.simulation.changes import BLOCK
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.run import RunManifest, Unit
from fsdp_inspect.trace.sharders import DDP, UNUSED_MAP, ZERO3, ddp_code

LARGE_PART_RATIO = 0.2
"""A part with less than this fraction of a unit is not worth a unit of its own (R3)."""
FROZEN_RATIO = 0.05
"""Below this fraction of trained parameters, a model counts as mostly frozen (R29)."""
_MOST_NAMED = 3
_FROM_UNITS = "Derived from the units of the run."
_PLANS_IN_16_BITS = "the plans with --allow-dtypes"


def find_costly_settings(evidence: Evidence) -> Iterator[Finding]:
    """Badly sized units, waste, dtypes, the environment, the allocator, offload."""
    for find in (_one_unit, _large_unit, _waste, _full_precision, _frozen, _connections,
                 _fragmentation, _retries, _offload, _search_of_unused, _reduced_microbatches,
                 _bucket_size, _tiny_gathers):  # fmt: skip
        yield from find(evidence)


def _one_unit(evidence: Evidence) -> Iterator[Finding]:
    units = evidence.manifest.units
    total = sum(unit.num_parameters for unit in units)
    largest = max(units, key=lambda unit: unit.num_parameters, default=None)
    if largest is None or not total or largest.num_parameters / total <= DOMINANT_UNIT_RATIO:
        return
    blocks = {found[0] for name in largest.parameters if (found := BLOCK.match(name))}
    if blocks == {largest.fqn}:
        return  # one block is a unit already: a stage of a pipeline may have no other
    ratio = largest.num_parameters / total
    name = format_unit(largest.fqn)
    yield Finding(
        "R1",
        (largest.fqn,),
        f"Unit {name} holds {format_ratio(ratio)} of the parameters: no compute hides its "
        "all-gathers.",
        f"The unit gathers {format_bytes(largest.unsharded_bytes)} at once.",
        ("Call fully_shard on every transformer block, and on the model last.",),
        effect=Effect(
            sentence="One all-gather becomes many smaller ones.", predicted_by=SIMULATED_PLANS
        ),
        snippet=write_sharding(evidence.manifest),
    )


def write_sharding(manifest: RunManifest) -> str:
    """The calls that shard each block of the recorded model, and then the model."""
    names = (name for unit in manifest.units for name in unit.parameters)
    lists = dict.fromkeys(found[1] for name in names if (found := BLOCK.match(name)))
    mesh = ", mesh=mesh" if len(manifest.mesh) > 1 else ""
    loops = [
        f"for block in model.get_submodule({blocks!r}):\n    fully_shard(block{mesh})"
        for blocks in lists
    ]
    head = "from torch.distributed.fsdp import fully_shard"
    return "\n".join([head, *loops, f"fully_shard(model{mesh})  # the root comes last"])


def _large_unit(evidence: Evidence) -> Iterator[Finding]:
    """Units far larger than the others, without most of the model's parameters."""
    units = evidence.manifest.units
    total = sum(unit.num_parameters for unit in units)
    typical = median([unit.unsharded_bytes for unit in units]) or 0
    for unit in units:
        is_dominant = unit.num_parameters > DOMINANT_UNIT_RATIO * total
        if is_dominant or not typical or unit.unsharded_bytes <= OVERSIZED_RATIO * typical:
            continue
        # torch gathers a tensor whole, so no part is smaller than the largest tensor
        excess = round(unit.unsharded_bytes - max(typical, _largest_tensor_bytes(unit)))
        if excess < unit.unsharded_bytes * LARGE_PART_RATIO:
            continue
        if evidence.peak_bytes and excess < WORTH_NAMING_RATIO * evidence.peak_bytes:
            continue
        times = unit.unsharded_bytes / typical
        yield Finding(
            "R3",
            (unit.fqn,),
            f"Unit {format_unit(unit.fqn)} gathers {format_bytes(unit.unsharded_bytes)} at once, "
            f"{times:.1f} times as much as the median unit.",
            f"Its reduce-scatter needs an input of {format_bytes(unit.reduce_bytes)} in one piece."
            + _place_of_peak(evidence, unit),
            ("Call fully_shard on its parts, each with the norm that feeds it.",),
            effect=Effect(
                sentence=f"The peak falls by at most {format_bytes(excess)}, and only if memory "
                "reaches it while this unit is unsharded.",
                predicted_by=SIMULATED_PLANS,
                added_low_bytes=-excess,
                added_high_bytes=0,
            ),
        )


def _largest_tensor_bytes(unit: Unit) -> int:
    """Bytes of the largest tensor of a unit; 0 if its parameters are unknown."""
    sizes = (math.prod(shape) for shape in unit.parameters.values())
    return max(sizes, default=0) * ITEMSIZE.get(unit.param_dtype, 0)


def _place_of_peak(evidence: Evidence, unit: Unit) -> str:
    if evidence.peak_unit is None:
        return ""
    if evidence.peak_unit == unit.fqn:
        return " The peak of the memory step is inside this unit."
    return f" The peak of the memory step is in {format_unit(evidence.peak_unit)}."


def _full_precision(evidence: Evidence) -> Iterator[Finding]:
    """Every unit gathers in float32, on a device that is twice as fast in 16 bits."""
    manifest = evidence.manifest
    dtypes = {unit.param_dtype for unit in manifest.units}
    if manifest.device_type != "cuda" or dtypes != {"float32"}:
        return
    gathered = sum(unit.unsharded_bytes for unit in manifest.units)
    yield Finding(
        "R14",
        (),
        f"Every unit gathers in float32: {format_bytes(gathered)} a pass.",
        f"{_FROM_UNITS} Autocast does not change the all-gathers.",
        (
            "If the model may compute in 16 bits, gather in 16 bits: "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16) halves the messages. "
            "fsdp-inspect advise --allow-dtypes shows the gain.",
        ),
        effect=Effect(
            sentence=f"Each pass gathers {format_bytes(gathered // 2)} less.",
            predicted_by=_PLANS_IN_16_BITS,
        ),
        assumptions=("The model trains equally well in 16 bits: check its loss.",),
        snippet=(
            "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32)\n"
            "fully_shard(module, mesh=mesh, mp_policy=policy)  # each of your calls"
        ),
    )


def _frozen(evidence: Evidence) -> Iterator[Finding]:
    """Most parameters are frozen: sharding them saves no gradients and costs all-gathers."""
    units = evidence.manifest.units
    total = sum(unit.num_parameters for unit in units)
    trained = sum(unit.num_trainable_parameters for unit in units)
    if not total or not 0 < trained / total < FROZEN_RATIO:
        return
    gathered = sum(unit.unsharded_bytes for unit in units)
    sharded = sum(unit.sharded_bytes for unit in units)
    frozen = 1 - trained / total
    whole = round(gathered * frozen)
    more = max(round((gathered - sharded) * frozen), 0)
    waited = evidence.exposed_by_kind_ns.get("all_gather", 0)
    dtypes = {unit.get("param_dtype") for unit in evidence.manifest.plan.get("units", ())} - {None}
    casts = ""
    if len(dtypes) == 1:
        cast = f"each.data.to(torch.{dtypes.pop()})"
        casts = f"for each in frozen:\n    each.data = {cast}  # FSDP casts the others only\n"
    yield Finding(
        "R29",
        tuple(unit.fqn for unit in units if not unit.num_trainable_parameters),
        f"{format_ratio(frozen)} of the parameters are frozen, and every pass gathers them.",
        f"All units gather {format_bytes(gathered)} a pass; a rank stores {format_bytes(sharded)}.",
        (
            f"If a full copy of the frozen parameters ({format_bytes(whole)}) fits on each rank, "
            "do not shard them: pass them as ignored_params to each call of fully_shard.",
        ),
        rows=evidence.rows(lambda wait: wait.kind == "all_gather"),
        effect=Effect(
            sentence=f"Saves up to {format_ns(waited)} of waits a step{AND_HOST_WORK} A rank "
            f"then stores {format_bytes(more)} more.",
            saved_low_ns=0,
            saved_high_ns=waited,
            added_low_bytes=0,
            added_high_bytes=more,
            is_exposed=True,
        ),
        assumptions=(
            "No code changes the frozen parameters, and they are on the device before fully_shard, "
            "which no longer moves them. Checkpoints then hold them whole.",
        ),
        # A unit that is never resharded never gathers its updated parameters either, so settings
        # of units would stop the training of the other parameters in them.
        snippet=(
            "frozen = {each for each in model.parameters() if not each.requires_grad}\n"
            f"{casts}"
            "fully_shard(module, mesh=mesh, ignored_params=frozen)  # each of your calls"
        ),
    )


def _waste(evidence: Evidence) -> Iterator[Finding]:
    """Mixed dtypes, tied weights and padding, as `fsdp-inspect check` reports them."""
    findings = evidence.plan_check.findings if evidence.plan_check is not None else ()
    by_rule: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for each in findings:
        if not (each.is_contradiction or each.is_normal):
            by_rule.setdefault(each.rule, []).append((each.fqns, each.sentence))
    for rule, found in by_rule.items():
        units = tuple(fqn for fqns, _ in found for fqn in fqns)
        if rule == "R30" and not _is_padding_worth_naming(evidence, units):
            continue
        sentence = found[0][1].rstrip(".")
        if units:
            named = listed([format_unit(fqn) for fqn in units], _MOST_NAMED)
            sentence = f"{named}: {sentence}"
        yield Finding(
            rule,
            units,
            f"{sentence}.",
            _FROM_UNITS,
            _DO_ABOUT_WASTE.get(rule, ()),
            effect=Effect(
                sentence=_EFFECT_OF_WASTE.get(rule, "No gain is predicted."),
                predicted_by=_PLANS_IN_16_BITS if rule == "R14" else "",
            ),
        )


_DO_ABOUT_WASTE = {
    "": (
        "Find out why no forward uses these parameters. Remove those that the model does not need.",
    ),
    "R11": (
        "Name the units to prefetch in backward (set_modules_to_backward_prefetch), if these "
        "all-gathers are exposed.",
    ),
    "R14": ("Pass the same MixedPrecisionPolicy to every fully_shard call.",),
    "R27": ("Call fully_shard once with both modules: fully_shard([embedding, head]).",),
    "R30": (
        "Choose sizes that are divisible by the number of ranks, or shard another dimension: "
        "fully_shard(..., shard_placement_fn=lambda parameter: Shard(1)).",
    ),
}
_EFFECT_OF_WASTE = {
    "": "Removing them frees their shards. Saves no time, because no forward uses them.",
    "R11": "Removes these all-gathers. No time is predicted.",
    "R14": "Halves their messages.",
    "R27": "Saves one all-gather and one reduce-scatter a pass. No time is predicted: the "
    "simulation cannot combine tied weights into one unit.",
    "R30": "Removes these bytes from all-gathers and reduce-scatters. No time is predicted: other "
    "sizes make another model.",
}


def _is_padding_worth_naming(evidence: Evidence, fqns: tuple[str, ...]) -> bool:
    """Whether padding is at least 2% of all gathered bytes; less is under 2% of the step."""
    units = evidence.manifest.units
    wasted = sum(padding_bytes(unit) for unit in units if unit.fqn in fqns)
    return wasted >= WORTH_NAMING_RATIO * sum(unit.unsharded_bytes for unit in units)


def _connections(evidence: Evidence) -> Iterator[Finding]:
    manifest = evidence.manifest
    is_one = manifest.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    waited = evidence.exposed_by_kind_ns.get("reduce_scatter", 0)
    is_timed = evidence.step_time_ns is not None
    if manifest.device_type != "cuda" or not is_one:
        return
    if is_timed and not evidence.is_worth_naming(waited):
        return
    yield Finding(
        "R20",
        (),
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: streams share one queue, so reduce-scatter does not "
        "overlap with compute.",
        f"Reduce-scatter is exposed for {format_ns(waited)} a step.",
        ("Unset the variable for FSDP2 (it serves tensor parallelism), and record again.",),
        {"exposed_reduce_scatter_ns": waited},
        rows=evidence.rows(lambda wait: wait.kind == "reduce_scatter"),
        effect=Effect(
            sentence=f"Saves at most {format_ns(waited)} a step, all waits for reduce-scatter.",
            saved_low_ns=0,
            saved_high_ns=waited,
            is_exposed=True,
        ),
        assumptions=("No other part of the job needs the order of one queue.",),
        snippet="unset CUDA_DEVICE_MAX_CONNECTIONS  # in the shell that starts the job",
    )


def _fragmentation(evidence: Evidence) -> Iterator[Finding]:
    allocator = evidence.allocator
    ratio = allocator.fragmentation_ratio if allocator is not None else None
    is_said = evidence.verdict.limit is Limit.MEMORY
    if allocator is None or ratio is None or ratio <= FRAGMENTED_RATIO or is_said:
        return
    unused = round(ratio * allocator.reserved_bytes)
    is_bound = allocator.is_between_samples
    most, moment = ("At most ", "over the run") if is_bound else ("", f"step {allocator.step}")
    yield Finding(
        "R21",
        (),
        f"{most}{format_bytes(unused)} of the reserved memory ({format_ratio(ratio)}) is unused at "
        "the peak because of fragmentation.",
        f"Rank {allocator.rank}, {moment}: {format_bytes(allocator.reserved_bytes)} reserved, "
        f"{'at least ' if is_bound else ''}{format_bytes(allocator.active_bytes)} in use; "
        f"{allocator.num_alloc_retries or 0} allocation retries.",
        ("Set PYTORCH_ALLOC_CONF=expandable_segments:True.",),
        {"fragmentation_ratio": ratio},
        effect=Effect(
            # The allocator model replays a small Llama that reserves 6% more with the setting.
            sentence=f"Reserved memory falls by at most {format_bytes(unused)}, and can also rise. "
            "Allocated memory stays the same. No time is predicted.",
        ),
        snippet=_EXPANDABLE,
        verify="Record again, then: fsdp-inspect show NEW_RUN memory",
    )


_EXPANDABLE = (
    "export PYTORCH_ALLOC_CONF=expandable_segments:True  # in the shell that starts the job"
)


def _retries(evidence: Evidence) -> Iterator[Finding]:
    """The allocator retried allocations without much fragmentation: memory is short."""
    allocator = evidence.allocator
    is_said = evidence.verdict.limit is Limit.MEMORY
    ratio = allocator.fragmentation_ratio if allocator is not None else None
    if allocator is None or not allocator.num_alloc_retries or is_said:
        return
    if ratio is not None and ratio > FRAGMENTED_RATIO:
        return
    yield Finding(
        "R21",
        (),
        f"The allocator emptied its cache and retried an allocation {allocator.num_alloc_retries} "
        "times. The device idles during each retry.",
        f"Rank {allocator.rank}: {format_bytes(allocator.reserved_bytes)} reserved at the highest "
        "sample.",
        (
            "Reduce the peak (advise --memory-limit), or the microbatch.",
            "Set PYTORCH_ALLOC_CONF=expandable_segments:True.",
        ),
        {"num_alloc_retries": allocator.num_alloc_retries},
        effect=Effect(sentence="No gain is predicted: the duration of a retry is not recorded."),
        snippet=_EXPANDABLE,
        verify="Record again, then: fsdp-inspect show NEW_RUN memory",
    )


def _offload(evidence: Evidence) -> Iterator[Finding]:
    planned = evidence.manifest.plan.get("units", ())
    units = tuple(", ".join(unit["modules"]) for unit in planned if unit.get("offload") == "cpu")
    if units and evidence.manifest.device_type == "cuda":
        yield Finding(
            "R26",
            units,
            f"{len(units)} units are offloaded to pageable CPU memory: copies to the device are "
            "slow and block the host.",
            "Derived from the recorded plan.",
            ('Pin it: CPUOffloadPolicy(pin_memory=True), or offload = "cpu_pinned" in the plan.',),
            effect=Effect(
                sentence="No gain is predicted: the speed of pinned copies on this machine is not "
                "recorded."
            ),
            assumptions=("The host has enough memory to pin.",),
            snippet="fully_shard(module, mesh=mesh, "
            "offload_policy=CPUOffloadPolicy(pin_memory=True))",
        )


# --- Settings of DDP and of ZeRO.


def _search_of_unused(evidence: Evidence) -> Iterator[Finding]:
    """DDP searches for unused parameters, and no backward had any."""
    observed = evidence.manifest.observed
    if evidence.manifest.sharder != DDP or observed.get("find_unused_parameters") != "True":
        return
    if observed.get("unused_parameters") != "none" or observed.get("static_graph") == "True":
        return
    ranks = evidence.unused_by_rank
    if "some" in ranks:
        return
    of_all = len(ranks) == evidence.manifest.world_size and {*ranks} == {"none"}
    others = "of later steps use" if of_all else "of other ranks and of later steps use"
    yield Finding(
        "R36",
        (),
        "DDP searches for unused parameters, and every backward used all of them.",
        "find_unused_parameters=True traverses the graph in every step, and keeps the first order "
        f"of the buckets instead of the order of the gradients. {UNUSED_MAP} Its exposed time is "
        f"{format_ns(evidence.unused_map_ns)} a step.",
        ("Set find_unused_parameters=False, the default.",),
        {"exposed_unused_map_ns": evidence.unused_map_ns},
        effect=Effect(sentence="No gain is predicted: the time of the search is not recorded."),
        assumptions=(
            f"Backwards {others} every parameter, like the recorded ones. Else torch stops with an "
            "error that names the setting.",
        ),
        snippet=ddp_code("find_unused_parameters", False),
    )


def _reduced_microbatches(evidence: Evidence) -> Iterator[Finding]:
    """DDP reduces the gradients of each microbatch, and the loop adds them to one step."""
    observed, times = evidence.manifest.observed, evidence.reductions_per_unit
    if evidence.manifest.sharder != DDP or times < _LEAST_REPEATED:
        return
    # Gradients that the loop reads, clears or uses between backwards must be reduced.
    if observed.get("gradients_between_backwards") != "kept":
        return
    saved = round(evidence.exposed_by_kind_ns.get("all_reduce", 0) * (1 - 1 / times))
    if not evidence.is_worth_naming(saved):
        return
    yield Finding(
        "R16",
        (),
        f"DDP reduces every bucket {times:.3g} times per step.",
        "The gradients of each microbatch are reduced, although the loop only adds them up. "
        "no_sync() has no effect if the forward of the microbatch runs outside of it.",
        ("Run the forward and the backward of all microbatches but the last under no_sync().",),
        {"exposed_all_reduce_ns": evidence.exposed_by_kind_ns.get("all_reduce", 0)},
        rows=evidence.rows(lambda wait: wait.kind == "all_reduce"),
        effect=Effect(
            sentence=f"Saves at most {format_ns(saved)} a step: the waits for the reductions of "
            "all microbatches but one.",
            saved_low_ns=0,
            saved_high_ns=saved,
            is_exposed=True,
        ),
        snippet=(
            "with model.no_sync():  # around forward and backward\n"
            "    loss = model(inputs).loss / num_microbatches\n"
            "    loss.backward()"
        ),
    )


def _bucket_size(evidence: Evidence) -> Iterator[Finding]:
    """Another size of buckets leaves less of the all-reduces exposed."""
    best = evidence.buckets
    if isinstance(best, str) or not evidence.is_worth_naming(best.gain_low_ns):
        return
    before, after, settings = best.replayed, best.predicted, best.settings
    size, name = f"{settings.size:g} MiB", f"bucket_cap_mb={settings.size:g}"
    if settings.is_zero:
        size, name = f"{settings.size:,.0f} elements", f"reduce_bucket_size to {settings.size:.0f}"
    title = evidence.manifest.sharder_traits.title
    yield Finding(
        "R38",
        (),
        f"Buckets of {size} leave less of {title}'s all-reduces exposed.",
        f"{plural(len(before.buckets), 'bucket')} recorded, {len(after.buckets)} with this size: "
        f"waits for all-reduces {format_ns(before.exposed_ns)} -> {format_ns(after.exposed_ns)} a "
        "step, simulated.",
        (f"Set {name}.",),
        {"exposed_all_reduce_ns": evidence.exposed_by_kind_ns.get("all_reduce", 0)},
        rows=evidence.rows(lambda wait: wait.kind == "all_reduce"),
        effect=Effect(
            sentence=f"Predicted to save {format_ns(best.gain_low_ns)} to "
            f"{format_ns(best.gain_high_ns)} a step.",
            saved_low_ns=best.gain_low_ns,
            saved_high_ns=best.gain_high_ns,
            is_exposed=True,
            added_low_bytes=best.added_bytes or None,
            added_high_bytes=best.added_bytes or None,
        ),
        assumptions=best.assumptions,
        snippet=settings.snippet,
    )


_LEAST_REPEATED = 1.9
"""Reductions per bucket and step from which each microbatch is reduced: about two or more."""
_TINY_BYTES = 128 << 10
"""A gather of fewer bytes takes mostly its latency: 13 us at 10 GB/s."""


def _tiny_gathers(evidence: Evidence) -> Iterator[Finding]:
    """ZeRO-3 gathers many modules with few parameters one by one."""
    manifest = evidence.manifest
    if manifest.sharder != ZERO3:
        return
    gathered = [unit for unit in manifest.units if unit.reshard_after_forward]
    tiny = [unit for unit in gathered if unit.unsharded_bytes < _TINY_BYTES]
    exposed = evidence.exposed_by_kind_ns.get("all_gather", 0)
    if 2 * len(tiny) < len(gathered) or not tiny or not evidence.is_worth_naming(exposed):
        return
    largest = max(size for unit in tiny for size in _parameter_sizes(unit))
    kept = sum(
        size * unit.unsharded_bytes / max(unit.num_parameters, 1)
        for unit in gathered
        for size in _parameter_sizes(unit)
        if size <= largest
    )
    added = round(kept * (1 - 1 / manifest.mesh.get("shard", manifest.world_size)))
    block = _most_common_block(tiny)
    held = sum(unit.unsharded_bytes for unit in gathered if unit.fqn.startswith(f"{block}."))
    threshold = manifest.observed.get("param_persistence_threshold", "unknown")
    yield Finding(
        "R37",
        tuple(unit.fqn for unit in tiny[:_MOST_NAMED]),
        f"ZeRO-3 gathers {len(tiny)} of {len(gathered)} modules with less than "
        f"{format_bytes(_TINY_BYTES)} each.",
        f"Such a gather takes mostly its latency. All-gathers are exposed for {format_ns(exposed)} "
        f"a step. stage3_param_persistence_threshold is {threshold}.",
        (
            "Gather each block at once: deepspeed.utils.set_z3_leaf_modules(model, [Block]). A "
            "rank then holds a whole block.",
            f"Or raise stage3_param_persistence_threshold to {largest}, so that parameters of at "
            "most so many elements stay gathered.",
        ),
        {"exposed_all_gather_ns": exposed},
        rows=evidence.rows(lambda wait: wait.kind == "all_gather"),
        effect=Effect(
            sentence=f"Saves up to {format_ns(exposed)} of waits a step{AND_HOST_WORK}",
            saved_low_ns=0,
            saved_high_ns=exposed,
            is_exposed=True,
            added_low_bytes=0,
            added_high_bytes=max(added, held),
        ),
        assumptions=(
            "With the threshold, each parameter that stays gathered is gathered after each update, "
            "in its own message. With many of them, steps can take longer.",
        ),
        snippet=(
            f'"zero_optimization": {{"stage3_param_persistence_threshold": {largest}}}'
            if block is None
            else "# before deepspeed.initialize\n"
            "deepspeed.utils.set_z3_leaf_modules(\n"
            f'    model, [type(model.get_submodule("{block}"))]\n'
            ")"
        ),
    )


def _most_common_block(units: Sequence[Unit]) -> str | None:
    """The numbered module that contains most of the units, such as `model.layers.0`."""
    blocks = Counter(
        found.group() for unit in units if (found := re.match(r".*?\.\d+(?=\.)", unit.fqn))
    )
    return next((block for block, count in blocks.most_common(1) if count > 1), None)


def _parameter_sizes(unit: Unit) -> list[int]:
    """The elements of each parameter; without their shapes, those of the unit."""
    return [math.prod(shape) for shape in unit.parameters.values()] or [unit.num_parameters]
