"""Build the training for which torchtitan published 82.4 GiB, as far as it affects memory.

Its benchmark of December 2024 (benchmarks/llama3_h100_202412_torchtitan.md): Llama 3.1 8B, 8 GPUs,
local batch 2, sequences of 8192, selective checkpointing by operator, FSDP2 alone. Facts are from
its source of that month; the model is the trainer's, whose matrices have the same shapes.
"""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_inspect import ForecastTarget
from instrumented_trainer.model import PRESETS, Decoder

SEQUENCE = 8192
KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def build(
    *, every_mm: bool = False, batch_size: int = 2, num_layers: int | None = None
) -> ForecastTarget:
    """One step like torchtitan's; with `every_mm`, no matrix product is recomputed."""
    whole = PRESETS["llama-8b"]
    shape = replace(whole, num_layers=num_layers or whole.num_layers)
    with torch.device("meta"):
        model = Decoder(shape)
    for name, block in model.layers.named_children():
        contexts = partial(selective_contexts, every_mm=every_mm)
        wrapped = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)
        model.layers.register_module(name, wrapped)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.layers):
        # The last block stays unsharded, and the root owns the embedding, norm and output.
        is_last = number == shape.num_layers - 1
        fully_shard(block, mp_policy=policy, reshard_after_forward=not is_last)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch_size, SEQUENCE, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return ForecastTarget(model=model, step=step, optimizer=optimizer)


def selective_contexts(*, every_mm: bool) -> Any:
    """Keep attention and every second matrix product, counted per forward and recompute."""
    counts: dict[bool, int] = defaultdict(int)

    def decide(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operator in KEPT
        if operator == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            is_kept = every_mm or counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
