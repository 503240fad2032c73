"""How do the clocks of different ranks compare? Offsets onto the clock of the first rank.

Ranks on one host share its monotonic clock. Between hosts the wall clock is what they have in
common: each rank recorded both clocks at one moment, and how far apart the two reads were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_inspect.trace.run import RankRecord


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """What to add to each rank's times to compare them."""

    offset_ns: Mapping[int, int]
    """By rank; 0 for the first one."""
    uncertainty_ns: int
    """The largest error between two of the ranks: that of reading the clocks. It does not hold
    what the hosts' wall clocks themselves differ by."""


def align_clocks(records: Sequence[RankRecord]) -> ClockAlignment:
    """Offsets of the ranks' clocks against that of the first record."""
    if not records:
        return ClockAlignment({}, 0)
    reference = records[0]
    offsets = {record.rank: _offset_ns(record, reference) for record in records}
    wall_used = any(record.host != reference.host for record in records)
    errors = sorted(_uncertainty_ns(record, wall_used=wall_used) for record in records)
    return ClockAlignment(offsets, sum(errors[-2:]) if len(records) > 1 else 0)


def _offset_ns(record: RankRecord, reference: RankRecord) -> int:
    if record.host == reference.host:
        return 0
    return _wall_minus_monotonic(record) - _wall_minus_monotonic(reference)


def _wall_minus_monotonic(record: RankRecord) -> int:
    return record.clock_start.unix_ns - record.clock_start.monotonic_ns


def _uncertainty_ns(record: RankRecord, *, wall_used: bool) -> int:
    reading = record.clock_start.uncertainty_ns if wall_used else 0
    return record.clock_uncertainty_ns + reading
