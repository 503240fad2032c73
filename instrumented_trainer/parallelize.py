"""Build a model and apply its plan: checkpointing, compile, sharding, weights."""

import os
import shutil
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.recording.torch_api.apply import apply_plan
from fsdp_inspect.recording.torch_api.checkpointing import apply_checkpointing
from fsdp_inspect.recording.torch_api.modules import modules_by_name
from fsdp_inspect.trace.plan import Plan
from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.models import ModelRecipe, materialize
from instrumented_trainer.runtime import Runtime
from instrumented_trainer.wrapping import wrap_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The plan of a model and its modules to compile."""

    plan: Plan
    """The plan with its patterns resolved for the model."""
    compiled: tuple[str, ...] = ()
    """Names of the modules to compile."""
    config: TrainerConfig | None = None
    """The settings of a sharder other than FSDP2; None: FSDP2."""


def build_parallel_model(
    recipe: ModelRecipe, parallelism: Parallelism, runtime: Runtime, *, initializes: bool = True
) -> nn.Module:
    """Build a sharded model on this rank's device, with its initial weights if `initializes`.

    torch requires this order: checkpoint wrappers innermost, compiled modules around them, FSDP's
    hooks outermost, where the compiler does not trace.
    """
    plan = parallelism.plan
    seed = recipe.config.seed if initializes else None
    model = recipe.build_for_sharding()
    apply_checkpointing(model, plan.checkpointing)
    if parallelism.config is not None:
        materialize(model, runtime.device, offload=False, seed=seed)
        wrapped = wrap_model(model.to(runtime.device), plan, parallelism.config, runtime)
        compile_modules(wrapped, parallelism.compiled)  # graphs of SimpleFSDP communicate
        return wrapped
    compile_modules(model, parallelism.compiled)
    mesh = init_device_mesh(
        runtime.device.type,
        tuple(plan.mesh.values()),
        mesh_dim_names=tuple(str(name) for name in plan.mesh),
    )
    with warnings.catch_warnings():
        if not runtime.is_first:
            warnings.simplefilter("ignore", UserWarning)  # rank 0 prints the same warning
        kept = [unit.name for unit in plan.units if not unit.reshard_after_backward]
        apply_plan(model, plan.change(kept, reshard_after_backward=True), mesh)
    for module in find_kept_modules(plan, model):
        module.set_reshard_after_backward(False, recurse=False)
    offload = any(unit.offload != "none" for unit in plan.units)
    materialize(model, runtime.device, offload=offload, seed=seed)
    return model


def find_kept_modules(plan: Plan, model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters stay unsharded until the last microbatch of a step."""
    modules = modules_by_name(model)
    kept = [modules[u.modules[0]] for u in plan.units if not u.reshard_after_backward]
    return [module for module in kept if isinstance(module, FSDPModule)]


def compile_modules(model: nn.Module, names: tuple[str, ...]) -> None:
    """Replace modules by their compiled form, by name."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        parent = modules_by_name(model)[path]
        compiled = torch.compile(modules_by_name(model)[name])
        assert isinstance(compiled, nn.Module)
        parent.register_module(attribute, compiled)


def expect_compiler(device: torch.device) -> None:
    """Raise early if compiling for the CPU is impossible, because there is no C++ compiler."""
    candidates = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in candidates if name):
        raise ConfigError(
            "compile is true, but there is no C++ compiler for the CPU: none of g++, clang++, c++ "
            "is on PATH. Install one, or remove --compile."
        )
