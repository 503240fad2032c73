"""Make fake CPU tensors save what CUDA's kernels save for backward.

A forecast runs on fake CPU tensors, and torch chooses some kernels by device. Where the choice
changes the saved tensors, a replacement chooses as torch 2.13 does on CUDA:

    attention     flash attention (output, log-sum-exp), the memory-efficient one where flash does
                  not apply, or the math one, which saves all scores; `torch.nn.attention.
                  sdpa_kernel` excludes kernels, as on CUDA: torch
                  aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    rms_norm      one kernel that saves its input, its weight and 1 / rms in float32; CPU uses six
                  operations, which save float32 copies
    dropout       one kernel that saves a mask of one byte an element

Only shapes and dtypes of the results are correct: these tensors have no contents. In a region of
`torch.compile`, rms_norm and dropout stay as they are: on all devices, the compiler splits them
into the same operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import functional as F

from fsdp_inspect.recording.torch_api.attributes import replace_everywhere
from fsdp_inspect.recording.torch_api.cuda_kernels import (
    is_flash_enabled,
    is_memory_efficient_enabled,
)

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256


def choose_cuda_kernels(undo: ExitStack) -> None:
    """Replace torch's functions until `undo` is closed."""
    replace_everywhere(
        undo,
        {
            F.scaled_dot_product_attention: _attend,
            F.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
            F.dropout: _drop,
            torch.dropout: _drop,
        },
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend: (B, H, T, D) queries, (B, K, S, D) keys and values to (B, H, T, D)."""
    scale, is_grouped = options.get("scale"), query.shape[1] != key.shape[1]
    result: Sequence[torch.Tensor]
    if _is_flash(query, value, attn_mask):
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        result = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif is_memory_efficient_enabled() and query.dim() == 4 and not is_grouped:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        wanted = any(tensor.requires_grad for tensor in (query, key, value))
        mask = _additive(attn_mask, query, key)
        result = efficient(query, key, value, mask, wanted, dropout_p, is_causal, scale=scale)
    else:
        attend = torch.ops.aten._scaled_dot_product_attention_math.default
        result = attend(query, key, value, attn_mask, dropout_p, is_causal, None, **options)
    return result[0]


def _is_flash(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return (
        mask is None
        and is_flash_enabled()
        and query.dim() == 4
        and query.dtype in _FLASH_DTYPES
        and query.shape[-1] == value.shape[-1] <= _MAX_FLASH_HEAD_DIM
    )


def _additive(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """The mask in the form that the kernel requires: numbers to add, (B, H, T, S)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    return mask.expand(*query.shape[:3], key.shape[2])


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        plain: torch.Tensor = torch.ops.aten.rms_norm.default(
            input, list(normalized_shape), weight, eps
        )
        return plain
    normed: torch.Tensor = _FusedRMSNorm.apply(  # type: ignore[no-untyped-call]
        input, weight, len(normalized_shape)
    )
    return normed


class _FusedRMSNorm(torch.autograd.Function):
    """Saves and allocates the same tensors as `aten::_fused_rms_norm` on CUDA."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dims: int) -> Any:
        kept = input.shape[: input.dim() - dims] + (1,) * dims
        ctx.save_for_backward(input, weight, input.new_empty(kept, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def _drop(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    dropped: torch.Tensor
    if torch.compiler.is_compiling():
        dropped = torch.ops.aten.dropout.default(input, p, True)
    else:
        dropped = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped
