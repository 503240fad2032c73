"""Read one run as rows of the catalog, with the analyses that `summary` and `units` use."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from fsdp_inspect.analysis.breakdown import measure_breakdown
from fsdp_inspect.analysis.context import RunContext
from fsdp_inspect.analysis.lifetime import measure_lifetime
from fsdp_inspect.analysis.memory.peak import measure_memory
from fsdp_inspect.analysis.overlap import measure_overlap
from fsdp_inspect.analysis.run_list import MOST_COURSE, measure_key_numbers
from fsdp_inspect.analysis.scalars import measure_scalars
from fsdp_inspect.analysis.sharding_description import describe_sharding
from fsdp_inspect.analysis.step_times import StepPoint, measure_step_times
from fsdp_inspect.analysis.units import UnitCosts, measure_units
from fsdp_inspect.catalog.tables import RANKS, RUNS, STEPS, UNITS
from fsdp_inspect.comparison.settings import device_of, settings_as_text
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.trace.run import RunSource

T = TypeVar("T")

Row = dict[str, Any]


def read_rows(
    run_id: str, open_it: Callable[[], RunSource], fingerprint: str
) -> dict[str, list[Row]]:
    """Read a run; a run that cannot be read has one row with its problem.

    Args:
        run_id: The run's path below the folder of runs.
        open_it: Opens the run.
        fingerprint: The state of its files.

    Returns:
        Rows by the name of the table.
    """
    known: Row = {"run": run_id, "fingerprint": fingerprint}
    try:
        run = open_it()
        known |= _about(run)
    except Exception as error:  # one damaged run must not break the index of the others
        return {RUNS.name: [{**known, "problem": _describe(error)}]}
    reader = _Reader(run)
    found = {
        RUNS.name: [{**known, **reader.numbers()}],
        UNITS.name: reader.units(),
        RANKS.name: reader.ranks(),
        STEPS.name: reader.steps(),
    }
    found[RUNS.name][0]["problem"] = " ".join(dict.fromkeys(reader.problems)) or None
    return {name: [{**row, "run": run_id} for row in rows] for name, rows in found.items()}


class _Reader:
    """Measures one run, and collects the reasons for results that are missing."""

    def __init__(self, run: RunSource) -> None:
        self._run = RunContext(run)  # the measurements share what they derive from the run
        self.problems: list[str] = []

    def numbers(self) -> Row:
        """The numbers of the row of runs."""
        parts = (self._try(_key_numbers), self._try(_times), self._try(_breakdown))
        others = (self._try(_memory), self._try(_lifetime), self._try(_loss))
        return {name: value for part in (*parts, *others) for name, value in (part or {}).items()}

    def units(self) -> list[Row]:
        """The rows of the table of units."""
        costs = self._try(measure_units)
        return UnitCosts.TABLE.records(costs.units) if costs else []

    def ranks(self) -> list[Row]:
        """The rows of the table of ranks."""
        return self._try(lambda run: list(_ranks(run))) or []

    def steps(self) -> list[Row]:
        """The rows of the table of steps."""
        return self._try(lambda run: list(_steps(measure_step_times(run).over_steps))) or []

    def _try(self, measure: Callable[[RunSource], T]) -> T | None:
        try:
            return measure(self._run)
        except Exception as error:
            self.problems.append(_describe(error))
            return None


def _describe(error: Exception) -> str:
    if isinstance(error, FsdpInspectError | OSError):
        return str(error)
    return (
        f"internal error: {type(error).__name__}: {error}. Expected a run that can be analysed. "
        "Run `fsdp-inspect summary RUN --traceback`, and attach the output to a bug report."
    )


def _about(run: RunSource) -> Row:
    manifest = run.manifest
    return {
        "run_id": manifest.run_id,
        "name": manifest.name,
        "created": manifest.created,
        "created_unix_ns": manifest.created_unix_ns,
        "status": run.status.value,
        "source": manifest.source,
        "world_size": manifest.world_size,
        "num_ranks": len(run.ranks),
        "model": manifest.model.class_name,
        "num_parameters": manifest.model.num_parameters or None,
        "num_units": len(manifest.units),
        "plan": describe_sharding(manifest),
        "backend": manifest.backend,
        "sharder": manifest.sharder_traits.title,
        "device": device_of(manifest),
        "torch": manifest.versions.get("torch"),
        "git_commit": manifest.git_commit,
        "tags": list(manifest.tags),
        "settings": list(settings_as_text(manifest).items()),
    }


def _key_numbers(run: RunSource) -> Row:
    numbers = measure_key_numbers(run)
    return {
        "num_steps": numbers.num_steps,
        "step_time_ns": numbers.step_time_ns,
        "exposed_ns": numbers.exposed_ns,
        "overlap_ratio": numbers.overlap_ratio,
        "peak_allocated_bytes": numbers.peak_allocated_bytes,
        "step_times_ns": list(numbers.step_times_ns),
    }


def _times(run: RunSource) -> Row:
    times, typical = measure_step_times(run), measure_overlap(run).run
    spread = times.step_time_ns
    return {
        "num_timed_steps": len(times.selection.timed),
        "step_time_median_ns": spread.median if spread else None,
        "step_time_p90_ns": spread.p90 if spread else None,
        "communication_ns": typical.communication_ns if typical else None,
        "communication_bytes": typical.communication_bytes if typical else None,
        "collectives_per_step": typical.collectives_per_step if typical else None,
    }


def _breakdown(run: RunSource) -> Row:
    step = measure_breakdown(run).headline
    return {f"{part.name}_ns": part.duration_ns for part in step.parts} if step else {}


def _memory(run: RunSource) -> Row:
    return {"peak_reserved_bytes": measure_memory(run).peak_reserved_bytes}


def _lifetime(run: RunSource) -> Row:
    if not any(record.life for record in run.ranks):
        return {}
    lifetime = measure_lifetime(run)
    return {"goodput_ratio": lifetime.goodput_ratio, "wall_ns": lifetime.wall_ns}


def _loss(run: RunSource) -> Row:
    losses = [series.values[-1] for series in measure_scalars(run) if series.name == "loss"]
    return {"loss": losses[0]} if losses else {}


def _ranks(run: RunSource) -> Iterator[Row]:
    times = {row.rank: row for row in measure_overlap(run).ranks}
    memory = {row.rank: row for row in measure_memory(run).ranks}
    for record in run.ranks:
        timed, held = times.get(record.rank), memory.get(record.rank)
        yield {
            "rank": record.rank,
            "host": record.host,
            "device": record.device,
            "status": record.status.value,
            "num_steps": timed.num_steps if timed else None,
            "step_time_ns": timed.step_time_ns if timed else None,
            "communication_ns": timed.communication_ns if timed else None,
            "exposed_ns": timed.exposed_ns if timed else None,
            "overlap_ratio": timed.overlap_ratio if timed else None,
            "peak_allocated_bytes": held.peak_allocated_bytes if held else None,
            "peak_reserved_bytes": held.peak_reserved_bytes if held else None,
        }


def _steps(points: Sequence[StepPoint]) -> Iterator[Row]:
    """At most `MOST_COURSE` equal parts of the timed steps, with their medians."""
    timed = [point for point in points if point.is_timed]
    places = np.array_split(np.arange(len(timed)), min(len(timed), MOST_COURSE) or 1)
    for number, chosen in enumerate(part for part in places if len(part)):
        steps = [timed[place] for place in chosen]
        yield {
            "part": number,
            "first_step": steps[0].step,
            "last_step": steps[-1].step,
            "num_steps": len(steps),
            "step_time_ns": _median([step.step_time_ns for step in steps]),
            "communication_ns": _median([step.communication_ns for step in steps]),
            "exposed_ns": _median([step.exposed_ns for step in steps]),
        }


def _median(values: Sequence[int]) -> int:
    """The median, as in the course of the step time of a run's key numbers."""
    return int(np.median(values))
