"""Train one small model like those of public projects, under its own plan or another plan.

    python -m fsdp_inspect.emulate --world-size 8 --bandwidth 300MB/s loop_script.py LOOP
    torchrun --nproc-per-node 4 -m fsdp_inspect.record loop_script.py tensor_parallel --plan FILE

Models of Transformers come from their configurations, without a download.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from fsdp_inspect import Plan, apply_plan
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups

VOCABULARY, LENGTH, BATCH = 512, 64, 4

Inputs = dict[str, torch.Tensor]
Step = Callable[[nn.Module, Inputs], None]


class Loop(NamedTuple):
    """A model, the names of its blocks, its inputs and its step."""

    build: Callable[[], nn.Module]
    blocks: Sequence[str]
    inputs: Callable[[], Inputs]
    step: Step


class Block(nn.Module):
    """A residual block with two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    """An embedding, residual blocks and a head."""

    def __init__(self, *, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, *, has_head: bool = True) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden) if has_head else hidden


def transformer(name: str, **values: Any) -> Callable[[], nn.Module]:
    """Build a model of Transformers from the named model and configuration classes."""

    def build() -> nn.Module:
        import transformers

        model_class, config_class = (getattr(transformers, each) for each in name.split())
        return model_class(config_class(**values))

    return build


def token_inputs() -> Inputs:
    """Tokens for a decoder of this file."""
    return {"input_ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH))}


def labelled_inputs() -> Inputs:
    """Tokens and labels, in the form of language models of Transformers."""
    tokens = token_inputs()["input_ids"]
    return {"input_ids": tokens, "labels": tokens}


def image_inputs() -> Inputs:
    """Images and their classes."""
    return {"pixel_values": torch.rand(BATCH, 3, 32, 32), "labels": torch.randint(0, 2, (BATCH,))}


def loss_of_model(model: nn.Module, inputs: Inputs) -> None:
    """The loss that a model of Transformers returns."""
    model(**inputs).loss.backward()


def cross_entropy(model: nn.Module, inputs: Inputs) -> None:
    """A forward and its backward."""
    _loss_of(model(**inputs), inputs).backward()


def chunked_loss(model: nn.Module, inputs: Inputs) -> None:
    """torchtitan's loss: the head runs forward and backward alone, chunk by chunk."""
    hidden = model(**inputs, has_head=False)
    detached = hidden.detach().requires_grad_()
    for chunk in detached.chunk(4, dim=1):
        model.head(chunk).float().logsumexp(-1).mean().backward()
    hidden.backward(detached.grad)


def two_losses(model: nn.Module, inputs: Inputs) -> None:
    """Two backwards of one forward."""
    logits = model(**inputs)
    _loss_of(logits, inputs).backward(retain_graph=True)
    logits.square().mean().backward()


def _loss_of(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten())


def _decoder(width: int = 256, num_blocks: int = 6) -> Callable[[], nn.Module]:
    return lambda: Decoder(width=width, num_blocks=num_blocks)


_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LAYERS = ("model.layers.*",)
LOOPS: dict[str, Loop] = {
    "llama": Loop(
        transformer("LlamaForCausalLM LlamaConfig", **_LLAMA),
        _LAYERS,
        labelled_inputs,
        loss_of_model,
    ),
    "gpt2_tied": Loop(
        transformer(
            "GPT2LMHeadModel GPT2Config", vocab_size=VOCABULARY, n_embd=192, n_layer=6, n_head=4
        ),
        ("transformer.h.*",),
        labelled_inputs,
        loss_of_model,
    ),
    "mixtral_moe": Loop(
        transformer(
            "MixtralForCausalLM MixtralConfig",
            **_LLAMA | {"num_hidden_layers": 4},
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        _LAYERS,
        labelled_inputs,
        loss_of_model,
    ),
    "t5_encoder_decoder": Loop(
        transformer(
            "T5ForConditionalGeneration T5Config",
            vocab_size=VOCABULARY,
            d_model=192,
            d_kv=48,
            d_ff=512,
            num_layers=4,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        ("encoder.block.*", "decoder.block.*"),
        labelled_inputs,
        loss_of_model,
    ),
    "vit": Loop(
        transformer(
            "ViTForImageClassification ViTConfig",
            image_size=32,
            patch_size=4,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
        ),
        ("vit.layers.*",),
        image_inputs,
        loss_of_model,
    ),
    "wide": Loop(_decoder(640, 10), ("layers.*",), token_inputs, cross_entropy),
    "small_blocks": Loop(_decoder(64, 16), ("layers.*",), token_inputs, cross_entropy),
    "chunked_loss": Loop(_decoder(), ("layers.*", "head"), token_inputs, chunked_loss),
    "two_losses": Loop(_decoder(), ("layers.*",), token_inputs, two_losses),
    "tensor_parallel": Loop(_decoder(), ("layers.*",), token_inputs, cross_entropy),
}


def shard(loop: str, model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each block a unit, and the rest of the model the root unit."""
    patterns = [pattern.removesuffix("*") for pattern in LOOPS[loop].blocks]
    for name, module in model.named_modules():
        prefix, _, last = name.rpartition(".")
        if (f"{prefix}." in patterns and last.isdecimal()) or name in patterns:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--plan")
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loop, model = LOOPS[given.loop], LOOPS[given.loop].build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if given.loop == "tensor_parallel":
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, whole["tp"], split)
        mesh = whole["dp"]
    if given.plan:
        apply_plan(model, Plan.load(given.plan), mesh)
    else:
        shard(given.loop, model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = loop.inputs()
    for _ in range(given.steps):
        loop.step(model, inputs)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    del model, optimizer
    release_process_groups()


if __name__ == "__main__":
    main()
