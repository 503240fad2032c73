"""Predict the compute time of a decoder's parts: operations, bytes and kernels of each.

[Note: time of a matrix product] It is its operations at the sustained rate of the device, plus its
bytes at the bandwidth of the memory. So narrow matrices are slower for each operation. Backward has
two products of the same size, or one if the weights are frozen.

[Note: time of attention] A fused kernel computes the half of the scores that the causal mask
leaves: two products in forward, five in backward. Its rate depends on the kernel, the device, the
width of a head and the length of the sequence (`hardware.ATTENTION`).

[Note: elementwise operations] Norms, residuals, rotary positions and activations are limited by
bandwidth. Each reads its inputs and writes its outputs, in backward twice as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_inspect.hardware import (
    ATTENTION,
    ATTENTION_BACKWARD_RATIO,
    ATTENTION_HALF_LENGTH,
    BANDWIDTH_RATIO,
    COMPILED_TRAFFIC,
    CONTEXT_PARALLEL_ATTENTION,
    EAGER_TRAFFIC,
    HALF_WIDTH,
    NARROW_HEAD_RATIO,
    NARROW_RATIOS,
    Gpu,
)
from fsdp_inspect.simulation.planning.candidates import Candidate, Loss
from fsdp_inspect.simulation.planning.transformer import Product, Transformer
from fsdp_inspect.trace.codes import ITEMSIZE

_FLOAT32 = 4
_ATTENTION_PRODUCTS = (2, 5)
"""Products of fused attention in forward and in backward, which computes the scores again."""
_WIDE_HEAD = 128
_CAST_BYTES = 5
"""Bytes moved to cast an element to float8: it is read for its maximum and again, and written."""
_QUANTIZED_BYTES = 0.55
"""Bytes of an element of a 4-bit matrix, its scales included."""


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Seconds of one part of the model for the tokens of a rank."""

    forward: float
    backward: float
    """Without repeated operations."""
    repeated: float = 0.0
    """Operations of the forward that checkpointing repeats in backward."""


class ComputeModel:
    """The compute times of a model on one rank."""

    def __init__(self, model: Transformer, candidate: Candidate, gpu: Gpu, seq_len: int) -> None:
        self._model, self._candidate, self._gpu = model, candidate, gpu
        self._seq_len = seq_len
        self._tokens = candidate.batch_size * seq_len / candidate.context_parallel
        self._width = ITEMSIZE[candidate.param_dtype]
        self._bandwidth = gpu.memory_bytes_per_s * BANDWIDTH_RATIO
        self._is_frozen = candidate.adapter_rank > 0

    def block(self, checkpoint: str) -> ComputeTimes:
        """A block with a kind of activation checkpointing."""
        products = self._model.products(self._candidate.tensor_parallel)
        times = [self._product_s(each) for each in products]
        casts = self._cast_s(products)
        attention, attention_backward = self._attention_s()
        traffic = self._traffic_s(products)
        forward = sum(times) + attention + traffic + casts
        repeated = {
            "none": 0.0,
            "selective": traffic,
            "alternate": sum(times[1::2]) + traffic + casts / 2,
            "full": forward,
        }[checkpoint]
        ways = 1 if self._is_frozen else 2
        backward = ways * sum(times) + attention_backward + 2 * traffic + casts
        return ComputeTimes(forward, backward, repeated)

    def head(self) -> ComputeTimes:
        """The output projection and the loss."""
        ways, model = self._candidate.tensor_parallel, self._model
        share = model.logits / model.vocab_size
        product = self._product_s(
            Product(model.dim, model.vocab_size / ways, share), is_block=False
        )
        logits = self._tokens * model.logits / ways / self._bandwidth
        forward, backward = _loss_bytes(self._candidate.loss, self._width)
        return ComputeTimes(
            product + forward * logits,
            (1 if self._is_frozen else 2) * product + backward * logits,
        )

    @property
    def _is_narrow(self) -> bool:
        """Whether matrix products run in float8 or narrower."""
        return self._candidate.products != "param_dtype" and self._gpu.fp8_flops > 0

    def _cast_s(self, products: Sequence[Product]) -> float:
        """Casts of the inputs of narrow products, once for those with the same input."""
        if not self._is_narrow:
            return 0.0
        inputs = {(each.inner, each.outer > each.inner): each for each in products}
        elements = sum(each.share * each.inner for each in inputs.values())
        return _CAST_BYTES * elements * self._tokens / self._bandwidth

    def _product_s(self, product: Product, *, is_block: bool = True) -> float:
        """See [Note: time of a matrix product]."""
        gpu = self._gpu
        rows = self._tokens * product.share
        inner, outer = product.inner, product.outer
        moved = rows * (inner + outer) + product.copies * inner * outer
        rate = gpu.products * (gpu.bf16_flops if self._width < _FLOAT32 else gpu.fp32_flops)
        if self._is_narrow and is_block:
            rate = gpu.products * NARROW_RATIOS[self._candidate.products] * gpu.fp8_flops
        rate *= inner / (inner + HALF_WIDTH)
        moved *= self._width
        if self._candidate.is_quantized:
            moved += (_QUANTIZED_BYTES + 2 * self._width) * inner * outer
        return 2 * rows * inner * outer / rate + moved / self._bandwidth

    def _attention_s(self) -> tuple[float, float]:
        """See [Note: time of attention]."""
        model, gpu, candidate = self._model, self._gpu, self._candidate
        kernels = ATTENTION[gpu.architecture]
        rate = kernels.get(candidate.attention, kernels["flash2"]) * gpu.bf16_flops
        rate *= self._seq_len / (self._seq_len + ATTENTION_HALF_LENGTH)
        if model.head_dim < _WIDE_HEAD:
            rate *= NARROW_HEAD_RATIO
        if candidate.context_parallel > 1:
            rate /= CONTEXT_PARALLEL_ATTENTION
        scores = self._seq_len if model.is_causal else 2 * self._seq_len
        one = self._tokens * scores * model.query_dim / candidate.tensor_parallel / rate
        forward, backward = _ATTENTION_PRODUCTS
        return forward * one, backward * one / ATTENTION_BACKWARD_RATIO

    def _traffic_s(self, products: Sequence[Product]) -> float:
        """See [Note: elementwise operations]. LoRA's products are limited by bandwidth, too."""
        is_compiled = self._candidate.compiled
        ratio = COMPILED_TRAFFIC if is_compiled else EAGER_TRAFFIC
        elements = self._model.traffic_elements(is_fused=is_compiled)
        elements *= ratio / self._candidate.tensor_parallel
        if self._candidate.adapter_rank:
            elements += sum(each.inner + 4 * each.outer for each in products)
        return elements * self._width * self._tokens / self._bandwidth


def _loss_bytes(loss: Loss, width: int) -> tuple[float, float]:
    """Bytes moved for a logit in the loss's forward and backward.

    torch's loss reads the logits and writes a float32 copy; the log-softmax reads and writes it;
    backward reads it, writes the float32 gradient, and reads that to write the gradient. A compiled
    loss reads the logits twice and writes their gradient; a fused kernel reads and writes once.
    """
    if loss == "linear":
        return 2.0 * width, 0.0
    if loss == "fused":
        return float(width), 2.0 * width
    if loss == "compiled":
        return 2.0 * width, 2.0 * width
    return width + 3.0 * _FLOAT32, 3.0 * _FLOAT32 + width
