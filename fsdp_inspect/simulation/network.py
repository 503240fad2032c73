"""How long does a message take on the run's own network? One line a kind of collective.

Lines come from the run (`analysis.link_fit`: latency + bus bytes / bandwidth, fitted to its own
collectives) or from what the user says of another network. All-gathers of a group that is smaller
than the one that shards (an integer `reshard_after_forward`) have lines of their own: such a group
is meant to lie within a node, where links are faster than between nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.link_fit import LinkFit, fit_link
from fsdp_inspect.trace.bus_bandwidth import bus_factor
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Method, Phase, Source
from fsdp_inspect.trace.run import ProcessGroup
from fsdp_inspect.trace.tables import EventTable

KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class CostLine:
    """Duration of one kind of collective: latency + bus bytes / bandwidth."""

    latency_ns: float
    bus_bytes_per_s: float
    fit: LinkFit | None = None
    """What it rests on; None: as the user said, or as an emulated network has it."""

    def duration_ns(self, message_bytes: int, factor: float) -> int:
        """Of a message in a group whose bus factor is given; 0 where nothing travels."""
        if message_bytes <= 0 or factor <= 0:
            return 0
        return round(self.latency_ns + message_bytes * factor / self.bus_bytes_per_s * 1e9)

    def shifted(self, *, quickly: bool) -> "CostLine":
        """Moved by the typical distance of its collectives from it."""
        if self.fit is None:
            return self
        residual = min(self.fit.residual_ratio, 0.9)
        ratio = 1 - residual if quickly else 1 + residual
        return replace(
            self, latency_ns=self.latency_ns * ratio, bus_bytes_per_s=self.bus_bytes_per_s / ratio
        )

    def changed(self, bus_bytes_per_s: float | None, latency_ns: float | None) -> "CostLine":
        """With another bandwidth, latency, or both; itself with neither."""
        given = {"bus_bytes_per_s": bus_bytes_per_s, "latency_ns": latency_ns}
        update = {name: value for name, value in given.items() if value is not None}
        return replace(self, fit=None, **update) if update else self


@dataclass(frozen=True, slots=True)
class Node:
    """What is known about the ranks that share a node."""

    num_ranks: int | None = None
    """None: not known."""
    line: CostLine | None = None
    """All-gathers among them; None: not known."""
    source: str = ""
    """What a fitted line was fitted to, in words."""
    is_changed: bool = False
    """The line is what the user says: no measured duration of a smaller group holds."""


UNKNOWN_NODE = Node()


@dataclass(frozen=True, slots=True)
class NodeLink:
    """What the user says of the link within a node; None: as it was."""

    bus_bytes_per_s: float | None = None
    latency_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """The lines of a run's collectives."""

    lines: dict[EventKind, CostLine]
    is_changed: bool = False
    """It, or who takes part, is not the run's own: no measured duration holds."""
    smaller: Mapping[int, CostLine] = field(default_factory=dict)
    """All-gathers of groups that are smaller than the one that shards, by their ranks."""
    node: Node = UNKNOWN_NODE

    def duration_ns(self, kind: EventKind, message_bytes: int, num_ranks: int) -> int | None:
        """Duration of a collective; None where the run had none of that kind."""
        line = self.lines.get(kind)
        return line.duration_ns(message_bytes, bus_factor(kind, num_ranks)) if line else None

    def line_of_smaller(self, num_ranks: int, shard: int) -> tuple[CostLine | None, str]:
        """All-gathers of a group that is smaller than the one that shards.

        Args:
            num_ranks: Of the group; divides `shard`. Its ranks are neighbours.
            shard: Ranks that shard.

        Returns:
            Its line, or None where it is not known, and what is taken for granted in it, one
            sentence; empty: nothing.
        """
        if num_ranks in self.smaller:
            return self.smaller[num_ranks], ""
        taken = f"A group of {num_ranks} ranks is taken to be as fast as"
        size = self.node.num_ranks
        is_given = self.node.line is not None and self.node.is_changed
        if size is not None and size < shard and size % num_ranks and not is_given:
            # No node holds it. Whole nodes are what the group that shards has.
            line = self.lines.get(EventKind.ALL_GATHER) if num_ranks % size == 0 else None
            return line, f"{taken} all ranks that shard: both span whole nodes of {size} ranks."
        if self.node.line is not None:
            is_exact = self.node.line.fit is None
            return self.node.line, "" if is_exact else f"{taken} {self.node.source}."
        larger = [measured for measured in self.smaller if measured % num_ranks == 0]
        if not larger:
            return None, ""
        return self.smaller[min(larger)], f"{taken} the run's own groups of {min(larger)}."

    def shifted(self, *, quickly: bool) -> "Network":
        """Every line moved by the typical distance of its collectives from it."""
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
        """The network with another bandwidth or latency for every kind; itself with neither.

        Given both, kinds of which the run has none get a line, too. Smaller groups have the same
        network, unless `change_node` said otherwise.

        Raises:
            ValueError: A bandwidth that is not above 0, or a latency below 0.
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
            ValueError: As `change`; or a latency alone, where the bandwidth is not known.
        """
        _check(link.bus_bytes_per_s, link.latency_ns)
        if link.bus_bytes_per_s is None and link.latency_ns is None:
            return self
        if link.bus_bytes_per_s is None and self.node.line is None:
            raise ValueError(
                f"The latency within a node is {link.latency_ns} ns, and its bandwidth is not "
                "known. Expected both. Give the bandwidth within a node as well."
            )
        start = self.node.line or CostLine(0.0, link.bus_bytes_per_s or 0.0)
        line = start.changed(link.bus_bytes_per_s, link.latency_ns)
        return replace(self, smaller={}, node=replace(self.node, line=line, is_changed=True))


def _check(bus_bytes_per_s: float | None, latency_ns: float | None) -> None:
    if bus_bytes_per_s is not None and not bus_bytes_per_s > 0:
        raise ValueError(f"The bandwidth is {bus_bytes_per_s} bytes/s. It must be above 0.")
    if latency_ns is not None and not latency_ns >= 0:
        raise ValueError(f"The latency is {latency_ns} ns. It must not be below 0.")


def fit_network(events: EventTable, groups: Iterable[ProcessGroup]) -> Network:
    """The lines of FSDP's own collectives among the events; of nodes nothing is said.

    Args:
        events: Of one rank, timed steps.
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
    """One line a size of group: each unit has a group of its own."""
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    ranks = np.array([sizes[group] for group in gathers.group.tolist()], dtype=np.int64)
    found = {
        size: _fit(gathers.where(ranks == size), EventKind.ALL_GATHER, sizes)
        for size in np.unique(ranks).tolist()
    }
    return {size: line for size, line in found.items() if line is not None}


def _fit(rows: EventTable, kind: EventKind, group_sizes: dict[int, int]) -> CostLine | None:
    """One line for all groups of the kind: bus bytes make their messages comparable.

    The fit goes through typical durations, and a step adds up all of them, the long ones too: the
    line is scaled so that it keeps their sum.
    """
    factors = np.array(_factors(rows.group.tolist(), kind, group_sizes))
    if not len(rows) or not factors.max(initial=0.0) > 0:
        return None
    moves = (factors > 0) & (rows.bytes > 0) & ~are_upper_bounds(rows)
    bus_bytes = np.round(rows.bytes[moves] * factors[moves]).astype(np.int64)
    durations = (rows.end_ns - rows.start_ns)[moves]
    fit = fit_link(bus_bytes, durations, 1.0)
    if fit is None:
        return None
    sum_ns = fit.latency_ns * len(bus_bytes) + bus_bytes.sum() / fit.bus_bytes_per_s * 1e9
    ratio = float(durations.sum() / sum_ns)
    return CostLine(fit.latency_ns * ratio, fit.bus_bytes_per_s / ratio, fit)


def are_upper_bounds(collectives: EventTable) -> NDArray[np.bool_]:
    """Which durations are upper bounds only: the collective may have ended long before.

    These are the inferred ones. A prediction infers every time, but its durations are exact.
    """
    is_predicted = collectives.source == Source.PREDICTED
    return (collectives.method == Method.INFERRED) & ~is_predicted


def _factors(groups: Iterable[int], kind: EventKind, group_sizes: dict[int, int]) -> list[float]:
    return [bus_factor(kind, group_sizes.get(group, 0)) for group in groups]
