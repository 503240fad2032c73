"""Read the sizes of a model: a preset of the trainer, or the config of a Hugging Face model."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp_inspect.error_text import quote_all, shorten, suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.reading import InvalidTextError, parse_json, read_regular
from fsdp_inspect.simulation.planning.transformer import HF_NAMES, Transformer

_PRESETS = "instrumented_trainer.shapes"
_MAX_CONFIG_BYTES = 1 << 20
_UNFUSED_NORM = 4
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of Transformers with RMSNorm, rotary positions, grouped queries and SwiGLU."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "vocab_size")  # fmt: skip


def load_model(name: str) -> tuple[Transformer, int | None]:
    """The model that a name stands for, and the longest sequence that its config allows.

    Args:
        name: A preset, or a config.json or its folder.

    Raises:
        ConfigError: There is no such model, or its architecture is unsupported.
    """
    presets = list_presets()
    if name in presets:
        return _of_preset(name, presets[name]), None
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _of_config(path)
    raise ConfigError(
        f"Unknown model {shorten(name)!r}. {suggest(name, list(presets), what='presets')} Expected "
        f"a preset ({', '.join(presets)}), or a config.json of a Hugging Face model or its folder, "
        "or a builder as MODULE:FUNCTION. Correct --model."
    )


def list_presets() -> Mapping[str, Any]:
    """The trainer's presets by name; none without the trainer. Their sizes need no torch."""
    try:
        presets: Mapping[str, Any] = import_module(_PRESETS).PRESETS
    except ModuleNotFoundError:
        return {}
    return presets


def _of_preset(name: str, shape: Any) -> Transformer:
    return Transformer(
        name=name,
        dim=shape.dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_dim=shape.ffn_dim,
        vocab_size=shape.vocab_size,
        head_dim=shape.dim // shape.num_heads,
        tie_embeddings=shape.tie_embeddings,
    )


def _of_config(path: Path) -> tuple[Transformer, int | None]:
    fields = _read(path)
    kind = fields.get("model_type")
    if kind not in DECODERS:
        raise ConfigError(
            f"Unsupported architecture {shorten(repr(kind))} in {str(path)!r}. Expected a decoder "
            f"with RMSNorm, rotary positions and SwiGLU: model_type {quote_all(DECODERS)}. "
            "Forecast the memory of other models with `fsdp-inspect forecast --hf`."
        )
    sizes = {name: _size(path, fields, name) for name in _SIZES}
    heads = sizes["num_attention_heads"]
    given = {
        "num_key_value_heads": heads,
        "head_dim": sizes["hidden_size"] // heads,
        **{name: value for name, value in fields.items() if value is not None},
    }
    longest = fields.get("max_position_embeddings")
    model = Transformer(
        name=path.parent.name or str(kind),
        dim=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_size(path, given, "num_key_value_heads"),
        ffn_dim=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        head_dim=_size(path, given, "head_dim"),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        norm_bytes=_UNFUSED_NORM,
        copies_attention=False,
        module_names=HF_NAMES,
    )
    return model, longest if isinstance(longest, int) else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        fields = parse_json(read_regular(path, _MAX_CONFIG_BYTES))
    except (OSError, InvalidTextError) as error:
        raise ConfigError(
            f"The model's config {str(path)!r} cannot be read: {error}. Expected the config.json "
            "of a Hugging Face model. Correct --model."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"The model's config {str(path)!r} is not a JSON object. Expected the config.json of a "
            "Hugging Face model. Correct --model."
        )
    return fields


def _size(path: Path, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"Invalid {name} in {str(path)!r}: {shorten(repr(value))}. Expected a whole number "
            "from 1. Correct the config."
        )
    return value
