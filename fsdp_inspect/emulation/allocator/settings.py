"""Define the settings of CUDA's caching allocator, and parse `PYTORCH_ALLOC_CONF`.

Names and defaults are those of c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h, torch
2.13.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

MIB = 1 << 20
LARGE_SEGMENT_BYTES = 20 * MIB
"""The default of `large_segment_size_mb`."""
NUM_DIVISIONS = 16
"""Entries of `roundup_power2_divisions`: sizes from 1 MiB to 32 GiB, by power of two."""


class InvalidSettingsError(ValueError):
    """A text is no allocator setting; the message names the value and the expected form."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings that change which memory the allocator reserves."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Free blocks of this size or more are not split; None: all blocks are split."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """A request of `max_split_size_bytes` or more takes a free block up to this much larger."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """Segment size for requests from 1 MiB to 10 MiB; page size of large expandable segments."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Divisions between two powers of two, by power from 1 MiB; empty: multiples of 512 bytes."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the allowed memory above which idle blocks are released. Without a
    `memory_fraction` below 1, the allocator ignores it."""
    memory_fraction: float = 1.0
    """`set_per_process_memory_fraction`; 1: no limit but the device's memory."""
    device_bytes: int | None = None
    """Device memory that the allocator can have; None: unlimited."""

    @property
    def allowed_bytes(self) -> int | None:
        """The limit of `memory_fraction`; None without one."""
        if self.memory_fraction >= 1 or self.device_bytes is None:
            return None
        return int(self.memory_fraction * self.device_bytes)

    @property
    def text(self) -> str:
        """The settings that differ from the defaults, like `PYTORCH_ALLOC_CONF`."""
        defaults = AllocatorSettings()
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_size_bytes is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size_bytes // MIB}")
        if self.large_segment_bytes != defaults.large_segment_bytes:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        if self.max_non_split_rounding_bytes != defaults.max_non_split_rounding_bytes:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_bytes // MIB}")
        if self.roundup_power2_divisions:
            divisions = self.roundup_power2_divisions
            pairs = ",".join(f"{1 << power}:{n}" for power, n in enumerate(divisions))
            is_single = len(set(divisions)) == 1
            parts.append(f"roundup_power2_divisions:{divisions[0] if is_single else f'[{pairs}]'}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.memory_fraction < 1:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction:g}")
        return ",".join(parts)


DEFAULT_SETTINGS = AllocatorSettings()


def parse_settings(text: str, *, device_bytes: int | None = None) -> AllocatorSettings:
    """Parse the text of `PYTORCH_ALLOC_CONF`.

    Settings that do not change reserved memory of the device are accepted and ignored.

    Args:
        text: For example `expandable_segments:True,max_split_size_mb:512`. Empty: the defaults.
        device_bytes: Device memory that the allocator can have; None: unlimited.

    Raises:
        InvalidSettingsError: The text is invalid, or sets another allocator.
    """
    settings = AllocatorSettings(device_bytes=device_bytes)
    for name, value in _pairs("".join(text.split())):
        parse = _PARSERS.get(name)
        if parse is not None:
            settings = replace(settings, **parse(name, value))
        elif name not in _IGNORED:
            known = ", ".join(sorted({*_PARSERS, *_IGNORED}))
            raise InvalidSettingsError(
                f"Unknown allocator setting {name!r}. Expected one of {known}. Correct the name."
            )
    return settings


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at commas outside brackets, then at the first colon."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    pairs = []
    for part in filter(None, parts):
        name, colon, value = part.partition(":")
        if not (name and colon and value):
            raise InvalidSettingsError(
                f"Invalid allocator setting {part!r}. Expected name:value, for example "
                "expandable_segments:True. Write it like PYTORCH_ALLOC_CONF."
            )
        pairs.append((name, value))
    return pairs


def _bad(name: str, value: str, expected: str) -> InvalidSettingsError:
    return InvalidSettingsError(
        f"Invalid {name}: {value!r}. Expected {expected}. Correct the allocator settings."
    )


def _parse_bool(field: str, name: str, value: str) -> Mapping[str, bool]:
    if value not in ("True", "False"):
        raise _bad(name, value, "True or False")
    return {field: value == "True"}


def _parse_mib(field: str, name: str, value: str) -> Mapping[str, int]:
    if not value.isdecimal() or not 0 < int(value) < 1 << 30:
        raise _bad(name, value, "a whole number of MiB")
    return {field: int(value) * MIB}


def _parse_max_split(name: str, value: str) -> Mapping[str, int]:
    sized = _parse_mib("max_split_size_bytes", name, value)
    if sized["max_split_size_bytes"] < LARGE_SEGMENT_BYTES:
        raise _bad(name, value, f"at least {LARGE_SEGMENT_BYTES // MIB}")
    return sized


def _parse_fraction(field: str, name: str, value: str) -> Mapping[str, float]:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not (0 < fraction < 1 or (fraction == 1 and field == "memory_fraction")):
        raise _bad(name, value, "a number between 0 and 1")
    return {field: fraction}


def _parse_divisions(name: str, value: str) -> Mapping[str, tuple[int, ...]]:
    """Parse one number, or a list like `[256:1,512:2,>:4]`; 0 disables the rounding.

    The first entry of a list also applies below it, and `>` above the last one. Sizes between two
    entries are not rounded (`parseRoundUpPower2Divisions`, c10/core/AllocatorConfig.cpp).
    """
    expected = "0, a power of two, or a list like [256:1,512:2,>:4]"
    if not value.startswith("["):
        return {"roundup_power2_divisions": (_division(name, value),) * NUM_DIVISIONS}
    if not value.endswith("]"):
        raise _bad(name, value, expected)
    divisions: list[int] = [0] * NUM_DIVISIONS
    last = -1
    for pair in filter(None, value[1:-1].split(",")):
        size, _, number = pair.partition(":")
        division = _division(name, number)
        if size == ">":
            first = max(last, 0) + 1
            divisions[first:] = [division] * (NUM_DIVISIONS - first)
            continue
        if not size.isdecimal() or int(size) < 1 or int(size).bit_count() != 1:
            raise _bad(name, value, expected)
        index = min(int(size).bit_length() - 1, NUM_DIVISIONS - 1)
        if last < 0:
            divisions[:index] = [division] * index
        divisions[index] = division
        last = index
    return {"roundup_power2_divisions": tuple(divisions)}


def _division(name: str, value: str) -> int:
    if not value.isdecimal() or int(value).bit_count() > 1:
        raise _bad(name, value, "0, a power of two, or a list like [256:1,512:2,>:4]")
    return int(value)


def _parse_backend(name: str, value: str) -> Mapping[str, bool]:
    if value != "native":
        raise _bad(name, value, "native: other allocators have other rules")
    return {}


_PARSERS: Mapping[str, Callable[[str, str], Mapping[str, Any]]] = {
    "backend": _parse_backend,
    "expandable_segments": partial(_parse_bool, "expandable_segments"),
    "max_split_size_mb": _parse_max_split,
    "max_non_split_rounding_mb": partial(_parse_mib, "max_non_split_rounding_bytes"),
    "large_segment_size_mb": partial(_parse_mib, "large_segment_bytes"),
    "roundup_power2_divisions": _parse_divisions,
    "garbage_collection_threshold": partial(_parse_fraction, "garbage_collection_threshold"),
    "per_process_memory_fraction": partial(_parse_fraction, "memory_fraction"),
}
_IGNORED = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    }
)
"""Settings of the host's allocator, or without effect on reserved memory."""
