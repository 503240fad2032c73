"""What do openings of runs share? For those who open runs again and again, such as a dashboard."""

from dataclasses import dataclass, field

from fsdp_inspect.store.live_tables import LiveTables
from fsdp_inspect.store.table_cache import TableCache


@dataclass(frozen=True, slots=True)
class ReaderCache:
    """What was read before."""

    growing: LiveTables = field(default_factory=LiveTables)
    """Of a run that is still being written only what is new since its last opening is read."""
    kept: TableCache = field(default_factory=TableCache)
    """Tables that were decoded; one bound for all runs that share it."""
