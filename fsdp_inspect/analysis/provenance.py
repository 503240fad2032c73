"""Find the source and the methods of a run's numbers.

The methods are read from the events of one typical step of the median rank. A kind with several
methods names them all. In a kernel trace, forward, backward and optimizer are the compute kernels
of that phase: the kernels are measured, their phase is inferred.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.trace.codes import COPIES, NO_UNIT, EventKind, Method, NamedCode, Phase, Source
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.tables import EventTable

_SHARDING_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Provenance:
    """The sources and methods of a run's numbers."""

    sources: tuple[str, ...]
    """Sources: `recorded`, `emulated`, `imported` or `predicted`. A mixed run has several."""
    methods: dict[str, str]
    """Methods by group of numbers (`step`, `all_gather`, `forward`, ...): `measured`, `inferred`,
    `host_blocking`. Groups without an event are absent."""
    memory: str | None
    """`cuda_allocator` or `storage_tracker`; None if no memory was recorded."""
    blocks_host: bool
    """Whether every all-gather and reduce-scatter of FSDP blocks the host, as gloo does by default.
    Their exposure is then a property of the backend, not of the plan."""


def measure_provenance(run: RunSource) -> Provenance:
    """Find the sources and methods of times and memory."""
    chosen = timed_rank(run)
    memory = next((record.memory_from for record in run.ranks if record.memory_from), None)
    if chosen is None:
        return Provenance((run.manifest.source,), {}, memory, blocks_host=False)
    events = run.events(chosen.rank, steps=[chosen.closest_step])
    by_fsdp = (events.unit != NO_UNIT) & np.isin(events.kind, _SHARDING_KINDS)
    sharding = set(events.method[by_fsdp].tolist())
    return Provenance(
        sources=labels_of(Source, events.source),
        methods=name_methods(events),
        memory=memory,
        blocks_host=sharding == {Method.HOST_BLOCKING},
    )


# --- Name the methods by which the times of events were obtained, by group of numbers.

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
