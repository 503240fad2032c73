"""Distinguish signs of a standstill that has ended from signs of one that lasts.

A watchdog notes the end of a hang when its thread runs next. On a machine without free cores, the
rank may move on, and die, before that.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_inspect.trace.black_box import BlackBox
from fsdp_inspect.trace.stack_dumps import DumpSource, StackDump


def without_ended_hang(box: BlackBox) -> BlackBox:
    """The black box without a hang that a later collective of the rank ended."""
    seen_ns = box.header.hang_seen_ns
    if not seen_ns or _last_issue_ns(box) <= seen_ns:
        return box
    return replace(box, header=replace(box.header, hang_seen_ns=0))


def is_outdated(dump: StackDump, box: BlackBox) -> bool:
    """Whether the rank has issued a collective since its watchdog wrote these stacks."""
    is_of_watchdog = dump.source is DumpSource.WATCHDOG and dump.clock_ns is not None
    return is_of_watchdog and _last_issue_ns(box) > (dump.clock_ns or 0)


def _last_issue_ns(box: BlackBox) -> int:
    return int(box.entries["issued_ns"].max()) if len(box.entries) else 0
