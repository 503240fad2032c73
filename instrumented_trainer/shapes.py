"""Define the sizes of the decoder and its presets, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Whether the output projection is the embedding matrix."""


PRESETS = {
    "tiny": ModelShape(
        dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=352, vocab_size=256
    ),
    "small": ModelShape(
        dim=512, num_layers=12, num_heads=8, num_kv_heads=4, ffn_dim=1408, vocab_size=256
    ),
    "llama-1b": ModelShape(
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=8192,
        vocab_size=128_256,
        tie_embeddings=True,
    ),
    "llama-8b": ModelShape(
        dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336, vocab_size=128_256
    ),
    "llama-70b": ModelShape(
        dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28_672, vocab_size=128_256
    ),
}
"""`llama-1b`, `llama-8b` and `llama-70b` have the shapes of Llama 3.2 1B, 3.1 8B and 3.1 70B."""
