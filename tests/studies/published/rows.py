"""Express a published training as the settings of `plan --fixed`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.machines import PlannedMachine, make_machine
from fsdp_inspect.simulation.planning.prediction import predict_memory
from fsdp_inspect.simulation.planning.transformer import Transformer

Row = Mapping[str, Any]


class InexpressibleError(Exception):
    """A row lacks a setting, or has one that a plan cannot express."""


@dataclass(frozen=True, slots=True)
class Expressed:
    """A row as a question to the planner."""

    job: Job
    candidate: Candidate
    machine: PlannedMachine


MACHINES = (
    (r"gb200|blackwell.*184", "gb200-ib400"),
    (r"b200", "b200-ib400"),
    (r"h200", "h200-ib400"),
    (r"h100.*(9[456] ?gb)", "h100-96gb-ib400"),
    (r"h100", "h100-ib400"),
    (r"a100.*40", "a100-40gb-ib200"),
    (r"a100", "a100-ib200"),
    (r"mi300x", "mi300x-ib400"),
    (r"mi355x", "mi355x-ib400"),
    (r"6000.*ada", "rtx6000ada-pcie"),
    (r"a6000", "a6000-pcie"),
    (r"a5000", "a5000-pcie"),
    (r"l40s", "l40s-pcie"),
    (r"3090", "rtx3090-pcie"),
    (r"4090", "rtx4090-pcie"),
    (r"5090", "rtx5090-pcie"),
)
"""The preset of a GPU's name; the first match counts."""


def _llama(
    name: str,
    dim: int,
    layers: int,
    heads: int,
    key_heads: int,
    ffn: int,
    vocabulary: int,
    **more: Any,
) -> Transformer:
    return Transformer(
        name=name,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        ffn_dim=ffn,
        vocab_size=vocabulary,
        head_dim=more.pop("head_dim", dim // heads),
        **more,
    )


_LLAMA3, _LLAMA2, _QWEN = 128_256, 32_000, 152_064
MODELS = (
    (r"llama.?3\.2.*1b", _llama("llama-3.2-1b", 2048, 16, 32, 8, 8192, _LLAMA3,
                                tie_embeddings=True)),
    (r"llama.?3\.2.*3b", _llama("llama-3.2-3b", 3072, 28, 24, 8, 8192, _LLAMA3,
                                tie_embeddings=True)),
    (r"llama.?3.*405b", _llama("llama-3.1-405b", 16384, 126, 128, 8, 53248, _LLAMA3)),
    (r"llama.?3.*70b", _llama("llama-3-70b", 8192, 80, 64, 8, 28672, _LLAMA3)),
    (r"llama.?3.*8b", _llama("llama-3-8b", 4096, 32, 32, 8, 14336, _LLAMA3)),
    (r"(code)?llama.?2?.*34b", _llama("llama-34b", 8192, 48, 64, 8, 22016, _LLAMA2)),
    (r"llama.?2?.*70b", _llama("llama-2-70b", 8192, 80, 64, 8, 28672, _LLAMA2)),
    (r"llama.?2?.*13b", _llama("llama-2-13b", 5120, 40, 40, 40, 13824, _LLAMA2)),
    (r"llama.?2?.*30b", _llama("llama-30b", 6656, 60, 52, 52, 17920, _LLAMA2)),
    (r"llama.?2?.*65b", _llama("llama-65b", 8192, 80, 64, 64, 22016, _LLAMA2)),
    (r"llama.?2?.*7b", _llama("llama-2-7b", 4096, 32, 32, 32, 11008, _LLAMA2)),
    (r"yi.*34b", _llama("yi-34b", 7168, 60, 56, 8, 20480, 64_000)),
    (r"mistral.*7b", _llama("mistral-7b", 4096, 32, 32, 8, 14336, _LLAMA2)),
    (r"qwen3.*moe.*30b|qwen3.*30b", _llama(
        "qwen3-30b-a3b", 2048, 48, 32, 4, 768, 151_936, head_dim=128, experts=128,
        active_experts=8)),
    (r"qwen3.*0\.6b", _llama("qwen3-0.6b", 1024, 28, 16, 8, 3072, 151_936, head_dim=128,
                             tie_embeddings=True)),
    (r"qwen3.*1\.7b", _llama("qwen3-1.7b", 2048, 28, 16, 8, 6144, 151_936, tie_embeddings=True)),
    (r"qwen3.*4b", _llama("qwen3-4b", 2560, 36, 32, 8, 9728, 151_936, head_dim=128,
                          tie_embeddings=True)),
    (r"qwen3.*8b", _llama("qwen3-8b", 4096, 36, 32, 8, 12288, 151_936)),
    (r"qwen3.*14b", _llama("qwen3-14b", 5120, 40, 40, 8, 17408, 151_936)),
    (r"qwen3.*32b", _llama("qwen3-32b", 5120, 64, 64, 8, 25600, 151_936, head_dim=128)),
    (r"qwen2\.5.*7b", _llama("qwen2.5-7b", 3584, 28, 28, 4, 18944, _QWEN)),
    (r"qwen2\.5.*14b", _llama("qwen2.5-14b", 5120, 48, 40, 8, 13824, _QWEN)),
    (r"qwen2\.5.*32b", _llama("qwen2.5-32b", 5120, 64, 40, 8, 27648, _QWEN)),
    (r"qwen2\.5.*72b", _llama("qwen2.5-72b", 8192, 80, 64, 8, 29568, _QWEN)),
    (r"gpt-oss.*20b", _llama("gpt-oss-20b", 2880, 24, 64, 8, 2880, 201_088, head_dim=64,
                             experts=32, active_experts=4)),
    (r"gpt-oss.*120b", _llama("gpt-oss-120b", 2880, 36, 64, 8, 2880, 201_088, head_dim=64,
                              experts=128, active_experts=4)),
)  # fmt: skip
"""The sizes of a model's name, from its Hugging Face config; the first match counts."""
UNNAMED = tuple(
    (rf"^(\w+ ?forge |dense |transformer )?{size}\b", next(m for p, m in MODELS if m.name == name))
    for size, name in (("7b", "llama-2-7b"), ("13b", "llama-2-13b"), ("70b", "llama-3-70b"))
)
"""Models that a source names by their size only: they count as Llama."""
MPT_SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, blocks and heads of llm-foundry's `yamls/pretrain/mpt-*.yaml`."""


def find_model(row: Row) -> Transformer:
    """The model of a row."""
    name = str(row["model"]).lower()
    mpt = re.fullmatch(r"mpt[ -](\w+)", name)
    if mpt and mpt[1] in MPT_SIZES:
        dim, layers, heads = MPT_SIZES[mpt[1]]
        return _llama(
            name, dim, layers, heads, heads, 4 * dim, 50_368, gated=False, biased=True,
            tie_embeddings=True, max_positions=row["seq_len"],
        )  # fmt: skip
    for pattern, model in (*MODELS, *UNNAMED):
        if re.search(pattern, name):
            return model
    raise InexpressibleError(f"the architecture of {row['model']} is not a plain decoder")


def find_machine(row: Row) -> PlannedMachine:
    """The machine of a row."""
    name = str(row["gpu"]).lower()
    if row["source"] == "torchao-training" and name == "h100":
        name = "h100 96gb"  # the team of torchtitan's tables; a device of 700 W is faster
    preset = next((preset for pattern, preset in MACHINES if re.search(pattern, name)), None)
    if preset is None:
        raise InexpressibleError(f"no preset for {row['gpu']}")
    links = make_machine(preset).speed.links
    per_node = links.gpus_per_node
    if links.preset.inter is None:
        per_node = max(per_node, row["gpus"] or 1)
    return make_machine(preset, gpus_per_node=per_node)


LOOPS: Mapping[str, Mapping[str, Any]] = {
    "llm-foundry": {"loss": "fused", "attention": "flash1"},
    "torchtune": {"loss": "chunked", "master_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "answerai": {"loss": "whole"},
    "nemo": {
        "loss": "linear",
        "attention": "cudnn",
        "compiled": True,
        "master_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
    },
    "ibm": {"loss": "whole"},
}
"""What the sources say about their loops beyond a row, by the begin of their names. Transformer
Engine's kernels (NeMo) fuse elementwise operations, as a compiler does. NeMo AutoModel loads
parameters in bfloat16: between its rows on one GPU and on eight, memory falls by 8 bytes for a
sharded parameter, not by 16."""
_COMPILED_LOSS = r"torchtitan-(trainy|asynctp)|aws-torchtitan|torchao-training (mi|b2)"
"""Trainings of torchtitan from 2025 on, which compile the loss as well."""
ADAPTER_RANK = 64
_TUNE_STEPS = (
    "packed", "compile", "chunked", "activation checkpointing", "fuse", "offloading", "8-bit",
)  # fmt: skip


def express(row: Row) -> Expressed:
    """The settings of a row.

    Raises:
        InexpressibleError: The row lacks a setting, or a plan cannot express one.
    """
    for name in ("model", "gpu", "gpus", "seq_len", "local_batch"):
        if not row[name]:
            raise InexpressibleError(f"{name} is not stated")
    model, machine = find_model(row), find_machine(row)
    source = str(row["source"]).lower()
    settings: dict[str, Any] = {
        "batch_size": row["local_batch"],
        "microbatches": row["grad_accum"] or 1,
        "compiled": bool(row["compile"]) or _is_compiled(row),
    }
    for begin, values in LOOPS.items():
        if source.startswith(begin):
            settings |= values
    if settings["compiled"] and re.search(_COMPILED_LOSS, f"{source} {row['gpu']}".lower()):
        settings["loss"] = "compiled"
    settings |= _precision(row)
    settings |= _mesh(row)
    if model.experts and "expert_parallel" not in settings:
        raise InexpressibleError("the ranks of expert parallelism are not stated")
    settings |= _details(row, model)
    job = Job(
        model=model,
        gpus=row["gpus"],
        gpus_per_node=machine.speed.links.gpus_per_node,
        seq_len=row["seq_len"],
        tokens=1e9,
    )
    checkpointing = _checkpointing(row)
    if checkpointing is None:
        settings["checkpointing"] = _smallest(job, machine, settings)
    else:
        settings |= checkpointing
    asked = Expressed(job, Candidate(**settings), machine)
    ranks = asked.candidate.ranks_of_sequences * asked.candidate.replicas
    if job.gpus % ranks:
        raise InexpressibleError(f"{ranks} ranks of the mesh do not divide {job.gpus} GPUs")
    _check_rate(row, asked)
    return asked


def _check_rate(row: Row, asked: Expressed) -> None:
    """Refuse a row whose printed rate needs more than the peak rate of its device."""
    candidate, gpu = asked.candidate, asked.machine.speed.gpu
    repeats = candidate.checkpointing == "full" and candidate.checkpoint_every == 1
    passes = (3 if candidate.adapter_rank == 0 else 2) + repeats
    of_token = asked.job.model.model_flops_per_token(asked.job.seq_len) * passes / 3
    needed = of_token * (row["tokens_per_s_per_gpu"] or 0)
    if needed > gpu.bf16_flops and candidate.products == "param_dtype":
        raise InexpressibleError(
            f"the printed rate needs {needed / 1e12:.0f} TFLOP/s, and the peak of {gpu.name} is "
            f"{gpu.bf16_flops / 1e12:.0f}"
        )


def _is_compiled(row: Row) -> bool:
    """torchtitan's float8 trainings are compiled; a table without the column does not say so."""
    text = f"{row['source']} {row['precision']}".lower()
    return row["compile"] is None and "torchtitan" in text and "float8" in text


def _precision(row: Row) -> dict[str, Any]:
    text = str(row["precision"]).lower()
    found: dict[str, Any] = {}
    if "pure" in text:
        found["reduce_dtype"] = "bfloat16"
    if "lora" in text or "lora" in str(row["checkpointing"]).lower():
        found |= {
            "adapter_rank": ADAPTER_RANK,
            "is_quantized": "qlora" in text + str(row["checkpointing"]).lower(),
        }
    if "nvfp4" in text:
        found["products"] = "nvfp4"
    elif "mxfp8" in text:
        found["products"] = "mxfp8"
    elif "rowwise" in text:
        found["products"] = "float8_rowwise"
    elif "float8" in text or "fp8" in text or "tensorwise" in text:
        found["products"] = "float8"
    if found.get("products") == "float8" and "amp_fp8" not in text:
        found["float8_gather"] = "bfloat16 all-gather" not in text
    if re.search(r"\bfp16|\bfloat16|\bfp32|\bfloat32", text):
        raise InexpressibleError(f"the precision {row['precision']}")
    return found


def _mesh(row: Row) -> dict[str, Any]:
    sizes = {
        name: int(size) for name, size in re.findall(r"([A-Z]+) (\d+)", str(row["mesh"] or ""))
    }
    found: dict[str, Any] = {}
    names = {
        "TP": "tensor_parallel",
        "CP": "context_parallel",
        "PP": "pipeline_parallel",
        "EP": "expert_parallel",
    }
    for short, name in names.items():
        if sizes.get(short, 1) > 1:
            found[name] = sizes[short]
    sharding = str(row["sharding"])
    if "SHARD_GRAD_OP" in sharding:
        found["reshard_after_forward"] = False
    if re.search(r"DDP|NO_SHARD", sharding):
        found |= {"replicas": row["gpus"], "reshard_after_forward": False, "is_sharded": False}
    if row["gpus"] == 1:
        found["is_sharded"] = False
    if "HSDP" in sharding or "HSDP" in sizes:
        found["replicas"] = max(row["gpus"] // 8, 1)
    if "offload" in sharding.lower():
        found["offload"] = True
    if "AsyncTP" in str(row["as_printed"].get("Techniques", "")):
        found["async_tensor_parallel"] = True
    return found


def _details(row: Row, model: Transformer) -> dict[str, Any]:
    """Settings in the columns of one source.

    NeMo AutoModel prints model TFLOP/s: of LoRA they are four operations an element, not six.
    TorchTune's recipes for one device update in backward with an 8-bit optimizer.
    """
    printed = row["as_printed"]
    technique = str(printed.get("Technique", ""))
    if row["source"] == "nemo-automodel-ac":
        loss = "linear" if "LC-CE" in technique else "whole"
        return {"loss": loss, "attention": "flash2", "compiled": False}
    method = str(printed.get("Finetuning Method", "")).lower()
    if method:
        lora = {"adapter_rank": ADAPTER_RANK, "is_quantized": "qlora" in method}
        if "lora" in method:
            return lora
        one = {"optimizer": "in_backward" if row["gpus"] > 1 else "adamw_8bit"}
        return {**one, "offload": row["gpus"] > 1}
    tflops = printed.get("Model TFLOPs/sec/GPU")
    if not tflops or not row["tokens_per_s_per_gpu"]:
        return {}
    of_token = float(str(tflops).replace(",", "")) * 1e12 / row["tokens_per_s_per_gpu"]
    elements = model.num_layers * model.block_matrix_numel + model.vocab_size * model.dim
    return {"adapter_rank": ADAPTER_RANK} if of_token < 5 * elements else {}


def _checkpointing(row: Row) -> dict[str, Any] | None:
    """The checkpointing of a row; None: it is not stated."""
    text = row["checkpointing"]
    if text is None:
        is_tune = "Finetuning Method" in row["as_printed"]
        return {"checkpointing": "full"} if is_tune else None
    text = str(text).lower()
    if "baseline" in text:
        raise InexpressibleError("sequences are padded, and their real length is not stated")
    if text.startswith("cumulative"):
        return _cumulative(text)
    fraction = re.search(r"1 ?/ ?(\d+)|every (\d+)", text)
    if fraction:
        return {"checkpointing": "full", "checkpoint_every": int(fraction[1] or fraction[2])}
    if "layer" in text and "selective" in text:
        return {"checkpointing": "full", "checkpoint_every": 2}
    for begin, mode in (("none", "none"), ("full", "full"), ("selective", "alternate"),
                        ("yes", "full"), ("no", "none")):  # fmt: skip
        if text.startswith(begin):
            return {"checkpointing": mode}
    raise InexpressibleError(f"the checkpointing {row['checkpointing']}")


def _cumulative(text: str) -> dict[str, Any]:
    """TorchTune's list of flags, in which each row has those of the rows before it."""
    adapters = "lora" in text
    reached = next((at for at, word in enumerate(_TUNE_STEPS) if word in text), -1)
    reached = len(_TUNE_STEPS) if adapters else reached
    if adapters:
        return {"compiled": True, "checkpointing": "full"}
    return {
        "compiled": reached >= 1,
        "loss": "chunked" if reached >= 2 else "whole",
        "checkpointing": "full" if reached >= 3 else "none",
        "optimizer": "adamw_8bit" if reached >= 6 else "in_backward" if reached >= 4 else "adamw",
    }


def _smallest(job: Job, machine: PlannedMachine, settings: Mapping[str, Any]) -> str:
    """No checkpointing if that can fit, else full: the row does not state it."""
    memory = predict_memory(job, machine, Candidate(**settings))
    return "full" if memory.allocated.value > machine.memory_bytes else "none"
