"""How does one metric's value read? Its unit decides; a missing value is never shown as 0."""

from fsdp_inspect import formatting
from fsdp_inspect.metrics import MetricUnit, find_metric


def format_metric(name: str, value: float | None) -> str:
    """The value of the metric `name` as short text, with its unit.

    Raises:
        KeyError: No metric has that name.
    """
    match find_metric(name).unit:
        case MetricUnit.NS:
            return formatting.format_ns(value)
        case MetricUnit.BYTES:
            return formatting.format_bytes(value)
        case MetricUnit.BYTES_PER_S:
            return formatting.format_bytes_per_s(value)
        case MetricUnit.RATIO:
            return formatting.format_ratio(value)
        case MetricUnit.COUNT:
            return formatting.format_count(value)
        case MetricUnit.NUMBER:
            return formatting.MISSING if value is None else f"{value:.4g}"


def format_kind(kind: str) -> str:
    """A collective as the field writes it: `all-gather`."""
    return kind.replace("_", "-")


_METHODS = {
    "host_blocking": "host-blocking",
    "storage_tracker": "storage tracker",
    "cuda_allocator": "CUDA allocator",
    "memory_snapshot": "memory snapshot",
}


def format_method(method: str) -> str:
    """How a number was obtained, in words: `host-blocking`, `storage tracker`.

    Args:
        method: One method, or several with `, ` between them.
    """
    return ", ".join(_METHODS.get(one, one) for one in method.split(", "))
