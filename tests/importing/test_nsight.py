"""Exports of Nsight Systems become runs with the numbers of their own tables.

The schema is that of an export of version 2026.2. The importer was tried on five public exports:
tests/fixtures of GindaChen/nsys-ai, of FSDP2 on 2 H100, of inference, and of CUDA without NVTX.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fsdp_inspect.analysis.exposed import measure_exposed
from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.run import open_run

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
  deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
  copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
  eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
  returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
  rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER,
  endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, name TEXT, value TEXT);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT,
  totalMemory INTEGER);
INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1779787126655288414, '', '');
INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (0, 'Hostname', 'node7');
INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA H100', 85899345920);
"""
MS = 1_000_000
GEMM, GATHER = "sm90_xmma_gemm_bf16", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)"


class Export:
    """Build an export with the events of two ranks."""

    def __init__(self, path: Path) -> None:
        self.path, self.strings = path, {}
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)

    def string(self, value: str) -> int:
        number = self.strings.setdefault(value, len(self.strings) + 1)
        self.database.execute("INSERT OR IGNORE INTO StringIds VALUES (?, ?)", (number, value))
        return number

    def add(self, table: str, **values: object) -> None:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", [*values.values()])

    def kernel(self, pid: int, device: int, name: str, start: int, end: int, issue: int) -> None:
        number = self.string(name)
        correlation = self.database.execute("SELECT count(*) FROM StringIds").fetchone()[0] * 1000
        correlation += issue // MS
        self.add(
            "CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=device, contextId=1,
            streamId=7 if name == GEMM else 20, correlationId=correlation, globalPid=pid << 24,
            demangledName=number, shortName=number,
        )  # fmt: skip
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=issue, end=issue + 5000, eventClass=0,
            globalTid=(pid << 24) + pid, correlationId=correlation,
            nameId=self.string("cudaLaunchKernel_v7000"), returnValue=0,
        )  # fmt: skip

    def range(self, pid: int, name: str, start: int, end: int, *, registered: bool = False) -> None:
        named = {"textId": self.string(name)} if registered else {"text": name}
        self.add(
            "NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=(pid << 24) + pid,
            domainId=0, **named,
        )  # fmt: skip

    def close(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Two steps of 10 ms, on two processes; the gather of rank 1 takes 1 ms longer."""
    made = Export(tmp_path / "report.sqlite")
    for pid, device in ((222, 1), (111, 0)):
        for step in range(2):
            t = step * 10 * MS
            made.range(pid, f"iteration {step + 5}", t, t + 10 * MS)
            made.range(pid, "FSDP::root_pre_forward, op_id = 1", t, t + MS)
            made.range(pid, "FSDP::all_gather (layers.0), op_id = 2", t, t + MS, registered=True)
            made.kernel(pid, device, GATHER, t + 2 * MS, t + (5 + device) * MS, t + MS // 2)
            made.range(pid, "aten::mm, op_id = 9, sizes = [[64, 32], [32, 16]]", t + MS, t + 2 * MS)
            made.kernel(pid, device, GEMM, t + 4 * MS, t + 9 * MS, t + MS + MS // 2)
    return made.close()


def test_an_export_is_a_rank_for_each_process_with_the_numbers_of_its_tables(
    export: Path, tmp_path: Path
) -> None:
    imported = import_traces(export, tmp_path / "run")
    assert (imported.ranks, imported.files) == (
        (0, 1), ("report.sqlite:111", "report.sqlite:222")
    )  # fmt: skip
    run = open_run(tmp_path / "run")
    assert [unit.fqn for unit in run.manifest.units] == ["layers.0"]
    assert (run.manifest.device_name, run.source.ranks[0].host) == ("NVIDIA H100", "node7")
    assert run.manifest.created_unix_ns == 1779787126655288414 + MS // 2
    assert sorted(set(run.source.events(0).step.tolist())) == [5, 6]
    exposed = measure_exposed(run.source)
    assert {owner.fqn for owner in exposed.owners} == {"layers.0"}
    assert run.summary().exposed_ns == 2 * MS  # 2 to 4 ms; both ranks
    kernels = run.source.kernels(0).columns
    assert kernels.time_ns == [5 * MS, 3 * MS, 5 * MS, 3 * MS]
    assert any("export of Nsight Systems" in note for note in imported.notes)


def test_a_cuda_graph_is_a_kernel_of_its_time_and_noted(export: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(export)) as database, database:
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, deviceId, streamId, "
            "correlationId, globalPid)"
        )
        graphs = [(9 * MS, 10 * MS, 0, 7, 1, 111 << 24), (0, 0, 0, 7, 2, 111 << 24)]
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?)", graphs
        )
    imported = import_traces(export, tmp_path / "run")

    kernels = open_run(tmp_path / "run").source.kernels(0).columns
    assert kernels.time_ns == [MS, 5 * MS, 3 * MS, 5 * MS, 3 * MS]
    (note,) = [note for note in imported.notes if "CUDA graphs" in note]
    assert "has 2 launches of CUDA graphs" in note
    assert "1 of them have no times" in note


def test_idle_time_that_the_first_step_lacks_is_noted(export: Path, tmp_path: Path) -> None:
    # The steps of 10 ms are 2 to 9 ms and 9 to 19 ms: the first one lacks the time before 2 ms.
    notes = import_traces(export, tmp_path / "idle").notes
    assert any(note.startswith("The first step is over 5% shorter") for note in notes)
    with closing(sqlite3.connect(export)) as database, database:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        database.execute(f"UPDATE {table} SET start = 0 WHERE start = {2 * MS}")
        database.execute(f"UPDATE {table} SET end = end + {MS} WHERE end % {10 * MS} = {9 * MS}")
    notes = import_traces(export, tmp_path / "busy").notes
    assert not any(note.startswith("The first step is") for note in notes)


def test_the_command_imports_and_shows_an_export(export: Path, tmp_path: Path, invoke) -> None:
    assert invoke("import", export, "--out", tmp_path / "run").code == 0
    assert invoke("show", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "has no kernels"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x'", "cannot be read"),
        (
            "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO K; "
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT * FROM K",
            "has no kernels",
        ),
    ],
)
def test_a_damaged_or_hostile_export_is_refused(
    export: Path, tmp_path: Path, change: str, words: str
) -> None:
    with closing(sqlite3.connect(export)) as database:
        database.executescript(change)
    with pytest.raises(ImportingError, match=words):
        import_traces(export, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_cut_off_export_is_refused(export: Path, tmp_path: Path) -> None:
    export.write_bytes(export.read_bytes()[:3000])
    with pytest.raises(ImportingError, match="cannot be read"):
        import_traces(export, tmp_path / "run")
