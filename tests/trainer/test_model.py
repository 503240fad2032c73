import pytest
import torch

from instrumented_trainer.model import PRESETS, Decoder, ModelShape
from instrumented_trainer.models import materialize

SMALL = ModelShape(
    dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=32, vocab_size=11, rope_theta=100.0
)


def decoder(seed: int = 0, shape: ModelShape = SMALL) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape)
    materialize(model, torch.device("cpu"), offload=False, seed=seed)
    return model


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, num_parameters):
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_modules_have_the_names_that_users_of_llama_expect():
    names = [name for name, _ in decoder().named_children()]
    assert names == ["tok_embeddings", "layers", "norm", "lm_head"]
    parts = [name for name, _ in decoder().layers[0].named_children()]
    assert parts == ["attention_norm", "attention", "ffn_norm", "ffn"]


def test_a_token_never_sees_those_behind_it():
    model = decoder()
    tokens = torch.arange(8)[None] % 11
    changed = tokens.clone()
    changed[0, 5:] = 0
    assert torch.allclose(model(tokens)[0, :5], model(changed)[0, :5])
    assert not torch.allclose(model(tokens)[0, 5:], model(changed)[0, 5:])


def test_attention_depends_on_distances_not_on_places():
    attention = decoder().layers[0].attention
    hidden = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0))
    here = attention(hidden, torch.arange(6))
    there = attention(hidden, torch.arange(6) + 40)
    stretched = attention(hidden, torch.arange(6) * 3)
    assert torch.allclose(here, there, atol=1e-5)
    assert not torch.allclose(here, stretched, atol=1e-5)


def test_late_positions_stay_apart_in_bfloat16():
    attention = decoder().layers[0].attention.to(torch.bfloat16)
    attention.reset_buffers()
    cos, _ = attention._rotations(torch.tensor([1000, 1001]))
    assert not torch.equal(cos[0], cos[1])


def test_grouped_queries_share_keys_and_values():
    attention = decoder().layers[0].attention
    assert attention.wq.weight.shape == (16, 16)
    assert attention.wk.weight.shape == attention.wv.weight.shape == (8, 16)


def test_initial_weights_depend_on_the_seed_and_the_name_alone():
    deep = ModelShape(dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=32, vocab_size=11)
    first, again, other = decoder(), decoder(shape=deep), decoder(seed=1)
    weight = first.layers[1].attention.wq.weight
    assert torch.equal(weight, again.layers[1].attention.wq.weight)
    assert not torch.equal(weight, other.layers[1].attention.wq.weight)
    assert not torch.equal(weight, first.layers[0].attention.wq.weight)


def test_initial_weights_have_the_spread_that_they_should():
    model = decoder(shape=PRESETS["tiny"]).requires_grad_(False)
    assert float(model.tok_embeddings.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(model.layers[0].ffn.w2.weight.std()) == pytest.approx(0.02 / 12**0.5, rel=0.02)
    assert torch.equal(model.norm.weight, torch.ones(128))


def test_tied_weights_stay_tied_when_they_get_memory():
    shape = ModelShape(
        dim=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=32,
        vocab_size=11,
        tie_embeddings=True,
    )
    model = decoder(shape=shape)
    assert model.lm_head.weight is model.tok_embeddings.weight
