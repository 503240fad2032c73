"""Format the value of a metric, a collective's kind and a method as short text."""

from fsdp_inspect.columns import format_value
from fsdp_inspect.metrics import find_metric


def format_metric(name: str, value: float | None) -> str:
    """Format the value of the metric `name` with its unit; a missing value is an en dash.

    Raises:
        KeyError: No metric has that name.
    """
    return format_value(find_metric(name).unit, value)


def format_kind(kind: str) -> str:
    """Format the kind of a collective: `all-gather`."""
    return kind.replace("_", "-")


_METHODS = {
    "host_blocking": "host-blocking",
    "storage_tracker": "storage tracker",
    "cuda_allocator": "CUDA allocator",
    "memory_snapshot": "memory snapshot",
}


def format_method(method: str) -> str:
    """Format how a number was obtained: `host-blocking`, `storage tracker`.

    Args:
        method: One method, or several with `, ` between them.
    """
    return ", ".join(_METHODS.get(name, name) for name in method.split(", "))
