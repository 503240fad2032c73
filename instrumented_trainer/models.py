"""Build the model that the settings describe, and initialize its weights.

A model is first built on the meta device, where it costs nothing. That is enough to check settings,
to find its parts and to shard it. Weights come after sharding, so no rank ever holds all of them.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.recording.torch_api.modules import strip_wrappers
from instrumented_trainer import hf
from instrumented_trainer.config import TrainerConfig
from instrumented_trainer.model import PRESETS, Decoder, ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingDefaults:
    """A preset's default training settings."""

    seq_len: int
    batch_size: int
    lr: float


_DEFAULTS = {
    "tiny": TrainingDefaults(seq_len=64, batch_size=4, lr=3e-3),
    "small": TrainingDefaults(seq_len=256, batch_size=4, lr=1e-3),
    "llama-1b": TrainingDefaults(seq_len=4096, batch_size=2, lr=3e-4),
    "llama-8b": TrainingDefaults(seq_len=8192, batch_size=1, lr=3e-4),
    "llama-70b": TrainingDefaults(seq_len=8192, batch_size=1, lr=1.5e-4),
}
_HF_DEFAULTS = TrainingDefaults(seq_len=128, batch_size=4, lr=1e-3)
_SHAPE_FIELDS = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")


def complete(config: TrainerConfig) -> TrainerConfig:
    """Fill in the preset's values for settings that are not set."""
    defaults = _DEFAULTS[config.preset] if config.hf is None else _HF_DEFAULTS
    missing = {
        name: getattr(defaults, name)
        for name in ("seq_len", "batch_size", "lr")
        if getattr(config, name) is None
    }
    return config.model_copy(update=missing)


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A model without weights."""

    config: TrainerConfig
    shape: ModelShape | None
    hf_config: Any
    vocab_size: int

    def skeleton(self) -> nn.Module:
        """The model on the meta device."""
        with torch.device("meta"):
            return self._build()

    def build_for_sharding(self) -> nn.Module:
        """Build the model for `fully_shard`.

        The trainer's own decoder stays on the meta device until it is sharded. A Hugging Face model
        is built whole on the host of each rank, because only its own code can initialize it.
        """
        if self.shape is not None:
            return self.skeleton()
        torch.manual_seed(self.config.seed)
        return self._build()

    def _build(self) -> nn.Module:
        if self.shape is not None:
            return Decoder(self.shape)
        return hf.make_model(self.hf_config)


def make_recipe(config: TrainerConfig) -> ModelRecipe:
    """Choose the model to build.

    Raises:
        ConfigError: The sizes do not fit each other, or the model does not exist.
    """
    if config.hf is None:
        if config.hf_config:
            raise ConfigError(
                f"hf_config is {config.hf_config!r} but hf is not set. Expected both. Set --hf to "
                "a model type, such as llama, or remove --hf-config."
            )
        shape = make_shape(config)
        return ModelRecipe(config, shape, None, shape.vocab_size)
    given = [name for name in _SHAPE_FIELDS if getattr(config, name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} is set for a Hugging Face model. Expected the fields of its own "
            "config. Use --hf-config, for example '{\"hidden_size\": 64}'."
        )
    hf_config = hf.make_config(config.hf, config.hf_config)
    return ModelRecipe(config, None, hf_config, hf.vocab_size_of(hf_config))


def make_shape(config: TrainerConfig) -> ModelShape:
    """The preset's sizes with the requested changes, checked for consistency."""
    changes = {
        name: value for name in _SHAPE_FIELDS if (value := getattr(config, name)) is not None
    }
    shape = replace(PRESETS[config.preset], **changes)
    if shape.dim % shape.num_heads or (shape.dim // shape.num_heads) % 2:
        raise ConfigError(
            f"dim is {shape.dim} and num_heads is {shape.num_heads}. Expected an even number of "
            f"channels for each head. Set --dim to a multiple of {2 * shape.num_heads}."
        )
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"num_heads is {shape.num_heads} and num_kv_heads is {shape.num_kv_heads}. Expected "
            "as many query heads for each key/value head. Set --num-kv-heads to a divisor of "
            f"{shape.num_heads}."
        )
    return shape


def materialize(model: nn.Module, device: torch.device, *, offload: bool, seed: int | None) -> None:
    """Allocate and initialize the weights of a sharded model that is on the meta device.

    Each full weight depends only on the seed and its name, so any number of ranks starts with the
    same weights. A rank holds one full weight at a time. Without a seed, the weights are only
    allocated: fake tensors have no values.
    """
    if not isinstance(model, Decoder) or next(model.parameters()).device.type != "meta":
        return
    model.to_empty(device=torch.device("cpu") if offload else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    model.reset_buffers()
    model.tie_weights()
    if seed is None:
        return
    for name, parameter in model.named_parameters():
        _initialize(parameter, strip_wrappers(name), model, seed)


@torch.no_grad()
def _initialize(parameter: nn.Parameter, name: str, model: Decoder, seed: int) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(_initial_weight(parameter, name, model, seed, parameter.device))
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    # Use the mesh's device even if the shard is offloaded, so that both start with equal weights.
    device = torch.device(mesh.device_type)
    full = _initial_weight(parameter, name, model, seed, device)
    shard = distribute_tensor(full, mesh, placements, src_data_rank=None)  # equal on all ranks
    parameter.to_local().copy_(shard.to_local())


def _initial_weight(
    parameter: nn.Parameter, name: str, model: Decoder, seed: int, device: torch.device
) -> torch.Tensor:
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if parameter.ndim == 1:
        return full.fill_(1.0)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    return full.normal_(std=model.initial_std(name), generator=generator)
