"""The stand-ins keep as many bytes for backward as CUDA's kernels. Pinned for torch 2.13."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_inspect.emulation.forecast.fake_rank import fake_rank
from fsdp_inspect.errors import ForecastError

B, H, K, T, D = 2, 8, 2, 64, 32


def saved_bytes(compute: Callable[[], torch.Tensor]) -> int:
    """The bytes that autograd keeps for a computation; each storage counts once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute().sum().backward()
    return sum(storage.nbytes() for storage in kept.values())


def attention(
    dtype: torch.dtype, *, groups: int = H, masked: bool = False
) -> Callable[[], torch.Tensor]:
    query = torch.empty(B, H, T, D, dtype=dtype, requires_grad=True)
    key, value = (torch.empty(B, groups, T, D, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.ones(T, T, dtype=torch.bool) if masked else None
    return lambda: F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=groups != H
    )


def test_flash_attention_keeps_its_inputs_its_output_and_a_float_a_row() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        kept = saved_bytes(attention(torch.bfloat16, groups=K))

    bfloat16, float32, random_state = 2, 4, 2 * 8 + 8
    tensors = bfloat16 * B * T * D * (2 * H + 2 * K)
    assert kept == tensors + float32 * B * H * T + random_state


def test_key_heads_that_do_not_divide_the_query_heads_are_refused() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        attend = attention(torch.bfloat16, groups=3)
        with pytest.raises(ForecastError, match="3 key heads do not divide 8 query heads"):
            attend()


@pytest.mark.parametrize("masked", [False, True])
def test_float32_and_masks_use_the_memory_efficient_kernel(masked: bool) -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        kept = saved_bytes(attention(torch.float32, masked=masked))

    tensors = 4 * B * T * D * 4 * H
    mask = 4 * T * T if masked else 0
    assert kept == tensors + mask + 4 * B * H * T + 2 * 8


@pytest.mark.parametrize(
    ("dtype", "groups", "masked"),
    [(torch.bfloat16, H, False), (torch.bfloat16, K, True), (torch.float32, H, True)],
)
def test_the_math_kernel_keeps_what_it_keeps_on_any_device(
    dtype: torch.dtype, groups: int, masked: bool
) -> None:
    compute = attention(dtype, groups=groups, masked=masked)
    with sdpa_kernel(SDPBackend.MATH):
        expected = saved_bytes(compute)
        with fake_rank(2, gpus_per_node=2, device_type="cuda"):
            kept = saved_bytes(attention(dtype, groups=groups, masked=masked))

    assert kept == expected > dtype.itemsize * B * H * T * T


def test_an_excluded_flash_kernel_leaves_the_memory_efficient_one() -> None:
    with (
        fake_rank(2, gpus_per_node=2, device_type="cuda"),
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
    ):
        kept = saved_bytes(attention(torch.bfloat16))

    assert kept == 2 * B * T * D * 4 * H + 4 * B * H * T + 2 * 8


def test_rms_norm_keeps_its_input_its_weight_and_a_float_a_row() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        norm = nn.RMSNorm(D, dtype=torch.bfloat16)
        hidden = torch.empty(B, T, D, dtype=torch.bfloat16, requires_grad=True)
        kept = saved_bytes(lambda: norm(hidden))

    assert kept == 2 * B * T * D + 2 * D + 4 * B * T


def test_on_cpu_rms_norm_keeps_float32_copies() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cpu"):
        norm = nn.RMSNorm(D, dtype=torch.bfloat16)
        hidden = torch.empty(B, T, D, dtype=torch.bfloat16, requires_grad=True)
        kept = saved_bytes(lambda: norm(hidden))

    assert kept > 4 * B * T * D


def test_dropout_keeps_a_byte_an_element() -> None:
    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        hidden = torch.empty(B, T, D, dtype=torch.bfloat16, requires_grad=True)
        kept = saved_bytes(lambda: F.dropout(hidden, 0.1))

    assert kept == B * T * D


def test_torch_has_its_own_functions_back_afterwards() -> None:
    before = (F.scaled_dot_product_attention, F.rms_norm, F.dropout, torch.rms_norm)

    with fake_rank(2, gpus_per_node=2, device_type="cuda"):
        assert F.rms_norm is not before[1]

    assert (F.scaled_dot_product_attention, F.rms_norm, F.dropout, torch.rms_norm) == before
