"""Define the integer codes of the run folder: kinds, phases, streams, sources, flags.

The numbers are part of the schema (version 1). Append new codes and never renumber one.
"""

from enum import IntEnum, IntFlag
from functools import cached_property


class NamedCode(IntEnum):
    """An integer code. Tables and JSON show its lower-case name."""

    @cached_property
    def label(self) -> str:
        """The name as written in tables: `all_gather_copy_in`."""
        return self.name.lower()


class EventKind(NamedCode):
    """The kind of an event. A collective without a unit was not issued by FSDP."""

    STEP = 0
    """One optimizer step, from the end of the previous step to its own end."""
    DATA = 1
    """Waiting for the next batch."""
    FORWARD = 2
    """A unit's forward, from its parameters being ready to its output; includes nested units."""
    BACKWARD = 3
    """A unit's backward, from its parameters being ready to its gradients being complete."""
    RECOMPUTE = 4
    """Forward work repeated inside backward by activation checkpointing."""
    OPTIMIZER = 5
    """The optimizer's step."""
    BETWEEN_STEPS = 6
    """Evaluation or checkpoint saving: work that belongs to no training step."""
    COMPUTE = 7
    """Kernel traces: compute kernels without a gap between them, joined to one event."""
    MEMORY_COPY = 8
    """Kernel traces: copies and fills by the device (memcpy, memset), which are not compute."""
    ALL_GATHER_COPY_IN = 10
    ALL_GATHER = 11
    ALL_GATHER_WAIT = 12
    """The compute stream (CPU: the main thread) waits until an all-gather ends."""
    ALL_GATHER_COPY_OUT = 13
    REDUCE_SCATTER_COPY_IN = 20
    REDUCE_SCATTER = 21
    REDUCE_SCATTER_WAIT = 22
    """Like ALL_GATHER_WAIT. `unit` owns the collective; the wait happened in `issued_by`."""
    ALL_REDUCE = 30
    ALL_REDUCE_WAIT = 31
    BROADCAST = 40
    ALL_TO_ALL = 41
    BARRIER = 42
    POINT_TO_POINT = 43
    OTHER_COLLECTIVE = 44
    OTHER_WAIT = 45
    """Like ALL_GATHER_WAIT, for the collectives from BROADCAST on."""
    GARBAGE_COLLECTION = 50
    """Python collected garbage, in any thread, and every other thread waited. Overlaps the events
    around it."""
    COMPILATION = 51
    """torch.compile compiled a function. Overlaps the events around it."""
    GRAPH_CAPTURE = 52
    """A CUDA graph was captured or instantiated. Overlaps the events around it, like the kinds
    below."""
    DEVICE_ALLOCATION = 53
    """Memory was requested from the driver or returned to it (cudaMalloc, cudaFree)."""
    KERNEL_LOADING = 54
    """The driver loaded a kernel at its first use."""


COLLECTIVES = frozenset(
    {
        EventKind.ALL_GATHER,
        EventKind.REDUCE_SCATTER,
        EventKind.ALL_REDUCE,
        EventKind.BROADCAST,
        EventKind.ALL_TO_ALL,
        EventKind.BARRIER,
        EventKind.POINT_TO_POINT,
        EventKind.OTHER_COLLECTIVE,
    }
)
"""The kinds that communicate between ranks."""

WAIT_OF = {
    EventKind.ALL_GATHER: EventKind.ALL_GATHER_WAIT,
    EventKind.REDUCE_SCATTER: EventKind.REDUCE_SCATTER_WAIT,
    EventKind.ALL_REDUCE: EventKind.ALL_REDUCE_WAIT,
}
"""The wait that belongs to a collective; all others use OTHER_WAIT."""

COPIES = frozenset(
    {
        EventKind.ALL_GATHER_COPY_IN,
        EventKind.ALL_GATHER_COPY_OUT,
        EventKind.REDUCE_SCATTER_COPY_IN,
    }
)
"""FSDP's own copies between parameters and communication buffers."""


class Phase(NamedCode):
    """The part of a step that contains an event."""

    OUTSIDE = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    EVALUATION = 5
    """Work that belongs to no training step: an evaluation or a checkpoint."""

    @property
    def title(self) -> str:
        """The name in a sentence: `backward`."""
        return "evaluation or checkpoint" if self is Phase.EVALUATION else self.label


class Stream(NamedCode):
    """The queue on which an event ran. On CPU, all synchronous work has HOST."""

    HOST = 0
    COMPUTE = 1
    ALL_GATHER_COPY_IN = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE = 5
    OTHER = 6


class Source(NamedCode):
    """The origin of an event."""

    RECORDED = 0
    EMULATED = 1
    IMPORTED = 2
    PREDICTED = 3


class Method(NamedCode):
    """The method by which the times of an event were obtained."""

    MEASURED = 0
    INFERRED = 1
    """Derived from neighbouring measurements, e.g. the end of a wait from the collective's end."""
    HOST_BLOCKING = 2
    """The time of a synchronous call, including queueing and wake-up (CPU, gloo)."""


class EventFlag(IntFlag):
    """Bits of the `flags` column."""

    RECOMPUTE = 1
    """The event happened while activation checkpointing repeated a forward."""
    ASYNC = 2
    """A collective that was issued without blocking the host."""
    PREFETCHED = 4
    """An all-gather that was issued before its own unit needed it."""
    UNUSED = 8
    """An all-gather that nothing waited for."""
    NO_GRAD = 16
    """A forward with gradients disabled."""
    MEMORY_STEP = 32
    """The event is in a memory step, so its times are not representative."""
    LATEST_END = 64
    """The end is an upper bound: the moment at which the collective was seen to have ended. A
    DEVICE_ALLOCATION then has no duration."""
    CHECKPOINT = 128
    """BETWEEN_STEPS: a checkpoint was saved. With ASYNC, it is written in the background."""
    FULL_COLLECTION = 256
    """GARBAGE_COLLECTION: a collection of all generations."""
    UNIT_INFERRED = 512
    """A collective whose unit is inferred from the size and the order of its message."""
    STILL_GATHERED = 1024
    """ZeRO-3: a forward or backward of a unit whose parameters had stayed gathered since another
    use."""
    PLAIN_STEP = 2048
    """STEP: a plain step, in which units and collectives have no rows."""


class MemoryPoint(NamedCode):
    """The moment at which a memory sample was taken."""

    STEP_END = 0
    FORWARD_START = 1
    FORWARD_END = 2
    BACKWARD_START = 3
    BACKWARD_END = 4
    OPTIMIZER_END = 5
    PEAK = 6
    """The peak of a memory step. `unit` is the position; categories are exact."""
    PEAK_BY_OWNER = 7
    """The same moment as PEAK, one row for each owning unit; `allocated` is that unit's bytes."""
    AFTER_UNSHARD = 8
    """Right after a unit's unshard."""
    TIMELINE = 9
    """Imported allocator traces: the peak within one interval of the trace."""
    SNAPSHOT = 10
    """Imported allocator traces: the moment at which the snapshot was taken."""
    PHASE_PEAK = 11
    """The peak of one phase of a memory step, like PEAK; `phase` is that phase."""
    PHASE_PEAK_BY_OWNER = 12
    """The same moment as PHASE_PEAK, one row for each owning unit, as PEAK_BY_OWNER."""
    END_BY_OWNER = 13
    """The resting memory of a memory step, one row for each owning unit."""
    PARAMETER_USE = 14
    """The first use of a parameter in a pass of its unit; `parameter` is its index."""
    AFTER_REDUCE = 15
    """Memory steps: a unit's gradients are reduced; `unit` is the enclosing unit."""


DETAILS = (
    MemoryPoint.PEAK_BY_OWNER,
    MemoryPoint.PHASE_PEAK,
    MemoryPoint.PHASE_PEAK_BY_OWNER,
    MemoryPoint.END_BY_OWNER,
    MemoryPoint.PARAMETER_USE,
)
"""Rows that split or describe another row of a memory step; not separate readings."""


class MemoryCategory(NamedCode):
    """The kind of a live byte."""

    SHARDED_PARAMETER = 0
    UNSHARDED_PARAMETER = 1
    SHARDED_GRADIENT = 2
    UNSHARDED_GRADIENT = 3
    OPTIMIZER_STATE = 4
    ACTIVATION = 5
    ALL_GATHER_BUFFER = 6
    REDUCE_SCATTER_BUFFER = 7
    BUFFER = 8
    INPUT = 9
    TEMPORARY = 10
    OUTSIDE_ALLOCATOR = 11


OF_COMMUNICATION = (
    MemoryCategory.UNSHARDED_PARAMETER,
    MemoryCategory.ALL_GATHER_BUFFER,
    MemoryCategory.REDUCE_SCATTER_BUFFER,
    MemoryCategory.SHARDED_GRADIENT,
)
"""Memory that depends on FSDP alone, not on the computation of the model."""


DTYPES = (
    "unknown",
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "complex64",
)
"""The dtype name of each code of the `dtype` column, by position."""

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "complex64": 8,
}
"""Bytes of one element, by dtype name; "unknown" is missing."""

NO_UNIT = -1
"""The `unit` of an event that belongs to no FSDP unit."""
UNKNOWN_UNIT = -2
"""The `unit` of a collective in a black box from a dump without units."""
UNKNOWN_STEP = -1
"""The `step` of a collective from such a dump."""


class UseEvent(NamedCode):
    """An event in `trace.run.UseOrder`."""

    BEGIN = 0
    """A forward of the model begins."""
    ENTER_FORWARD = 1
    """A module is about to run its forward."""
    LEAVE_FORWARD = 2
    """It has run it."""
    ENTER_BACKWARD = 3
    LEAVE_BACKWARD = 4
    GRADIENT = 5
    """The gradient of a parameter is complete."""
    REDUCE_REST = 6
    """The backward of the model has ended, and the remaining gradients are reduced."""


ENTERS = (UseEvent.ENTER_FORWARD, UseEvent.ENTER_BACKWARD)
LEAVES = (UseEvent.LEAVE_FORWARD, UseEvent.LEAVE_BACKWARD)


class StepPart(NamedCode):
    """A part of a step in the summary's `kind` column; its codes do not overlap `EventKind`."""

    FORWARD = 100
    BACKWARD = 101
    FSDP_COPIES = 102
    EXPOSED_ALL_GATHER = 103
    EXPOSED_REDUCE_SCATTER = 104
    EXPOSED_ALL_REDUCE = 105
    EXPOSED_OTHER = 106
    HOST_BOUND = 107
    OPTIMIZER = 108
    DATA = 109
    OTHER = 110
    COMMUNICATION = 120
    """Union of the rank's running collectives; overlaps the parts above."""
    BETWEEN_STEPS = 121
    """Evaluation and checkpoint saving before the step; not part of the step time."""
    HOST_BEHIND = 122
    """On a device: an upper bound of its idle time for lack of work, outside the exposed parts. It
    contains HOST_BOUND and overlaps the other parts."""
    PEAK_ALLOCATED = 130
    """The highest known allocated memory of a step, in the `bytes` column."""
    PEAK_RESERVED = 131
    ALLOCATED_AT_END = 132
    RESERVED_AT_END = 133
    GROUP = 140
    """The collectives of one process group, one row for each group that the step used. Its
    `exposed_ns` are disjoint over the groups and add up to the exposed parts above."""


PARTS_OF_STEP = tuple(part for part in StepPart if part < StepPart.COMMUNICATION)
"""The parts that add up to the step's duration."""


EXPOSED_PARTS = {
    EventKind.ALL_GATHER: StepPart.EXPOSED_ALL_GATHER,
    EventKind.REDUCE_SCATTER: StepPart.EXPOSED_REDUCE_SCATTER,
    EventKind.ALL_REDUCE: StepPart.EXPOSED_ALL_REDUCE,
}
"""The part for exposed time of FSDP's own collectives; all others use EXPOSED_OTHER."""


EXPOSED_PART_CODES = frozenset({*EXPOSED_PARTS.values(), StepPart.EXPOSED_OTHER})
"""The parts whose sum is the exposed communication of a step."""


class StepFlag(NamedCode):
    """Bits of the `flags` column of a summary's STEP rows."""

    MEMORY_STEP = 1
    HAS_BETWEEN = 2
    PLAIN = 4
    COLLECTION = 8
    """Garbage collections take at least 1% of the step."""
    COMPILATION = 16
    """Compilations take at least 1% of the step."""
    GRAPH_CAPTURE = 32
    DEVICE_ALLOCATION = 64
    """Allocations by the driver take at least 1% of the step, or an unknown time."""
    KERNEL_LOADING = 128


HOST_STOPS = {
    EventKind.GARBAGE_COLLECTION: StepFlag.COLLECTION,
    EventKind.COMPILATION: StepFlag.COMPILATION,
    EventKind.GRAPH_CAPTURE: StepFlag.GRAPH_CAPTURE,
    EventKind.DEVICE_ALLOCATION: StepFlag.DEVICE_ALLOCATION,
    EventKind.KERNEL_LOADING: StepFlag.KERNEL_LOADING,
}
"""What stops the host in few steps, with the flag of such a step."""


class Statistic(NamedCode):
    """The meaning of a row of the run's statistics (`store.reduction.run_statistics`)."""

    FINISHED = 0
    """A step that at least one rank completed, with its flags. `count`: number of ranks."""
    MEDIAN = 1
    """Over all steps, of all ranks if `rank` is -1: the lower median of the step time."""
    TYPICAL = 2
    """Sums over the typical steps of a rank; on the STEP row, `step` is the closest step."""
    LOW = 3
    """The 10th percentile of the step time over the timed steps of a rank."""
    MIDDLE = 4
    """The median of the same step times."""
    HIGH = 5
    """The 90th percentile of the same step times."""
    HIGHEST = 6
    """The highest memory of a rank over all of its steps."""
    LAST = 7
    """The memory of the last step of a rank."""
    FIRST_WARM = 8
    """The memory of the first step of a rank after warm-up, if it has two such steps."""
    LAST_WARM = 9
    """The memory of the last step of a rank after warm-up, if it has two such steps."""
