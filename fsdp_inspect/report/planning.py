"""Describe a capacity plan: the answer, its values, runners-up and rejections; for a terminal."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import RenderableType
from rich.text import Text

from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.formatting import (
    capitalize,
    format_bytes,
    format_count,
    format_ns,
    format_ratio,
    format_setting,
)
from fsdp_inspect.report.layout import dim, grouped, indented, section, table_of
from fsdp_inspect.report.output import whole_folder
from fsdp_inspect.simulation.planning.candidates import BuilderCandidate, Candidate, Job
from fsdp_inspect.simulation.planning.estimates import PlannedValue
from fsdp_inspect.simulation.planning.prediction import PlanPrediction
from fsdp_inspect.simulation.planning.search import VALUES, CapacityPlan
from fsdp_inspect.simulation.planning.transformer import HF_NAMES

MOST_REJECTIONS = 8
VALUE_HEADS = ("", "value", "low", "high", "<source")
FOUND_TITLE = "Best plan and runners-up"
FOUND_HEADS = ("plan", "tokens/s", "days", "device memory")
REJECTION_HEADS = ("reason", "plans", "<closest plan", "device memory")
"""Heads of the tables; "<" aligns a column to the left, as in `new_table`."""


def _hours(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_time_ns": ("step time", format_ns),
    "tokens_per_s": ("tokens/s", format_count),
    "mfu": ("MFU", format_ratio),
    "gpu_hours": ("GPU hours", _hours),
    "days": ("days", _hours),
    "energy_kwh": ("energy, kWh", _hours),
    "peak_allocated_bytes": ("peak allocated", format_bytes),
    "peak_reserved_bytes": ("peak reserved", format_bytes),
    "device_bytes": ("device memory", format_bytes),
    "host_bytes": ("host memory", format_bytes),
}


def describe_candidate(candidate: Candidate | BuilderCandidate) -> str:
    """The settings of a candidate in one line."""
    if isinstance(candidate, BuilderCandidate):
        return _describe_builder(candidate)
    every = candidate.checkpoint_every
    blocks = "" if every == 1 else f" of every {every} blocks"
    shards = [f"checkpointing {candidate.checkpointing}{blocks}", f"batch {candidate.batch_size}"]
    if candidate.microbatches > 1:
        shards.append(f"x {candidate.microbatches} microbatches")
    if candidate.microbatches > 1 and candidate.accumulation_sync == "last":
        shards.append("gradients reduced in the last one")
    if not candidate.reshard_after_forward:
        shards.append("no reshard")
    if candidate.blocks_per_unit > 1:
        shards.append(f"{candidate.blocks_per_unit} blocks per unit")
    if candidate.prefetch:
        shards.append(f"prefetch {candidate.prefetch}")
    if candidate.offload:
        shards.append("CPU offload")
    if candidate.param_dtype != "bfloat16":
        shards.append(candidate.param_dtype)
    if candidate.replicas > 1 and candidate.is_sharded:
        shards.append(f"HSDP x {candidate.replicas}")
    ways = {
        "TP": candidate.tensor_parallel,
        "CP": candidate.context_parallel,
        "PP": candidate.pipeline_parallel,
        "EP": candidate.expert_parallel,
    }
    shards += [f"{name} {size}" for name, size in ways.items() if size > 1]
    return ", ".join([*shards, *_describe_others(candidate)])


def _describe_others(candidate: Candidate) -> Iterator[str]:
    """The settings that a search does not vary, unless they are the defaults."""
    usual = Candidate()
    if not candidate.is_sharded:
        yield "not sharded"
    if candidate.adapter_rank:
        yield f"{'QLoRA' if candidate.is_quantized else 'LoRA'} of rank {candidate.adapter_rank}"
    if candidate.compiled:
        yield "compiled"
    if candidate.products != usual.products:
        yield f"{candidate.products} products"
    for name in ("loss", "optimizer", "attention", "master_dtype", "reduce_dtype"):
        value = getattr(candidate, name)
        if value != getattr(usual, name):
            yield f"{name.replace('_', ' ')} {value}"


def is_of_trainer(candidate: Candidate) -> bool:
    """Whether the trainer's settings express a plan."""
    usual = Candidate()
    names = (
        *("checkpoint_every", "master_dtype", "products", "loss", "optimizer", "adapter_rank"),
        *("is_sharded", "compiled", "attention"),
        *("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"),
    )
    is_usual = all(getattr(candidate, name) == getattr(usual, name) for name in names)
    return is_usual and candidate.checkpointing != "alternate"


def _describe_plan(candidate: Candidate | BuilderCandidate) -> str:
    if isinstance(candidate, BuilderCandidate):
        return _describe_builder(candidate, is_whole=True)
    return describe_candidate(candidate)


def _describe_builder(candidate: BuilderCandidate, *, is_whole: bool = False) -> str:
    """The keywords of a builder; those with torch's usual values only if `is_whole`."""
    usual = {"reshard_after_forward": "true", "offload": "none"}
    return (
        ", ".join(
            f"{name}={value}"
            for name, value in candidate.items
            if is_whole or usual.get(name) != value
        )
        or "as built"
    )


@grouped
def render_plan(plan: CapacityPlan) -> Iterator[RenderableType]:
    """Render a capacity plan."""
    yield Text(answer_plan(plan), style="bold")
    yield indented(
        f"{plan.model} ({format_count(plan.num_parameters)} parameters), {plan.gpus} x {plan.gpu}, "
        f"sequences of {plan.seq_len:,} tokens, {format_count(plan.tokens)} tokens."
    )
    yield from (indented(sentence) for sentence in describe_shortfall(plan))
    if plan.shown is not None and (plan.found.best is not None or plan.is_fixed):
        yield indented(f"Plan: {_describe_plan(plan.shown.candidate)}.")
        yield from section("Predicted values", table_of(VALUE_HEADS, value_rows(plan.shown)))
    if plan.found.undecided is not None and not plan.is_fixed:
        yield from section("Cannot tell", *map(indented, describe_undecided(plan)))
    if plan.found.runners_up:
        yield from section(FOUND_TITLE, table_of(FOUND_HEADS, found_rows(plan)))
    if not plan.is_fixed:
        yield from section("Rejected", table_of(REJECTION_HEADS, rejection_rows(plan)))
    if plan.shown is not None:
        yield from section("Assumptions", *map(indented, describe_assumptions(plan.shown)))
    if plan.notes:
        yield from section("Notes", *(indented(note) for note in plan.notes))
    yield ""
    yield dim(describe_search(plan))


def describe_search(plan: CapacityPlan) -> str:
    """The number of compared plans, and what nothing of it is."""
    if plan.is_fixed:
        return "One given plan, simulated. Nothing here is measured."
    how = "simulation" if plan.job is not None else "forecast"
    return (
        f"Compared {plan.found.num_candidates:,} plans, {plan.found.num_simulated:,} of them by "
        f"{how}. Nothing here is measured."
    )


def answer_plan(plan: CapacityPlan) -> str:
    """The answer in one sentence."""
    if plan.found.best is not None:
        days = plan.found.best.days
        return f"Fits: {_hours(days.value)} days ({_hours(days.low)} to {_hours(days.high)})."
    if plan.is_fixed and plan.shown is not None:
        is_open = plan.shown.verdict is FitVerdict.UNKNOWN
        return f"{'Cannot tell' if is_open else 'Does not fit'}: {plan.shown.reason}"
    if plan.found.undecided is not None:
        return f"Cannot tell whether a plan fits into {format_bytes(plan.memory_bytes)}."
    return f"No plan fits into {format_bytes(plan.memory_bytes)}."


def describe_shortfall(plan: CapacityPlan) -> Iterable[str]:
    """What would make a plan fit, one sentence each; none if a plan fits."""
    shortfall = plan.shortfall
    if shortfall is None:
        return
    which = "this plan" if plan.is_fixed else "a plan"
    if shortfall.host_bytes is not None:
        offloaded = which if plan.is_fixed else "a plan with offload"
        yield (
            f"With {format_bytes(shortfall.host_bytes)} of host memory, {offloaded} fits "
            f"the {format_bytes(plan.memory_bytes)} of a device."
        )
    if shortfall.memory_bytes is None:
        yield f"No memory of a device makes {which} fit: the memory of a host is too small."
    else:
        yield (
            f"On {plan.gpus} GPUs{_with_host(plan)} {which} fits with "
            f"{format_bytes(shortfall.memory_bytes)} of device memory."
        )
    if shortfall.gpus is not None:
        yield f"With this memory, {which} fits on {shortfall.gpus} GPUs."
    else:
        yield f"With this memory, no larger number of GPUs was found on which {which} fits."
    if shortfall.change is not None:
        yield (
            f"The smallest change that fits: {describe_candidate(shortfall.change)}. A device "
            f"needs at most {format_bytes(shortfall.change_bytes)}. Evaluate it with these "
            f"options: --fixed {_as_options(shortfall.change)}"
        )


def _as_options(candidate: Candidate) -> str:
    """The settings that differ from their defaults, as options of the command."""
    usual = Candidate()
    given = {each.name: getattr(candidate, each.name) for each in fields(candidate)}
    return " ".join(
        f"--set {name}={format_setting(value)}"
        for name, value in given.items()
        if value != getattr(usual, name)
    )


def _with_host(plan: CapacityPlan) -> str:
    if plan.host_memory_bytes is None:
        return ""
    return f" and {format_bytes(plan.host_memory_bytes)} of host memory"


def describe_undecided(plan: CapacityPlan) -> Iterator[str]:
    """The fastest plan that may fit and why nobody can tell, one sentence each; or nothing."""
    found = plan.found.undecided
    if found is None:
        return
    yield f"{describe_candidate(found.candidate)}."
    if plan.found.best is None:
        yield f"The fastest such plan: {found.reason}"
    else:
        yield f"This plan is faster, but {found.reason[:1].lower()}{found.reason[1:]}"


def value_rows(prediction: PlanPrediction) -> Iterator[tuple[str, ...]]:
    """The predicted values of a plan with their intervals; columns: `VALUE_HEADS`."""
    for name in VALUES:
        label, show = _FORMATS[name]
        estimate: PlannedValue = getattr(prediction, name)
        numbers = (estimate.value, estimate.low, estimate.high)
        yield (label, *map(show, numbers), str(estimate.origin))


def found_rows(plan: CapacityPlan) -> Iterator[tuple[str, ...]]:
    """The best plan and the runners-up; columns: `FOUND_HEADS`."""
    for each in (plan.found.best, *plan.found.runners_up):
        if each is not None:
            yield (
                describe_candidate(each.candidate),
                format_count(each.tokens_per_s.value),
                _hours(each.days.value),
                format_bytes(each.device_bytes.value),
            )


def rejection_rows(plan: CapacityPlan) -> Iterator[tuple[str, ...]]:
    """The reasons of the rejections, the first ones singly; columns: `REJECTION_HEADS`."""
    for each in plan.found.rejected[:MOST_REJECTIONS]:
        offload = ", offload" if each.offload else ""
        yield (
            f"{each.reason} ({each.checkpointing}{offload})",
            f"{each.count:,}",
            describe_candidate(each.example.candidate),
            format_bytes(each.example.device_bytes.value),
        )
    rest = sum(each.count for each in plan.found.rejected[MOST_REJECTIONS:])
    if rest:
        yield ("other reasons", f"{rest:,}", "", "")


def describe_assumptions(prediction: PlanPrediction) -> Iterator[str]:
    """The assumptions of the values, each once."""
    seen: dict[str, list[str]] = {}
    for name in ("step_time_ns", "energy_kwh", "device_bytes", "host_bytes"):
        estimate: PlannedValue = getattr(prediction, name)
        seen.setdefault(estimate.assumption, []).append(_FORMATS[name][0])
    for text, names in seen.items():
        yield f"{capitalize(', '.join(names))}: {text}"


# --- Write the settings of a capacity plan for the trainer, Accelerate and torchtitan.
#
# torchtitan 0.3 reads no settings file: `torchtitan.toml` holds its options by section, and the
# same options as a command line. Field names are those of the versions in
# constraints-frameworks.txt; a test compares them with the installed packages.

_AC = {"none": "None", "selective": "SelectiveAC", "alternate": "SelectiveAC", "full": "FullAC"}


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
        "accelerate.yaml": "".join(f"# {line}\n" for line in _accelerate_script(candidate))
        + _yaml(accelerate_settings(job, candidate)),
        "torchtitan.toml": _torchtitan_text(job, candidate),
    }
    notes = []
    is_trainers = job.model.module_names != HF_NAMES
    if is_of_trainer(candidate) and is_trainers:
        texts["trainer.toml"] = tomli_w.dumps(trainer_settings(job, candidate))
    else:
        why = "has settings beyond FSDP" if is_trainers else "is for a Hugging Face model"
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
        "accumulation_sync": candidate.accumulation_sync,
        "wrap": "block" if size == 1 else f"every:{size}",
        "reshard_after_forward": "auto" if candidate.reshard_after_forward else "false",
        "forward_prefetch": candidate.prefetch,
        "backward_prefetch": candidate.prefetch,
        "param_dtype": candidate.param_dtype,
        "reduce_dtype": candidate.reduce_dtype,
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
    if candidate.replicas > 1 or candidate.ranks_of_sequences > 1:
        settings["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": candidate.replicas,
            "parallelism_config_dp_shard_size": _shard(job, candidate),
            "parallelism_config_tp_size": candidate.tensor_parallel,
            "parallelism_config_cp_size": candidate.context_parallel,
        }
    if candidate.compiled:
        settings["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return settings


def _accelerate_script(candidate: Candidate) -> Iterator[str]:
    """What the training script must set, because no key of Accelerate's file does."""
    usual = Candidate()
    yield f"Batch of the data loader: {candidate.batch_size} sequences for each process."
    if candidate.microbatches > 1:
        syncs = candidate.accumulation_sync == "every"
        yield "Accumulation, in the script:"
        yield (
            "  Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin("
            f"num_steps={candidate.microbatches}, sync_each_batch={syncs}))"
        )
        yield (
            "  Transformers' TrainingArguments("
            f"gradient_accumulation_steps={candidate.microbatches}, "
            'accelerator_config={"gradient_accumulation_kwargs": '
            f'{{"sync_each_batch": {syncs}}}}})'
        )
        yield (
            "Accelerate's default, sync_each_batch=False, holds unsharded gradients between "
            "microbatches"
            + (", which this plan has no memory for." if syncs else ", as this plan does.")
        )
    if candidate.param_dtype == "bfloat16" and candidate.reduce_dtype == "float32":
        yield (
            "Accelerate reduces gradients in bfloat16. This plan reduces in float32: "
            "FullyShardedDataParallelPlugin(mixed_precision_policy=...)."
        )
    own = (
        "is_sharded",
        "products",
        "loss",
        "optimizer",
        "adapter_rank",
        "attention",
        "checkpoint_every",
    )
    yield from _not_expressed(candidate, *own, "pipeline_parallel", "expert_parallel", "prefetch",
                              "blocks_per_unit")  # fmt: skip
    if candidate.checkpointing not in ("full", usual.checkpointing):
        yield f"Not expressed: checkpointing {candidate.checkpointing}."


def _not_expressed(candidate: Candidate, *names: str) -> Iterator[str]:
    """A line for each setting that a file has no key for, unless it is at its default."""
    usual = Candidate()
    for name in names:
        value = getattr(candidate, name)
        if value != getattr(usual, name):
            yield f"Not expressed: {name} = {value}."


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
            "mixed_precision_reduce": candidate.reduce_dtype,
        },
        "parallelism": {
            "data_parallel_replicate_degree": candidate.replicas,
            "data_parallel_shard_degree": _shard(job, candidate),
            "tensor_parallel_degree": candidate.tensor_parallel,
            "context_parallel_degree": candidate.context_parallel,
            "pipeline_parallel_degree": candidate.pipeline_parallel,
            "expert_parallel_degree": candidate.expert_parallel,
            "fsdp_reshard_after_forward": "default" if candidate.reshard_after_forward else "never",
        },
    }


def _shard(job: Job, candidate: Candidate) -> int:
    return job.gpus // candidate.replicas // candidate.ranks_of_sequences


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
    names = ("blocks_per_unit", "prefetch", "accumulation_sync", "compiled", "products", "loss")
    more = (
        "is_sharded",
        "optimizer",
        "adapter_rank",
        "attention",
        "checkpoint_every",
        "master_dtype",
    )
    for line in _not_expressed(candidate, *names, *more):
        yield f"# {line}"
    if candidate.microbatches > 1 and candidate.accumulation_sync == "last":
        yield "# torchtitan reduces gradients in each microbatch, which needs less memory."
    if candidate.checkpointing == "selective":
        yield (
            "# torchtitan's list of operators saves every second product: it needs less memory and "
            "repeats more than planned (checkpointing = alternate)."
        )


def _yaml(settings: Mapping[str, Any], indent: str = "") -> str:
    """The settings as YAML: JSON scalars are YAML scalars."""
    lines = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", _yaml(value, f"{indent}  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"
