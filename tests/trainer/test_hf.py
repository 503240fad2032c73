import json

import pytest
import torch

from fsdp_inspect.errors import ConfigError
from instrumented_trainer import hf
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.models import make_recipe
from instrumented_trainer.parts import find_parts

pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}


def test_a_model_type_with_changes_gives_a_model():
    recipe = make_recipe(check_settings({"hf": "llama", "hf_config": LLAMA}))
    assert recipe.vocab_size == 32
    model = recipe.build_for_sharding()
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 32)


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "architecture"),
    [
        ("t5", T5, "T5ForConditionalGeneration"),
        ("bert", {**BERT, "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ("roberta", BERT, "RobertaForCausalLM"),
    ],
)
def test_language_models_of_every_kind_give_logits(model_type, changes, architecture):
    recipe = make_recipe(check_settings({"hf": model_type, "hf_config": changes}))
    model = recipe.build_for_sharding()
    assert type(model).__name__ == architecture
    logits = hf.compute_logits(model, torch.zeros(1, 3, dtype=torch.long))
    assert logits.shape == (1, 3, 32)


VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
}
WHISPER = {
    "d_model": 16,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
    "vocab_size": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
}


@pytest.mark.parametrize(
    ("model_type", "changes", "input_shape", "logits_shape"),
    [
        ("vit", VIT, (2, 3, 32, 32), (2, 2)),
        ("hubert", {**BERT, "num_feat_extract_layers": 7}, (2, 16_000), (2, 2)),
        ("whisper", WHISPER, (2, 80, 3000), (2, 5, 32)),
    ],
)
def test_models_of_images_and_sound_get_values_made_of_tokens(
    model_type, changes, input_shape, logits_shape
):
    recipe = make_recipe(check_settings({"hf": model_type, "hf_config": changes}))
    model = recipe.build_for_sharding()
    tokens = torch.randint(0, recipe.vocab_size, (2, 5))
    values = hf.make_input(model.config, tokens)
    assert values.shape == input_shape
    assert -1 <= values.min() < values.max() <= 1
    assert not torch.equal(values[0], values[1])
    assert hf.compute_logits(model, tokens).shape == logits_shape


def test_the_output_projection_of_a_bert_is_tied_inside_its_head():
    settings = {"hf": "bert", "hf_config": {**BERT, "architectures": ["BertForMaskedLM"]}}
    parts = find_parts(make_recipe(check_settings(settings)).skeleton())
    assert parts.head == ("bert.embeddings.LayerNorm", "cls.predictions")
    assert parts.is_tied


def test_a_config_file_or_its_folder_gives_the_same_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **LLAMA}))
    for name in (str(path), str(tmp_path)):
        config = hf.make_config(name, {"vocab_size": 64})
        assert (config.hidden_size, config.vocab_size) == (16, 64)


def test_initial_weights_depend_on_the_seed():
    def weight(seed: int) -> torch.Tensor:
        settings = check_settings({"hf": "llama", "hf_config": LLAMA, "seed": seed})
        return make_recipe(settings).build_for_sharding().lm_head.weight

    assert torch.equal(weight(0), weight(0))
    assert not torch.equal(weight(0), weight(1))


def test_the_parts_of_a_llama_are_found_though_its_norms_are_registered_last():
    recipe = make_recipe(check_settings({"hf": "llama", "hf_config": LLAMA}))
    parts = find_parts(recipe.skeleton())
    assert parts.embeddings == ("model.embed_tokens",)
    assert parts.blocks == ("model.layers.0", "model.layers.1")
    assert parts.head == ("model.norm", "lm_head")
    assert parts.halves["model.layers.0"] == (
        ("model.layers.0.input_layernorm", "model.layers.0.self_attn"),
        ("model.layers.0.post_attention_layernorm", "model.layers.0.mlp"),
    )


def test_the_parts_of_a_gpt2_are_found_with_its_tied_weights():
    changes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    recipe = make_recipe(check_settings({"hf": "gpt2", "hf_config": changes}))
    parts = find_parts(recipe.skeleton())
    assert parts.embeddings == ("transformer.wte", "transformer.wpe")
    assert parts.head == ("transformer.ln_f", "lm_head")
    assert parts.is_tied


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"hf": "lama"}, r"an unknown model type, file or hub name. Nearest: 'llama'"),
        ({"hf": "sam"}, r"cannot feed the Hugging Face type 'sam'. .*write a builder"),
        (
            {"hf": "llama", "hf_config": {"hidden_size": "wide"}},
            r"config of 'llama' has invalid values: .*'hidden_size' expected int, got str",
        ),
        (
            {"hf": "llama", "hf_config": {"hidden_size": 10, "num_attention_heads": 3}},
            r"'llama'.*hidden size",
        ),
        ({"hf": "llama", "dim": 32}, r"dim is set for a Hugging Face model"),
        ({"hf_config": {"vocab_size": 3}}, r"hf_config is .* but hf is not set"),
    ],
)
def test_settings_that_give_no_model_are_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_recipe(check_settings(settings)).skeleton()


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}'])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read|has no model_type"):
        hf.make_config(str(path), {})
