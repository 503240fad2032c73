"""What is known about a run beside its events? The manifest, the units, the ranks.

`RunManifest` is `run.json`, `RankRecord` is `rank.json`; both are read leniently (unknown fields
of a newer minor version are kept out of the way) and written strictly.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    SummaryTable,
)

SCHEMA_VERSION = 1
"""Version of the run folder; raised when an older reader would misread a newer run."""


class Record(BaseModel):
    """Base of what is stored as JSON: unknown fields are ignored, values are checked."""

    model_config = ConfigDict(extra="ignore", frozen=True)


IMPORTED_CLOCK = "kineto"
"""Of a profiler's trace: ranks of one host read one clock, as far as their collectives agree."""
UNPLACED_CLOCK = "unplaced"
"""Of a trace without wall time: its times compare with those of no other rank."""
UNITS_FROM_RANGES = "ranges"
"""How an import knows its units (`Unit.recorded_by`): by the ranges that FSDP2 itself writes."""
UNITS_FROM_ORDER = "order"
"""The same, where no range names them: by the order and the sizes of collectives (inferred)."""
UNITS_FROM_FSDP1 = "fsdp1"
"""The same, in the order of FSDP1's own ranges, which name no unit (inferred)."""


class RunStatus(StrEnum):
    """How a run, or a rank, ended."""

    RUNNING = "running"
    COMPLETE = "complete"
    CRASHED = "crashed"
    """It stopped without saying so; everything up to the last flush is here."""
    FAILED = "failed"
    """The training raised an exception, which the recorder saw."""
    PARTIAL = "partial"
    """Ranks are missing."""
    IMPORTED = "imported"


class Unit(Record):
    """One FSDP communication group (torch: `FSDPParamGroup`)."""

    index: int
    fqn: str
    """As torch names it: the modules' fqns joined by `, `; the root is empty."""
    modules: list[str]
    """The fqns of the modules that were given to one `fully_shard` call."""
    module_class: str = ""
    num_parameters: int
    """Parameters of the whole unit, over all ranks, without padding."""
    num_trainable_parameters: int
    num_tensors: int = 0
    parameters: dict[str, list[int]] = Field(default_factory=dict)
    """The whole shape of each parameter by its fqn, in the model's order; empty: not recorded."""
    unsharded_bytes: int
    """The padded all-gather output in the parameter dtype: what unsharding allocates."""
    sharded_bytes: int
    """One rank's share in the original dtype, with padding; 0: an import does not tell."""
    reduce_bytes: int
    """The padded reduce-scatter input in the reduce dtype; 0 for a frozen unit."""
    param_dtype: str
    reduce_dtype: str
    reshard_after_forward: bool | int | None
    """As it runs, after torch's own rule for the root; an int is the size of the smaller group."""
    shard_group: int = -1
    """Index of the process group of its all-gather and reduce-scatter; -1: no communication."""
    replicate_group: int = -1
    """Index of the process group of its all-reduce (HSDP); -1: none."""
    is_root: bool = False
    offload: bool = False
    are_sizes_known: bool = True
    """False: an import does not tell all of its messages' sizes; numbers that are 0 are unknown."""
    execution_index: int = -1
    """Position in the first recorded forward, from 0; -1: never ran."""
    recorded_by: str = "custom_comm"
    """`custom_comm`: a wrapper installed through torch's public setters; `param_group`: installed
    on the group object itself (several groups in a module, torch before 2.9). Of an import
    `UNITS_FROM_RANGES`, `UNITS_FROM_FSDP1` or `UNITS_FROM_ORDER`."""


class ProcessGroup(Record):
    """A set of ranks that communicate together."""

    index: int
    name: str
    ranks: list[int]
    """Global ranks, in group order, of the group that rank 0 belongs to."""
    role: str = "other"
    """`shard`, `replicate`, `post_forward` or `other`."""


class ModelInfo(Record):
    """The model as a whole."""

    class_name: str = ""
    num_parameters: int = 0
    num_trainable_parameters: int = 0


class RunManifest(Record):
    """`run.json`: written first, by rank 0, before any event."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    name: str = ""
    created: str
    """ISO 8601, UTC."""
    created_unix_ns: int
    command: list[str] = Field(default_factory=list)
    config: dict[str, Any] = Field(default_factory=dict)
    """What the training script chose to say about itself."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """The observed plan (`trace.plan.Plan`), as a dictionary."""
    model: ModelInfo = ModelInfo()
    units: list[Unit] = Field(default_factory=list)
    process_groups: list[ProcessGroup] = Field(default_factory=list)
    world_size: int
    mesh: dict[str, int] = Field(default_factory=dict)
    """Mesh dimension name to size, outermost first."""
    backend: str
    device_type: str
    device_name: str = ""
    source: str = "recorded"
    """`recorded`, `emulated`, `imported` or `predicted`."""
    emulation: dict[str, Any] = Field(default_factory=dict)
    """Emulated runs: world size, links (bytes/s, ns), preset, fixed computing times."""
    warmup_steps: int = 0
    """The first steps, left out of every median."""
    memory_steps: list[int] = Field(default_factory=list)
    """Steps under the storage tracker, left out of every time."""
    versions: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    """The environment variables that matter: CUDA_DEVICE_MAX_CONNECTIONS, NCCL_*, ..."""
    git_commit: str | None = None
    tags: list[str] = Field(default_factory=list)
    recorder: dict[str, Any] = Field(default_factory=dict)
    """How the recording was made: clock, flush interval, what could not be recorded."""
    num_unsized_collectives: int = 0
    """Of an import: those whose messages' sizes it does not tell; sums of bytes lack them."""
    notes: list[str] = Field(default_factory=list)
    """What an import knows to be missing or odd, one sentence each."""

    @property
    def is_kernel_trace(self) -> bool:
        """Imported from a device's kernels: known is when they ran, not who waited for whom.

        A profiler's trace of a CPU is none: there the main thread is seen to wait.
        """
        return self.source == "imported" and self.device_type != "cpu"

    @property
    def is_fsdp1(self) -> bool:
        """Imported from a training under `FullyShardedDataParallel`; it cannot be recorded."""
        return any(unit.recorded_by == UNITS_FROM_FSDP1 for unit in self.units)

    @property
    def knows_fsdp(self) -> bool:
        """Whether what belongs to no unit is known not to be FSDP's.

        A trace without FSDP2's own ranges does not tell who issued a collective.
        """
        if self.source != "imported":
            return True
        return any(unit.recorded_by == UNITS_FROM_RANGES for unit in self.units)


class ClockPair(Record):
    """The monotonic clock of the events and the wall clock, read at one moment."""

    monotonic_ns: int
    unix_ns: int
    uncertainty_ns: int
    """Half the time between the two reads around it."""


class FailedRequest(Record):
    """An allocation that the device's memory did not have room for."""

    requested_bytes: int
    device_free_bytes: int
    """What the device itself still had."""
    allocated_bytes: int | None = None
    """Held by tensors at that moment; None if unknown."""
    reserved_bytes: int | None = None
    step: int = 0
    phase: str = "outside"
    unit: int = -1
    """Where the program stood: index into the manifest's units; -1: in none, or unknown."""


class RankRecord(Record):
    """`rank.json`: one rank of one attempt; rewritten at start, on news, and at the end."""

    schema_version: int = SCHEMA_VERSION
    rank: int
    world_size: int
    attempt: int = 0
    local_rank: int = 0
    host: str = ""
    pid: int = 0
    pid_scope: str = ""
    """Where that number names a process: boot and PID namespace; filled in by the store."""
    device: str = ""
    device_memory_bytes: int | None = None
    """What the device has; None on CPU."""
    clock: str = "host"
    """`host` (CPU), `cuda_event`, or of an import `IMPORTED_CLOCK` or `UNPLACED_CLOCK`."""
    clock_start: ClockPair
    clock_end: ClockPair | None = None
    clock_uncertainty_ns: int = 0
    """Of the event times on the host clock; 0 when they are host times."""
    status: RunStatus = RunStatus.RUNNING
    failure: str | None = None
    """What ended the training, in words, when the recorder saw it."""
    num_steps: int = 0
    flush_interval_s: float = 1.0
    flushed_unix_ns: int = 0
    """When this file was last rewritten; the live streams are newer."""
    memory_from: str = ""
    """`cuda_allocator`, `storage_tracker` or `memory_snapshot`: what the memory samples count."""
    failed_request: FailedRequest | None = None
    """The last request for memory that failed, where an imported snapshot knows it."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Rows that could not be written, by table."""
    problems: list[str] = Field(default_factory=list)
    """What went wrong while recording, in words."""
    scalar_names: list[str] = Field(default_factory=list)


class RunSource(Protocol):
    """A run that can be asked for its tables, lazily; what every analysis takes.

    Ranks are those of the chosen attempt (the last one unless said otherwise). A table that was
    not recorded is empty. Steps and kinds, where given, limit what is read.
    """

    @property
    def manifest(self) -> RunManifest:
        """What is known about the run as a whole."""
        ...

    @property
    def status(self) -> RunStatus:
        """How the run ended, as far as its files tell."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is missing or odd, one sentence each; empty for a whole run."""
        ...

    @property
    def ranks(self) -> Sequence[RankRecord]:
        """The ranks that wrote something, by rank."""
        ...

    def events(
        self,
        rank: int,
        *,
        steps: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> EventTable:
        """The events of a rank, sorted by start."""
        ...

    def memory(self, rank: int) -> MemoryTable:
        """The memory samples of a rank, in the order they were taken."""
        ...

    def devices(self, rank: int) -> DeviceTable:
        """The device samples of a rank, in the order they were taken."""
        ...

    def scalars(self, rank: int) -> ScalarTable:
        """What the training loop logged on a rank."""
        ...

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
    ) -> SummaryTable:
        """The run in small, by rank and step; ranks and kinds, where given, limit what is read."""
        ...
