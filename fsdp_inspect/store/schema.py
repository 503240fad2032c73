"""Define the format of a run folder: files, columns, codes and rules of schema version 1.

This text is sufficient to write a reader or a writer in another language.

**Layout.** One folder contains one run. A restart of the job is the next attempt and changes no
file of an earlier attempt::

    <run>/
      run.json                        the manifest; written before any event, and again when more
                                      is known (process groups)
      network.json                    a probe of the network (optional)
      summary.parquet                 the whole steps of all ranks of all attempts; only after
                                      compaction
      statistics.parquet              a few rows for each rank, computed from summary.parquet
      rank_records.json.gz            copies of all rank.json, for object stores; only of many ranks
      attempt-000/                    three digits or more, from 0
        rank-00000/                   five digits or more, the global rank
          rank.json                   one rank of one attempt; rewritten during the recording
          events.arrows               while recording: an Arrow IPC stream
          events.parquet              after compaction: the same rows, sorted
          memory.arrows, memory.parquet, device.arrows, device.parquet,
          scalars.arrows, scalars.parquet
          summary.parquet             the summary of this rank; only after compaction
          black_box.bin               the last collectives; see `trace.black_box`
          black_box_desync.bin        the same, when the ranks first issued different collectives
          stacks.txt, crash.txt, sigterm.txt
                                      stacks at a hang, a fatal signal or SIGTERM, as written by
                                      Python's faulthandler; see `trace.stack_dumps`
          numerics.jsonl              the numerics steps; see `trace.numerics`
          live_memory.json            live memory at the peaks of the last memory step
          allocations.json            the allocation history of a forecast or a memory snapshot
          out_of_memory.json          the allocation that failed, and the live memory
          kernels.json                the kernels of an imported trace; see `trace.kernels`
          profile.json.gz             the profiler's trace of the profiled steps, in its form

A table that was not recorded has no file. Names with `.tmp-` in them are unfinished writes, or
room that a rank reserves for its last `rank.json`, possibly of a killed process: ignore them. A
folder may lack ranks, and may lack `run.json`, if other nodes wrote them to their own disks. The
other data stays usable. Copying the folders of all nodes of one run into one folder gives the
complete run (`fsdp-inspect store merge` also checks them).

**JSON files** are UTF-8 objects: the fields of `trace.run.RunManifest` (`run.json`),
`trace.run.RankRecord` (`rank.json`), `trace.network_probe.NetworkProbe` (`network.json`),
`trace.live_memory.LiveMemoryRecord` (`live_memory.json`),
`trace.allocations.AllocationsRecord` (`allocations.json`),
`trace.kernels.KernelRecord` (`kernels.json`) and
`trace.out_of_memory.OutOfMemoryRecord` (`out_of_memory.json`), whose docstrings give meaning and
units. Unknown fields are ignored. The last field may be `crc32`: eight
lower-case hexadecimal digits, the CRC-32 (IEEE 802.3, as in zlib and gzip) of all bytes of the file
before that field's opening quote. Without the field the file is not checked (remove the field when
you edit the file by hand). The files are replaced atomically (written to a temporary file, then
renamed), so they are never half written.

**Tables.** All columns are non-null little-endian integers, two's complement (`scalars.value` is an
IEEE 754 double). `DTYPES` of the classes in `trace.tables` defines their names, order and widths;
the attribute docstrings define their meaning. Codes are in `trace.codes` and, for the summary's
`kind` from 100, in `trace.codes.StepPart`. -1 means "not measured" or "none". Times are nanoseconds
on the recording rank's monotonic clock; `rank.json` contains pairs of that clock and the wall
clock. Sizes are bytes.

========== ============================== ======================================= ===============
file       class                          one row is                              parquet order
========== ============================== ======================================= ===============
events     `trace.tables.EventTable`      an event with a duration                `start_ns`
memory     `trace.tables.MemoryTable`     a reading of the memory counters        `time_ns`
device     `trace.tables.DeviceTable`     a sample of the device and the host     `time_ns`
scalars    `trace.tables.ScalarTable`     a number that the training loop logged  `time_ns`
summary    `trace.tables.SummaryTable`    sums of a rank, step, unit, kind, group see below
statistics `trace.tables.StatisticsTable` sums and extremes of a rank over steps  see below
========== ============================== ======================================= ===============

Rows with equal values keep the order in which they were recorded.

**Live streams** (`.arrows`) are Arrow IPC streams: a schema message, record batches (each either
uncompressed or an LZ4 frame, as its header states), and, after the writer has closed it, a record
batch without rows and the end mark `FF FF FF FF 00 00 00 00`. Rows are in the order of recording,
which is nearly the order of time. The schema's metadata has the key `fsdp_inspect` with the table's
name and the schema version: `events 1`. The key `fsdp_inspect_origin` is the origin (see below) as
JSON. Each record batch has two fields of custom metadata:

* `first_row`: the number of its first row, counted from 0 over all rows ever recorded into this
  table. A gap means that rows were dropped, for example because the disk was full.
* `crc32`: as above, of `first_row` in decimal ASCII, then for each column in file order its name in
  UTF-8 and its values as little-endian bytes without padding.

A stream without the empty batch at its end belongs to a running or killed process. Its last batch
may be cut off anywhere (a torn tail); the batches before it are valid. An empty file is a stream
without rows. A killed process loses the rows since its last flush. A background thread flushes
every `flush_interval_s` of `rank.json`, as soon as it gets a core and the interpreter's lock, and
then writes. So the loss is `flush_interval_s` plus the time that the thread waits for them and the
disk: on a busy machine it can be seconds. After a disk fault, rows wait in the memory of the
process, up to 64 MiB of encoded rows per rank; a kill then loses all of them. Rows that the writer
dropped are counted in `dropped` of `rank.json`, unless that file cannot be written either. A power
failure may lose more, because the writer does not wait for the disk.

**Summaries** have two sorts of rows: rows of a whole step of a rank (`kind` 0 and from 100; at most
one row for each of these kinds in a step, of kind 140 one for each process group) and rows of units
(all other kinds). A rank's summary has the rows of whole steps first, by kind and step. The rows of
units follow, by step, in new row groups. The run's summary repeats the rows of whole steps of all
ranks, by attempt, kind, rank and step; of a large run, this holds for the row groups of some ranks,
then of the next ranks. It has no rows of units: for 1,000 ranks of 64 units they would be 50 times
as many.

The run's statistics (`statistics.parquet`) condense the run's summary, so that reading all ranks
does not depend on the number of steps. They are valid for one `summary.parquet` and for the
settings in their footer. A reader computes them from the summary otherwise.

**Compacted files** (`.parquet`) are compressed with zstd, in row groups of at most 65,536 rows,
with page checksums. A column named `X_minus_Y` stores X - Y, wrapping around at 64 bits, and the
lowest 64-bit integer if X is -1 (`exposed_ns`: 0). Durations repeat and times never do, so this
halves the size of `events`. The key-value pair `fsdp_inspect` is a JSON object:

* `schema_version`: of this file; `table`: its name, as above;
* `origin`: the recording that wrote the table, `run_id` and `created_unix_ns` as in `run.json`,
  `attempt` and `rank` (both -1 in the tables of the whole run). A reader rejects a table of another
  origin. Earlier versions stated none: then `run_id` in `rank.json` is missing, too. Lines of
  `numerics.jsonl` have the same field;
* `covered_rows`: the rows [0, covered_rows) of the stream are in this file (or were dropped). If
  the stream still exists, it adds only batches with a `first_row` of at least `covered_rows`;
* `groups`: for each row group `[rows, lowest step, highest step, crc32]`. The checksum is as in a
  stream but without `first_row`, over the columns as this file names and stores them. Tables
  without a step have -1, -1;
* summaries also have `kinds`, the `kind`s of the rows of each row group, ascending, and
  `reduction`, the version of the formulas that computed it. A reader with other formulas computes
  the summary from events and memory samples instead. The summary of the run also has `ranks`: for
  each attempt (a decimal string) the list of ranks that it covers. It has no data of other ranks;
* `statistics` have `condensed`: `version` of the formulas, `summary` (the `fsdp_inspect_crc32` of
  the summary that they condense), and the settings `num_warmup`, `memory` and `numerics_every`.

The pair `fsdp_inspect_crc32` is the CRC-32 of that JSON text, in hexadecimal digits.

**Versions.** `schema_version` increases only when an older reader would misread a newer run; that
reader then rejects the run. New fields, columns, codes and tables do not increase it. A reader
ignores unknown ones, and reads a column that an older writer did not have as -1.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from fsdp_inspect.trace.records import SCHEMA_VERSION
from fsdp_inspect.trace.run import TableOrigin
from fsdp_inspect.trace.tables import (
    MISSING_INT,
    DeviceTable,
    EventTable,
    MemoryTable,
    ScalarTable,
    StatisticsTable,
    SummaryTable,
    Table,
)

MANIFEST_FILE = "run.json"
PROBE_FILE = "network.json"
RANK_FILE = "rank.json"
RECORDS_FILE = "rank_records.json.gz"
"""In the run folder: the text of each `rank.json` by its path, of runs with many ranks."""
NUMERICS_FILE = "numerics.jsonl"
"""In a rank's folder: its numerics steps, see `trace.numerics`."""
DETAIL_REQUEST_FILE, PROFILE_REQUEST_FILE = "detail.request", "profile.request"
"""Written by the dashboard into a run folder: record the next steps in detail."""
START_PREFIX = "start-"
"""Begins the names of runs of ranks that failed or stood before they trained."""
BLACK_BOX_FILE = "black_box.bin"
"""In a rank's folder: its last collectives, see `trace.black_box`."""
DESYNC_FILE = "black_box_desync.bin"
"""In a rank's folder: its black box when the ranks first differed; missing without a difference."""
STACKS_FILE = "stacks.txt"
"""In a rank's folder: a line of JSON, and the stacks that the watchdog requested."""
CRASH_FILE = "crash.txt"
"""In a rank's folder: the stacks at a fatal signal; missing without one."""
SIGTERM_FILE = "sigterm.txt"
"""In a rank's folder: the stacks when SIGTERM ended the process; missing without one."""
LIVE_MEMORY_FILE = "live_memory.json"
ALLOCATIONS_FILE = "allocations.json"
"""In a rank's folder: its allocation history; missing without one."""
OUT_OF_MEMORY_FILE = "out_of_memory.json"
"""In a rank's folder: the allocation that failed; missing without one."""
KERNELS_FILE = "kernels.json"
"""In a rank's folder: its kernels by unit; missing without an imported trace."""
PROFILE_FILE = "profile.json.gz"
"""In a rank's folder: torch.profiler's trace of the profiled steps; missing without any."""
PLAN_FILE = "plan.toml"
"""In the run folder: the observed plan. `--plan` and `apply_plan` read it."""
LIVE_SUFFIX = ".arrows"
COMPACTED_SUFFIX = ".parquet"

ROW_GROUP_ROWS = 65_536
REDUCTION_VERSION = 3
"""Increased when `reduction.rank_rows.summarise_rank` gives other rows for the same recording.

1: sums of events. 2: memory of each step; the number of collectives on STEP rows. 3: process
groups."""

STREAM_KEY = b"fsdp_inspect"
ORIGIN_KEY = b"fsdp_inspect_origin"
FIRST_ROW_KEY = b"first_row"
CHECKSUM_KEY = b"crc32"
FOOTER_KEY = b"fsdp_inspect"
FOOTER_CHECKSUM_KEY = b"fsdp_inspect_crc32"

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The last eight bytes of an Arrow IPC stream that was closed."""

_ATTEMPT = re.compile(r"attempt-(\d{3,})")
_RANK = re.compile(r"rank-(\d{5,})")

TableT = TypeVar("TableT", bound=Table)


@dataclass(frozen=True, slots=True)
class RelativeColumn:
    """A column that is compacted as `name - base`, because the difference repeats more often."""

    name: str
    base: str
    nothing: int = MISSING_INT
    """The value for a missing entry; stored as the lowest integer."""

    @property
    def stored_name(self) -> str:
        """The column's name in the compacted file: `end_ns_minus_start_ns`."""
        return f"{self.name}_minus_{self.base}"


def encode_origin(origin: TableOrigin) -> bytes:
    """Encode an origin as one line of JSON in ASCII."""
    return json.dumps(origin.model_dump(), separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class TableFile(Generic[TableT]):
    """One table of a rank: its file names, its columns and its compacted form."""

    name: str
    """File name without suffix."""
    table: type[TableT]
    sort_by: str | None = None
    """The column that orders the compacted rows; None: rows keep their order."""
    relative_columns: tuple["RelativeColumn", ...] = ()
    """Columns that are compacted as their difference to another column."""
    split_columns: tuple[str, ...] = ()
    """Columns stored with BYTE_STREAM_SPLIT, because only their low bytes vary."""
    lists_kinds: bool = False
    """Whether the footer lists the `kind`s of each row group, so that readers can skip groups."""

    @property
    def live_name(self) -> str:
        """Name of the stream: `events.arrows`."""
        return self.name + LIVE_SUFFIX

    @property
    def compacted_name(self) -> str:
        """Name of the compacted file: `events.parquet`."""
        return self.name + COMPACTED_SUFFIX

    def arrow_schema(self, origin: TableOrigin | None = None) -> pa.Schema:
        """Columns and types in file order, without nulls.

        The metadata names the table and, if it is known, the recording that writes it.
        """
        fields = [
            pa.field(name, pa.from_numpy_dtype(np.dtype(dtype)), nullable=False)
            for name, dtype in self.table.DTYPES.items()
        ]
        label = f"{self.name} {SCHEMA_VERSION}"
        metadata: dict[bytes | str, bytes | str] = {STREAM_KEY: label}
        if origin is not None:
            metadata[ORIGIN_KEY] = encode_origin(origin)
        return pa.schema(fields, metadata)


EVENTS = TableFile(
    "events",
    EventTable,
    sort_by="start_ns",
    relative_columns=tuple(
        RelativeColumn(name, "start_ns") for name in ("issue_ns", "end_ns", "need_ns")
    ),
    split_columns=("sequence", "collective"),
)
MEMORY = TableFile("memory", MemoryTable, sort_by="time_ns")
DEVICE = TableFile("device", DeviceTable, sort_by="time_ns")
SCALARS = TableFile("scalars", ScalarTable, sort_by="time_ns")
SUMMARY = TableFile(
    "summary",
    SummaryTable,
    relative_columns=(
        RelativeColumn("median_ns", "duration_ns"),
        RelativeColumn("exposed_ns", "duration_ns", nothing=0),
    ),
    split_columns=("bytes", "duration_ns"),
    lists_kinds=True,
)
STATISTICS = TableFile("statistics", StatisticsTable)

RECORDED_TABLES: tuple[
    TableFile[EventTable], TableFile[MemoryTable], TableFile[DeviceTable], TableFile[ScalarTable]
] = (EVENTS, MEMORY, DEVICE, SCALARS)
"""The tables that a rank records; the summary is derived from them."""


def attempt_name(attempt: int) -> str:
    """The folder of an attempt: `attempt-000`."""
    return f"attempt-{attempt:03d}"


def rank_name(rank: int) -> str:
    """The folder of a rank: `rank-00000`."""
    return f"rank-{rank:05d}"


def attempt_numbers(names: Iterable[str]) -> list[int]:
    """The attempts among these folder names, ascending."""
    return _numbers(_ATTEMPT, names)


def rank_numbers(names: Iterable[str]) -> list[int]:
    """The ranks among these folder names, ascending."""
    return _numbers(_RANK, names)


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)
