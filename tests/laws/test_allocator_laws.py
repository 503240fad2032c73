"""Laws of the allocator model over random requests and settings."""

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from fsdp_inspect.emulation.allocator.blocks import Block
from fsdp_inspect.emulation.allocator.caching_allocator import CachingAllocator, DeviceFullError
from fsdp_inspect.emulation.allocator.settings import MIB, AllocatorSettings
from tests.cases import examples

SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB), st.just(10 * MIB)
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 2)),
        st.tuples(st.sampled_from(["free", "free later"]), st.integers(0, 1000), st.just(0)),
        st.tuples(st.sampled_from(["complete", "empty"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 40 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.5]),
    memory_fraction=st.sampled_from([1.0, 0.8]),
    device_bytes=st.sampled_from([None, 200 * MIB]),
)


def run(allocator: CachingAllocator, steps: list[tuple[str, int, int]]) -> list[Block]:
    """Apply steps and check the laws after each; returns the used blocks."""
    used: list[Block] = []
    for kind, number, stream in steps:
        if kind == "allocate":
            try:
                used.append(allocator.allocate(number, stream))
            except DeviceFullError:
                assert allocator.active_bytes < 200 * MIB
        elif kind.startswith("free") and used:
            allocator.free(used.pop(number % len(used)), is_pending=kind == "free later")
        elif kind == "complete":
            allocator.complete_frees()
        elif kind == "empty":
            allocator.empty_cache()
        check(allocator, used)
    return used


def check(allocator: CachingAllocator, used: list[Block]) -> None:
    """Blocks tile their segments, and the counters are the sums of the blocks."""
    blocks = sorted(allocator.blocks(), key=lambda block: block.address)
    for block, following in pairwise(blocks):
        assert block.address + block.size <= following.address
        if block.after is following:
            assert not (block.is_free and following.is_free), "free neighbours are merged"
    assert sum(block.size for block in blocks) == allocator.reserved_bytes
    assert sum(one.size for one in allocator.segments()) == allocator.reserved_bytes
    assert sum(block.size for block in used) == allocator.allocated_bytes
    assert allocator.allocated_bytes <= allocator.active_bytes <= allocator.reserved_bytes
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert all(block.is_used for block in used)


@settings(max_examples=examples(60), deadline=None)
@given(SETTINGS, STEPS)
def test_blocks_tile_the_segments_and_nothing_overlaps(
    chosen: AllocatorSettings, steps: list[tuple[str, int, int]]
) -> None:
    run(CachingAllocator(chosen), steps)


@settings(max_examples=examples(40), deadline=None)
@given(SETTINGS, STEPS)
def test_freeing_everything_and_emptying_the_cache_returns_all_memory(
    chosen: AllocatorSettings, steps: list[tuple[str, int, int]]
) -> None:
    allocator = CachingAllocator(chosen)
    for block in run(allocator, steps):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == []


@settings(max_examples=examples(30), deadline=None)
@given(SETTINGS, STEPS)
def test_equal_requests_give_equal_addresses(
    chosen: AllocatorSettings, steps: list[tuple[str, int, int]]
) -> None:
    first, second = (run(CachingAllocator(chosen), steps) for _ in range(2))
    assert [(b.address, b.size) for b in first] == [(b.address, b.size) for b in second]
