"""Build any Hugging Face language model from its config: causal, encoder-decoder or masked.

Weights are random, from the seed; nothing is downloaded, except the config of a hub name.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.reading import MAX_JSON_BYTES, parse_json, read_regular


def make_config(name: str, changes: dict[str, Any]) -> Any:
    """Make the config of a model.

    Args:
        name: A model type (`llama`), a config.json or its folder, or a hub name (`org/name`).
        changes: Fields of the config to set.

    Raises:
        ConfigError: The model or the field does not exist, or `transformers` is not installed.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError(
            f"hf is {name!r}, but transformers is not installed. Install it with "
            "`pip install 'fsdp-inspect[hf]'`."
        ) from error
    if (path := _find_file(name)) is not None:
        fields = {**_read_fields(path), **changes}
        name = str(fields.pop("model_type", ""))
        changes = fields
    if name in CONFIG_MAPPING:
        config = _configure(name, changes)
    elif name.count("/") == 1:
        config = _fetch_config(name, changes)
    else:
        raise ConfigError(
            f"hf is {name!r}, which is an unknown model type, file or hub name. "
            f"{suggest(name, list(CONFIG_MAPPING), what='model types')} Set --hf to one of them, "
            "or to a config.json."
        )
    _find_class(config)
    config.use_cache = False
    return config


def make_model(config: Any) -> nn.Module:
    """Make a language model with random float32 weights, on the context's device.

    Raises:
        ConfigError: The config has no language model, or has invalid values.
    """
    import transformers

    name = _find_class(config)
    try:
        model = getattr(transformers, name).from_config(config, dtype=torch.float32)
    except Exception as error:  # any error of its layers is about the user's sizes
        raise ConfigError(
            f"The Hugging Face config of type {config.model_type!r} builds no language model: "
            f"{error}. Expected one that {name} can build. Correct --hf or --hf-config."
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _configure(model_type: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **changes)
    except Exception as error:  # any error of its checks is about the user's values
        raise ConfigError(
            f"The Hugging Face config of {model_type!r} has invalid values: "
            f"{' '.join(str(error).split())}. Correct --hf-config."
        ) from error


def compute_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a model for tokens of shape (B, T): (B, T, vocabulary).

    An encoder-decoder gets the same tokens for both of its parts.
    """
    config = getattr(model, "config", None)
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    output = model(tokens, decoder_input_ids=tokens) if is_pair else model(tokens)
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def _find_class(config: Any) -> str:
    """The auto class that builds a model of this config: the one of its architecture, if named.

    Raises:
        ConfigError: No language model belongs to the config.
    """
    from transformers.models.auto import modeling_auto

    mappings = {
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    named = next(iter(config.architectures or ()), None)
    known = {name: each.get(config.model_type) for name, each in mappings.items()}
    for name, architecture in known.items():
        if architecture is not None and architecture == named:
            return name
    for name, architecture in known.items():
        if architecture is not None:
            return name
    raise ConfigError(
        f"The Hugging Face type {config.model_type!r} has no language model. Expected a causal, "
        "encoder-decoder or masked one, such as 'llama', 't5' or 'bert', because the trainer feeds "
        "tokens. Set --hf to such a type. To forecast another model, write a builder "
        "(module:function): see docs/gate.md."
    )


def _find_file(name: str) -> Path | None:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    return path if path.is_file() else None


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields = parse_json(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The Hugging Face config {str(path)!r} cannot be read: {error}. Expected a JSON "
            "object. Set --hf to a config.json in the format of transformers."
        ) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(
            f"{str(path)!r} has no model_type. Expected a config.json in the format of "
            "transformers. Add the field, or set --hf to another file."
        )
    return fields


def _fetch_config(name: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, **changes)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Fetching the config of {name!r} from the hub failed: {error}. Expected a public "
            "model's name and a network. Download its config.json and set --hf to that."
        ) from error
