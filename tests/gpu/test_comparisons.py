"""The comparisons of the GPU script, on hand-written times and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_inspect.analysis.memory.peak import Memory, measure_memory
from fsdp_inspect.trace.codes import EventKind, MemoryPoint, Phase
from fsdp_inspect.trace.tables import EventTable
from tests.builders import InMemoryRun, RunBuilder
from tests.gpu.clock import clock_row
from tests.gpu.copies import copy_rows
from tests.gpu.idle import measure_use
from tests.gpu.memory import MEMORY_STEP, counter_rows, snapshot_rows, tracker_row, units_row
from tests.gpu.outcome import Row, Verdict
from tests.gpu.setting import Setting
from tests.gpu.timing import compare, host_offset, match, spin_kernels
from tests.importing.snapshots import KIB, FakeAllocator, train
from tests.studies.benchmarks.profiler_trace import TraceEvent

SETTING = Setting("cpu", quick=False, scratch=Path(), limit_s=60)
US = 1_000
OFFSET = 70 * US
"""The lead of the recorder's clock over the profiler's."""


def kernel(name: str, stream: int, start: int, end: int, launch: int) -> TraceEvent:
    arguments = {"correlation": launch}
    return TraceEvent(name, "kernel", stream, start - OFFSET, end - OFFSET, arguments)


# One step, in µs of the recorder's clock. The second collective is issued on another stream at
# 110 and queues behind the first.
#
#   stream 7   |  gemm 0..100  |        wait        | gemm 300..400 |
#   stream 20           spin 50 ......... 200
#   stream 24                             spin 200 .. 280
TRACE = [
    kernel("gemm", 7, 0, 100 * US, 1),
    kernel("spin_kernel(long)", 24, 200 * US, 280 * US, 5),
    kernel("spin_kernel(long)", 20, 50 * US, 200 * US, 2),
    kernel("gemm", 7, 300 * US, 400 * US, 6),
]


def recorded_run() -> InMemoryRun:
    builder = RunBuilder(["", "layers.0"], warmup_steps=0)
    rank = builder.rank(0)
    rank.step(0, 0, 400 * US)
    late = 2 * US  # an event is seen shortly after the kernel that it follows
    for number, (start, end) in enumerate([(50, 200), (110, 280)]):
        rank.add(
            EventKind.ALL_GATHER,
            start * US,
            end * US + late * (number + 1),
            unit="layers.0",
            phase=Phase.FORWARD,
            group=0,
            sequence=number,
            need_ns=100 * US,
        )
    return builder.build()


def collectives() -> EventTable:
    events = recorded_run().events(0)
    return events.where(events.kind == EventKind.ALL_GATHER)


def test_kernels_that_stand_for_collectives_are_in_order_of_launch() -> None:
    assert [spin.tid for spin in spin_kernels(TRACE)] == [20, 24]


def test_a_collective_that_queued_is_compared_from_its_turn_on() -> None:
    matched = match(collectives(), spin_kernels(TRACE))
    assert (matched.turn_ns // US).tolist() == [50, 202]
    assert matched.offset_ns == OFFSET + 3 * US
    assert matched.end_errors_ns.tolist() == [1 * US, 1 * US]
    assert matched.start_errors_ns.tolist() == [3 * US, 1 * US]
    assert matched.duration_errors == pytest.approx([2 / 150, 2 / 80])


def test_collectives_that_fsdp_did_not_issue_keep_their_place_and_are_left_out() -> None:
    builder = RunBuilder(["layers.0"])
    rank = builder.rank(0)
    rank.step(0, 0, 400 * US)
    rank.add(EventKind.ALL_REDUCE, 50 * US, 200 * US)
    rank.add(EventKind.ALL_GATHER, 210 * US, 280 * US, unit="layers.0")
    events = builder.build().events(0)
    matched = match(events.where(events.kind != EventKind.STEP), spin_kernels(TRACE))
    assert (matched.kernel_end_ns + OFFSET).tolist() == [280 * US]


def test_kernels_expose_what_runs_beside_no_kernel_of_the_compute_stream() -> None:
    uses = measure_use(recorded_run().events(0), TRACE, OFFSET)
    assert {each.step: each.alone_ns for each in uses} == {0: 180 * US}


def test_the_tightest_mark_gives_the_offset_of_the_clocks() -> None:
    marks = [(1_000, 9_000), (20_000, 20_600)]
    annotation = "user_annotation"
    seen = [
        TraceEvent("host clock", annotation, 1, 3_000, 3_100, {}),
        TraceEvent("host clock", annotation, 1, 15_200, 15_300, {}),
        TraceEvent("host clock", "gpu_user_annotation", 7, 15_250, 15_400, {}),
    ]
    assert host_offset(seen, marks) == (5_050, 250)


def told(rows: Iterable[Row]) -> dict[str, tuple[str, Verdict]]:
    return {row.figure.name: (row.figure.value, row.verdict) for row in rows}


def test_a_run_and_a_trace_of_the_same_step_fill_the_table() -> None:
    rows = told(compare(SETTING, recorded_run(), range(1), TRACE, OFFSET))
    assert rows == {
        "collectives that both saw": ("2 recorded, 2 kernels", Verdict.HOLDS),
        "error of the starts of collectives": ("2.0 µs (p90 2.8 µs)", Verdict.SHOWN),
        "error of the ends of collectives": ("1.0 µs (p90 1.0 µs)", Verdict.SHOWN),
        "error of the durations of collectives": ("1.9 % (p90 2.4 %)", Verdict.HOLDS),
        "device times on the host's clock against the profiler's": ("+3.0 µs", Verdict.SHOWN),
        "exposed time of a step against that of kernels": ("+2.22 %", Verdict.MISSED),
        "the host is behind the device": ("0.0 %", Verdict.SHOWN),
        "kernels while the host is behind": ("0.0 %", Verdict.SHOWN),
        "kernels while it is not": ("89.8 %", Verdict.SHOWN),
        "exposed time against that of kernels while the host is not behind": (
            "2.2 %",
            Verdict.SHOWN,
        ),
    }


def test_a_collective_that_only_the_profiler_saw_ends_the_comparison() -> None:
    trace = [*TRACE, kernel("spin_kernel(long)", 20, 300 * US, 310 * US, 9)]
    rows = told(compare(SETTING, recorded_run(), range(1), trace, OFFSET))
    assert rows == {"collectives that both saw": ("2 recorded, 3 kernels", Verdict.MISSED)}


def copies_trace() -> list[TraceEvent]:
    """Two all-gathers; the host launches a copy inside each, 100 us before the device runs it.

    On another stream, a copy fills the output with the values of emulated ranks.
    """

    def ranged(name: str, start: int, end: int) -> TraceEvent:
        return TraceEvent(name, "user_annotation", 1, start - OFFSET, end - OFFSET, {})

    def launched(at: int, correlation: int, thread: int = 1) -> TraceEvent:
        arguments = {"correlation": correlation}
        return TraceEvent("launch", "cuda_driver", thread, at - OFFSET, at - OFFSET, arguments)

    trace = []
    for number, start in enumerate((0, 400 * US)):
        first = 10 * (number + 1)
        trace += [
            ranged(f"FSDP::all_gather (layers.{number})", start, start + 50 * US),
            launched(start + 10 * US, first),
            launched(start + 20 * US, first + 1),
            launched(start + 30 * US, first + 2),
            launched(start + 30 * US, first + 3, thread=2),
            launched(start + 40 * US, first + 5),
            kernel("values_of_ranks", 28, start + 150 * US, start + 390 * US, first + 5),
            kernel("foreach_copy", 20, start + 110 * US, start + 130 * US, first),
            kernel("split_copy", 20, start + 140 * US, start + 150 * US, first + 1),
            kernel("fsdp_inspect_spin", 24, start + 150 * US, start + 300 * US, first + 2),
            kernel("gemm", 7, start + 150 * US, start + 350 * US, first + 3),
            ranged(
                f"FSDP::all_gather_copy_out (layers.{number})", start + 60 * US, start + 90 * US
            ),
            launched(start + 70 * US, first + 4),
            kernel("split_copy", 7, start + 300 * US, start + 320 * US, first + 4),
        ]
    return trace


def copied(*, into_ends: int) -> EventTable:
    """The recorded copies of `copies_trace`; the copies in end `into_ends` us after their start."""
    builder = RunBuilder(["", "layers.0", "layers.1"], warmup_steps=0)
    rank = builder.rank(0)
    rank.step(0, 0, 900 * US)
    for number, start in enumerate((0, 400 * US)):
        unit = f"layers.{number}"
        begin = start + 108 * US
        rank.add(EventKind.ALL_GATHER_COPY_IN, begin, begin + into_ends * US, unit=unit)
        out = start + 299 * US
        rank.add(EventKind.ALL_GATHER_COPY_OUT, out, out + 22 * US, unit=unit)
    return builder.build().events(0)


def test_copies_are_compared_with_the_kernels_launched_inside_their_ranges() -> None:
    rows = told(copy_rows(SETTING, copied(into_ends=46), copies_trace(), OFFSET))
    assert rows == {
        "copies into all-gathers that hold their kernels": ("2 of 2", Verdict.HOLDS),
        "copies into all-gathers: longest idle time before the kernels": ("2.0 µs", Verdict.HOLDS),
        "copies into all-gathers: recorded less kernels": ("6.0 µs (p90 6.0 µs)", Verdict.SHOWN),
        "copies out of all-gathers that hold their kernels": ("2 of 2", Verdict.HOLDS),
        "copies out of all-gathers: longest idle time before the kernels": (
            "1.0 µs",
            Verdict.HOLDS,
        ),
        "copies out of all-gathers: recorded less kernels": ("2.0 µs (p90 2.0 µs)", Verdict.SHOWN),
    }


def test_a_copy_that_is_recorded_without_its_duration_is_missed() -> None:
    rows = told(copy_rows(SETTING, copied(into_ends=0), copies_trace(), OFFSET))
    name = "copies into all-gathers that hold their kernels"
    assert rows[name] == ("0 of 2", Verdict.MISSED)


def test_a_copy_that_is_marked_before_its_stream_waits_for_a_reshard_is_missed() -> None:
    late = 6_000 * US
    trace = [
        replace(event, start_ns=event.start_ns + late, end_ns=event.end_ns + late)
        if event.name in ("foreach_copy", "split_copy") and event.tid == 20
        else event
        for event in copies_trace()
    ]
    rows = told(copy_rows(SETTING, copied(into_ends=6_046), trace, OFFSET))
    assert rows["copies into all-gathers that hold their kernels"] == ("2 of 2", Verdict.HOLDS)
    name = "copies into all-gathers: longest idle time before the kernels"
    assert rows[name] == ("6002.0 µs", Verdict.MISSED)


def test_a_copy_that_only_the_profiler_saw_is_missed() -> None:
    events = copied(into_ends=46)
    without = events.where(events.kind == EventKind.STEP)
    [first, *_] = copy_rows(SETTING, without, copies_trace(), OFFSET)
    assert first.figure.value == "0 recorded, 2 in the trace"
    assert first.verdict is Verdict.MISSED


@pytest.mark.parametrize(
    ("end", "value", "verdict"),
    [
        (1_500, "0.0 µs at most", Verdict.HOLDS),
        (61_000, "59.0 µs at most", Verdict.HOLDS),
        (-70_000, "71.0 µs at most", Verdict.MISSED),
    ],
)
def test_a_step_ends_between_two_readings_of_the_hosts_clock(
    end: int, value: str, verdict: Verdict
) -> None:
    row = clock_row(SETTING, {0: 0, 49: end}, {49: (1_000, 2_000)}, uncertainty_ns=10_000)
    assert (row.figure.value, row.verdict) == (value, verdict)


def recorded_memory() -> Memory:
    """Two steps with peaks of 700 and 800 bytes; values between readings are also known."""
    builder = RunBuilder(world_size=1, warmup_steps=0)
    rank = builder.rank(0)
    rank.record["memory_from"] = "cuda_allocator"
    for step, peak in enumerate((700, 800)):
        rank.step(step, 100 * step, 100 * step + 100)
        rank.memory(MemoryPoint.STEP_END, 500, peak_allocated=peak, reserved=4096)
    rank.step(MEMORY_STEP, 300, 400, is_memory_step=True)
    rank.memory(MemoryPoint.PEAK, 990, activation=990)
    return measure_memory(builder.build())


def test_peaks_that_the_recorder_and_the_allocator_agree_on_hold() -> None:
    rows = counter_rows(SETTING, recorded_memory(), {0: (700, 4096), 1: (800, 4096)})
    assert {verdict for _, verdict in told(rows).values()} == {Verdict.HOLDS}


def test_a_peak_that_is_off_by_a_byte_or_absent_is_missed() -> None:
    rows = told(counter_rows(SETTING, recorded_memory(), {0: (701, 4096), 2: (1, 4096)}))
    allocated = rows["recorded peak allocated of each step"]
    assert allocated == ("1 B off at most; 2 of 2 steps", Verdict.MISSED)
    assert rows["recorded peak reserved of each step"][0] == "4.00 KiB off at most; 1 of 2 steps"


@pytest.mark.parametrize(("counted", "verdict"), [(1000, Verdict.HOLDS), (900, Verdict.MISSED)])
def test_the_tracker_may_be_off_by_two_percent(counted: int, verdict: Verdict) -> None:
    row = tracker_row(SETTING, recorded_memory(), {MEMORY_STEP: (counted, 4096)})
    assert row.verdict is verdict


def test_a_snapshot_is_compared_with_what_torch_counted(tmp_path: Path) -> None:
    allocator = FakeAllocator()
    path = train(allocator).dump(tmp_path / "snapshot.pickle")
    setting = Setting("cpu", quick=False, scratch=tmp_path, limit_s=60)
    peak, end = (64 + 12 + 2 * 10 + 32 + 30) * KIB, (64 + 12) * KIB
    rows = snapshot_rows(setting, path, peak, (end, allocator.reserved))
    assert {verdict for _, verdict in told(rows).values()} == {Verdict.HOLDS}
    assert units_row(setting, {"layers.0", "layers.1"}).verdict is Verdict.HOLDS
    assert units_row(setting, {"layers.0", "layers.2"}).verdict is Verdict.MISSED
