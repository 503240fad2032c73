"""What do openings of runs share? For those who open runs again and again, such as a dashboard."""

from dataclasses import dataclass, field

from fsdp_inspect.store.growing import GrowingTables
from fsdp_inspect.store.kept_tables import KeptTables


@dataclass(frozen=True, slots=True)
class Reuse:
    """What was read before."""

    growing: GrowingTables = field(default_factory=GrowingTables)
    """Of a run that is still being written only what is new since its last opening is read."""
    kept: KeptTables = field(default_factory=KeptTables)
    """Tables that were decoded; one bound for all runs that share it."""
