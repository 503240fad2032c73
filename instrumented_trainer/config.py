"""Declare all settings of a training run once: name, default, legal values and meaning.

The command line, the TOML file, `--help` and `--print-config` are generated from this class. A
setting that is None takes the preset's value, or no value, as its text says.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from fsdp_inspect.emulation.fixed_times import LEGAL as FIXED_TIMES_LEGAL
from fsdp_inspect.emulation.network import LEGAL as EMULATION_LEGAL
from fsdp_inspect.error_text import shorten
from fsdp_inspect.reading import InvalidTextError, parse_json

STDLIB = "stdlib"
"""The default corpus: the source text of Python's standard library, as bytes."""

Preset = Literal["tiny", "small", "llama-1b", "llama-8b", "llama-70b"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]


class Section(StrEnum):
    """The sections under which settings are shown and stored."""

    MODEL = "model"
    DATA = "data"
    TRAINING = "training"
    OPTIMIZER = "optimizer"
    SHARDING = "sharding"
    MEMORY = "memory"
    CHECKPOINTS = "checkpoints"
    RECORDING = "recording"
    EMULATION = "emulation"


def _setting(section: Section, default: Any, meaning: str, *, legal: str = "") -> Any:
    extra: dict[str, JsonValue] = {"section": str(section), "legal": legal}
    return Field(default, description=meaning, json_schema_extra=extra)


def _read_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value or "{}")
    except InvalidTextError as error:
        raise ValueError(
            f"hf_config is {shorten(repr(value))}: {error}. Expected an object such as "
            "'{\"hidden_size\": 64}'"
        ) from error


def _read_list(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


class TrainerConfig(BaseModel):
    """The validated settings of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: Preset = _setting(Section.MODEL, "tiny", "Shape of the decoder to train.")
    dim: PositiveInt | None = _setting(
        Section.MODEL,
        None,
        "Width of the model. This and the next five settings override the preset.",
    )
    num_layers: PositiveInt | None = _setting(Section.MODEL, None, "Number of blocks.")
    num_heads: PositiveInt | None = _setting(Section.MODEL, None, "Query heads.")
    num_kv_heads: PositiveInt | None = _setting(
        Section.MODEL, None, "Key/value heads, shared by groups of query heads."
    )
    ffn_dim: PositiveInt | None = _setting(Section.MODEL, None, "Width inside the feed-forward.")
    vocab_size: PositiveInt | None = _setting(Section.MODEL, None, "Number of distinct tokens.")
    hf: str | None = _setting(
        Section.MODEL,
        None,
        "Train a Hugging Face model instead, built from its config with random weights: a language "
        "model (causal, encoder-decoder or masked), an image classifier or an audio model.",
        legal="a model type (llama, t5), a config.json or its folder, or a hub name (org/name)",
    )
    hf_config: Annotated[dict[str, Any], BeforeValidator(_read_json)] = _setting(
        Section.MODEL, {}, "Changes to the Hugging Face config.", legal="a JSON object"
    )

    data: str = _setting(
        Section.DATA,
        STDLIB,
        "Training data. The default is the source text of Python's standard library.",
        legal="stdlib, a text file, a folder of text files, a .bin or .npy file of token ids",
    )
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = _setting(
        Section.DATA, "uint16", "Type of a token in a .bin file."
    )
    seq_len: PositiveInt | None = _setting(
        Section.DATA, None, "Tokens per sequence; overrides the preset."
    )
    batch_size: PositiveInt | None = _setting(
        Section.DATA, None, "Sequences per rank and microbatch; overrides the preset."
    )

    steps: PositiveInt = _setting(Section.TRAINING, 30, "Optimizer steps, counted from the start.")
    microbatches: PositiveInt = _setting(
        Section.TRAINING, 1, "Forward and backward passes in a step (gradient accumulation)."
    )
    accumulation_sync: Literal["every", "last", "all_reduce_last"] = _setting(
        Section.TRAINING,
        "every",
        "Microbatches that reduce gradients. `every`: each one. `last`: the last one only, and "
        "gradients stay unsharded until then. `all_reduce_last` (replicas only): each one "
        "reduce-scatters, and only the last one all-reduces.",
    )
    eval_every: NonNegativeInt = _setting(
        Section.TRAINING, 0, "Evaluate after every N steps; 0: never."
    )
    eval_batches: PositiveInt = _setting(Section.TRAINING, 4, "Batches per evaluation and rank.")
    log_every: PositiveInt = _setting(
        Section.TRAINING,
        1,
        "Reduce and print the loss after every N steps. Training on a GPU does not wait for it: "
        "the line of a step appears one or a few steps later.",
    )
    seed: NonNegativeInt = _setting(
        Section.TRAINING, 0, "Seed of the initial weights and of the order of the data."
    )

    lr: PositiveFloat | None = _setting(
        Section.OPTIMIZER, None, "Peak learning rate of AdamW; overrides the preset."
    )
    lr_warmup: NonNegativeInt = _setting(
        Section.OPTIMIZER, 5, "Steps in which the learning rate rises to its peak."
    )
    schedule: Literal["cosine", "linear", "constant"] = _setting(
        Section.OPTIMIZER, "cosine", "Shape of the decrease of the learning rate after its peak."
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = _setting(
        Section.OPTIMIZER, 0.1, "Learning rate of the last step, as a fraction of the peak."
    )
    weight_decay: NonNegativeFloat = _setting(
        Section.OPTIMIZER, 0.1, "Weight decay of matrices; norms have none."
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = _setting(Section.OPTIMIZER, 0.9, "AdamW's beta 1.")
    beta2: Annotated[float, Field(ge=0, lt=1)] = _setting(
        Section.OPTIMIZER, 0.95, "AdamW's beta 2."
    )
    clip_norm: NonNegativeFloat = _setting(
        Section.OPTIMIZER, 1.0, "Largest norm of the gradients; 0: no clipping."
    )
    fused: bool = _setting(Section.OPTIMIZER, True, "Use AdamW's fused kernel.")

    sharding: Literal["fsdp2", "fsdp1", "ddp", "zero3", "simple_fsdp"] = _setting(
        Section.SHARDING,
        "fsdp2",
        "The sharder: `fully_shard` (fsdp2), `FullyShardedDataParallel` (fsdp1), "
        "`DistributedDataParallel` (ddp), DeepSpeed's ZeRO-3 (zero3, requires DeepSpeed) or a "
        "parametrization that torch.compile captures (simple_fsdp). The other sharders accept only "
        "some of the settings below.",
    )
    plan: str | None = _setting(
        Section.SHARDING,
        None,
        "Plan file, which replaces the settings below and those of accumulation and checkpointing.",
        legal="a TOML file, as fsdp_inspect.Plan.dump writes it",
    )
    wrap: str = _setting(
        Section.SHARDING,
        "block",
        "Modules that form a unit. `block`: the embedding, each block, and [norm, lm_head]; "
        "`every:N`: N blocks per unit; `size:BYTES`: blocks packed or split to about this size; "
        "`root`: one unit.",
        legal="block, every:N, size:BYTES (size:8MiB), root, or units separated by `;` with "
        "modules separated by `,` (layers.*; norm, lm_head)",
    )
    reshard_after_forward: str = _setting(
        Section.SHARDING,
        "auto",
        "Free full parameters after forward and gather them again in backward. `auto`: yes, except "
        "for the head and the root, which backward needs at once. An integer N reshards to groups "
        "of N ranks.",
        legal="auto, true, false, a divisor of the sharding ranks; after `;` also per unit "
        "(true; layers.5=false)",
    )
    forward_prefetch: NonNegativeInt = _setting(
        Section.SHARDING, 0, "Units to prefetch explicitly in forward; 0: torch's default."
    )
    backward_prefetch: NonNegativeInt = _setting(
        Section.SHARDING, 0, "Units to prefetch explicitly in backward; 0: torch's default."
    )
    param_dtype: ComputeDtype = _setting(
        Section.SHARDING,
        "auto",
        "Dtype of all-gather and compute. `auto`: bfloat16 on GPUs, float32 on CPU.",
    )
    reduce_dtype: ComputeDtype = _setting(
        Section.SHARDING, "auto", "Dtype of gradient reduction. `auto`: float32."
    )
    mesh: str = _setting(
        Section.SHARDING,
        "auto",
        "Ranks as replicas x shards (HSDP). `auto`: all ranks shard.",
        legal="auto, N, or RxS with R x S ranks (2x4)",
    )
    offload: Literal["none", "cpu", "cpu_pinned"] = _setting(
        Section.SHARDING,
        "none",
        "Keep sharded parameters, gradients and optimizer state in host memory.",
    )
    reshard_after_backward: bool = _setting(
        Section.SHARDING, True, "Free full parameters after backward too, between microbatches."
    )
    unshard_async_op: bool = _setting(
        Section.SHARDING,
        False,
        "Issue all-gathers asynchronously on the compute stream. With prefetch, they then overlap "
        "with compute on CPU too.",
    )
    reduce_scatter_buffers: PositiveInt = _setting(
        Section.SHARDING, 1, "Largest number of reduce-scatter inputs that exist at once."
    )
    separate_reduce_scatter_group: bool = _setting(
        Section.SHARDING, False, "Give the reduce-scatter its own communicator."
    )

    checkpointing: Literal["none", "selective", "full"] = _setting(
        Section.MEMORY,
        "none",
        "Recompute activations of blocks in backward: all of them (full), or all except the "
        "results of matrix products and attention (selective).",
    )
    compile: bool = _setting(Section.MEMORY, False, "Compile each block with torch.compile.")

    checkpoint_dir: str | None = _setting(
        Section.CHECKPOINTS, None, "Folder of checkpoints.", legal="a path"
    )
    checkpoint_every: NonNegativeInt = _setting(
        Section.CHECKPOINTS, 0, "Save after every N steps; 0: never."
    )
    resume: str = _setting(
        Section.CHECKPOINTS,
        "no",
        "Resume from a checkpoint. `latest`: the last one in the folder, if it has one.",
        legal="no, latest, or the path of a checkpoint",
    )

    record: bool = _setting(
        Section.RECORDING, True, "Record the run with fsdp_inspect.Recorder. --no-record: do not."
    )
    runs_dir: str = _setting(Section.RECORDING, "runs", "Folder of recorded runs.", legal="a path")
    name: str | None = _setting(
        Section.RECORDING, None, "Name of the run; part of its folder's name."
    )
    tag: Annotated[tuple[str, ...], BeforeValidator(_read_list)] = _setting(
        Section.RECORDING, (), "Words for finding the run.", legal="words separated by commas"
    )
    memory_steps: str = _setting(
        Section.RECORDING,
        "auto",
        "Memory steps, which attribute every live byte to its unit. They are slow, so they are not "
        "timed.",
        legal="auto, none, or step numbers separated by commas (5,9)",
    )
    numerics_every: NonNegativeInt = _setting(
        Section.RECORDING,
        0,
        "In every Nth step, read the values of the model: norms, values that are not finite, "
        "updates that are rounded away. Such steps are not timed. 0: none.",
    )
    overhead: str = _setting(
        Section.RECORDING,
        "1%",
        "Part of the step time that the recording may take. Steps beyond it are recorded without "
        "their units.",
        legal="a percentage above 0 (1%, 0.5%), or none: every step in detail",
    )
    device_memory: str | None = _setting(
        Section.RECORDING,
        None,
        "Limit the memory of the device, also on CPU. An allocation that exceeds the limit fails "
        "as on a device of that size, and `fsdp-inspect diagnose` explains it.",
        legal="an amount above 0 with a unit (2GiB, 512MB)",
    )
    log_to: Annotated[
        tuple[Literal["wandb", "mlflow", "tensorboard", "comet", "trackio", "otel"], ...],
        BeforeValidator(_read_list),
    ] = _setting(
        Section.RECORDING,
        (),
        "Trackers to which rank 0 logs the numbers of each step, in the background.",
        legal="wandb, mlflow, tensorboard, comet, trackio or otel, separated by commas",
    )
    upload: str | None = _setting(
        Section.RECORDING,
        None,
        "Upload the recording below this URL while it grows: s3://bucket/runs.",
        legal="a URL that fsspec can write",
    )
    record_warmup: NonNegativeInt = _setting(
        Section.RECORDING, 3, "Number of warm-up steps, which are not timed."
    )

    emulate: str | None = _setting(
        Section.EMULATION,
        None,
        "Run one process as rank 0 of many ranks. Kernels, memory and scheduling are real, and a "
        "model replaces the network. The loss is then meaningless and not shown.",
        legal=EMULATION_LEGAL,
    )
    fixed_compute: str | None = _setting(
        Section.EMULATION,
        None,
        "Under emulation, give attention, feed-forward, embedding and output projection a fixed "
        "compute time each.",
        legal=FIXED_TIMES_LEGAL,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        legal = legal_values(str(info.field_name))
        if isinstance(value, bool) and legal.startswith(("a number", "a whole number")):
            raise ValueError(f"{info.field_name} is {value}. Expected {legal}")
        return value

    @field_validator("wrap", mode="before")
    @classmethod
    def _join_units(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return "; ".join(", ".join(unit) if isinstance(unit, list) else str(unit) for unit in value)

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _join_reshard(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return _lower(value)
        parts = {**value}
        default = parts.pop("default", "auto")
        return "; ".join(
            [_lower(default), *(f"{name}={_lower(own)}" for name, own in parts.items())]
        )

    @field_validator("memory_steps", "mesh", mode="before")
    @classmethod
    def _join_numbers(cls, value: Any) -> Any:
        if isinstance(value, list):
            return ",".join(str(part) for part in value)
        return str(value) if isinstance(value, int) else value

    @field_validator("upload")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError("it is not a URL")
        return value


def _lower(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool | int) else value


def section_of(name: str) -> Section:
    """The section of a setting."""
    return Section(_extra(name)["section"])


def legal_values(name: str) -> str:
    """The legal values of a setting, in words."""
    if legal := _extra(name)["legal"]:
        return str(legal)
    field = TrainerConfig.model_fields[name]
    return _describe_type(field.annotation, f"{field.annotation} {field.metadata}")


def meaning_of(name: str) -> str:
    """The meaning of a setting, in a sentence or two."""
    return TrainerConfig.model_fields[name].description or ""


def _extra(name: str) -> dict[str, Any]:
    extra = TrainerConfig.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def _describe_type(annotation: Any, text: str) -> str:
    choices = getattr(annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(choices)
    if annotation is bool:
        return "true, false"
    if "int" not in text and "float" not in text:
        return "text"
    kind = "a number" if "float" in text else "a whole number"
    limits = [words for limit, words in _LIMITS.items() if limit in text]
    return " ".join([kind, *limits])


_LIMITS = {"gt=0": "above 0", "ge=0": "from 0", "lt=1": "below 1", "le=1": "to 1"}
