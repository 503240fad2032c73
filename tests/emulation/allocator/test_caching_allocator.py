"""Scenarios with amounts that follow by hand from the documented rules of the allocator."""

import pytest

from fsdp_inspect.emulation.allocator.caching_allocator import CachingAllocator, DeviceFullError
from fsdp_inspect.emulation.allocator.settings import MIB, AllocatorSettings, parse_settings

KIB = 1 << 10
GIB = 1 << 30
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def test_small_requests_share_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(1)
    second = allocator.allocate(MIB)
    assert (first.size, second.size) == (512, MIB)
    assert second.address == first.address + 512
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(MIB)  # 2 MiB - 512 B - 1 MiB are left
    assert allocator.reserved_bytes == 4 * MIB


def test_requests_up_to_10_mib_share_a_segment_of_20_mib_and_larger_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MIB + 1)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == 32 * MIB  # 11 MiB in steps of 2 MiB


def test_a_rest_of_up_to_1_mib_stays_in_a_large_block() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(11 * MIB)
    assert block.size == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB


def test_the_smallest_free_block_that_fits_is_taken_and_its_rest_merges_again() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(100 * MIB), allocator.allocate(40 * MIB)
    allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    part = allocator.allocate(30 * MIB)
    assert part.address == small.address
    assert allocator.inactive_split_bytes == 10 * MIB
    allocator.free(part)
    assert allocator.inactive_split_bytes == 0
    assert allocator.allocate(40 * MIB).address == small.address
    assert allocator.reserved_bytes == 170 * MIB


def test_a_free_block_serves_only_its_own_stream() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(50 * MIB, stream=1))
    allocator.allocate(50 * MIB, stream=2)
    assert allocator.reserved_bytes == 100 * MIB


def test_a_block_that_another_stream_uses_waits() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(50 * MIB)
    allocator.free(block, is_pending=True)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 50 * MIB)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.complete_free(block)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


def test_a_growing_request_fragments_segments_but_not_expandable_ones() -> None:
    def reserve(settings: AllocatorSettings) -> int:
        allocator = CachingAllocator(settings)
        for size in range(100, 200, 20):
            allocator.free(allocator.allocate(size * MIB))
        return allocator.reserved_bytes

    assert reserve(AllocatorSettings()) == (100 + 120 + 140 + 160 + 180) * MIB
    assert reserve(EXPANDABLE) == 180 * MIB


def test_expandable_segments_map_pages_of_2_and_20_mib_and_release_whole_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    small, large = allocator.allocate(1), allocator.allocate(21 * MIB)
    assert allocator.reserved_bytes == (2 + 40) * MIB
    allocator.allocate(10 * MIB)  # into the 19 MiB that are left of the second page
    assert allocator.reserved_bytes == 42 * MIB
    allocator.free(large)
    allocator.empty_cache()  # only the first page is entirely free
    assert allocator.reserved_bytes == 22 * MIB
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB


def test_a_full_device_releases_unused_segments_and_tries_again() -> None:
    allocator = CachingAllocator(AllocatorSettings(device_bytes=100 * MIB))
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (80 * MIB, 1)
    with pytest.raises(DeviceFullError):
        allocator.allocate(40 * MIB)


def test_blocks_above_max_split_size_are_not_split() -> None:
    allocator = CachingAllocator(parse_settings("max_split_size_mb:100"))
    allocator.free(allocator.allocate(200 * MIB))
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 250 * MIB
    allocator.allocate(190 * MIB)  # within 20 MiB of the free block
    assert allocator.reserved_bytes == 250 * MIB
    assert allocator.allocated_bytes == 250 * MIB


def test_garbage_collection_releases_idle_segments_only_below_a_memory_fraction() -> None:
    def reserve(text: str) -> int:
        allocator = CachingAllocator(parse_settings(text, device_bytes=GIB))
        allocator.free(allocator.allocate(400 * MIB))
        allocator.free(allocator.allocate(100 * MIB, stream=1))
        allocator.allocate(200 * MIB, stream=2)
        return allocator.reserved_bytes

    assert reserve("garbage_collection_threshold:0.4") == 700 * MIB
    limited = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"
    assert reserve(limited) == 300 * MIB


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        ("4", 1200 * MIB, 1280 * MIB),
        ("4", 1024 * MIB, 1024 * MIB),
        ("[256:1,512:2,>:4]", 300 * MIB, 300 * MIB),
        ("[256:1,512:2,>:4]", 600 * MIB, 768 * MIB),
        ("[256:1,512:2,>:4]", 1100 * MIB, 1280 * MIB),
    ],
)
def test_sizes_are_rounded_to_divisions_of_a_power_of_two(
    divisions: str, size: int, rounded: int
) -> None:
    allocator = CachingAllocator(parse_settings(f"roundup_power2_divisions:{divisions}"))
    assert allocator.allocate(size).size == rounded


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments",
        "expandable_segments:true",
        "max_split_size_mb:10",
        "garbage_collection_threshold:1.5",
        "roundup_power2_divisions:[300:2]",
        "backend:cudaMallocAsync",
        "no_such_setting:1",
    ],
)
def test_invalid_settings_name_the_value_and_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"'.+'.*Expected .+\. [A-Z].+\.$"):
        parse_settings(text)


def test_settings_are_read_back_from_their_own_text() -> None:
    text = (
        "expandable_segments:True,max_split_size_mb:128,large_segment_size_mb:40,"
        "max_non_split_rounding_mb:30,roundup_power2_divisions:[256:1,512:2,>:4],"
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"
    )
    settings = parse_settings(text)
    assert parse_settings(settings.text) == settings
    assert parse_settings("") == AllocatorSettings()
    assert AllocatorSettings().text == ""
