"""Read a forecast as the step of a plan: its memory, and its work on the streams.

The forecast counts the storages and the operations of FSDP2's own code with the user's model. In
the simulated step, each unit computes at once, in the order of the first forward. The outermost
unit computes last.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_inspect.analysis.memory.fit import Allowance, default_allowance
from fsdp_inspect.analysis.memory.peak import CategoryBytes, measure_memory
from fsdp_inspect.analysis.memory.reserved import ReservedPrediction, predict_reserved
from fsdp_inspect.emulation.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.hardware import LAUNCH_NS
from fsdp_inspect.simulation.planning.workload import (
    LAUNCH_OF_COLLECTIVE_NS,
    OPTIMIZER_TRAFFIC,
    Ring,
    Speed,
    steady_step_ns,
)
from fsdp_inspect.simulation.policies import microbatches_of, policies_of
from fsdp_inspect.simulation.recorded import Execution, simulate_step
from fsdp_inspect.simulation.workload import Piece, UnitWork, Workload, passes_of, tape_of
from fsdp_inspect.trace.codes import Phase
from fsdp_inspect.trace.plan import Accumulation, Plan
from fsdp_inspect.trace.run import HostMemory, ProcessGroup, RunManifest, RunSource, Unit

_MASTER = 4
_WIDE = 4
"""Bytes of an element from which an operation runs at the rate of float32."""
_OFFLOADED_COPIES = 4
"""Parameters, gradients and AdamW's two states, in the dtype of the parameters."""


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """The forecast for one world size."""

    world_size: int
    peak_bytes: int
    """Bytes of storages at the peak of rank 0."""
    resting_bytes: int
    """Allocated bytes at the end of the step."""
    phase: str
    """Phase of the peak."""
    phases: dict[str, int]
    """Peak of each phase, in the order of the step."""
    fqn: str | None
    """Innermost unit at the peak; None: outside all units."""
    categories: tuple[CategoryBytes, ...]
    """Categories at the peak, largest first."""
    reserved: ReservedPrediction | None = None
    """What CUDA's caching allocator reserves, predicted; None: on CPU, or without a history."""
    host: HostMemory | None = None
    """The memory of rank 0 on the host; None: on CPU, or a forecast of an earlier version."""


def allowance_of(row: ForecastRow) -> Allowance:
    """The estimate of the device memory that a forecast leaves out."""
    reserved = None if row.reserved is None else row.reserved.peak_reserved_bytes
    return default_allowance(
        row.peak_bytes, world_size=row.world_size, peak_reserved_bytes=reserved
    )


def row_of(
    run: RunSource,
    settings: AllocatorSettings | None = DEFAULT_SETTINGS,
    *,
    compares_expandable: bool = True,
) -> ForecastRow:
    """The row of one forecast.

    Args:
        run: The forecast.
        settings: The settings of the caching allocator; None: reserved memory is not predicted.
        compares_expandable: Also predict reserved memory with expandable segments.

    Raises:
        ForecastError: The run is not a forecast.
    """
    memory = measure_memory(run)
    peak = memory.peak
    if peak is None or memory.peak_allocated_bytes is None:
        raise ForecastError(
            f"Run {run.manifest.run_id!r} is not a forecast: its memory is missing. Expected a "
            "folder that `fsdp-inspect plan memory` wrote. Make the forecast again."
        )
    return ForecastRow(
        world_size=run.manifest.world_size,
        peak_bytes=memory.peak_allocated_bytes,
        resting_bytes=memory.ranks[0].resting_bytes or 0,
        phase=peak.phase,
        phases={moment.phase: moment.bytes for moment in memory.phases},
        fqn=peak.fqn,
        categories=peak.categories,
        reserved=None
        if settings is None or run.manifest.device_type == "cpu"
        else predict_reserved(
            run, rank=0, settings=settings, compares_expandable=compares_expandable
        ),
        host=run.manifest.host_memory,
    )


@dataclass(frozen=True, slots=True)
class ForecastStep:
    """A step on fake tensors."""

    manifest: RunManifest
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    """The prediction of the allocator model; None: the history is too long."""

    @property
    def plan(self) -> Plan:
        """The plan that the builder applied."""
        return Plan.from_dict(self.manifest.plan)

    @property
    def data_ranks(self) -> int:
        """The ranks with different data: those of a shard group, over all its replicas."""
        groups = self._groups
        sizes = [
            _size(groups, unit.shard_group) * _size(groups, unit.replicate_group)
            for unit in self.manifest.units
        ]
        return max(sizes, default=1)

    def seq_len(self, given: int | None = None) -> int:
        """Tokens of a sequence: the given number, or the builder's setting.

        Raises:
            ForecastError: Neither is known.
        """
        return self._stated("seq_len", "Add --seq-len, or") if given is None else given

    @property
    def batch_size(self) -> int:
        """Sequences of a microbatch of a rank.

        Raises:
            ForecastError: The builder does not state it.
        """
        return self._stated("batch_size", "Add")

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the forecast step; 1 if the builder has no such keyword."""
        value = self.manifest.config.get("microbatches", 1)
        return value if isinstance(value, int) and value > 0 else 1

    def _stated(self, name: str, remedy: str) -> int:
        value = self.manifest.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ForecastError(
                f"The builder does not state {name}, so tokens/s cannot be computed. Expected a "
                f"whole number. {remedy} a keyword {name} to the builder, or return "
                f"ForecastTarget(config={{'{name}': ...}})."
            )
        return value

    def tokens_of_microbatch(self, seq_len: int | None) -> int:
        """Tokens of a microbatch over all ranks; `seq_len` None: the builder's."""
        return self.data_ranks * self.batch_size * self.seq_len(seq_len)

    @property
    def model_flops(self) -> int:
        """Operations of a rank's microbatch by MFU's definition: three forwards as they run."""
        counts = self.manifest.operations
        forward = sum(each.run for each in counts if each.phase == Phase.FORWARD.label)
        return 3 * forward // self.num_microbatches

    def vary(
        self, batch_size: int, *, reshards: bool | None, offloads: bool | None
    ) -> "ForecastStep":
        """The work of another batch, reshard or offload; the peaks stay those of this step.

        Args:
            batch_size: Sequences of a microbatch of a rank.
            reshards: Whether units are freed after forward; None: as forecast.
            offloads: Whether all units are on the host; None: as forecast.
        """
        plan, ratio = self.plan, batch_size / self.batch_size
        if reshards is not None:
            inner = [unit.name for unit in plan.inner_units]
            plan = plan.change(inner, reshard_after_forward=reshards)
        operations = [
            each.model_copy(
                update={"run": round(each.run * ratio), "whole": round(each.whole * ratio)}
            )
            for each in self.manifest.operations
        ]
        units = self.manifest.units
        if offloads is not None:
            units = [unit.model_copy(update={"offload": offloads}) for unit in units]
        varied = {"operations": operations, "units": units, "plan": plan.to_dict()}
        return replace(self, manifest=self.manifest.model_copy(update=varied))

    def host_bytes(self, ranks: int) -> int:
        """Host memory of the offloaded parameters, gradients and AdamW's states.

        Args:
            ranks: Ranks on the host.
        """
        offloaded = sum(unit.sharded_bytes for unit in self.manifest.units if unit.offload)
        return _OFFLOADED_COPIES * offloaded * ranks

    # --- time

    def step_ns(self, speed: Speed, microbatches: int, ranks_on_host: int) -> int:
        """The simulated step.

        Args:
            speed: The rates of the machine.
            microbatches: Forwards and backwards of a step.
            ranks_on_host: Ranks that share a host's processors.
        """
        work = self._workload(speed, ranks_on_host)

        def simulated(count: int) -> int:
            tape = tape_of(work.pieces, self._outermost())
            passes = passes_of(tape, microbatches_of(Accumulation(microbatches=count)))
            step = simulate_step(replace(work, passes=passes), Execution.STREAM, with_spans=False)
            return step.duration_ns

        return steady_step_ns(simulated, microbatches)

    @property
    def _groups(self) -> Mapping[int, ProcessGroup]:
        return {group.index: group for group in self.manifest.process_groups}

    @property
    def _units(self) -> Sequence[Unit]:
        """The units that ran, in the order of the first forward, the outermost one last."""
        ran = [unit for unit in self.manifest.units if unit.execution_index >= 0]
        return sorted(ran, key=lambda unit: (_is_model(unit), unit.execution_index))

    def _outermost(self) -> int | None:
        units = self._units
        return len(units) - 1 if units and _is_model(units[-1]) else None

    def _workload(self, speed: Speed, ranks_on_host: int) -> Workload:
        units = self._units
        if not units:
            raise ForecastError(
                f"The forecast of {self.manifest.name!r} ran no unit. Expected a step that runs "
                "the forward of units. Correct the builder's step."
            )
        first = min(units, key=lambda unit: unit.execution_index)
        names = [unit.fqn for unit in units]
        shard = max(_size(self._groups, unit.shard_group) for unit in units)
        return Workload(
            units=[self._unit_work(unit, speed, is_first=unit is first) for unit in units],
            policies=policies_of(self.plan, names, shard),
            pieces=self._pieces(units, speed),
            passes=(),
            after_ns=_optimizer_ns(units, speed, ranks_on_host),
        )

    def _unit_work(self, unit: Unit, speed: Speed, *, is_first: bool) -> UnitWork:
        gpu, groups = speed.gpu, self._groups
        ring = _ring(speed, groups, unit.shard_group)
        replicas = _ring(speed, groups, unit.replicate_group)
        shards = _size(groups, unit.shard_group)
        launch = round(LAUNCH_OF_COLLECTIVE_NS * speed.launch_ratio)
        on_host = unit.sharded_bytes / gpu.host_bytes_per_s if unit.offload else 0.0
        rate = gpu.memory_bytes_per_s
        own = unit.unsharded_bytes / shards
        return UnitWork(
            gather_ns=ring.gather_ns(unit.unsharded_bytes),
            reduce_ns=ring.gather_ns(unit.reduce_bytes) + _ns(on_host),
            all_reduce_ns=replicas.all_reduce_ns(unit.reduce_bytes / shards),
            copy_in_ns=_ns((unit.sharded_bytes + own) / rate + on_host),
            copy_out_ns=_ns(2 * unit.unsharded_bytes / rate),
            reduce_copy_in_ns=_ns((unit.unsharded_bytes + unit.reduce_bytes) / rate),
            gather_launch_ns=launch,
            reduce_launch_ns=launch,
            is_trainable=unit.num_trainable_parameters > 0,
            ends_with_backward=is_first,
        )

    def _pieces(self, units: Sequence[Unit], speed: Speed) -> list[Piece]:
        """One piece for each unit; operations outside all units run in the last one."""
        last = len(units) - 1
        position = {unit.index: at for at, unit in enumerate(units)}
        compute: defaultdict[tuple[int, str], float] = defaultdict(float)
        kernels: defaultdict[tuple[int, str], int] = defaultdict(int)
        for count in self.manifest.operations:
            key = (position.get(count.unit, last), count.phase)
            compute[key] += count.run / speed.rate(is_half=count.itemsize < _WIDE)
            kernels[key] += count.kernels
        share = self.num_microbatches
        launch = LAUNCH_NS * speed.launch_ratio / share
        forward, backward = Phase.FORWARD.label, Phase.BACKWARD.label
        return [
            Piece(
                at,
                forward_ns=_ns(compute[at, forward] / share),
                backward_ns=_ns(compute[at, backward] / share),
                forward_launch_ns=round(kernels[at, forward] * launch),
                backward_launch_ns=round(kernels[at, backward] * launch),
            )
            for at in range(len(units))
        ]


def read_forecast(
    run: RunSource, settings: AllocatorSettings | None = DEFAULT_SETTINGS
) -> ForecastStep:
    """Read a forecast.

    Args:
        run: The forecast.
        settings: The settings of the caching allocator; None: reserved memory is not predicted.

    Raises:
        ForecastError: The run is not a forecast.
    """
    row = row_of(run, settings, compares_expandable=False)
    reserved = None if row.reserved is None else row.reserved.peak_reserved_bytes
    return ForecastStep(run.manifest, row.peak_bytes, reserved)


def _is_model(unit: Unit) -> bool:
    return unit.fqn == ""


def _size(groups: Mapping[int, ProcessGroup], index: int) -> int:
    return len(groups[index].ranks) if index in groups else 1


def _ring(speed: Speed, groups: Mapping[int, ProcessGroup], index: int) -> Ring:
    ranks = groups[index].ranks if index in groups else [0]
    stride = max(ranks[1] - ranks[0], 1) if len(ranks) > 1 else 1
    return speed.links.ring(len(ranks), stride)


def _optimizer_ns(units: Sequence[Unit], speed: Speed, ranks_on_host: int) -> int:
    """Clipping and AdamW: on the device, and for offloaded units on the host."""
    on_device = sum(unit.sharded_bytes for unit in units if not unit.offload) / _MASTER
    on_host = sum(unit.sharded_bytes for unit in units if unit.offload) / _MASTER * ranks_on_host
    return _ns(
        on_device * OPTIMIZER_TRAFFIC / speed.gpu.memory_bytes_per_s
        + on_host / 1e9 * speed.host_optimizer_s
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
