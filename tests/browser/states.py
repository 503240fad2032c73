"""A folder with one run of each state, for browser tests."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np

from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.store.folder import create_run, rank_folder
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import encode_record
from fsdp_inspect.store.reduction.run_statistics import WHOLE_STEP_KINDS
from fsdp_inspect.store.schema import BLACK_BOX_FILE, RANK_FILE
from fsdp_inspect.store.summary_files import write_run_summary_file
from fsdp_inspect.trace.black_box import encode as encode_black_box
from fsdp_inspect.trace.tables import SummaryTable
from fsdp_inspect.writing import replace_file
from tests.app.synthetic import UNIT_FQNS, make_manifest, make_run, write_run
from tests.boxes import HEADER, SECOND, Call, make_box
from tests.importing.kineto_traces import TraceWriter, fsdp2_step
from tests.studies.benchmarks import large_run
from tests.studies.benchmarks.large_run import Shape

HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>**b**:smile: [x](javascript:alert(3))"
)
LONG = "long" * 100
NUM_RANKS = 1024
_WRITTEN_RANKS = 2


def write_states(folder: Path) -> Path:
    """Write a recorded, imported, crashed, partial, hostile, newer, 1,024-rank, long-named run."""
    runs = folder / "runs"
    write_run(runs / "recorded", make_run(num_steps=8))
    write_imported(runs / "imported", folder / "traces")
    write_crashed(runs / "crashed")
    partial = make_run()
    write_run(runs / "partial", dataclasses.replace(partial, ranks=partial.ranks[:1]))
    write_hostile(runs / "hostile")
    write_newer(runs / "newer")
    write_long_names(runs / "long-names")
    write_many_ranks(runs / "many-ranks", folder / "few-ranks")
    return runs


def write_hostile(path: Path) -> None:
    """Write a run in which every name is HTML, script and Markdown."""
    fqns = [UNIT_FQNS[0], HOSTILE, *UNIT_FQNS[2:]]
    manifest = make_manifest(run_id=HOSTILE, fqns=fqns, tags=[HOSTILE])
    units = [unit.model_copy(update={"module_class": HOSTILE}) for unit in manifest.units]
    units[1] = units[1].model_copy(update={"parameters": {HOSTILE: [2, 3]}})
    named = manifest.model_copy(
        update={
            "units": units,
            "model": manifest.model.model_copy(update={"class_name": HOSTILE}),
            "device_name": HOSTILE,
            "command": ["python", HOSTILE],
            "config": {HOSTILE: HOSTILE},
            "notes": [HOSTILE],
        }
    )
    write_run(path, dataclasses.replace(make_run(), manifest=named))


def write_crashed(path: Path) -> None:
    """Write a run whose processes ended silently; rank 1 had not reached a collective."""
    write_run(path, make_run(num_steps=5))
    for rank in range(2):
        folder = rank_folder(path, 0, rank)
        _change(folder / RANK_FILE, status="running", pid=2**22 - 1)
        write_hang(folder, rank, late=1)


def write_hang(folder: Path, rank: int, *, late: int) -> None:
    """Write the black box and the stacks of a rank of two ranks: one waits for the late one."""
    calls = [Call(unit, step=4) for unit in range(1, 4)]
    if rank != late:
        calls.append(Call(4, step=4, has_finished=False))
    header = dataclasses.replace(
        HEADER, rank=rank, step=4, sign_ns=90 * SECOND, hang_seen_ns=70 * SECOND
    )
    (folder / BLACK_BOX_FILE).write_bytes(encode_black_box(make_box(calls, (0, 1), header)))
    line, statement = (88, "batch = next(loader)") if rank == late else (91, "loss = model(batch)")
    head = {"training_thread": "0x01", "statements": {f"/home/ann/train.py:{line}": statement}}
    (folder / "stacks.txt").write_text(
        f"{json.dumps(head)}\nThread 0x01 (most recent call first):\n"
        f'  File "/home/ann/train.py", line {line} in train\n'
        '  File "/home/ann/train.py", line 120 in main\n'
        '  File "/home/ann/train.py", line 130 in <module>\n'
    )


def write_long_names(path: Path) -> None:
    """Write a run whose name, model and units have 400 letters."""
    fqns = [UNIT_FQNS[0], f"layers.{LONG}", *UNIT_FQNS[2:]]
    manifest = make_manifest(run_id=f"20250601-120000-{LONG}-3e9c", fqns=fqns)
    named = manifest.model_copy(
        update={
            "name": LONG,
            "model": manifest.model.model_copy(update={"class_name": LONG}),
        }
    )
    write_run(path, dataclasses.replace(make_run(), manifest=named))


def write_newer(path: Path) -> None:
    """Write a run of a schema that this version does not read."""
    write_run(path, make_run(num_steps=1))
    _change(path / "run.json", schema_version=99)


def _change(file: Path, **fields: object) -> None:
    record = json.loads(file.read_text())
    record.pop("crc32", None)
    file.write_text(json.dumps({**record, **fields}))


def write_imported(path: Path, traces: Path) -> None:
    """Write a run of imported traces."""
    write_traces(traces)
    import_traces(traces, path)


def write_traces(traces: Path) -> None:
    """Write traces of two ranks of FSDP2 as torch.profiler writes them."""
    traces.mkdir()
    for rank in range(2):
        trace = TraceWriter(rank=rank)
        for step in range(3):
            fsdp2_step(trace, at=1000 * step)
        trace.write(traces / f"rank{rank}.json")


def write_many_ranks(path: Path, few: Path) -> None:
    """Write a run of 1,024 ranks: the tables of a few ranks, linked, and a summary of all ranks."""
    shape = Shape(NUM_RANKS, num_steps=4, num_units=4)
    large_run.write_large_run(
        few, dataclasses.replace(shape, num_ranks=_WRITTEN_RANKS), processes=1
    )
    create_run(path, large_run.make_manifest(shape))
    records = {record.rank: record for record in open_run(few).ranks}
    for rank in range(NUM_RANKS):
        source, target = rank_folder(few, 0, rank % _WRITTEN_RANKS), rank_folder(path, 0, rank)
        target.mkdir()
        for table in source.glob("*.parquet"):
            if table.stem != "summary":
                os.link(table, target / table.name)
        record = records[rank % _WRITTEN_RANKS].model_copy(
            update={"rank": rank, "world_size": NUM_RANKS, "host": f"node-{rank // 8:04d}"}
        )
        replace_file(target / RANK_FILE, encode_record(record))
    rows = open_run(few).summary(ranks=[0], kinds=WHOLE_STEP_KINDS)
    write_run_summary_file(path, [_for_ranks(rows)], [(0, rank) for rank in range(NUM_RANKS)])


def _for_ranks(rows: SummaryTable) -> SummaryTable:
    """The rows of one rank, for every rank."""
    columns = {name: np.tile(values, NUM_RANKS) for name, values in rows.columns().items()}
    return SummaryTable.from_columns(
        {**columns, "rank": np.repeat(np.arange(NUM_RANKS), len(rows))}
    )
