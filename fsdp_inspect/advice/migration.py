"""Describe what changes when a recorded FSDP1 run moves to FSDP2: plan, settings, memory.

Nothing is simulated. The plan has the units, the strategy and the dtypes of the run. Bytes follow
from the shapes of its parameters:

- FSDP1 shards the flat parameter of a unit, padded to a multiple of the ranks. FSDP2 shards each
  parameter in dimension 0, padded to the size of the first rank's part.
- FSDP1 gathers into the flat parameter itself. FSDP2 gathers into a buffer and copies it to the
  parameters, and copies gradients to the input of the reduce-scatter. Each buffer has the size of
  one unit and exists while its collective runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_inspect.columns import TableSpec, text_column
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.results import TableResult
from fsdp_inspect.trace.codes import ITEMSIZE
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.run import RunManifest, RunSource, Unit
from fsdp_inspect.trace.sharders import FSDP1, traits_of

_NO_SHARD = "NO_SHARD"


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting of FSDP1, and its counterpart in FSDP2."""

    setting: str
    recorded: str
    """The value in the run; empty: not recorded."""
    replacement: str
    """The setting of FSDP2, or the reason why none exists."""
    has_counterpart: bool


@dataclass(frozen=True, slots=True)
class Migration(TableResult):
    """The move of a run from FSDP1 to FSDP2."""

    TABLE: ClassVar[TableSpec] = TableSpec(
        "Settings",
        (
            text_column("setting", "The setting of FullyShardedDataParallel"),
            text_column("recorded", "Its value in the run"),
            text_column("replacement", "Its replacement in FSDP2", label="FSDP2"),
        ),
    )

    plan: Plan
    """The same units, strategy and dtypes for FSDP2."""
    settings: tuple[SettingChange, ...]
    num_gathers: int
    """All-gathers per microbatch with the recorded strategy. It is the same for both."""
    shard_bytes: int
    """Sharded parameters of rank 0 under FSDP1, with padding."""
    new_shard_bytes: int | None
    """The same under FSDP2; None: the run does not contain the shapes of its parameters."""
    gather_buffer_bytes: int
    """All-gather buffer of the largest unit, which FSDP1 does not have."""
    reduce_buffer_bytes: int
    """Reduce-scatter input of the largest unit, which FSDP1 has only if it pads or casts."""

    def rows(self) -> Sequence[SettingChange]:
        """One row per setting."""
        return self.settings


def is_migrated(manifest: RunManifest) -> bool:
    """Whether a run was recorded with FSDP1, so that a move to FSDP2 is known."""
    return manifest.sharder == FSDP1 and manifest.source != "imported"


def plan_migration(run: RunSource) -> Migration:
    """State what a move to FSDP2 changes.

    Raises:
        MissingDataError: The run was not recorded with FSDP1.
    """
    manifest = run.manifest
    if not is_migrated(manifest):
        kind = "an import" if manifest.source == "imported" else traits_of(manifest.sharder).title
        raise MissingDataError(
            f"Run {manifest.run_id} is {kind}. Expected a run that was recorded with "
            "FullyShardedDataParallel (FSDP1). Record one: python -m fsdp_inspect.record."
        )
    strategy = manifest.observed.get("sharding_strategy", "")
    units = [unit for unit in manifest.units if unit.num_parameters]
    plan = Plan(
        units=tuple(_unit_plan(unit, manifest) for unit in manifest.units),
        world_size=manifest.world_size,
        mesh=_mesh(manifest, strategy),
        forward_prefetch=1 if manifest.observed.get("forward_prefetch") == "True" else 0,
    )
    shapes_known = all(unit.parameters for unit in units)
    return Migration(
        plan=plan,
        settings=tuple(_settings(manifest, strategy)),
        num_gathers=0
        if strategy == _NO_SHARD
        else sum(1 + bool(unit.reshard_after_forward) for unit in units),
        shard_bytes=sum(unit.sharded_bytes for unit in units),
        new_shard_bytes=sum(_new_shard_bytes(unit, manifest) for unit in units)
        if shapes_known
        else None,
        gather_buffer_bytes=0
        if strategy == _NO_SHARD
        else max((_gather_bytes(unit, manifest) for unit in units), default=0),
        reduce_buffer_bytes=max((_reduce_bytes(unit, manifest) for unit in units), default=0),
    )


def _unit_plan(unit: Unit, manifest: RunManifest) -> UnitPlan:
    compute, itemsize = unit.param_dtype, _itemsize(unit, manifest)
    is_cast = ITEMSIZE.get(compute) != itemsize
    return UnitPlan.model_validate(
        {
            "modules": tuple(unit.modules),
            "reshard_after_forward": None if unit.is_root else unit.reshard_after_forward,
            "param_dtype": compute if is_cast else None,
            "reduce_dtype": unit.reduce_dtype if unit.reduce_dtype != compute else None,
            "offload": "cpu" if unit.offload else "none",
            "mesh": {},
        }
    )


def _mesh(manifest: RunManifest, strategy: str) -> dict[str, int]:
    if strategy == _NO_SHARD:
        return {"replicate": manifest.world_size}
    return {name: size for name, size in manifest.mesh.items() if name in ("replicate", "shard")}


def _shards(manifest: RunManifest) -> int:
    return manifest.mesh.get("shard", 1)


def _itemsize(unit: Unit, manifest: RunManifest) -> int:
    """Bytes of an element of the stored parameters."""
    count = math.ceil(unit.num_parameters / _shards(manifest))
    return round(unit.sharded_bytes / count) if count else 0


def _new_shard_bytes(unit: Unit, manifest: RunManifest) -> int:
    """The parts of rank 0 under FSDP2."""
    return _new_shard_numel(unit, manifest) * _itemsize(unit, manifest)


def _new_shard_numel(unit: Unit, manifest: RunManifest) -> int:
    """The elements of rank 0 under FSDP2: each parameter is chunked in dimension 0."""
    shards = _shards(manifest)
    return sum(
        math.ceil(shape[0] / shards) * math.prod(shape[1:]) if shape else 1
        for shape in unit.parameters.values()
    )


def _gather_bytes(unit: Unit, manifest: RunManifest) -> int:
    """The padded output of FSDP2's all-gather; without shapes, that of FSDP1."""
    padded = _new_shard_numel(unit, manifest) * _shards(manifest)
    return padded * ITEMSIZE[unit.param_dtype] if padded else unit.unsharded_bytes


def _reduce_bytes(unit: Unit, manifest: RunManifest) -> int:
    """The padded input of FSDP2's reduce-scatter; if parts of it are unknown, that of FSDP1."""
    padded = _new_shard_numel(unit, manifest) * _shards(manifest)
    if not padded or unit.num_trainable_parameters != unit.num_parameters:
        return unit.reduce_bytes
    return padded * ITEMSIZE[unit.reduce_dtype]


_STRATEGIES: Mapping[str, str] = {
    "FULL_SHARD": "reshard_after_forward=True",
    "SHARD_GRAD_OP": "reshard_after_forward=False",
    "HYBRID_SHARD": "a mesh of two dimensions, and reshard_after_forward=True",
    "_HYBRID_SHARD_ZERO2": "a mesh of two dimensions, and reshard_after_forward=False",
    _NO_SHARD: "replicate(), or DistributedDataParallel",
}
_PREFETCHES: Mapping[str, str] = {
    "BACKWARD_PRE": "the default of fully_shard",
    "BACKWARD_POST": "none: fully_shard gathers the next unit before, not after, the gradients of "
    "the current one",
    "None": "none: fully_shard always prefetches in backward. Name other units with "
    "set_modules_to_backward_prefetch",
}


def _settings(manifest: RunManifest, strategy: str) -> list[SettingChange]:
    observed = manifest.observed
    prefetch = observed.get("backward_prefetch", "")
    forward = observed.get("forward_prefetch", "")
    limited = observed.get("limit_all_gathers", "")
    original = observed.get("use_orig_params", "")
    dtypes = sorted({f"{u.param_dtype} / {u.reduce_dtype}" for u in manifest.units})
    has_offload = any(unit.offload for unit in manifest.units)
    return [
        SettingChange(
            "auto_wrap_policy",
            f"{len(manifest.units)} units",
            "one fully_shard call per unit, inner units first, the root last",
            has_counterpart=True,
        ),
        SettingChange(
            "sharding_strategy",
            strategy,
            _STRATEGIES.get(strategy, "reshard_after_forward"),
            has_counterpart=True,
        ),
        SettingChange(
            "mixed_precision",
            ", ".join(dtypes),
            "MixedPrecisionPolicy(param_dtype, reduce_dtype). It has no buffer_dtype and no "
            "keep_low_precision_grads: cast buffers in the model",
            has_counterpart=True,
        ),
        SettingChange(
            "cpu_offload",
            str(has_offload),
            "CPUOffloadPolicy()" if has_offload else "nothing to do",
            has_counterpart=True,
        ),
        SettingChange(
            "backward_prefetch",
            prefetch,
            _PREFETCHES.get(prefetch, "the default of fully_shard"),
            has_counterpart=prefetch in ("", "BACKWARD_PRE"),
        ),
        SettingChange(
            "forward_prefetch",
            forward,
            "set_modules_to_forward_prefetch: the plan prefetches one unit ahead"
            if forward == "True"
            else "nothing to do",
            has_counterpart=True,
        ),
        SettingChange(
            "limit_all_gathers",
            limited,
            "none: fully_shard needs no limit",
            has_counterpart=False,
        ),
        SettingChange(
            "use_orig_params",
            original,
            "none: parameters keep their names and shapes, as DTensors"
            + ("" if original == "True" else ". Build the optimizer after fully_shard"),
            has_counterpart=False,
        ),
        SettingChange(
            "sync_module_states, param_init_fn",
            "",
            "none: build on the meta device, call to_empty and initialize; or load a state dict "
            "with torch.distributed.checkpoint",
            has_counterpart=False,
        ),
        SettingChange(
            "state_dict_type",
            "",
            "none: a state dict has DTensors. get_model_state_dict makes full ones",
            has_counterpart=False,
        ),
    ]
