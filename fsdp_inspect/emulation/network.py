"""Compute the times of emulated collectives: queues of virtual links on the host's clock.

The collectives of one process group use its link one at a time, in the order of issue. The times
of a transfer are fixed at its issue: it starts when the link is free and ends a modelled duration
later. Times are absolute, so a late sleeper delays only itself and not the link.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_inspect.error_text import quote_all, suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.formatting import format_bytes_per_s, format_ns
from fsdp_inspect.quantities import parse_bytes_per_s, parse_time_ns
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.links import PRESETS, Preset, bus_factor

# --- Parse the emulated machines: `world_size=64,bandwidth=50GB/s,latency=20us`, or a preset's
# name.
#
# A *link* carries the collectives of one process group. Each takes latency + bus bytes / bandwidth.
# Bus bytes are those of nccl-tests: message x (N-1)/N, and twice that for an all-reduce. A group
# inside a node uses the link within nodes. A group that crosses nodes uses the network. Each of its
# ranks adds the bandwidth of its own network card: k ranks on each node have k times that
# bandwidth, but never more than the link within nodes carries.
#
# Limits of the model: two process groups never slow each other down. Latency does not grow with the
# number of ranks. A transfer takes no processor, no streaming multiprocessor and no memory
# bandwidth from the computation. All ranks issue when rank 0 issues.

DEFAULT_LATENCY_NS = 20_000
DEFAULT_GPUS_PER_NODE = 8

KEYS = (
    "preset",
    "world_size",
    "gpus_per_node",
    "bandwidth",
    "latency",
    "inter_bandwidth",
    "inter_latency",
)
LEGAL = (
    "a preset (" + ", ".join(PRESETS) + ") and keys with commas between: world_size=64, "
    "bandwidth=50GB/s, latency=20us; for links between nodes gpus_per_node=8, "
    "inter_bandwidth=50GB/s (of one rank's network card), inter_latency=30us"
)


@dataclass(frozen=True, slots=True)
class Link:
    """The time of a collective: latency + bus bytes / bandwidth."""

    bandwidth_bytes_per_s: float
    latency_ns: int

    def __str__(self) -> str:
        return f"{format_bytes_per_s(self.bandwidth_bytes_per_s)}, {format_ns(self.latency_ns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """The emulated machines."""

    world_size: int
    gpus_per_node: int
    intra: Link
    """The link of a group within a node, for any number of ranks."""
    inter: Link | None
    """The link between nodes, per network card of one rank; None: there is one node."""
    preset: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The representation in `run.json`."""
        return asdict(self)

    def link_of(self, ranks: Sequence[int]) -> Link:
        """The link of the collectives of a process group.

        Args:
            ranks: The global ranks of the group, at least one.
        """
        nodes: dict[int, int] = {}
        for rank in ranks:
            node = rank // self.gpus_per_node
            nodes[node] = nodes.get(node, 0) + 1
        if len(nodes) < 2 or self.inter is None:
            return self.intra
        cards = min(nodes.values())
        bandwidth = min(self.inter.bandwidth_bytes_per_s * cards, self.intra.bandwidth_bytes_per_s)
        return Link(bandwidth, self.inter.latency_ns)

    def __str__(self) -> str:
        where = f"{self.preset}: " if self.preset else ""
        text = f"{where}{self.world_size} ranks, {self.intra}"
        if self.inter is None or self.world_size <= self.gpus_per_node:
            return text
        return f"{text} within nodes of {self.gpus_per_node}; {self.inter} per rank between them"


def parse_specification(text: str) -> Specification:
    """Parse the value of `--emulate`.

    Raises:
        ConfigError: A key or preset is unknown (the message has the nearest), or a value invalid.
    """
    values = _split(text)
    preset = _preset(text, values.pop("preset", None))
    gpus_per_node = _count(text, values, "gpus_per_node", preset.gpus_per_node if preset else None)
    has_network = "inter_bandwidth" in values or "inter_latency" in values
    world_size = _count(text, values, "world_size", gpus_per_node if preset else None)
    if world_size is None:
        raise _refused(text, "world_size is missing", "Add world_size=8, for example.")
    intra = _link(text, values, "", preset.intra if preset else None)
    if intra is None:
        raise _refused(text, "bandwidth is missing", "Add bandwidth=50GB/s, for example.")
    inter = _link(text, values, "inter_", preset.inter if preset else None)
    if gpus_per_node is None:
        gpus_per_node = DEFAULT_GPUS_PER_NODE if has_network else world_size
    if inter is None and world_size > gpus_per_node:
        raise _refused(
            text,
            f"its {world_size} ranks do not fit into a node of {gpus_per_node}, and the link "
            "between nodes is missing",
            "Add inter_bandwidth=50GB/s (of one rank's network card), or choose a preset with a "
            "network, such as h200-ib400.",
        )
    return Specification(
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        intra=intra,
        inter=inter,
        preset=None if preset is None else preset.name,
    )


def _split(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            key, value = "preset", key
        if key not in KEYS:
            raise ConfigError(
                f"The emulation {text!r} sets an unknown key {key!r}. "
                f"{suggest(key, KEYS, what='keys')} Expected {LEGAL}."
            )
        if key in values:
            raise _refused(text, f"it sets {key} twice", "Remove one of them.")
        values[key] = value
    return values


def _preset(text: str, name: str | None) -> Preset | None:
    if name is None:
        return None
    if name not in PRESETS:
        raise ConfigError(
            f"The emulation {text!r} has an unknown preset {name!r}. "
            f"{suggest(name, list(PRESETS), what='presets')} Presets: {quote_all(PRESETS)}. "
            "Choose one, or set bandwidth=... and latency=... instead."
        )
    return PRESETS[name]


def _count(text: str, values: dict[str, str], key: str, default: int | None) -> int | None:
    given = values.get(key)
    if given is None:
        return default
    if not given.isdecimal() or int(given) < 1:
        raise _refused(text, f"{key} is {given!r}", f"Set {key} to a whole number from 1.")
    return int(given)


def _link(
    text: str, values: dict[str, str], prefix: str, default: tuple[float, int] | None
) -> Link | None:
    bandwidth, latency = values.get(f"{prefix}bandwidth"), values.get(f"{prefix}latency")
    if bandwidth is None and default is None:
        if latency is not None:
            raise _refused(
                text,
                f"it has {prefix}latency but no {prefix}bandwidth",
                f"Add {prefix}bandwidth=50GB/s, for example.",
            )
        return None
    rate, delay = default or (0.0, DEFAULT_LATENCY_NS)
    if bandwidth is not None:
        rate = parse_bytes_per_s(bandwidth) or 0.0
        if rate <= 0:
            raise _refused(
                text,
                f"{prefix}bandwidth is {bandwidth!r}",
                f"Set {prefix}bandwidth to a number above 0 with a unit, such as 50GB/s or "
                "400Gbit/s.",
            )
    if latency is not None:
        parsed = parse_time_ns(latency)
        if parsed is None:
            raise _refused(
                text,
                f"{prefix}latency is {latency!r}",
                f"Set {prefix}latency to a number with a unit, such as 20us.",
            )
        delay = round(parsed)
    return Link(rate, delay)


def _refused(text: str, wrong: str, advice: str) -> ConfigError:
    return ConfigError(f"The emulation {text!r} is invalid: {wrong}. Expected {LEGAL}. {advice}")


_SPIN_NS = 150_000
"""The last part of a wait is spent spinning, because a sleep ends about 0.1 ms late."""

# Bus bytes for each byte of a message, for kinds that trace.bandwidth does not measure. Source:
# nccl-tests, doc/PERFORMANCE.md. OTHER_COLLECTIVE covers reduce, gather and scatter.
_ONE_WAY_KINDS = (EventKind.BROADCAST, EventKind.OTHER_COLLECTIVE)


class EmulatedNetwork:
    """The links of all process groups of rank 0."""

    def __init__(
        self, specification: Specification, now: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.specification = specification
        self._now = now
        self._free_ns: dict[str, int] = {}

    def duration_ns(self, kind: EventKind, num_bytes: int, ranks: Sequence[int]) -> int:
        """The duration of a collective from its start; 0 in a group of one rank.

        Args:
            kind: The kind of the collective.
            num_bytes: Its full message: all-gather output, reduce-scatter input.
            ranks: The global ranks of its group.
        """
        if len(ranks) < 2:
            return 0
        link = self.specification.link_of(ranks)
        travelling = num_bytes * _bus_factor(kind, len(ranks))
        return link.latency_ns + round(travelling / link.bandwidth_bytes_per_s * 1e9)

    def issue(
        self,
        kind: EventKind,
        num_bytes: int,
        group: str,
        ranks: Sequence[int],
        *,
        not_before_ns: int = 0,
    ) -> Transfer:
        """Put a collective on the link of its group.

        Args:
            kind: The kind of the collective.
            num_bytes: Its full message.
            group: The name of its process group.
            ranks: The global ranks of that group.
            not_before_ns: When its data is available, if later than now.
        """
        issue_ns = self._now()
        start_ns = max(issue_ns, self._free_ns.get(group, 0), not_before_ns)
        end_ns = start_ns + self.duration_ns(kind, num_bytes, ranks)
        self._free_ns[group] = end_ns
        return Transfer(kind, num_bytes, issue_ns, start_ns, end_ns)

    def wait(self, transfer: Transfer) -> None:
        """Block the calling thread until a transfer has ended."""
        if transfer.need_ns < 0:
            transfer.need_ns = self._now()
        sleep_until(transfer.end_ns)

    def has_ended(self, transfer: Transfer) -> bool:
        """Whether a transfer has ended."""
        return self._now() >= transfer.end_ns


def sleep_until(deadline_ns: int) -> None:
    """Sleep until a time of `time.perf_counter_ns`; return immediately if it has passed.

    Sleeping frees the processor; the last 0.15 ms are spent spinning.
    """
    while (left := deadline_ns - time.perf_counter_ns()) > 0:
        if left > _SPIN_NS:
            time.sleep((left - _SPIN_NS) / 1e9)


def _bus_factor(kind: EventKind, num_ranks: int) -> float:
    if kind in _ONE_WAY_KINDS:
        return 1.0
    if kind == EventKind.ALL_TO_ALL:
        return (num_ranks - 1) / num_ranks
    return bus_factor(kind, num_ranks)
