"""Check the settings under emulation, and give modules a fixed compute time."""

from torch import nn

from fsdp_inspect.emulation.fixed_compute import FixedCompute
from fsdp_inspect.emulation.fixed_times import FixedTimes, parse_fixed_times
from fsdp_inspect.emulation.process import active_emulation
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.recording.torch_api.modules import modules_by_name
from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.parts import ModelParts
from instrumented_trainer.runtime import Runtime


def check_emulation(config: TrainerConfig) -> FixedTimes | None:
    """Check the settings; returns the fixed compute times, or None for real times.

    Raises:
        ConfigError: A setting needs real ranks or real times, or the times are invalid.
    """
    if config.emulate is not None:
        _expect_no_checkpoints(config)
    if config.fixed_compute is None:
        return None
    if config.emulate is None:
        raise ConfigError(
            f"fixed_compute is {config.fixed_compute!r} but emulate is not set. Expected fixed "
            "times under emulation only. Add --emulate, or remove --fixed-compute."
        )
    if config.compile:
        raise ConfigError(
            "fixed_compute and compile are both set, but the hooks for fixed times break compiled "
            "code. Expected one of them. Remove --compile."
        )
    return parse_fixed_times(config.fixed_compute)


def timed_parts(parts: ModelParts) -> tuple[str, ...]:
    """The modules with a fixed time: attention, feed-forward, embedding, output projection.

    A block without such halves is timed as a whole. Norms keep their real time.
    """
    inside = [
        body
        for block in parts.blocks
        for body in (
            [half[1] for half in parts.halves[block]] if block in parts.halves else [block]
        )
    ]
    projections = [name for name in parts.head if "norm" not in name.rpartition(".")[2]]
    return (*parts.embeddings, *inside, *projections)


def fix_compute(
    model: nn.Module, names: tuple[str, ...], times: FixedTimes | None, runtime: Runtime
) -> FixedCompute | None:
    """Give the named modules of a sharded model their fixed times."""
    emulation = active_emulation()
    if times is None or emulation is None:
        return None
    modules = modules_by_name(model)
    fixed = FixedCompute(times, emulation, runtime.device)
    fixed.attach({name: modules[name] for name in names})
    return fixed


def describe_overruns(fixed: FixedCompute) -> str:
    """Describe in one sentence how many spans exceeded their fixed time."""
    return (
        f"fixed times: {fixed.num_overruns} of {fixed.num_spans} forwards and backwards took "
        "longer than their fixed time"
    )


def _expect_no_checkpoints(config: TrainerConfig) -> None:
    for name in ("checkpoint_every", "checkpoint_dir"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, which is unsupported under emulation: "
                f"rank 0 has no shards of the other ranks to save. Remove --{_flag(name)}."
            )
    if config.resume != "no":
        raise ConfigError(
            f"resume is {config.resume!r}, which is unsupported under emulation: the trained "
            "values are meaningless. Remove --resume."
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")
