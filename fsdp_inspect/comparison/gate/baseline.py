"""Read and write baseline files, which are committed with the code.

The file is sorted JSON, and similar units share a row. It contains the numbers, the composition of
the peak by unit and category, and the settings of its run. So a later check can name the
differences. It contains no folder, machine or time: two files of one program are equal.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
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

from fsdp_inspect.comparison.gate.limits import GateLimit, parse_limits
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, fold, unfold
from fsdp_inspect.comparison.increases import Held, LineBytes, MemoryMoment, in_words_and_numbers
from fsdp_inspect.comparison.noise import RUNS_FOR_A_TEST
from fsdp_inspect.comparison.settings import NAMES_AND_PLACES
from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import CheckError
from fsdp_inspect.reading import MAX_JSON_BYTES, InvalidTextError, parse_json, read_regular
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.writing import replace_file

RUNS_TO_LEARN = 3
"""Runs from which a baseline learns the tolerance of memory."""
_KEPT = {
    "backend",
    "config",
    "device_name",
    "device_type",
    "emulation",
    "memory_steps",
    "mesh",
    "model",
    "name",
    "observed",
    "plan",
    "sharder",
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
_INNERMOST = re.compile(r"([\[{])\n\s+([^\[\]{}]*?)\n\s*([\]}])")
_LONGEST_TABLE = 140
"""Longest table in characters that stays on one line."""


def _unfold(held: Any) -> Any:
    return dict(unfold(held)) if isinstance(held, list) else held


def _fold(held: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return fold((unit, held[unit]) for unit in sorted(held, key=in_words_and_numbers))


_ByUnit = Annotated[dict[str, dict[str, int]], BeforeValidator(_unfold), PlainSerializer(_fold)]
"""Amounts by unit, then by name. In the file, units with equal amounts share a row."""


_LinesByUnit = Annotated[
    dict[str, dict[str, list[int]]], BeforeValidator(_unfold), PlainSerializer(_fold)
]
"""Bytes of each line by unit, then category, the largest first. Equal units share a row."""


class MomentRecord(BaseModel):
    """The composition of memory at the peak of a phase, or after the step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    unit: str
    held: _ByUnit
    """Bytes by unit, then category."""
    lines: _LinesByUnit = Field(default_factory=dict)
    """Bytes by unit, category and line of the user's code; empty: not recorded."""

    @property
    def moment(self) -> MemoryMoment:
        """The moment in the form of a reading; its lines have no name."""
        lines = [
            LineBytes(unit, category, "", amount, 0)
            for unit, categories in self.lines.items()
            for category, amounts in categories.items()
            for amount in amounts
        ]
        return MemoryMoment(self.bytes, self.unit, _flat(self.held), tuple(lines))


class Baseline(BaseModel):
    """A baseline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: dict[str, Any]
    """The settings of the run, as in `run.json`."""
    method: str
    """The method that counted the memory."""
    memory: dict[str, int]
    """Bytes by metric."""
    memory_ranges: dict[str, int] = Field(default_factory=dict)
    """Highest minus lowest bytes over the runs, by metric; empty for fewer than three runs."""
    num_memory_runs: int = 1
    """Runs behind `memory`."""
    times: dict[str, list[int]] = Field(default_factory=dict)
    """ns by metric, one number per run; empty: times are not gated."""
    parts: dict[str, int] = Field(default_factory=dict)
    """ns of the parts of a step, if times are gated: they show which part takes longer."""
    waits: _ByUnit = Field(default_factory=dict)
    """Exposed ns a step by unit, then by collective and phase; present with `parts`."""
    run_delays: tuple[float, ...] = ()
    """For each run, the fraction of time in which a training thread had no core; present if times
    are gated. It detects other work on the machine."""
    phase: str | None = None
    """The phase of the peak."""
    moments: dict[str, MomentRecord] = Field(default_factory=dict)
    """The memory by phase, and after the step."""
    limits: dict[str, str] = Field(default_factory=dict)
    """Limits by metric; written by hand, and kept by an update."""

    @field_validator("run")
    @classmethod
    def _check_rows(cls, run: dict[str, Any]) -> dict[str, Any]:
        plan = run.get("plan", {})
        if not isinstance(plan, dict):
            raise ValueError(f"run.plan is a {type(plan).__name__}. Expected a table")
        unfold(run.get("units", ()))
        unfold(plan.get("units", ()))
        return run

    @property
    def manifest(self) -> RunManifest:
        """The settings of the baseline's run."""
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
        """`waits` in the form of a reading."""
        return _flat(self.waits)

    def learned_range(self, metric: str) -> int | None:
        """The range of a memory metric over the runs; None: there were too few runs."""
        return self.memory_ranges.get(metric)

    def parsed_limits(self) -> dict[str, GateLimit]:
        """The limits by metric.

        Raises:
            CheckError: A limit is invalid.
        """
        return parse_limits(self.limits)


def make_baseline(reading: GateMeasurements, *, limits: dict[str, str] | None = None) -> Baseline:
    """Make the baseline of a reading.

    Times require at least `RUNS_FOR_A_TEST` repeats, because fewer are not significant later.
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
        memory_ranges=_kept_ranges(reading),
        num_memory_runs=max(reading.num_memory_runs, 1),
        times=times,
        parts=reading.parts if times else {},
        waits=_nested(reading.waits) if times else {},
        run_delays=tuple(sorted(reading.run_delays)) if times else (),
        phase=reading.phase,
        moments={
            name: MomentRecord(
                bytes=moment.bytes,
                unit=moment.unit,
                held=_nested(moment.held),
                lines=_bytes_of_lines(moment.lines),
            )
            for name, moment in reading.moments.items()
        },
        limits=limits or {},
    )


def _kept_ranges(reading: GateMeasurements) -> dict[str, int]:
    if reading.num_memory_runs < RUNS_TO_LEARN or not reading.ranges:
        return {}
    return {name: value for name, value in reading.ranges.items() if "." not in name}


def why_no_baseline(reading: GateMeasurements) -> str | None:
    """The reason why a reading cannot be a baseline; None: it can."""
    if reading.problems:
        return reading.problems[0]
    if "peak_allocated_bytes" in reading.memory:
        return None
    if any(len(times) >= RUNS_FOR_A_TEST for times in reading.times.values()):
        return None
    return (
        "No memory is recorded in a step after warm-up. Expected a run with memory or at least "
        f"{RUNS_FOR_A_TEST} timed runs. On CPU, memory comes from memory steps: run at least two "
        "steps, or pass memory_steps=[N] to the Recorder."
    )


def _nested(held: Held) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (unit, name), amount in held.items():
        nested.setdefault(unit, {})[name] = amount
    return nested


def _bytes_of_lines(lines: Iterable[LineBytes]) -> dict[str, dict[str, list[int]]]:
    nested: dict[str, dict[str, list[int]]] = {}
    for row in sorted(lines, key=lambda row: -row.bytes):
        nested.setdefault(row.unit, {}).setdefault(row.category, []).append(row.bytes)
    return nested


def _flat(nested: dict[str, dict[str, int]]) -> Held:
    return {(unit, name): amount for unit, held in nested.items() for name, amount in held.items()}


def torch_release(manifest: RunManifest) -> str:
    """The torch version without its local part: CPU and CUDA builds have the same FSDP code."""
    return manifest.versions.get("torch", "unknown").partition("+")[0]


def _settings_of(manifest: RunManifest, *, is_timed: bool) -> dict[str, Any]:
    """Settings that decide memory; with times also the device's name and the emulated network."""
    kept = manifest.model_dump(mode="json", include=_KEPT)
    kept["versions"] = {"torch": torch_release(manifest)}
    kept["device_name"] = manifest.device_name if is_timed else ""
    if not (is_timed and manifest.emulation):
        del kept["emulation"]
    kept["config"] = _without(kept["config"], NAMES_AND_PLACES)
    kept["units"] = fold((unit["fqn"], _without(unit, _DROPPED_OF_UNITS)) for unit in kept["units"])
    if "units" in kept["plan"]:
        kept["plan"]["units"] = fold(
            (", ".join(unit["modules"]), _without(unit, {"modules"}))
            for unit in kept["plan"]["units"]
        )
    return kept


def _without(table: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


def render_baseline(baseline: Baseline) -> str:
    """The file's text: sorted, with innermost lists and tables on one line."""
    plain = baseline.model_dump(mode="json")
    for moment in plain["moments"].values():
        if not moment["lines"]:
            del moment["lines"]
    text = json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False)
    return _INNERMOST.sub(_on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    opening, inside, closing = found.groups()
    line = opening + re.sub(r"\s*\n\s*", " ", inside) + closing
    return line if opening == "[" or len(line) <= _LONGEST_TABLE else found.group()


def write_baseline(
    reading: GateMeasurements, path: Path, *, dry: bool = False
) -> tuple[Baseline, str]:
    """Write the baseline of a reading. Limits in an existing file are kept.

    Args:
        reading: A reading that can be a baseline (`why_no_baseline`).
        path: The file. Missing folders are created.
        dry: Only report the result, without writing.

    Returns:
        The baseline, and the result for the file: `wrote`, `rewrote` or `unchanged`.

    Raises:
        CheckError: The existing file is not a baseline.
        OSError: The file is not writable.
    """
    limits = read_baseline(path).limits if path.exists() else {}
    before = read_regular(path, MAX_JSON_BYTES) if path.exists() else None
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
        CheckError: The file is missing or is not a baseline.
    """
    try:
        baseline = Baseline.model_validate(parse_json(read_regular(path, MAX_JSON_BYTES)))
        _ = baseline.manifest
    except FileNotFoundError as error:
        raise CheckError(
            f"Baseline not found at {str(path)!r}. Expected a file that --update wrote. "
            "Run the same check with --update once on correct code, and commit the file."
        ) from error
    except (OSError, InvalidTextError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckError(
            f"Cannot read the baseline {str(path)!r}: {reason}. Expected a JSON file that "
            "--update wrote. Name that file, or write it again with --update."
        ) from error
    except ValidationError as error:
        raise CheckError(
            f"Invalid baseline {str(path)!r}: {describe_validation_error(error)} "
            "Copy its hand-written limits, remove the file, and write it again with --update: "
            "otherwise these limits are lost."
        ) from error
    return baseline
