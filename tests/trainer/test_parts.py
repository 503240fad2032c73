import pytest
import torch
from torch import nn

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.model import PRESETS, Decoder
from instrumented_trainer.parts import find_parts


def on_meta(preset: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(PRESETS[preset])


def test_the_parts_of_our_decoder_are_found_in_the_order_of_their_use():
    parts = find_parts(on_meta("tiny"))
    assert parts.embeddings == ("tok_embeddings",)
    assert parts.blocks == tuple(f"layers.{number}" for number in range(6))
    assert parts.head == ("norm", "lm_head")
    assert parts.containers == ("layers",)
    assert not parts.is_tied
    assert parts.halves["layers.0"] == (
        ("layers.0.attention_norm", "layers.0.attention"),
        ("layers.0.ffn_norm", "layers.0.ffn"),
    )


def test_the_sizes_of_parts_are_their_parameters():
    parts = find_parts(on_meta("llama-8b"))
    assert parts.numel[""] == 8_030_261_248
    assert parts.numel["layers.0"] == 218_112_000


def test_tied_weights_are_seen():
    assert find_parts(on_meta("llama-1b")).is_tied


def test_a_block_with_parameters_of_its_own_cannot_be_halved():
    model = on_meta("tiny")
    model.layers[0].scale = nn.Parameter(torch.ones(1))
    parts = find_parts(model)
    assert "layers.0" not in parts.halves
    assert "layers.1" in parts.halves


def test_a_model_without_a_list_of_blocks_is_refused():
    with pytest.raises(ConfigError, match="Linear has no list of blocks"):
        find_parts(nn.Linear(2, 2))
