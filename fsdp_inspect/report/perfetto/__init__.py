"""Write a run as a trace for Perfetto."""

from fsdp_inspect.report.perfetto.trace import (
    DEFAULT_LIMIT_MB,
    PerfettoExport,
    write_perfetto,
)

__all__ = ["DEFAULT_LIMIT_MB", "PerfettoExport", "write_perfetto"]
