"""What was it before? A file that is kept with the code, made for review.

JSON, sorted; alike units are written together. It holds the numbers, what filled the peak by unit
and category, and the settings of the run that it was made from, so that a later run can say what
differs. Nothing in it names a folder, a machine or a time: two files of the same program are alike.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
)

from fsdp_inspect.checks.limits import GateLimit, parse_limits
from fsdp_inspect.checks.measurements import GateMeasurements, Held, MemoryMoment
from fsdp_inspect.checks.unit_rows import fold, in_words_and_numbers, unfold
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import CheckError
from fsdp_inspect.store.records import replace_file
from fsdp_inspect.trace.run import RunManifest

_KEPT = {
    "backend",
    "config",
    "device_name",
    "device_type",
    "emulation",
    "mesh",
    "model",
    "name",
    "plan",
    "source",
    "units",
    "versions",
    "world_size",
}
_DROPPED_OF_UNITS = {
    "execution_index",
    "fqn",
    "index",
    "modules",
    "num_tensors",
    "parameters",
    "recorded_by",
}
_DROPPED_CONFIG = {"runs_dir", "name", "tag"}
_INNERMOST = re.compile(r"([\[{])\n\s+([^\[\]{}]*?)\n\s*([\]}])")
_LONGEST_TABLE = 140
"""Characters of a table on one line; a longer one has a line for each of its entries."""


def _unfold(held: Any) -> Any:
    return dict(unfold(held)) if isinstance(held, list) else held


def _fold(held: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    return fold((unit, held[unit]) for unit in sorted(held, key=in_words_and_numbers))


_ByUnit = Annotated[dict[str, dict[str, int]], BeforeValidator(_unfold), PlainSerializer(_fold)]
"""Amounts by unit, then by name; in the file units that have the same are one row."""


class MomentRecord(BaseModel):
    """What filled memory at the highest moment of a phase, or after the step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    unit: str
    held: _ByUnit
    """Bytes by unit, then category."""

    @property
    def moment(self) -> MemoryMoment:
        """As a reading has it."""
        return MemoryMoment(self.bytes, self.unit, _flat(self.held))


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
    parts: dict[str, int] = Field(default_factory=dict)
    """ns of the parts of a step, where times are gated: to say what takes longer."""
    waits: _ByUnit = Field(default_factory=dict)
    """ns a step by unit, then collective and phase, that its collectives are waited for; with
    `parts`."""
    run_delays: tuple[float, ...] = ()
    """Of each run, the share of the time for which a training thread had no core; where times are
    gated: other work on the machine is no change of the program."""
    phase: str | None = None
    """Where the peak was reached."""
    moments: dict[str, MomentRecord] = Field(default_factory=dict)
    """By phase, and after the step."""
    limits: dict[str, str] = Field(default_factory=dict)
    """What is allowed, by metric; written by hand, kept by an update."""

    @field_validator("run")
    @classmethod
    def _check_rows(cls, run: dict[str, Any]) -> dict[str, Any]:
        unfold(run.get("units", ()))
        unfold(run.get("plan", {}).get("units", ()))
        return run

    @property
    def manifest(self) -> RunManifest:
        """The settings of the run that it was made from."""
        units = [
            {**settings, "index": index, "fqn": fqn, "modules": fqn.split(", ")}
            for index, (fqn, settings) in enumerate(unfold(self.run.get("units", ())))
        ]
        plan = dict(self.run.get("plan", {}))
        plan["units"] = [
            {**settings, "modules": fqn.split(", ")}
            for fqn, settings in unfold(plan.get("units", ()))
        ]
        unknown = {"run_id": "baseline", "created": "", "created_unix_ns": 0}
        return RunManifest.model_validate({**self.run, "units": units, "plan": plan, **unknown})

    @property
    def waited(self) -> Held:
        """`waits` as a reading has them."""
        return _flat(self.waits)

    def parsed_limits(self) -> dict[str, GateLimit]:
        """Its limits, by metric.

        Raises:
            CheckError: One of them is no limit.
        """
        return parse_limits(self.limits)


def make_baseline(reading: GateMeasurements, *, limits: dict[str, str] | None = None) -> Baseline:
    """The baseline that a reading amounts to.

    Times go in from `RUNS_FOR_A_TEST` repeats on: fewer prove nothing later.
    """
    times = {
        name: sorted(times)
        for name, times in reading.times.items()
        if len(times) >= RUNS_FOR_A_TEST
    }
    return Baseline(
        run=_settings_of(reading.manifest, is_timed=bool(times)),
        method=reading.method,
        memory={name: value for name, value in reading.memory.items() if "." not in name},
        times=times,
        parts=reading.parts if times else {},
        waits=_nested(reading.waits) if times else {},
        run_delays=tuple(sorted(reading.run_delays)) if times else (),
        phase=reading.phase,
        moments={
            name: MomentRecord(bytes=moment.bytes, unit=moment.unit, held=_nested(moment.held))
            for name, moment in reading.moments.items()
        },
        limits=limits or {},
    )


def why_no_baseline(reading: GateMeasurements) -> str | None:
    """Why a reading can be no baseline; None: it can."""
    if reading.problems:
        return reading.problems[0]
    if "peak_allocated_bytes" in reading.memory:
        return None
    if any(len(times) >= RUNS_FOR_A_TEST for times in reading.times.values()):
        return None
    return (
        "No memory was recorded in a step after warm-up, so there is nothing to keep. On CPU it is "
        "counted in memory steps: run two steps or more, or pass memory_steps=[N] to the Recorder. "
        f"Times are kept of {RUNS_FOR_A_TEST} runs or more."
    )


def _nested(held: Held) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (unit, name), amount in held.items():
        nested.setdefault(unit, {})[name] = amount
    return nested


def _flat(nested: dict[str, dict[str, int]]) -> Held:
    return {(unit, name): amount for unit, held in nested.items() for name, amount in held.items()}


def torch_release(manifest: RunManifest) -> str:
    """The version without its local part: CPU and CUDA builds run the same code of FSDP."""
    return manifest.versions.get("torch", "unknown").partition("+")[0]


def _settings_of(manifest: RunManifest, *, is_timed: bool) -> dict[str, Any]:
    """What decides memory; the device's name and an emulated network only beside times."""
    kept = manifest.model_dump(mode="json", include=_KEPT)
    kept["versions"] = {"torch": torch_release(manifest)}
    kept["device_name"] = manifest.device_name if is_timed else ""
    if not (is_timed and manifest.emulation):
        del kept["emulation"]
    kept["config"] = _without(kept["config"], _DROPPED_CONFIG)
    kept["units"] = fold((unit["fqn"], _without(unit, _DROPPED_OF_UNITS)) for unit in kept["units"])
    if "units" in kept["plan"]:
        kept["plan"]["units"] = fold(
            (", ".join(unit["modules"]), _without(unit, {"modules"}))
            for unit in kept["plan"]["units"]
        )
    return kept


def _without(table: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


def render_baseline(baseline: Baseline) -> str:
    """The file's text: sorted, innermost lists and tables on one line, a newline at its end."""
    plain = baseline.model_dump(mode="json")
    text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False)
    return _INNERMOST.sub(_on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    opening, inside, closing = found.groups()
    line = opening + re.sub(r"\s*\n\s*", " ", inside) + closing
    return line if opening == "[" or len(line) <= _LONGEST_TABLE else found.group()


def write_baseline(
    reading: GateMeasurements, path: Path, *, dry: bool = False
) -> tuple[Baseline, str]:
    """Keep what a reading amounts to; limits that the file has stay.

    Args:
        reading: One that can be a baseline (`why_no_baseline`).
        path: Of the file; its folders are made.
        dry: Only tell what would become of it.

    Returns:
        The baseline, and what became of the file: `wrote`, `rewrote` or `unchanged`.

    Raises:
        CheckError: The file is there, and is no baseline.
        OSError: It cannot be written.
    """
    limits = read_baseline(path).limits if path.exists() else {}
    before = path.read_bytes() if path.exists() else None
    baseline = make_baseline(reading, limits=limits)
    content = render_baseline(baseline).encode()
    if content != before and not dry:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    verb = "wrote" if before is None else "rewrote" if content != before else "unchanged"
    return baseline, verb


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
            "Move it away, and write it again with --update; limits that were written into it by "
            "hand are lost otherwise."
        ) from error
    return baseline
