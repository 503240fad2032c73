"""How long does a message take on the run's own network? One line a kind of collective.

Lines come from the run (`trace.link_fit`: latency + bus bytes / bandwidth, fitted to its own
collectives) or from what the user says of another network.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fsdp_inspect.trace.bandwidth import bus_factor
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Phase
from fsdp_inspect.trace.link_fit import LinkFit, fit_link
from fsdp_inspect.trace.tables import EventTable

KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


@dataclass(frozen=True, slots=True)
class Line:
    """Duration of one kind of collective: latency + bus bytes / bandwidth."""

    latency_ns: float
    bus_bytes_per_s: float
    fit: LinkFit | None = None
    """What it rests on; None: as the user said."""

    def duration_ns(self, message_bytes: int, factor: float) -> int:
        """Of a message in a group whose bus factor is given; 0 where nothing travels."""
        if message_bytes <= 0 or factor <= 0:
            return 0
        return round(self.latency_ns + message_bytes * factor / self.bus_bytes_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class Network:
    """The lines of a run's collectives."""

    lines: dict[EventKind, Line]
    is_changed: bool = False
    """It, or who takes part, is not the run's own: no measured duration holds."""

    def duration_ns(self, kind: EventKind, message_bytes: int, num_ranks: int) -> int | None:
        """Duration of a collective; None where the run had none of that kind."""
        line = self.lines.get(kind)
        return line.duration_ns(message_bytes, bus_factor(kind, num_ranks)) if line else None

    def shifted(self, *, quickly: bool) -> "Network":
        """Every line moved by the typical distance of its collectives from it."""
        lines = {}
        for kind, line in self.lines.items():
            ratio = 1.0
            if line.fit is not None:
                residual = min(line.fit.residual_ratio, 0.9)
                ratio = 1 - residual if quickly else 1 + residual
            lines[kind] = replace(
                line,
                latency_ns=line.latency_ns * ratio,
                bus_bytes_per_s=line.bus_bytes_per_s / ratio,
            )
        return replace(self, lines=lines)

    def change(
        self, *, bus_bytes_per_s: float | None = None, latency_ns: float | None = None
    ) -> "Network":
        """The network with another bandwidth or latency for every kind; itself with neither.

        Given both, kinds of which the run has none get a line, too.

        Raises:
            ValueError: A bandwidth that is not above 0, or a latency below 0.
        """
        if bus_bytes_per_s is not None and not bus_bytes_per_s > 0:
            raise ValueError(f"The bandwidth is {bus_bytes_per_s} bytes/s. It must be above 0.")
        if latency_ns is not None and not latency_ns >= 0:
            raise ValueError(f"The latency is {latency_ns} ns. It must not be below 0.")
        if bus_bytes_per_s is None and latency_ns is None:
            return self
        if bus_bytes_per_s is not None and latency_ns is not None:
            line = Line(latency_ns, bus_bytes_per_s)
            return Network(dict.fromkeys(KINDS, line), is_changed=True)
        given = {"bus_bytes_per_s": bus_bytes_per_s, "latency_ns": latency_ns, "fit": None}
        update = {name: value for name, value in given.items() if value is not None}
        lines = {kind: replace(line, fit=None, **update) for kind, line in self.lines.items()}
        return Network(lines, is_changed=True)


def fit_network(events: EventTable, group_sizes: dict[int, int]) -> Network:
    """The lines of FSDP's own collectives among the events.

    Args:
        events: Of one rank, timed steps.
        group_sizes: Ranks of each process group, by index.
    """
    lines = {}
    for kind in KINDS:
        mask = (events.kind == kind) & (events.unit != NO_UNIT)
        rows = events.where(mask & (events.phase != Phase.EVALUATION))
        line = _fit(rows, kind, group_sizes)
        if line is not None:
            lines[kind] = line
    return Network(lines)


def _fit(rows: EventTable, kind: EventKind, group_sizes: dict[int, int]) -> Line | None:
    """One line for all groups of the kind: bus bytes make their messages comparable."""
    factors = np.array(_factors(rows.group.tolist(), kind, group_sizes))
    if not len(rows) or not factors.max(initial=0.0) > 0:
        return None
    moves = (factors > 0) & (rows.bytes > 0)
    bus_bytes = np.round(rows.bytes[moves] * factors[moves]).astype(np.int64)
    fit = fit_link(bus_bytes, (rows.end_ns - rows.start_ns)[moves], 1.0)
    return None if fit is None else Line(fit.latency_ns, fit.bus_bytes_per_s, fit)


def _factors(groups: Iterable[int], kind: EventKind, group_sizes: dict[int, int]) -> list[float]:
    return [bus_factor(kind, group_sizes.get(group, 0)) for group in groups]
