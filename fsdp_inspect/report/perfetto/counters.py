"""Write memory, device samples and logged numbers of a rank as counters.

A missing value is absent, never 0: the counter track keeps its last value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fsdp_inspect.trace.codes import DETAILS, MemoryCategory, MemoryPoint
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import MISSING_INT, DeviceTable, MemoryTable

_STORAGE_TRACKER = "storage_tracker"
_TOTALS = ("allocated", "reserved", "active")
_DEVICE_NAMES = {
    "gpu_utilisation_pct": "GPU utilisation (%)",
    "gpu_memory_used": "GPU memory used (bytes)",
    "gpu_power_mw": "GPU power (mW)",
    "gpu_sm_clock_mhz": "SM clock (MHz)",
    "nvlink_tx_bytes": "NVLink sent (bytes since an arbitrary origin)",
    "nvlink_rx_bytes": "NVLink received (bytes since an arbitrary origin)",
    "pcie_tx_bytes_per_s": "PCIe sent (bytes/s)",
    "pcie_rx_bytes_per_s": "PCIe received (bytes/s)",
    "process_rss": "process RSS (bytes)",
    "process_cpu_pct": "process CPU (% of one core)",
    "host_memory_used": "host memory used (bytes)",
    "run_delay_ns": "training thread ready without a core (ns since it began)",
    "gpu_temperature_c": "GPU temperature (°C)",
    "gpu_clock_limits": "limits of the GPU clock (bits of NVML)",
    "major_faults": "major page faults (since the start of the process)",
    "process_swap": "process memory in swap (bytes)",
}
"""The track names of all columns of `DeviceTable` that change with time."""


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The values of one moment, on the rank's clock."""

    name: str
    time_ns: int
    values: Mapping[str, float]


def read_counters(
    run: RunSource, record: RankRecord, *, steps: frozenset[int] | None, span: tuple[int, int]
) -> Iterator[CounterSample]:
    """The counters of one rank.

    Args:
        run: A recorded run.
        record: The rank.
        steps: Only samples of these steps, if a sample has a step; None: all samples.
        span: Start and end of the drawn time, ns; device samples outside are left out.
    """
    memory = run.memory(record.rank)
    if steps is not None:
        memory = memory.where(np.isin(memory.step, list(steps)))
    yield from _read_memory(memory, record.memory_from)
    devices = run.devices(record.rank)
    inside = (devices.time_ns >= span[0]) & (devices.time_ns <= span[1])
    yield from _read_devices(devices.where(inside))
    scalars = run.scalars(record.rank)
    for step, name, time_ns, value in zip(
        scalars.step.tolist(),
        scalars.name.tolist(),
        scalars.time_ns.tolist(),
        scalars.value.tolist(),
        strict=True,
    ):
        is_chosen = (steps is None or step in steps) and span[0] <= time_ns <= span[1]
        if is_chosen and np.isfinite(value) and name < len(record.scalar_names):
            yield CounterSample("logged:", time_ns, {record.scalar_names[name]: value})


def _read_memory(table: MemoryTable, counted_by: str) -> Iterator[CounterSample]:
    # Rows of the storage tracker and of single units are not totals of the allocator.
    left_out = [*DETAILS]
    if counted_by != _STORAGE_TRACKER:
        left_out.append(MemoryPoint.PEAK)
    table = table.where(~np.isin(table.point, left_out))
    for name, columns in (
        ("memory (bytes):", _TOTALS),
        ("memory by category (bytes):", tuple(category.label for category in MemoryCategory)),
    ):
        words = [column.replace("_", " ") for column in columns]
        lists = [getattr(table, column).tolist() for column in columns]
        for time_ns, *values in zip(table.time_ns.tolist(), *lists, strict=True):
            known = {
                word: value
                for word, value in zip(words, values, strict=True)
                if value != MISSING_INT
            }
            if known:
                yield CounterSample(name, time_ns, known)


def _read_devices(table: DeviceTable) -> Iterator[CounterSample]:
    lists = [getattr(table, column).tolist() for column in _DEVICE_NAMES]
    for time_ns, *values in zip(table.time_ns.tolist(), *lists, strict=True):
        known = {
            name: value
            for name, value in zip(_DEVICE_NAMES.values(), values, strict=True)
            if value != MISSING_INT
        }
        if known:
            yield CounterSample("device:", time_ns, known)
