"""Predict the duration of collectives on the run's own network or on a requested network.

Each kind of collective has a cost line. The line comes from the run (`analysis.link_fit`: latency +
bus bytes / bandwidth, fitted to its own collectives) or from the user's values. All-gathers of a
group that is smaller than the shard group (an integer `reshard_after_forward`) have separate lines:
such a group usually lies within a node, where links are faster than between nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fsdp_inspect.analysis.link_fit import LinkFit, fit_link
from fsdp_inspect.trace.bus_bandwidth import bus_factor
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable

KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class CostLine:
    """Duration of one kind of collective: latency + bus bytes / bandwidth."""

    latency_ns: float
    bus_bytes_per_s: float
    fit: LinkFit | None = None
    """The fit behind the line; None: values of the user or of an emulated network."""

    def duration_ns(self, message_bytes: int, factor: float) -> int:
        """Duration of a message in a group with this bus factor; 0 if no bytes travel."""
        if message_bytes <= 0 or factor <= 0:
            return 0
        return round(self.latency_ns + message_bytes * factor / self.bus_bytes_per_s * 1e9)

    def shifted(self, *, quickly: bool) -> "CostLine":
        """The line shifted by the typical residual of its collectives."""
        if self.fit is None:
            return self
        residual = min(self.fit.residual_ratio, 0.9)
        ratio = 1 - residual if quickly else 1 + residual
        return replace(
            self, latency_ns=self.latency_ns * ratio, bus_bytes_per_s=self.bus_bytes_per_s / ratio
        )

    def changed(self, bus_bytes_per_s: float | None, latency_ns: float | None) -> "CostLine":
        """The line with another bandwidth, latency or both; unchanged without values."""
        values = {"bus_bytes_per_s": bus_bytes_per_s, "latency_ns": latency_ns}
        update = {name: value for name, value in values.items() if value is not None}
        return replace(self, fit=None, **update) if update else self


@dataclass(frozen=True, slots=True)
class Node:
    """The known properties of the ranks that share a node."""

    num_ranks: int | None = None
    """Ranks per node; None: unknown."""
    line: CostLine | None = None
    """Cost line of all-gathers within a node; None: unknown."""
    source: str = ""
    """The source of a fitted line in words."""
    is_changed: bool = False
    """The line comes from the user: measured durations of smaller groups are invalid."""


UNKNOWN_NODE = Node()


@dataclass(frozen=True, slots=True)
class NodeLink:
    """The user's values of the link within a node; None: unchanged."""

    bus_bytes_per_s: float | None = None
    latency_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """The cost lines of a run's collectives."""

    lines: dict[EventKind, CostLine]
    is_changed: bool = False
    """The network or the set of ranks differs from the run's: measured durations are invalid."""
    smaller: Mapping[int, CostLine] = field(default_factory=dict)
    """Cost lines of all-gathers in groups smaller than the shard group, by number of ranks."""
    node: Node = UNKNOWN_NODE

    def duration_ns(self, kind: EventKind, message_bytes: int, num_ranks: int) -> int | None:
        """Duration of a collective; None if the run has no collective of that kind."""
        line = self.lines.get(kind)
        return line.duration_ns(message_bytes, bus_factor(kind, num_ranks)) if line else None

    def line_of_smaller(self, num_ranks: int, shard: int) -> tuple[CostLine | None, str]:
        """The cost line of all-gathers in a group smaller than the shard group.

        Args:
            num_ranks: Consecutive ranks of the group; divides `shard`.
            shard: Ranks of the shard group.

        Returns:
            The line, or None if it is unknown; and its assumption in one sentence, or an empty
            text.
        """
        if num_ranks in self.smaller:
            return self.smaller[num_ranks], ""
        taken = f"A group of {num_ranks} ranks is assumed to be as fast as"
        size = self.node.num_ranks
        is_given = self.node.line is not None and self.node.is_changed
        if size is not None and size < shard and size % num_ranks and not is_given:
            # No node holds the group. Whole nodes are as fast as the shard group.
            line = self.lines.get(EventKind.ALL_GATHER) if num_ranks % size == 0 else None
            return line, f"{taken} the shard group: both span whole nodes of {size} ranks."
        if self.node.line is not None:
            is_exact = self.node.line.fit is None
            return self.node.line, "" if is_exact else f"{taken} {self.node.source}."
        larger = [measured for measured in self.smaller if measured % num_ranks == 0]
        if not larger:
            return None, ""
        return self.smaller[min(larger)], f"{taken} the run's groups of {min(larger)} ranks."

    def shifted(self, *, quickly: bool) -> "Network":
        """The network with every line shifted by the typical residual of its collectives."""
        line = self.node.line
        return replace(
            self,
            lines={kind: each.shifted(quickly=quickly) for kind, each in self.lines.items()},
            smaller={size: each.shifted(quickly=quickly) for size, each in self.smaller.items()},
            node=replace(self.node, line=line and line.shifted(quickly=quickly)),
        )

    def change(
        self, *, bus_bytes_per_s: float | None = None, latency_ns: float | None = None
    ) -> "Network":
        """The network with another bandwidth or latency for every kind; unchanged without values.

        With both values, kinds that the run lacks get a line too. Smaller groups use the same
        values, unless `change_node` set others.

        Raises:
            ValueError: The bandwidth is not above 0, or the latency is below 0.
        """
        _check(bus_bytes_per_s, latency_ns)
        if bus_bytes_per_s is None and latency_ns is None:
            return self
        lines = {
            kind: each.changed(bus_bytes_per_s, latency_ns) for kind, each in self.lines.items()
        }
        line = self.node.line and self.node.line.changed(bus_bytes_per_s, latency_ns)
        if bus_bytes_per_s is not None and latency_ns is not None:
            line = CostLine(latency_ns, bus_bytes_per_s)
            lines = dict.fromkeys(KINDS, line)
        changed = replace(self, lines=lines, is_changed=True)
        if self.node.is_changed:
            return changed
        smaller = {
            size: each.changed(bus_bytes_per_s, latency_ns) for size, each in self.smaller.items()
        }
        node = replace(self.node, line=line, is_changed=True)
        return replace(changed, smaller=smaller, node=node)

    def change_node(self, link: NodeLink) -> "Network":
        """The network with another bandwidth, latency or both for groups within a node.

        Raises:
            ValueError: As in `change`; or only a latency is given and the bandwidth is unknown.
        """
        _check(link.bus_bytes_per_s, link.latency_ns)
        if link.bus_bytes_per_s is None and link.latency_ns is None:
            return self
        if link.bus_bytes_per_s is None and self.node.line is None:
            raise ValueError(
                f"Missing bandwidth within a node: only the latency of {link.latency_ns} ns is "
                "given. Expected both values. Set the bandwidth within a node too."
            )
        start = self.node.line or CostLine(0.0, link.bus_bytes_per_s or 0.0)
        line = start.changed(link.bus_bytes_per_s, link.latency_ns)
        return replace(self, smaller={}, node=replace(self.node, line=line, is_changed=True))


def _check(bus_bytes_per_s: float | None, latency_ns: float | None) -> None:
    if bus_bytes_per_s is not None and not bus_bytes_per_s > 0:
        raise ValueError(f"Invalid bandwidth: {bus_bytes_per_s} bytes/s. Expected a value above 0.")
    if latency_ns is not None and not latency_ns >= 0:
        raise ValueError(f"Invalid latency: {latency_ns} ns. Expected at least 0.")


def fit_network(events: EventTable, groups: Iterable[ProcessGroup]) -> Network:
    """Fit the cost lines of FSDP's own collectives; nodes stay unknown.

    Args:
        events: Events of one rank in timed steps.
        groups: The run's process groups.
    """
    described = list(groups)
    sizes = {group.index: len(group.ranks) for group in described}
    smaller = {group.index for group in described if group.role == "post_forward"}
    of_smaller = np.isin(events.group, list(smaller))
    rows = events.where((events.unit != NO_UNIT) & (events.phase != Phase.EVALUATION) & ~of_smaller)
    found = {kind: _fit(rows.where(rows.kind == kind), kind, sizes) for kind in KINDS}
    lines = {kind: line for kind, line in found.items() if line is not None}
    return Network(lines, smaller=_fit_smaller(events.where(of_smaller), sizes))


def _fit_smaller(events: EventTable, sizes: dict[int, int]) -> dict[int, CostLine]:
    """One line for each size of group, since each unit has its own group."""
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    ranks = np.array([sizes[group] for group in gathers.group.tolist()], dtype=np.int64)
    found = {
        size: _fit(gathers.where(ranks == size), EventKind.ALL_GATHER, sizes)
        for size in np.unique(ranks).tolist()
    }
    return {size: line for size, line in found.items() if line is not None}


def _fit(rows: EventTable, kind: EventKind, group_sizes: dict[int, int]) -> CostLine | None:
    """One line for all groups of the kind: bus bytes make their messages comparable.

    The fit passes through typical durations, but a step contains the long ones too. So the line is
    scaled to keep the sum of all durations.
    """
    factors = np.array(_factors(rows.group.tolist(), kind, group_sizes))
    if not len(rows) or not factors.max(initial=0.0) > 0:
        return None
    # Some durations are only upper bounds: these collectives may have ended long before.
    moves = (factors > 0) & (rows.bytes > 0) & ((rows.flags & EventFlag.LATEST_END) == 0)
    bus_bytes = np.round(rows.bytes[moves] * factors[moves]).astype(np.int64)
    durations = (rows.end_ns - rows.start_ns)[moves]
    fit = fit_link(bus_bytes, durations, 1.0)
    if fit is None:
        return None
    sum_ns = fit.latency_ns * len(bus_bytes) + bus_bytes.sum() / fit.bus_bytes_per_s * 1e9
    ratio = float(durations.sum() / sum_ns)
    return CostLine(fit.latency_ns * ratio, fit.bus_bytes_per_s / ratio, fit)


def _factors(groups: Iterable[int], kind: EventKind, group_sizes: dict[int, int]) -> list[float]:
    return [bus_factor(kind, group_sizes.get(group, 0)) for group in groups]
