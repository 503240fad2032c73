"""Compute the times of emulated collectives: queues of virtual links on the host's clock.

The collectives of one process group use its link one at a time, in the order of issue. The times
of a transfer are fixed at its issue: it starts when the link is free and ends a modelled duration
later. Times are absolute, so a late sleeper delays only itself and not the link.
"""

import time
from collections.abc import Callable, Sequence

from fsdp_inspect.emulation.specification import Specification
from fsdp_inspect.recording.emulated_network import Transfer
from fsdp_inspect.trace.bus_bandwidth import bus_factor
from fsdp_inspect.trace.codes import EventKind

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
