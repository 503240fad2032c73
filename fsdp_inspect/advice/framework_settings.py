"""Express a plan in the settings of a framework: Accelerate, Transformers and torchtitan.

Each framework has one setting that a search over plans changes for all blocks:
`reshard_after_forward`. torchtitan also has the dtypes of messages. Other changes have no setting.
"""

from dataclasses import dataclass, field

from fsdp_inspect.advice.call_edits import Change

_TITLES = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "torchtitan": "torchtitan",
    "transformers": "Transformers",
    "trl": "TRL",
}
_DTYPES = {
    "param_dtype": "--training.mixed_precision_param",
    "reduce_dtype": "--training.mixed_precision_reduce",
}


@dataclass(frozen=True, slots=True)
class FrameworkSettings:
    """The settings that make a change."""

    lines: str
    """The settings as the user writes them; empty: only options of the launch line change."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the script in the launch line."""
    starter_options: dict[str, str] = field(default_factory=dict)
    """Options of the starter, such as `accelerate launch`."""


def title_of_framework(package: str) -> str:
    """The name of a framework in a sentence."""
    return _TITLES.get(package, package)


def express_in_settings(
    frameworks: list[str], settings: dict[str, object], change: Change
) -> FrameworkSettings | None:
    """The settings that make exactly this change; None: no settings do.

    Args:
        frameworks: The packages around the `fully_shard` calls, innermost first.
        settings: The recorded settings of the framework.
        change: The plans before and after.
    """
    if not frameworks:
        return None
    if frameworks[0] == "torchtitan":
        return _torchtitan(change)
    if frameworks[0] == "accelerate":
        return _accelerate(frameworks, settings, change)
    return None


def switch_off_wrapping(frameworks: list[str]) -> FrameworkSettings:
    """The settings with which Accelerate accepts a model that is already sharded.

    Otherwise it looks for the class of the layers, whose name `fully_shard` has changed.
    """
    if "transformers" in frameworks or "trl" in frameworks:
        line = 'TrainingArguments(..., fsdp_config={..., "auto_wrap_policy": "NO_WRAP"})'
        return FrameworkSettings(line)
    return FrameworkSettings(
        "# in the file of `accelerate config`:\n"
        "fsdp_config:\n"
        "  fsdp_auto_wrap_policy: NO_WRAP\n"
        '# or in code: FullyShardedDataParallelPlugin(..., auto_wrap_policy="no_wrap")',
        starter_options={"--fsdp_auto_wrap_policy": "NO_WRAP"},
    )


def _accelerate(
    frameworks: list[str], settings: dict[str, object], change: Change
) -> FrameworkSettings | None:
    old = settings.get("reshard_after_forward", True)
    governed = [
        unit.name
        for unit in change.before.units
        if not unit.is_root and unit.reshard_after_forward == old
    ]
    value = _same_reshard(change, governed)
    if value is None or value == old:
        return None
    word = str(value).lower()
    if "transformers" in frameworks or "trl" in frameworks:
        line = f'TrainingArguments(..., fsdp_config={{..., "reshard_after_forward": {value}}})'
        return FrameworkSettings(line)
    return FrameworkSettings(
        "# in the file of `accelerate config`:\n"
        "fsdp_config:\n"
        f"  fsdp_reshard_after_forward: {word}\n"
        f"# or in code: FullyShardedDataParallelPlugin(..., reshard_after_forward={value})",
        starter_options={"--fsdp_reshard_after_forward": word},
    )


def _torchtitan(change: Change) -> FrameworkSettings | None:
    inner = [unit.name for unit in change.before.units if not unit.is_root]
    value = _same_reshard(change, inner)
    if value is not None:
        policy = "always" if value else "never"
        return FrameworkSettings("", {"--parallelism.fsdp_reshard_after_forward": policy})
    options = _torchtitan_dtypes(change)
    return FrameworkSettings("", options) if options else None


def _torchtitan_dtypes(change: Change) -> dict[str, str]:
    """The options of new dtypes; empty if anything else changes too."""
    options, units = {}, list(change.before.units)
    for name, option in _DTYPES.items():
        values = {getattr(unit, name) for unit in change.after.units}
        if values != {getattr(unit, name) for unit in change.before.units} and len(values) == 1:
            value = next(iter(values))
            options[option] = str(value)
            units = [unit.model_copy(update={name: value}) for unit in units]
    same = change.before.model_copy(
        update={"units": tuple(units), "accumulation": change.after.accumulation}
    )
    return options if same == change.after else {}


def _same_reshard(change: Change, names: list[str]) -> bool | None:
    """The one new value of these units, if nothing else changes."""
    if change.before.unit_names != change.after.unit_names or not names:
        return None
    values = {change.after.unit(name).reshard_after_forward for name in names}
    value = next(iter(values))
    if len(values) != 1 or not isinstance(value, bool):
        return None
    units = tuple(
        unit.model_copy(update={"reshard_after_forward": value}) if unit.name in names else unit
        for unit in change.before.units
    )
    same = change.before.model_copy(
        update={"units": units, "accumulation": change.after.accumulation}
    )
    return value if same == change.after else None
