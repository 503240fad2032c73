"""Compare recorded memory with torch's allocator: counters, storage tracker, snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fsdp_inspect.analysis.memory.peak import Memory, measure_memory
from fsdp_inspect.formatting import format_bytes
from fsdp_inspect.importing.snapshot import import_snapshot
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import MemoryPoint
from tests.gpu.outcome import Row, shown, unavailable
from tests.gpu.setting import (
    NEEDS_CUDA,
    ONE_NODE,
    Setting,
    emulated_training,
    expect_healthy,
    make_recorder,
)
from tests.studies.benchmarks.figures import Figure

_STEPS = 6
MEMORY_STEP = 3
_HISTORY = 500_000

Peaks = dict[int, tuple[int, int]]
"""torch's highest allocated and reserved bytes, by step."""


def measure(setting: Setting) -> Iterator[Row]:
    """Measure the peaks of every step, the composition of one, and a snapshot of two more steps."""
    snapshot = setting.scratch / "snapshot.pickle"
    with emulated_training(setting, ONE_NODE) as workload:
        peaks: Peaks = {}
        with make_recorder(
            workload, setting.scratch / "run", memory_steps=[MEMORY_STEP], warmup_steps=1
        ) as recorder:
            loop = workload.loop(recorder)
            for step in range(_STEPS):
                if setting.is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                loop.run_step(step)
                if setting.is_cuda:
                    peaks[step] = _read_peaks()
            expect_healthy(recorder)
        memory = measure_memory(open_run(setting.scratch / "run"))
        yield from counter_rows(setting, memory, peaks)
        yield tracker_row(setting, memory, peaks)
        if not setting.is_cuda:
            yield unavailable("memory snapshot: peak", NEEDS_CUDA)
            return
        # The backward runs in a thread of its own: its annotations need the last argument.
        torch.cuda.memory._record_memory_history(
            max_entries=_HISTORY, stacks="python", global_record_annotations=True
        )
        try:
            torch.cuda.reset_peak_memory_stats()
            bare = workload.loop()
            for step in range(_STEPS, _STEPS + 2):
                bare.run_step(step)
            counted = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    yield from snapshot_rows(setting, snapshot, peak, counted)
    yield units_row(
        setting, {unit.fqn for unit in open_run(setting.scratch / "run").manifest.units}
    )


def _read_peaks() -> tuple[int, int]:
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def counter_rows(setting: Setting, memory: Memory, peaks: Peaks) -> Iterator[Row]:
    """Compare recorded peaks with the allocator's; the error of a missing peak is 100%."""
    recorded = {
        row.step: (row.highest_allocated_bytes, row.highest_reserved_bytes)
        for row in memory.over_steps
    }
    for place, what in enumerate(("allocated", "reserved")):
        name = f"recorded peak {what} of each step"
        if not peaks:
            yield unavailable(name, NEEDS_CUDA)
            continue
        counted = {step: pair[place] for step, pair in peaks.items() if step != MEMORY_STEP}
        wrong = [step for step, value in counted.items() if _at(recorded, step, place) != value]
        off = max(abs((_at(recorded, step, place) or 0) - value) for step, value in counted.items())
        yield setting.judge.exact(
            Figure(
                name=name,
                value=f"{format_bytes(off)} off at most; {len(wrong)} of {len(counted)} steps",
                aim="equal",
                how=(
                    f"Compared: every step but the memory step on {setting.place}, {ONE_NODE} "
                    f"emulated, with torch.cuda.max_memory_{what}(), reset before each step "
                    f"(highest {format_bytes(max(counted.values()))})."
                ),
                numbers={"steps": len(counted), "wrong": len(wrong), "highest_off_bytes": off},
            ),
            holds=not wrong,
        )


def _at(recorded: dict[int, tuple[int, int | None]], step: int, place: int) -> int | None:
    return recorded[step][place] if step in recorded else None


def tracker_row(setting: Setting, memory: Memory, peaks: Peaks) -> Row:
    """Compare the total of the composition with the allocator's peak of the same step."""
    name = "storage tracker's peak in a memory step"
    if memory.peak is None:
        raise RuntimeError(f"Step {MEMORY_STEP} was to be a memory step and was none.")
    tracked = memory.peak.bytes
    how = f"Tracked: step {MEMORY_STEP} on {setting.place}, {ONE_NODE} emulated"
    if not peaks:
        value = format_bytes(tracked)
        how = f"{how}. It is not compared, because {NEEDS_CUDA}"
        return shown(Figure(name=name, value=value, how=how, numbers={"bytes": tracked}))
    counted = peaks[MEMORY_STEP][0]
    ratio = tracked / counted - 1
    return setting.judge.within(
        f"{name} against the allocator",
        ratio,
        0.02,
        how=(
            f"{how}: {format_bytes(tracked)} against {format_bytes(counted)} by "
            "torch.cuda.max_memory_allocated(), which rounds blocks up to 512 bytes and knows "
            "workspaces of libraries."
        ),
        numbers={"ratio": ratio, "tracked_bytes": tracked, "counted_bytes": counted},
    )


def snapshot_rows(
    setting: Setting, snapshot: Path, peak: int, counted: tuple[int, int]
) -> Iterator[Row]:
    """Compare an imported snapshot with torch's counters.

    Args:
        setting: The setting of the measurement.
        snapshot: The path of the pickle.
        peak: The highest allocated bytes during the history.
        counted: The allocated and reserved bytes at the snapshot.
    """
    import_snapshot(snapshot, setting.scratch / "imported")
    run = open_run(setting.scratch / "imported")
    table = run.memory(0)
    now = table.where(table.point == MemoryPoint.SNAPSHOT)
    imported = measure_memory(run).peak_allocated_bytes or 0
    how = (
        f"Compared: a snapshot after two steps on {setting.place} ({format_bytes(_size(snapshot))})"
        ", imported, with torch.cuda.max_memory_allocated() and, at its end, memory_allocated() "
        "and memory_reserved()."
    )
    yield setting.judge.exact(
        Figure(
            name="memory snapshot: peak",
            value=f"{format_bytes(imported)}, {imported - peak:+d} bytes off",
            aim="equal",
            how=how,
            numbers={"imported_bytes": imported, "counted_bytes": peak},
        ),
        holds=imported == peak,
    )
    ends = (int(now.allocated[0]), int(now.reserved[0]))
    yield setting.judge.exact(
        Figure(
            name="memory snapshot: allocated and reserved at its end",
            value=f"{format_bytes(ends[0])} and {format_bytes(ends[1])}",
            aim="equal",
            how=how,
            numbers={
                "allocated_off_bytes": ends[0] - counted[0],
                "reserved_off_bytes": ends[1] - counted[1],
            },
        ),
        holds=ends == counted,
    )


def units_row(setting: Setting, expected: set[str]) -> Row:
    """Compare the units that an imported snapshot names with those of the recorded run."""
    run = open_run(setting.scratch / "imported")
    names = {unit.fqn for unit in run.manifest.units}
    held = {position.fqn for position in measure_memory(run).positions} & expected
    return setting.judge.exact(
        Figure(
            name="memory snapshot: units",
            value=f"{len(names & expected)} of {len(expected)}, memory read in {len(held)}",
            aim="all, in at least 1",
            how=(
                "Compared: the units in the imported snapshot, which torch's annotations name, "
                f"with those of the recorded run. Others: {sorted(names - expected) or 'none'}."
            ),
        ),
        holds=expected <= names and bool(held),
    )


def _size(path: Path) -> int:
    return path.stat().st_size
