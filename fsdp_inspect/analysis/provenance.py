"""How were the numbers of this run obtained?

The methods are read from the events of the median step of the median rank; a kind whose events
were obtained in several ways names them all. In a kernel trace forward, backward and optimizer are
the compute kernels of that phase: the kernels are measured, their phase is inferred.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdp_inspect.trace.codes import (
    COPIES,
    NO_UNIT,
    EventKind,
    Method,
    NamedCode,
    Phase,
    Source,
)
from fsdp_inspect.trace.run import RunSource
from fsdp_inspect.trace.steps import timed_rank
from fsdp_inspect.trace.tables import EventTable

_KINDS_OF_GROUP = {
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
"""Parts of a step that are compute kernels of a phase, in a kernel trace."""

_SHARDING_KINDS = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the numbers come from, and how they were obtained."""

    sources: tuple[str, ...]
    """`recorded`, `emulated`, `imported` or `predicted`; several in a mixed run."""
    methods: dict[str, str]
    """By group of numbers (`step`, `all_gather`, `forward`, ...): `measured`, `inferred`,
    `host_blocking`; groups without an event are absent."""
    memory: str | None
    """`cuda_allocator` or `storage_tracker`; None if no memory was recorded."""
    blocks_host: bool
    """Every all-gather and reduce-scatter of FSDP stood in the host's way, as gloo's do by default:
    that they are exposed is then a property of the backend, not of the plan."""


def measure_provenance(run: RunSource) -> Provenance:
    """How times and memory were obtained."""
    chosen = timed_rank(run)
    memory = next((record.memory_from for record in run.ranks if record.memory_from), None)
    if chosen is None:
        return Provenance((run.manifest.source,), {}, memory, blocks_host=False)
    events = run.events(chosen.rank, steps=[chosen.median_step])
    methods = {
        group: ", ".join(_labels(Method, _methods(events, group))) for group in _KINDS_OF_GROUP
    }
    by_fsdp = (events.unit != NO_UNIT) & np.isin(events.kind, _SHARDING_KINDS)
    sharding = set(events.method[by_fsdp].tolist())
    return Provenance(
        sources=_labels(Source, events.source),
        methods={group: named for group, named in methods.items() if named},
        memory=memory,
        blocks_host=sharding == {Method.HOST_BLOCKING},
    )


def _methods(events: EventTable, group: str) -> NDArray[np.int8]:
    """How each event of a group was obtained."""
    own = events.method[np.isin(events.kind, _KINDS_OF_GROUP[group])]
    kernels = events.kind == EventKind.COMPUTE
    if group in _PHASE_OF_GROUP and np.any(kernels & (events.phase == _PHASE_OF_GROUP[group])):
        return np.append(own, np.int8(Method.INFERRED))
    return own


def _labels(codes: type[NamedCode], column: NDArray[np.int8]) -> tuple[str, ...]:
    return tuple(codes(code).label for code in np.unique(column).tolist())
