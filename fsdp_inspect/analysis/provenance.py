"""Find the source and the method of a run's numbers.

The methods are read from the events of one typical step of the median rank. A kind with several
methods names them all. In a kernel trace, forward, backward and optimizer are the compute kernels
of that phase: the kernels are measured, their phase is inferred.
"""

from dataclasses import dataclass

import numpy as np

from fsdp_inspect.analysis.methods import labels_of, name_methods
from fsdp_inspect.analysis.step_selection import timed_rank
from fsdp_inspect.trace.codes import NO_UNIT, EventKind, Method, Source
from fsdp_inspect.trace.run import RunSource

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
