import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fsdp_inspect.analysis.breakdown import measure_step_breakdown
from fsdp_inspect.report.selection import select
from fsdp_inspect.report.tables import TableFormat, write_tables
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventFlag, MemoryPoint
from tests.builders import RunBuilder, add_steady_step, steady_run

SAMPLE = Path(__file__).parents[2] / "samples" / "hsdp-4-ranks"
TABLES = ["events", "memory", "devices", "scalars", "summary", "steps", "units"]


def export(run, folder, table_format, *, ranks=None, steps=None):
    selection = select(run, ranks=ranks, steps=steps)
    written = write_tables(run, selection, folder, place=folder, table_format=table_format)
    return {table.name: table for table in written.tables}


def rows_of(folder, name):
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def sample():
    return open_run(SAMPLE)


def test_both_formats_hold_every_row_of_every_table(sample, tmp_path):
    for table_format in TableFormat:
        folder = tmp_path / table_format
        folder.mkdir()
        written = export(sample, folder, table_format)
        assert list(written) == TABLES
        events = sum(len(sample.events(rank.rank)) for rank in sample.ranks)
        assert written["events"].num_rows == events
        assert written["units"].num_rows == len(sample.manifest.units)
        assert written["steps"].num_rows == 4 * 25
    for name in TABLES:
        parquet = pq.read_table(tmp_path / "parquet" / f"{name}.parquet")
        assert len(rows_of(tmp_path / "csv", name)) == len(parquet)
        assert "rank" in parquet.column_names


def test_numbers_survive_to_the_last_digit(sample, tmp_path):
    export(sample, tmp_path, TableFormat.PARQUET, ranks=[2], steps=[5])
    table, events = pq.read_table(tmp_path / "events.parquet"), sample.events(2, steps=[5])
    assert table["start_ns"].to_pylist() == events.start_ns.tolist()
    assert table["end_ns"].to_pylist() == events.end_ns.tolist()
    assert set(table["rank"].to_pylist()) == {2}


def test_codes_read_as_words_and_units_by_name(tmp_path):
    builder = RunBuilder(units=("", "layers.0"))
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    flags = int(EventFlag.ASYNC | EventFlag.PREFETCHED)
    rank.all_gather("layers.0", 5, 20, need=10, flags=flags, dtype=2, sequence=0)
    rank.forward("", 20, 30)
    export(builder.build(), tmp_path, TableFormat.CSV)
    step, gather, forward = rows_of(tmp_path, "events")
    assert (step["kind"], step["unit_fqn"], step["need_ns"]) == ("step", "", "")
    assert (gather["kind"], gather["stream"], gather["dtype"]) == (
        "all_gather",
        "all_gather",
        "bfloat16",
    )
    assert (gather["flags"], gather["group"]) == ("async, prefetched", "shard (2 ranks)")
    assert (gather["sequence"], gather["need_ns"], gather["bytes"]) == ("0", "10", "64")
    assert (forward["unit_fqn"], forward["phase"]) == ("(root)", "forward")


def test_steps_are_split_as_the_breakdown_splits_them(sample, tmp_path):
    export(sample, tmp_path, TableFormat.PARQUET, ranks=[1])
    row = next(
        row for row in pq.read_table(tmp_path / "steps.parquet").to_pylist() if row["step"] == 7
    )
    split = measure_step_breakdown(sample, rank=1, step=7)
    assert row["step_time_ns"] == split.step_time_ns
    assert [row[f"{part.name}_ns"] for part in split.parts] == [
        part.duration_ns for part in split.parts
    ]
    assert row["is_timed"]


def test_what_was_not_measured_is_missing_and_amounts_say_bytes(tmp_path):
    builder = RunBuilder()
    rank = builder.rank(0)
    add_steady_step(rank, 0, start=0)
    rank.memory(MemoryPoint.FORWARD_END, 100, unit="layers.1", activation=0)
    export(builder.build(), tmp_path, TableFormat.CSV)
    (row,) = rows_of(tmp_path, "memory")
    assert (row["allocated_bytes"], row["activation_bytes"], row["reserved_bytes"]) == (
        "100",
        "0",
        "",
    )
    amounts = set(row) - {
        *("rank", "step", "microbatch", "phase", "point", "unit_fqn", "method", "time_ns"),
        *("parameter_index", "num_alloc_retries", "num_ooms"),
    }
    assert all(name.endswith("_bytes") for name in amounts), amounts


@pytest.mark.parametrize("name", ["=1+1", "+cmd|'/c calc'!A0", "-2", "@SUM(A1)", " =1", "\t=1"])
def test_a_spreadsheet_runs_no_name_as_a_formula(tmp_path, name):
    builder = RunBuilder(units=(name,))
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.forward(name, 0, 50)
    export(builder.build(), tmp_path, TableFormat.CSV)
    assert rows_of(tmp_path, "events")[1]["unit_fqn"] == f"'{name}"
    export(builder.build(), tmp_path, TableFormat.PARQUET)
    assert pq.read_table(tmp_path / "events.parquet")["unit_fqn"].to_pylist() == [None, name]


def test_a_run_without_a_finished_step_has_events_and_no_steps(tmp_path):
    builder = RunBuilder()
    builder.rank(0).forward("layers.0", 0, 50)
    written = export(builder.build(), tmp_path, TableFormat.CSV)
    assert (written["events"].num_rows, written["steps"].num_rows) == (1, 0)


def test_chosen_steps_limit_every_table_that_knows_steps(tmp_path):
    run = steady_run(num_steps=4)
    written = export(run, tmp_path, TableFormat.CSV, steps=[1, 2])
    for name in ("events", "scalars", "summary", "steps"):
        assert {row["step"] for row in rows_of(tmp_path, name)} == {"1", "2"}, name
    assert written["steps"].num_rows == 2 * 2


def test_a_csv_shows_control_characters_and_parquet_keeps_them(tmp_path):
    name = "a\x1b[31mb\u202e"
    builder = RunBuilder(units=(name,))
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.forward(name, 0, 50)
    export(builder.build(), tmp_path, TableFormat.CSV)
    rows = rows_of(tmp_path, "events")
    assert [row["unit_fqn"] for row in rows] == ["", "a␛[31mb\N{REPLACEMENT CHARACTER}"]
    export(builder.build(), tmp_path, TableFormat.PARQUET)
    assert pq.read_table(tmp_path / "events.parquet")["unit_fqn"].to_pylist() == [None, name]
