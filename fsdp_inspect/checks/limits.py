"""How much is allowed? `38 GiB`, `420 ms`: an absolute limit; `+2%`, `+1 MiB`: beyond the baseline.

A budget is a TOML file:

    [limits]                          # absolute, or relative to the baseline with a `+`
    peak_allocated_bytes = "38 GiB"
    step_time_ns = "+5%"
    "category.activation" = "+256 MiB"

A baseline may hold such limits too; the budget's go over them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import CheckError
from fsdp_inspect.quantities import parse_bytes, parse_time_ns
from fsdp_inspect.trace.codes import MemoryCategory

PHASES = ("forward", "backward", "optimizer")
"""Whose peaks are gated each: what grows below the peak of the step is seen, too."""
MEMORY_METRICS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    *(f"peak_{phase}_bytes" for phase in PHASES),
    "resting_bytes",
    "step_adds_bytes",
)
TIME_METRICS = ("step_time_ns", "exposed_ns")
CATEGORY_METRICS = tuple(f"category.{category.label}" for category in MemoryCategory)
"""What a category holds at the peak."""
METRICS = (*MEMORY_METRICS, *TIME_METRICS, *CATEGORY_METRICS)


@dataclass(frozen=True, slots=True)
class GateLimit:
    """What a metric may be at most."""

    text: str
    """As a person wrote it."""
    absolute: int | None = None
    """Bytes or ns."""
    beyond: int | None = None
    """Bytes or ns more than the baseline."""
    beyond_ratio: float | None = None
    """Share of the baseline more than it."""

    def allowed(self, baseline: int | None) -> int | None:
        """The most that is allowed; None: it needs a baseline, and there is none."""
        if self.absolute is not None:
            return self.absolute
        if baseline is None:
            return None
        return baseline + (self.beyond or 0) + round(baseline * (self.beyond_ratio or 0.0))


def parse_gate_limit(metric: str, text: str) -> GateLimit:
    """Read a limit.

    Raises:
        CheckError: There is no such metric, or the text is no limit of it.
    """
    if metric not in METRICS:
        raise CheckError(
            f"{metric!r} cannot be limited. Expected one of {', '.join(METRICS[:6])}, or a "
            f"category of memory. {suggest(metric, METRICS, what='metrics')}"
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
            f"The limit of {metric} is {text!r}. Expected {example!r}, or beyond the baseline "
            f"'+2%' or '+{example}'. Correct it."
        )
    if stripped.startswith("+"):
        return GateLimit(text, beyond=amount)
    return GateLimit(text, absolute=amount)


def read_budget(path: Path) -> dict[str, GateLimit]:
    """The limits of a budget file, by metric.

    Raises:
        CheckError: It cannot be read, is not TOML, or limits what is no metric.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CheckError(
            f"No budget can be read from {str(path)!r}: {error}. Expected TOML with a table "
            "[limits]. See fsdp-inspect check --help."
        ) from error
    limits = tables.pop("limits", None)
    if not isinstance(limits, Mapping) or tables:
        found = ", ".join(tables) or "no table [limits]"
        raise CheckError(
            f"The budget {str(path)!r} has {found}. Expected the table [limits] and nothing else. "
            "Move the limits there."
        )
    return parse_limits({name: str(value) for name, value in _flat(limits).items()})


def parse_limits(texts: Mapping[str, str]) -> dict[str, GateLimit]:
    """Several limits, by metric; raises as `parse_gate_limit`."""
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
