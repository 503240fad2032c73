"""Convert a simulated step into the event table of a rank.

All analyses, the timeline and the reports then accept a prediction like a recording. The source of
its rows is `predicted`.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from fsdp_inspect.simulation.parameters import smaller_group
from fsdp_inspect.simulation.schedule import PlayedStep, Span
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    COPIES,
    DTYPES,
    NO_UNIT,
    WAIT_OF,
    EventFlag,
    EventKind,
    Method,
    Phase,
    Source,
    Stream,
)
from fsdp_inspect.trace.run import Unit
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

_STREAMS = {
    EventKind.ALL_GATHER: Stream.ALL_GATHER,
    EventKind.REDUCE_SCATTER: Stream.REDUCE_SCATTER,
    EventKind.ALL_REDUCE: Stream.ALL_REDUCE,
    EventKind.ALL_GATHER_COPY_IN: Stream.ALL_GATHER_COPY_IN,
}
"""Streams on a device with streams; other kinds run on the compute stream."""


def predicted_events(
    steps: Sequence[PlayedStep], units: Sequence[Unit], *, on_host: bool
) -> EventTable:
    """The events of consecutive simulated steps, numbered from 0.

    Args:
        steps: The steps in order.
        units: By index in the workload; `unit` of a row is the index in the manifest.
        on_host: One thread runs everything but the collectives (CPU).

    Returns:
        Rows sorted by start.
    """
    writer = _Writer(units, on_host=on_host)
    rows = [row for number, step in enumerate(steps) for row in writer.rows(number, step)]
    table = EventTable.from_rows(rows)
    return table.where(np.argsort(table.start_ns, kind="stable"))


class _Writer:
    """Converts spans into rows."""

    def __init__(self, units: Sequence[Unit], *, on_host: bool) -> None:
        self._units = units
        self._clock = Stream.HOST if on_host else Stream.COMPUTE
        self._on_host = on_host
        self._num_groups = 1 + max(
            (max(unit.shard_group, unit.replicate_group) for unit in units), default=0
        )
        self._sequences: dict[int, int] = {}
        self._collective = 0

    def rows(self, number: int, step: PlayedStep) -> Iterator[dict[str, int]]:
        """All rows of a step."""
        yield self._row(
            number,
            Span(
                EventKind.STEP,
                NO_UNIT,
                Phase.OUTSIDE,
                0,
                step.start_ns,
                step.start_ns,
                step.end_ns,
            ),
        )
        for span in sorted(step.spans, key=lambda each: each.issue_ns):
            if span.kind is EventKind.COMPUTE:
                continue
            if span.kind in COLLECTIVES:
                yield from self._communication(number, span)
            else:
                yield self._row(number, span)

    def _communication(self, number: int, span: Span) -> Iterator[dict[str, int]]:
        """The rows of a collective and of the wait for it."""
        unit = self._units[span.unit]
        gathers = span.kind is EventKind.ALL_GATHER
        group = self._group(unit, span)
        sequence = self._sequences.get(group, 0)
        self._sequences[group] = sequence + 1
        self._collective += 1
        flags = EventFlag.UNUSED if span.need_ns < 0 else EventFlag(0)
        if gathers and span.issued_by != span.unit:
            flags |= EventFlag.PREFETCHED
        common = {"group": group, "collective": self._collective, "issued_by": self._index(span)}
        yield {
            **self._row(number, span),
            **common,
            "sequence": sequence,
            "bytes": unit.unsharded_bytes if gathers else unit.reduce_bytes,
            "dtype": _dtype(unit.param_dtype if gathers else unit.reduce_dtype),
            "flags": int(flags),
            "need_ns": span.need_ns,
        }
        if span.end_ns > span.need_ns >= 0:
            yield {
                **self._row(number, span),
                **common,
                "kind": WAIT_OF[span.kind],
                "stream": self._clock,
                "issue_ns": span.need_ns,
                "start_ns": span.need_ns,
            }

    def _group(self, unit: Unit, span: Span) -> int:
        """The communicator; a smaller group has its own number above all known groups."""
        if span.kind is EventKind.ALL_REDUCE:
            return unit.replicate_group
        is_smaller = smaller_group(unit.reshard_after_forward) is not None
        if is_smaller and span.kind is EventKind.ALL_GATHER and span.phase is Phase.BACKWARD:
            return self._num_groups + unit.index
        return unit.shard_group

    def _index(self, span: Span) -> int:
        return self._units[span.issued_by].index if span.issued_by != NO_UNIT else NO_UNIT

    def _row(self, number: int, span: Span) -> dict[str, int]:
        unit = NO_UNIT if span.unit == NO_UNIT else self._units[span.unit].index
        return {
            "step": number,
            "microbatch": span.microbatch,
            "phase": span.phase,
            "kind": span.kind,
            "unit": unit,
            "issued_by": unit if span.kind in COPIES else NO_UNIT,
            "stream": self._stream(span.kind),
            "group": -1,
            "dtype": 0,
            "source": Source.PREDICTED,
            "method": Method.INFERRED,
            "flags": 0 if span.keeps_graph else int(EventFlag.NO_GRAD),
            "sequence": MISSING_INT,
            "collective": MISSING_INT,
            "bytes": MISSING_INT,
            "issue_ns": span.issue_ns,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "need_ns": MISSING_INT,
        }

    def _stream(self, kind: EventKind) -> Stream:
        if self._on_host and kind not in COLLECTIVES:
            return Stream.HOST
        return _STREAMS.get(kind, self._clock)


def _dtype(name: str) -> int:
    return DTYPES.index(name) if name in DTYPES else 0
