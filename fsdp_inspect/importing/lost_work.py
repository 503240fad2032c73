"""Find signs that a trace lacks work of the device, or joins the work of several devices.

The times of such a trace look like those of a slow host or of a fast network. `TraceGaps` keeps the
signs, so that no conclusion is drawn from these times.
"""

import re
from dataclasses import dataclass

import numpy as np

from fsdp_inspect.importing.kineto_events import Category, KinetoTrace
from fsdp_inspect.trace.intervals import Intervals

_LAUNCH = re.compile(r"launch_?kernel|kernel_?launch", re.IGNORECASE)
"""cudaLaunchKernel, cuLaunchKernelEx, hipExtModuleLaunchKernel, urEnqueueKernelLaunch, ..."""
_DEVICE_BACKEND = re.compile(r"(nccl|rccl|xccl|ccl|hccl|mccl)\b")
"""Backends that communicate between devices only."""
_DEVICE_CALL = re.compile(r"(nccl|rccl|xccl|hccl|mccl):")
"""Marks on the host around a collective between devices."""
_LEAST_SHARE = 0.05
"""The least share of the kernels with which a device counts."""


@dataclass(frozen=True, slots=True)
class TraceGaps:
    """What a trace may lack. 0 or False: no sign of it."""

    lacks_kernels: bool
    """The trace has launches of kernels or a backend of devices, but no kernels."""
    num_launches: int
    """Number of kernel launches before the last one whose kernel is in the trace."""
    num_lost_launches: int
    """Number of these launches whose kernel is not in the trace."""
    num_devices: int
    """Number of devices with at least 5% of the kernels."""
    longest_pause_ns: int
    """The longest time in which the device does nothing; 0 if the trace is divided into steps."""
    duration_ns: int
    """From the first to the last work of the device."""


def find_gaps(trace: KinetoTrace, backend: str, *, is_whole_trace: bool) -> TraceGaps:
    """Find the gaps of a trace.

    Args:
        trace: The trace of one process.
        backend: The backend that the trace states; empty: unknown.
        is_whole_trace: Whether the trace is one step.
    """
    launches = trace.events[Category.LAUNCH]
    is_launch = np.array([bool(_LAUNCH.search(name)) for name in trace.names], dtype=bool)
    launches = launches.where(is_launch[launches.name])
    kernels, copies = trace.events[Category.KERNEL], trace.events[Category.MEMORY_COPY]
    known = np.concatenate([kernels.correlation, copies.correlation])
    has_work = np.isin(launches.correlation, known) | (launches.correlation < 0)
    last = int(launches.start_ns[has_work].max(initial=-1))
    before = launches.start_ns <= last
    busy = Intervals.of(
        np.concatenate([kernels.start_ns, copies.start_ns]),
        np.concatenate([kernels.end_ns, copies.end_ns]),
    )
    pauses = busy.starts[1:] - busy.ends[:-1]
    is_device_trace = len(launches) > 0 or bool(_DEVICE_BACKEND.match(backend))
    is_device_trace |= any(_DEVICE_CALL.match(name) for name in trace.names)
    return TraceGaps(
        lacks_kernels=is_device_trace and len(kernels) == 0,
        num_launches=int(np.count_nonzero(before)),
        num_lost_launches=int(np.count_nonzero(before & ~has_work)),
        num_devices=_count_devices(trace),
        longest_pause_ns=int(pauses.max(initial=0)) if is_whole_trace else 0,
        duration_ns=int(busy.ends[-1] - busy.starts[0]) if len(busy) else 0,
    )


def _count_devices(trace: KinetoTrace) -> int:
    """Count the devices that run kernels. The process of a device event is its device."""
    kernels = trace.events[Category.KERNEL]
    devices = np.array(trace.processes, dtype=np.int64)[kernels.thread]
    _, counts = np.unique(devices, return_counts=True)
    return int(np.count_nonzero(counts >= _LEAST_SHARE * len(kernels)))
