"""Write the settings of a capacity plan for the trainer, Accelerate and torchtitan.

torchtitan 0.3 reads no settings file: `torchtitan.toml` holds its options by section, and the same
options as a command line. Field names are those of the versions in constraints-frameworks.txt; a
test compares them with the installed packages.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fsdp_inspect.report.output import whole_folder
from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.capacity_plan import CapacityPlan
from fsdp_inspect.simulation.planning.transformer import HF_NAMES

_AC = {"none": "None", "selective": "SelectiveAC", "full": "FullAC"}


def write_settings(
    plan: CapacityPlan, folder: Path, *, replaces: bool = False
) -> tuple[list[Path], list[str]]:
    """Write the files of the best plan.

    Returns:
        The written files, and the reasons why some could not be written.

    Raises:
        ExportError: The folder contains files and may not be replaced, or cannot be written.
    """
    assert plan.plan is not None
    texts = {"plan.toml": plan.plan.to_toml()}
    notes: list[str] = []
    best = plan.found.best
    if plan.job is not None and best is not None and isinstance(best.candidate, Candidate):
        more, notes = _model_settings(plan.job, best.candidate)
        texts |= more
    else:
        notes.append(
            "Only plan.toml: a builder of your own takes its settings as keywords, as shown."
        )
    with whole_folder(folder, replaces=replaces) as unfinished:
        for name, text in texts.items():
            (unfinished / name).write_text(text, encoding="utf-8")
    return [folder / name for name in sorted(texts)], notes


def _model_settings(job: Job, candidate: Candidate) -> tuple[dict[str, str], list[str]]:
    """The files of a preset or a Hugging Face model, and why some could not be written."""
    texts = {
        "accelerate.yaml": _yaml(accelerate_settings(job, candidate)),
        "torchtitan.toml": _torchtitan_text(job, candidate),
    }
    notes = []
    is_trainers = job.model.module_names != HF_NAMES
    if candidate.tensor_parallel == 1 and is_trainers:
        texts["trainer.toml"] = tomli_w.dumps(trainer_settings(job, candidate))
    else:
        why = "has tensor parallelism" if is_trainers else "is for a Hugging Face model"
        notes.append(
            f"No trainer.toml: the plan {why}, which the trainer's settings do not express."
        )
    if candidate.tensor_parallel > 1:
        notes.append(
            "plan.toml describes the FSDP part of the plan. Split the model over the "
            f"{candidate.tensor_parallel} tensor-parallel ranks in your own code."
        )
    return texts, notes


def trainer_settings(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Settings for the trainer's `--config`."""
    replicas = candidate.replicas
    mesh = f"{replicas}x{job.gpus // replicas}" if replicas > 1 else str(job.gpus)
    size = candidate.blocks_per_unit
    return {
        "preset": job.model.name,
        "seq_len": job.seq_len,
        "batch_size": candidate.batch_size,
        "microbatches": candidate.microbatches,
        "wrap": "block" if size == 1 else f"every:{size}",
        "reshard_after_forward": "auto" if candidate.reshard_after_forward else "false",
        "forward_prefetch": candidate.prefetch,
        "backward_prefetch": candidate.prefetch,
        "param_dtype": candidate.param_dtype,
        "reduce_dtype": "float32",
        "mesh": mesh,
        "offload": "cpu_pinned" if candidate.offload else "none",
        "checkpointing": candidate.checkpointing,
    }


def accelerate_settings(job: Job, candidate: Candidate) -> dict[str, Any]:
    """The file of `accelerate config`, for Accelerate 1.15 with FSDP2."""
    is_half = candidate.param_dtype == "bfloat16"
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16" if is_half else "no",
        "num_machines": job.num_nodes,
        "num_processes": job.gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": candidate.reshard_after_forward,
            "fsdp_offload_params": candidate.offload,
            "fsdp_activation_checkpointing": candidate.checkpointing == "full",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    if candidate.replicas > 1 or candidate.tensor_parallel > 1:
        settings["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": candidate.replicas,
            "parallelism_config_dp_shard_size": _shard(job, candidate),
            "parallelism_config_tp_size": candidate.tensor_parallel,
        }
    return settings


def torchtitan_settings(job: Job, candidate: Candidate) -> dict[str, dict[str, Any]]:
    """The options of torchtitan 0.3 by section."""
    ranks = _shard(job, candidate) * candidate.replicas
    return {
        "training": {
            "local_batch_size": candidate.batch_size,
            "global_batch_size": candidate.batch_size * candidate.microbatches * ranks,
            "seq_len": job.seq_len,
            "enable_cpu_offload": candidate.offload,
            "mixed_precision_param": candidate.param_dtype,
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": candidate.replicas,
            "data_parallel_shard_degree": _shard(job, candidate),
            "tensor_parallel_degree": candidate.tensor_parallel,
            "fsdp_reshard_after_forward": "default" if candidate.reshard_after_forward else "never",
        },
    }


def _shard(job: Job, candidate: Candidate) -> int:
    return job.gpus // candidate.replicas // candidate.tensor_parallel


def _torchtitan_text(job: Job, candidate: Candidate) -> str:
    settings = torchtitan_settings(job, candidate)
    options = " ".join(
        f"--{section}.{_option(name, value)}"
        for section, values in settings.items()
        for name, value in values.items()
    )
    lines = [
        "# Options of torchtitan 0.3, which reads no settings file. As a command line:",
        f"#   {options}",
        f"# activation_checkpoint in the config registry: {_AC[candidate.checkpointing]}",
        *_left_out(candidate),
    ]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(settings)


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"{name} {value}"


def _left_out(candidate: Candidate) -> Iterator[str]:
    if candidate.blocks_per_unit > 1:
        yield f"# Not expressed: units of {candidate.blocks_per_unit} blocks."
    if candidate.prefetch:
        yield f"# Not expressed: explicit prefetch of {candidate.prefetch} units."


def _yaml(settings: Mapping[str, Any], indent: str = "") -> str:
    """The settings as YAML: JSON scalars are YAML scalars."""
    lines = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", _yaml(value, f"{indent}  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"
