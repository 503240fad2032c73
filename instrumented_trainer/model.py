"""A Llama-style decoder: RMSNorm, rotary positions, grouped queries, SwiGLU.

Shapes: B sequences, T tokens, D model width, H query heads, K key/value heads, E head width
(D / H), F feed-forward width, V vocabulary.

Sources: Llama 3 (arXiv 2407.21783) for the architecture and the shapes of the `llama-*` presets;
RoPE (arXiv 2104.09864); SwiGLU (arXiv 2002.05202).
"""

import torch
from torch import nn
from torch.nn import functional as F

from instrumented_trainer.shapes import PRESETS, ModelShape

__all__ = ["PRESETS", "Decoder", "ModelShape"]


class Attention(nn.Module):
    """Causal attention in which several query heads share one key/value head."""

    inverse_frequencies: torch.Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        self.rope_theta = shape.rope_theta
        kv_dim = shape.num_kv_heads * self.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        self.register_buffer("inverse_frequencies", self._frequencies(None), persistent=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) and int64 positions (T,) to (B, T, D)."""
        batch, length, _ = hidden.shape
        queries, keys, values = (
            projection(hidden).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        cos, sin = self._rotations(positions)
        attended = F.scaled_dot_product_attention(
            _rotate(queries, cos, sin),
            _rotate(keys, cos, sin),
            values,
            is_causal=True,
            enable_gqa=True,
        )
        output: torch.Tensor = self.wo(attended.transpose(1, 2).reshape(batch, length, -1))
        return output

    def reset_buffers(self) -> None:
        """Compute the buffers again, after the module moved from the meta device."""
        device = self.inverse_frequencies.device
        self.inverse_frequencies.copy_(self._frequencies(device))

    def _frequencies(self, device: torch.device | None) -> torch.Tensor:
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        return self.rope_theta**-exponents

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Positions are integers, and angles are computed here in float32: FSDP's mixed precision
        # casts floating-point inputs, and bfloat16 cannot distinguish late neighbouring positions.
        angles = positions.float()[:, None] * self.inverse_frequencies
        return angles.cos(), angles.sin()


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        output: torch.Tensor = self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return output


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        hidden = hidden + self.attention(self.attention_norm(hidden), positions)
        output: torch.Tensor = hidden + self.ffn(self.ffn_norm(hidden))
        return output


class Decoder(nn.Module):
    """A decoder that maps token ids (B, T) to logits (B, T, V)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (B, T) int64 to (B, T, V)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, positions)
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits

    def tie_weights(self) -> None:
        """Make embedding and output projection one matrix again, if the shape ties them."""
        if self.shape.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def reset_buffers(self) -> None:
        """Compute every buffer again, after the model moved from the meta device."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.reset_buffers()

    def initial_std(self, name: str) -> float:
        """Initial standard deviation of a matrix, with GPT-2's rule for the residual branches.

        Source: Radford et al., 2019: 0.02, and 0.02 / sqrt(2 L) where a branch is added.
        """
        is_residual = name.endswith(("wo.weight", "w2.weight"))
        return float(0.02 / (2 * self.shape.num_layers) ** 0.5 if is_residual else 0.02)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (B, H, T, E) by (T, E/2) angles, in pairs of the two halves of E."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
