"""Test that tables hold the numbers of the results, and that their CSV is safe."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from fsdp_inspect_app.app_pages.runs.frames import (
    MISTAKE_COLUMN,
    PLAIN_COLUMN,
    STEP_TIMES_COLUMN,
    frame_runs,
)
from fsdp_inspect_app.app_pages.timeline.frames import frame_spans
from fsdp_inspect_app.catalog_reading import KnownRuns
from fsdp_inspect_app.tables import frame_breakdown, frame_of, gb_per_s, mib, ms, to_csv
from fsdp_inspect_app.timeline.tracks import build_timeline

from fsdp_inspect import result_types
from fsdp_inspect.analysis.memory.overview import MemoryOverview
from fsdp_inspect.analysis.memory.peak import CategoryBytes
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.units import UnitCosts
from fsdp_inspect.metrics import find_metric
from tests.app.synthetic import MESSAGE_BYTES, make_run

ALL_TABLES = [
    getattr(result_types, name).TABLE
    for name in result_types.__all__
    if hasattr(getattr(result_types, name), "TABLE")
]


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def digest(run):
    return measure_summary(run)


def test_the_parts_of_the_breakdown_add_up_to_its_last_row(digest):
    frame = frame_breakdown(digest.breakdown)
    assert frame["part"].iloc[-1] == "= step"
    assert frame["time (ms)"].iloc[:-1].sum() == pytest.approx(frame["time (ms)"].iloc[-1])
    assert frame["time (ms)"].iloc[-1] == digest.breakdown.step_time_ns / 1e6


def test_units_keep_their_order_and_numbers(digest):
    frame = frame_of(UnitCosts.TABLE, digest.units)
    assert frame["unit"].tolist()[:2] == ["(root)", "layers.0"]
    assert frame["exposed (ms)"].tolist() == [unit.exposed_ns / 1e6 for unit in digest.units]
    assert frame["all-gather: message (MiB)"].iloc[1] == MESSAGE_BYTES[1] / (1 << 20)


def test_a_table_keeps_the_definition_and_the_unit_of_each_column(digest):
    frame = frame_of(UnitCosts.TABLE, digest.units, "unit", "exposed_ns", "num_parameters")
    assert list(frame.columns) == ["unit", "exposed (ms)", "params"]
    assert frame.attrs["definitions"]["exposed (ms)"] == find_metric("exposed_ns").definition
    assert frame.attrs["units"] == {"exposed (ms)": "ns", "params": "count"}


def test_a_column_without_any_value_is_left_out_unless_it_is_named(digest):
    assert "all-reduce: exposed (ms)" not in frame_of(UnitCosts.TABLE, digest.units)
    named = frame_of(UnitCosts.TABLE, digest.units, "all_reduce_exposed_ns")
    assert named["all-reduce: exposed (ms)"].isna().all()


def test_no_table_declares_two_columns_with_one_header():
    for spec in ALL_TABLES:
        headers = [column.header for column in spec.columns]
        assert len(set(headers)) == len(headers), spec.title


def test_a_table_has_texts_as_people_read_them():
    frame = frame_of(MemoryOverview.CATEGORIES, [CategoryBytes("all_gather_buffer", 1 << 20)])
    assert frame.to_dict("records") == [{"category": "all-gather buffer", "at the peak (MiB)": 1.0}]


def test_spans_as_a_table_have_one_row_a_span_and_mark_what_does_not_travel(run):
    timeline = build_timeline(run, step=3, ranks=[0, 1])
    frame = frame_spans(timeline, run.manifest)
    assert len(frame) == timeline.num_timed_spans
    assert len(frame) < sum(len(drawn.layout.index) for drawn in timeline.ranks)
    assert frame["rank"].unique().tolist() == [0, 1]
    forward = frame[frame["what"] == "forward"]
    assert forward["message (MiB)"].isna().all()
    gathers = frame[(frame["what"] == "all-gather") & (frame["unit"] == "layers.3")]
    assert gathers["message (MiB)"].tolist() == [64.0] * 4
    assert (gathers["issued (ms)"] <= gathers["start (ms)"]).all()
    assert set(frame["obtained"]) == {"measured"}
    assert len(frame_spans(timeline, run.manifest, most=3)) == 3
    assert len(frame_spans(timeline, run.manifest, most=len(frame) - 2)) == len(frame) - 2


def test_csv_keeps_full_precision():
    csv = to_csv(pd.DataFrame({"time (ms)": [1 / 3]}))
    assert pd.read_csv(io.BytesIO(csv))["time (ms)"][0] == 1 / 3


@pytest.mark.parametrize("text", ["=1+1", "+a", "-a", "@a", "\ta"])
def test_csv_defuses_what_a_spreadsheet_would_run(text):
    csv = to_csv(pd.DataFrame({"unit": [text], "number": [-1.0]})).decode()
    assert f"'{text}" in csv
    assert "'-1" not in csv


def test_missing_numbers_stay_missing():
    assert ms(None) is None
    assert mib(None) is None
    assert gb_per_s(None) is None


def list_of_runs(count, mistake=None, plain_ns=None):
    """Runs with 40 step times, except the last one, which is not read yet."""
    entries = [result_types.RunEntry(f"run-{n}", Path("/runs"), 1 + n) for n in range(count)]
    rows = {}
    for number, entry in enumerate(entries[:-1]):
        times = tuple(range(number, number + 40_000_000, 1_000_000))
        rows[entry.id] = {
            "status": "complete",
            "training": mistake,
            "source": "recorded",
            "num_steps": 42,
            "world_size": 2,
            "step_time_ns": 10**7,
            "plain_step_time_ns": plain_ns,
            "exposed_ns": 10**6,
            "overlap_ratio": 0.5,
            "peak_allocated_bytes": None,
            "step_times_ns": times,
            "model": "Llama",
            "num_parameters": 8,
            "plan": "root",
            "tags": ["main"],
        }
    return frame_runs(entries, KnownRuns(rows, {}, is_complete=False), {}, {})


def test_a_mistake_takes_the_place_of_the_model_in_the_list_of_runs():
    plain, wrong = list_of_runs(3), list_of_runs(3, "The optimizer updates nothing.")
    assert MISTAKE_COLUMN not in plain
    assert "model" in plain.attrs["order"]
    assert wrong[MISTAKE_COLUMN].tolist()[:2] == ["The optimizer updates nothing."] * 2
    assert MISTAKE_COLUMN in wrong.attrs["order"]
    assert "model" not in wrong.attrs["order"]


def test_plain_steps_are_a_column_where_they_differ():
    assert PLAIN_COLUMN not in list_of_runs(3)
    assert list_of_runs(3, plain_ns=2 * 10**7)[PLAIN_COLUMN].tolist()[:2] == [20.0, 20.0]


def test_a_long_list_of_runs_has_shorter_lines_and_the_same_texts():
    short, long = list_of_runs(1_000), list_of_runs(1_001)
    assert [len(line) for line in short[STEP_TIMES_COLUMN].iloc[:2]] == [40, 40]
    line = long[STEP_TIMES_COLUMN].iloc[0]
    assert (len(line), line.dtype) == (14, np.float32)
    assert line.tolist() == list(range(0, 40, 3))
    assert pd.isna(long[STEP_TIMES_COLUMN].iloc[-1])
    for name in ("status", "model", "plan", "source", "tags"):
        assert long[name].dtype == "category"
        assert long[name].iloc[:999].tolist() == short[name].iloc[:999].tolist()
    assert to_csv(long).startswith(b"run,status")
    assert pa.Table.from_pandas(long)[STEP_TIMES_COLUMN].null_count == 1
