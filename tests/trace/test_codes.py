"""The codes are part of the file format: numbers may be added, but never changed."""

from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    DTYPES,
    WAIT_OF,
    EventKind,
    MemoryCategory,
    MemoryPoint,
    Method,
    Phase,
    Source,
    StepPart,
    Stream,
)
from fsdp_inspect.trace.tables import MemoryTable


def test_the_codes_of_events_are_those_of_schema_version_one():
    assert {kind.label: int(kind) for kind in EventKind} == {
        "step": 0, "data": 1, "forward": 2, "backward": 3, "recompute": 4, "optimizer": 5,
        "between_steps": 6, "compute": 7, "memory_copy": 8, "all_gather_copy_in": 10,
        "all_gather": 11, "all_gather_wait": 12,
        "all_gather_copy_out": 13, "reduce_scatter_copy_in": 20, "reduce_scatter": 21,
        "reduce_scatter_wait": 22, "all_reduce": 30, "all_reduce_wait": 31, "broadcast": 40,
        "all_to_all": 41, "barrier": 42, "point_to_point": 43, "other_collective": 44,
        "other_wait": 45, "garbage_collection": 50, "compilation": 51,
        "graph_capture": 52, "device_allocation": 53, "kernel_loading": 54,
    }  # fmt: skip


def test_the_parts_of_a_step_begin_where_events_cannot_reach():
    assert min(StepPart) == 100 > max(EventKind)


def test_codes_without_gaps_count_from_zero():
    for codes in (Phase, Stream, Source, Method, MemoryPoint, MemoryCategory):
        assert [int(code) for code in codes] == list(range(len(codes)))


def test_every_memory_category_is_a_column():
    assert {category.label for category in MemoryCategory} <= MemoryTable.DTYPES.keys()


def test_every_wait_is_for_a_collective():
    assert WAIT_OF.keys() <= COLLECTIVES


def test_an_unknown_dtype_is_code_zero():
    assert DTYPES[:3] == ("unknown", "float32", "bfloat16")
