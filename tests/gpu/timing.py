"""Compare CUDA event times with kernel times: recorder and torch.profiler on the same steps.

Every emulated collective is one spinning kernel on the stream on which FSDP issues it. Recorder and
profiler both count in the host's order: the recorder's n-th collective is the n-th by the
profiler's correlation id. A collective that is queued behind another collective of its communicator
begins after it (`analysis.shared_collectives`). This begin is compared with the start of the
kernel.

[Note: two clocks] The profiler has its own clock. The offset is the median difference of the ends
of all pairs. The rest after subtracting the offset is the error of each time. The offset is also
compared with a measurement of the host, which read its clock around marks in the trace.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_inspect.analysis.shared_collectives import queue_up
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import COLLECTIVES
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable
from tests.gpu.copies import copy_rows
from tests.gpu.idle import StepUse, measure_use, split_kernels
from tests.gpu.outcome import Row, failed, shown, spread, unavailable
from tests.gpu.setting import (
    NEEDS_CUDA,
    ONE_NODE,
    Setting,
    emulated_training,
    expect_healthy,
    make_recorder,
    synchronize,
)
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.profiler_trace import TraceEvent, export_trace, named, read_trace

WARMUP_STEPS = 3
_PROFILED_STEPS = 8
_MARK = "host clock"
_REGROUPED = "regrouped"

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Matched:
    """FSDP's collectives in both sources, in ns, each on the clock of its source; shape (n,)."""

    turn_ns: Times
    """The recorded time of its turn on the communicator."""
    end_ns: Times
    kernel_start_ns: Times
    kernel_end_ns: Times

    @property
    def offset_ns(self) -> int:
        """The recorder's clock minus the profiler's."""
        return round(float(np.median(self.end_ns - self.kernel_end_ns)))

    @property
    def start_errors_ns(self) -> Times:
        """The differences of the starts, on one clock."""
        return np.asarray(np.abs(self.turn_ns - self.kernel_start_ns - self.offset_ns))

    @property
    def end_errors_ns(self) -> Times:
        """The differences of the ends, on one clock."""
        return np.asarray(np.abs(self.end_ns - self.kernel_end_ns - self.offset_ns))

    @property
    def duration_errors(self) -> NDArray[np.float64]:
        """The relative errors of the durations, independent of any offset."""
        kernels = self.kernel_end_ns - self.kernel_start_ns
        return np.asarray(np.abs(self.end_ns - self.turn_ns - kernels) / kernels, dtype=np.float64)


def measure(setting: Setting) -> Iterator[Row]:
    """Measure errors of single collectives, the exposed time of steps, then copies in groups."""
    trace, marks = _record_and_profile(setting, "run")
    run = open_run(setting.scratch / "run")
    host = host_offset(trace, marks)
    yield _marks_row(setting, len(marks), host)
    steps = range(WARMUP_STEPS, WARMUP_STEPS + _num_steps(setting))
    if setting.is_cuda:
        yield from compare(setting, run, steps, trace, host[0])
        yield from _copy_rows(setting, run, steps, trace)
        keep(setting, "run")
    else:
        yield unavailable("times of collectives against the profiler's kernels", NEEDS_CUDA)
    trace, _ = _record_and_profile(setting, _REGROUPED, reshard_after_forward="2")
    if setting.is_cuda:
        run = open_run(setting.scratch / _REGROUPED)
        yield from _copy_rows(setting, run, steps, trace, ", reshard_after_forward=2")
        keep(setting, _REGROUPED)


def keep(setting: Setting, name: str) -> None:
    """Keep the run and the trace of that name for a later look at both."""
    setting.kept.mkdir(exist_ok=True)
    shutil.copytree(setting.scratch / name, setting.kept / name)
    shutil.copy(_trace_of(setting.scratch, name), setting.kept)


def _copy_rows(
    setting: Setting, run: RunSource, steps: range, trace: list[TraceEvent], suffix: str = ""
) -> Iterator[Row]:
    events = run.events(0, steps=list(steps))
    collectives, spins = events.where(np.isin(events.kind, list(COLLECTIVES))), spin_kernels(trace)
    if len(collectives) == len(spins) > 0:
        offset_ns = match(collectives, spins).offset_ns
        yield from copy_rows(setting, events, trace, offset_ns, suffix=suffix)
    else:
        both = f"{len(collectives)} collectives recorded, {len(spins)} kernels"
        yield failed(f"copies{suffix}", f"{both}. Expected as many: they give the clocks' offset.")


def compare(
    setting: Setting, run: RunSource, steps: range, trace: list[TraceEvent], host_offset_ns: int
) -> Iterator[Row]:
    """Compare a run and a trace of the same steps.

    Args:
        setting: The setting of the measurement.
        run: The recording.
        steps: The profiled steps, which are all timed.
        trace: The events of the profiler.
        host_offset_ns: The host's clock minus the profiler's.
    """
    events = run.events(0, steps=list(steps))
    spins = spin_kernels(trace)
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    both = f"{len(collectives)} recorded, {len(spins)} kernels"
    how = f"Counted: all collectives of {len(steps)} steps on {setting.place}, {ONE_NODE}."
    is_equal = len(collectives) == len(spins) > 0
    yield setting.judge.exact(
        Figure(name="collectives that both saw", value=both, aim="as many", how=how),
        holds=is_equal,
    )
    if not is_equal:
        return
    matched = match(collectives, spins)
    yield from _time_rows(setting, matched, len(steps))
    yield _clock_row(matched, host_offset_ns)
    uses = list(measure_use(events, trace, matched.offset_ns))
    exposed = {each.step: each.alone_ns for each in uses}
    points = measure_step_times(run).over_steps
    recorded = {point.step: point.exposed_ns for point in points if point.step in steps}
    yield _exposed_row(setting, recorded, exposed)
    yield from _use_rows(setting, uses)


def spin_kernels(trace: list[TraceEvent]) -> list[TraceEvent]:
    """The kernels that represent collectives, in the order in which the host launched them."""
    spins, _ = split_kernels(trace)
    return sorted(spins, key=_launched)


def match(collectives: EventTable, spins: list[TraceEvent]) -> Matched:
    """Pair the n-th issued collective and the n-th kernel, for those that FSDP issued.

    Args:
        collectives: The collectives of one rank; as many as kernels.
        spins: The kernels in order of launch.
    """
    order = np.lexsort((collectives.sequence, collectives.issue_ns))
    ordered = collectives.where(order)
    turns = queue_up(ordered).turn_ns
    starts = np.array([spin.start_ns for spin in spins], dtype=np.int64)
    ends = np.array([spin.end_ns for spin in spins], dtype=np.int64)
    by_fsdp = ordered.unit >= 0
    return Matched(turns[by_fsdp], ordered.end_ns[by_fsdp], starts[by_fsdp], ends[by_fsdp])


def _launched(kernel: TraceEvent) -> tuple[int, int]:
    return int(kernel.arguments.get("correlation", 0)), kernel.start_ns


def _record_and_profile(
    setting: Setting, name: str, **settings: Any
) -> tuple[list[TraceEvent], list[tuple[int, int]]]:
    """Run the steps; returns the trace, and the host's clock before and after each mark."""
    marks: list[tuple[int, int]] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_cuda else [])]
    with (
        emulated_training(setting, ONE_NODE, **settings) as workload,
        make_recorder(workload, setting.scratch / name) as recorder,
    ):
        loop = workload.loop(recorder)
        for step in range(WARMUP_STEPS):
            loop.run_step(step)
        synchronize(setting)
        with profile(activities=activities) as profiler:
            for step in range(WARMUP_STEPS, WARMUP_STEPS + _num_steps(setting)):
                marks.append(_mark())
                loop.run_step(step)
            synchronize(setting)
        expect_healthy(recorder)
    path = _trace_of(setting.scratch, name)
    export_trace(profiler, path)
    return read_trace(path), marks


def _mark() -> tuple[int, int]:
    before = time.perf_counter_ns()
    with record_function(_MARK):
        pass
    return before, time.perf_counter_ns()


def host_offset(trace: list[TraceEvent], marks: list[tuple[int, int]]) -> tuple[int, int]:
    """The host's clock minus the profiler's, by the tightest mark, and its uncertainty."""
    seen = [event for event in named(trace, _MARK) if event.category == "user_annotation"]
    pairs = zip(marks, seen, strict=True)
    bounds = [(before - mark.start_ns, after - mark.end_ns) for (before, after), mark in pairs]
    low, high = min(bounds, key=lambda bound: bound[1] - bound[0])
    return (low + high) // 2, abs(high - low) // 2


def _time_rows(setting: Setting, matched: Matched, num_steps: int) -> Iterator[Row]:
    kernels = matched.kernel_end_ns - matched.kernel_start_ns
    how = (
        f"Measured: {len(kernels)} FSDP collectives of {num_steps} steps on {setting.place}, "
        f"{ONE_NODE} emulated, kernels of {format_ns(float(np.median(kernels)))} in the median; "
        "|recorded - kernel|, one constant offset between the two clocks taken away."
    )
    for what, errors in (("starts", matched.start_errors_ns), ("ends", matched.end_errors_ns)):
        yield shown(
            Figure(
                name=f"error of the {what} of collectives",
                value=spread(errors.tolist(), 1e-3, "µs"),
                how=how,
                numbers=_numbers(errors, "ns"),
            )
        )
    relative = matched.duration_errors
    yield setting.judge.aimed(
        Figure(
            name="error of the durations of collectives",
            value=spread(relative.tolist(), 100, "%"),
            aim="median < 3 %",
            how=f"{how} Durations: relative to the kernel's, free of any offset.",
            numbers=_numbers(relative, "ratio"),
        ),
        holds=float(np.median(relative)) < 0.03,
    )


def _numbers(errors: NDArray[np.number], unit: str) -> dict[str, float]:
    return {
        f"median_{unit}": float(np.median(errors)),
        f"p90_{unit}": float(np.quantile(errors, 0.9)),
        f"highest_{unit}": float(np.max(errors)),
    }


def _clock_row(matched: Matched, host_offset_ns: int) -> Row:
    difference = matched.offset_ns - host_offset_ns
    return shown(
        Figure(
            name="device times on the host's clock against the profiler's",
            value=f"{difference / 1e3:+.1f} µs",
            how=(
                "Measured: the offset that the ends of collectives give, less the one between "
                "host marks in the trace and the host's own clock (its uncertainty: see there)."
            ),
            numbers={"difference_ns": difference},
        )
    )


def _marks_row(setting: Setting, num_marks: int, host: tuple[int, int]) -> Row:
    return shown(
        Figure(
            name="uncertainty of the host's clock against the profiler's",
            value=f"±{host[1] / 1e3:.1f} µs",
            how=f"Measured: the tightest of {num_marks} marks on {setting.place}.",
            numbers={"uncertainty_ns": host[1]},
        )
    )


def _exposed_row(setting: Setting, recorded: dict[int, int], kernels: dict[int, int]) -> Row:
    ratios = [recorded[step] / kernels[step] - 1 for step in recorded if kernels.get(step)]
    middle = statistics.median(ratios)
    shown_ns = statistics.median(recorded.values()), statistics.median(kernels.values())
    return setting.judge.within(
        "exposed time of a step against that of kernels",
        middle,
        0.02,
        interval=f"{100 * min(ratios):+.2f} % to {100 * max(ratios):+.2f} %",
        how=(
            f"Measured: median and range over {len(ratios)} steps of recorded / kernels - 1 "
            f"({format_ns(shown_ns[0])} and {format_ns(shown_ns[1])} in the median). Recorded: "
            "from the moment the compute stream waits to the end of the collective. Kernels: "
            "a collective's runs and none on the compute stream; gaps between kernels beside "
            "a collective count there, and not here."
        ),
        numbers={"median_ratio": middle, "lowest": min(ratios), "highest": max(ratios)},
    )


def _use_rows(setting: Setting, steps: list[StepUse]) -> Iterator[Row]:
    how = (
        f"Measured: median and range over {len(steps)} steps on {setting.place}, {ONE_NODE}, with "
        "the profiler: kernels on the compute stream, {where}, outside the exposed parts."
    )
    behind = [each.behind_ratio for each in steps]
    yield _use_row("the host is behind the device", behind, f"{how.partition(':')[0]}.")
    idle, full = (
        ([each.busy_behind_ratio for each in steps], "while the host is behind"),
        ([each.busy_ahead_ratio for each in steps], "while it is not"),
    )
    for ratios, where in (idle, full):
        yield _use_row(f"kernels {where}", ratios, how.format(where=where))
    errors = [each.exposed_ns / each.alone_ahead_ns - 1 for each in steps if each.alone_ahead_ns]
    yield _use_row(
        "exposed time against that of kernels while the host is not behind",
        errors,
        "Measured: recorded / kernels - 1, as in the row of exposed time, but without kernels of "
        "collectives that run alone while the host is behind.",
    )


def _use_row(name: str, ratios: list[float], how: str) -> Row:
    middle = statistics.median(ratios) if ratios else float("nan")
    return shown(
        Figure(
            name=name,
            value=f"{100 * middle:.1f} %",
            interval=f"{100 * min(ratios):.1f} % to {100 * max(ratios):.1f} %" if ratios else "",
            how=how,
            numbers={"median_ratio": middle},
        )
    )


def _num_steps(setting: Setting) -> int:
    return 2 if setting.quick else _PROFILED_STEPS


def _trace_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.trace.json"
