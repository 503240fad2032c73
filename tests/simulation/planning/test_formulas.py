"""The closed formulas of memory equal forecasts, which count real tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.simulation.planning.candidates import Candidate
from fsdp_inspect.simulation.planning.forecast_step import row_of
from fsdp_inspect.simulation.planning.transformer import load_model
from fsdp_inspect.simulation.planning.workload import build_workload, plan_of
from fsdp_inspect.simulation.policies import policies_of
from fsdp_inspect.store.reader import open_run
from instrumented_trainer.forecasting import build
from tests.simulation.planning.jobs import make_job, peak_of_formula

LARGEST_DIFFERENCE = 0.02
"""The accepted difference in these cases. Other cases differ by more: see `FORMULA_RATIOS`."""


def forecast_peak(path: Path, **settings: Any) -> int:
    forecast_memory(build, path, world_size=8, settings=settings)
    return row_of(open_run(path), None).peak_bytes


CASES = [pytest.param("small", 4, 256, {}, {}, id="small")]
MORE = [
    pytest.param(
        "llama-1b", 4, 1024, {"checkpointing": "full", "microbatches": 2},
        {"checkpointing": "full", "microbatches": 2}, id="tied-weights",
    ),
    pytest.param(
        "llama-8b", 4, 1024, {"offload": "cpu", "checkpointing": "full"},
        {"offload": True, "checkpointing": "full"}, id="offload",
    ),
    pytest.param("llama-8b", 4, 8192, {}, {}, id="activations"),
    pytest.param(
        "llama-70b", 3, 2048, {"checkpointing": "selective"}, {"checkpointing": "selective"},
        id="selective",
    ),
    pytest.param("llama-1b", 4, 1024, {"batch_size": 2}, {"batch_size": 2}, id="tied-none"),
    pytest.param("llama-8b", 3, 2048, {"param_dtype": "float32"}, {"param_dtype": "float32"},
                 id="float32"),
    pytest.param("llama-8b", 4, 1024, {"mesh": "2x4"}, {"replicas": 2}, id="hsdp"),
    pytest.param("llama-8b", 4, 1024, {"wrap": "every:2"}, {"blocks_per_unit": 2}, id="every-2"),
    pytest.param("llama-8b", 4, 1024, {"forward_prefetch": 2, "backward_prefetch": 2},
                 {"prefetch": 2}, id="prefetch"),
    pytest.param("llama-70b", 3, 2048, {"reshard_after_forward": "false"},
                 {"reshard_after_forward": False}, id="no-reshard"),
    pytest.param("llama-70b", 3, 4096, {"checkpointing": "full", "batch_size": 2},
                 {"checkpointing": "full", "batch_size": 2}, id="full"),
]  # fmt: skip


def check(path: Path, case: tuple[str, int, int, dict[str, Any], dict[str, Any]]) -> None:
    preset, layers, seq_len, settings, candidate = case
    given = {"preset": preset, "num_layers": layers, "seq_len": seq_len, "batch_size": 1}
    counted = forecast_peak(path, **{**given, **settings})
    job = make_job(preset, num_layers=layers, seq_len=seq_len)
    formula = peak_of_formula(job, Candidate(**candidate))
    assert formula == pytest.approx(counted, rel=LARGEST_DIFFERENCE)


@pytest.mark.parametrize(("preset", "layers", "seq_len", "settings", "candidate"), CASES)
def test_the_formula_of_the_peak_equals_the_forecast(
    tmp_path, preset, layers, seq_len, settings, candidate
):
    check(tmp_path / "run", (preset, layers, seq_len, settings, candidate))


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "layers", "seq_len", "settings", "candidate"), MORE)
def test_the_formula_equals_the_forecast_under_every_setting(
    tmp_path, preset, layers, seq_len, settings, candidate
):
    check(tmp_path / "run", (preset, layers, seq_len, settings, candidate))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_formula_of_a_hugging_face_model_equals_the_forecast(tmp_path, checkpointing):
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816,
        "vocab_size": 8192, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = forecast_peak(
        tmp_path / "run",
        hf=str(tmp_path),
        seq_len=1024,
        batch_size=4,
        checkpointing=checkpointing,
    )
    job = make_job(str(tmp_path))
    formula = peak_of_formula(job, Candidate(batch_size=4, checkpointing=checkpointing))
    assert formula == pytest.approx(counted, rel=LARGEST_DIFFERENCE)


GEMMA_2B = {
    "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
    "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
    "vocab_size": 256000,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
# Each: embedding (and head) + layers x (query and output, key and value, feed-forwards, router,
# norms) + the last norm.
_GEMMA = 18 * (2 * 2048 * 2048 + 2 * 256 * 2048 + 3 * 2048 * 16384 + 2 * 2048) + 2048
_MIXTRAL = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096)


@pytest.mark.parametrize(
    ("config", "counted"),
    [
        pytest.param(GEMMA_2B, 256000 * 2048 + _GEMMA, id="Gemma ties"),
        pytest.param(
            {**GEMMA_2B, "tie_word_embeddings": False}, 2 * 256000 * 2048 + _GEMMA, id="untied"
        ),
        pytest.param(MIXTRAL, 2 * 32000 * 4096 + _MIXTRAL + 4096, id="Mixtral has 8 KV heads"),
    ],
)
def test_a_missing_key_has_the_default_of_its_type(tmp_path, config, counted):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path))[0].num_parameters == counted


@pytest.mark.parametrize("biases", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "olmo2", "gemma", "mixtral",
             "qwen3_moe"]
)  # fmt: skip
def test_the_parameters_are_those_of_transformers_also_of_missing_keys(tmp_path, kind, biases):
    import torch
    import transformers

    sizes = {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 64,
             "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
    experts = {"moe_intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = {"model_type": kind, **sizes, **experts, **biases}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config, pad_token_id=None, eos_token_id=1)
        )
    counted = sum(each.numel() for each in theirs.parameters())

    assert load_model(str(tmp_path))[0].num_parameters == counted


@pytest.mark.parametrize(
    "key",
    [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 1]}],
    ids=lambda key: next(iter(key)),
)
def test_a_model_with_experts_in_some_blocks_is_refused(tmp_path, key):
    config = {**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 768}
    for each in ({"decoder_sparse_step": 1, "mlp_only_layers": []}, key):
        (tmp_path / "config.json").write_text(json.dumps({**config, **each}))
        if each is not key:
            load_model(str(tmp_path))
            continue
        with pytest.raises(ConfigError, match=f"Unsupported {next(iter(key))} in"):
            load_model(str(tmp_path))


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
    "num_hidden_layers": 4, "num_attention_heads": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"num_attention_heads": 33}, "33 heads do not divide the hidden size of 4096"),
        ({"num_attention_heads": 33, "head_dim": 128}, None),
        ({"model_type": "mistral", "num_attention_heads": 33, "num_key_value_heads": 3}, None),
        ({"num_key_value_heads": 5}, "5 key heads do not divide 32 attention heads"),
        ({"num_key_value_heads": 64}, "64 key heads do not divide 32 attention heads"),
        ({"num_key_value_heads": 1}, None),
        ({"model_type": "mistral", "num_attention_heads": 4}, "8 key heads do not divide 4"),
    ],
)
def test_heads_that_the_model_cannot_use_are_refused(tmp_path, keys, problem):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **keys}))
    if problem is None:
        load_model(str(tmp_path))
        return
    with pytest.raises(ConfigError, match=problem):
        load_model(str(tmp_path))


@pytest.mark.parametrize("preset", ["llama-8b", "llama-1b"])
@pytest.mark.parametrize(
    "candidate",
    [Candidate(), Candidate(prefetch=2), Candidate(reshard_after_forward=False, prefetch=1)],
    ids=["default", "prefetch", "no-reshard"],
)
def test_the_simulated_policies_are_those_of_the_plan_file(preset, candidate):
    from fsdp_inspect.simulation.planning.machines import make_machine

    job = make_job(preset, num_layers=3)
    work = build_workload(job, candidate, make_machine("h200-ib400").speed)
    blocks = [f"layers.{number}" for number in range(3)]
    names = (
        [*blocks, ""] if job.model.tie_embeddings else ["tok_embeddings", *blocks, "norm, lm_head"]
    )

    def settings(policies):
        return [
            (each.reshard_after_forward, each.forward_prefetch, each.backward_prefetch)
            for each in policies
        ]

    assert settings(work.policies) == settings(policies_of(plan_of(job, candidate), names, 8))
