"""Name the methods by which the times of events were obtained, by group of numbers."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import COPIES, EventKind, Method, NamedCode, Phase
from fsdp_inspect.trace.tables import EventTable

_KINDS_OF_GROUP: Mapping[str, tuple[EventKind, ...]] = {
    "step": (EventKind.STEP,),
    "all_gather": (EventKind.ALL_GATHER,),
    "reduce_scatter": (EventKind.REDUCE_SCATTER,),
    "all_reduce": (EventKind.ALL_REDUCE,),
    "copies": tuple(sorted(COPIES)),
    "forward": (EventKind.FORWARD,),
    "backward": (EventKind.BACKWARD, EventKind.RECOMPUTE),
    "optimizer": (EventKind.OPTIMIZER,),
    "data": (EventKind.DATA,),
    "compute": (EventKind.COMPUTE,),
}
_PHASE_OF_GROUP = {
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
}
"""Parts of a kernel trace's step that consist of the compute kernels of one phase."""


def name_methods(events: EventTable) -> dict[str, str]:
    """Return the methods of each group of numbers (`step`, `all_gather`, `forward`, ...).

    A value is `measured`, `inferred` or `host_blocking`, or several of these. Groups without an
    event are absent.
    """
    methods = {
        group: ", ".join(labels_of(Method, _methods(events, group))) for group in _KINDS_OF_GROUP
    }
    return {group: named for group, named in methods.items() if named}


def _methods(events: EventTable, group: str) -> NDArray[np.int8]:
    """Return the method of each event of a group."""
    own = events.method[np.isin(events.kind, _KINDS_OF_GROUP[group])]
    kernels = events.kind == EventKind.COMPUTE
    if group in _PHASE_OF_GROUP and np.any(kernels & (events.phase == _PHASE_OF_GROUP[group])):
        return np.append(own, np.int8(Method.INFERRED))
    return own


def labels_of(codes: type[NamedCode], column: NDArray[np.int8]) -> tuple[str, ...]:
    """Return the distinct names of the codes in a column."""
    return tuple(codes(code).label for code in np.unique(column).tolist())
