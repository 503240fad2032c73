"""Measure what the gate checks: one number per metric and run, and its composition.

Several runs are repeats of one program. Memory is the highest over the runs, and a time has one
number per run. Warm-up steps do not count, because they allocate memory that later steps do not:
libraries load workspaces, the allocator grows, and the optimizer creates its state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fsdp_inspect.analysis.breakdown import StepBreakdown, measure_breakdown
from fsdp_inspect.analysis.context import try_measure
from fsdp_inspect.analysis.exposed import Exposed, measure_exposed
from fsdp_inspect.analysis.memory.peak import Memory, measure_memory
from fsdp_inspect.analysis.step_times import RankOverlap, measure_overlap
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.comparison.gate.limits import CATEGORY_METRICS, PHASES, TIME_METRICS
from fsdp_inspect.comparison.increases import (
    Held,
    MemoryMoment,
    lines_at,
    moment_of,
    sum_waits,
)
from fsdp_inspect.comparison.settings import find_other_settings
from fsdp_inspect.error_text import quote_all
from fsdp_inspect.statistics import median
from fsdp_inspect.trace.live_memory import RESTING
from fsdp_inspect.trace.run import RunManifest, RunSource, RunStatus, TableOrigin

_USABLE = (RunStatus.COMPLETE, RunStatus.IMPORTED)
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class GateMeasurements:
    """The measurements of one or more repeats of a program."""

    manifest: RunManifest
    """The manifest of the run with the highest peak (a history: the median peak)."""
    run_ids: tuple[str, ...]
    """The names of the runs."""
    method: str
    """Memory counter: `cuda_allocator`, `storage_tracker`, `memory_snapshot`; or empty."""
    memory: dict[str, int] = field(default_factory=dict)
    """Highest value over the runs, by metric; unrecorded metrics are missing."""
    ranges: dict[str, int] = field(default_factory=dict)
    """Highest minus lowest value over the runs, by metric; empty for one run."""
    num_memory_runs: int = 1
    """The number of runs with recorded memory."""
    times: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The time of the typical step of each run, by metric."""
    phase: str | None = None
    """The phase of the peak; None: the composition was not recorded."""
    moments: dict[str, MemoryMoment] = field(default_factory=dict)
    """The memory of the run with the highest peak, by phase and after the step (`RESTING`)."""
    parts: dict[str, int] = field(default_factory=dict)
    """ns of the parts of a step: medians over the runs' typical steps."""
    waits: Held = field(default_factory=dict)
    """Exposed ns a step, by unit and by collective and phase (`all_gather in backward`): medians
    over the runs."""
    run_delays: tuple[float, ...] = ()
    """For each run with timed steps, the fraction of time in which a training thread had no core;
    empty if unknown for any run."""
    longer_plain_steps: str | None = None
    """The sentence of the first run whose plain steps are clearly longer than those that are
    timed; None: there is none."""
    problems: tuple[str, ...] = ()
    """The reasons why a run cannot be judged."""
    origins: tuple[TableOrigin, ...] = ()
    """The recorded identities of the runs."""

    def value(self, metric: str) -> int | None:
        """A memory metric; None: not recorded."""
        return self.memory.get(metric)


def read_runs(runs: Sequence[RunSource], *, are_history: bool = False) -> GateMeasurements:
    """Measure repeats of one program.

    Args:
        runs: The repeats; at least one.
        are_history: The runs are earlier versions of the program. Memory is then the median over
            the runs, without a range, and their code and plan may differ.
    """
    timings = [_measure_times(run) for run in runs]
    memories = [measure_memory(run, with_warmup=False) for run in runs]
    order = sorted(range(len(runs)), key=lambda place: memories[place].peak_allocated_bytes or 0)
    top = order[(len(order) - 1) // 2] if are_history else order[-1]
    memory = memories[top]
    found: dict[str, list[int]] = {}
    for one in memories:
        for metric, amount in _memory_of(one).items():
            found.setdefault(metric, []).append(amount)
    return GateMeasurements(
        manifest=runs[top].manifest,
        run_ids=tuple(run.manifest.run_id for run in runs),
        method=next((row.method for row in memory.ranks if row.method), ""),
        memory={
            metric: (median(amounts) or 0) if are_history else max(amounts)
            for metric, amounts in found.items()
        },
        ranges={
            metric: max(amounts) - min(amounts)
            for metric, amounts in found.items()
            if len(amounts) > 1 and not are_history
        },
        num_memory_runs=len(found.get("peak_allocated_bytes", ())),
        times={
            metric: times for metric in TIME_METRICS if (times := tuple(_times_of(metric, timings)))
        },
        phase=memory.peak.phase if memory.peak else None,
        moments=_moments_of(runs[top], memory),
        parts=_parts_of(timings),
        waits=_waits_of(timings),
        run_delays=_run_delays_of(runs, timings),
        longer_plain_steps=next(_longer_plain_steps_of(runs), None),
        problems=tuple(_problems(runs, are_history=are_history)),
        origins=tuple(run.manifest.origin() for run in runs),
    )


# --- memory


def _memory_of(memory: Memory) -> dict[str, int]:
    ranks = memory.ranks
    found = {
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "step_adds_bytes": _highest(row.step_adds_bytes for row in ranks),
        "resting_bytes": _highest(row.resting_bytes for row in ranks),
    }
    found |= {
        f"peak_{moment.phase}_bytes": moment.bytes
        for moment in memory.phases
        if moment.phase in PHASES
    }
    if memory.peak is not None:
        found |= dict.fromkeys(CATEGORY_METRICS, 0)
        found |= {f"category.{one.category}": one.bytes for one in memory.peak.categories}
    return {metric: amount for metric, amount in found.items() if amount is not None}


def _highest(amounts: Iterable[int | None]) -> int | None:
    """The highest known amount; None: all are unknown."""
    return max((amount for amount in amounts if amount is not None), default=None)


def _moments_of(run: RunSource, memory: Memory) -> dict[str, MemoryMoment]:
    found = {moment.phase: moment for moment in memory.phases}
    if memory.peak is not None:
        found[memory.peak.phase] = memory.peak
    if memory.resting is not None:
        found[RESTING] = memory.resting
    return {name: moment_of(moment, lines_at(run, moment, name)) for name, moment in found.items()}


# --- times


@dataclass(frozen=True, slots=True)
class _Timing:
    """The times of one run; None without a timed step."""

    middle: RankOverlap | None
    """Times of the median rank."""
    breakdown: StepBreakdown | None
    exposed: Exposed | None
    """None also if the required files are damaged."""


def _measure_times(run: RunSource) -> _Timing:
    return _Timing(
        middle=measure_overlap(run).run,
        breakdown=measure_breakdown(run).headline,
        exposed=try_measure(measure_exposed, run, []),
    )


def _times_of(metric: str, timings: Sequence[_Timing]) -> list[int]:
    found = (getattr(timing.middle, metric) for timing in timings if timing.middle is not None)
    return [each for each in found if each is not None]  # None: an import without collectives


def _parts_of(timings: Sequence[_Timing]) -> dict[str, int]:
    steps = [timing.breakdown for timing in timings if timing.breakdown is not None]
    names = dict.fromkeys(part.name for step in steps for part in step.parts)
    return {
        name: median(
            [part.duration_ns for step in steps for part in step.parts if part.name == name]
        )
        or 0
        for name in names
    }


def _waits_of(timings: Sequence[_Timing]) -> Held:
    of_runs = [sum_waits(timing.exposed) for timing in timings if timing.exposed is not None]
    keys = dict.fromkeys(key for waits in of_runs for key in waits)
    return {key: median([waits.get(key, 0) for waits in of_runs]) or 0 for key in keys}


def _run_delays_of(runs: Sequence[RunSource], timings: Sequence[_Timing]) -> tuple[float, ...]:
    timed = [run for run, timing in zip(runs, timings, strict=True) if timing.middle is not None]
    found = [measure_trust(run).run_delay for run in timed]
    delays = tuple(round(one.ratio, 4) for one in found if one is not None)
    return delays if len(delays) == len(timed) else ()


def _longer_plain_steps_of(runs: Sequence[RunSource]) -> Iterator[str]:
    for other in (measure_trust(run).other_plain_steps for run in runs):
        if other is not None and other.are_longer:
            yield other.sentence


# --- problems that prevent a judgement


def _problems(runs: Sequence[RunSource], *, are_history: bool) -> Iterator[str]:
    for run in runs:
        if run.status not in _USABLE:
            yield (
                f"Run {run.manifest.run_id!r} is {run.status.value}: it did not end normally on "
                "every rank, so its peak may be missing. Record the run again."
            )
    first = runs[0].manifest
    for run in () if are_history else runs[1:]:
        others = find_other_settings(first, run.manifest)
        if others:
            names = quote_all(dict.fromkeys(one.name for one in others[:_MOST_NAMED]))
            yield (
                f"Runs {first.run_id!r} and {run.manifest.run_id!r} differ in {names}. Expected "
                "repeats of one program with equal settings. Check them separately."
            )


# --- Store units with equal settings in one row of a baseline.
#
# Consecutive units with the same settings, or the same memory at a moment, share a row. A model of
# 80 blocks then takes as many lines as one of two, and a different block is easy to see.


def fold(named: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge equal neighbours into one row: `each` is the value of each of its `units`.

    Args:
        named: The units by name, in order.
    """
    together = groupby(named, key=lambda pair: pair[1])
    return [{"each": dict(each), "units": [name for name, _ in group]} for each, group in together]


def unfold(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Expand the rows of `fold` in their order.

    Raises:
        ValueError: A row is invalid.
    """
    try:
        return [(str(name), dict(row["each"])) for row in rows for name in row["units"]]
    except (KeyError, TypeError) as error:
        raise ValueError("Invalid row of units: `each` or `units` is missing") from error
