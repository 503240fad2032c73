"""Build black boxes by hand for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fsdp_inspect.trace.black_box import (
    EMPTY_HEADER,
    ENTRY,
    BlackBox,
    CodePlace,
    Communicator,
    Header,
)
from fsdp_inspect.trace.codes import EventKind, Phase

SECOND = 1_000_000_000
HEADER = EMPTY_HEADER


class Call(NamedTuple):
    """One collective of a rank."""

    unit: int
    step: int = 0
    bytes: int = 64
    dtype: int = 1
    kind: int = EventKind.ALL_GATHER
    has_finished: bool = True
    group: int = 0
    state: int = 0


def make_box(
    calls: Sequence[Call], ranks: Sequence[int], header: Header = HEADER, **fields: int
) -> BlackBox:
    """The box of a rank whose collectives begin one second apart, from second 1."""
    rows = np.zeros(len(calls), ENTRY)
    digests: dict[int, int] = {}
    counts: dict[int, int] = {}
    for at, call in enumerate(calls):
        if not call.state:
            before = digests.get(call.group, 0)
            key = (before, call.kind, call.unit, call.bytes, call.dtype, call.step)
            digests[call.group] = hash(key) & (1 << 64) - 1
        begin = (at + 1) * SECOND
        rows[at]["number"] = at + 1
        rows[at]["issued_ns"] = begin
        rows[at]["finished_ns"] = begin + 1 if call.has_finished else 0
        rows[at]["sequence"] = counts.get(call.group, 0)
        counts[call.group] = counts.get(call.group, 0) + 1
        rows[at]["digest"] = digests.get(call.group, 0)
        rows[at]["phase"] = Phase.FORWARD
        rows[at]["place"] = 1
        for name in ("unit", "step", "bytes", "dtype", "kind", "group", "state"):
            rows[at][name] = getattr(call, name)
    groups = {0: Communicator("all", tuple(ranks)), 1: Communicator("apart", tuple(ranks))}
    return BlackBox(replace(header, **fields), rows, groups, {1: CodePlace("train.py", 7, "f")})
