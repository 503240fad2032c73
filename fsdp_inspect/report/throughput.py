"""List the known numbers of a run's throughput."""

from collections.abc import Iterator

from fsdp_inspect.analysis.throughput import Throughput


def list_throughput(found: Throughput | None) -> Iterator[tuple[str, float, str]]:
    """Yield the name of each known metric, its value and its origin."""
    if found is None:
        return
    for name, value, origin in (
        ("tokens_per_s", found.tokens_per_s, found.tokens_origin),
        ("mfu_ratio", found.mfu_ratio, found.mfu_origin),
        ("device_utilisation_ratio", found.device_utilisation_ratio, "measured with NVML"),
    ):
        if value is not None:
            yield name, value, origin
