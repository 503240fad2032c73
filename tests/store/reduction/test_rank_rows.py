from fsdp_inspect.store.reduction.run_statistics import is_of_whole_step, summarise_rank
from fsdp_inspect.trace.codes import EventKind, MemoryPoint, StepPart
from fsdp_inspect.trace.tables import EventTable, MemoryTable
from tests.builders import RunBuilder, add_steady_step


def summary_of(rank):
    return summarise_rank(
        EventTable.from_rows(rank.events),
        MemoryTable.from_rows(rank.samples),
        memory_from="storage_tracker",
        rank=rank.rank,
    )


def steady_rank():
    rank = RunBuilder().rank(1)
    for step in range(2):
        add_steady_step(rank, step, start=1000 * step)
        rank.memory(MemoryPoint.STEP_END, 40 + step)
    return rank


def test_memory_stands_beside_the_parts_of_each_step():
    rows = summary_of(steady_rank())
    at_end = rows.where(rows.kind == StepPart.ALLOCATED_AT_END)
    assert (at_end.step.tolist(), at_end.bytes.tolist()) == ([0, 1], [40, 41])


def test_the_row_of_a_step_carries_its_collectives():
    rows = summary_of(steady_rank())
    step = rows.where(rows.kind == EventKind.STEP)
    assert (step.count.tolist(), step.bytes.tolist()) == ([7, 7], [388, 388])


def test_in_each_step_the_whole_comes_before_the_units_by_kind():
    rows = summary_of(steady_rank())
    assert rows.step.tolist() == sorted(rows.step.tolist())
    first = rows.where(rows.step == 0)
    whole = is_of_whole_step(first)
    assert whole.tolist() == sorted(whole.tolist(), reverse=True)
    assert first.kind[whole].tolist() == sorted(first.kind[whole].tolist())


def test_a_step_that_did_not_end_has_its_memory():
    rank = RunBuilder().rank(0)
    rank.data(0, 10)
    rank.memory(MemoryPoint.FORWARD_END, 70)
    assert summary_of(rank).kind.tolist() == [StepPart.PEAK_ALLOCATED]
