"""Files of rocprofv3 become runs with the numbers of their own records.

The form is that of ROCm/rocprofiler-sdk (rocprofv3-schema.json, generateJSON.cpp). The importer was
tried on the one public file of a training: tests/rocprof of AMD-AGI/TraceLens, FSDP on an MI350X.
It has 43,915 kernels and no ranges.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing import rocprof
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.run import open_run
from tests.conftest import Invoke

MS = 1_000_000
GEMM, GATHER = "Cijk_Ailk_Bljk_BBS_BH", "ncclDevKernel_AllGather_RING(ncclDevKernelArgsStorage)"
COPY = "__amd_rocclr_copyBuffer"
SYMBOLS = {1: GEMM, 2: GATHER, 3: COPY}
LAUNCH, TO_DEVICE = (2, 1), (3, 0)
OPERATIONS = [[], ["roctxRangePushA"], ["hipMalloc", "hipLaunchKernel"],
              ["MEMORY_COPY_HOST_TO_DEVICE"]]  # fmt: skip


class Process:
    """Build one process of a file."""

    def __init__(self, pid: int, device: int) -> None:
        self.pid, self.device, self.count = pid, device, 0
        self.records: dict[str, list[dict[str, Any]]] = {
            "kernel_dispatch": [], "hip_api": [], "marker_api": [], "memory_copy": [],
        }  # fmt: skip
        self.messages: list[dict[str, Any]] = []

    def add(
        self, table: str, start: int, end: int, kind: tuple[int, int], **values: Any
    ) -> dict[str, Any]:
        self.count += 1
        record = {
            "size": 1, "kind": kind[0], "operation": kind[1], "thread_id": self.pid,
            "correlation_id": {"internal": self.count, "external": 0},
            "start_timestamp": start, "end_timestamp": end, **values,
        }  # fmt: skip
        self.records[table].append(record)
        return record

    def range(self, name: str, start: int, end: int) -> None:
        self.add("marker_api", start, end, (1, 0))
        self.messages.append({"key": self.count, "value": name})

    def kernel(self, kernel: int, start: int, end: int, issue: int) -> None:
        queue = {1: 18, 2: 20, 3: 18}[kernel]
        info = {"agent_id": {"handle": 100 + self.device}, "queue_id": {"handle": queue},
                "kernel_id": kernel, "dispatch_id": self.count}  # fmt: skip
        self.add("hip_api", issue, issue + 5000, LAUNCH)
        record = self.add("kernel_dispatch", start, end, (11, 2), dispatch_info=info)
        record["correlation_id"] = {"internal": self.count - 1, "external": 0}

    def plain(self) -> dict[str, Any]:
        agents = [
            {"id": {"handle": 99}, "type": 1, "gpu_index": -1, "product_name": "AMD EPYC"},
            *(
                {"id": {"handle": 100 + number}, "type": 2, "gpu_index": number,
                 "product_name": "AMD Instinct MI350X"}
                for number in range(2)
            ),
        ]  # fmt: skip
        symbols = [
            {"kernel_id": number, "formatted_kernel_name": name, "kernel_object": 7}
            for number, name in SYMBOLS.items()
        ]
        return {
            "metadata": {"pid": self.pid, "node": {"hostname": "node7"}, "init_time": 1},
            "agents": agents,
            "strings": {
                "buffer_records": [{"kind": "K", "operations": each} for each in OPERATIONS],
                "marker_api": self.messages,
            },
            "kernel_symbols": symbols,
            "buffer_records": {**self.records, "hsa_api": []},
        }


def write(path: Path, *processes: Process) -> Path:
    content = json.dumps({"rocprofiler-sdk-tool": [each.plain() for each in processes]}, indent=1)
    path.write_bytes(gzip.compress(content.encode()))
    return path


def training(pid: int, device: int, *, is_marked: bool = True) -> Process:
    """Two steps of 10 ms; the gather of device 1 takes 1 ms longer."""
    made = Process(pid, device)
    for step in range(2):
        t = (1 + step) * 10 * MS
        if is_marked:
            made.range(f"iteration {step + 5}", t, t + 10 * MS)
        made.range("FSDP::root_pre_forward, op_id = 1", t, t + MS)
        made.range("FSDP::all_gather (layers.0), op_id = 2", t, t + MS)
        made.kernel(2, t + 2 * MS, t + (5 + device) * MS, t + MS // 2)
        made.range("aten::mm, op_id = 9, sizes = [[64, 32], [32, 16]]", t + MS, t + 2 * MS)
        made.kernel(1, t + 4 * MS, t + 8 * MS, t + MS + MS // 2)
        made.kernel(3, t + 8 * MS, t + 9 * MS, t + MS + MS // 2 + 6000)
        made.add("memory_copy", t, t + MS, TO_DEVICE, dst_agent_id={"handle": 100 + device},
                 src_agent_id={"handle": 99}, bytes=4)  # fmt: skip
    return made


def test_a_file_is_a_rank_for_each_process_with_the_numbers_of_its_records(
    tmp_path: Path, invoke: Invoke
) -> None:
    trace = write(tmp_path / "results.json.gz", training(222, 1), training(111, 0))
    imported = import_traces(trace, tmp_path / "run")
    assert imported.files == ("results.json.gz:111", "results.json.gz:222")
    run = open_run(tmp_path / "run")
    assert [unit.fqn for unit in run.manifest.units] == ["layers.0"]
    assert (run.manifest.device_name, run.source.ranks[0].host) == ("AMD Instinct MI350X", "node7")
    assert sorted(set(run.source.events(0).step.tolist())) == [5, 6]
    assert {owner.fqn for owner in measure_exposed(run.source).owners} == {"layers.0"}
    assert run.summary().exposed_ns == 2 * MS  # 2 to 4 ms; both ranks
    # The copy of HIP's runtime is compute time of the device, and not communication.
    times = sorted(run.source.kernels(0).columns.time_ns)
    assert times == [MS, MS, MS, MS, 3 * MS, 3 * MS, 4 * MS, 4 * MS]
    assert any("JSON of rocprofv3" in note for note in imported.notes)
    assert invoke("show", tmp_path / "run").code == 0


def test_processes_with_one_number_are_ranks_with_a_note(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.json.gz", training(111, 0), training(111, 0), training(112, 2))
    imported = import_traces(trace, tmp_path / "run")
    assert len(imported.ranks) == 3
    (note,) = [note for note in imported.notes if "Several processes" in note]
    assert "have the number 111" in note
    assert not any("may be copies" in note for note in imported.notes)


def test_copies_of_a_trace_are_noted(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    for name in ("a.json.gz", "b.json.gz"):
        write(tmp_path / "traces" / name, training(111, 0))
    imported = import_traces(tmp_path / "traces", tmp_path / "run")
    assert any(note.startswith("a.json.gz, b.json.gz have equal") for note in imported.notes)


def test_a_whole_process_without_marks_is_refused_or_has_no_verdict(
    tmp_path: Path, invoke: Invoke
) -> None:
    trace = write(tmp_path / "results.json.gz", training(111, 0, is_marked=False))
    with pytest.raises(ImportingError, match="or an NVTX or ROCTx range such as 'step 5'"):
        import_traces(trace, tmp_path / "run")
    assert invoke("import", trace, "--whole-trace", "--out", tmp_path / "run").code == 0
    said = invoke("show", tmp_path / "run").out
    assert "No conclusion: the trace has a whole process as one step." in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}', "cannot be read"),
        (b'{"rocprofiler-sdk-tool": [{"metadata": {"pid": "x"}}]}', "cannot be read"),
        (
            b'{"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}, "buffer_records": {}}]}',
            "has no kernels",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(ImportingError, match=words):
        import_traces(tmp_path / "results.json", tmp_path / "run")


def test_a_file_that_needs_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write(tmp_path / "results.json.gz", training(111, 0))
    monkeypatch.setattr(rocprof, "_MAX_BYTES", 1000)
    with pytest.raises(ImportingError, match="unpacks to more than 1,000 B"):
        import_traces(trace, tmp_path / "run")
