"""Parse limits of the gate: absolute (`38 GiB`, `420 ms`) or relative (`+2%`, `+1 MiB`).

A budget is a TOML file:

    [limits]                          # absolute, or relative to the baseline with a `+`
    peak_allocated_bytes = "38 GiB"
    step_time_ns = "+5%"
    "category.activation" = "+256 MiB"

A baseline may contain such limits too. The budget's limits override them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import CheckError
from fsdp_inspect.quantities import parse_bytes, parse_time_ns
from fsdp_inspect.reading import MAX_TOML_BYTES, InvalidTextError, parse_toml, read_regular
from fsdp_inspect.trace.codes import MemoryCategory

PHASES = ("forward", "backward", "optimizer")
"""The phases whose peaks are gated, so that increases below the peak of the step are found too."""
MEMORY_METRICS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    *(f"peak_{phase}_bytes" for phase in PHASES),
    "resting_bytes",
    "step_adds_bytes",
)
TIME_METRICS = ("step_time_ns", "exposed_ns")
CATEGORY_METRICS = tuple(f"category.{category.label}" for category in MemoryCategory)
"""The memory of each category at the peak."""
METRICS = (*MEMORY_METRICS, *TIME_METRICS, *CATEGORY_METRICS)


@dataclass(frozen=True, slots=True)
class GateLimit:
    """The highest allowed value of a metric."""

    text: str
    """The limit as written."""
    absolute: int | None = None
    """Bytes or ns."""
    beyond: int | None = None
    """Allowed increase over the baseline, bytes or ns."""
    beyond_ratio: float | None = None
    """Allowed increase as a fraction of the baseline."""

    def allowed(self, baseline: int | None) -> int | None:
        """The highest allowed value; None: the limit requires a baseline, and none exists."""
        if self.absolute is not None:
            return self.absolute
        if baseline is None:
            return None
        return baseline + (self.beyond or 0) + round(baseline * (self.beyond_ratio or 0.0))


def parse_gate_limit(metric: str, text: str) -> GateLimit:
    """Parse a limit.

    Raises:
        CheckError: The metric is unknown, or the limit is invalid.
    """
    if metric not in METRICS:
        raise CheckError(
            f"Unknown metric {metric!r} in the limits. Expected one of {', '.join(METRICS[:6])}, "
            f"or a category of memory. {suggest(metric, METRICS, what='metrics')}"
        )
    stripped = text.strip()
    if stripped.startswith("+") and stripped.endswith("%"):
        ratio = _number(stripped[1:-1])
        if ratio is not None:
            return GateLimit(text, beyond_ratio=ratio / 100)
    amount = _parse_amount(metric, stripped.removeprefix("+"))
    if amount is None:
        example = "420 ms" if metric in TIME_METRICS else "38 GiB"
        raise CheckError(
            f"Invalid limit of {metric}: {text!r}. Expected {example!r}, or relative to the "
            f"baseline '+2%' or '+{example}'. Correct the limit."
        )
    if stripped.startswith("+"):
        return GateLimit(text, beyond=amount)
    return GateLimit(text, absolute=amount)


def read_budget(path: Path) -> dict[str, GateLimit]:
    """Read the limits of a budget file, by metric.

    Raises:
        CheckError: The file is unreadable or not TOML, or it names an unknown metric.
    """
    try:
        tables = parse_toml(read_regular(path, MAX_TOML_BYTES))
    except (OSError, InvalidTextError) as error:
        raise CheckError(
            f"Cannot read the budget {str(path)!r}: {error}. Expected TOML with a table "
            "[limits]. See fsdp-inspect check --help."
        ) from error
    limits = tables.pop("limits", None)
    if not isinstance(limits, Mapping) or tables:
        found = ", ".join(tables) or "no table [limits]"
        raise CheckError(
            f"Invalid budget {str(path)!r}: it has {found}. Expected only the table [limits]. "
            "Move the limits there."
        )
    return parse_limits({name: str(value) for name, value in _flat(limits).items()})


def parse_limits(texts: Mapping[str, str]) -> dict[str, GateLimit]:
    """Parse several limits, by metric. Errors are those of `parse_gate_limit`."""
    return {metric: parse_gate_limit(metric, text) for metric, text in texts.items()}


def _flat(limits: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in limits.items():
        if isinstance(value, Mapping):  # category.activation without quotes is a table in TOML
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _parse_amount(metric: str, text: str) -> int | None:
    if metric in TIME_METRICS:
        time = parse_time_ns(text)
        return None if time is None else round(time)
    return parse_bytes(text)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e6 else None
