"""What was it before? A file that is kept with the code, made for review.

JSON, sorted, one line a unit. It holds the numbers, what filled the peak by unit and category, and
the settings of the run that it was made from, so that a later run can say what differs.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fsdp_inspect.checks.limits import Limit, parse_limits
from fsdp_inspect.checks.reading import Moment, Reading
from fsdp_inspect.errors import CheckError
from fsdp_inspect.trace.messages import describe_validation_error
from fsdp_inspect.trace.repeats import RUNS_FOR_A_TEST
from fsdp_inspect.trace.run import RunManifest

_KEPT = {
    "backend",
    "config",
    "device_name",
    "device_type",
    "mesh",
    "model",
    "name",
    "plan",
    "source",
    "units",
    "versions",
    "world_size",
}
_DROPPED_OF_UNITS = {"parameters", "modules", "recorded_by", "execution_index", "num_tensors"}
_DROPPED_CONFIG = {"runs_dir", "name", "tag"}
_INNERMOST = re.compile(r"([\[{])\n\s+([^\[\]{}]*?)\n\s*([\]}])")


class MomentRecord(BaseModel):
    """What filled memory at the highest moment of a phase, or after the step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    unit: str
    held: dict[str, dict[str, int]]
    """Bytes by unit, then category."""

    @property
    def moment(self) -> Moment:
        """As a reading has it."""
        held = {
            (unit, category): amount
            for unit, categories in self.held.items()
            for category, amount in categories.items()
        }
        return Moment(self.bytes, self.unit, held)


class Baseline(BaseModel):
    """A baseline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: dict[str, Any]
    """The settings of the run, as `run.json` has them."""
    method: str
    """Who counted the memory."""
    memory: dict[str, int]
    """Bytes by metric."""
    times: dict[str, list[int]] = Field(default_factory=dict)
    """ns by metric, one number a run; empty: times are not gated."""
    phase: str | None = None
    """Where the peak was reached."""
    moments: dict[str, MomentRecord] = Field(default_factory=dict)
    """By phase, and after the step."""
    limits: dict[str, str] = Field(default_factory=dict)
    """What is allowed, by metric; written by hand, kept by an update."""

    @property
    def manifest(self) -> RunManifest:
        """The settings of the run that it was made from."""
        units = [
            {**unit, "index": index, "modules": unit["fqn"].split(", ")}
            for index, unit in enumerate(self.run.get("units", ()))
        ]
        return RunManifest.model_validate(
            {**self.run, "units": units, "run_id": "baseline", "created": "", "created_unix_ns": 0}
        )

    def parsed_limits(self) -> dict[str, Limit]:
        """Its limits, by metric.

        Raises:
            CheckError: One of them is no limit.
        """
        return parse_limits(self.limits)


def make_baseline(reading: Reading, *, limits: dict[str, str] | None = None) -> Baseline:
    """The baseline that a reading amounts to.

    Times go in from `RUNS_FOR_A_TEST` repeats on: fewer prove nothing later.
    """
    return Baseline(
        run=_settings_of(reading.manifest),
        method=reading.method,
        memory={name: value for name, value in reading.memory.items() if "." not in name},
        times={
            name: sorted(times)
            for name, times in reading.times.items()
            if len(times) >= RUNS_FOR_A_TEST
        },
        phase=reading.phase,
        moments={name: _record(moment) for name, moment in reading.moments.items()},
        limits=limits or {},
    )


def _record(moment: Moment) -> MomentRecord:
    held: dict[str, dict[str, int]] = {}
    for (unit, category), amount in moment.held.items():
        held.setdefault(unit, {})[category] = amount
    return MomentRecord(bytes=moment.bytes, unit=moment.unit, held=held)


def _settings_of(manifest: RunManifest) -> dict[str, Any]:
    kept = manifest.model_dump(mode="json", include=_KEPT)
    kept["versions"] = {"torch": manifest.versions.get("torch", "")}
    kept["config"] = {k: v for k, v in kept["config"].items() if k not in _DROPPED_CONFIG}
    kept["units"] = [
        {name: value for name, value in unit.items() if name not in _DROPPED_OF_UNITS}
        for unit in kept["units"]
    ]
    return kept


def render_baseline(baseline: Baseline) -> str:
    """The file's text: sorted, innermost lists and tables on one line, a newline at its end."""
    plain = baseline.model_dump(mode="json")
    text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False)
    return _INNERMOST.sub(_on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    opening, inside, closing = found.groups()
    return opening + re.sub(r"\s*\n\s*", " ", inside) + closing


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        CheckError: There is none, or it is none.
    """
    try:
        baseline = Baseline.model_validate_json(path.read_text(encoding="utf-8"))
        _ = baseline.manifest
    except FileNotFoundError as error:
        raise CheckError(
            f"There is no baseline at {str(path)!r}. Expected a file that --update has written. "
            "Run the same check with --update once, on the code as it should be, and commit it."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckError(
            f"The baseline {str(path)!r} cannot be read: {error}. Expected JSON. Write it again "
            "with --update."
        ) from error
    except ValidationError as error:
        raise CheckError(
            f"{str(path)!r} is no baseline of this version: {describe_validation_error(error)} "
            "Write it again with --update."
        ) from error
    return baseline
