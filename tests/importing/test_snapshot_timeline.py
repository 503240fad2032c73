"""Following the trace backwards gives the allocated memory, for any program."""

import numpy as np
from hypothesis import given, settings, strategies as st

from fsdp_inspect.importing.snapshot_contents import parse_snapshot
from fsdp_inspect.importing.snapshot_positions import follow_annotations
from fsdp_inspect.importing.snapshot_timeline import find_alive, follow_trace
from fsdp_inspect.trace.codes import MemoryCategory
from tests.cases import examples
from tests.importing.snapshots import KIB, FakeAllocator, train

operations = st.lists(
    st.tuples(st.sampled_from(["alloc", "free", "free later"]), st.integers(1, 5000)), max_size=40
)


def run_program(program):
    """The allocator after the program, and the allocated bytes after some entries of its trace."""
    allocator, held, course = FakeAllocator(segment_bytes=4096), {}, {}
    for operation, number in program:
        if operation == "alloc":
            address = allocator.alloc(number)
            held[address] = -(-number // 512) * 512
        elif held:
            address = sorted(held)[number % len(held)]
            allocator.free(address, completed=operation == "free")
            del held[address]
        course[len(allocator.trace)] = sum(held.values())
    return allocator, course


@settings(max_examples=examples(60))
@given(operations)
def test_the_timeline_is_what_the_allocator_counted(program):
    allocator, course = run_program(program)
    [device] = parse_snapshot(allocator.snapshot(), "it").devices
    timeline = follow_trace(device)
    for moment, counted in course.items():
        assert timeline.allocated[moment] == counted
    assert (timeline.reserved >= timeline.active).all()
    assert (timeline.active >= timeline.allocated).all()


@settings(max_examples=examples(60))
@given(operations, st.integers(0, 1000))
def test_what_is_alive_adds_up_to_what_is_allocated_at_every_moment(program, number):
    allocator, _ = run_program(program)
    snapshot = parse_snapshot(allocator.snapshot(entries=1 + number % 30), "it")
    timeline = follow_trace(snapshot.devices[0])
    for moment in range(len(timeline.allocated)):
        alive = find_alive(timeline, follow_annotations(snapshot.annotations), moment)
        assert alive.size.sum() == timeline.allocated[moment]


def alive_at(allocator, time_us):
    """The live KiB at a time, by category."""
    snapshot = parse_snapshot(allocator.snapshot(), "it")
    timeline = follow_trace(snapshot.devices[0])
    moment = int(np.searchsorted(timeline.time_us, time_us, side="right")) - 1
    alive = find_alive(timeline, follow_annotations(snapshot.annotations), moment)
    held = {
        category.label: int(alive.size[alive.category == category].sum()) // KIB
        for category in MemoryCategory
    }
    return {name: amount for name, amount in held.items() if amount}


def annotated(allocator, name, stage):
    return [
        one["time_us"]
        for one in allocator.annotations
        if (one["name"], one["stage"]) == (name, stage)
    ]


def test_what_a_reduction_leaves_behind_is_a_gradient_and_the_rest_a_buffer():
    allocator = train(FakeAllocator())
    reduced = annotated(allocator, "FSDP::post_backward_reduce (layers.1)", "END")[0]
    assert alive_at(allocator, reduced) == {
        "sharded_parameter": 64,
        "activation": 10,
        "sharded_gradient": 7,
    }


def test_a_reduction_that_the_trace_does_not_see_to_its_end_is_a_buffer():
    allocator = FakeAllocator()
    with allocator.inside("FSDP::pre_backward (layers.0)"):
        pass
    allocator.annotate("FSDP::post_backward_reduce (layers.0)", "START")
    allocator.alloc(21 * KIB)
    assert alive_at(allocator, allocator.time_us) == {"reduce_scatter_buffer": 21}


def test_gradients_before_their_reduction_are_unsharded():
    allocator = train(FakeAllocator())
    resharded = annotated(allocator, "FSDP::post_backward_accumulate (layers.1)", "END")[0]
    assert alive_at(allocator, resharded) == {
        "sharded_parameter": 64,
        "activation": 10,
        "unsharded_parameter": 30,
        "unsharded_gradient": 20,
    }


def test_blocks_that_wait_for_another_stream_are_active_and_not_allocated():
    allocator = FakeAllocator()
    allocator.alloc(1024)
    allocator.free(allocator.alloc(2048), completed=False)
    [device] = parse_snapshot(allocator.snapshot(), "it").devices
    assert (device.allocated_bytes, device.active_bytes) == (1024, 3072)
    assert device.inactive_split_bytes == device.reserved_bytes - 3072
