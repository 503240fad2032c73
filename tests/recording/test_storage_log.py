"""The log of storages: hand-written logs with exact bytes, and laws over random logs."""

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.recording.storage_log import Moment, StorageEvent, StorageLog, TrackedStorage
from fsdp_inspect.trace.codes import MemoryCategory, MemoryPoint, Phase
from fsdp_inspect.trace.tables import MemoryTable


class LogBuilder:
    """Writes a log in the terms of a step; the clock counts events."""

    def __init__(self) -> None:
        self.log = StorageLog()
        self.unit = -1
        self.phase = Phase.OUTSIDE
        self.recompute = False

    def now(self) -> Moment:
        return Moment(self.unit, self.phase, len(self.log.events), self.recompute)

    def alloc(self, num_bytes: int, category: MemoryCategory | None = None) -> int:
        storage = len(self.log.storages)
        self.log.storages.append(TrackedStorage(self.unit, category))
        self.resize(storage, num_bytes)
        return storage

    def resize(self, storage: int, num_bytes: int) -> None:
        self.log.events.append(StorageEvent(storage, num_bytes, self.now()))

    def free(self, storage: int) -> None:
        self.resize(storage, 0)

    def begin(self) -> None:
        self.log.begin(self.now())

    def mark(self, point: MemoryPoint, microbatch: int = 0) -> None:
        self.log.mark(point, microbatch, self.now())

    def finish(self) -> None:
        self.log.finish(self.now())


def forward_and_backward() -> LogBuilder:
    """100 B of parameters; unit 0 keeps 30 B for backward and drops 5 B, unit 1 needs 50 B."""
    step = LogBuilder()
    step.unit = 0
    step.alloc(100, MemoryCategory.SHARDED_PARAMETER)
    step.unit = -1
    step.begin()
    step.phase, step.unit = Phase.FORWARD, 0
    dropped = step.alloc(5)
    kept = step.alloc(30)
    step.free(dropped)
    step.mark(MemoryPoint.FORWARD_END)
    step.phase, step.unit = Phase.BACKWARD, 1
    scratch = step.alloc(50)
    step.free(kept)
    step.free(scratch)
    step.mark(MemoryPoint.BACKWARD_END, microbatch=1)
    step.phase, step.unit = Phase.OUTSIDE, -1
    step.finish()
    return step


def test_peak_is_the_first_moment_with_the_most_bytes_and_says_where_it_was():
    step = forward_and_backward().log.summarize()
    assert step.peak.total_bytes == 180
    assert step.peak.moment[:3] == (1, Phase.BACKWARD, 4)
    assert step.peak.by_category == {
        MemoryCategory.SHARDED_PARAMETER: 100,
        MemoryCategory.ACTIVATION: 30,
        MemoryCategory.TEMPORARY: 50,
    }


def test_peak_by_owner_says_which_unit_owns_what():
    step = forward_and_backward().log.summarize()
    assert step.peak.by_owner == {
        0: {MemoryCategory.SHARDED_PARAMETER: 100, MemoryCategory.ACTIVATION: 30},
        1: {MemoryCategory.TEMPORARY: 50},
    }


def test_step_starts_and_ends_with_what_rests():
    step = forward_and_backward().log.summarize()
    assert step.start.by_category == {MemoryCategory.SHARDED_PARAMETER: 100}
    assert step.end.owned == step.start.owned


def test_mark_holds_its_moment_and_the_peak_since_the_mark_before():
    forward_end, backward_end = forward_and_backward().log.summarize().marks
    assert (forward_end.instant.total_bytes, forward_end.peak_bytes) == (130, 135)
    assert (backward_end.instant.total_bytes, backward_end.peak_bytes) == (100, 180)
    assert backward_end.instant.moment.unit == 1


def test_mark_directly_after_another_has_the_present_as_its_peak():
    step = LogBuilder()
    step.begin()
    step.free(step.alloc(70))
    step.alloc(10)
    step.mark(MemoryPoint.FORWARD_END)
    step.mark(MemoryPoint.BACKWARD_START)
    step.finish()
    assert [mark.peak_bytes for mark in step.log.summarize().marks] == [70, 10]


def test_step_without_storages_has_empty_peaks():
    step = LogBuilder()
    step.begin()
    step.mark(MemoryPoint.STEP_END)
    step.finish()
    summary = step.log.summarize()
    assert summary.peak.total_bytes == 0
    assert summary.peak.by_owner == {}
    assert summary.marks[0].peak_bytes == 0


def test_what_was_freed_before_the_step_is_no_part_of_its_peak():
    step = LogBuilder()
    step.free(step.alloc(1000, MemoryCategory.INPUT))
    step.begin()
    step.alloc(10)
    step.finish()
    assert step.log.summarize().peak.total_bytes == 10


def test_storage_that_is_freed_and_allocated_again_by_resizing_keeps_its_category():
    step = LogBuilder()
    step.begin()
    unsharded = step.alloc(40)
    step.resize(unsharded, 0)
    step.resize(unsharded, 40)
    step.mark(MemoryPoint.AFTER_UNSHARD)
    step.finish()
    step.log.storages[unsharded].category = MemoryCategory.UNSHARDED_PARAMETER
    mark = step.log.summarize().marks[0]
    assert mark.instant.by_category == {MemoryCategory.UNSHARDED_PARAMETER: 40}


@pytest.mark.parametrize(
    ("phase", "recompute", "next_phase", "expected"),
    [
        pytest.param(
            Phase.FORWARD, False, Phase.BACKWARD, MemoryCategory.ACTIVATION, id="saved in forward"
        ),
        pytest.param(
            Phase.BACKWARD, True, Phase.BACKWARD, MemoryCategory.ACTIVATION, id="recomputed"
        ),
        pytest.param(Phase.OUTSIDE, False, Phase.BACKWARD, MemoryCategory.ACTIVATION, id="loss"),
        pytest.param(Phase.OUTSIDE, False, Phase.FORWARD, MemoryCategory.INPUT, id="batch"),
        pytest.param(Phase.DATA, False, Phase.FORWARD, MemoryCategory.INPUT, id="loaded"),
        pytest.param(
            Phase.BACKWARD, False, Phase.OPTIMIZER, MemoryCategory.TEMPORARY, id="gradient"
        ),
        pytest.param(
            Phase.OPTIMIZER, False, Phase.OUTSIDE, MemoryCategory.TEMPORARY, id="optimizer"
        ),
    ],
)
def test_unclassified_storage_that_outlives_its_phase_is_decided_by_where_it_was_made(
    phase, recompute, next_phase, expected
):
    step = LogBuilder()
    step.begin()
    step.phase, step.recompute = phase, recompute
    step.alloc(8)
    step.phase, step.recompute = next_phase, False
    step.alloc(1)
    step.finish()
    assert step.log.categories()[0] == expected


def test_unclassified_storage_that_dies_in_its_forward_is_temporary():
    step = LogBuilder()
    step.begin()
    step.phase = Phase.FORWARD
    step.free(step.alloc(8))
    step.phase = Phase.BACKWARD
    step.alloc(1)
    step.finish()
    assert step.log.categories()[0] == MemoryCategory.TEMPORARY


def test_activation_that_lives_into_the_next_microbatch_is_still_an_activation():
    step = LogBuilder()
    step.begin()
    step.phase = Phase.FORWARD
    logits = step.alloc(8)
    step.phase = Phase.BACKWARD
    step.alloc(1)
    step.phase = Phase.FORWARD
    step.free(logits)
    step.finish()
    assert step.log.categories()[logits] == MemoryCategory.ACTIVATION


def test_rows_follow_the_columns_of_the_memory_table():
    rows = [*forward_and_backward().log.summarize().rows(step=7)]
    everything = [dict(zip(MemoryTable.DTYPES, row, strict=True)) for row in rows]
    named, of_phases = everything[:5], everything[5:]
    assert [row["point"] for row in named] == [
        MemoryPoint.FORWARD_END,
        MemoryPoint.BACKWARD_END,
        MemoryPoint.PEAK,
        MemoryPoint.PEAK_BY_OWNER,
        MemoryPoint.PEAK_BY_OWNER,
    ]
    assert {row["step"] for row in named} == {7}
    assert [row["allocated"] for row in named] == [130, 100, 180, 130, 50]
    assert [row["unit"] for row in named] == [0, 1, 1, 0, 1]
    assert {row["point"] for row in of_phases} == {
        MemoryPoint.PHASE_PEAK,
        MemoryPoint.PHASE_PEAK_BY_OWNER,
        MemoryPoint.END_BY_OWNER,
    }


def test_each_phase_has_a_peak_and_its_owners_add_up_to_it():
    memory = forward_and_backward().log.summarize()
    assert [Phase(peak.moment.phase) for peak in memory.phases] == [Phase.FORWARD, Phase.BACKWARD]
    assert max(peak.total_bytes for peak in memory.phases) == memory.peak.total_bytes
    rows = [dict(zip(MemoryTable.DTYPES, row, strict=True)) for row in memory.rows(step=0)]
    for peak in memory.phases:
        owned = [
            row["allocated"]
            for row in rows
            if row["point"] == MemoryPoint.PHASE_PEAK_BY_OWNER and row["phase"] == peak.moment.phase
        ]
        assert sum(owned) == peak.total_bytes
    resting = [row["allocated"] for row in rows if row["point"] == MemoryPoint.END_BY_OWNER]
    assert sum(resting) == memory.end.total_bytes


def test_rows_say_what_the_tracker_cannot_know():
    for row in forward_and_backward().log.summarize().rows(step=0):
        named = dict(zip(MemoryTable.DTYPES, row, strict=True))
        assert {named["reserved"], named["active"], named["outside_allocator"]} == {-1}


operations = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 1000), st.sampled_from([-1, 0, 1])),
        st.tuples(st.just("resize"), st.integers(0, 1000), st.integers(0, 30)),
        st.tuples(st.just("mark"), st.just(0), st.just(0)),
        st.tuples(st.just("phase"), st.sampled_from([*Phase]), st.just(0)),
    ),
    max_size=60,
)


def replay(script: list[tuple[str, int, int]]) -> tuple[LogBuilder, list[int]]:
    """The log of a script, and the total after each of its operations, by definition."""
    step, sizes, totals = LogBuilder(), {}, [0]
    step.begin()
    for action, number, where in script:
        if action == "alloc":
            step.unit = where
            sizes[step.alloc(number)] = number
        elif action == "resize" and sizes:
            storage = where % len(sizes)
            step.resize(storage, number)
            sizes[storage] = number
        elif action == "mark":
            step.mark(MemoryPoint.AFTER_UNSHARD)
        elif action == "phase":
            step.phase = number
        totals.append(sum(sizes.values()))
    step.finish()
    return step, totals


@given(operations)
def test_peak_and_end_are_those_of_adding_up_live_sizes(script):
    step, totals = replay(script)
    summary = step.log.summarize()
    assert summary.peak.total_bytes == max(totals)
    assert summary.end.total_bytes == totals[-1]


@given(operations)
def test_categories_and_owners_each_add_up_to_the_total(script):
    summary = replay(script)[0].log.summarize()
    for instant in (summary.peak, summary.end, *(mark.instant for mark in summary.marks)):
        assert sum(instant.by_category.values()) == instant.total_bytes
        owned = [sum(categories.values()) for categories in instant.by_owner.values()]
        assert sum(owned) == instant.total_bytes


@given(operations)
def test_highest_peak_between_marks_is_the_peak_of_the_step(script):
    step, totals = replay([*script, ("mark", 0, 0)])
    summary = step.log.summarize()
    assert max(mark.peak_bytes for mark in summary.marks) == max(totals)
    assert all(mark.instant.total_bytes <= mark.peak_bytes for mark in summary.marks)


def test_a_pass_tells_what_was_alive_at_each_first_use_and_how_high_it_rose_before_the_next():
    step = LogBuilder()
    step.begin()
    step.phase, step.unit = Phase.FORWARD, 3
    gathered = step.alloc(1000, MemoryCategory.UNSHARDED_PARAMETER)
    step.mark(MemoryPoint.FORWARD_START)
    forward = step.log.begin_pass(3, microbatch=1)
    kept = step.alloc(10)
    step.log.use(forward, 0, step.now())
    step.free(step.alloc(70))
    step.log.use(forward, 2, step.now())
    step.free(step.alloc(40))
    step.mark(MemoryPoint.FORWARD_END)
    step.alloc(500)
    step.log.end_pass(forward)
    step.free(gathered)
    step.phase = Phase.BACKWARD
    step.free(kept)
    step.finish()
    memory = step.log.summarize()
    assert [(use.unit, use.parameter, use.microbatch) for use in memory.uses] == [
        (3, 0, 1),
        (3, 2, 1),
    ]
    assert [use.instant.total_bytes for use in memory.uses] == [1010, 1010]
    assert [use.peak_bytes for use in memory.uses] == [1080, 1050]
    assert [use.peak_compute_bytes for use in memory.uses] == [80, 50]
    assert [mark.peak_compute_bytes for mark in memory.marks] == [0, 80]
    rows = [dict(zip(MemoryTable.DTYPES, row, strict=True)) for row in memory.rows(step=7)]
    used = [row for row in rows if row["point"] == MemoryPoint.PARAMETER_USE]
    assert [(row["unit"], row["parameter"], row["peak_compute"]) for row in used] == [
        (3, 0, 80),
        (3, 2, 50),
    ]
    assert {row["parameter"] for row in rows if row not in used} == {-1}


def test_a_pass_that_did_not_end_tells_no_uses():
    step = LogBuilder()
    step.begin()
    step.log.use(step.log.begin_pass(0, microbatch=0), 0, step.now())
    step.finish()
    assert step.log.summarize().uses == ()
