"""Define the kernels of profiled steps by unit, and `kernels.json` of a rank.

A device runs kernels; on a CPU, the operators that contain no other operator take their place.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from pydantic import Field, model_validator

from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.records import SCHEMA_VERSION, Amount, Index, Record

SMALL_KERNEL_NS = 6_000
"""A shorter kernel takes less time than its host needs to launch it (`hardware.LAUNCH_NS`)."""
KERNEL_KEYS = ("step", "unit", "phase", "kind", "name")
KERNEL_SUMS = (
    *("count", "num_small", "sum_ns", "time_ns", "gap_ns", "flops", "fusable_ns"),
    *("moved_bytes", "moved_ns"),
)
"""The columns of `KernelColumns`: those that name a row, and those that add up."""
_LARGEST_CODE = 127


class KernelKind(IntEnum):
    """The work of a kernel, by its name and phase."""

    OTHER = 0
    MATRIX_PRODUCT = 1
    ATTENTION = 2
    NORMALISATION = 3
    ELEMENTWISE = 4
    OPTIMIZER = 5
    COPY = 6
    """Kernels that only move data, such as FSDP's copies between parameters and buffers."""
    COMMUNICATION = 7
    MEMORY_COPY = 8
    """Copies and memsets that copy engines run: they are not compute."""

    @property
    def label(self) -> str:
        """The name in texts: `matrix product`."""
        return self.name.lower().replace("_", " ")

    @property
    def is_compute(self) -> bool:
        """Whether these kernels count as compute in the breakdown of a step."""
        return self not in (KernelKind.COMMUNICATION, KernelKind.MEMORY_COPY)


class KernelColumns(Record):
    """Kernels in columns: one row for each step, unit, phase, kind and name."""

    step: list[Index] = Field(default_factory=list)
    unit: list[int] = Field(default_factory=list)
    """Index into the manifest's units; -1: outside all units."""
    phase: list[int] = Field(default_factory=list)
    """A `Phase`, by the moment at which the host issued the kernel."""
    kind: list[int] = Field(default_factory=list)
    """A `KernelKind`."""
    name: list[Index] = Field(default_factory=list)
    """Index into `KernelRecord.names`."""
    count: list[Amount] = Field(default_factory=list)
    num_small: list[Amount] = Field(default_factory=list)
    """Kernels shorter than `SMALL_KERNEL_NS`; 0 on a CPU."""
    sum_ns: list[Amount] = Field(default_factory=list)
    """The sum of the durations: kernels on several streams may overlap."""
    time_ns: list[Amount] = Field(default_factory=list)
    """Each moment belongs to the kernel that began first, of those that run then: the rows of all
    kinds of compute add up to the union of compute, those of the other two kinds to their own."""
    gap_ns: list[Amount] = Field(default_factory=list)
    """Time before these kernels in which the device runs nothing."""
    flops: list[Amount] = Field(default_factory=list)
    """Floating-point operations of matrix products and attention; 0: the trace has no shapes."""
    fusable_ns: list[Amount] = Field(default_factory=list)
    """Time that one kernel for each run of elementwise kernels would save at most: the run's time
    without its longest kernel. 0 on a CPU."""
    moved_bytes: list[Amount] = Field(default_factory=list)
    """Bytes that elementwise operators, norms and copies read and write at least, by their shapes;
    0: unknown. Runs of earlier versions lack this column and the next one."""
    moved_ns: list[Amount] = Field(default_factory=list)
    """The part of `time_ns` of kernels whose bytes are known."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for later in (self.moved_bytes, self.moved_ns):
            later.extend([0] * (0 if later else len(self.step)))
        columns = [getattr(self, name) for name in type(self).model_fields]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("The columns of the kernels have different lengths.")
        for code in (*self.phase, *self.kind):
            if not 0 <= code <= _LARGEST_CODE:
                raise ValueError(f"{code} is not the code of a phase or of a kind.")
        if min(self.unit, default=NO_UNIT) < NO_UNIT:
            raise ValueError("A unit has a number below -1.")
        return self


class KernelRecord(Record):
    """`kernels.json`: the kernels of the profiled steps of a rank."""

    schema_version: Index = SCHEMA_VERSION
    run_id: str = ""
    rank: Index = 0
    attempt: Index = 0
    on_device: bool = True
    """Whether the rows are kernels of a device; False: operators on a CPU."""
    steps: list[Index] = Field(default_factory=list)
    """The profiled steps."""
    step_ns: list[Amount] = Field(default_factory=list)
    """The duration of each of them, under the profiler."""
    names: list[str] = Field(default_factory=list)
    columns: KernelColumns = KernelColumns()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.steps) != len(self.step_ns):
            raise ValueError(f"{len(self.steps)} steps have {len(self.step_ns)} durations.")
        if max(self.columns.name, default=-1) >= len(self.names):
            raise ValueError(f"A kernel has a name beyond the {len(self.names)} names.")
        return self
