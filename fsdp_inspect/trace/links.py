"""Define the bus bandwidth of collectives, and presets for the links of real machines.

Each preset is a measured or specified figure with its source.

Bandwidths are published measurements of the bus bandwidth of large messages, not data-sheet values.
Latencies are the constants with which NCCL chooses its algorithms (`src/graph/tuning.cc`, ring,
"simple" protocol): 8.4 µs for a collective, 3.4 µs for a step over NVLink, 5.7 µs over PCIe and
14 µs over a network. A ring of N ranks has N - 1 steps: 32.2 µs for 8 GPUs on NVLink, 14.1 µs for
2 on PCIe, 70 µs for 16 GPUs on two nodes (14 steps within them, one between). More nodes have a
longer ring: set `inter_latency` for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.formatting import format_bytes_per_s, format_ns
from fsdp_inspect.trace.codes import EventFlag, EventKind
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The links of one kind of machine."""

    name: str
    gpus_per_node: int
    intra: tuple[float, int]
    """Bus bandwidth within a node, bytes/s, and latency, ns."""
    inter: tuple[float, int] | None
    """The same between nodes, per network card of one rank; None: one machine."""
    source: str

    def ring_latency_ns(self, num_ranks: int, num_nodes: int) -> int:
        """Latency of a ring of ranks that spans a number of nodes."""
        step_ns = (self.intra[1] - COLLECTIVE_NS) // max(self.gpus_per_node - 1, 1)
        within, between = num_ranks - num_nodes, num_nodes - 1
        return COLLECTIVE_NS + within * step_ns + between * NETWORK_STEP_NS

    def __str__(self) -> str:
        rate, latency_ns = self.intra
        inside = f"{format_bytes_per_s(rate)}, {format_ns(latency_ns)}"
        if self.inter is None:
            return f"{inside} on one node of {self.gpus_per_node} GPUs"
        rate, latency_ns = self.inter
        return (
            f"{inside} within nodes of {self.gpus_per_node} GPUs; "
            f"{format_bytes_per_s(rate)}, {format_ns(latency_ns)} for each GPU between them"
        )


COLLECTIVE_NS = 8_400
NETWORK_STEP_NS = 14_000
_NVLINK_RING_NS = COLLECTIVE_NS + 7 * 3_400
_PCIE_PAIR_NS = COLLECTIVE_NS + 5_700
_TWO_NODE_RING_NS = COLLECTIVE_NS + 14 * 3_400 + NETWORK_STEP_NS

_NVLINK4 = (
    "all-gather 350 GB/s, reduce-scatter 360 GB/s on H100, nccl-tests: "
    "https://github.com/NVIDIA/nccl/issues/1281"
)
_NDR = "46 to 48 GB/s for each NDR 400 Gbit/s card: https://github.com/NVIDIA/nccl-tests/issues/290"
_NVLINK3 = "about 200 GB/s on 8 A100 with NVLink: https://github.com/NVIDIA/nccl-tests/issues/149"
_HDR = f"200 Gbit/s cards, half of NDR; {_NDR}"
_PCIE4 = (
    "an assumption: 63% of the 32 GB/s of PCIe 4.0, with peer access: "
    "https://pcisig.com/specifications"
)


def _preset(
    name: str,
    gpus_per_node: int,
    intra: tuple[float, int],
    inter: float | None,
    source: str,
) -> Preset:
    network = None if inter is None else (inter, _TWO_NODE_RING_NS)
    return Preset(name=name, gpus_per_node=gpus_per_node, intra=intra, inter=network, source=source)


_NVLINK4_RATE, _NVLINK3_RATE, _NVLINK5_RATE = 350e9, 200e9, 650e9
_PCIE4_RATE = 20e9
PRESETS = {
    preset.name: preset
    for preset in (
        _preset("h100-nvlink", 8, (_NVLINK4_RATE, _NVLINK_RING_NS), None, _NVLINK4),
        _preset("h100-ib400", 8, (_NVLINK4_RATE, _NVLINK_RING_NS), 47e9, f"{_NVLINK4}; {_NDR}"),
        _preset(
            "h100-96gb-ib400", 8, (_NVLINK4_RATE, _NVLINK_RING_NS), 47e9, f"{_NVLINK4}; {_NDR}"
        ),
        _preset(
            "h200-ib400",
            8,
            (_NVLINK4_RATE, _NVLINK_RING_NS),
            47e9,
            f"the same fourth generation of NVLink as the H100; {_NDR}",
        ),
        _preset("a100-nvlink", 8, (_NVLINK3_RATE, _NVLINK_RING_NS), None, _NVLINK3),
        _preset("a100-ib200", 8, (_NVLINK3_RATE, _NVLINK_RING_NS), 23.5e9, f"{_NVLINK3}; {_HDR}"),
        _preset(
            "a100-eth100",
            8,
            (_NVLINK3_RATE, _NVLINK_RING_NS),
            9.4e9,
            f"{_NVLINK3}; 600 Gbit/s over eight 100 Gbit/s RoCE cards, 9.4 GB/s each: "
            "https://github.com/NVIDIA/nccl/issues/495",
        ),
        _preset(
            "a100-40gb-ib200", 8, (_NVLINK3_RATE, _NVLINK_RING_NS), 23.5e9, f"{_NVLINK3}; {_HDR}"
        ),
        _preset(
            "b200-ib400",
            8,
            (_NVLINK5_RATE, _NVLINK_RING_NS),
            47e9,
            "an assumption: 72% of the 900 GB/s each way of NVLink's fifth generation: "
            f"https://www.nvidia.com/en-us/data-center/nvlink; {_NDR}",
        ),
        _preset(
            "gb200-ib400",
            72,
            (_NVLINK5_RATE, _NVLINK_RING_NS),
            47e9,
            f"one NVLink domain of 72 GPUs; rates as b200-ib400; {_NDR}",
        ),
        _preset(
            "mi300x-ib400",
            8,
            (310e9, _NVLINK_RING_NS),
            47e9,
            f"seven Infinity Fabric links of 64 GB/s each way, 70% of their sum; {_NDR}",
        ),
        _preset(
            "mi355x-ib400",
            8,
            (375e9, _NVLINK_RING_NS),
            47e9,
            f"seven Infinity Fabric links of 76.8 GB/s each way, 70% of their sum; {_NDR}",
        ),
        _preset("a6000-pcie", 8, (_PCIE4_RATE, _PCIE_PAIR_NS), None, _PCIE4),
        _preset("a5000-pcie", 8, (_PCIE4_RATE, _PCIE_PAIR_NS), None, _PCIE4),
        _preset("rtx6000ada-pcie", 8, (_PCIE4_RATE, _PCIE_PAIR_NS), None, _PCIE4),
        _preset("l40s-pcie", 8, (_PCIE4_RATE, _PCIE_PAIR_NS), None, _PCIE4),
        _preset(
            "rtx3090-pcie",
            2,
            (3.5e9, _PCIE_PAIR_NS),
            None,
            "LoRA of Llama-2 7B on two RTX 3090 without NVLink, all-gathers exposed: "
            "https://github.com/AnswerDotAI/fsdp_qlora/blob/main/benchmarks_03_2024.md",
        ),
        _preset(
            "rtx4090-pcie",
            2,
            (8.4e9, _PCIE_PAIR_NS),
            None,
            "16.8 GB/s both ways at once between two RTX 4090 without peer access, half of it "
            "each way: https://gist.github.com/muellerzr/fbfabd0fc02ac259f0a47d6a51b36d0e",
        ),
        _preset(
            "rtx5090-pcie",
            2,
            (16.8e9, _PCIE_PAIR_NS),
            None,
            "an assumption: PCIe 5.0 has twice the rate of rtx4090-pcie: "
            "https://pcisig.com/specifications",
        ),
    )
}


# --- Compute the bus bandwidth of collectives, as nccl-tests defines it.
#
# Bus bandwidth is message x factor / duration. The factor is (N-1)/N for all-gather and
# reduce-scatter and 2 (N-1)/N for all-reduce, where N is the size of the process group. Other
# collectives have no bus bandwidth here. The result is comparable with the bandwidth of the link
# for any number of ranks.
#
# Source: nccl-tests, doc/PERFORMANCE.md.

_RING_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


def bus_factor(kind: int, num_ranks: int) -> float:
    """Bus bytes for each byte of a message; 0 if the collective moves no bytes over the link.

    Args:
        kind: An `EventKind`.
        num_ranks: Size of the process group; 0 without a group.
    """
    if num_ranks < 2 or kind not in _RING_KINDS:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    return 2 * share if kind == EventKind.ALL_REDUCE else share


def bus_bytes_per_s(events: EventTable, groups: Sequence[ProcessGroup]) -> NDArray[np.float64]:
    """Compute the bus bandwidth of each event.

    Args:
        events: Any events.
        groups: The manifest's process groups.

    Returns:
        Shape (len(events),), bytes per second. NaN for events that are not ring collectives, for
        an unknown group, a group of one rank, an unknown message or an empty duration, and if
        the duration is only an upper bound (`EventFlag.LATEST_END`).
    """
    sizes = {group.index: len(group.ranks) for group in groups}
    group_size = np.array([sizes.get(group, 0) for group in events.group.tolist()], dtype=np.int64)
    duration = events.end_ns - events.start_ns
    moves = np.isin(events.kind, _RING_KINDS) & (group_size > 1) & (duration > 0)
    moves &= (events.bytes >= 0) & ((events.flags & EventFlag.LATEST_END) == 0)
    factor = np.where(events.kind == EventKind.ALL_REDUCE, 2.0, 1.0)
    rates = np.full(len(events), np.nan)
    size = group_size[moves]
    rates[moves] = events.bytes[moves] * factor[moves] * (size - 1) / size / duration[moves] * 1e9
    return rates
