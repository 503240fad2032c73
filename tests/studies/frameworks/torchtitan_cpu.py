"""Run torchtitan's own training command on CPU: import this before `torchtitan.trainer`.

torchtitan 0.3 requires an accelerator, or a newer torch, in these places. Only these are replaced:

- the device module, whose memory counters `torch.cpu` does not have;
- FlexAttention, which torch compiles for an accelerator: SDPA computes the same causal attention;
- the PREMUL_SUM reduction of `set_gradient_divide_factor`, which gloo does not have. The factor
  is 1 here, so SUM computes the same;
- `torch.distributed.set_timeout`, which torch 2.13 does not have.

The configuration switches CUDA graphs off. torchtitan imports triton at its start, so triton is
installed, but nothing calls it.
"""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn import functional


class _CpuModule(ModuleType):
    """`torch.cpu` with the functions that torchtitan calls on a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**34)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return defaultdict(int)

    def set_device(self, device: object) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def install() -> None:
    """Replace the four places; torchtitan's other modules must be imported afterwards."""
    tools.device_type = "cpu"
    tools.device_module = _CpuModule("cpu_with_counters")
    tools.get_local_device = lambda: torch.device("cpu")
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None
    _use_sdpa()
    _use_sum()


def _use_sdpa() -> None:
    from torchtitan.models.common import attention

    def forward(self: Any, q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    attention.FlexAttention.forward = forward


def _use_sum() -> None:
    original = _fsdp_collectives._get_gradient_divide_factors

    def factors(*args: Any, **kwargs: Any) -> Any:
        before, after, scatter, reduce = original(*args, **kwargs)
        return before, after, _sum(scatter), _sum(reduce)

    _fsdp_collectives._get_gradient_divide_factors = factors


def _sum(op: Any) -> Any:
    return dist.ReduceOp.SUM if op == dist.ReduceOp.PREMUL_SUM else op
