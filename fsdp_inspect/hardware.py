"""State the figures of the GPUs of each link preset, each with its source.

Efficiency is the fraction of the peak rate that the operations of a training step reach while the
GPU computes, with recomputed operations counted. The ends of its interval are published runs:

- H100, 33%: torchtitan, Llama 3.1 8B on 8 H100 (500 W limit) without torch.compile: 5,762 tokens/s
  for each GPU, benchmarks/llama3_h100_202412_torchtitan.md.
- H100 and H200, 62%: KempnerForge, 7B on one H200 with full checkpointing: 10,471 tokens/s
  (kempnerinstitute.github.io/KempnerForge/reference/benchmarks.html).
- A100, 68%: IBM and Meta, Llama 2 7B on 128 A100: 3,700 tokens/s for each GPU, 57% MFU and 68% HFU
  ("Maximizing training throughput using PyTorch FSDP", pytorch.org/blog). Low end: as the H100.
- RTX 4090: no published run was found, so its interval is that of both.

The typical value is the geometric mean of the ends.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and the part of its node that belongs to it."""

    name: str
    memory_bytes: int
    bf16_flops: float
    """Peak rate of dense bfloat16 matrix products."""
    fp32_flops: float
    """Peak rate of float32 matrix products without TF32, torch's default."""
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """PCIe, one direction."""
    power_w: float
    """Highest power of the GPU."""
    system_power_w: float
    """Highest power of the system, for each GPU."""
    efficiency: tuple[float, float]
    """Lowest and highest published efficiency."""
    source: str
    device_names: tuple[str, ...]
    """The names that `torch.cuda.get_device_name` gives it."""

    @property
    def typical_efficiency(self) -> float:
        """The geometric mean of the published ends."""
        low, high = self.efficiency
        return float((low * high) ** 0.5)


_HOPPER = "NVIDIA H100 and H200 datasheets (SXM); DGX H100: 10.2 kW for eight GPUs"
GPUS = {
    "h100-nvlink": Gpu(
        name="H100 SXM",
        memory_bytes=80 << 30,
        bf16_flops=989.4e12,
        fp32_flops=66.9e12,
        memory_bytes_per_s=3.35e12,
        host_bytes_per_s=64e9,
        power_w=700.0,
        system_power_w=1275.0,
        efficiency=(0.33, 0.62),
        source=_HOPPER,
        device_names=("NVIDIA H100 80GB HBM3",),
    ),
    "h200-ib400": Gpu(
        name="H200 SXM",
        memory_bytes=141_000_000_000,
        bf16_flops=989.4e12,
        fp32_flops=66.9e12,
        memory_bytes_per_s=4.8e12,
        host_bytes_per_s=64e9,
        power_w=700.0,
        system_power_w=1275.0,
        efficiency=(0.33, 0.62),
        source=_HOPPER,
        device_names=("NVIDIA H200",),
    ),
    "a100-eth100": Gpu(
        name="A100 SXM 80 GB",
        memory_bytes=80 << 30,
        bf16_flops=312e12,
        fp32_flops=19.5e12,
        memory_bytes_per_s=2.04e12,
        host_bytes_per_s=32e9,
        power_w=400.0,
        system_power_w=812.5,
        efficiency=(0.33, 0.68),
        source="NVIDIA A100 datasheet (SXM); DGX A100: 6.5 kW for eight GPUs",
        device_names=("NVIDIA A100-SXM4-80GB",),
    ),
    "rtx4090-pcie": Gpu(
        name="RTX 4090",
        memory_bytes=24 << 30,
        bf16_flops=165.2e12,
        fp32_flops=82.6e12,
        memory_bytes_per_s=1.01e12,
        host_bytes_per_s=32e9,
        power_w=450.0,
        system_power_w=850.0,
        efficiency=(0.33, 0.68),
        source="NVIDIA Ada GPU architecture paper, appendix A; 850 W: NVIDIA's system requirement",
        device_names=("NVIDIA GeForce RTX 4090",),
    ),
}
"""The GPU of each link preset."""

HOST_OPTIMIZER_S_PER_BILLION = (0.22, 1.39)
"""AdamW of a billion parameters on the processors of a host: DeepSpeed's CPU-Adam and torch's Adam.
Source: ZeRO-Offload (arXiv 2101.06840), table 4. Hosts differ: it is an order of magnitude."""

TENSOR_PARALLEL_RATIO = 0.82
"""Efficiency with tensor parallelism, as a fraction of that without, messages apart. KempnerForge
publishes 34.7% MFU for 7B with four tensor-parallel ranks and 53.8% with four FSDP ranks; the
messages of this model explain a part of the difference, and this ratio the rest."""
NETWORK_RATIO = (0.85, 1.1)
"""Interval of a preset's bandwidth. Its figures are measured; other machines and sizes differ."""
LAUNCH_NS = 6_000
"""Host time for a kernel in torch's eager mode, autograd included: 5 to 10 µs in pytorch/pytorch's
discussions of launch overhead. The interval of the step uses half of it and twice it."""
FORWARD_KERNELS, BACKWARD_KERNELS = 35, 75
"""Kernels of a block, counted in the trainer's decoder."""
