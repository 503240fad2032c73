"""Record each way to train with separate code on CUDA, and check the recording.

A path trains a few steps of a small model and raises `RuntimeError` if the recording is wrong. The
step of the script makes a row for each path. `test_paths_gpu.py` runs the same paths one by one.
Paths that need no GPU also run on CPU.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_inspect import Recorder
from fsdp_inspect.diagnosis.diagnose import ProblemClass, diagnose
from fsdp_inspect.emulation.network import parse_specification
from fsdp_inspect.emulation.process import emulate
from fsdp_inspect.errors import PlanError
from fsdp_inspect.recording.failure import SNAPSHOT_FILE
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import (
    COLLECTIVES,
    EventFlag,
    EventKind,
    MemoryPoint,
    Method,
    Phase,
)
from fsdp_inspect.trace.run import RunStatus
from instrumented_trainer.runtime import Runtime, process_group
from tests.gpu.outcome import Row, failed, unavailable
from tests.gpu.setting import (
    NEEDS_CUDA,
    Setting,
    emulated_training,
    expect_healthy,
    make_recorder,
)
from tests.studies.benchmarks.figures import Figure
from tests.studies.benchmarks.workload import Workload

STEPS = 5
WIDTH = 256
BLOCKS = 4
_SMALL = {"preset": "tiny", "num_layers": BLOCKS, "seq_len": 64, "batch_size": 2}
_FAST = "world_size=8,bandwidth=20GB/s,latency=20us"

Path_ = Callable[[Setting, Path], str]
"""Records into a folder that does not exist yet; returns a short description of the check.

Raises `NotHereError` if the machine does not support the path."""


class NotHereError(Exception):
    """This machine does not support the path, for the stated reason."""


def measure(setting: Setting) -> Iterator[Row]:
    """Measure one row for each path."""
    for name, record in PATHS.items():
        folder = setting.scratch / name.replace(" ", "-")
        row = f"recording: {name}"
        try:
            checked = record(setting, folder)
        except NotHereError as reason:
            yield unavailable(row, str(reason))
        except Exception as error:
            yield failed(row, f"{type(error).__name__}: {error}")
        else:
            how = f"Recorded: {STEPS} steps of a small model on {setting.place}. Checked: {checked}"
            figure = Figure(name=row, value="sound", aim="sound", how=how)
            yield setting.judge.exact(figure, holds=True)


# --- the paths


def one_rank(setting: Setting, folder: Path) -> str:
    """A real process group of one rank, and a logged DTensor."""
    norms = []
    with (
        _real_training(setting) as workload,
        make_recorder(workload, folder) as recorder,
    ):
        loop = workload.loop(recorder)
        for step in range(STEPS):
            with recorder.step():
                loop.accumulate(step)
                norm = nn.utils.clip_grad_norm_(workload.model.parameters(), 1.0)
                workload.optimizer.step()
                workload.optimizer.zero_grad()
            _expect(isinstance(norm, DTensor), f"the norm is a {type(norm).__name__}")
            recorder.log(norm=norm, rate=0.5)
            norms.append(norm.full_tensor().clone())
        expect_healthy(recorder)
    run = open_run(folder)
    scalars = run.scalars(0)
    logged = scalars.where(scalars.name == run.ranks[0].scalar_names.index("norm"))
    order = np.argsort(logged.step)
    expected = [float(norm) for norm in norms]
    _expect(logged.step[order].tolist() == list(range(STEPS)), f"steps {logged.step.tolist()}")
    _expect(
        np.allclose(logged.value[order], expected, rtol=1e-6),
        f"logged norms are {logged.value[order].tolist()}, and were {expected}",
    )
    _expect_steps(run, STEPS)
    _expect_clock(setting, run)
    backend = run.manifest.backend
    _expect(("nccl" if setting.is_cuda else "gloo") in backend, f"the backend is {backend!r}")
    return f"{backend}, one rank; the norm that `clip_grad_norm_` returns is logged with its value."


def hsdp(setting: Setting, folder: Path) -> str:
    """Replicas: an all-reduce after each reduce-scatter."""
    run = _emulated(setting, folder, mesh="2x4")
    events = run.events(0, steps=[STEPS - 1])
    scatters = _by_unit(events.where(events.kind == EventKind.REDUCE_SCATTER))
    reduces = _by_unit(events.where((events.kind == EventKind.ALL_REDUCE) & (events.unit >= 0)))
    _expect(scatters.keys() == reduces.keys() != set(), f"{scatters.keys()}, {reduces.keys()}")
    late = [unit for unit, (_, end) in scatters.items() if reduces[unit][0] < end - _CLOCK_ERROR_NS]
    _expect(not late, f"the all-reduce begins before the reduce-scatter has ended: units {late}")
    return "an all-reduce for each unit, behind the end of its reduce-scatter."


def unshard_async_op(setting: Setting, folder: Path) -> str:
    """All-gathers that return a handle, whose copy-in is on the compute stream."""
    run = _emulated(setting, folder, unshard_async_op="true", forward_prefetch=1)
    events = run.events(0, steps=[STEPS - 1])
    copies = events.where(events.kind == EventKind.ALL_GATHER_COPY_IN)
    _expect(len(copies) > 0, "no copy-in was recorded")
    median_ns = float(np.median(copies.end_ns - copies.start_ns))
    _expect(median_ns > 0, "the copies into the all-gather's input last 0 ns in the median")
    return f"copies into the input of all-gathers last {median_ns / 1e3:.1f} µs in the median."


def several_roots(setting: Setting, folder: Path) -> str:
    """Blocks are sharded and the model is not, so no unit waits for the collectives of another."""
    run = _record_blocks(setting, folder, with_root=False)
    events = run.events(0)
    waits = events.where(events.kind == EventKind.REDUCE_SCATTER_WAIT)
    foreign = (waits.issued_by >= 0) & (waits.issued_by != waits.unit)
    _expect(
        not foreign.any(),
        f"{int(foreign.sum())} of {len(waits)} waits for a reduce-scatter are inside another root",
    )
    return f"{len(waits)} waits for reduce-scatters, none of them inside another root."


def several_buffers(setting: Setting, folder: Path) -> str:
    """Several inputs of reduce-scatters may exist, so a unit does not wait for the previous one."""
    try:
        run = _emulated(setting, folder, reduce_scatter_buffers=2)
    except PlanError as error:  # torch before 2.13
        raise NotHereError(str(error)) from error
    events = run.events(0, steps=[STEPS - 1])
    scatters = events.where(events.kind == EventKind.REDUCE_SCATTER)
    place = {unit: n for n, unit in enumerate(scatters.unit[np.argsort(scatters.issue_ns)])}
    waits = events.where((events.kind == EventKind.REDUCE_SCATTER_WAIT) & (events.issued_by >= 0))
    between = [
        place[by] - place[unit]
        for unit, by in zip(waits.unit.tolist(), waits.issued_by.tolist(), strict=True)
        if by in place and unit in place
    ]
    _expect(
        all(gap >= 2 for gap in between),
        f"units between a reduce-scatter and its wait: {between}",
    )
    return (
        f"{len(between)} waits inside backward, each for a reduce-scatter two units back or more."
    )


def regrouped(setting: Setting, folder: Path) -> str:
    """`reshard_after_forward=2`: backward gathers among two ranks, after a wait for the reshard."""
    run = _emulated(setting, folder, reshard_after_forward="2")
    events = run.events(0, steps=[STEPS - 1])
    gathers = events.where(events.kind == EventKind.ALL_GATHER)
    backward = gathers.where(gathers.phase == Phase.BACKWARD)
    sizes = {len(run.manifest.process_groups[group].ranks) for group in backward.group.tolist()}
    _expect(2 in sizes, f"all-gathers in backward are among {sorted(sizes)} ranks")
    copies = events.where(events.kind == EventKind.ALL_GATHER_COPY_IN)
    _expect(len(copies) == len(gathers), f"{len(copies)} copies, {len(gathers)} all-gathers")
    return f"{len(backward)} all-gathers in backward, some among two ranks; each has its copy."


def asynchronous_collectives(setting: Setting, folder: Path) -> str:
    """Collectives that the script issues with `async_op=True` and waits for later."""
    with (
        _real_training(setting) as workload,
        make_recorder(workload, folder) as recorder,
    ):
        loop = workload.loop(recorder)
        message = torch.ones(1 << 20, device=_device(setting))
        for step in range(STEPS):
            with recorder.step():
                work = dist.all_reduce(message, async_op=True)
                loop.accumulate(step)
                work.wait()
                workload.optimizer.step()
                workload.optimizer.zero_grad()
        expect_healthy(recorder)
    run = open_run(folder)
    _expect_steps(run, STEPS)
    events = run.events(0, kinds=[EventKind.ALL_REDUCE])
    own = events.where((events.flags & EventFlag.ASYNC != 0) & (events.bytes == 4 << 20))
    _expect(own.step.tolist() == list(range(STEPS)), f"recorded in steps {own.step.tolist()}")
    _expect(bool((own.end_ns > own.start_ns).all()), "a collective has no duration")
    _expect(bool((own.need_ns >= own.issue_ns).all()), "a wait begins before the issue")
    how = sorted({Method(method).name.lower() for method in own.method.tolist()})
    return f"{len(own)} all-reduces from their issue to their wait, times: {', '.join(how)}."


def compiled(setting: Setting, folder: Path) -> str:
    """Blocks under torch.compile."""
    if not setting.is_cuda:  # the C++ compiler takes a minute
        raise NotHereError(NEEDS_CUDA)
    _emulated(setting, folder, compile="true")
    return "an all-gather for each unit."


def offloaded(setting: Setting, folder: Path) -> str:
    """Parameters, gradients and optimizer state on the host."""
    run = _emulated(setting, folder, offload="cpu_pinned" if setting.is_cuda else "cpu")
    _expect(run.ranks[0].device == str(_device(setting)), f"device is {run.ranks[0].device!r}")
    return "collectives, clock and device are those of the GPU." if setting.is_cuda else "all."


def another_device(setting: Setting, folder: Path) -> str:
    """The second GPU of a machine has its own streams, events, counters and spins."""
    if not setting.is_cuda:
        raise NotHereError(NEEDS_CUDA)
    if torch.cuda.device_count() < 2:
        raise NotHereError("it records on the second of two GPUs.")
    torch.cuda.set_device(1)
    try:
        run = _record_blocks(setting, folder, index=1)
    finally:
        torch.cuda.set_device(0)
    record = run.ranks[0]
    _expect(record.device == "cuda:1", f"the rank's device is {record.device!r}")
    memory = run.memory(0)
    ends = memory.where(memory.point == MemoryPoint.STEP_END)
    _expect(len(ends) > 0 and bool((ends.allocated > 0).all()), "no memory of the device was read")
    return "the rank's device is cuda:1, with its memory."


def out_of_memory(setting: Setting, folder: Path) -> str:
    """A request that the device cannot serve, and on CUDA a snapshot of its memory.

    On CPU the recorder limits the memory.
    """
    try:
        _train_until_memory_is_out(setting, folder)
    except torch.OutOfMemoryError:
        pass
    else:
        raise RuntimeError("The error of the training did not reach the script.")
    run = open_run(folder)
    [record] = run.ranks
    _expect(record.status is RunStatus.FAILED, f"the status is {record.status}")
    failure = record.failure or ""
    _expect("OutOfMemoryError at step" in failure and "llocated" in failure, failure)
    found = diagnose(run)
    _expect(found.problem is ProblemClass.OUT_OF_MEMORY, f"the diagnosis is {found.problem}")
    filled = found.out_of_memory
    _expect(filled is not None and len(filled.by_unit) > 0, "the diagnosis names no unit's memory")
    checked = "the error reaches the script; the diagnosis is out of memory, with bytes by unit"
    if not setting.is_cuda:
        return f"{checked}."
    [snapshot] = folder.rglob(SNAPSHOT_FILE)
    content = pickle.loads(snapshot.read_bytes())
    _expect(len(content["segments"]) > 0, "the snapshot has no segments")
    before = _history_length()
    kept = torch.empty(1 << 20, device="cuda")
    _expect(_history_length() == before, "torch still keeps a history of allocations")
    del kept
    return f"{checked}; the snapshot opens."


PATHS: dict[str, Path_] = {
    "one rank": one_rank,
    "hsdp": hsdp,
    "unshard_async_op": unshard_async_op,
    "several roots": several_roots,
    "several buffers": several_buffers,
    "reshard into groups": regrouped,
    "asynchronous collectives": asynchronous_collectives,
    "compile": compiled,
    "offload": offloaded,
    "another device": another_device,
    "out of memory": out_of_memory,
}


# --- recording

_CLOCK_ERROR_NS = 5_000
"""The error by which two marks on one device may be swapped: `elapsed_time` is a float32 of
milliseconds."""


_SLACK_NS = 100_000


def _emulated(setting: Setting, folder: Path, **settings: Any) -> StoredRun:
    with (
        emulated_training(setting, _FAST, **{**_SMALL, **settings}) as workload,
        make_recorder(workload, folder) as recorder,
    ):
        loop = workload.loop(recorder)
        for step in range(STEPS):
            loop.run_step(step)
        expect_healthy(recorder)
    run = open_run(folder)
    _expect_sound(setting, run)
    return run


@contextmanager
def _real_training(setting: Setting) -> Iterator[Workload]:
    runtime = Runtime(0, 0, 1, _device(setting))
    with process_group(runtime):
        yield Workload.build(runtime, **_SMALL)


def _record_blocks(
    setting: Setting, folder: Path, *, with_root: bool = True, index: int = 0
) -> StoredRun:
    """A plain model of linear layers under emulation; each layer is sharded separately."""
    device = torch.device("cuda", index) if setting.is_cuda else torch.device("cpu")
    gc.collect()
    with emulate(parse_specification(_FAST)):
        dist.init_process_group("nccl" if setting.is_cuda else "gloo")
        try:
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(BLOCKS)))
            mesh = init_device_mesh(device.type, (8,))
            for layer in (*model, *([model] if with_root else [])):
                fully_shard(layer, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            with Recorder(
                model, optimizer=optimizer, path=folder, memory_steps=(), print_verdict=False
            ) as recorder:
                for _ in range(STEPS):
                    with recorder.step():
                        inputs = torch.ones(64, WIDTH, device=device, requires_grad=True)
                        model(inputs).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                expect_healthy(recorder)
        finally:
            dist.destroy_process_group()
    run = open_run(folder)
    _expect_sound(setting, run)
    return run


def _train_until_memory_is_out(setting: Setting, folder: Path) -> None:
    device = _device(setting)
    if setting.is_cuda:
        too_many = 2 * torch.cuda.get_device_properties(device).total_memory
        options: dict[str, Any] = {"memory_snapshot": True}
    else:
        too_many = 1 << 30
        options = {"device_memory": too_many}
    with (
        emulated_training(setting, _FAST, **_SMALL) as workload,
        make_recorder(workload, folder, **options) as recorder,
    ):
        loop = workload.loop(recorder)
        for step in range(2):
            loop.run_step(step)
        with recorder.step():
            loop.train_step(2)
            torch.empty(too_many, dtype=torch.uint8, device=device)


def _history_length() -> int:
    traces: list[list[Any]] = torch.cuda.memory._snapshot()["device_traces"]
    return sum(len(trace) for trace in traces)


def _device(setting: Setting) -> torch.device:
    return torch.device("cuda", 0) if setting.is_cuda else torch.device("cpu")


# --- checks for every recording


def _expect_sound(setting: Setting, run: StoredRun) -> None:
    _expect_steps(run, STEPS)
    _expect_clock(setting, run)
    events = run.events(0)
    collectives = events.where(np.isin(events.kind, list(COLLECTIVES)))
    units = {unit.index for unit in run.manifest.units}
    gathered = set(collectives.unit[collectives.kind == EventKind.ALL_GATHER].tolist())
    _expect(units <= gathered, f"units without an all-gather: {sorted(units - gathered)}")
    _expect(bool((collectives.end_ns >= collectives.start_ns).all()), "a collective ends too early")
    # The host reads its clock before the call that puts a mark on a stream.
    slack_ns = run.ranks[0].clock_uncertainty_ns + _SLACK_NS
    issued = collectives.start_ns >= collectives.issue_ns - slack_ns
    _expect(bool(issued.all()), "a collective begins before the host has issued it")


def _expect_steps(run: StoredRun, num_steps: int) -> None:
    steps = run.events(0, kinds=[EventKind.STEP])
    _expect(sorted(steps.step.tolist()) == list(range(num_steps)), f"steps: {steps.step.tolist()}")
    _expect(run.status is RunStatus.COMPLETE, f"the run is {run.status.value}: {list(run.notes)}")


def _expect_clock(setting: Setting, run: StoredRun) -> None:
    clock = run.ranks[0].clock
    _expect(clock == ("cuda_event" if setting.is_cuda else "host"), f"the clock is {clock!r}")


def _by_unit(events: Any) -> dict[int, tuple[int, int]]:
    rows = zip(events.unit.tolist(), events.start_ns.tolist(), events.end_ns.tolist(), strict=True)
    return {unit: (start, end) for unit, start, end in rows}


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)
