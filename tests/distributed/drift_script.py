"""Record trainings whose steps take longer from step 60, one for each cause.

    torchrun --nproc-per-node 3 drift_script.py FOLDER CAUSE ...

Ranks, collectives, garbage, memory, page faults and checkpoints are real. The clock is virtual
(`tests.studies.validation.virtual_time`), so that step times do not depend on the machine: a cause
takes `LONGER_NS` of virtual time in each step. `REAL_CLOCK` lists the causes on the real clock: the
slowdown of one rank, for which the others wait, or of other processes.
"""

import contextlib
import gc
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from tests.studies.validation.virtual_time import VirtualClock

STEPS = 120
CHANGE = 60
USUAL_NS, LONGER_NS = 10_000_000, 60_000_000
LATE_RANK = 1
REAL_CLOCK = ("rank", "garbage-of-one", "neighbours", "steady")
NEIGHBOURS = 6
_MEMORY_BYTES = 200 << 20
_PAGES = 200
_PAGE = 4096

clock = VirtualClock()
is_virtual = not set(REAL_CLOCK) & set(sys.argv)
if is_virtual:
    time.perf_counter_ns = clock.read  # before other modules bind the function by name

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from fsdp_inspect import Recorder  # noqa: E402


class Garbage:
    """An object in a cycle, whose finalizer takes time."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        pass_ns(LONGER_NS)


class SlowWriter(dcp.FileSystemWriter):
    """Writes a checkpoint until the training ends."""

    is_over = False

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list]:
        while not SlowWriter.is_over:
            time.sleep(0.001)
        return super().write_data(plan, planner)


def pass_ns(duration_ns: int) -> None:
    """Let virtual time pass, or real time."""
    if is_virtual:
        clock.sleep_until(clock.now_ns + duration_ns)
    else:
        time.sleep(duration_ns / 1e9)


def collect(rank: int) -> None:
    """Collect garbage that is expensive to finalize."""
    Garbage()
    gc.collect()


def collect_on_one_rank(rank: int) -> None:
    """Let one rank collect garbage; the others wait for it."""
    if rank == LATE_RANK:
        collect(rank)


def work_longer(rank: int) -> None:
    """Let one rank compute for longer, as on a slower processor."""
    if rank == LATE_RANK:
        pass_ns(LONGER_NS)


def grow(rank: int) -> None:
    """Keep more memory."""
    if not _kept:
        _kept.append(bytearray(b"1") * _MEMORY_BYTES)
    pass_ns(LONGER_NS)


def read_pages(rank: int) -> None:
    """Read pages that are not in memory."""
    file, mapped = _open_pages()
    mapped.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    for page in range(_PAGES):
        mapped[page * _PAGE]
    pass_ns(LONGER_NS)


def write_checkpoint(rank: int) -> None:
    """Write one checkpoint in the background, during all other steps."""
    if not _kept:
        writer = SlowWriter(tempfile.mkdtemp(dir=Path.cwd()))
        state = {"weight": torch.zeros(8)}
        group = dist.new_group(backend="gloo")  # the training uses the other group meanwhile
        _kept.append(dcp.async_save(state, storage_writer=writer, process_group=group))
    pass_ns(LONGER_NS)


_kept: list = []
"""Objects that a cause keeps alive until its recording ends."""


def _open_pages() -> tuple[int, mmap.mmap]:
    if not _kept:
        descriptor, path = tempfile.mkstemp(dir=Path.cwd())
        os.write(descriptor, os.urandom(_PAGES * _PAGE))
        os.fsync(descriptor)
        Path(path).unlink()
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)  # without read-ahead
        _kept.append((descriptor, mapped))
    return _kept[0]


CAUSES: dict[str, Callable[[int], None]] = {
    "data": lambda rank: pass_ns(LONGER_NS),
    "garbage": collect,
    "garbage-of-one": collect_on_one_rank,
    "rank": work_longer,
    "memory": grow,
    "pages": read_pages,
    "checkpoint": write_checkpoint,
    "neighbours": lambda rank: None,
    "steady": lambda rank: None,
}


@contextlib.contextmanager
def one_core(cause: str) -> Iterator[None]:
    """For `neighbours`: run all ranks on one core."""
    allowed = os.sched_getaffinity(0)
    if cause == "neighbours":
        os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def start_neighbours() -> list[subprocess.Popen[bytes]]:
    """Start other processes on the same core, which end with this one."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    return [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(NEIGHBOURS)]


def record(cause: str, run: Path) -> None:
    """Record one training."""
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # later collections only scan the objects of the training
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rank, neighbours = dist.get_rank(), []
    settings = {"memory_steps": (), "device_interval_s": 0.01, "print_verdict": False}
    with one_core(cause), Recorder(model, optimizer=optimizer, path=run, **settings) as recorder:
        for step in range(STEPS):
            if step == CHANGE and cause == "neighbours" and rank == 0:
                neighbours = start_neighbours()
            with recorder.step():
                with recorder.data():
                    pass_ns(USUAL_NS if is_virtual else 0)
                    if step >= CHANGE and cause == "data":
                        pass_ns(LONGER_NS)
                if step >= CHANGE and cause != "data":
                    CAUSES[cause](rank)
                work(cause)
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        SlowWriter.is_over = True
        if cause == "checkpoint":
            _kept[0].result()
        SlowWriter.is_over = False
    for process in neighbours:
        process.kill()
        process.wait()
    _kept.clear()


def work(cause: str) -> None:
    """Compute, or give the sampler of the devices some time."""
    if is_virtual:
        time.sleep(0.003)
        return
    for _ in range(20):
        torch.randn(128, 128) @ torch.randn(128, 128)


def main() -> None:
    """Record the trainings on this rank."""
    folder, causes = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number, cause in enumerate(causes):
        record(cause, folder / (cause if causes.count(cause) == 1 else f"{cause}-{number:02d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
