"""Write traces in Kineto's form by hand, in µs, with one call for each event.

    trace = TraceWriter()
    trace.annotate("FSDP::pre_forward (layers.0)", 0, 20)
    trace.kernel("gemm", 100, 150, issued=10)
    trace.write(tmp_path / "rank0.json")

`fsdp2_step` is one step of a root and a block, with the ranges of a version of torch. The drawing
there shows the expected result of an import.
"""

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD = 11, 12
COMPUTE_STREAM, COMM_STREAM = 7, 20
BASE_NS = 1_711_964_646_000_000_000

NCCL = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
RCCL = "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)"

NAMES = {"_allgather_base": "AllGather", "_reduce_scatter_base": "ReduceScatter_Sum_bf16"}


class TraceWriter:
    """Collects events; `write` writes them to a file."""

    def __init__(self, *, rank: int = 0, world_size: int = 2, **beside: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.beside = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "H100", "totalGlobalMem": 80 << 30}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": world_size,
                "pg_count": 1,
                "pg_config": [
                    {
                        "pg_name": "0",
                        "pg_desc": "default_pg",
                        "pg_size": world_size,
                        "ranks": list(range(world_size)),
                    }
                ],
                "nccl_version": "2.27.3",
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE_NS,
            **beside,
        }
        self.world_size = world_size
        self._correlation = 100

    def add(self, category: str, name: str, start: float, end: float, **more: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": MAIN}
        self.events.append({**event, "ts": start, "dur": round(end - start, 3), **more})

    def annotate(self, name: str, start: float, end: float, *, thread: int = MAIN) -> None:
        self.add("user_annotation", name, start, end, tid=thread)

    def operator(
        self, name: str, start: float, end: float, *, thread: int = MAIN, **arguments: Any
    ) -> None:
        self.add("cpu_op", name, start, end, tid=thread, args=arguments)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        issued: float | None = None,
        thread: int = MAIN,
        stream: int = COMPUTE_STREAM,
        category: str = "kernel",
        pid: int = 0,
        **arguments: Any,
    ) -> None:
        """Add a device event; with `issued` also its launch at that time."""
        self._correlation += 1
        arguments = {"correlation": self._correlation, "stream": stream, "device": 0, **arguments}
        self.add(category, name, start, end, pid=pid, tid=stream, args=arguments)
        if issued is not None:
            launched = {"correlation": self._correlation, "cbid": 211}
            name = "hipLaunchKernel" if "rccl" in name else "cudaLaunchKernel"
            self.add("cuda_runtime", name, issued, issued + 1, tid=thread, args=launched)

    def collective(
        self, collective: str, start: float, end: float, *, elements: int = 1024, **more: Any
    ) -> None:
        """Add a kernel with the metadata from NCCL's process group."""
        shard = elements // self.world_size
        is_gather = "gather" in collective
        kernel = more.pop("kernel", NCCL.format(NAMES.get(collective, "AllReduce_Sum_f32")))
        metadata = {
            "Collective name": collective,
            "In msg nelems": shard if is_gather else elements,
            "Out msg nelems": shard if "scatter" in collective else elements,
            "Group size": self.world_size,
            "dtype": "BFloat16",
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.world_size))),
        }
        self.kernel(kernel, start, end, **{"stream": COMM_STREAM, **metadata, **more})

    def text(self) -> str:
        """The trace with its events in Kineto's layout."""
        return json.dumps({**self.beside, "traceEvents": self.events, "traceName": "rank.json"})

    def write(self, path: Path) -> Path:
        """Write the trace, gzipped if the name requires it; returns the path."""
        content = self.text().encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path


TORCH_2_6 = frozenset({"post_backward_accumulate"})
TORCH_2_13 = frozenset({"post_backward_accumulate", "post_backward_rs_wait"})
TORCH_2_15 = frozenset({"post_backward_rs_wait"})


def fsdp2_step(
    trace: TraceWriter, *, at: float = 0, ranges: frozenset[str] = TORCH_2_13, kernel: str = ""
) -> None:
    """One step over the root (a gather of its own) and the block `layers.0`, 1000 µs.

    host     0-10 gather root | 10-40 pre_forward layers.0, whose forward prefetches nothing
    device   gather root 20-120; copy-out 120-130; forward of the root's part 130-180
             gather layers.0 120-220; copy-out 220-230; forward 230-330
             backward: gather layers.0 330-400, copy-out 400-410, backward 410-560
             reduce layers.0 560-660 beside backward of the root 560-640; reduce root 660-760
             optimizer 760-860; a fill 870-880
    """
    host = _Host(trace, at, kernel)
    trace.annotate("FSDP::root_pre_forward", at, at + 1)
    host.gather("", 1, (20, 120), within="FSDP::pre_forward")
    host.copy_out("", 12, (120, 130))
    host.launch("gemm", 16, (130, 180))
    host.gather("layers.0", 20, (120, 220), within="FSDP::pre_forward (layers.0)")
    host.copy_out("layers.0", 32, (220, 230))
    host.launch("gemm", 40, (230, 330))
    trace.annotate("FSDP::post_forward (layers.0)", at + 45, at + 46)
    trace.annotate("FSDP::post_forward", at + 47, at + 48)
    trace.annotate("FSDP::pre_backward", at + 50, at + 60, thread=AUTOGRAD)
    host.prefetch("layers.0", 51, (330, 400))
    trace.annotate("FSDP::pre_backward (layers.0)", at + 61, at + 70, thread=AUTOGRAD)
    host.copy_out("layers.0", 62, (400, 410), thread=AUTOGRAD)
    host.launch("gemm_backward", 72, (410, 560), thread=AUTOGRAD)
    host.reduce("layers.0", 75, (560, 660), ranges)
    host.launch("gemm_backward", 85, (560, 640), thread=AUTOGRAD)
    host.reduce("", 88, (660, 760), ranges)
    trace.annotate("FSDP::root_post_backward_callback", at + 98, at + 100, thread=AUTOGRAD)
    trace.annotate("Optimizer.step#AdamW.step", at + 110, at + 120)
    host.launch("adam", 112, (760, 860))
    trace.kernel(
        "Memset (Device)", at + 870, at + 880, issued=at + 121, category="gpu_memset", bytes=64
    )


FSDP2_PARTS_US = {
    "forward": 150,
    "backward": 230,
    "fsdp_copies": 30,
    "exposed_all_gather": 100 + 40 + 70,
    "exposed_reduce_scatter": 20 + 100,
    "host_bound": 10,
    "optimizer": 100,
    "other": 10,
}
"""The parts from the first kernel at 20 µs to the end of the fill at 880 µs."""


class _Host:
    """Issues the work of a unit, with the ranges around it."""

    def __init__(self, trace: TraceWriter, at: float, kernel: str) -> None:
        self.trace, self.at = trace, at
        self.kernel = {"kernel": kernel} if kernel else {}

    def launch(
        self, name: str, issued: float, ran: tuple[float, float], *, thread: int = MAIN
    ) -> None:
        low, high = (self.at + one for one in ran)
        self.trace.kernel(name, low, high, issued=self.at + issued, thread=thread)

    def gather(self, unit: str, begin: float, ran: tuple[float, float], *, within: str) -> None:
        at = self.at + begin
        self.trace.annotate(within, at, at + 15)
        self._gather(unit, at + 1, ran, MAIN)

    def prefetch(self, unit: str, begin: float, ran: tuple[float, float]) -> None:
        at = self.at + begin
        self.trace.annotate(f"FSDP::backward_prefetch for {unit}", at, at + 8, thread=AUTOGRAD)
        self._gather(unit, at + 1, ran, AUTOGRAD)

    def copy_out(
        self, unit: str, begin: float, ran: tuple[float, float], *, thread: int = MAIN
    ) -> None:
        at = self.at + begin
        self.trace.annotate(_named("all_gather_copy_out", unit), at, at + 3, thread=thread)
        self.launch("split_with_sizes_copy", begin + 1, ran, thread=thread)

    def reduce(
        self, unit: str, begin: float, ran: tuple[float, float], ranges: frozenset[str]
    ) -> None:
        at, annotate = self.at + begin, self.trace.annotate
        if "post_backward_accumulate" in ranges:
            annotate(_named("post_backward_accumulate", unit), at, at + 1, thread=AUTOGRAD)
        annotate(_named("post_backward_reshard", unit), at + 1, at + 2, thread=AUTOGRAD)
        if "post_backward_rs_wait" in ranges:
            annotate(f"FSDP::post_backward_rs_wait ({unit})", at + 2, at + 3, thread=AUTOGRAD)
        annotate(_named("post_backward_reduce", unit), at + 3, at + 8, thread=AUTOGRAD)
        self._communicate("_reduce_scatter_base", unit, at + 4, ran, AUTOGRAD)

    def _gather(self, unit: str, at: float, ran: tuple[float, float], thread: int) -> None:
        self.trace.annotate(_named("all_gather", unit), at, at + 6, thread=thread)
        self._communicate("_allgather_base", unit, at + 2, ran, thread)

    def _communicate(
        self, collective: str, unit: str, issued: float, ran: tuple[float, float], thread: int
    ) -> None:
        self.trace.collective(
            collective,
            self.at + ran[0],
            self.at + ran[1],
            issued=issued,
            thread=thread,
            elements=1024 if unit else 512,
            **self.kernel,
        )


def _named(what: str, unit: str) -> str:
    return f"FSDP::{what} ({unit})" if unit else f"FSDP::{what}"
