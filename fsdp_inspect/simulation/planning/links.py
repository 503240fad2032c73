"""Predict the duration of collectives in the groups of a mesh, from a link preset.

A ring of N ranks carries message x (N-1)/N, and twice that for an all-reduce. A group within a node
uses the link within nodes. For a group that crosses nodes, the bandwidths of the network cards of
its ranks in one node add up, but they never exceed the link within nodes. The latency grows with
the ring (`trace.links`).
"""

from dataclasses import dataclass

from fsdp_inspect.errors import ConfigError
from fsdp_inspect.trace.links import Preset


@dataclass(frozen=True, slots=True)
class Ring:
    """The link of one group."""

    num_ranks: int
    bytes_per_s: float
    latency_ns: float

    def gather_ns(self, message_bytes: float) -> int:
        """Duration of an all-gather or a reduce-scatter of a full message."""
        return self._duration_ns(message_bytes * (self.num_ranks - 1) / self.num_ranks)

    def all_reduce_ns(self, message_bytes: float) -> int:
        """Duration of an all-reduce."""
        return self._duration_ns(2 * message_bytes * (self.num_ranks - 1) / self.num_ranks)

    def _duration_ns(self, bus_bytes: float) -> int:
        if self.num_ranks < 2:
            return 0
        return round(self.latency_ns + bus_bytes / self.bytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a machine."""

    preset: Preset
    gpus_per_node: int
    bandwidth_ratio: float = 1.0
    """The bandwidth as a fraction of the preset's."""

    def ring(self, num_ranks: int, stride: int) -> Ring:
        """The link of a group of ranks.

        Args:
            num_ranks: Ranks of the group.
            stride: Distance between neighbouring ranks: 1 for consecutive ones.

        Raises:
            ConfigError: The group crosses nodes, and the preset has no network.
        """
        per_node = max(min(num_ranks, self.gpus_per_node // stride), 1)
        nodes = -(-num_ranks // per_node)
        rate = self.preset.intra[0]
        if nodes > 1:
            if self.preset.inter is None:
                raise ConfigError(
                    f"The preset {self.preset.name!r} is one node of {self.gpus_per_node} GPUs, "
                    f"and the plan needs {nodes} nodes. Expected a preset with a network, such as "
                    "h200-ib400, or fewer GPUs. Change --preset or --gpus."
                )
            rate = min(self.preset.inter[0] * per_node, rate)
        latency = self.preset.ring_latency_ns(num_ranks, nodes)
        return Ring(num_ranks, rate * self.bandwidth_ratio, latency)
