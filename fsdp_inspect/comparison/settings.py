"""Compare the settings of runs: machine, configuration, plan, versions, environment and code.

Names, folders and URLs of runs are not settings. The comparison uses the observed plan of each
unit, with the `reshard_after_forward` that ran (torch applies its own rule to the root).
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal

from fsdp_inspect.analysis.run_heading import count_parameters, describe_sharding, identify
from fsdp_inspect.formatting import format_unit, listed
from fsdp_inspect.trace.plan import SETTINGS, Plan, UnitPlan
from fsdp_inspect.trace.run import RunManifest, Unit
from fsdp_inspect.trace.sharders import UNKNOWN

NAMES_AND_PLACES = frozenset({"name", "runs_dir", "tag", "tags", "upload", "log_to"})
"""Configuration keys that only identify a run, or name the places of its data."""
_REPEATS_MAY_DIFFER = frozenset({"seed", "inputs"})
"""Settings that may differ between repeats of one side; batches may have different lengths."""
_PLAN_OF_THE_WHOLE = ("forward_prefetch", "backward_prefetch", "accumulation", "checkpointing")
_ALWAYS_OBSERVED = (
    "dropout",
    "gradient_sync",
    "gradient_hooks",
    "inputs",
    "backwards",
    "recomputation",
)
"""Observed settings that are unknown where they are missing: in a run of an older version, or
without a memory step. The plan states the recomputation of torch's wrappers."""
_OBSERVED = (*_ALWAYS_OBSERVED, "attention", "optimizer", "loss_dtype")
"""Settings in `RunManifest.observed`, which older runs lack."""
_USUAL = {"backwards": "1 a step", "gradient_sync": "every microbatch"}
"""Observations that an id of a plan assumes where they are unknown."""
SCRIPT = "script"
"""The name of the setting that is the program of a run."""
_MOST_NAMED = 3
_WORDS_OF_SHAPE = ("batch", "seq", "length", "compile", "dim", "layers", "heads", "vocab")
"""Words in the name of a script's setting that decides how much a step computes."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting with different values on the sides of a comparison."""

    group: str
    """`machine`, `model`, `config`, `plan`, `versions`, `environment` or `code`."""
    name: str
    """Dotted name, as in the run's configuration."""
    where: str
    """A description of the units with this difference; empty for the whole run."""
    values: tuple[Any, ...]
    """One value for each side; None if a side lacks the setting."""


@dataclass(frozen=True, slots=True)
class SharedSetting:
    """A setting of the whole run with the same value on all sides."""

    group: str
    """See `SettingDifference`."""
    name: str
    value: Any


def find_shared_settings(manifests: Sequence[RunManifest]) -> tuple[SharedSetting, ...]:
    """Return the settings that all runs share, machine first, without settings that no run has.

    Args:
        manifests: One for each side.
    """
    tables = [dict(_settings(manifest)) for manifest in manifests]
    shared = [
        SharedSetting(group, name, value)
        for (group, name), value in tables[0].items()
        if value is not None and all(table.get((group, name)) == value for table in tables)
    ]
    return tuple(sorted(shared, key=lambda setting: _ORDER.index(setting.group)))


def settings_as_text(manifest: RunManifest) -> dict[str, str]:
    """All settings of a run as text, by `group.name`; a catalog stores and compares them."""
    return {
        f"{setting.group}.{setting.name}": str(setting.value)
        for setting in find_shared_settings([manifest])
    }


def describe_plan(manifest: RunManifest) -> str:
    """The plan of a run in a few words, with an id: as far as known, only equal plans share it.

    The id covers the class and the sizes of the model. Unknown observations count as `_USUAL`.
    """
    checkpointing = manifest.plan.get("checkpointing") or {}
    ran = [manifest.observed.get(name, usual) for name, usual in _USUAL.items()]
    recomputation = manifest.observed.get("recomputation", "none")
    if recomputation != "none":
        ran.append(recomputation)
    whole = {name: manifest.plan.get(name) for name in _PLAN_OF_THE_WHOLE}
    sizes = [unit.num_parameters for unit in manifest.units]
    model = (manifest.model.class_name, sizes)
    known = [whole, ran, manifest.mesh, _unit_settings(manifest), model]
    hashed = zlib.crc32(json.dumps(known, sort_keys=True, default=str).encode())
    facts = [
        describe_sharding(manifest),
        *(f"{kind} checkpointing" for kind, names in checkpointing.items() if names),
        "" if recomputation == "none" else f"{recomputation} repeated",
        "" if ran[0] == _USUAL["backwards"] else ran[0].replace(" a step", " backwards a step"),
        f"plan {hashed:08x}",
    ]
    return ", ".join(filter(None, facts))


def compare_settings(manifests: Sequence[RunManifest]) -> tuple[SettingDifference, ...]:
    """Return the settings that differ between the runs, machine first.

    Args:
        manifests: One for each side.
    """
    tables = [dict(_settings(manifest)) for manifest in manifests]
    names = dict.fromkeys(name for table in tables for name in table)
    unknown = [
        name
        for name in _OBSERVED
        if any(
            not manifest.observed or (name in _ALWAYS_OBSERVED and name not in manifest.observed)
            for manifest in manifests
        )
    ]
    # Baseline files of older versions have inputs, but not their memory step.
    if len({max(manifest.memory_steps) for manifest in manifests if manifest.memory_steps}) > 1:
        unknown.append("inputs")  # those of the last memory step: batches of a run may differ
    if not all(script_of(manifest.command) for manifest in manifests):
        unknown.append(SCRIPT)
    accumulated = [manifest.plan.get("accumulation") for manifest in manifests]
    if not _all_equal(accumulated):
        unknown.append("backwards")  # the plan says why
    plain = [
        SettingDifference(group, name, "", values)
        for group, name in names
        if name not in unknown
        and (values := _differing(manifests, [t.get((group, name)) for t in tables], group, name))
    ]
    found = [*plain, *_compare_units(manifests)]
    return tuple(sorted(found, key=lambda difference: _ORDER.index(difference.group)))


def are_repeats(first: RunManifest, second: RunManifest) -> bool:
    """Return whether two runs have the same settings, so that one repeats the other."""
    return not find_other_settings(first, second)


def find_other_settings(first: RunManifest, second: RunManifest) -> tuple[SettingDifference, ...]:
    """Return the differences that prevent one run from being a repeat of the other."""
    differences = compare_settings([first, second])
    return tuple(
        difference for difference in differences if difference.name not in _REPEATS_MAY_DIFFER
    )


def decides_shape(name: str) -> bool:
    """Whether the words of a setting's name show that it decides how much a step computes."""
    words = name.lower()
    return not words.startswith("eval") and any(part in words for part in _WORDS_OF_SHAPE)


def find_comparison_caveats(
    manifests: Sequence[RunManifest], labels: Sequence[str]
) -> Iterator[str]:
    """Yield one sentence for each difference that limits the comparison.

    Args:
        manifests: One for each side.
        labels: The labels of the sides.
    """
    unknown: dict[str, list[str]] = {}
    for name, value_of, consequence in _CAVEATS:
        values = [value_of(manifest) for manifest in manifests]
        if len({*values} - {None, UNKNOWN}) > 1:
            each = ", ".join(
                f"{label}: {value or UNKNOWN}" for label, value in zip(labels, values, strict=True)
            )
            yield f"Different {name} ({each}): {consequence}."
        elif not _all_equal(values):
            for label, value in zip(labels, values, strict=True):
                if value == UNKNOWN:
                    unknown.setdefault(label, []).append(name)
    for label, names in unknown.items():
        yield f"Unknown of {label}: {', '.join(names)}. The other runs may have the same."


def device_of(manifest: RunManifest) -> str:
    """Return the device's name, or its type if it has no name."""
    return manifest.device_name or manifest.device_type


_CAVEATS = (
    (
        "world size",
        lambda manifest: manifest.world_size,
        "each rank holds and sends other amounts, which changes its times and bytes",
    ),
    ("device", device_of, "compute times differ for this reason alone"),
    (
        "torch",
        lambda manifest: manifest.versions.get("torch", UNKNOWN),
        "kernels, the allocator and FSDP2 itself can differ",
    ),
    ("backend", lambda manifest: manifest.backend or UNKNOWN, "the collectives run different code"),
    (
        "sharder",
        lambda manifest: identify(manifest).sharder or None,
        "the units, their collectives and the schedule differ",
    ),
    (
        "source",
        lambda manifest: manifest.source,
        "the times were obtained in different ways",
    ),
    (
        "model",
        lambda manifest: _name_model(manifest) or UNKNOWN,
        "units with the same name can be different",
    ),
)

_ORDER = ("machine", "model", "config", "plan", "versions", "environment", "code")


def _name_model(manifest: RunManifest) -> str:
    """`Transformer 1200 on one pipeline rank`."""
    where = " on one pipeline rank" if identify(manifest).is_stage else ""
    count = manifest.model.num_parameters
    return f"{manifest.model.class_name} {f'{count}{where}' if count else ''}".strip()


def _if_known(value: str) -> str | None:
    return None if value in ("", UNKNOWN) else value


def _settings(manifest: RunManifest) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield all settings of a run by group and name, flattened, without the units."""
    yield ("machine", "world_size"), manifest.world_size
    yield ("machine", "mesh"), " x ".join(str(size) for size in manifest.mesh.values()) or None
    yield ("machine", "backend"), _if_known(manifest.backend)
    yield ("machine", "sharder"), _if_known(manifest.sharder_traits.title)
    yield ("machine", "device"), _if_known(device_of(manifest))
    yield ("machine", "source"), manifest.source
    yield ("model", "class"), _if_known(manifest.model.class_name)
    yield ("model", "num_parameters"), count_parameters(manifest)
    for name, observed in manifest.observed.items():
        yield ("model", name), observed or "none"
    for name, value in _flatten("", manifest.config):
        if name not in NAMES_AND_PLACES:
            yield ("config", name), value
    plan = {name: manifest.plan.get(name) for name in _PLAN_OF_THE_WHOLE}
    for name, value in _flatten("", plan):
        yield ("plan", name), value
    for name, version in manifest.versions.items():
        yield ("versions", name), version
    for name, value in manifest.environment.items():
        yield ("environment", name), value
    yield ("code", "git_commit"), manifest.git_commit
    yield ("code", SCRIPT), script_of(manifest.command)


def script_of(command: Sequence[str]) -> str | None:
    """The file name of the script of a command, or its module; None: no word is one."""
    for before, word in pairwise(["", *command]):
        if before == "-m" and not word.startswith(("fsdp_inspect", "torch.distributed")):
            return word
        if word.endswith(".py"):
            return PurePath(word).name
    return None


def _flatten(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


_OF_EACH_MODEL = ("class", "num_parameters")
"""Settings of `model` that each run has; others may not apply to a run."""
_DTYPES_OF_UNIT = ("param_dtype", "reduce_dtype")
_UNRECORDED = object()
"""Stands for a value that a side does not record. `UNKNOWN` may be a value of a script."""


def _differing(
    manifests: Sequence[RunManifest], values: Sequence[Any], group: str, name: str
) -> tuple[Any, ...] | None:
    """The values of one setting, `UNKNOWN` for those that a side does not record.

    Returns:
        None if the known values are equal. An unknown value may be equal to any.
    """
    each_has_it = group == "machine" or (group == "model" and name in _OF_EACH_MODEL)
    is_dtype = group == "plan" and name in _DTYPES_OF_UNIT
    found = [
        _UNRECORDED
        if (value is None and (each_has_it or manifest.source == "imported"))
        or (is_dtype and value == UNKNOWN)
        else value
        for manifest, value in zip(manifests, values, strict=True)
    ]
    if _all_equal([value for value in found if value is not _UNRECORDED]):
        return None
    return tuple(UNKNOWN if value is _UNRECORDED else value for value in found)


# --- units


def _compare_units(manifests: Sequence[RunManifest]) -> Iterator[SettingDifference]:
    """Compare the units of the sides, then the settings of the units that all sides have."""
    tables = [_unit_settings(manifest) for manifest in manifests]
    shared = [fqn for fqn in tables[0] if all(fqn in table for table in tables)]
    if any(len(table) > len(shared) for table in tables):
        own = tuple([fqn for fqn in table if fqn not in shared] for table in tables)
        yield SettingDifference(
            "plan", "units", "units of some sides", tuple(_name_units(fqns) for fqns in own)
        )
    for name in dict.fromkeys(name for fqn in shared for table in tables for name in table[fqn]):
        values = {
            fqn: _differing(manifests, [table[fqn].get(name) for table in tables], "plan", name)
            for fqn in shared
        }
        yield from _compare_unit_setting(name, values)


def _compare_unit_setting(
    name: str, values_by_unit: Mapping[str, tuple[Any, ...] | None]
) -> Iterator[SettingDifference]:
    """Yield one difference for each set of values, with its units."""
    units_by_values: dict[str, tuple[tuple[Any, ...], list[str]]] = {}
    shared = list(values_by_unit)
    for fqn, values in values_by_unit.items():
        if values is not None:
            units_by_values.setdefault(repr(values), (values, []))[1].append(fqn)
    for values, fqns in units_by_values.values():
        where = f"all {len(shared)} units" if len(fqns) == len(shared) else _name_units(fqns)
        yield SettingDifference("plan", name, where, values)


def _unit_settings(manifest: RunManifest) -> dict[str, dict[str, Any]]:
    """Return the settings of each unit: the observed plan, and the values that ran."""
    planned = {
        ", ".join(unit.get("modules", ())): {
            name: value for name, value in unit.items() if name != "modules"
        }
        for unit in manifest.plan.get("units", ())
    }
    return {
        unit.fqn: {
            **planned.get(unit.fqn, {}),
            "reshard_after_forward": unit.reshard_after_forward,
            "param_dtype": unit.param_dtype,
            "reduce_dtype": unit.reduce_dtype,
            "trainable": _is_trainable(unit),
        }
        for unit in manifest.units
    }


def _is_trainable(unit: Unit) -> bool | None:
    """Return whether a unit has trainable parameters; None if an import does not record it."""
    if unit.num_trainable_parameters == 0 and not unit.are_sizes_known:
        return None
    return unit.num_trainable_parameters > 0


def _name_units(fqns: Sequence[str], separator: str = ", ") -> str:
    """`layers.0`, `layers.0, layers.1 and 4 more`; `none`."""
    return listed([format_unit(fqn) for fqn in fqns], _MOST_NAMED, separator) or "none"


# --- Compare a plan with the plan that ran.
#
# A setting that the plan leaves to torch (None) never differs. The exception is
# `reshard_after_forward`, for which torch's rule for the root applies.

UNITS = "units"
"""The name of a difference in the units themselves."""
_OF_MODULES = "; "
"""Separates units of a plan, whose names list their modules with commas."""


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """One setting of a plan that differs from the plan that ran."""

    name: str
    where: str
    """A description of the units with this difference; empty for the whole plan."""
    asked: Any
    ran: Any


def find_plan_differences(
    asked: Plan, ran: Plan, *, with_parameters: Collection[str]
) -> tuple[PlanDifference, ...]:
    """Return the differences between a plan and the plan that ran.

    Args:
        asked: The requested plan, resolved.
        ran: The observed plan, resolved.
        with_parameters: Names of the units that manage parameters. Prefetch skips other units, and
            their settings cannot be observed.
    """
    return (
        *_cut_otherwise(asked, ran),
        *_plan_unit_settings(asked, ran, with_parameters),
        *_prefetch(asked, ran, with_parameters),
        *_of_the_whole(asked, ran),
    )


def _cut_otherwise(asked: Plan, ran: Plan) -> Iterator[PlanDifference]:
    first, second = set(asked.unit_names), set(ran.unit_names)
    if first != second:
        only_asked = [name for name in asked.unit_names if name not in second]
        only_ran = [name for name in ran.unit_names if name not in first]
        yield PlanDifference(
            UNITS,
            "",
            _name_units(only_asked, _OF_MODULES),
            _name_units(only_ran, _OF_MODULES),
        )


def _plan_unit_settings(
    asked: Plan, ran: Plan, with_parameters: Collection[str]
) -> Iterator[PlanDifference]:
    ran_units = {unit.name: unit for unit in ran.units if unit.name in with_parameters}
    pairs = [(unit, ran_units[unit.name]) for unit in asked.units if unit.name in ran_units]
    roots = asked.fsdp_roots, ran.fsdp_roots
    for setting in SETTINGS:
        found: dict[tuple[Any, Any], list[str]] = {}
        for first, second in pairs:
            values = (
                _value(first, setting, is_root=first.name in roots[0]),
                _value(second, setting, is_root=second.name in roots[1]),
            )
            if values[0] is not None and values[0] != values[1]:
                found.setdefault(values, []).append(first.name)
        for (wanted, got), names in found.items():
            where = (
                f"all {len(names)} units"
                if len(names) == len(pairs)
                else _name_units(names, _OF_MODULES)
            )
            yield PlanDifference(setting, where, wanted, got)


def _value(unit: UnitPlan, setting: str, *, is_root: bool) -> Any:
    value = getattr(unit, setting)
    if setting == "reshard_after_forward" and value is None:
        return not is_root
    return value


def _prefetch(asked: Plan, ran: Plan, with_parameters: Collection[str]) -> Iterator[PlanDifference]:
    directions: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    for direction in directions:
        first, second = (
            plan.prefetch_lists(direction, without=set(plan.unit_names) - set(with_parameters))
            for plan in (asked, ran)
        )
        if first != second:
            name = f"{direction}_prefetch"
            yield PlanDifference(name, "", getattr(asked, name), getattr(ran, name))


def _of_the_whole(asked: Plan, ran: Plan) -> Iterator[PlanDifference]:
    for name in ("world_size", "mesh", "accumulation", "checkpointing"):
        wanted, got = getattr(asked, name), getattr(ran, name)
        if wanted and wanted != got:
            yield PlanDifference(name, "", _plain(wanted), _plain(got))
    flat = {} if asked.fsdp1 is None else asked.fsdp1.model_dump()
    other = {} if ran.fsdp1 is None else ran.fsdp1.model_dump()
    for name in {**flat, **other}:
        if flat.get(name) != other.get(name):
            yield PlanDifference(name, "", flat.get(name), other.get(name))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
