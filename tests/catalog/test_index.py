"""A catalog is up to date after an index, and whole at any moment."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from fsdp_inspect.catalog import index
from fsdp_inspect.catalog.catalog import Catalog, open_catalog
from fsdp_inspect.catalog.index import CATALOG_FOLDER, index_runs
from fsdp_inspect.errors import CatalogError
from fsdp_inspect.run import open_run
from fsdp_inspect.store.folder import list_runs
from tests.builders import run_on, write_run
from tests.catalog.conftest import write_small_run

FORK = multiprocessing.get_context("fork")


def ids_of(folder: Path) -> list[str]:
    catalog = open_catalog(folder)
    runs = catalog.runs().to_arrow()["run"].to_pylist()
    readable = {row["run"] for row in catalog.runs().rows() if row["problem"] is None}
    for table in (catalog.units(), catalog.ranks(), catalog.steps()):
        assert set(table.to_arrow()["run"].to_pylist()) == readable
    return runs


def test_the_numbers_equal_those_of_the_summary(runs_folder: Path, catalog: Catalog) -> None:
    row = {row["run"]: row for row in catalog.runs().rows()}["run-0"]
    run = open_run(runs_folder / "run-0")
    summary = run.summary()
    names = [
        *("run_id", "status", "world_size", "num_ranks", "backend", "num_steps"),
        *("num_timed_steps", "communication_ns", "exposed_ns", "overlap_ratio"),
        *("communication_bytes", "collectives_per_step", "peak_allocated_bytes"),
        *("peak_reserved_bytes", "goodput_ratio", "wall_ns"),
    ]
    assert {name: row[name] for name in names} == {name: getattr(summary, name) for name in names}
    assert row["step_time_ns"] == summary.step_time_ns.typical == 1000
    assert row["step_time_p90_ns"] == summary.step_time_ns.p90
    assert row["loss"] == summary.loss.last
    parts = {part.name: part.duration_ns for part in summary.breakdown.parts}
    assert {name: row[f"{name}_ns"] for name in parts} == parts
    units = [row for row in catalog.units().rows() if row["run"] == "run-0"]
    assert [{"run": "run-0", **one} for one in run.units().TABLE.records(summary.units)] == units
    ranks = [row for row in catalog.ranks().rows() if row["run"] == "run-0"]
    assert [row["exposed_ns"] for row in ranks] == [rank.exposed_ns for rank in summary.ranks]
    steps = [row["step_time_ns"] for row in catalog.steps().rows() if row["run"] == "run-0"]
    assert steps == row["step_times_ns"]


def test_communication_that_an_import_does_not_show_is_null_in_all_tables(tmp_path: Path) -> None:
    write_run(run_on(["a", "b"], source="imported"), tmp_path / "run")
    index_runs(tmp_path)
    catalog = open_catalog(tmp_path)
    for table in (catalog.runs(), catalog.ranks(), catalog.steps()):
        for row in table.rows():
            assert {value for name, value in row.items() if "exposed" in name} == {None}
            assert row["communication_ns"] is None


def test_a_row_has_the_settings_and_tags_of_the_run(catalog: Catalog) -> None:
    row = next(row for row in catalog.runs().rows() if row["run"] == "run-2")
    assert row["tags"] == ["main"]
    assert row["settings"]["config.lr"] == "0.2"
    assert row["settings"]["machine.world_size"] == "2"


def test_a_damaged_run_is_listed_with_its_problem(catalog: Catalog) -> None:
    row = next(row for row in catalog.runs().rows() if row["run"] == "damaged")
    assert "run.json" in row["problem"]
    assert row["step_time_ns"] is None


def test_listings_of_runs_ignore_the_catalog(runs_folder: Path) -> None:
    assert {entry.id for entry in list_runs(runs_folder)} == set(ids_of(runs_folder))


def test_only_changed_runs_are_read_and_deleted_runs_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_small_run(tmp_path, f"run-{number}", number=number)
    assert index_runs(tmp_path).num_read == 3
    read: list[str] = []
    original = index.read_rows
    monkeypatch.setattr(
        index, "read_rows", lambda run, *rest: read.append(run) or original(run, *rest)
    )
    before = open_catalog(tmp_path).head
    assert not index_runs(tmp_path).is_changed
    assert open_catalog(tmp_path).head == before
    shutil.rmtree(tmp_path / "run-0")
    shutil.rmtree(tmp_path / "run-1")
    write_small_run(tmp_path, "run-1", tags=["again"])
    result = index_runs(tmp_path)
    assert (result.num_read, result.num_removed, read) == (1, 1, ["run-1"])
    assert ids_of(tmp_path) == ["run-1", "run-2"]
    assert open_catalog(tmp_path).runs().rows()[0]["tags"] == ["again"]


def test_numbers_of_other_code_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_run(tmp_path, "run")
    index_runs(tmp_path)
    monkeypatch.setattr(index, "code_version", lambda: "newer")
    assert index_runs(tmp_path).num_read == 1


def test_a_damaged_catalog_is_reported_and_the_next_index_replaces_it(tmp_path: Path) -> None:
    write_small_run(tmp_path, "run")
    index_runs(tmp_path)
    table = next((tmp_path / CATALOG_FOLDER).glob("*/units.parquet"))
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises(CatalogError, match="Index the runs again"):
        open_catalog(tmp_path).units()
    index_runs(tmp_path)
    assert ids_of(tmp_path) == ["run"]
    (tmp_path / CATALOG_FOLDER / "catalog.json").write_text('{"generation": "../../etc"}')
    with pytest.raises(CatalogError, match="Invalid catalog"):
        open_catalog(tmp_path)
    index_runs(tmp_path)
    assert ids_of(tmp_path) == ["run"]


def test_a_catalog_elsewhere_knows_the_folder_of_its_runs(tmp_path: Path) -> None:
    write_small_run(tmp_path / "runs", "run")
    index_runs(tmp_path / "runs", tmp_path / "catalog")
    assert not (tmp_path / "runs" / CATALOG_FOLDER).exists()
    catalog = open_catalog(tmp_path / "catalog")
    assert catalog.runs_folder == tmp_path / "runs"
    assert ids_of(tmp_path / "catalog") == ["run"]


def test_a_missing_folder_and_a_missing_catalog_are_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="not found"):
        index_runs(tmp_path / "nowhere")
    with pytest.raises(CatalogError, match="fsdp-inspect store index"):
        open_catalog(tmp_path)


@pytest.mark.slow
def test_two_indexes_at_once_leave_a_whole_catalog(tmp_path: Path) -> None:
    for number in range(12):
        write_small_run(tmp_path, f"run-{number:02}", number=number)
    writers = [FORK.Process(target=index_runs, args=(tmp_path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    index_runs(tmp_path)
    assert ids_of(tmp_path) == [f"run-{number:02}" for number in range(12)]


def index_with_many_publications(folder: Path) -> None:
    index._MOST_FRESH = 1
    index_runs(folder, rebuild=True)


@pytest.mark.slow
def test_a_killed_index_leaves_a_readable_catalog_that_the_next_one_completes(
    tmp_path: Path,
) -> None:
    expected = [f"run-{number}" for number in range(8)]
    for number, run in enumerate(expected):
        write_small_run(tmp_path, run, number=number)
    index_runs(tmp_path)
    moments = random.Random(4)
    for _ in range(12):
        writer = FORK.Process(target=index_with_many_publications, args=(tmp_path,))
        writer.start()
        time.sleep(moments.uniform(0.0, 0.4))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert set(ids_of(tmp_path)) <= set(expected)
    index_runs(tmp_path)
    assert ids_of(tmp_path) == expected


def test_generations_of_killed_writers_are_removed_later(tmp_path: Path) -> None:
    write_small_run(tmp_path, "run")
    index_runs(tmp_path)
    left = tmp_path / CATALOG_FOLDER / "123-4"
    left.mkdir()
    write_small_run(tmp_path, "second")
    index_runs(tmp_path)
    assert left.exists()
    os.utime(left, (0, 0))
    write_small_run(tmp_path, "third")
    index_runs(tmp_path)
    assert not left.exists()
    assert ids_of(tmp_path) == ["run", "second", "third"]
