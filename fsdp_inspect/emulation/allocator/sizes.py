"""Round requests and choose segment sizes like CUDA's caching allocator.

Source: `round_size`, `roundup_power2_next_division`, `get_allocation_size` in
c10/cuda/CUDACachingAllocator.cpp and `roundup_power2_divisions` in c10/core/AllocatorConfig.cpp,
torch 2.13.
"""

from fsdp_inspect.emulation.allocator.settings import MIB, NUM_DIVISIONS, AllocatorSettings

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this size (`kMinBlockSize`)."""
SMALL_REQUEST_BYTES = MIB
"""The largest request of the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment size of the small pool (`kSmallBuffer`)."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From this size on, a new segment is as large as its first request (`kMinLargeAlloc`)."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""The rounding of such a segment (`kRoundLarge`)."""
_FIRST_POWER = MIB.bit_length() - 1
"""The power of two of the first entry of `roundup_power2_divisions`."""


def round_request(num_bytes: int, settings: AllocatorSettings) -> int:
    """Round a request up to the size of its block."""
    if num_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = _divisions_at(num_bytes, settings)
    if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
        return _next_division(num_bytes, divisions)
    return round_up(num_bytes, MIN_BLOCK_BYTES)


def size_segment(block_bytes: int, settings: AllocatorSettings) -> int:
    """The size of a new segment for a block."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return settings.large_segment_bytes
    return round_up(block_bytes, SEGMENT_ROUNDING_BYTES)


def round_up(num_bytes: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-num_bytes // multiple) * multiple


def _divisions_at(num_bytes: int, settings: AllocatorSettings) -> int:
    if not settings.roundup_power2_divisions:
        return 0
    power = num_bytes.bit_length() - 1
    index = min(max(power - _FIRST_POWER, 0), NUM_DIVISIONS - 1)
    return settings.roundup_power2_divisions[index]


def _next_division(num_bytes: int, divisions: int) -> int:
    """Round up to the next of the equal divisions between two powers of two."""
    floor = 1 << (num_bytes.bit_length() - 1)
    return num_bytes if num_bytes == floor else round_up(num_bytes, floor // divisions)
