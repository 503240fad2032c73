"""How do results look as tables? Result objects to data frames, one row a thing, units in names.

Times are in ms and amounts in MiB, as floats at full precision: what is shown is rounded, what is
sorted and exported is not. Nothing is computed but that change of unit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.exposed import ExposedOwner
from fsdp_inspect.analysis.memory import MemoryOfStep, PeakMoment
from fsdp_inspect.analysis.scalars import ScalarSeries
from fsdp_inspect.analysis.steps import StepPoint
from fsdp_inspect.analysis.units import UnitCollective, UnitCost
from fsdp_inspect.digest.run import RunDigest
from fsdp_inspect.formatting import format_unit
from fsdp_inspect.metrics import find_metric
from fsdp_inspect.report.values import format_kind
from fsdp_inspect.store.folder import RunEntry
from fsdp_inspect.trace.bandwidth import bus_bytes_per_s
from fsdp_inspect.trace.codes import EventKind, Method, Phase, Source
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect_app import wording
from fsdp_inspect_app.timeline.payload import lane_label, method_words
from fsdp_inspect_app.timeline.tracks import LOOKS, StepTimeline

NS_PER_MS = 1e6
BYTES_PER_MIB = float(1 << 20)
BYTES_PER_GB = 1e9

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def to_csv(frame: pd.DataFrame) -> bytes:
    """The table as CSV; a text that a spreadsheet would run as a formula is quoted with `'`."""
    harmless = frame.map(_defused)
    return harmless.to_csv(index=False).encode()


def _defused(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def ms(value_ns: float | None) -> float | None:
    """Nanoseconds as milliseconds; what is missing stays missing."""
    return None if value_ns is None else value_ns / NS_PER_MS


def mib(value_bytes: float | None) -> float | None:
    """Bytes as MiB; what is missing stays missing."""
    return None if value_bytes is None else value_bytes / BYTES_PER_MIB


def frame_runs(runs: Iterable[tuple[RunEntry, RunDigest | None]]) -> pd.DataFrame:
    """The listing: one row a run, those without a digest with their name only."""
    return pd.DataFrame([_run_row(entry, digest) for entry, digest in runs])


def _run_row(entry: RunEntry, digest: RunDigest | None) -> dict[str, Any]:
    manifest = entry.manifest
    times = digest.step_time_ns if digest else None
    return {
        "run": entry.id,
        "status": digest.status if digest else "unreadable",
        "step time (ms)": ms(times.median if times else None),
        "exposed (ms)": ms(digest.exposed_ns if digest else None),
        "overlap": digest.overlap_ratio if digest else None,
        "peak allocated (MiB)": mib(digest.peak_allocated_bytes if digest else None),
        "ranks": manifest.world_size if manifest else None,
        "plan": wording.describe_plan(manifest) if manifest else "",
        "recorded (UTC)": pd.to_datetime(manifest.created_unix_ns) if manifest else pd.NaT,
        "name": manifest.name if manifest else "",
        "tags": ", ".join(manifest.tags) if manifest else "",
    }


def frame_breakdown(breakdown: StepBreakdown) -> pd.DataFrame:
    """The parts of one step, in order, and the step that they add up to."""
    rows = [
        {
            "part": find_metric(f"{part.name}_ns").label,
            "time (ms)": ms(part.duration_ns),
            "share of the step": part.ratio,
            "meaning": find_metric(f"{part.name}_ns").definition,
        }
        for part in breakdown.parts
    ]
    total = {
        "part": "= step",
        "time (ms)": ms(breakdown.step_time_ns),
        "share of the step": 1.0,
        "meaning": find_metric("step_time_ns").definition,
    }
    return pd.DataFrame([*rows, total])


def frame_owners(owners: Sequence[ExposedOwner]) -> pd.DataFrame:
    """Who is waited for, most exposed first."""
    return pd.DataFrame(
        [
            {
                "unit": name_owner(owner),
                "collective": format_kind(owner.kind),
                "phase": owner.phase,
                "exposed (ms)": ms(owner.exposed_ns),
                "of it floor (ms)": ms(owner.floor_ns),
                "share of the step": owner.step_ratio,
                "in flight (ms)": ms(owner.duration_ns),
                "per step": owner.count_per_step,
            }
            for owner in owners
        ]
    )


def name_owner(owner: ExposedOwner) -> str:
    """The unit that is waited for."""
    return "(outside FSDP)" if owner.fqn is None else format_unit(owner.fqn)


def frame_steps(points: Sequence[StepPoint]) -> pd.DataFrame:
    """Step times over steps."""
    return pd.DataFrame(
        [
            {
                "step": point.step,
                "step time (ms)": ms(point.step_time_ns),
                "communication (ms)": ms(point.communication_ns),
                "exposed (ms)": ms(point.exposed_ns),
                "counts": point.is_timed,
            }
            for point in points
        ]
    )


def frame_memory(steps: Sequence[MemoryOfStep]) -> pd.DataFrame:
    """The highest memory of each step."""
    return pd.DataFrame(
        [
            {
                "step": step.step,
                "allocated (MiB)": mib(step.highest_allocated_bytes),
                "reserved (MiB)": mib(step.highest_reserved_bytes),
            }
            for step in steps
        ]
    )


def frame_peak(peak: PeakMoment) -> pd.DataFrame:
    """What fills memory at its highest moment, by category."""
    return pd.DataFrame(
        [
            {
                "category": wording.name_category(category.category),
                "at the peak (MiB)": mib(category.bytes),
            }
            for category in peak.categories
        ]
    )


def frame_scalar(series: ScalarSeries) -> pd.DataFrame:
    """One logged number over steps."""
    return pd.DataFrame({"step": series.steps, series.name: series.values})


def frame_units(units: Sequence[UnitCost]) -> pd.DataFrame:
    """What each unit costs per step, in order of execution."""
    return pd.DataFrame([_unit_row(unit) for unit in units])


def _unit_row(unit: UnitCost) -> dict[str, Any]:
    return {
        "unit": format_unit(unit.fqn),
        "exposed (ms)": ms(unit.exposed_ns),
        "forward (ms)": ms(unit.forward_ns),
        "backward (ms)": ms(unit.backward_ns),
        "recompute (ms)": ms(unit.recompute_ns),
        "copies (ms)": ms(unit.copies_ns),
        **_collective_columns("all-gather", unit.all_gather),
        **_collective_columns("reduce-scatter", unit.reduce_scatter),
        **_collective_columns("all-reduce", unit.all_reduce),
        "prefetched per step": unit.prefetched_per_step,
        "parameters": unit.num_parameters,
        "unsharded (MiB)": mib(unit.unsharded_bytes),
        "reshard after forward": str(unit.reshard_after_forward),
        "class": unit.module_class,
    }


def _collective_columns(name: str, collective: UnitCollective) -> dict[str, Any]:
    if collective.count_per_step == 0 and name == "all-reduce":
        return {}
    return {
        f"{name}: exposed (ms)": ms(collective.exposed_ns),
        f"{name}: duration (ms)": ms(collective.median_ns),
        f"{name}: per step": collective.count_per_step,
        f"{name}: message (MiB)": mib(collective.bytes),
        f"{name}: bus (GB/s)": gb_per_s(collective.bus_bytes_per_s),
    }


def gb_per_s(rate: float | None) -> float | None:
    """Bytes per second as GB/s; what is missing stays missing."""
    return None if rate is None else rate / BYTES_PER_GB


def frame_collectives(unit: UnitCost) -> pd.DataFrame:
    """The collectives of one unit, one row a kind that it has."""
    members = {
        "all-gather": unit.all_gather,
        "reduce-scatter": unit.reduce_scatter,
        "all-reduce": unit.all_reduce,
    }
    return pd.DataFrame(
        [
            {
                "collective": name,
                "per step": collective.count_per_step,
                "message (MiB)": mib(collective.bytes),
                "ranks": collective.group_size,
                "duration (ms)": ms(collective.median_ns),
                "exposed per step (ms)": ms(collective.exposed_ns),
                "bus bandwidth (GB/s)": gb_per_s(collective.bus_bytes_per_s),
            }
            for name, collective in members.items()
            if collective.count_per_step
        ]
    )


def frame_spans(timeline: StepTimeline, manifest: RunManifest) -> pd.DataFrame:
    """Everything that a timeline draws, lane by lane."""
    spans = timeline.spans
    lanes = [lane_label(lane, manifest) for lane in timeline.lanes]
    drawn = pd.DataFrame(
        {
            "lane": [lanes[lane] for lane in spans.lane.tolist()],
            "what": [LOOKS[look].label for look in spans.look.tolist()],
            "start (ms)": spans.start_ns / NS_PER_MS,
            "duration (ms)": (spans.end_ns - spans.start_ns) / NS_PER_MS,
        }
    )
    return pd.concat([drawn, _frame_events(timeline, manifest, spans.event)], axis="columns")


def frame_event(timeline: StepTimeline, manifest: RunManifest, event: int) -> pd.DataFrame:
    """One event, with its whole duration: one row."""
    chosen = np.array([event])
    own = timeline.events.where(chosen)
    timed = pd.DataFrame(
        {
            "what": [format_kind(EventKind(int(own.kind[0])).label)],
            "start (ms)": (own.start_ns + timeline.event_shift_ns[chosen]) / NS_PER_MS,
            "duration (ms)": (own.end_ns - own.start_ns) / NS_PER_MS,
        }
    )
    return pd.concat([timed, _frame_events(timeline, manifest, chosen)], axis="columns")


def _frame_events(
    timeline: StepTimeline, manifest: RunManifest, chosen: NDArray[np.int64]
) -> pd.DataFrame:
    """What is known about the chosen events beside their times."""
    events = timeline.events.where(chosen)
    units = {unit.index: format_unit(unit.fqn) for unit in manifest.units}
    travels = events.bytes >= 0
    rates = bus_bytes_per_s(events, manifest.process_groups)
    return pd.DataFrame(
        {
            "rank": timeline.event_rank[chosen],
            "unit": [units.get(unit, "") for unit in events.unit.tolist()],
            "phase": [Phase(phase).label for phase in events.phase.tolist()],
            "exposed (ms)": np.where(travels, timeline.exposed_ns[chosen] / NS_PER_MS, np.nan),
            "message (MiB)": np.where(travels, events.bytes / BYTES_PER_MIB, np.nan),
            "bus bandwidth (GB/s)": rates / BYTES_PER_GB,
            "source": [Source(source).label for source in events.source.tolist()],
            "obtained": [method_words(Method(method)) for method in events.method.tolist()],
        }
    )


def frame_about(manifest: RunManifest, digest: RunDigest) -> pd.DataFrame:
    """What is known about the run as a whole: one row a fact, as text."""
    facts = {
        "run id": digest.run_id,
        "recorded (UTC)": manifest.created,
        "status": digest.status,
        "model": manifest.model.class_name,
        "plan": wording.describe_plan(manifest),
        "mesh": ", ".join(f"{name} {size}" for name, size in manifest.mesh.items()),
        "ranks": f"{digest.num_ranks} recorded of {digest.world_size}",
        "device": manifest.device_name or manifest.device_type,
        "source": manifest.source,
        "git commit": manifest.git_commit or "",
        "tags": ", ".join(manifest.tags),
        **{f"version: {name}": version for name, version in manifest.versions.items()},
        **{f"environment: {name}": value for name, value in manifest.environment.items()},
        **{f"config: {name}": str(value) for name, value in manifest.config.items()},
    }
    rows = [{"fact": fact, "value": value} for fact, value in facts.items() if value]
    return pd.DataFrame(rows)
