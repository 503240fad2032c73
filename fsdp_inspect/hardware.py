"""State the figures of the GPUs of each link preset, each with its source.

Memory is what a process can use, as `torch.cuda.get_device_properties` or an out-of-memory error of
torch prints it. Peak rates, bandwidths and power are those of datasheets. `products` is the
fraction of the peak rate that large matrix products reach in a training. It is fitted to published
trainings of the device (docs/planning_accuracy.md). Where there are too few, it is that of its
architecture, and `is_confirmed` is False.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

_GIB = 1 << 30
ATTENTION: Mapping[str, Mapping[str, float]] = {
    "ampere": {"flash1": 0.38, "flash2": 0.58},
    "geforce": {"flash1": 0.40, "flash2": 0.80},
    "hopper": {"flash1": 0.205, "flash2": 0.34, "cudnn": 0.58},
    "blackwell": {"flash1": 0.10, "flash2": 0.17, "cudnn": 0.50},
    "cdna3": {"flash1": 0.20, "flash2": 0.30},
}
"""The fraction of the bfloat16 peak that the forward of causal attention reaches, by architecture
and kernel, for long sequences and heads of 128 channels. Sources: FlashAttention-2 (arXiv
2307.08691, figures 4 to 6) and FlashAttention-3 (arXiv 2407.08608, figures 5 and 6). `geforce`
(GeForce and RTX cards): their products are slow enough that attention comes close to them. CDNA 3
and Blackwell: estimates."""
ATTENTION_BACKWARD_RATIO = 0.83
"""The rate of attention's backward, as a fraction of its forward's. Source: the same figures."""
ATTENTION_HALF_LENGTH = 300
"""Tokens of a sequence at which attention reaches half of its rate: 180 TFLOP/s at 512 tokens and
299 at 16,384 on an H100 (FlashAttention-3, figure 5, causal, heads of 64)."""
NARROW_HEAD_RATIO = 0.9
"""The rate of attention with heads of 64 channels, as a fraction of that with 128 (the same)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and the part of its node that belongs to it."""

    name: str
    architecture: str
    """A key of `ATTENTION`."""
    memory_bytes: int
    """What a process can use, the CUDA context included."""
    bf16_flops: float
    """Peak rate of dense bfloat16 matrix products that accumulate in float32."""
    fp32_flops: float
    """Peak rate of float32 matrix products without TF32, torch's default."""
    fp8_flops: float = 0.0
    """Peak rate of dense float8 matrix products; 0: none."""
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """PCIe, one direction."""
    power_w: float
    """Highest power of the GPU."""
    system_power_w: float
    """Highest power of the system, for each GPU."""
    products: float
    """The fraction of `bf16_flops` that large matrix products reach."""
    is_confirmed: bool = False
    """Whether many published trainings on this GPU confirm the prediction."""
    is_tried: bool = False
    """Whether a few do."""
    source: str
    device_names: tuple[str, ...] = ()
    """The names that `torch.cuda.get_device_name` gives it."""


_H100 = Gpu(
    name="H100 SXM",
    architecture="hopper",
    memory_bytes=round(79.1 * _GIB),
    bf16_flops=989.4e12,
    fp32_flops=66.9e12,
    fp8_flops=1978.9e12,
    memory_bytes_per_s=3.35e12,
    host_bytes_per_s=64e9,
    power_w=700.0,
    system_power_w=1275.0,
    products=0.76,
    is_confirmed=True,
    source="NVIDIA H100 and H200 datasheets (SXM); DGX H100: 10.2 kW for eight GPUs",
    device_names=("NVIDIA H100 80GB HBM3",),
)
_H100_500W = replace(
    _H100,
    name="H100 SXM 96 GB (500 W)",
    memory_bytes=round(95.0 * _GIB),
    memory_bytes_per_s=2.4e12,
    power_w=500.0,
    products=0.58,
    source="torchtitan's benchmarks; six stacks of HBM2e, each as on the H100 PCIe of 2.0 TB/s",
    device_names=(),
)
_H200 = replace(
    _H100,
    name="H200 SXM",
    memory_bytes=round(139.8 * _GIB),
    memory_bytes_per_s=4.8e12,
    device_names=("NVIDIA H200",),
)
_A100 = Gpu(
    name="A100 SXM 80 GB",
    architecture="ampere",
    memory_bytes=round(79.1 * _GIB),
    bf16_flops=312e12,
    fp32_flops=19.5e12,
    memory_bytes_per_s=2.04e12,
    host_bytes_per_s=32e9,
    power_w=400.0,
    system_power_w=812.5,
    products=0.89,
    is_confirmed=True,
    source="NVIDIA A100 datasheet (SXM); DGX A100: 6.5 kW for eight GPUs",
    device_names=("NVIDIA A100-SXM4-80GB",),
)
_A100_40 = replace(
    _A100,
    name="A100 SXM 40 GB",
    memory_bytes=round(39.4 * _GIB),
    memory_bytes_per_s=1.555e12,
    device_names=("NVIDIA A100-SXM4-40GB",),
)
_B200 = Gpu(
    name="B200",
    architecture="blackwell",
    memory_bytes=round(178.3 * _GIB),
    bf16_flops=2250e12,
    fp32_flops=75e12,
    fp8_flops=4500e12,
    memory_bytes_per_s=7.7e12,
    host_bytes_per_s=64e9,
    power_w=1000.0,
    system_power_w=1787.5,
    products=0.33,
    is_tried=True,
    source="NVIDIA DGX B200 datasheet: 14.3 kW, 36 PFLOP/s of dense float8 for eight GPUs",
    device_names=("NVIDIA B200",),
)
_GB200 = replace(
    _B200,
    name="GB200",
    memory_bytes=round(184.0 * _GIB),
    products=0.75,
    bf16_flops=2500e12,
    fp32_flops=80e12,
    fp8_flops=5000e12,
    memory_bytes_per_s=8e12,
    host_bytes_per_s=225e9,
    power_w=1200.0,
    system_power_w=1667.0,
    source="NVIDIA GB200 NVL72 datasheet, for each of 72 GPUs; NVLink-C2C to the host; 120 kW",
    device_names=("NVIDIA GB200",),
)
_MI300X = Gpu(
    name="MI300X",
    architecture="cdna3",
    memory_bytes=round(191.7 * _GIB),
    bf16_flops=1307.4e12,
    fp32_flops=163.4e12,
    fp8_flops=2614.9e12,
    memory_bytes_per_s=5.3e12,
    host_bytes_per_s=64e9,
    power_w=750.0,
    system_power_w=1250.0,
    products=0.30,
    is_tried=True,
    source="AMD Instinct MI300X data sheet; system: eight GPUs in 10 kW",
    device_names=("AMD Instinct MI300X",),
)
_MI355X = replace(
    _MI300X,
    name="MI355X",
    memory_bytes=round(287.6 * _GIB),
    bf16_flops=2516.6e12,
    fp32_flops=157.3e12,
    fp8_flops=5033.2e12,
    memory_bytes_per_s=8e12,
    power_w=1400.0,
    system_power_w=2000.0,
    is_tried=False,
    source="AMD Instinct MI355X data sheet",
    device_names=("AMD Instinct MI355X",),
)
_A6000 = Gpu(
    name="RTX A6000",
    architecture="geforce",
    memory_bytes=round(47.4 * _GIB),
    bf16_flops=154.8e12,
    fp32_flops=38.7e12,
    memory_bytes_per_s=768e9,
    host_bytes_per_s=32e9,
    power_w=300.0,
    system_power_w=600.0,
    products=0.70,
    source="NVIDIA RTX A6000 datasheet; half of the rate with sparsity",
    device_names=("NVIDIA RTX A6000",),
)
_A5000 = replace(
    _A6000,
    name="RTX A5000",
    memory_bytes=round(23.7 * _GIB),
    bf16_flops=111.1e12,
    fp32_flops=27.8e12,
    power_w=230.0,
    is_tried=True,
    source="NVIDIA RTX A5000 datasheet; half of the rate with sparsity",
    device_names=("NVIDIA RTX A5000",),
)
_RTX6000_ADA = replace(
    _A6000,
    name="RTX 6000 Ada",
    bf16_flops=364.2e12,
    fp32_flops=91.1e12,
    fp8_flops=728.5e12,
    memory_bytes_per_s=960e9,
    products=0.34,
    is_tried=True,
    source="NVIDIA RTX 6000 Ada datasheet; half of the rate with sparsity",
    device_names=("NVIDIA RTX 6000 Ada Generation",),
)
_L40S = replace(
    _RTX6000_ADA,
    name="L40S",
    memory_bytes=round(44.4 * _GIB),
    bf16_flops=362.0e12,
    fp32_flops=91.6e12,
    fp8_flops=733.0e12,
    memory_bytes_per_s=864e9,
    power_w=350.0,
    system_power_w=700.0,
    is_tried=False,
    source="NVIDIA L40S datasheet; half of the rate with sparsity",
    device_names=("NVIDIA L40S",),
)
_RTX4090 = Gpu(
    name="RTX 4090",
    architecture="geforce",
    memory_bytes=round(23.6 * _GIB),
    bf16_flops=165.2e12,
    fp32_flops=82.6e12,
    fp8_flops=330.3e12,
    memory_bytes_per_s=1.01e12,
    host_bytes_per_s=32e9,
    power_w=450.0,
    system_power_w=850.0,
    products=1.0,  # it runs above the clock of its datasheet
    is_tried=True,
    source="NVIDIA Ada GPU architecture paper, appendix A; 850 W: NVIDIA's system requirement",
    device_names=("NVIDIA GeForce RTX 4090",),
)
_RTX3090 = replace(
    _RTX4090,
    name="RTX 3090",
    memory_bytes=round(23.7 * _GIB),
    bf16_flops=71.2e12,
    fp32_flops=35.6e12,
    fp8_flops=0.0,
    memory_bytes_per_s=936e9,
    products=0.85,
    power_w=350.0,
    system_power_w=750.0,
    source="NVIDIA Ampere GA102 architecture paper, table 9; 750 W: NVIDIA's requirement",
    device_names=("NVIDIA GeForce RTX 3090",),
)
_RTX5090 = replace(
    _RTX4090,
    name="RTX 5090",
    memory_bytes=round(31.4 * _GIB),
    bf16_flops=209.5e12,
    fp32_flops=104.8e12,
    fp8_flops=419.0e12,
    memory_bytes_per_s=1.79e12,
    host_bytes_per_s=64e9,
    products=0.9,
    power_w=575.0,
    system_power_w=1000.0,
    is_tried=False,
    source="NVIDIA RTX Blackwell GPU architecture paper, appendix A; 1000 W: NVIDIA's requirement",
    device_names=("NVIDIA GeForce RTX 5090",),
)
GPUS = {
    "h100-nvlink": _H100,
    "h100-ib400": _H100,
    "h100-96gb-ib400": _H100_500W,
    "h200-ib400": _H200,
    "a100-nvlink": _A100,
    "a100-ib200": _A100,
    "a100-eth100": _A100,
    "a100-40gb-ib200": _A100_40,
    "b200-ib400": _B200,
    "gb200-ib400": _GB200,
    "mi300x-ib400": _MI300X,
    "mi355x-ib400": _MI355X,
    "a6000-pcie": _A6000,
    "a5000-pcie": _A5000,
    "rtx6000ada-pcie": _RTX6000_ADA,
    "l40s-pcie": _L40S,
    "rtx3090-pcie": _RTX3090,
    "rtx4090-pcie": _RTX4090,
    "rtx5090-pcie": _RTX5090,
}
"""The GPU of each link preset."""


def find_gpu(device_name: str) -> Gpu | None:
    """The GPU with a name that torch gives it; None: its figures are unknown."""
    return next((each for each in GPUS.values() if device_name in each.device_names), None)


NARROW_RATIOS: Mapping[str, float] = {
    "float8": 0.75,
    "float8_rowwise": 0.55,
    "mxfp8": 0.65,
    "nvfp4": 0.75,
}
"""The rate of narrow matrix products, as a fraction of `products` of the float8 peak. Fitted to the
published pairs of trainings in bfloat16 and in the narrow format."""
HALF_WIDTH = 90
"""Channels of a product's input at which it reaches half of its rate."""
CONTEXT_PARALLEL_ATTENTION = 1.6
"""Attention's time under context parallelism, as a multiple of that on one rank: parts of the
sequence run one after another. Fitted to three trainings of torchtitan."""
BANDWIDTH_RATIO = 0.80
"""The fraction of the memory's bandwidth that elementwise operations reach."""
OVERLAP_SLOWDOWN = 0.40
"""The slowdown of compute while a collective runs beside it: 18.9% on average, at most 40% on A100
and H100 (arXiv 2507.03114)."""
EAGER_TRAFFIC, COMPILED_TRAFFIC = 1.9, 1.0
"""Bytes that elementwise operations of a block move, as a multiple of each operation's own inputs
and outputs in the dtype of compute. Eager norms and rotary positions compute in float32."""
RESIDUALS: Mapping[str, float] = {
    "confirmed": 0.075,
    "extended": 0.16,
    "unconfirmed": 0.23,
    "experts": 0.40,
}
"""Half the 80% interval of a step's time, as the logarithm of its ratio, from published trainings
that the constants above were not fitted to (docs/planning_accuracy.md). `confirmed`: bfloat16 with
FSDP only, on a GPU with many published trainings. `extended`: narrow products, LoRA, other kinds of
parallelism, offload, or a GPU with few. `unconfirmed`: a GPU without any.
`experts`: models with experts, of which one published training could be expressed."""
HOST_OPTIMIZER_S_PER_BILLION = (0.22, 1.39)
"""AdamW of a billion parameters on the processors of a host: DeepSpeed's CPU-Adam and torch's Adam.
Source: ZeRO-Offload (arXiv 2101.06840), table 4. Hosts differ: it is an order of magnitude."""
NETWORK_RATIO = (0.85, 1.1)
"""Interval of a preset's bandwidth. Its figures are measured; other machines and sizes differ."""
LAUNCH_NS = 6_000
"""Host time for a kernel in torch's eager mode, autograd included: 5 to 10 µs in pytorch/pytorch's
discussions of launch overhead. The interval of the step uses half of it and twice it."""
FORWARD_KERNELS, BACKWARD_KERNELS = 35, 75
"""Kernels of a block, counted in the trainer's decoder."""
COMPILED_KERNELS = 0.4
"""Kernels of a compiled block, as a fraction of those of an eager one."""
