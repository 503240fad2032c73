"""Name the segments of a growing file in an object store, which cannot append to a file.

A segment is a range of the bytes of the file. `events.arrows.part-0000000000004096` begins at byte
4096 of `events.arrows`. Joined in order, the segments are the file up to the last upload. A segment
may repeat bytes of the segments before it, because an interrupted upload starts again.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GROWING_SUFFIXES = (".arrows", ".jsonl")
"""Suffixes of the files that are appended to, and therefore uploaded in segments."""

_SEGMENT = re.compile(r"(.+)\.part-(\d{16})")


@dataclass(frozen=True, slots=True)
class StreamSegment:
    """One segment of a growing file."""

    name: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte after the segment."""
        return self.start + self.size


def segment_name(file: str, start: int) -> str:
    """The name of the segment of a file that begins at a byte."""
    return f"{file}.part-{start:016d}"


def file_of_segment(name: str) -> str | None:
    """The name of the file that a segment belongs to; None if this is no segment."""
    found = _SEGMENT.fullmatch(name)
    return found[1] if found else None


def find_segments(file: str, sizes: Mapping[str, int]) -> list[StreamSegment]:
    """The segments of a file among these names with sizes, by start."""
    found = [
        StreamSegment(name, int(match[2]), size)
        for name, size in sizes.items()
        if (match := _SEGMENT.fullmatch(name)) and match[1] == file
    ]
    return sorted(found, key=lambda segment: (segment.start, -segment.size))


def select_gapless(segments: Iterable[StreamSegment]) -> list[StreamSegment]:
    """The segments from byte 0 to the first gap, without those that repeat others entirely."""
    chosen: list[StreamSegment] = []
    end = 0
    for segment in segments:
        if segment.start > end:
            break
        if segment.end > end:
            chosen.append(segment)
            end = segment.end
    return chosen


def join_segments(segments: Iterable[StreamSegment], contents: Iterable[bytes]) -> bytes:
    """The bytes of the file from its gapless segments and their contents."""
    parts: list[bytes] = []
    end = 0
    for segment, content in zip(segments, contents, strict=True):
        parts.append(content[end - segment.start :])
        end = segment.start + len(content)
    return b"".join(parts)
