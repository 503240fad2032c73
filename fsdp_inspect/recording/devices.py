"""Sample the machine from a background thread while training runs.

Host: memory and CPU time of this process, the wait of the training thread for a core, and the
memory of the machine. GPU: NVML's readings of the device that this process computes on. A value
that cannot be read is -1 in the rows and one sentence in `DeviceSampler.problems`. The sampler
never raises into the training.

[Note: MIG]
A process that computes on a MIG instance sees it as a separate GPU. NVML finds the instance by its
UUID (`MIG-...`, as in CUDA_VISIBLE_DEVICES) and reports its memory. NVML has no utilisation, power,
clock, NVLink or PCIe readings of an instance, and the GPU's readings would include other instances,
so they are missing. CUDA gives a process one instance only.

torch's `properties.uuid` is `cudaDeviceProp.uuid`, which may be the UUID of the GPU or of the
instance: the CUDA documentation promises the latter only for `cuDeviceGetUuid_v2`. Both are tried.
If both lead to a GPU in MIG mode, the sampler takes its only instance. If there are several
instances, it samples none.
"""

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fsdp_inspect.trace.host_work import parse_cores, write_cores
from fsdp_inspect.trace.run import MISSING_READING
from fsdp_inspect.trace.tables import MISSING_INT, DeviceTable

_STOP_TIMEOUT_S = 2.0
"""The time that `stop` waits for a reading that hangs in a driver."""
_MAX_FAILURES = 3
"""A reading that fails this many times in a row is not tried again."""
_ALL_LINKS = 0xFFFFFFFF
"""The NVLink scope that sums over all links (nvml.h: "a scopeId of UINT_MAX")."""

_MOST_FILE_BYTES = 16384
"""More than the size of any file of proc(5) that is read here: `status` has 2 KB."""

Reading = Callable[[], Mapping[str, int]]
"""Columns of `DeviceTable` from one call to the system."""


class DeviceSampler:
    """Appends one row of `DeviceTable` every `interval_s`, plus one at the start and at the end.

    Args:
        append: Takes a row, a tuple in the table's column order; the sampler thread calls it.
        interval_s: Seconds between samples.
        cuda_index: torch's index of the GPU to sample; None for training on CPU.
    """

    def __init__(
        self,
        append: Callable[[tuple[int, ...]], None],
        interval_s: float = 0.5,
        cuda_index: int | None = None,
    ) -> None:
        self._append = append
        self._interval_s = interval_s
        self._cuda_index = cuda_index
        self._identity: GpuIdentity | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = -1
        self._training_thread = -1
        self._probes: list[_Probe] = []
        self.problems: list[str] = []
        """Readings that could not be sampled, with the reason; one sentence each."""

    def start(self) -> None:
        """Begin sampling; call it from the training thread. A second call does nothing."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._training_thread = threading.get_native_id()
        if self._cuda_index is not None:
            try:
                self._identity = identify_gpu(self._cuda_index)
            except Exception as error:
                self._note(f"The GPU is not sampled: torch cannot describe the device ({error}).")
        self._thread = threading.Thread(target=self._run, name="fsdp-inspect-devices", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = math.inf) -> None:
        """Take a last sample and end the thread; does nothing in a forked child.

        It waits at most `timeout_s`, and at most two seconds.
        """
        # A forked child does not have this thread, and a lock that it held stays locked.
        if self._thread is None or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(min(timeout_s, _STOP_TIMEOUT_S))

    def _run(self) -> None:
        nvml = None
        try:
            self._probes = _open_host(self._training_thread, self._note)
            if self._identity is not None:
                nvml, probes = _open_gpu(self._identity, self._note)
                self._probes += probes
            self._sample()
            while not self._stop.wait(self._interval_s):
                self._sample()
            self._sample()
        except Exception as error:
            self._note(f"Device samples stopped by an internal error: {error!r}.")
        finally:
            _close_gpu(nvml)

    def _sample(self) -> None:
        values: dict[str, int] = {"time_ns": time.perf_counter_ns()}
        for probe in self._probes:
            values |= probe.ask(self._note)
        self._append(tuple(values.get(column, MISSING_INT) for column in DeviceTable.DTYPES))

    def _note(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems.append(sentence)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """The properties by which NVML finds torch's GPU, with any CUDA_VISIBLE_DEVICES."""

    uuids: tuple[str, ...]
    """With the prefix `GPU-` or `MIG-`, in the order of the NVML look-ups."""
    pci_bus_id: str | None
    """`domain:bus:device.function`, hexadecimal."""
    nvml_index: int
    """The index from CUDA_VISIBLE_DEVICES; wrong if CUDA and NVML (by bus) order GPUs
    differently."""


def identify_gpu(cuda_index: int) -> GpuIdentity:
    """Collect torch's properties of a GPU by which NVML can find it.

    Raises:
        AssertionError: torch has no device with this index (raised by torch).
    """
    import torch

    properties = torch.cuda.get_device_properties(cuda_index)
    uuid = getattr(properties, "uuid", None)
    visible = _visible_devices()
    named = [visible[cuda_index]] if cuda_index < len(visible) else []
    instances = [entry for entry in named if entry.startswith("MIG-")]
    return GpuIdentity(
        uuids=(*instances, *([f"MIG-{uuid}", f"GPU-{uuid}"] if uuid else [])),
        pci_bus_id=_pci_bus_id(properties),
        nvml_index=_visible_index(cuda_index),
    )


def _pci_bus_id(properties: Any) -> str | None:
    """The PCI address in NVML's format; None if torch (before 2.8) does not report it."""
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        return f"{domain:08x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None


# --- Find the cores of the process, and whether they are near its GPU.


class CorePlaces(NamedTuple):
    """Where a process may run, and where its GPU is; see `HostActivity`."""

    cores: str
    core_nodes: list[int]
    device_node: int | None


def find_cores(cuda_index: int | None) -> CorePlaces:
    """The cores and NUMA nodes of this thread, and the node of its GPU; unknown off Linux.

    Args:
        cuda_index: torch's index of the GPU; None: there is none.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return _find_places(frozenset(own), cuda_index)


@functools.lru_cache(maxsize=2)
def _find_places(
    own: frozenset[int], cuda_index: int | None, system: Path = Path("/sys")
) -> CorePlaces:
    nodes = []
    with contextlib.suppress(OSError, ValueError):
        for folder in (system / "devices/system/node").glob("node[0-9]*"):
            if own & parse_cores((folder / "cpulist").read_text()):
                nodes.append(int(folder.name.removeprefix("node")))
    near = -1
    with contextlib.suppress(Exception):  # torch without CUDA, a container without sysfs
        address = None if cuda_index is None else identify_gpu(cuda_index).pci_bus_id
        if address is not None:
            device = system / "bus/pci/devices" / address[4:]  # sysfs has 4 digits of the domain
            near = int((device / "numa_node").read_text())
    return CorePlaces(write_cores(own), sorted(nodes), near if near >= 0 else None)


def _visible_devices() -> list[str]:
    return [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]


def _visible_index(cuda_index: int) -> int:
    visible = _visible_devices()
    if cuda_index < len(visible) and visible[cuda_index].isdigit():
        return int(visible[cuda_index])
    return cuda_index


class _Probe:
    """One reading from the system; disabled after repeated failures."""

    def __init__(self, subject: str, read: Reading) -> None:
        self._subject = subject
        self._read = read
        self._failures = 0

    def ask(self, note: Callable[[str], None]) -> Mapping[str, int]:
        """The columns of the reading; empty if it failed."""
        if self._failures >= _MAX_FAILURES:
            return {}
        try:
            answer = self._read()
        except Exception as error:
            self._failures += 1
            if self._failures == _MAX_FAILURES:
                note(f"{self._subject} {MISSING_READING}: {error}.")
            return {}
        self._failures = 0
        return answer


# --- host


def _open_host(training_thread: int, note: Callable[[str], None]) -> list[_Probe]:
    probes = [_Probe("This process's CPU time", _CpuShare())]
    scheduled = f"/proc/self/task/{training_thread}/schedstat"
    if Path(scheduled).exists():  # Linux with scheduler statistics
        probes.append(_Probe("The wait for a core", partial(_read_run_delay, scheduled)))
    probes.append(_Probe("Page faults", _read_major_faults))
    status = "/proc/self/status"
    if Path(status).exists():
        probes.append(_Probe("Swapped memory", partial(_read_swap, status)))
    if packages := _find_packages():
        probes.append(_Probe("The energy of the CPUs", _PackageEnergy(packages)))
    try:
        import psutil
    except ImportError:
        note(
            "Host memory is not sampled: the package psutil is missing. Install it with "
            "`pip install fsdp-inspect[record]`."
        )
        return probes
    process = psutil.Process()

    def read_process_memory() -> Mapping[str, int]:
        return {"process_rss": process.memory_info().rss}

    def read_host_memory() -> Mapping[str, int]:
        memory = psutil.virtual_memory()
        # Used = total - available, because a new process can reclaim droppable caches.
        return {
            "host_memory_used": memory.total - memory.available,
            "host_memory_total": memory.total,
        }

    return [
        *probes,
        _Probe("This process's memory", read_process_memory),
        _Probe("The host's memory", read_host_memory),
    ]


def _read_run_delay(scheduled: str) -> Mapping[str, int]:
    """A thread's `schedstat`: time on a core, time ready without one (ns), slices (proc(5))."""
    return {"run_delay_ns": int(_read_file(scheduled).split()[1])}


def _read_major_faults() -> Mapping[str, int]:
    """Page faults of this process that had to read from a disk."""
    import resource  # not on Windows: the probe then fails and is not tried again

    return {"major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}


def _read_swap(status: str) -> Mapping[str, int]:
    """`VmSwap` of proc(5); missing if the kernel has no swap."""
    _, found, rest = _read_file(status).partition(b"VmSwap:")
    return {"process_swap": int(rest.split()[0]) << 10} if found else {}


def _find_packages(system: Path = Path("/sys")) -> list[Path]:
    """The energy counters of CPU packages that this process may read; by default only root may."""
    found = []
    for folder in sorted((system / "class/powercap").glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            # The parts of a package are intel-rapl:0:0 and so on. AMD has the same names.
            if (folder / "name").read_text().startswith("package"):
                int((folder / "energy_uj").read_text())
                found.append(folder)
    return found


class _PackageEnergy:
    """The sum of the energy counters of some packages, each of which begins again at its limit."""

    def __init__(self, packages: Sequence[Path]) -> None:
        self._files = [str(folder / "energy_uj") for folder in packages]
        self._limits = [
            int((folder / "max_energy_range_uj").read_text()) + 1 for folder in packages
        ]
        self._last = self._read()
        self._total = 0

    def __call__(self) -> Mapping[str, int]:
        now = self._read()
        rises = zip(now, self._last, self._limits, strict=True)
        self._total += sum((new - old) % limit for new, old, limit in rises)
        self._last = now
        return {"package_energy_uj": self._total}

    def _read(self) -> list[int]:
        return [int(_read_file(file)) for file in self._files]


def _read_file(path: str) -> bytes:
    """A small file of proc(5). `Path.read_text` takes about 80 µs more with cold caches."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_FILE_BYTES)
    finally:
        os.close(descriptor)


class _CpuShare:
    """CPU time of all threads of this process since the last call, in percent of one core.

    Child processes (data loader workers) are not included: finding them requires reading the
    whole process table at each sample.
    """

    def __init__(self) -> None:
        self._before = time.process_time_ns(), time.perf_counter_ns()

    def __call__(self) -> Mapping[str, int]:
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        cpu_before, wall_before = self._before
        if wall_ns - wall_before < 1_000_000:  # too short to measure (the first sample)
            return {}
        self._before = cpu_ns, wall_ns
        return {"process_cpu_pct": round(100 * (cpu_ns - cpu_before) / (wall_ns - wall_before))}


# --- GPU


def _open_gpu(
    identity: GpuIdentity, note: Callable[[str], None]
) -> tuple[ModuleType | None, list[_Probe]]:
    try:
        import pynvml
    except ImportError:
        note(
            "The GPU is not sampled: the NVML bindings are missing. Install them with "
            "`pip install fsdp-inspect[record]`."
        )
        return None, []
    try:
        pynvml.nvmlInit()
    except Exception as error:
        note(f"The GPU is not sampled: NVML failed to start ({error}).")
        return None, []
    try:
        handle = _find_gpu(pynvml, identity)
    except Exception as error:
        note(f"The GPU is not sampled: NVML found no {identity} ({error}).")
        return pynvml, []
    try:
        instance = _mig_instance(pynvml, handle)
    except _UnknownInstanceError as error:
        note(str(error))
        return pynvml, []
    if instance is None:
        return pynvml, _gpu_probes(pynvml, handle)
    note(
        f"The GPU is the MIG instance {_uuid_of(pynvml, instance)}: only its memory is sampled. "
        "Utilisation, power, clock, NVLink and PCIe traffic are missing, because NVML does not "
        "report them for an instance."
    )
    return pynvml, [_memory_probe(pynvml, instance)]


class _UnknownInstanceError(Exception):
    """The GPU is in MIG mode, and its instance in use is unknown."""


def _mig_instance(nvml: Any, handle: Any) -> Any:
    """The MIG instance of a handle; None if the handle is a whole GPU.

    Raises:
        _UnknownInstanceError: The GPU is in MIG mode and has several instances, or none.
    """
    if _is_true(nvml, lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle)):
        return handle
    if not _is_true(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0]):
        return None
    instances = _instances_of(nvml, handle)
    if len(instances) == 1:
        return instances[0]
    raise _UnknownInstanceError(
        f"The GPU is not sampled: it is in MIG mode with {len(instances)} instances, and the "
        "instance in use is unknown. Set CUDA_VISIBLE_DEVICES to the full UUID of the instance "
        "(MIG-..., as `nvidia-smi -L` shows it)."
    )


def _instances_of(nvml: Any, handle: Any) -> list[Any]:
    instances = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
        except nvml.NVMLError:  # an index may be empty
            continue
    return instances


def _is_true(nvml: Any, ask: Callable[[], Any]) -> bool:
    """NVML's yes-or-no answer; False if the GPU or the driver does not support MIG."""
    try:
        answer = ask()
    except nvml.NVMLError:
        return False
    return bool(getattr(answer, "value", answer))


def _uuid_of(nvml: Any, handle: Any) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError as error:
        return f"of unknown UUID ({error})"


def _find_gpu(nvml: Any, identity: GpuIdentity) -> Any:
    """NVML's handle: the first of UUID, PCI address and index that NVML accepts."""
    for uuid in identity.uuids:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            continue
    if identity.pci_bus_id is not None:
        try:
            return nvml.nvmlDeviceGetHandleByPciBusId(identity.pci_bus_id)
        except nvml.NVMLError:
            pass
    return nvml.nvmlDeviceGetHandleByIndex(identity.nvml_index)


def _gpu_probes(nvml: Any, handle: Any) -> list[_Probe]:
    def read_nvlink() -> Mapping[str, int]:
        ids = (
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        )
        sent, received = nvml.nvmlDeviceGetFieldValues(handle, [(id_, _ALL_LINKS) for id_ in ids])
        for field in (sent, received):
            if field.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(field.nvmlReturn)
        return {  # counters in KiB
            "nvlink_tx_bytes": 1024 * sent.value.ullVal,
            "nvlink_rx_bytes": 1024 * received.value.ullVal,
        }

    def read_pcie() -> Mapping[str, int]:
        # In kB/s over the last 20 ms; each call sleeps for that time without the GIL.
        sent = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
        received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        return {"pcie_tx_bytes_per_s": 1000 * sent, "pcie_rx_bytes_per_s": 1000 * received}

    return [
        _Probe(
            "The GPU's utilisation",
            _one("gpu_utilisation_pct", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ),
        _memory_probe(nvml, handle),
        _Probe(
            "The GPU's power", _one("gpu_power_mw", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        ),
        _Probe(
            "The GPU's clock",
            _one(
                "gpu_sm_clock_mhz",
                lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            ),
        ),
        _Probe(
            "The GPU's temperature",
            _one(
                "gpu_temperature_c",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
        ),
        _Probe(
            "What limits the GPU's clock",
            _one(
                "gpu_clock_limits",
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            ),
        ),
        _Probe("NVLink traffic", read_nvlink),
        _Probe("PCIe traffic", read_pcie),
    ]


def _memory_probe(nvml: Any, handle: Any) -> _Probe:
    return _Probe(
        "The GPU's memory",
        _one("gpu_memory_used", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
    )


def _one(column: str, read: Callable[[], int]) -> Reading:
    return lambda: {column: int(read())}


def _close_gpu(nvml: Any) -> None:
    if nvml is None:
        return
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return
