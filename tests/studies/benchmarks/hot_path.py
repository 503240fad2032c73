"""Measure the cost of one recorded event: the recorder's code with torch calls that do nothing.

In a training step, noise hides the cost of recording. Here a stand-in replaces torch's
`FSDPParamGroup`. It makes the same calls in the same order, and they do nothing. The remaining time
is the recorder's. It is measured with warm caches, and again after a copy of `EVICTED_BYTES` before
each call. The work of a real step evicts a part of the caches, so its cost is between the two. The
paired rounds of `overhead` contain that cost.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.devices import DeviceSampler
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import MemoryProbe
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.fsdp2 import Fsdp2
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.store.schema import EVENTS
from fsdp_inspect.store.streams import LiveStream, Row
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.workload import NUM_BLOCKS

ROWS_OF_A_FLUSH = 2048
"""About one second of a step of 60 ms with 135 events."""
EVICTED_BYTES = 48 << 20
"""The bytes that a copy reads and writes to evict the caches: more than most processors have."""
_COLD_REPEATS = 20


@dataclass(frozen=True, slots=True)
class HotPathCost:
    """CPU time of one event row, ns."""

    hot_path_ns: float
    """Time on the training thread with warm caches: hooks, marks, the black box and the row."""
    cold_ns: float
    """The same with cold caches."""
    plain_ratio: float
    """The cost of a plain step with cold caches, as a part of the cost of a detailed step."""
    encoding_ns: float
    """Time on the writer's thread: packing, checksum, compression and the write."""
    device_sample_ns: float
    """Time of one sample of host and process counters, on the sampler's thread."""


def measure_hot_path(repeats: int) -> HotPathCost:
    """Time the stand-in's step alternately with and without hooks; medians over `repeats` pairs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        return _measure(repeats)
    finally:
        dist.destroy_process_group()


def event_figures(cost: HotPathCost, repeats: int) -> list[Figure]:
    """The cost of an event, as rows of the table."""
    how = (
        f"Measured: thread CPU time of the recorder's own code in one process, torch's calls "
        f"replaced by empty ones, medians of {repeats} pairs with and without hooks."
    )
    return [
        Figure(
            name="cost of an event on the training thread",
            value=format_ns(cost.hot_path_ns),
            how=how,
            numbers={"ns": cost.hot_path_ns},
        ),
        Figure(
            name="the same with cold caches",
            value=format_ns(cost.cold_ns),
            how=(
                f"Measured: the same after a copy of {EVICTED_BYTES >> 20} MiB before each call of "
                f"torch; wall time of the calls, medians of {_COLD_REPEATS} pairs."
            ),
            numbers={"ns": cost.cold_ns},
        ),
        Figure(
            name="cost of a plain step with cold caches",
            value=f"{format_ratio(cost.plain_ratio)} of a detailed step",
            how=(
                f"Measured: the same for a step of {NUM_BLOCKS + 2} units of which only the black "
                "box notes the collectives."
            ),
            numbers={"ratio": cost.plain_ratio},
        ),
        Figure(
            name="cost of an event on the writer's thread",
            value=format_ns(cost.encoding_ns),
            how=(
                f"Measured: thread CPU time to encode and write {ROWS_OF_A_FLUSH} rows, by row; "
                "median."
            ),
            numbers={"ns": cost.encoding_ns},
        ),
    ]


def _measure(repeats: int) -> HotPathCost:
    rows: list[Row] = []
    clock = HostClock()
    box = BlackBoxWriter(clock.host_now)
    session = Session(clock, rows.append, ProcessGroups(), black_box=box)
    probe = MemoryProbe(session, lambda row: None, None)
    groups = [StandInGroup() for _ in range(NUM_BLOCKS + 2)]
    handles: list[Any] = [
        SimpleNamespace(
            group=group,
            num_groups=1,
            modules=(group,),
            owned_modules=(),
            fqns=("",),
            shard_group=dist.group.WORLD,
            replicate_group=None,
        )
        for group in groups
    ]
    instruments = Instruments(session, Fsdp2(handles), probe, None, lambda optimizer: None)
    bare_ns, recorded_ns = [], []
    for _ in range(repeats):
        bare_ns.append(_time_step(groups))
        instruments.attach()
        _time_step(groups)  # the first pass after attaching warms up the new objects
        rows.clear()
        recorded_ns.append(_time_step(groups, session))
        instruments.detach()
    events = rows[:]
    cold_ns, plain_ns = _cold_differences_ns(groups, instruments, session)
    assert session.active, session.problems
    difference = statistics.median(recorded_ns) - statistics.median(bare_ns)
    return HotPathCost(
        hot_path_ns=difference / len(events),
        cold_ns=cold_ns / len(events),
        plain_ratio=plain_ns / cold_ns,
        encoding_ns=_encoding_ns(events, repeats),
        device_sample_ns=_device_sample_ns(),
    )


def _time_step(groups: list[StandInGroup], session: Session | None = None) -> int:
    start = time.thread_time_ns()
    for group in groups:
        group.pre_forward(None, (), {})
        group.post_forward(None, (), None)
    for place in range(len(groups) - 1, -1, -1):
        groups[place].pre_backward(groups[place - 1] if place else None)
        groups[place].post_backward()
    for group in groups:
        group.finalize_backward()
    if session is not None:
        session.end_step()
    return time.thread_time_ns() - start


def _cold_differences_ns(
    groups: list[StandInGroup], instruments: Instruments, session: Session
) -> tuple[float, float]:
    """What the hooks add to a step of the stand-in whose calls begin with cold caches, ns.

    Returns:
        For a detailed step, and for a plain step.
    """
    source = np.zeros(EVICTED_BYTES // 2, np.uint8)
    target = np.empty_like(source)
    spent = 0

    def cold(call: Callable[..., Any], *arguments: Any) -> None:
        nonlocal spent
        np.copyto(target, source)
        start = time.perf_counter_ns()
        call(*arguments)
        spent += time.perf_counter_ns() - start

    def run_step() -> int:
        nonlocal spent
        spent = 0
        for group in groups:
            cold(group.pre_forward, None, (), {})
            cold(group.post_forward, None, (), None)
        for place in range(len(groups) - 1, -1, -1):
            cold(groups[place].pre_backward, groups[place - 1] if place else None)
            cold(groups[place].post_backward)
        return spent

    bare_ns, detailed_ns, plain_ns = [], [], []
    for _ in range(_COLD_REPEATS):
        bare_ns.append(run_step())
        instruments.attach()
        detailed_ns.append(run_step())
        session.end_step()
        instruments.choose_detail(is_detailed=False)
        run_step()  # the first plain step finds the sizes of the messages
        session.end_step()
        plain_ns.append(run_step())
        session.end_step()
        instruments.choose_detail(is_detailed=True)
        instruments.detach()
    bare = statistics.median(bare_ns)
    return statistics.median(detailed_ns) - bare, statistics.median(plain_ns) - bare


def _encoding_ns(rows: list[Row], repeats: int) -> float:
    many = (rows * (ROWS_OF_A_FLUSH // len(rows) + 1))[:ROWS_OF_A_FLUSH]
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        stream = LiveStream(Path(folder) / EVENTS.live_name, EVENTS)
        for _ in range(max(3, repeats // 20)):
            start = time.thread_time_ns()
            assert stream.add(many) == 0
            stream.write()
            costs.append((time.thread_time_ns() - start) / len(many))
        stream.finish()
    return statistics.median(costs)


def _device_sample_ns() -> float:
    """CPU time of the process per sample, while it only samples."""
    rows: list[Row] = []
    sampler = DeviceSampler(rows.append, interval_s=0.002)
    sampler.start()
    time.sleep(0.1)
    start, taken = time.process_time_ns(), len(rows)
    time.sleep(0.5)
    spent, taken = time.process_time_ns() - start, len(rows) - taken
    sampler.stop()
    return spent / taken


class _Comm:
    """A collective that does nothing."""

    def __init__(self) -> None:
        self._buffer = torch.empty(1024)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffer


class _AllGather(_Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> None:
        return


class _ReduceScatter(_Comm):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool
    ) -> None:
        return


@dataclass(eq=False)
class _CommContext:
    """The state that the units of a root share: the reduce-scatters in flight."""

    reduce_scatter_states: list[Any] = field(default_factory=list)


@dataclass
class StandInGroup:
    """`FSDPParamGroup` (torch 2.13) without work; also the module with torch's setters."""

    _all_gather_comm: Any = field(default_factory=_AllGather)
    _reduce_scatter_comm: Any = field(default_factory=_ReduceScatter)
    _all_gather_result: Any = None
    _training_state: TrainingState = TrainingState.IDLE
    is_unsharded: bool = False
    fsdp_params: tuple[Any, ...] = ()
    modules: tuple[Any, ...] = (None,)
    comm_ctx: _CommContext = field(default_factory=_CommContext)

    def __post_init__(self) -> None:
        self._world = dist.group.WORLD
        self._tensor = torch.empty(1024)
        self._device = torch.device("cpu")

    def set_custom_all_gather(self, comm: Any) -> None:
        self._all_gather_comm = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        self._reduce_scatter_comm = comm

    def unshard(self, async_op: bool = False) -> None:
        if self._all_gather_result is not None or self.is_unsharded:
            return
        comm = self._all_gather_comm
        buffer = comm.allocate((1024,), dtype=torch.float32, device=self._device)
        comm(output_tensor=buffer, input_tensor=self._tensor, group=self._world, async_op=async_op)
        self._all_gather_result = buffer

    def wait_for_unshard(self) -> None:
        self.is_unsharded = True
        self._all_gather_result = None

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        self._training_state = TrainingState.FORWARD
        self.unshard()
        self.wait_for_unshard()

    def post_forward(self, module: Any, args: Any, output: Any) -> None:
        self.is_unsharded = False
        self._training_state = TrainingState.IDLE

    def pre_backward(self, prefetched: StandInGroup | None) -> None:
        self._training_state = TrainingState.PRE_BACKWARD
        self.unshard()
        self.wait_for_unshard()
        if prefetched is not None:
            prefetched.unshard()

    def post_backward(self) -> None:
        self._training_state = TrainingState.POST_BACKWARD
        self.is_unsharded = False
        comm = self._reduce_scatter_comm
        for _ in range(2):
            buffer = comm.allocate((1024,), dtype=torch.float32, device=self._device)
        comm(
            output_tensor=buffer,
            input_tensor=buffer,
            group=self._world,
            op=None,
            async_op=False,
        )

    def finalize_backward(self) -> None:
        return
