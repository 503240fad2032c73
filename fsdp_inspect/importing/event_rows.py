"""Build event rows from imported columns, with defaults for the columns that imports lack."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import NO_UNIT, Method, Phase, Source, Stream
from fsdp_inspect.trace.tables import MISSING_INT, EventTable

_BLANK: dict[str, int] = {
    "step": 0,
    "microbatch": 0,
    "phase": Phase.OUTSIDE,
    "unit": NO_UNIT,
    "issued_by": NO_UNIT,
    "stream": Stream.OTHER,
    "group": -1,
    "dtype": 0,
    "source": Source.IMPORTED,
    "method": Method.MEASURED,
    "flags": 0,
    "sequence": MISSING_INT,
    "collective": MISSING_INT,
    "bytes": MISSING_INT,
    "need_ns": MISSING_INT,
}


def make_rows(
    kind: Any, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64], **columns: Any
) -> EventTable:
    """Build rows from arrays of shape (n,) or single values; other columns are unknown.

    Args:
        kind: An `EventKind`, or one for each row.
        start_ns: Shape (n,).
        end_ns: Shape (n,).
        **columns: Other columns of `EventTable`; the default of `issue_ns` is the start.
    """
    given = {"issue_ns": start_ns, **_BLANK, **columns}
    return EventTable.from_columns(
        {
            name: np.broadcast_to(np.asarray(value), start_ns.shape).astype(EventTable.DTYPES[name])
            for name, value in {
                **given,
                "kind": kind,
                "start_ns": start_ns,
                "end_ns": end_ns,
            }.items()
        }
    )
