import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdp_inspect.recording import devices
from fsdp_inspect.recording.devices import DeviceSampler, GpuIdentity
from fsdp_inspect.trace.tables import DeviceTable


class FakeNvml:
    """NVML of a machine with three GPUs; its counters grow at each reading."""

    NVML_SUCCESS = 0
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139

    class NVMLError(Exception):
        """Base of NVML's errors."""

    def __init__(self) -> None:
        self.starts = 0
        self.num_links = 4
        self.clock_calls = 0
        self.clock_works = True

    def nvmlInit(self):
        self.starts += 1

    def nvmlShutdown(self):
        self.starts -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if not uuid.startswith("GPU-uuid-of-"):
            raise self.NVMLError("Not Found")
        return int(uuid[-1])

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        if bus_id != "00000000:81:00.0":
            raise self.NVMLError("Not Found")
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 2:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return ctypes.c_uint(0)  # pynvml does not unwrap it

    def nvmlDeviceGetMigMode(self, handle):
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=90 + handle, memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=5 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_000

    def nvmlDeviceGetClockInfo(self, handle, clock):
        self.clock_calls += 1
        if not self.clock_works:
            raise self.NVMLError("Not Supported")
        return 1980

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61 + sensor

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x20 | 0x04

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        return {0: 7, 1: 9}[counter]

    def nvmlDeviceGetFieldValues(self, handle, fields):
        all_links = 2**32 - 1
        return [
            SimpleNamespace(
                nvmlReturn=self.NVML_SUCCESS if self.num_links else 3,
                value=SimpleNamespace(ullVal=id_ * (self.num_links if scope == all_links else 1)),
            )
            for id_, scope in fields
        ]


class FakeMigNvml(FakeNvml):
    """NVML of a machine whose first GPU is split into instances; their handles are tuples."""

    def __init__(self, instances=("MIG-11111111-aa", "MIG-22222222-bb")) -> None:
        super().__init__()
        self.instances = instances
        self.asked_of_instances: list[str] = []

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid in self.instances:
            return (0, self.instances.index(uuid))
        return super().nvmlDeviceGetHandleByUUID(uuid)

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return ctypes.c_uint(isinstance(handle, tuple))

    def nvmlDeviceGetMigMode(self, handle):
        if handle != 0:
            raise self.NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= len(self.instances):
            raise self.NVMLError("Not Found")
        return (handle, index)

    def nvmlDeviceGetUUID(self, handle):
        return self.instances[handle[1]]

    def nvmlDeviceGetMemoryInfo(self, handle):
        if isinstance(handle, tuple):
            return SimpleNamespace(used=(handle[1] + 1) << 20, total=10 << 30)
        return super().nvmlDeviceGetMemoryInfo(handle)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 0 or isinstance(handle, tuple):
            self.asked_of_instances.append("utilisation")
            raise self.NVMLError("Not Supported")
        return super().nvmlDeviceGetUtilizationRates(handle)


class FakeCuda:
    """torch's description of a GPU."""

    def __init__(self, **properties):
        self.properties = SimpleNamespace(**properties)

    def __call__(self, index):
        return self.properties


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """Let a stop wait for the thread of the sampler as long as a busy machine needs."""
    monkeypatch.setattr(devices, "_STOP_TIMEOUT_S", 500.0)


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def sample(
    cuda_index: int | None = None, *, interval_s: float = 0.5, num_rows: int = 1
) -> tuple[list[dict[str, int]], DeviceSampler]:
    """The rows of a sampler that runs until it has this many (and a last one), and the sampler."""
    rows: list[tuple[int, ...]] = []
    sampler = DeviceSampler(rows.append, interval_s, cuda_index)
    sampler.start()
    while len(rows) < num_rows:
        time.sleep(0.001)
    sampler.stop()
    return [dict(zip(DeviceTable.DTYPES, row, strict=True)) for row in rows], sampler


def gpu(row: dict[str, int]) -> list[int]:
    return [row[column] for column in DeviceTable.DTYPES if column.startswith(("gpu", "nv", "pc"))]


def test_process_and_host_are_sampled_on_a_machine_without_gpu():
    rows, sampler = sample()
    last = rows[-1]
    assert last["process_rss"] > 10 << 20
    assert 0 < last["host_memory_used"] < last["host_memory_total"]
    assert gpu(last) == [-1] * len(gpu(last))
    assert sampler.problems == []


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no scheduler statistics")
def test_a_thread_that_shares_its_core_is_seen_waiting_for_it():
    def delay_ns() -> int:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])

    burn = "import os\nos.sched_setaffinity(0, {%d})\nprint(flush=True)\nwhile True: pass"
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    thread = threading.get_native_id()
    other = subprocess.Popen([sys.executable, "-c", burn % core], stdout=subprocess.PIPE)
    os.sched_setaffinity(0, {core})
    try:
        other.stdout.readline()
        rows: list[tuple[int, ...]] = []
        sampler, outer = DeviceSampler(rows.append, 3600), delay_ns()
        sampler.start()
        while not rows:
            pass
        inner = delay_ns()
        while delay_ns() < inner + 50_000_000:
            pass
        inner = delay_ns() - inner
        sampler.stop()
        outer = delay_ns() - outer
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.communicate()
    samples = [dict(zip(DeviceTable.DTYPES, row, strict=True)) for row in rows]
    assert inner <= samples[-1]["run_delay_ns"] - samples[0]["run_delay_ns"] <= outer


def test_rows_fit_the_device_table():
    rows, _ = sample()
    assert len(DeviceTable.from_rows(rows)) == len(rows) >= 2


def test_cpu_share_counts_every_core_that_this_process_keeps_busy():
    """Two intervals, just inside and just outside that of the sampler, bound its share."""
    outer = time.perf_counter(), time.process_time()
    share = devices._CpuShare()
    inner = time.perf_counter(), time.process_time()
    while time.process_time() < inner[1] + 0.1:
        pass
    inner_s, inner_cpu_s = time.perf_counter() - inner[0], time.process_time() - inner[1]
    percent = share()["process_cpu_pct"]
    outer_s, outer_cpu_s = time.perf_counter() - outer[0], time.process_time() - outer[1]
    assert 100 * inner_cpu_s / outer_s - 1 <= percent <= 100 * outer_cpu_s / inner_s + 1


def test_short_training_has_a_sample_at_its_start_and_its_end():
    rows, _ = sample(interval_s=60)
    assert len(rows) == 2
    assert rows[0]["time_ns"] < rows[1]["time_ns"]


def test_samples_keep_their_interval():
    rows, _ = sample(interval_s=0.02, num_rows=4)
    times = [row["time_ns"] for row in rows[:4]]
    assert all(later - earlier >= 20_000_000 for earlier, later in itertools.pairwise(times))


def test_gpu_of_torch_is_found_by_its_uuid_whatever_is_visible(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeCuda(uuid="uuid-of-2"))
    rows, sampler = sample(cuda_index=0)
    assert rows[-1]["gpu_utilisation_pct"] == 92
    assert sampler.problems == []


@pytest.mark.parametrize(
    ("properties", "visible", "handle"),
    [
        pytest.param(
            {"uuid": "?", "pci_domain_id": 0, "pci_bus_id": 0x81, "pci_device_id": 0},
            "",
            1,
            id="by PCI address",
        ),
        pytest.param({}, "2,0", 2, id="by the visible device"),
        pytest.param({}, "GPU-abc", 0, id="by torch's index"),
    ],
)
def test_gpu_without_uuid_is_found_otherwise(nvml, monkeypatch, properties, visible, handle):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeCuda(**properties))
    rows, _ = sample(cuda_index=0)
    assert rows[-1]["gpu_utilisation_pct"] == 90 + handle


MIG_SENTENCE = (
    "The GPU is the MIG instance {}: only its memory is sampled. Utilisation, power, clock, NVLink "
    "and PCIe traffic are missing, because NVML does not report them for an instance."
)


@pytest.mark.parametrize(
    ("visible", "torch_uuid", "instance"),
    [
        pytest.param("MIG-22222222-bb", "uuid-of-0", 1, id="torch tells the UUID of the GPU"),
        pytest.param("MIG-22222222-bb", "22222222-bb", 1, id="torch tells that of the instance"),
        pytest.param("", "11111111-aa", 0, id="nothing is hidden"),
    ],
)
def test_a_mig_instance_is_sampled_and_not_the_gpu_around_it(
    monkeypatch, visible, torch_uuid, instance
):
    fake = FakeMigNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeCuda(uuid=torch_uuid))
    rows, sampler = sample(cuda_index=0, interval_s=0.002, num_rows=5)
    assert rows[-1]["gpu_memory_used"] == (instance + 1) << 20
    assert sorted(gpu(rows[-1]))[:-1] == [-1] * (len(gpu(rows[-1])) - 1)
    assert sampler.problems == [MIG_SENTENCE.format(fake.instances[instance])]
    assert fake.asked_of_instances == []
    assert fake.starts == 0


def test_the_only_instance_of_a_gpu_is_the_one_in_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeMigNvml(instances=("MIG-1",)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeCuda(uuid="uuid-of-0"))
    rows, sampler = sample(cuda_index=0)
    assert rows[-1]["gpu_memory_used"] == 1 << 20
    assert sampler.problems == [MIG_SENTENCE.format("MIG-1")]


def test_an_instance_that_is_not_named_is_not_confused_with_the_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeMigNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeCuda(uuid="uuid-of-0"))
    rows, sampler = sample(cuda_index=0)
    assert set(gpu(rows[-1])) == {-1}
    assert sampler.problems == [
        "The GPU is not sampled: it is in MIG mode with 2 instances, and the instance in use is "
        "unknown. Set CUDA_VISIBLE_DEVICES to the full UUID of the instance (MIG-..., as "
        "`nvidia-smi -L` shows it)."
    ]


def test_another_gpu_of_the_machine_is_sampled_as_a_whole(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeMigNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeCuda(uuid="uuid-of-2"))
    rows, sampler = sample(cuda_index=0)
    assert rows[-1]["gpu_utilisation_pct"] == 92
    assert rows[-1]["gpu_power_mw"] == 350_000
    assert sampler.problems == []


def test_gpu_readings_have_the_units_of_their_columns(nvml, monkeypatch):
    monkeypatch.setattr(devices, "identify_gpu", lambda index: GpuIdentity((), None, index))
    row = sample(cuda_index=0)[0][-1]
    assert row["gpu_memory_used"] == 5 << 30
    assert row["gpu_power_mw"] == 350_000
    assert row["gpu_sm_clock_mhz"] == 1980
    assert (row["gpu_temperature_c"], row["gpu_clock_limits"]) == (61, 0x24)
    assert (row["nvlink_tx_bytes"], row["nvlink_rx_bytes"]) == (4 * 138 * 1024, 4 * 139 * 1024)
    assert (row["pcie_tx_bytes_per_s"], row["pcie_rx_bytes_per_s"]) == (7000, 9000)


def test_nvml_is_shut_down_at_the_end(nvml, monkeypatch):
    monkeypatch.setattr(devices, "identify_gpu", lambda index: GpuIdentity((), None, index))
    sample(cuda_index=0)
    assert nvml.starts == 0


def test_reading_that_is_not_supported_is_missing_and_not_asked_for_ever(nvml, monkeypatch):
    monkeypatch.setattr(devices, "identify_gpu", lambda index: GpuIdentity((), None, index))
    nvml.clock_works, nvml.num_links = False, 0
    rows, sampler = sample(cuda_index=0, interval_s=0.002, num_rows=5)
    assert {row["gpu_sm_clock_mhz"] for row in rows} == {-1}
    assert {row["nvlink_tx_bytes"] for row in rows} == {-1}
    assert rows[-1]["gpu_power_mw"] == 350_000
    assert nvml.clock_calls == 3
    assert [problem.split(" cannot")[0] for problem in sampler.problems] == [
        "The GPU's clock",
        "NVLink traffic",
    ]


def test_machine_without_nvml_library_is_said_once_and_hosts_are_sampled(nvml, monkeypatch):
    def fail():
        raise nvml.NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(devices, "identify_gpu", lambda index: GpuIdentity((), None, index))
    monkeypatch.setattr(nvml, "nvmlInit", fail)
    rows, sampler = sample(cuda_index=0)
    assert rows[-1]["process_rss"] > 0
    assert sampler.problems == [
        "The GPU is not sampled: NVML failed to start (NVML Shared Library Not Found)."
    ]


def test_gpu_unknown_to_nvml_is_said(nvml, monkeypatch):
    monkeypatch.setattr(devices, "identify_gpu", lambda index: GpuIdentity((), None, 7))
    _, sampler = sample(cuda_index=0)
    assert "NVML found no GpuIdentity(" in sampler.problems[0]
    assert nvml.starts == 0


@pytest.mark.parametrize(
    ("module", "subject"), [("psutil", "Host memory"), ("pynvml", "The GPU is not")]
)
def test_missing_package_costs_its_columns_and_is_said(monkeypatch, module, subject):
    monkeypatch.setattr(devices, "identify_gpu", lambda index: GpuIdentity((), None, index))
    monkeypatch.setitem(sys.modules, module, None)
    rows, sampler = sample(cuda_index=0)
    assert rows[-1]["time_ns"] > 0
    assert any(problem.startswith(subject) for problem in sampler.problems)


def test_gpu_that_torch_does_not_have_is_said():
    _, sampler = sample(cuda_index=0) if not torch.cuda.is_available() else sample(cuda_index=99)
    assert sampler.problems[0].startswith(
        "The GPU is not sampled: torch cannot describe the device"
    )


def test_append_that_raises_ends_the_sampling_and_nothing_else():
    def append(row):
        raise OSError("disk full")

    sampler = DeviceSampler(append)
    sampler.start()
    sampler.stop()
    assert sampler.problems == [
        "Device samples stopped by an internal error: OSError('disk full')."
    ]


def test_stopping_twice_or_before_starting_does_nothing():
    sampler = DeviceSampler([].append)
    sampler.stop()
    sampler.start()
    sampler.start()
    sampler.stop()
    sampler.stop()
    assert "fsdp-inspect-devices" not in {thread.name for thread in threading.enumerate()}


def test_thread_does_not_keep_a_process_alive():
    sampler = DeviceSampler([].append)
    sampler.start()
    (thread,) = [t for t in threading.enumerate() if t.name == "fsdp-inspect-devices"]
    sampler.stop()
    assert thread.daemon


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_forked_child_neither_samples_nor_waits_for_the_thread_it_does_not_have():
    rows: list[tuple[int, ...]] = []
    sampler = DeviceSampler(rows.append, interval_s=0.005)
    sampler.start()
    child = os.fork()
    if child == 0:
        before = len(rows)
        time.sleep(0.03)
        sampler.stop()
        os._exit(0 if len(rows) == before else 1)
    _, status = os.waitpid(child, 0)
    sampler.stop()
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_nodes_of_a_process_and_of_its_gpu_come_from_sysfs(tmp_path, monkeypatch):
    identity = GpuIdentity((), "00000000:3b:00.0", 0)
    monkeypatch.setattr(devices, "identify_gpu", lambda index: identity)
    for node, cores in enumerate(("0-3,8", "4-7", "9")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    for written, node in (("1\n", 1), ("-1\n", None)):  # -1: a machine with one node
        (device / "numa_node").write_text(written)
        devices._find_places.cache_clear()
        found = devices._find_places(frozenset({2, 8, 9}), 0, tmp_path)
        assert found == ("2,8-9", [0, 2], node)
    assert devices._find_places(frozenset({4}), None, tmp_path) == ("4", [1], None)
    assert devices._find_places(frozenset({4}), 0, tmp_path / "none") == ("4", [], None)
    devices._find_places.cache_clear()


def test_the_cores_of_this_process_are_those_of_the_system():
    found = devices.find_cores(None)
    assert devices.parse_cores(found.cores) == os.sched_getaffinity(0)
    assert found.device_node is None


def test_the_energy_of_cpu_packages_goes_on_when_a_counter_begins_again(tmp_path):
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1"}
    for folder, name in names.items():
        path = tmp_path / "class/powercap" / folder
        path.mkdir(parents=True)
        (path / "name").write_text(f"{name}\n")
        (path / "energy_uj").write_text("900\n")
        (path / "max_energy_range_uj").write_text("999\n")
    packages = devices._find_packages(tmp_path)
    assert [folder.name for folder in packages] == ["intel-rapl:0", "intel-rapl:1"]
    read = devices._PackageEnergy(packages)
    (packages[0] / "energy_uj").write_text("950\n")
    (packages[1] / "energy_uj").write_text("20\n")
    assert read() == {"package_energy_uj": 50 + 120}
    assert devices._find_packages(tmp_path / "nowhere") == []
