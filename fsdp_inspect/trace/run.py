"""Define the records of a run: the manifest, its units and process groups, and the rank records.

`RunManifest` is `run.json`, `RankRecord` is `rank.json`. Reading ignores unknown fields, which a
newer minor version may add. Writing is strict.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_serializer

from fsdp_inspect.formatting import WholeCategory
from fsdp_inspect.trace.allocations import AllocationHistory
from fsdp_inspect.trace.black_box import BlackBox
from fsdp_inspect.trace.codes import MemoryCategory
from fsdp_inspect.trace.correctness import TrainingSeen
from fsdp_inspect.trace.host_work import HostActivity
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.live_memory import (
    HOST_ALLOCATION_FAILED,
    LiveHistory,
    LiveMoment,
    OutOfMemoryRecord,
)
from fsdp_inspect.trace.network_probe import NetworkProbe
from fsdp_inspect.trace.numerics import NumericsStep
from fsdp_inspect.trace.records import SCHEMA_VERSION, Amount, Index, Moment, Record, WorldSize
from fsdp_inspect.trace.sharders import FSDP1, FSDP2, UNKNOWN, SharderTraits, traits_of
from fsdp_inspect.trace.stack_dumps import StackDump
from fsdp_inspect.trace.tables import (
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    StatisticsTable,
    SummaryTable,
)

# --- Define the record of the code that sharded a model: calls, source lines, framework and launch.


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class UserStatement(_Record):
    """The statement of the user's code in which a framework called `fully_shard`."""

    file: str
    line: int
    end_line: int
    model: str = ""
    """The variable that holds the model there; empty: unknown."""
    model_after: str = ""
    """The variable to which the statement assigns the sharded model; empty: none."""
    made_at: int = 0
    """The last line of the statement before it that assigns `model`; 0: not found."""


class ShardingCall(_Record):
    """One line that called `fully_shard`, and the units that it made."""

    function: str
    """`fully_shard`, `replicate` or `apply_plan`."""
    file: str
    """The file: relative to the working directory if it is below it, and for a package relative to
    the package."""
    line: int
    units: list[str]
    """The names of the units, in the order of the calls."""
    package: str = ""
    """The package that contains the line; empty: the user's own code."""
    argument: str = ""
    """The first argument as written; empty: the statement could not be read. This also holds for
    the following fields."""
    keywords: dict[str, str] = Field(default_factory=dict)
    """The keyword arguments as written; `**` for an unpacked mapping."""
    first_line: int = 0
    end_line: int = 0
    """The lines of the statement."""
    removed_from: int = 0
    removed_to: int = 0
    """The lines to remove with the call: the statement, or the loop that only shards."""
    leaves_block_empty: bool = False
    """Whether the removed lines are the whole body of a function, `if` or `with`."""
    user: UserStatement | None = None
    """The user's statement around a call in a package."""


class SourceLines(_Record):
    """Consecutive lines of the user's code."""

    file: str
    first_line: int
    lines: list[str]


class TrainingCode(_Record):
    """The code that sharded the recorded models, as far as the recorder saw it."""

    calls: list[ShardingCall] = Field(default_factory=list)
    """The calls in the order of their first call; empty: the models were sharded before the
    recorder was imported, or by an older version."""
    sources: list[SourceLines] = Field(default_factory=list)
    frameworks: list[str] = Field(default_factory=list)
    """The packages around the calls, innermost first: the package that called `fully_shard`, or the
    packages that ran the user's own call."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The sharding settings of the framework."""
    launch: list[str] = Field(default_factory=list)
    """The command that started the ranks; empty: unknown."""
    launched_at: int = 0
    """The number of words of `launch` before the command of one rank; 0: unknown."""


# --- Define the record of a training process outside its steps: start, sharding, checkpoints,
# memory.
#
# All times are ns on the clock of the rank's events.


class TimeSpan(Record):
    """A half-open span of time."""

    start_ns: Moment
    end_ns: Moment


class HostMemoryMark(Record):
    """The host memory of a process at one moment."""

    time_ns: Moment
    rss_bytes: Amount
    high_water_bytes: Amount
    """The highest resident memory since the process started."""


class ProcessLife(Record):
    """The activity of a rank's process outside of plain steps: loads, sharding, compilations."""

    started_ns: Moment | None = None
    """The start of the process, to 10 ms; None: unknown."""
    imported_ns: Moment | None = None
    """The time at which torch and the recorder were imported."""
    shard: TimeSpan | None = None
    """From the start of the first `fully_shard` call to the end of the last one before the
    recorder attached; None: no call was seen."""
    loads: list[TimeSpan] = Field(default_factory=list)
    """Calls of torch that load a checkpoint, before the first step; at most the last 100."""
    background_saves: list[TimeSpan] = Field(default_factory=list)
    """Checkpoints that `async_save` completed, from the call to the end of the write; at most the
    last 100."""
    compiles: list[TimeSpan] = Field(default_factory=list)
    """Compilations by torch.compile; at most the last 100."""
    standstills: list[TimeSpan] = Field(default_factory=list)
    """Times longer than the watchdog's limit in which nothing moved, and which ended; at most the
    last 100."""
    memory_marks: list[HostMemoryMark] = Field(default_factory=list)
    """Host memory before the device samples begin, by time; empty if the system does not
    report it."""


IMPORTED_CLOCK = "kineto"
"""`RankRecord.clock` of a profiler trace: the ranks of one host share a clock if their collectives
agree."""
UNPLACED_CLOCK = "unplaced"
"""`RankRecord.clock` of a trace without wall time: not comparable with the times of other ranks."""
UNITS_FROM_RANGES = "ranges"
"""`Unit.recorded_by` of an import whose units come from FSDP2's own profiler ranges."""
UNITS_FROM_ORDER = "order"
"""`Unit.recorded_by` of an import without such ranges: units are inferred from the order and the
sizes of collectives."""
FLAT_PARAM = "flat_param"
"""`Unit.recorded_by` of a unit of FSDP1: a wrapper on its `FlatParamHandle`."""
UNITS_FROM_FSDP1 = "fsdp1"
"""`Unit.recorded_by` of an import whose units are inferred from the order of FSDP1's ranges, which
name no unit."""


class RunStatus(StrEnum):
    """The status of a run or a rank."""

    RUNNING = "running"
    COMPLETE = "complete"
    CUT_OFF = "cut off"
    """The recording of a rank has no end: the process was killed, crashed, left with `os._exit`, or
    its disk refused the last files. Data up to the last flush is present."""
    FAILED = "failed"
    """The recorder saw an exception of the training."""
    PARTIAL = "partial"
    """Data of some ranks is missing."""
    IMPORTED = "imported"

    @classmethod
    def _missing_(cls, value: object) -> "RunStatus | None":
        return cls.CUT_OFF if value == "crashed" else None  # its earlier name


class ParameterTraits(Record):
    """The settings of one parameter of a unit whose parameters differ in a setting."""

    dtype: str
    """The dtype in which a rank stores its shard."""
    gathered_dtype: str
    """The dtype of the all-gather."""
    is_trained: bool = True
    shard_dim: Amount = 0
    """The dimension on which it is sharded."""


def traits_that_differ(traits: dict[str, ParameterTraits]) -> dict[str, ParameterTraits]:
    """The settings of the parameters of a unit; empty if all are equal, on dimension 0."""
    first, *others = traits.values()
    is_uniform = first.shard_dim == 0 and all(each == first for each in others)
    return {} if is_uniform else traits


class StartStage(IntEnum):
    """The stages of a rank before its first step, in their order."""

    STARTED = 1
    GROUP_MADE = 2
    """The process group exists."""
    SHARDED = 3
    """The sharding of a model has begun."""


class Unit(Record):
    """A communication group of parameters.

    FSDP2: a `FSDPParamGroup`. FSDP1: a `FlatParamHandle`. DDP: a bucket. ZeRO-3: a sub-module that
    owns parameters. ZeRO-1 and ZeRO-2: a bucket of gradients or a parameter group.
    """

    index: Index
    fqn: str
    """FSDP: the name that torch gives the unit, its modules' fqns joined by `, `; empty for the
    root. DDP: `bucket 0`."""
    modules: list[str]
    """The fqns of its modules: of one `fully_shard` call, of one wrapper, or those whose
    parameters a bucket holds."""
    module_class: str = ""
    num_parameters: Amount
    """Parameters of the whole unit, over all ranks, without padding."""
    num_trainable_parameters: Amount
    num_tensors: Amount = 0
    parameters: dict[str, list[Amount]] = Field(default_factory=dict)
    """The unsharded shape of each parameter by fqn, in the model's order; empty: not recorded."""
    traits: dict[str, ParameterTraits] = Field(default_factory=dict)
    """The settings of each parameter by fqn; empty: they are equal, on dimension 0, or unknown."""
    tied: list[str] | None = None
    """Parameters that several modules of the model share; None: not recorded."""
    unsharded_bytes: Amount
    """The padded all-gather output in the parameter dtype, which an unshard allocates. Without
    sharding: the parameters."""
    sharded_bytes: Amount
    """One rank's shard in the original dtype, with padding; 0: unknown (imports)."""
    reduce_bytes: Amount
    """The padded reduce-scatter input in the reduce dtype, without sharding the all-reduce; 0 for a
    frozen unit."""
    param_dtype: str
    reduce_dtype: str
    reshard_after_forward: bool | WorldSize | None
    """The effective value, after torch's rule for the root; an int is the number of ranks to
    reshard to."""
    shard_group: int = -1
    """Index of the process group of its all-gather and reduce-scatter; -1: no communication."""
    replicate_group: int = -1
    """Index of the process group of its all-reduce (HSDP); -1: none."""
    is_root: bool = False
    offload: bool = False
    are_sizes_known: bool = True
    """False: an import lacks the sizes of some of its messages. A size of 0 is then unknown."""
    execution_index: int = -1
    """Position in the first recorded forward, from 0; -1: never ran."""
    recorded_by: str = "custom_comm"
    """`custom_comm`: a wrapper installed with torch's public setters. `param_group`: a wrapper on
    the group object itself (several groups in a module, torch before 2.9). `flat_param`: a wrapper
    on FSDP1's `FlatParamHandle`. `reducer`: an observer of the all-reduces of DDP's reducer.
    `graph`: observed operators, their units inferred from sizes and order.
    `zero_module`, `zero_bucket`, `zero_group`: wrappers on methods of DeepSpeed's ZeRO optimizer.
    Imports have `UNITS_FROM_RANGES`, `UNITS_FROM_FSDP1` or `UNITS_FROM_ORDER`."""

    @property
    def first_module(self) -> str:
        """Its first module. A damaged run or an import can lack the modules: then its name."""
        return self.modules[0] if self.modules else self.fqn

    def traits_of(self, name: str) -> ParameterTraits:
        """The settings of one parameter, also if all parameters have those of the unit."""
        same = ParameterTraits(dtype=self.param_dtype, gathered_dtype=self.param_dtype)
        return self.traits.get(name, same)

    @property
    def order(self) -> float:
        """The `execution_index`; infinite for a unit that never ran, which sorts last."""
        return self.execution_index if self.execution_index >= 0 else float("inf")

    @property
    def is_replicated(self) -> bool:
        """Whether every rank keeps all parameters (torch's `replicate`): it has no shard group."""
        return self.shard_group < 0 <= self.replicate_group


class ModuleUse(Record):
    """A module whose parameters ZeRO-3 gathers before its forward and its backward."""

    unit: int
    """The unit whose passes are its own; -1: no unit, because it has no parameters, or only those
    of other units."""
    parameters: list[Index]
    """The parameters in the order of DeepSpeed, as numbers in `Unit.parameters` of all units."""


class UseOrder(Record):
    """ZeRO-3: the order in which each step uses parameters, as DeepSpeed's hooks see it."""

    modules: list[ModuleUse]
    """The modules in the order of their first use, also those without parameters: DeepSpeed
    prefetches at each of them."""
    events: list[tuple[Index, Index, Amount]]
    """In the order of the step: a `codes.UseEvent`; the module, or the parameter of a gradient;
    the ns on the host since the event before, without its fetches: the shortest of some steps."""


class ProcessGroup(Record):
    """A group of ranks that communicate with each other."""

    index: Index
    name: str
    ranks: list[Index]
    """Global ranks, in group order. If several groups have the role, these are the ranks of rank
    0's group."""
    role: str = "other"
    """`shard`, `replicate`, `post_forward` or `other`."""
    dimension: str = ""
    """The name of its dimension in the `DeviceMesh` (`dp_shard`); empty: it has none, or no name.
    """
    is_name_inferred: bool = False
    """Imports: `dimension` is the name of the process group, not that of a `DeviceMesh`."""
    is_role_inferred: bool = False
    """Imports: `role` follows from the order and the sizes of collectives."""
    are_ranks_known: bool = True
    """False: an import lacks the list of ranks, and `ranks` are numbered from 0."""
    parallelism: str = ""
    """The dimension by its purpose: `shard`, `replicate`, `tp`, `ep`, `cp`, `pp`, `world`, or the
    user's own name; empty: unknown. Readers derive it again from the other fields, see
    [Note: the dimension of a process group] in `trace.mesh_dimensions`."""
    parallelism_from: str = ""
    """The reason for `parallelism`: `sharder`, `mesh`, `order`, `name`, `all_ranks` or `ranks`;
    empty: none."""


class GroupDimension(Record):
    """The dimension of a process group; the fields of `ProcessGroup` with the same names."""

    dimension: str = ""
    parallelism: str = ""
    parallelism_from: str = ""


class ModelInfo(Record):
    """The model as a whole."""

    class_name: str = ""
    num_parameters: Amount = 0
    num_trainable_parameters: Amount = 0


class HostMemory(Record):
    """Tensors of a rank on the host, bytes."""

    offloaded_bytes: Amount
    """Offloaded shards of parameters and gradients, and their optimizer state."""
    whole_model_bytes: Amount
    """All parameters and buffers before sharding: a process that builds or loads the whole model
    holds them."""


class OperationCount(Record):
    """The operations of a unit in one phase of a step, with results of one width."""

    unit: Annotated[int, Field(ge=-1)]
    """Index of the unit; -1: outside all units."""
    phase: str
    itemsize: Index
    """Bytes of an element of the results; 0: the operators return no tensor."""
    run: Amount
    """Multiplications and additions of matrix products and attention that run."""
    whole: Amount
    """The same with causal attention counted whole, as in MFU."""
    kernels: Amount
    """Operators that are no views."""


class JobLaunch(Record):
    """The start of a job's processes by a launcher."""

    id: str = ""
    """The launcher's process; its restarts of the ranks have the same one. Empty: unknown."""
    num_restarts: Index = 0
    """The number of restarts of the ranks before this start."""


class TableOrigin(Record):
    """The recording that wrote a table, as the table states it in its metadata."""

    run_id: str
    created_unix_ns: Moment
    """`RunManifest.created_unix_ns`: runs in other folders may have the same id."""
    attempt: int = -1
    """-1: the table is about all attempts of the run."""
    rank: int = -1
    """-1: the table is about all ranks of the run."""

    def __str__(self) -> str:
        place = f", attempt {self.attempt}, rank {self.rank}" if self.rank >= 0 else ""
        return f"run {self.run_id!r} of {self.created_unix_ns}{place}"


class RunManifest(Record):
    """`run.json`: rank 0 writes it before any event."""

    schema_version: Index = SCHEMA_VERSION
    run_id: str
    """The name of the run's folder, also after a copy or a change of the name. `recorded_id` is the
    one in the file."""
    name: str = ""
    created: str
    """ISO 8601, UTC."""
    created_unix_ns: Moment
    command: list[str] = Field(default_factory=list)
    config: dict[str, Any] = Field(default_factory=dict)
    """The configuration that the training script passed to the recorder."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """The observed plan (`trace.plan.Plan`), as a dictionary."""
    model: ModelInfo = ModelInfo()
    units: list[Unit] = Field(default_factory=list)
    operations: list[OperationCount] = Field(default_factory=list)
    """Forecasts: the operations of the step of rank 0."""
    host_memory: HostMemory | None = None
    """Forecasts for CUDA: the tensors of rank 0 on the host."""
    process_groups: list[ProcessGroup] = Field(default_factory=list)
    world_size: WorldSize
    mesh: dict[str, WorldSize] = Field(default_factory=dict)
    """Mesh dimension name to size, outermost first."""
    backend: str
    device_type: str
    device_name: str = ""
    sharder: str = FSDP2
    """The code that made the units: a name of `trace.sharders`. An import, and a run recorded
    before this field existed, has `FSDP2`."""
    source: str = "recorded"
    """`recorded`, `emulated`, `imported` or `predicted`."""
    emulation: dict[str, Any] = Field(default_factory=dict)
    """Emulated runs: world size, links (bytes/s, ns), preset, fixed compute times."""
    warmup_steps: Index = 0
    """The number of warm-up steps, which no time uses."""
    memory_steps: list[Index] = Field(default_factory=list)
    """The numbers of the memory steps, which no time uses."""
    versions: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    """The relevant environment variables: CUDA_DEVICE_MAX_CONNECTIONS, NCCL_*, ..."""
    observed: dict[str, str] = Field(default_factory=dict)
    """Settings of the model and the loop as observed in the first step: `dropout`, `attention`
    (of Transformers), `optimizer`, `loss_dtype`; `inputs` are those of the memory step."""
    uses: UseOrder | None = None
    """ZeRO-3: the order of uses; None: of another sharder, unknown, or different in each step."""
    git_commit: str | None = None
    code: TrainingCode = TrainingCode()
    """The code that sharded the models, and the command that started the ranks."""
    tags: list[str] = Field(default_factory=list)
    recorder: dict[str, Any] = Field(default_factory=dict)
    """Settings of the recording: clock, flush interval, parts that could not be recorded."""
    num_device_events: Amount = 0
    """Imports: the number of kernels and copies that were read."""
    num_unread_events: Amount = 0
    """Imports: the number of events of unknown categories, which may be work of a device."""
    lacks_kernels: bool = False
    """Imports: a trace has launches of kernels or a backend of devices, but no kernels."""
    num_launches: Amount = 0
    """Imports: the number of kernel launches whose kernel should be in a trace."""
    num_lost_launches: Amount = 0
    """Imports: the number of these launches whose kernel is not in the trace."""
    num_devices_per_trace: Index = 0
    """Imports: the largest number of devices whose kernels one trace joins; 0: unknown."""
    longest_pause_ns: Amount = 0
    """Imports: the longest time in which a device does nothing, if the trace is one step. It is the
    longest part of its trace over all traces. The whole trace, if it contains a whole process."""
    paused_trace_ns: Amount = 0
    """Imports: the duration of that trace."""
    lacks_training: bool = False
    """Imports: the traces show what ran, but no backward pass and no optimizer step: inference."""
    num_unsized_collectives: int = 0
    """Imports: the number of collectives with unknown message size; sums of bytes lack them."""
    notes: list[str] = Field(default_factory=list)
    """Imports: missing or unusual data, one note for each."""

    _recorded_id: str = PrivateAttr("")

    @property
    def recorded_id(self) -> str:
        """The id that the recorder gave the run; its tables state it."""
        return self._recorded_id or self.run_id

    @field_serializer("run_id")
    def _write_id(self, _: str) -> str:
        return self.recorded_id

    def in_folder(self, name: str) -> "RunManifest":
        """The manifest of a run that was read from a folder with this name; empty: unknown."""
        named = self.model_copy(update={"run_id": name or self.run_id})
        named._recorded_id = self.recorded_id
        return named

    def has_id(self, name: str) -> bool:
        """Whether the run has this name, or was recorded with it."""
        return name in (self.run_id, self.recorded_id)

    def origin(self, attempt: int = -1, rank: int = -1) -> TableOrigin:
        """The origin of the tables of a rank, or by default of the run's own tables."""
        return TableOrigin(
            run_id=self.recorded_id,
            created_unix_ns=self.created_unix_ns,
            attempt=attempt,
            rank=rank,
        )

    @property
    def is_kernel_trace(self) -> bool:
        """Whether the run is an imported device trace, which has kernel times but no waits.

        A profiler trace of a CPU is not a kernel trace: it shows the waits of the main thread.
        """
        return self.source == "imported" and self.device_type not in ("cpu", UNKNOWN)

    @property
    def can_rank_plans(self) -> bool:
        """Whether other plans can be simulated, as far as the manifest shows it.

        This requires a plan, which no import has, a sharder whose schedule is simulated, and that
        all units are sharded over several ranks.
        """
        is_sharded = not any(unit.is_replicated for unit in self.units) and not self.shards_alone
        is_known = bool(self.plan) and self.source != "imported"
        return is_known and is_sharded and self.sharder_traits.is_simulated

    @property
    def shards_alone(self) -> bool:
        """Whether each shard of a mesh with replicas has one rank, so that FSDP gathers nothing."""
        sizes = {group.index: len(group.ranks) for group in self.process_groups}
        known = {sizes.get(unit.shard_group) for unit in self.units}
        return self.world_size > 1 and known == {1}

    @property
    def num_outside_units(self) -> int:
        """Parameters of the model that no unit holds, such as ignored ones.

        0 with tensor parallelism: a unit then counts its part of a tensor.
        """
        if "tp" in self.mesh:
            return 0
        in_units = sum(unit.num_parameters for unit in self.units)
        return max(self.model.num_parameters - in_units, 0)

    def name_category(self, category: str) -> str:
        """A memory category in the words of the run.

        Nothing is called sharded if all units are replicated, and no parameter if some are whole
        because no unit holds them.
        """
        is_whole = bool(self.units) and all(unit.is_replicated for unit in self.units)
        is_mixed = category == MemoryCategory.SHARDED_PARAMETER.label and self.num_outside_units
        return WholeCategory(category) if is_whole or is_mixed else category

    @property
    def launch_line(self) -> str:
        """The command that started the ranks, for a shell; empty: unknown.

        A comment says if it is the command of one rank, because the starter is unknown.
        """
        line = shlex.join(self.code.launch or self.command)
        is_of_one = self.source == "recorded" and self.world_size > 1 and not self.code.launched_at
        return f"{line}  # one of {self.world_size} ranks" if line and is_of_one else line

    @property
    def torch_release(self) -> tuple[int, int]:
        """The version of torch, such as (2, 13); zeros if it is unknown."""
        major, minor, *_ = [*self.versions.get("torch", "").split(".")[:2], "", ""]
        known = major.isdecimal() and minor.isdecimal()
        return (int(major), int(minor)) if known else (0, 0)

    @property
    def sharder_traits(self) -> SharderTraits:
        """The name and the settings of the sharder."""
        return traits_of(self.sharder)

    @property
    def is_fsdp1(self) -> bool:
        """Whether the training used `FullyShardedDataParallel` (FSDP1)."""
        is_imported = any(unit.recorded_by == UNITS_FROM_FSDP1 for unit in self.units)
        return self.sharder == FSDP1 or is_imported

    @property
    def knows_fsdp(self) -> bool:
        """Whether a collective without a unit is certainly not FSDP's.

        A trace without FSDP2's own ranges does not show the issuer of a collective. DDP issues
        collectives that belong to no bucket, for its first steps, for buffers and for communication
        hooks. DeepSpeed reduces norms and compares the ranks' orders.
        """
        if self.source != "imported":
            return self.sharder_traits.owns_all
        return any(unit.recorded_by == UNITS_FROM_RANGES for unit in self.units)


class ClockPair(Record):
    """The monotonic clock of the events and the wall clock, read at one moment."""

    monotonic_ns: Moment
    unix_ns: Moment
    uncertainty_ns: Amount
    """Half the time between the two reads around it."""


class FailedRequest(Record):
    """An allocation that failed because the device was out of memory."""

    requested_bytes: Amount
    device_free_bytes: Amount
    """Free memory of the device at that moment."""
    allocated_bytes: Amount | None = None
    """Allocated bytes at that moment; None if unknown."""
    reserved_bytes: Amount | None = None
    step: int = 0
    phase: str = "outside"
    unit: int = -1
    """The running unit, as index into the manifest's units; -1: none or unknown."""
    num_later: Amount = 0
    """Allocations of the trace after it. Code that handles the error may make some."""


BLOCK_OF_DETAIL = 4
"""The consecutive steps that a recording with a budget records in detail."""


class RecorderUse(_Record):
    """What the recorder used on one rank, by its own clocks."""

    budget: float
    """The part of the step time that it may take."""
    num_steps: Index = 0
    num_detailed: Index = 0
    """The steps whose units and collectives it recorded."""
    plain_ns: Amount = 0
    """The time of its hooks and notes on the training thread in the timed plain steps."""
    num_timed_plain: Index = 0
    """The plain steps in which it timed its notes."""
    writer_ns: Amount = 0
    """CPU time of the thread that writes rows."""
    threads_ns: Amount = 0
    """CPU time of its other threads, which sample and watch, and of its process."""
    wall_ns: Amount = 0
    """The time from its start to this record."""

    def plain_ratio(self, step_s: float) -> float:
        """The cost of a plain step as a part of a step time, which is in seconds."""
        if not self.num_timed_plain or step_s <= 0:
            return 0.0
        return self.plain_ns / self.num_timed_plain / 1e9 / step_s


MISSING_READING = "cannot be read on this machine"
"""Part of the problem that the machine lacks a reading, such as that of NVLink traffic."""


_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket|remote (error|process)"
    r"|ncclRemoteError|nccl.*(abort|watchdog)|gloo/transport|timed? ?out|SignalException"
    r"|recvValue failed|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
_OF_PYTHON = re.compile(r"^(Connection\w*|BrokenPipe|Timeout)Error at step|DataLoader")
"""Errors that Python code raises. A collective or the store raises a `RuntimeError`."""
_OF_DEVICE = re.compile(r"CUDA error:")
_OUT_OF_MEMORY = re.compile(rf"^(OutOfMemoryError|MemoryError|.*{HOST_ALLOCATION_FAILED.pattern})")


class RankRecord(Record):
    """`rank.json`: one rank of one attempt; written at the start, on changes, and at the end."""

    schema_version: Index = SCHEMA_VERSION
    rank: Index
    world_size: WorldSize
    attempt: Index = 0
    run_id: str = ""
    """`RunManifest.run_id`; empty: an earlier version wrote the record, and its tables state no
    origin."""
    run_created_unix_ns: Moment = 0
    """`RunManifest.created_unix_ns`."""
    launch: JobLaunch = JobLaunch()
    """The start of this attempt; runs of earlier versions have no id."""
    local_rank: int = 0
    host: str = ""
    pid: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    pid_scope: str = ""
    """The boot and PID namespace in which `pid` is valid; set by the store."""
    device: str = ""
    device_memory_bytes: Amount | None = None
    """Total memory of the device, or the requested limit; None on CPU without a limit."""
    clock: str = "host"
    """`host` (CPU) or `cuda_event`; imports have `IMPORTED_CLOCK` or `UNPLACED_CLOCK`."""
    clock_start: ClockPair
    clock_end: ClockPair | None = None
    clock_uncertainty_ns: Amount = 0
    """Uncertainty of the event times on the host clock; 0 for times of the host itself."""
    status: RunStatus = RunStatus.RUNNING
    failure: str | None = None
    """The error that ended the training, if the recorder saw it."""
    failed_at: str = ""
    """The user's line that the error passed, `file:line`; empty: none or unknown."""
    failed_unix_ns: Moment = 0
    """The wall time at which the recorder saw the error; 0: none or unknown."""
    communication_error: str | None = None
    """The error of a collective or of the store that `failure` is or follows from; empty: it arose
    elsewhere. None: unknown."""
    start_stage: int = 0
    """The `StartStage` of a rank that has not begun to train; 0: it has a recorder."""
    crash_stacks: bool | None = None
    """Whether a fatal signal writes stacks into the rank's folder; None: unknown."""
    num_steps: Index = 0
    flush_interval_s: float = 1.0
    flushed_unix_ns: Moment = 0
    """The time of the last write of this file; the live streams are newer."""
    life: ProcessLife | None = None
    """The process outside its steps; None: not recorded."""
    memory_from: str = ""
    """The source of memory samples: `cuda_allocator`, `storage_tracker` or `memory_snapshot`."""
    output_bytes: dict[str, Amount] = Field(default_factory=dict)
    """The size of the output of each unit, by its index, in a memory step: the tensors that have a
    gradient. 0: unknown, as if its forwards differ."""
    failed_request: FailedRequest | None = None
    """The last failed allocation, if an imported snapshot contains one."""
    dropped: dict[str, Amount] = Field(default_factory=dict)
    """The number of rows that the recorder dropped, by table: invalid rows, and rows that it could
    not write because of a disk fault."""
    tables: list[str] = Field(default_factory=list)
    """The tables with rows at the last write of this file; empty: an earlier version wrote it."""
    problems: list[str] = Field(default_factory=list)
    """Problems during the recording, one message for each."""
    scalar_names: list[str] = Field(default_factory=list)
    group_dimensions: list[GroupDimension] = Field(default_factory=list)
    """The dimension of each process group as this rank numbers them: a rank may use a group that
    rank 0 lacks. Empty: not recorded, the groups of the manifest apply."""
    training: TrainingSeen | None = None
    """What the rank observed of its training in the first steps; None: not observed."""
    unused_parameters: str = ""
    """DDP with `find_unused_parameters`: whether its backwards used `some` parameters not, or
    `none`. Empty: unknown."""
    recorder: RecorderUse | None = None
    """What the recorder used; None: each step was recorded in detail."""
    host_work: HostActivity | None = None
    """What stopped the host, by line, and the sizes of batches; None: not recorded."""
    coordinates: dict[str, Index] = Field(default_factory=dict)
    """The position of this rank along each dimension of the mesh, by `parallelism`."""

    def of_run(self, manifest: RunManifest) -> "RankRecord":
        """The record with the identity of its run."""
        known = {"run_id": manifest.recorded_id, "run_created_unix_ns": manifest.created_unix_ns}
        return self.model_copy(update=known)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether an allocation failed, on the device or the host."""
        return _OUT_OF_MEMORY.search(self.failure or "") is not None

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because another rank was gone, or did not take part in time."""
        failure, text = self.failure or "", self.communication_error
        if self.ran_out_of_memory or failure.startswith("KeyboardInterrupt"):
            return False
        if text is None:  # an earlier version recorded only the text
            text = "" if _OF_PYTHON.search(failure) else failure
        return bool(_PEER_LOST.search(text) and not _OF_DEVICE.search(text))

    @property
    def origin(self) -> TableOrigin | None:
        """The origin that the tables of this rank state; None: they state none."""
        if not self.run_id:
            return None
        return TableOrigin(
            run_id=self.run_id,
            created_unix_ns=self.run_created_unix_ns,
            attempt=self.attempt,
            rank=self.rank,
        )


class RunSource(Protocol):
    """A run that reads its tables on request; the input of every analysis.

    Ranks are those of the selected attempt, by default the last one. A table that was not recorded
    is empty. `steps` and `kinds` limit the rows that are read; None reads all.
    """

    @property
    def manifest(self) -> RunManifest:
        """The manifest of the run."""
        ...

    @property
    def status(self) -> RunStatus:
        """The status of the run, according to its files."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Missing or unusual data, one note for each; empty for a complete run."""
        ...

    @property
    def ranks(self) -> Sequence[RankRecord]:
        """The records of the ranks that have data, by rank."""
        ...

    @property
    def earlier_attempts(self) -> "Sequence[RunSource]":
        """The attempts of the run before this one, oldest first."""
        ...

    @property
    def starts(self) -> "Sequence[RunSource]":
        """Runs with the missing ranks of this one: they failed or stood before they trained."""
        ...

    @property
    def run_of_start(self) -> "RunSource | None":
        """The run of the ranks that train, if this is that of ranks that never did; else None."""
        ...

    @property
    def network_probe(self) -> NetworkProbe | None:
        """The measured durations of messages of many sizes; None: the run has none."""
        ...

    def black_box(self, rank: int, *, at_desync: bool = False) -> BlackBox | None:
        """The last collectives of a rank, with its last signs of life; None: not recorded.

        With `at_desync`, as they were when the ranks first issued different collectives.
        """
        ...

    def stack_dumps(self, rank: int) -> Sequence[StackDump]:
        """The Python stacks that a rank wrote when it hung or died, the most informative first."""
        ...

    def live_moments(self, rank: int) -> Sequence[LiveMoment]:
        """The live memory at the highest moments of a rank's last memory step, by line.

        The moments are the highest one of each phase, and the end of the step. Empty: not recorded.
        """
        ...

    def allocations(self, rank: int) -> AllocationHistory | None:
        """The allocation history of a rank: of a forecast or a memory snapshot; None without."""
        ...

    def live_history(self, rank: int) -> LiveHistory | None:
        """Every change of the live memory in a rank's last memory step; None: not recorded."""
        ...

    def out_of_memory(self, rank: int) -> OutOfMemoryRecord | None:
        """The report of a rank's failed allocation; None: none failed, or it was not reported."""
        ...

    def kernels(self, rank: int) -> KernelRecord | None:
        """The kernels of a rank's imported trace, by unit; None without one."""
        ...

    def profile(self, rank: int) -> bytes | None:
        """The trace that torch.profiler wrote of a rank's profiled steps; None without any."""
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
        """The memory samples of a rank, by time."""
        ...

    def devices(self, rank: int) -> DeviceTable:
        """The device samples of a rank, by time."""
        ...

    def scalars(self, rank: int) -> ScalarTable:
        """The numbers that the training loop logged on a rank."""
        ...

    def numerics(self, rank: int) -> Sequence[NumericsStep]:
        """The numerics steps of a rank, in the order of their steps."""
        ...

    def summary(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[int] | None = None,
        steps: Collection[int] | None = None,
    ) -> SummaryTable:
        """The summary, by rank and step. `ranks`, `kinds` and `steps` limit the rows; None: all."""
        ...

    def statistics(self) -> StatisticsTable:
        """The statistics of all ranks (`store.reduction.run_statistics`)."""
        ...


def completed_steps(run: RunSource, record: RankRecord) -> int:
    """The steps that a rank completed. Those of a killed rank are in its black box."""
    box = run.black_box(record.rank) if record.status is RunStatus.CUT_OFF else None
    return max(record.num_steps, 0 if box is None else box.header.step)


# --- Assign the ranks of a run to nodes, from the recorded hosts or the emulated network.


def emulated_ranks_per_node(manifest: RunManifest) -> int | None:
    """Ranks on each emulated node; the last node may have fewer. None for runs not emulated."""
    size = manifest.emulation.get("gpus_per_node")
    return size if isinstance(size, int) and size > 0 else None


def emulated_latency_ns(manifest: RunManifest, ranks: Iterable[int]) -> float | None:
    """The latency of the emulated link of a group of ranks; None for runs not emulated."""
    size, emulation = emulated_ranks_per_node(manifest), manifest.emulation
    if size is None:
        return None
    crosses_nodes = len({rank // size for rank in ranks}) > 1
    link = (emulation.get("inter") if crosses_nodes else None) or emulation.get("intra")
    return None if link is None else float(link["latency_ns"])


def hosts_of(run: RunSource) -> dict[int, str]:
    """The node of each rank, by rank; ranks of an unknown node are missing."""
    size = emulated_ranks_per_node(run.manifest)
    if size is not None:
        return {rank: f"node {rank // size}" for rank in range(run.manifest.world_size)}
    return {record.rank: record.host for record in run.ranks if record.host}


def ranks_per_node(hosts: Iterable[str | None]) -> int | None:
    """Number of consecutive ranks on each node.

    Args:
        hosts: The node of each rank, in the order in which ranks form groups; None: unknown.

    Returns:
        None if a node is unknown, if nodes differ in size, or if the ranks of a node are not
        consecutive.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    names = {host for host, _ in runs}
    sizes = {size for _, size in runs}
    is_known = None not in names and len(names) == len(runs)
    return sizes.pop() if is_known and len(sizes) == 1 else None
