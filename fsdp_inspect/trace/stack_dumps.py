"""Read Python stacks as `faulthandler` writes them.

A dump lists threads with their frames, the innermost frame first. The watchdog puts a line of JSON
before it, with the time and the names of the threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) (?P<ident>0x[0-9a-f]{1,16})"
    r"(?: \[(?P<name>[^\]]{0,64})\])?"
)
_FRAME = re.compile(
    r'^  File "(?P<file>[^"]{1,600})", line (?P<line>\d{1,9}) in (?P<function>.{1,200})'
)
_MAX_LINES = 20_000


class DumpSource(StrEnum):
    """The reason for writing the stacks."""

    WATCHDOG = "watchdog"
    """The watchdog saw no progress."""
    CRASH = "crash"
    """A fatal signal, such as a segmentation fault."""
    SIGTERM = "sigterm"
    """SIGTERM ended the process."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether the frame belongs to an installed package, Python itself or FSDP Inspect."""
        return _is_library(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    parts = file.replace("\\", "/").split("/")
    return (
        file.startswith("<")
        or "site-packages" in parts
        or "dist-packages" in parts
        or "fsdp_inspect" in parts
        or any(part.startswith("python3.") for part in parts)
        or ("torch" in parts and "distributed" in parts)
    )


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of one thread."""

    ident: str
    name: str
    is_current: bool
    """Whether this thread wrote the dump, or the signal interrupted it."""
    frames: tuple[StackFrame, ...]
    """Innermost first."""

    @property
    def user_frame(self) -> StackFrame | None:
        """The innermost frame of the user's code; None if there is none."""
        return next((frame for frame in self.frames if not frame.is_library), None)


@dataclass(frozen=True, slots=True)
class StackDump:
    """The stacks of all threads of one rank at one moment."""

    source: DumpSource
    threads: tuple[ThreadStack, ...]
    fatal: str
    """The fatal error, as `Segmentation fault`; empty without one."""
    clock_ns: int | None
    """The rank's clock; None if unknown."""
    training_ident: str
    """The thread that trains; empty if unknown."""
    statements: tuple[tuple[str, str], ...] = ()
    """Lines of the user's source by place, if they were recorded."""

    def statement_of(self, frame: StackFrame | None) -> str:
        """The source of a frame's line; empty if it was not recorded."""
        return dict(self.statements).get(str(frame), "")

    @property
    def training(self) -> ThreadStack | None:
        """The training thread: by name, or else by the outermost script; None if unknown."""
        named = [each for each in self.threads if each.ident == self.training_ident]
        current = [each for each in self.threads if each.is_current and each.user_frame]
        scripts = [each for each in self.threads if each.user_frame]
        return next(iter((*named, *current, *scripts)), None)


def parse_dump(text: str, source: DumpSource) -> StackDump | None:
    """Read a dump; None if it has no thread. Lines of other sorts are skipped."""
    lines = text.split("\n", _MAX_LINES)[:_MAX_LINES]
    head = _head(lines[0]) if lines else {}
    names = head.get("threads") if isinstance(head.get("threads"), dict) else {}
    threads = tuple(_threads(lines, names or {}))
    if not threads:
        return None
    clock = head.get("clock_ns")
    fatal = next((line for line in lines if line.startswith("Fatal Python error: ")), "")
    return StackDump(
        source=source,
        threads=threads,
        fatal=fatal.removeprefix("Fatal Python error: ").strip(),
        clock_ns=clock if isinstance(clock, int) else None,
        training_ident=str(head.get("training_thread", "")),
        statements=_statements(head.get("statements")),
    )


def _head(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line) if line.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _statements(found: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, dict):
        return ()
    return tuple((str(place), str(text)) for place, text in found.items())


def _threads(lines: Sequence[str], names: dict[str, Any]) -> Iterator[ThreadStack]:
    found: re.Match[str] | None = None
    frames: list[StackFrame] = []
    for line in (*lines, "Thread end"):
        frame = _FRAME.match(line)
        if frame is not None:
            if found is not None:
                function = frame["function"].strip()
                frames.append(StackFrame(frame["file"], int(frame["line"]), function))
            continue
        thread = _THREAD.match(line)
        if thread is None and line != "Thread end":
            continue
        if found is not None:
            ident = found["ident"]
            name = str(names.get(ident) or found["name"] or "")
            is_current = found["current"] == "Current thread"
            yield ThreadStack(ident, name, is_current, tuple(frames))
        found, frames = thread, []
