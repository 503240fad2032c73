"""Train with many settings in one process group; torchrun starts it, tests read its output.

    torchrun ... trainer_driver.py FOLDER [LEFT_OUT...]

It leaves out the cases that are named. Rank 0 writes one entry for each other case to
FOLDER/results.json; the tests assert on them.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_inspect.recording.torch_api.modules import strip_wrappers
from fsdp_inspect.recording.torch_api.observe import observe_plan
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.models import materialize
from instrumented_trainer.optimization import make_optimizer
from instrumented_trainer.parallelize import build_parallel_model
from instrumented_trainer.progress import make_reporter
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import (
    NoRecorder,
    PreparedRun,
    TrainingLoop,
    TrainingResult,
    compute_loss,
    prepare,
    train,
)

SMALL = {
    "dim": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "vocab_size": 256,
    "seq_len": 16,
    "batch_size": 2,
    "lr": 3e-3,
    "steps": 3,
    "data": argparse.__file__,
    "record": False,
}
NOT_OURS = {"dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size"}
HF = {name: value for name, value in SMALL.items() if name not in NOT_OURS}
HF_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
HF_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}

ON_2_RANKS: dict[str, dict[str, Any]] = {
    "default": SMALL,
    "every": SMALL | {"wrap": "every:2"},
    "size_packs": SMALL | {"wrap": "size:100KiB"},
    "size_splits": SMALL | {"wrap": "size:20KiB"},
    "root": SMALL | {"wrap": "root"},
    "explicit": SMALL | {"wrap": "layers.*; norm, lm_head"},
    "reshard_true": SMALL | {"reshard_after_forward": "true"},
    "reshard_false": SMALL | {"reshard_after_forward": "false"},
    "reshard_by_unit": SMALL | {"reshard_after_forward": "true; layers.2=false"},
    "prefetch_1": SMALL | {"forward_prefetch": 1, "backward_prefetch": 1},
    "prefetch_2": SMALL | {"forward_prefetch": 2, "backward_prefetch": 2},
    "async_unshard": SMALL | {"unshard_async_op": True, "forward_prefetch": 1},
    "reduce_scatter_buffers": SMALL | {"reduce_scatter_buffers": 2},
    "separate_group": SMALL | {"separate_reduce_scatter_group": True},
    "offload": SMALL | {"offload": "cpu"},
    "checkpointing_full": SMALL | {"checkpointing": "full"},
    "checkpointing_selective": SMALL | {"checkpointing": "selective"},
    "accumulation_every": SMALL | {"microbatches": 2},
    "accumulation_last": SMALL | {"microbatches": 2, "accumulation_sync": "last"},
    "accumulation_kept": SMALL | {"microbatches": 2, "reshard_after_backward": False},
    "bfloat16": SMALL | {"param_dtype": "bfloat16"},
    "bfloat16_reduce": SMALL | {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "compile": SMALL | {"compile": True, "num_layers": 1},
    "tied": SMALL | {"preset": "llama-1b"},
    "hf_llama": HF | {"hf": "llama", "hf_config": HF_LLAMA},
    "hf_tied_gpt2": HF | {"hf": "gpt2", "hf_config": HF_GPT2},
    "plain_optimizer": SMALL | {"fused": False, "clip_norm": 0, "schedule": "linear"},
}
ON_4_RANKS: dict[str, dict[str, Any]] = {
    "hsdp": SMALL | {"mesh": "2x2"},
    "hsdp_last": SMALL | {"mesh": "2x2", "microbatches": 2, "accumulation_sync": "last"},
    "hsdp_all_reduce_last": SMALL
    | {"mesh": "2x2", "microbatches": 2, "accumulation_sync": "all_reduce_last"},
    "hsdp_bfloat16": SMALL | {"mesh": "2x2", "param_dtype": "bfloat16"},
    "replicas_only": SMALL | {"mesh": "4x1"},
    "half_mesh": SMALL | {"reshard_after_forward": "2"},
    "half_mesh_by_unit": SMALL | {"reshard_after_forward": "auto; layers.*=2"},
}
SLOW = (
    *("compile", "size_packs", "reshard_true", "prefetch_1", "reduce_scatter_buffers", "tied"),
    *("separate_group", "checkpointing_selective", "hf_tied_gpt2", "hsdp_last", "hsdp_bfloat16"),
    *("every", "size_splits", "reshard_by_unit", "half_mesh_by_unit", "root", "prefetch_2"),
    *("accumulation_kept", "bfloat16_reduce", "plain_optimizer", "replicas_only"),
    *("hsdp_all_reduce_last", "resume_offload_bfloat16", "resume_dropout", "evaluation", "tiny"),
    *("resume_hsdp", "other_mesh"),
)
"""Cases that only `make test-all` runs: each has a case of its kind, and `compile` calls a C++
compiler."""
TINY = {"preset": "tiny", "steps": 25, "record": False}

Results = dict[str, Any]
RUNTIME = read_runtime()


def prepared_run(settings: dict[str, Any]) -> PreparedRun:
    return prepare(check_settings(settings), RUNTIME)


def run(settings: dict[str, Any]) -> TrainingResult:
    return train(prepared_run(settings))


def try_settings(settings: dict[str, Any]) -> Results:
    """The effect of settings on the model, its gradients against one process, and its losses."""
    prepared = prepared_run(settings)
    model = build_parallel_model(prepared.recipe, prepared.parallelism, RUNTIME)
    observed = observe_plan(model)
    gradients = sharded_gradients(prepared, model)
    return {
        "observed": observed.to_dict(),
        "asked": prepared.parallelism.plan.to_dict(),
        "gradient_error": greatest_error(gradients, gradients_of_one_process(prepared)),
        "losses": list(train(prepared).losses.values()),
    }


def sharded_gradients(prepared: PreparedRun, model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = make_optimizer(model, prepared.config)
    reporter = make_reporter(1, 0, is_first=False)
    TrainingLoop(prepared, model, optimizer, NoRecorder(), reporter).accumulate(0)
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        gradients[strip_wrappers(name)] = parameter.grad.full_tensor()
    return gradients


def gradients_of_one_process(prepared: PreparedRun) -> dict[str, torch.Tensor]:
    """The gradients of the whole global batch on an unsharded model, in float32."""
    model = prepared.recipe.build_for_sharding()
    materialize(model, torch.device("cpu"), offload=False, seed=prepared.config.seed)
    microbatches = prepared.parallelism.plan.accumulation.microbatches
    for rank in range(RUNTIME.world_size):
        loader = replace(prepared.loader, rank=rank)
        for microbatch in range(microbatches):
            loss = compute_loss(model, loader.train_batch(0, microbatch))
            (loss / microbatches / RUNTIME.world_size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def greatest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest deviation over all parameters, relative to the largest element."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in expected
    )


def try_resume(folder: Path, settings: dict[str, Any]) -> Results:
    """The losses of a run in one piece, and of the same run resumed in its middle."""
    settings = settings | {"steps": 6, "checkpoint_dir": str(folder), "checkpoint_every": 3}
    whole = run(settings)
    dist.barrier()
    if RUNTIME.is_first:
        shutil.rmtree(folder / "step-000006")
    dist.barrier()
    resumed = run(settings | {"resume": "latest"})
    return {
        "whole": whole.losses,
        "resumed": resumed.losses,
        "folders": sorted(path.name for path in folder.iterdir()),
    }


def try_evaluation(folder: Path) -> Results:
    plain = run(SMALL | {"steps": 4})
    evaluated = run(SMALL | {"steps": 4, "eval_every": 2, "eval_batches": 2})
    return {
        "losses": plain.losses,
        "losses_with_evaluation": evaluated.losses,
        "evaluation": evaluated.evaluation_losses,
    }


def try_recording(folder: Path) -> Results:
    settings = SMALL | {"microbatches": 2, "wrap": "every:2", "name": "recorded", "tag": "a,b"}
    plain = run(settings)
    recorded = run(settings | {"record": True, "runs_dir": str(folder), "memory_steps": "none"})
    return {
        "plain": plain.losses,
        "recorded": recorded.losses,
        "run_folder": str(recorded.run_folder),
    }


def try_plan_file(folder: Path) -> Results:
    """A plan that is observed on one run and passed to another run as a file."""
    settings = SMALL | {"wrap": "every:2", "forward_prefetch": 1, "checkpointing": "full"}
    prepared = prepared_run(settings)
    model = build_parallel_model(prepared.recipe, prepared.parallelism, RUNTIME)
    path = folder / "plan.toml"
    if RUNTIME.is_first:
        observe_plan(model).dump(path)
    dist.barrier()
    planned = prepared_run(SMALL | {"plan": str(path)})
    model = build_parallel_model(planned.recipe, planned.parallelism, RUNTIME)
    return {
        "observed": observe_plan(model).to_dict(),
        "asked": prepared.parallelism.plan.to_dict(),
        "losses": run(settings).losses,
        "losses_by_plan": run(SMALL | {"plan": str(path)}).losses,
    }


def try_other_ranks(folder: Path) -> Results:
    """One global batch in two divisions, and a checkpoint of one mesh resumed on another."""
    saving = SMALL | {"steps": 4, "checkpoint_dir": str(folder), "checkpoint_every": 2}
    flat = run(saving)
    resumed = run(SMALL | {"steps": 4, "mesh": "2x2", "resume": str(folder / "step-000002")})
    return {"flat": flat.losses, "resumed_as_hsdp": resumed.losses}


def special_cases(folder: Path) -> dict[str, Callable[[], Results]]:
    if RUNTIME.world_size == 4:
        return {
            "resume_hsdp": lambda: try_resume(folder / "resume_hsdp", SMALL | {"mesh": "2x2"}),
            "other_mesh": lambda: try_other_ranks(folder / "other"),
        }
    return {
        "resume": lambda: try_resume(folder / "resume", SMALL),
        "resume_offload_bfloat16": lambda: try_resume(
            folder / "resume_more",
            SMALL | {"offload": "cpu", "param_dtype": "bfloat16", "checkpointing": "full"},
        ),
        "resume_dropout": lambda: try_resume_with_dropout(folder / "resume_dropout"),
        "evaluation": lambda: try_evaluation(folder),
        "recorded": lambda: try_recording(folder / "runs"),
        "plan_file": lambda: try_plan_file(folder),
        "tiny": lambda: {"losses": list(run(TINY).losses.values())},
    }


def try_resume_with_dropout(folder: Path) -> Results:
    dropping = HF | {"hf": "gpt2", "hf_config": HF_GPT2 | {"resid_pdrop": 0.2}}
    return try_resume(folder, dropping)


def main() -> None:
    folder = Path(sys.argv[1])
    settings = ON_4_RANKS if RUNTIME.world_size == 4 else ON_2_RANKS
    cases: dict[str, Callable[[], Results]] = {
        name: lambda chosen=chosen: try_settings(chosen) for name, chosen in settings.items()
    }
    cases |= special_cases(folder)
    cases = {name: case for name, case in cases.items() if name not in sys.argv[2:]}
    results = {}
    with process_group(RUNTIME):
        for name, case in cases.items():
            print(f"case {name}", flush=True)
            results[name] = case()
            dist.barrier()
    if RUNTIME.is_first:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
