"""Make a small Llama and its data without a download."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
LENGTH = 32


def llama(*, tie: bool = False) -> LlamaForCausalLM:
    """A Llama with three layers, equal in every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=tie,
        )
    )


def saved_llama(folder: Path) -> str:
    """Save the Llama for `from_pretrained`, on rank 0; every rank waits for it."""
    if dist.get_rank() == 0:
        llama().save_pretrained(folder / "llama")
    dist.barrier()
    return str(folder / "llama")


def token_rows(count: int) -> list[list[int]]:
    """Random token rows, equal in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator).tolist()


def examples(count: int) -> list[dict[str, list[int]]]:
    """Rows in the form of the Trainer: inputs and labels."""
    return [{"input_ids": row, "labels": row} for row in token_rows(count)]
