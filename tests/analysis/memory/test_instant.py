"""The live memory at an instant: from a history of all changes, or from the kept moments."""

from pathlib import Path

import pytest

from fsdp_inspect.analysis.memory.instant import measure_memory_instant
from fsdp_inspect.analysis.memory.step import measure_step_memory
from fsdp_inspect.recording.out_of_memory import FollowedStep, live_rows
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.reduction.memory_parts import samples_of
from fsdp_inspect.trace.live_memory import LiveHistory, LiveOwner
from tests.recording.test_storage_log import forward_and_backward

SAMPLE = Path(__file__).parents[3] / "samples/tiny-2-ranks"
STEP = 3


@pytest.fixture
def run():
    return open_run(SAMPLE)


def test_without_a_history_the_nearest_kept_moment_is_given(run):
    peak = measure_step_memory(run, rank=0, step=STEP).peak
    found = measure_memory_instant(run, rank=0, step=STEP, offset_ns=peak.offset_ns)
    assert found.phase == "backward"
    assert found.bytes == peak.highest_bytes == sum(row.bytes for row in found.rows)
    assert found.offset_ns in found.known_offsets_ns
    end = measure_memory_instant(run, rank=0, step=STEP, offset_ns=1 << 50)
    assert (end.phase, end.bytes) == ("resting", 7_039_340)
    assert measure_memory_instant(run, rank=0, step=STEP + 1, offset_ns=0) is None


def test_a_history_gives_every_instant(run, monkeypatch):
    readings = samples_of(run.memory(0), run.ranks[0].memory_from)
    start = int(readings.time_ns[readings.step == STEP].min())
    history = LiveHistory(
        step=STEP,
        owners=[
            LiveOwner(unit=1, category="activation", place="train.py:7"),
            LiveOwner(unit=-1, category="input"),
        ],
        start_bytes=[0, 50],
        time_ns=[start + 10, start + 20, start + 30],
        owner=[0, 1, 0],
        change_bytes=[100, -50, 200],
    )
    monkeypatch.setattr(run, "live_history", lambda rank: history)
    found = measure_memory_instant(run, rank=0, step=STEP, offset_ns=9)
    assert [(row.unit, row.bytes) for row in found.rows] == [("(no unit)", 50)]
    found = measure_memory_instant(run, rank=0, step=STEP, offset_ns=10)
    assert [row.bytes for row in found.rows] == [100, 50]
    assert found.rows[0].line == "train.py:7"
    found = measure_memory_instant(run, rank=0, step=STEP, offset_ns=30)
    (unit,) = found.units
    assert (unit.bytes, unit.categories[0].category, found.known_offsets_ns) == (
        300,
        "activation",
        (),
    )


def test_the_recorded_history_has_the_live_memory_after_every_event():
    log = forward_and_backward().log
    history = FollowedStep(0, log).history(str)
    held = dict(zip(range(len(history.owners)), history.start_bytes, strict=True))
    for time_ns, owner, change in zip(
        history.time_ns, history.owner, history.change_bytes, strict=True
    ):
        held[owner] += change
        expected = {(row.unit, row.category): row.bytes for row in live_rows(log, time_ns + 1, str)}
        named = {
            (history.owners[at].unit, history.owners[at].category): size
            for at, size in held.items()
            if size
        }
        assert named == expected
