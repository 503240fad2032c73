"""The analyses of a run side by side, one run beside another, and the runs of a folder."""

from fsdp_inspect.digest.comparison import Comparison, compare_runs
from fsdp_inspect.digest.listing import ListedRun, list_recorded_runs
from fsdp_inspect.digest.run import RunDigest, digest_run

__all__ = [
    "Comparison",
    "ListedRun",
    "RunDigest",
    "compare_runs",
    "digest_run",
    "list_recorded_runs",
]
