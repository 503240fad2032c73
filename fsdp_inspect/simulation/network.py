"""Predict the duration of collectives on the run's own network or on a requested network.

Each kind of collective has a cost line. The line comes from the run (`analysis.link_fit`: latency +
bus bytes / bandwidth, fitted to its own collectives) or from the user's values. All-gathers of a
group that is smaller than the shard group (an integer `reshard_after_forward`) have separate lines:
such a group usually lies within a node, where links are faster than between nodes.

[Note: unknown latency] Messages of one size do not separate latency from bandwidth. Then a range of
latencies fits the run, and each gives another duration for another size. The highest is the
shortest typical duration of an all-gather or a reduce-scatter of the group, plus what the mean of
the kind exceeds its typical duration by: long ones may be long at any size. At the lowest, the
bytes take all the time, but travel at least as fast as over Ethernet of 100 Mbit/s. The line is the
middle of the two extremes: its error is at most half of their difference, and no other line
guarantees less. An emulated network states its latency, and `fsdp_inspect.probe` measures it. A
user who sets only one of the two values leaves the other one between its extremes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from fsdp_inspect.analysis.last_arrivals import measure_lateness
from fsdp_inspect.analysis.link_fit import LinkFit, fit_link
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.formatting import format_bytes_per_s, format_ns, format_ratio
from fsdp_inspect.trace.codes import COLLECTIVES, NO_UNIT, EventFlag, EventKind, Phase
from fsdp_inspect.trace.links import bus_factor
from fsdp_inspect.trace.run import (
    ProcessGroup,
    RunManifest,
    RunSource,
    emulated_latency_ns,
    emulated_ranks_per_node,
    hosts_of,
    ranks_per_node,
)
from fsdp_inspect.trace.tables import EventTable

KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
_SAME_STEPS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)
"""Kinds whose ring has N - 1 steps: the latency of one is at most the duration of the other."""
_NORMAL_90 = 1.645
"""90% of a normal distribution are within this number of standard errors."""
_MOST_ERROR = 0.9
_SLOWEST_BYTES_PER_S = 12.5e6
"""No network on which models are sharded is slower: Ethernet of 100 Mbit/s."""


class Pace(Enum):
    """The end of a line's uncertainty that gives the durations."""

    FAST = "fast"
    TYPICAL = "typical"
    CAUTIOUS = "cautious"
    """The slowest of the lines of an unknown latency, without the error of the fit."""
    SLOW = "slow"


class LineBounds(NamedTuple):
    """The extremes of a line whose latency is unknown. See [Note: unknown latency].

    If the user has set the latency, the extremes differ in bandwidth only.
    """

    least_latency: "CostLine"
    most_latency: "CostLine"


@dataclass(frozen=True, slots=True)
class CostLine:
    """Duration of one kind of collective: latency + bus bytes / bandwidth."""

    latency_ns: float
    bus_bytes_per_s: float
    """Infinite if the bytes take no time."""
    fit: LinkFit | None = None
    """The fit of the run's own collectives; None: values of the user or of an emulated network."""
    bounds: LineBounds | None = None
    """The extremes of an uncertain latency; None: fitted or given."""
    source: str = ""
    """The source of the latency in words; empty: the run's own collectives, or the user."""
    missing: str = ""
    """The reason why the latency is unknown from other sources too, in one sentence; empty: not
    tried."""
    pace: Pace = Pace.TYPICAL

    def duration_ns(self, message_bytes: int, factor: float) -> int:
        """Duration of a message in a group with this bus factor; 0 if no bytes travel."""
        if message_bytes <= 0 or factor <= 0:
            return 0
        bus_bytes = message_bytes * factor
        typical = self.typical_ns(bus_bytes)
        if self.pace is Pace.TYPICAL:
            return round(typical)
        extremes = [typical, *(line.typical_ns(bus_bytes) for line in self.bounds or ())]
        error = self._error_ratio(bus_bytes)
        match self.pace:
            case Pace.FAST:
                return round(min(extremes) * (1 - error))
            case Pace.SLOW:
                return round(max(extremes) * (1 + error))
        return round(max(extremes))

    def typical_ns(self, bus_bytes: float) -> float:
        """The duration on the line itself."""
        return self.latency_ns + bus_bytes / self.bus_bytes_per_s * 1e9

    def _error_ratio(self, bus_bytes: float) -> float:
        """Half the 90% interval of a typical duration on the line, as a fraction of it.

        At least the typical residual, since a unit's messages can all lie on one side of the line.
        """
        typical = self.typical_ns(bus_bytes)
        if self.fit is None or not typical:
            return 0.0
        error = _NORMAL_90 * self.fit.error_ns(bus_bytes) / typical
        return min(max(self.fit.residual_ratio, error), _MOST_ERROR)

    def at(self, pace: Pace) -> "CostLine":
        """The line with the durations of a pace. A latency from another source counts as exact."""
        is_known = pace is Pace.CAUTIOUS and (self.bounds is None or self.source)
        return self if is_known else replace(self, pace=pace)

    def changed(self, bus_bytes_per_s: float | None, latency_ns: float | None) -> "CostLine":
        """The line with another bandwidth, latency or both; unchanged without values."""
        if bus_bytes_per_s is None and latency_ns is None:
            return self
        line = CostLine(
            self.latency_ns if latency_ns is None else latency_ns,
            self.bus_bytes_per_s if bus_bytes_per_s is None else bus_bytes_per_s,
        )
        is_known = bus_bytes_per_s is not None and latency_ns is not None
        if self.bounds is None or is_known or (self.source and latency_ns is not None):
            return line
        least, most = (each.changed(bus_bytes_per_s, latency_ns) for each in self.bounds)
        return replace(
            self,
            latency_ns=line.latency_ns,
            bus_bytes_per_s=line.bus_bytes_per_s,
            bounds=LineBounds(least, most),
        )


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


_MOST_LATE = 0.5
"""With more waiting for late ranks in the recorded durations, no other network is predicted."""


@dataclass(frozen=True, slots=True)
class Network:
    """The cost lines of a run's collectives."""

    lines: dict[EventKind, CostLine]
    is_changed: bool = False
    """The network or the set of ranks differs from the run's: measured durations are invalid."""
    smaller: Mapping[int, CostLine] = field(default_factory=dict)
    """Cost lines of all-gathers in groups smaller than the shard group, by number of ranks."""
    node: Node = UNKNOWN_NODE
    late_ratio: float = 0.0
    """The part of the recorded durations that is waiting for ranks that arrive later."""

    @property
    def unknown(self) -> tuple[EventKind, ...]:
        """The kinds whose latency is unknown."""
        return tuple(kind for kind, line in self.lines.items() if line.bounds and not line.source)

    @property
    def unexplained_ratio(self) -> float:
        """How far durations are from the line of a kind whose latency is unknown, as a fraction."""
        fits = (self.lines[kind].fit for kind in self.unknown)
        found = (fit.residual_ratio for fit in fits if fit is not None)
        return min(max(found, default=0.0), _MOST_ERROR)

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

    def at(self, pace: Pace) -> "Network":
        """The network with the durations of a pace."""
        line = self.node.line
        return replace(
            self,
            lines={kind: each.at(pace) for kind, each in self.lines.items()},
            smaller={size: each.at(pace) for size, each in self.smaller.items()},
            node=replace(self.node, line=line and line.at(pace)),
        )

    def change(
        self, *, bus_bytes_per_s: float | None = None, latency_ns: float | None = None
    ) -> "Network":
        """The network with another bandwidth or latency for every kind; unchanged without values.

        With both values, kinds that the run lacks get a line too. Smaller groups use the same
        values, unless `change_node` set others.

        Raises:
            MissingDataError: Most of the recorded durations is waiting for late ranks, in which the
                network has no part.
            ValueError: The bandwidth is not above 0, or the latency is below 0.
        """
        _check(bus_bytes_per_s, latency_ns)
        if bus_bytes_per_s is None and latency_ns is None:
            return self
        if self.late_ratio > _MOST_LATE:
            raise MissingDataError(
                f"Another network cannot be predicted: {format_ratio(self.late_ratio)} of the time "
                "of the recorded collectives is waiting for ranks that arrive later. Expected "
                "ranks that arrive together. `fsdp-inspect show RUN ranks` names the late rank."
            )
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


PROBE = "`python -m fsdp_inspect.probe --help`"
"""The command that says how to measure a network."""


def unknown_latencies(network: Network) -> list[str]:
    """The assumptions about kinds whose latency the run does not show, one sentence each."""
    return [
        _assume_latency(kind.label.replace("_", "-"), line, line.bounds)
        for kind, line in network.lines.items()
        if line.bounds is not None
    ]


def _assume_latency(name: str, line: CostLine, bounds: LineBounds) -> str:
    least, most = (format_ns(each.latency_ns) for each in bounds)
    between = f"between {least} and {most}"
    why = line.fit.refusal if line.fit is not None else ""
    if least == most and not line.source:  # the user's values
        slowest, used, fastest = (
            format_bytes_per_s(each.bus_bytes_per_s) if math.isfinite(each.bus_bytes_per_s) else ""
            for each in (bounds.least_latency, line, bounds.most_latency)
        )
        extent = f"between {slowest} and {fastest}" if fastest else f"at least {slowest}"
        if not slowest:
            extent = "because this latency alone takes as long as the recorded messages"
        return (
            f"The bandwidth of {name} is unknown, {extent}. {why} The prediction uses "
            f"{used or 'no limit'}, and its interval covers both ends. Set the bandwidth too "
            "(--bandwidth)."
        )
    if line.source:
        latency = format_ns(line.latency_ns)
        extent = "" if least == most else f", {between}"
        return f"The latency of {name} is {latency}{extent}, from {line.source}."
    remedy = f"The network probe measures the latency: {PROBE}."
    if line.missing:
        why = f"{why} {line.missing}"
        remedy = "Probe the network again while the machines are idle."
    is_floored = bounds.least_latency.latency_ns > 0 and not (line.fit and line.fit.is_constant)
    slowest = format_bytes_per_s(_SLOWEST_BYTES_PER_S)
    floor = f" The lower end assumes a network of at least {slowest}." if is_floored else ""
    return (
        f"The latency of {name} is unknown, {between}. {why} The prediction uses the middle of "
        f"this range, and its interval covers both ends.{floor} {remedy}"
    )


def _check(bus_bytes_per_s: float | None, latency_ns: float | None) -> None:
    if bus_bytes_per_s is not None and not bus_bytes_per_s > 0:
        raise ValueError(f"Invalid bandwidth: {bus_bytes_per_s} bytes/s. Expected a value above 0.")
    if latency_ns is not None and not latency_ns >= 0:
        raise ValueError(f"Invalid latency: {latency_ns} ns. Expected at least 0.")


KnownLine = Callable[[EventKind, Sequence[int]], CostLine | None]
"""The line of a kind of collective in a group, by its ranks, from another source than the run's
own collectives; None: unknown. If its fit has a refusal, the source has no latency either."""


_LATENESS_STEPS = 4


def measure_own_lateness(run: RunSource, rank: int, events: EventTable) -> float:
    """`measure_lateness` of FSDP's own collectives, or of buckets, in some of the steps."""
    some = np.unique(events.step)[:_LATENESS_STEPS]
    is_own = np.isin(events.kind, [int(kind) for kind in COLLECTIVES]) & (events.unit != NO_UNIT)
    return measure_lateness(run, rank, events.where(is_own & np.isin(events.step, some)))


def fit_network(
    events: EventTable, groups: Iterable[ProcessGroup], known: KnownLine = lambda *_: None
) -> Network:
    """Fit the cost lines of FSDP's own collectives; nodes stay unknown.

    Args:
        events: Events of one rank in timed steps.
        groups: The run's process groups.
        known: Gives the latency if the run's own collectives do not show it.
    """
    described = {group.index: group for group in groups}
    smaller = [group.index for group in described.values() if group.role == "post_forward"]
    of_smaller = np.isin(events.group, smaller)
    rows = events.where((events.unit != NO_UNIT) & (events.phase != Phase.EVALUATION) & ~of_smaller)
    lines = _fit_kinds(rows, KINDS, described, known)
    return Network(lines, smaller=_fit_smaller(events.where(of_smaller), described, known))


def _fit_smaller(
    events: EventTable, groups: Mapping[int, ProcessGroup], known: KnownLine
) -> dict[int, CostLine]:
    """One line for each size of group, since each unit has its own group."""
    ranks = np.array([len(groups[group].ranks) for group in events.group.tolist()], dtype=np.int64)
    found = {
        size: _fit_kinds(events.where(ranks == size), (EventKind.ALL_GATHER,), groups, known)
        for size in np.unique(ranks).tolist()
    }
    return {
        size: lines[EventKind.ALL_GATHER]
        for size, lines in found.items()
        if EventKind.ALL_GATHER in lines
    }


def _fit_kinds(
    rows: EventTable,
    kinds: Iterable[EventKind],
    groups: Mapping[int, ProcessGroup],
    known: KnownLine,
) -> dict[EventKind, CostLine]:
    """The line of each kind that the rows contain."""
    samples = {
        kind: sample
        for kind in kinds
        if (sample := _sample_of(rows.where(rows.kind == kind), kind, groups)) is not None
    }
    latest = min(
        (samples[kind].fit.typical_ns for kind in _SAME_STEPS if kind in samples), default=0.0
    )
    lines = {}
    for kind, sample in samples.items():
        most = latest if kind in _SAME_STEPS else sample.fit.typical_ns
        lines[kind] = sample.line(known(kind, sample.ranks), most)
    return lines


@dataclass(frozen=True, slots=True)
class _Sample:
    """The messages of one kind.

    The fit passes through typical durations, but a step contains the long ones too. So each line is
    scaled to keep the sum of all durations.
    """

    fit: LinkFit
    ranks: Sequence[int]
    """The largest group of the kind."""
    mean_bytes: float
    """Bus bytes, which make the messages of all groups comparable."""
    mean_ns: float

    def line(self, known: CostLine | None, most_latency_ns: float) -> CostLine:
        """The line through the mean.

        Args:
            known: The line of the group from another source; None: unknown.
            most_latency_ns: The highest latency, if the fit has none.
        """
        if self.fit.refusal is None:
            ratio = self.mean_ns / self.fit.predict_ns(self.mean_bytes)
            return CostLine(self.fit.latency_ns * ratio, self.fit.bus_bytes_per_s / ratio, self.fit)
        least = max(self.mean_ns - self.mean_bytes / _SLOWEST_BYTES_PER_S * 1e9, 0.0)
        most = most_latency_ns + max(self.mean_ns - self.fit.typical_ns, 0.0)
        least = min(least, most)
        typical = (least + most) / 2
        missing = ""
        if known is not None and known.fit is not None and known.fit.refusal is not None:
            missing = f"{known.source.capitalize()} does not show it either: {known.fit.refusal}"
            known = None
        if known is not None:
            typical = known.latency_ns
            error = _NORMAL_90 * known.fit.error_ns(0) if known.fit else 0.0
            least, most = max(typical - error, 0.0), typical + error
        elif self.fit.is_constant:
            typical = most = self.mean_ns
            least = self.mean_ns * (1 - self.fit.residual_ratio)
        bounds = LineBounds(self._through_mean(least), self._through_mean(most))
        return replace(
            self._through_mean(typical),
            fit=self.fit,
            bounds=bounds,
            source="" if known is None else known.source,
            missing=missing,
        )

    def _through_mean(self, latency_ns: float) -> CostLine:
        transfer_ns = self.mean_ns - latency_ns
        rate = self.mean_bytes / transfer_ns * 1e9 if transfer_ns > 0 else math.inf
        return CostLine(min(latency_ns, self.mean_ns), rate)


def _sample_of(
    rows: EventTable, kind: EventKind, groups: Mapping[int, ProcessGroup]
) -> _Sample | None:
    """The messages whose duration is known; None without any."""
    ranks = [groups[group].ranks if group in groups else [] for group in rows.group.tolist()]
    factors = np.array([bus_factor(kind, len(each)) for each in ranks])
    if not len(rows) or not factors.max(initial=0.0) > 0:
        return None
    # Some durations are only upper bounds: these collectives may have ended long before.
    moves = (factors > 0) & (rows.bytes > 0) & ((rows.flags & EventFlag.LATEST_END) == 0)
    full_bytes, durations = rows.bytes[moves], (rows.end_ns - rows.start_ns)[moves]
    bus_bytes = np.round(full_bytes * factors[moves]).astype(np.int64)
    fit = fit_link(bus_bytes, durations, 1.0, full_bytes=full_bytes)
    if fit is None:
        return None
    return _Sample(fit, max(ranks, key=len), float(bus_bytes.mean()), float(durations.mean()))


# --- Find the ranks that share a node, and the cost line of groups within a node.
#
# With an integer `reshard_after_forward`, groups of consecutive ranks gather in backward. A run
# without such groups shows their link only in two cases: all ranks of the shard group share a node,
# or the network is emulated.


def find_node(run: RunSource, network: Network, shard_ranks: Sequence[int]) -> Node:
    """The node properties that the run shows.

    Args:
        run: A recorded or emulated run.
        network: The network fitted to the run's collectives.
        shard_ranks: The ranks of one shard group.
    """
    size = emulated_ranks_per_node(run.manifest) or _recorded_size(run)
    if size is None:
        return UNKNOWN_NODE
    is_whole_group = len({rank // size for rank in shard_ranks}) < 2
    line, source = _emulated_line(run.manifest), ""
    if line is None and is_whole_group:
        line = network.lines.get(EventKind.ALL_GATHER)
        source = "the shard group, which lies within a node"
    within = [measured for measured in network.smaller if size % measured == 0]
    if line is None and within:
        line = network.smaller[max(within)]
        source = f"the run's groups of {max(within)} ranks within a node"
    return Node(size, line, source)


def known_lines(run: RunSource) -> KnownLine:
    """The lines of the run's process groups that its own collectives do not show.

    An emulated network states its latency. A probe measures messages of many sizes. On a busy
    machine its durations can scatter too much to show a latency. The fit of the line then has a
    refusal.
    """
    probe = run.network_probe

    def find(kind: EventKind, ranks: Sequence[int]) -> CostLine | None:
        latency_ns = emulated_latency_ns(run.manifest, ranks)
        if latency_ns is not None:
            return CostLine(latency_ns, math.inf, source="the emulated network")
        if probe is None:
            return None
        messages, durations = probe.durations_of(kind, ranks)
        fit = fit_link(messages, durations, bus_factor(kind, len(ranks)))
        if fit is None:
            return None
        source = "the network probe of the run"
        return CostLine(fit.latency_ns, fit.bus_bytes_per_s, fit, source=source)

    return find


def _emulated_line(manifest: RunManifest) -> CostLine | None:
    """The emulated link within a node, which is valid for any group there."""
    link = manifest.emulation.get("intra")
    return None if link is None else CostLine(link["latency_ns"], link["bandwidth_bytes_per_s"])


def _recorded_size(run: RunSource) -> int | None:
    """Ranks on each host, if all hosts are known and have equally many consecutive ranks."""
    hosts = hosts_of(run)
    return ranks_per_node(hosts.get(rank) for rank in range(run.manifest.world_size))
