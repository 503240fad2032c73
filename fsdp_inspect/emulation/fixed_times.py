"""Parse the fixed compute time of each part of a model: `forward=2ms,backward=4ms`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fsdp_inspect.error_text import suggest
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.quantities import parse_time_ns

LEGAL = "forward=2ms,backward=4ms for each part, or by its parameters: forward=3ns/param"
_KEYS = ("forward", "backward")
_PER_PARAMETER = "/param"


@dataclass(frozen=True, slots=True)
class Duration:
    """The compute time of a part."""

    ns: float
    is_per_parameter: bool

    def of(self, num_parameters: int) -> int:
        """The time of a part with this many parameters, ns."""
        return round(self.ns * (num_parameters if self.is_per_parameter else 1))


@dataclass(frozen=True, slots=True)
class FixedTimes:
    """The fixed compute times of forward and backward."""

    forward: Duration
    backward: Duration

    def to_dict(self) -> dict[str, Any]:
        """The representation in `run.json`."""
        return asdict(self)


def parse_fixed_times(text: str) -> FixedTimes:
    """Parse the value of `--fixed-compute`.

    Raises:
        ConfigError: A key is unknown (the message has the nearest), missing, or has no valid time.
    """
    values: dict[str, Duration] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS:
            raise ConfigError(
                f"The fixed times {text!r} set an unknown key {key!r}. "
                f"{suggest(key, _KEYS, what='keys')} "
                f"Expected {LEGAL}."
            )
        number = parse_time_ns(value.removesuffix(_PER_PARAMETER))
        if number is None:
            raise ConfigError(
                f"The fixed times {text!r} set {key} to the invalid time {value!r}. Expected "
                f"{LEGAL}. Give it a unit: ns, us, ms or s."
            )
        values[key] = Duration(number, value.endswith(_PER_PARAMETER))
    missing = [key for key in _KEYS if key not in values]
    if missing:
        raise ConfigError(
            f"In the fixed times {text!r} the key {missing[0]} is missing. Expected {LEGAL}. Add "
            f"{missing[0]}=4ms, for example."
        )
    return FixedTimes(values["forward"], values["backward"])
