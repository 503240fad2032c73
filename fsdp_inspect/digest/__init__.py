"""The analyses of a run side by side, and one run beside another."""

from fsdp_inspect.digest.difference import RunDifference, compare_runs
from fsdp_inspect.digest.run import RunDigest, digest_run

__all__ = ["RunDifference", "RunDigest", "compare_runs", "digest_run"]
