"""Compute the parameters, operations and activations of a Llama-style decoder in closed form.

Letters: D model width, K key/value width, Q query width (usually D), C channels of a head, F
feed-forward width, H query heads, V vocabulary, L blocks, T tokens of a sequence. Bytes are for a
token unless said otherwise.

The formulas count the tensors that autograd saves in the trainer's `Decoder` on CUDA: flash
attention saves its inputs, its output and a float32 log-sum-exp; RMSNorm saves its input and a
float32 number; a matrix product saves its input. In float32 with fewer key heads than query heads,
torch 2.13 has no fused kernel: it repeats keys and values, and saves all scores.
`tests/simulation/planning` compares the formulas with `fsdp-inspect plan memory`, which counts the
real tensors. The same count for GPT-style blocks: Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Literal

from fsdp_inspect.error_text import quote_all, shorten, suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.reading import InvalidTextError, parse_json, read_regular

Checkpoint = Literal["none", "selective", "alternate", "full"]
"""`selective` keeps all matrix products and attention; `alternate` keeps attention and every second
product of a block, as torchtitan's list of operators does."""
_FLOAT32 = 4
_UNFUSED_NORM_PASSES, _UNFUSED_ROTARY_PASSES = 4, 3
"""Bytes that an unfused norm or rotation moves, as a multiple of its bfloat16 input and output: it
converts to float32, and each operation reads and writes that."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a rank's tokens."""

    inner: float
    """Channels of the input."""
    outer: float
    """Channels of the output."""
    share: float = 1.0
    """Rows of the input for each token: more than 1 if several experts work on it."""
    copies: float = 1.0
    """Matrices of this size on the rank: its experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """The names of the modules that are units."""

    embedding: str = "tok_embeddings"
    blocks: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"


HF_NAMES = ModuleNames(
    embedding="model.embed_tokens", blocks="model.layers", norm="model.norm", head="lm_head"
)
"""The names in Transformers' Llama and its relatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The sizes of a model. Default: a decoder with RMSNorm, rotary positions and SwiGLU."""

    name: str
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int
    tie_embeddings: bool = False
    gated: bool = True
    """Whether the feed-forward has a gate (SwiGLU), thus three matrices; else two, as with GELU."""
    biased: bool = False
    """Whether all matrices and norms have a bias."""
    vectors: tuple[int, ...] = ()
    """Elements of a block's other vectors: biases of some matrices, norms of queries and keys."""
    is_causal: bool = True
    """Whether a token attends to those before it only; else to all, as in an encoder."""
    max_positions: int = 0
    """Rows of learned positions; 0: rotary positions, without parameters."""
    patch_numel: int = 0
    """Elements of an image's patch, which becomes one token. All tokens of an image have one label,
    and `vocab_size` counts the labels. 0: tokens are words."""
    experts: int = 0
    """Feed-forwards of a block, of which each token uses `active_experts`; 0: one."""
    active_experts: int = 1
    """Experts of a token, with those that every token uses."""
    shared_experts: int = 0
    """Experts that every token uses."""
    norm_bytes: int = 0
    """Bytes for a channel that a norm saves beyond its input: 0 for a fused kernel, 4 for
    Transformers' own code (a float32 and a normalized copy, but not its input)."""
    copies_attention: bool = True
    """Whether the output projection needs a copy of the attention's output by tokens."""
    module_names: ModuleNames = ModuleNames()

    @property
    def query_dim(self) -> int:
        """Q."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """K."""
        return self.num_kv_heads * self.head_dim

    def block_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of a block's parameters: norms, query, key, value, output, w1, w2, w3.

        `vectors` come before the feed-forward.
        """
        dim, query, key, ffn = self.dim, self.query_dim, self.kv_dim, self.ffn_dim
        attention = [(dim,), (query, dim), (key, dim), (key, dim), (dim, query)]
        one = [(ffn, dim), (dim, ffn)] + ([(ffn, dim)] if self.gated else [])
        feed = one * (self.experts + self.shared_experts or 1)
        router = [(self.experts, dim)] if self.experts else []
        vectors = [(numel,) for numel in self.vectors]
        shapes: list[tuple[int, ...]] = [*attention, *vectors, (dim,), *router, *feed]
        if not self.biased:
            return shapes
        return shapes + [(first,) for first, *_ in shapes]

    def embedding_shapes(self) -> list[tuple[int, ...]]:
        """The shape of the embedding, and of learned positions."""
        positions = [(self.max_positions, self.dim)] if self.max_positions else []
        if self.patch_numel:
            return [(self.dim, self.patch_numel), (self.dim,), (1, self.dim), *positions]
        return [(self.vocab_size, self.dim), *positions]

    @property
    def logits(self) -> float:
        """Logits of a token: those of an image belong to all of its tokens."""
        return self.vocab_size / self.max_positions if self.patch_numel else self.vocab_size

    def head_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the last norm and, unless it is the embedding, the output projection."""
        norm: list[tuple[int, ...]] = [(self.dim,)] * (2 if self.biased else 1)
        return norm if self.tie_embeddings else [*norm, (self.vocab_size, self.dim)]

    @property
    def ffn_matrices(self) -> int:
        """Matrices of one feed-forward."""
        return 3 if self.gated else 2

    @property
    def ffn_numel(self) -> int:
        """Elements of one feed-forward's matrices."""
        return self.ffn_matrices * self.dim * self.ffn_dim

    @property
    def block_matrix_numel(self) -> int:
        """Elements of a block's matrices that a token uses."""
        attention = 2 * self.query_dim * self.dim + 2 * self.kv_dim * self.dim
        return attention + self.active_experts * self.ffn_numel + self.experts * self.dim

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied matrix once."""
        shapes = self.block_shapes()
        ends = self.embedding_shapes() + self.head_shapes()
        return sum(self.num_layers * prod(shape) for shape in shapes) + sum(map(prod, ends))

    # --- operations

    def block_flops(self, tokens: float, seq_len: int) -> float:
        """Operations of a block's forward that run: causal attention computes one half of scores.

        Source: 2 operations for each element of a matrix and token; attention's two products are
        2 x 2 x T x Q for each token, halved by the causal mask.
        """
        scores = seq_len if self.is_causal else 2.0 * seq_len
        return tokens * (2.0 * self.block_matrix_numel + 2.0 * scores * self.query_dim)

    def head_flops(self, tokens: float) -> float:
        """Operations of the output projection's forward."""
        return 2.0 * tokens * self.logits * self.dim

    def products(self, ways: int) -> list[Product]:
        """The matrix products of a block's forward, in their order.

        Args:
            ways: Tensor-parallel ranks, which split the query heads and the feed-forward.
        """
        dim, query, key, ffn = self.dim, self.query_dim / ways, self.kv_dim / ways, self.ffn_dim
        experts = float(self.experts + self.shared_experts or 1)
        active = float(self.active_experts)
        wide, narrow = (
            Product(inner, outer, active, experts)
            for inner, outer in ((dim, ffn / ways), (ffn / ways, dim))
        )
        feed = [wide, wide, narrow] if self.gated else [wide, narrow]
        return [Product(dim, query), Product(dim, key), Product(dim, key), Product(query, dim),
                *feed]  # fmt: skip

    def traffic_elements(self, *, is_fused: bool) -> float:
        """Elements that the elementwise operations of a block's forward read and write, by token.

        Each norm reads and writes D; each residual reads 2 D and writes D. Rotary positions read
        and write q and k. An activation reads and writes F, and a gate reads 2 F and writes F.
        torch has one kernel for layer norm. Others, and rotary positions, are several operations in
        float32 unless they are compiled.

        Args:
            is_fused: The block is compiled.
        """
        has_kernel = is_fused or self.biased
        norms = 4 * self.dim * (1 if has_kernel else _UNFUSED_NORM_PASSES)
        passes = 1 if is_fused else _UNFUSED_ROTARY_PASSES
        rotary = 0 if self.max_positions else 2 * passes * (self.query_dim + self.kv_dim)
        activation = (5 if self.gated else 2) * self.ffn_dim * self.active_experts
        return 6.0 * self.dim + norms + rotary + activation

    def model_flops_per_token(self, seq_len: int) -> float:
        """Operations of a token in MFU: three forwards, without recomputation.

        6 N + 6 L Q T, where N leaves out the embedding and causal attention counts as it runs. The
        same count as in `analysis.throughput`.
        """
        return 3.0 * (self.num_layers * self.block_flops(1, seq_len) + self.head_flops(1))

    # --- activations of a block, bytes for a token

    def score_bytes(self, width: int, seq_len: int) -> float:
        """The scores of attention for a token; 0 if a fused kernel computes them piece by piece.

        Args:
            width: Bytes of an element in compute.
            seq_len: T.
        """
        is_fused = width < _FLOAT32 or self.num_kv_heads == self.num_heads
        return 0.0 if is_fused else _FLOAT32 * self.num_heads * seq_len

    def kept_bytes(self, checkpoint: Checkpoint, width: int, seq_len: int) -> float:
        """Activations that a block's forward keeps for a token, its output included.

        Args:
            checkpoint: The activation checkpointing.
            width: Bytes of an element in compute.
            seq_len: T.
        """
        if checkpoint == "full":
            return width * self.dim
        inner = self.ffn_dim * self.active_experts
        if checkpoint == "selective":  # q, k, v, attention, o, w1, w3, w2, output
            branches = 2 if self.gated else 1
            kept = 3 * self.dim + 2 * self.query_dim + 2 * self.kv_dim + branches * inner
            return width * kept + _FLOAT32 * self.num_heads
        if checkpoint == "alternate":  # q, v, attention, w1, w2, output
            kept = 2 * self.dim + 2 * self.query_dim + self.kv_dim + inner
            return width * kept + _FLOAT32 * self.num_heads
        return self._saved_bytes(width, seq_len)

    def _saved_bytes(self, width: int, seq_len: int) -> float:
        """Both norms' results, the middle, the output; rotated q and k, v, attention and its copy.

        Attention writes its output by heads, so the output projection needs a copy by tokens. The
        feed-forward saves w1's result, silu, w3's result and the product. Without a fused kernel,
        attention saves scaled q, repeated and scaled k, repeated v, and the scores.
        """
        norms = 2 * (_FLOAT32 + self.norm_bytes * self.dim)
        inner = (4 if self.gated else 2) * self.ffn_dim * self.active_experts
        outer = width * (4 * self.dim + inner) + norms
        scores = self.score_bytes(width, seq_len)
        if scores:
            return outer + width * 4 * self.query_dim + scores
        queries = 3 if self.copies_attention else 2
        inner = width * (queries * self.query_dim + 2 * self.kv_dim)
        return outer + inner + _FLOAT32 * self.num_heads

    def forward_rise_bytes(self, width: int, seq_len: int) -> float:
        """The peak of a block's forward above its start for a token, without checkpointing.

        At the end of the feed-forward, the branch and the sum exist beside all saved tensors.
        """
        end = self._saved_bytes(width, seq_len) + width * self.dim
        return max(end, self.attention_rise_bytes(width, seq_len))

    def attention_rise_bytes(self, width: int, seq_len: int) -> float:
        """The peak of unfused attention above the start of its block's forward, for a token.

        The scores and their softmax exist beside the norm's result, q, k and v, and their scaled or
        repeated copies. 0 for a fused kernel.
        """
        scores = self.score_bytes(width, seq_len)
        inputs = width * (self.dim + 4 * self.query_dim + 2 * self.kv_dim)
        return inputs + 2 * scores if scores else 0.0

    def recomputed_rise_bytes(self, width: int) -> float:
        """The same if nothing is saved: the feed-forward's three tensors and the residual."""
        return width * (3 * self.ffn_dim + 3 * self.dim)

    def repeated_bytes(self, checkpoint: Checkpoint, width: int, seq_len: int) -> float:
        """Activations that backward computes again before a block's own backward, for a token."""
        if checkpoint == "full":
            return self._saved_bytes(width, seq_len) - width * self.dim
        if checkpoint == "alternate":
            return self._saved_bytes(width, seq_len) - self.kept_bytes(checkpoint, width, seq_len)
        if checkpoint == "selective":
            # The norms' results, the middle, rotated q and k, the copy of attention, silu and the
            # product. q, k and the result of o are free after their use. Unfused attention repeats
            # its scores.
            again = 2 * self.dim + self.query_dim + (2 if self.gated else 1) * self.ffn_dim
            norms = 2 * (_FLOAT32 + self.norm_bytes * self.dim)
            return width * again + norms + self.score_bytes(width, seq_len)
        return 0.0

    def backward_rise_bytes(
        self, width: int, *, num_tokens: float, ways: int, gradients: float, kept: float
    ) -> float:
        """The peak of a block's backward above its start, repeated activations apart.

        It is the largest of three moments: the gradients of the product and of its two factors
        exist, and the weight gradient of w2; the last weight gradient of the feed-forward exists;
        all weight gradients exist, and all activations are free.

        Args:
            width: Bytes of an element in compute.
            num_tokens: Tokens, as a fraction of which sequence parallelism holds its part.
            ways: Tensor-parallel ranks.
            gradients: Bytes of all weight gradients of the block.
            kept: Bytes of the activations that its backward frees.
        """
        matrix = width * self.dim * self.ffn_dim / ways
        product = num_tokens * width * (self.dim + 2 * self.ffn_dim) + matrix
        weights = num_tokens * width * (3 * self.dim - 3 * self.ffn_dim) + 3 * matrix
        return max(product, weights, gradients - kept)

    def attention_backward_rise_bytes(
        self, width: int, seq_len: int, *, num_tokens: float, ways: int
    ) -> float:
        """The peak of unfused attention's backward above the start of its block's backward.

        The gradients of the softmax and of the scores exist beside the saved scores, and so do the
        gradient of the attention's result and the weight gradients of the feed-forward, whose
        activations are free. 0 for a fused kernel. For the arguments see `backward_rise_bytes`.
        """
        scores = self.score_bytes(width, seq_len)
        if not scores:
            return 0.0
        free = width * (4 * self.ffn_dim + 2 * self.dim)
        weights = width * (3 * self.dim * self.ffn_dim + self.dim * self.query_dim) / ways
        return num_tokens * (2 * scores + width * 2 * self.query_dim - free) + weights

    # --- logits and loss, bytes for a token

    def loss_bytes(self, loss: str, width: int) -> tuple[float, float]:
        """What the loss keeps for its backward, and the peak of both above their start.

        `whole`: the float32 log-softmax is kept. At the peak it exists with two float32 gradients;
        the logits, their float32 copy and the log-softmax need less. `compiled`: the logits, and
        beside them their gradient. `chunked`: the logits, and
        this peak for an eighth of the tokens. `fused`: the logits, which become their gradient.
        `linear`: the gradient of the output projection's input.

        Args:
            loss: A `candidates.Loss`.
            width: Bytes of an element in compute.
        """
        logits, wide = width * self.logits, _FLOAT32 * self.logits
        if loss == "compiled":
            return logits, 2 * logits
        if loss == "chunked":
            return logits, logits + 3 * wide / _CHUNKS
        if loss == "fused":
            return logits, logits
        if loss == "linear":
            return width * self.dim, width * self.dim + 3 * wide / _LINEAR_CHUNKS
        return wide, 3 * wide


_CHUNKS, _LINEAR_CHUNKS = 8, 64
"""Chunks of the logits: TorchTune's default, and an assumption for a fused projection."""


# --- Read the sizes of a model: a preset of the trainer, or the config of a Hugging Face model.

_PRESETS = "instrumented_trainer.shapes"
_MAX_CONFIG_BYTES = 1 << 20
_UNFUSED_NORM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How the models of a type in Transformers differ from Llama."""

    names: ModuleNames = HF_NAMES
    fields: Mapping[str, str] = field(default_factory=dict)
    """Other names of the config's sizes; several are separated by spaces, the first one counts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of missing keys that differ from Llama's."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Transformer`."""
    vectors: Mapping[str, str] = field(default_factory=dict)
    """The sizes of a block's biases and norms of queries and keys, as letters of this module, by
    the key of the config that asks for them. All models have those of the key ""."""
    splits_width: bool = False
    """Whether Transformers refuses heads that do not divide the hidden size. The others round the
    width of a head down."""


_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_EXPERTS = {"active_experts": "num_experts_per_tok"}
_LAYER_NORM = {"gated": False, "biased": True}
_TIED = {"tie_word_embeddings": True}
_IMAGE = {**_LAYER_NORM, "is_causal": False, "has_positions": True, "is_image": True}


def _names(blocks: str, embedding: str, norm: str, head: str) -> ModuleNames:
    return ModuleNames(embedding=embedding, blocks=blocks, norm=norm, head=head)


_BIASES = {"attention_bias": "QKKD"}
_ALL_BIASES = {**_BIASES, "mlp_bias": "FFD"}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(vectors=_ALL_BIASES, splits_width=True),
    "granite": _Family(vectors=_ALL_BIASES),
    "phi3": _Family(),
    "olmo2": _Family(vectors={**_BIASES, "": "QK"}),
    "mistral": _Family(defaults={"num_key_value_heads": 8}),
    "qwen2": _Family(defaults={"num_key_value_heads": 32}, vectors={"": "QKK"}),
    "qwen3": _Family(
        defaults={"num_key_value_heads": 32, "head_dim": 128}, vectors={**_BIASES, "": "CC"}
    ),
    "gemma": _Family(
        defaults={**_TIED, "num_key_value_heads": 16, "head_dim": 256}, vectors=_BIASES
    ),
    "mixtral": _Family(
        fields={**_EXPERTS, "experts": "num_local_experts"}, defaults={"num_key_value_heads": 8}
    ),
    "qwen3_moe": _Family(
        fields={
            **_EXPERTS,
            "experts": "num_experts num_local_experts",
            "intermediate_size": "moe_intermediate_size",
        },
        defaults={"num_key_value_heads": 4},
        vectors={**_BIASES, "": "CC"},
    ),
    "gpt2": _Family(
        names=_names("transformer.h", "transformer.wte", "transformer.ln_f", "lm_head"),
        fields=_GPT2,
        defaults=_TIED,
        traits={**_LAYER_NORM, "has_positions": True},
        splits_width=True,
    ),
    "gpt_neox": _Family(
        names=_names(
            "gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"
        ),
        traits=_LAYER_NORM,
        splits_width=True,
    ),
    "vit": _Family(
        names=_names("vit.layers", "vit.embeddings", "vit.layernorm", "classifier"), traits=_IMAGE
    ),
    "dinov2": _Family(
        names=_names("dinov2.encoder.layer", "dinov2.embeddings", "dinov2.layernorm", "classifier"),
        traits=_IMAGE,
    ),
    **{
        kind: _Family(
            names=_names(f"{kind}.encoder.layer", f"{kind}.embeddings", f"{kind}.norm", "head"),
            defaults=_TIED,
            traits={**_LAYER_NORM, "has_positions": True, "is_causal": False},
            splits_width=True,
        )
        for kind in ("bert", "roberta")
    },
}
"""By `model_type`. BERT and RoBERTa are those for masked language modelling, ViT and DINOv2 those
for the classification of images."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "vocab_size")  # fmt: skip


def load_model(name: str) -> tuple[Transformer, int | None]:
    """The model that a name stands for, and the longest sequence that its config allows.

    Args:
        name: A preset, or a config.json or its folder.

    Raises:
        ConfigError: There is no such model, or its architecture is unsupported.
    """
    presets = list_presets()
    if name in presets:
        return _of_preset(name, presets[name]), None
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _of_config(path)
    raise ConfigError(
        f"Unknown model {shorten(name)!r}. {suggest(name, list(presets), what='presets')} Expected "
        f"a preset ({', '.join(presets)}), or a config.json of a Hugging Face model or its folder, "
        "or a builder as MODULE:FUNCTION. Correct --model."
    )


def list_presets() -> Mapping[str, Any]:
    """The trainer's presets by name; none without the trainer. Their sizes need no torch."""
    try:
        presets: Mapping[str, Any] = import_module(_PRESETS).PRESETS
    except ModuleNotFoundError:
        return {}
    return presets


def _of_preset(name: str, shape: Any) -> Transformer:
    return Transformer(
        name=name,
        dim=shape.dim,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_dim=shape.ffn_dim,
        vocab_size=shape.vocab_size,
        head_dim=shape.dim // shape.num_heads,
        tie_embeddings=shape.tie_embeddings,
    )


def _of_config(path: Path) -> tuple[Transformer, int | None]:
    fields = _read(path)
    kind = str(fields.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        raise ConfigError(
            f"Unsupported architecture {shorten(repr(fields.get('model_type')))} in "
            f"{str(path)!r}. Expected a model_type of {quote_all(tuple(_FAMILIES))}. Plan other "
            "models with a builder: --model MODULE:FUNCTION."
        )
    if "experts" in family.fields:
        _refuse_dense_blocks(path, fields)
    fields = {
        **family.defaults,
        **fields,
        **{
            name: next((fields[each] for each in others.split() if fields.get(each)), None)
            for name, others in family.fields.items()
        },
    }
    if kind == "gpt2" and fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * _size(path, fields, "hidden_size")
    if "is_image" in family.traits:
        fields |= _sizes_of_images(path, fields)
    sizes = {name: _size(path, fields, name) for name in _SIZES}
    longest = fields.get("max_position_embeddings")
    traits = dict(family.traits)
    if traits.pop("is_image", False):
        traits |= {name: fields[name] for name in ("patch_numel", "gated")}
    if traits.pop("has_positions", False):
        traits["max_positions"] = _size(path, fields, "max_position_embeddings")
    traits |= {
        name: _size(path, fields, name)
        for name in ("experts", "active_experts")
        if name in family.fields
    }
    model = Transformer(
        name=path.parent.name or kind,
        dim=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        ffn_dim=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        norm_bytes=0 if "biased" in traits else _UNFUSED_NORM,
        copies_attention=False,
        module_names=family.names,
        tie_embeddings=bool(fields.get("tie_word_embeddings")),
        **_head_sizes(path, fields, sizes, splits_width=family.splits_width),
        **traits,
    )
    model = replace(model, vectors=_vectors_of(model, family, fields))
    return model, longest if isinstance(longest, int) else None


def _vectors_of(model: Transformer, family: _Family, fields: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = {
        "Q": model.query_dim,
        "K": model.kv_dim,
        "C": model.head_dim,
        "D": model.dim,
        "F": model.ffn_dim,
    }
    asked = [letters for key, letters in family.vectors.items() if not key or fields.get(key)]
    return tuple(sizes[letter] for letter in "".join(asked))


def _head_sizes(
    path: Path, fields: Mapping[str, Any], sizes: Mapping[str, int], *, splits_width: bool
) -> dict[str, Any]:
    """The numbers of heads and their width, which the model's code must be able to use."""
    dim, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if splits_width and fields.get("head_dim") is None and dim % heads:
        raise ConfigError(
            f"Invalid num_attention_heads in {str(path)!r}: {heads} heads do not divide the hidden "
            f"size of {dim}. Expected a divisor of it. Correct the config."
        )
    given = {
        "num_key_value_heads": heads,
        "head_dim": dim // heads,
        **{name: value for name, value in fields.items() if value is not None},
    }
    kv_heads = _size(path, given, "num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(
            f"Invalid num_key_value_heads in {str(path)!r}: {kv_heads} key heads do not divide "
            f"{heads} attention heads. Expected a divisor of {heads}. Set num_key_value_heads in "
            "the config."
        )
    head_dim = _size(path, given, "head_dim")
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _refuse_dense_blocks(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuse a model with experts in some blocks only, as Qwen3 MoE's config may ask for."""
    for name, of_all in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if fields.get(name, of_all) not in (of_all, None):
            raise ConfigError(
                f"Unsupported {name} in {str(path)!r}: {shorten(repr(fields[name]))}. Expected "
                f"{of_all}: all blocks have experts. Plan this model with a builder: --model "
                "MODULE:FUNCTION."
            )


def _sizes_of_images(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of an image encoder under the names of a text model."""
    side = _size(path, fields, "patch_size")
    across = _size(path, fields, "image_size") // side
    gated = bool(fields.get("use_swiglu_ffn", False))
    inner = fields.get("intermediate_size")
    if inner is None:
        inner = _size(path, fields, "mlp_ratio") * _size(path, fields, "hidden_size")
        # Source: Dinov2SwiGLUFFN in Transformers.
        inner = (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner
    return {
        "intermediate_size": inner,
        "max_position_embeddings": across * across + 1,  # and a token for the class
        "vocab_size": len(fields.get("id2label") or ()) or fields.get("num_labels", 2),
        "patch_numel": side * side * fields.get("num_channels", 3),
        "gated": gated,
    }


def _read(path: Path) -> Mapping[str, Any]:
    try:
        fields = parse_json(read_regular(path, _MAX_CONFIG_BYTES))
    except (OSError, InvalidTextError) as error:
        raise ConfigError(
            f"The model's config {str(path)!r} cannot be read: {error}. Expected the config.json "
            "of a Hugging Face model. Correct --model."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"The model's config {str(path)!r} is not a JSON object. Expected the config.json of a "
            "Hugging Face model. Correct --model."
        )
    return fields


def _size(path: Path, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"Invalid {name} in {str(path)!r}: {shorten(repr(value))}. Expected a whole number "
            "from 1. Correct the config."
        )
    return value
