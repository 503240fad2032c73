"""What does emulation ask of the trainer? Checks, and modules that compute for a fixed time."""

from torch import nn

from fsdp_inspect.emulation.fixed_compute import FixedCompute
from fsdp_inspect.emulation.fixed_times import FixedTimes, parse_fixed_times
from fsdp_inspect.emulation.process import active_emulation
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.sharding import torch_fsdp
from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.parts import ModelParts
from instrumented_trainer.runtime import Runtime


def check_emulation(config: TrainerConfig) -> FixedTimes | None:
    """The fixed computing times that a run asks for; None: modules take the time they take.

    Raises:
        ConfigError: A setting needs real ranks or real times, or the times are not legal.
    """
    if config.emulate is not None:
        _expect_no_checkpoints(config)
    if config.fixed_compute is None:
        return None
    if config.emulate is None:
        raise ConfigError(
            f"fixed_compute is {config.fixed_compute!r} and emulate is not set. Expected fixed "
            "times under emulation only. Add --emulate, or leave --fixed-compute out."
        )
    if config.compile:
        raise ConfigError(
            "fixed_compute and compile are both set: the hooks that fix the times would break "
            "what is compiled. Expected one of them. Leave --compile out."
        )
    return parse_fixed_times(config.fixed_compute)


def timed_parts(parts: ModelParts) -> tuple[str, ...]:
    """The modules that last a fixed time: attention, feed-forward, embedding, output projection.

    A block that is not made of such halves is timed as a whole. Norms take the time they take.
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
    """Have the named modules of a sharded model last their times."""
    emulation = active_emulation()
    if times is None or emulation is None:
        return None
    modules = torch_fsdp.modules_by_name(model)
    fixed = FixedCompute(times, emulation, runtime.device)
    fixed.attach({name: modules[name] for name in names})
    return fixed


def describe_overruns(fixed: FixedCompute) -> str:
    """One sentence on how well the times were kept."""
    return (
        f"fixed times: {fixed.num_overruns} of {fixed.num_spans} forwards and backwards computed "
        "for longer than they were given"
    )


def _expect_no_checkpoints(config: TrainerConfig) -> None:
    for name in ("checkpoint_every", "checkpoint_dir"):
        if getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r} under emulation, where rank 0 alone would "
                f"write a checkpoint without the shards of the others. Leave --{_flag(name)} out."
            )
    if config.resume != "no":
        raise ConfigError(
            f"resume is {config.resume!r} under emulation, where what is trained means nothing. "
            "Leave --resume out."
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")
