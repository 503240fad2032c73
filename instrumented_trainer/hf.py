"""Build a Hugging Face model from its config: a language, image, audio or speech model.

Weights are random, from the seed; nothing is downloaded, except the config of a hub name. The
trainer's data are tokens. A model of images or sound gets its values from them: see `make_input`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.reading import MAX_JSON_BYTES, parse_json, read_regular

NUM_BYTE_VALUES = 256
_IMAGE_SIZE = 224
"""Height and width for a config without an image size: the usual size for convolutional models."""
_SAMPLES = 16_000
"""The number of values of a sound: one second."""
_RANDOM_SHAPES = {"apply_spec_augment": False, "layerdrop": 0.0}
"""Fields that let random numbers decide shapes or the layers that run, with the value that disables
it."""
_TOKEN_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
_MAPPINGS_OF_SOUND = {
    "AutoModelForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
_SOUND = {
    "AutoModelForAudioClassification": (
        *("data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat"),
        *("wav2vec2", "wav2vec2-conformer", "wavlm"),
    ),
    "AutoModelForSpeechSeq2Seq": ("whisper",),
}
"""The types with an input that `make_input` supports: waves, and log-mel spectrograms."""


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
    for field, off in _RANDOM_SHAPES.items():
        if hasattr(config, field):
            setattr(config, field, off)
    return config


def vocab_size_of(config: Any) -> int:
    """The number of different tokens that the model reads; that of bytes, if it reads no tokens."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return NUM_BYTE_VALUES if size is None or not _reads_tokens(config) else int(size)


def make_model(config: Any) -> nn.Module:
    """Make a model with random float32 weights, on the context's device.

    Raises:
        ConfigError: The config has no model that can be trained, or has invalid values.
    """
    import transformers

    name = _find_class(config)
    try:
        model = getattr(transformers, name).from_config(config, dtype=torch.float32)
    except Exception as error:  # any error of the layers is caused by the user's sizes
        raise ConfigError(
            f"The Hugging Face config of type {config.model_type!r} builds no model: {error}. "
            f"Expected one that {name} can build. Correct --hf or --hf-config."
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _configure(model_type: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **changes)
    except Exception as error:  # any error of the checks is caused by the user's values
        raise ConfigError(
            f"The Hugging Face config of {model_type!r} has invalid values: "
            f"{' '.join(str(error).split())}. Correct --hf-config."
        ) from error


def compute_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a model for tokens of shape (B, T): (B, T, vocabulary), or (B, labels).

    The decoder of an encoder-decoder gets the tokens, too.
    """
    # DDP and DeepSpeed wrap the model, and DeepSpeed has a separate config.
    config = getattr(getattr(model, "module", model), "config", None)
    inputs = [tokens if config is None else make_input(config, tokens)]
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    output = model(*inputs, decoder_input_ids=tokens) if is_pair else model(*inputs)
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits


def make_input(config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The first input of a model: tokens, or images or sound whose values repeat the tokens.

    Args:
        config: The model's config.
        tokens: (B, T)

    Returns:
        Tokens (B, T), images (B, channels, height, width), one second of sound (B, 16,000), or a
        spectrogram (B, mel bins, frames). Values other than tokens are float32 from -1 to 1.
    """
    match _find_class(config):
        case "AutoModelForImageClassification":
            seen = getattr(config, "vision_config", config)
            size = seen.image_size if hasattr(seen, "image_size") else _IMAGE_SIZE
            height, width = (size, size) if isinstance(size, int) else size
            shape: tuple[int, ...] = (getattr(seen, "num_channels", 3), height, width)
        case "AutoModelForAudioClassification":
            shape = (_SAMPLES,)
        case "AutoModelForSpeechSeq2Seq":
            shape = (config.num_mel_bins, 2 * config.max_source_positions)
        case _:
            return tokens
    numel = math.prod(shape)
    repeated = tokens.repeat(1, -(-numel // tokens.shape[1]))[:, :numel]
    values = (repeated % NUM_BYTE_VALUES).float() / ((NUM_BYTE_VALUES - 1) / 2) - 1
    return values.reshape(-1, *shape)


def _reads_tokens(config: Any) -> bool:
    """Whether the model or its decoder reads tokens."""
    return _find_class(config) in (*_TOKEN_CLASSES, "AutoModelForSpeechSeq2Seq")


def _find_class(config: Any) -> str:
    """The auto class that builds a model of this config: that of its architecture, if named.

    Raises:
        ConfigError: The config has no model with an input that the trainer can make.
    """
    from transformers.models.auto import modeling_auto

    mappings: dict[str, Mapping[str, Any]] = {
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForImageClassification": (
            modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        ),
    }
    for auto_class, model_types in _SOUND.items():
        names = getattr(modeling_auto, _MAPPINGS_OF_SOUND[auto_class])
        mappings[auto_class] = {each: names[each] for each in model_types if each in names}
    named = next(iter(config.architectures or ()), None)
    known = {name: each.get(config.model_type) for name, each in mappings.items()}
    for name, architecture in known.items():
        if architecture is not None and architecture == named:
            return name
    # A type may also have a model with only the decoder, without the encoder.
    for name in sorted(known, key=lambda name: config.is_encoder_decoder and "Seq2Seq" not in name):
        if known[name] is not None:
            return name
    raise ConfigError(
        f"The trainer cannot feed the Hugging Face type {config.model_type!r}. Expected a "
        "language model, an image classifier, or a model of sound, such as 'llama', 't5', 'bert', "
        "'vit', 'wav2vec2' or 'whisper'. Set --hf to such a type. To forecast another model, write "
        "a builder (module:function): see docs/gate.md."
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
