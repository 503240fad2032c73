"""How do two runs differ: in their settings, and in what they cost?

Steps of one process are not independent, and medians of two processes of one and the same
configuration differ by several percent. One run a side therefore tells times apart only from
`NOISE_RATIO` on; counts and bytes are compared exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_inspect.digest.run import RunDigest, digest_run
from fsdp_inspect.trace.run import RunManifest, RunSource

NOISE_RATIO = 0.10
"""Differences of times below this share cannot be told from process noise, one run a side."""

_COMPARED = (
    "step_time_ns",
    "communication_ns",
    "exposed_ns",
    "collectives_per_step",
    "communication_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
)
_EXACT = frozenset(
    {
        "collectives_per_step",
        "communication_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
    }
)

_NAMES_OF_A_RUN = frozenset({"name"})
"""Settings that only tell runs apart."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting that the two runs do not share."""

    name: str
    """Dotted, as in the run's configuration."""
    first: Any
    """None where the first run does not have it."""
    second: Any


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """One metric in both runs."""

    name: str
    first: float | None
    second: float | None
    change: float | None
    """second / first - 1; None where one is missing or the first is 0."""
    is_noise: bool
    """The change is smaller than what two runs of one configuration differ by."""


@dataclass(frozen=True, slots=True)
class RunDifference:
    """The second run as seen from the first."""

    first: str
    """Run id."""
    second: str
    settings: tuple[SettingDifference, ...]
    metrics: tuple[MetricDifference, ...]


def compare_runs(first: RunSource, second: RunSource) -> RunDifference:
    """What differs between two runs; the first is the reference."""
    before, after = digest_run(first), digest_run(second)
    return RunDifference(
        first=before.run_id,
        second=after.run_id,
        settings=tuple(_compare_settings(first.manifest, second.manifest)),
        metrics=tuple(_compare_metric(name, before, after) for name in _COMPARED),
    )


def _compare_settings(first: RunManifest, second: RunManifest) -> list[SettingDifference]:
    before, after = _settings(first), _settings(second)
    names = sorted({*before, *after} - _NAMES_OF_A_RUN)
    return [
        SettingDifference(name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    ]


def _settings(manifest: RunManifest) -> dict[str, Any]:
    """What could make two runs differ, flat: the script's own settings, the machine, the versions.

    Where the script said nothing, the observed plan stands in.
    """
    return {
        **dict(_flatten("", manifest.config or manifest.plan)),
        "world_size": manifest.world_size,
        "backend": manifest.backend,
        "device": manifest.device_name or manifest.device_type,
        **{f"versions.{name}": version for name, version in manifest.versions.items()},
    }


def _flatten(prefix: str, settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat.extend(_flatten(f"{prefix}{name}.", value))
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _compare_metric(name: str, before: RunDigest, after: RunDigest) -> MetricDifference:
    first, second = _value(before, name), _value(after, name)
    change = None if first is None or second is None or first == 0 else second / first - 1
    is_noise = name not in _EXACT and change is not None and abs(change) < NOISE_RATIO
    return MetricDifference(name, first, second, change, is_noise)


def _value(digest: RunDigest, name: str) -> float | None:
    if name == "step_time_ns":
        return digest.step_time_ns.median if digest.step_time_ns else None
    value: float | None = getattr(digest, name)
    return value
