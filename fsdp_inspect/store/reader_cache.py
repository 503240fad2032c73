"""Share decoded tables between openings of runs, for programs such as the dashboard."""

from dataclasses import dataclass, field

from fsdp_inspect.store.live_tables import LiveTables
from fsdp_inspect.store.remote_files import RemoteFiles
from fsdp_inspect.store.table_cache import TableCache


@dataclass(frozen=True, slots=True)
class ReaderCache:
    """Tables that were read before."""

    growing: LiveTables = field(default_factory=LiveTables)
    """Live streams: a new opening reads only the rows that are new since the last one."""
    files: RemoteFiles | None = None
    """The files of the one run at a URL that is opened, with their listing; None: list them."""
    kept: TableCache = field(default_factory=TableCache)
    """Decoded tables, with one memory limit for all runs that share the cache."""
