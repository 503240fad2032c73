"""The statistics of a run: equal to its summary, and never used for another state of the run."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.results import to_plain
from fsdp_inspect.store import summary_reader
from fsdp_inspect.store.compacted import read_compacted, write_compacted
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.store.records import decode_record, encode_record
from fsdp_inspect.store.schema import STATISTICS
from fsdp_inspect.trace.codes import EventKind, Statistic
from fsdp_inspect.trace.run import RunManifest
from fsdp_inspect.trace.tables import StatisticsTable
from tests.builders import steady_run, write_run as write_built_run
from tests.store.run_files import assert_same_rows, write_run

SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A compacted run of two ranks with statistics."""
    compact_run(write_run(tmp_path / "run", num_steps=8))
    assert (tmp_path / "run" / "statistics.parquet").exists()
    return tmp_path / "run"


def uses_its_statistics(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the run reads its statistics, rather than computes them."""
    computed = []
    condense = summary_reader.condense_run

    def watch(*given: object, **options: object) -> object:
        computed.append(given)
        return condense(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(summary_reader, "condense_run", watch)
        run.statistics()
    return not computed


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_a_summary_is_the_same_with_and_without_statistics(sample: Path, tmp_path: Path) -> None:
    path = shutil.copytree(sample, tmp_path / "run")
    compact_run(path)
    assert (path / "statistics.parquet").exists()
    read = to_plain(measure_summary(open_run(path)))
    (path / "statistics.parquet").unlink()
    assert to_plain(measure_summary(open_run(path))) == read


def test_statistics_are_read_from_their_file(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(run_folder)
    assert uses_its_statistics(run, monkeypatch)
    (run_folder / "statistics.parquet").unlink()
    again = open_run(run_folder)
    assert not uses_its_statistics(again, monkeypatch)
    assert_same_rows(run.statistics(), again.statistics())


def test_an_old_run_receives_statistics_when_it_is_compacted(run_folder: Path) -> None:
    written = (run_folder / "statistics.parquet").read_bytes()
    (run_folder / "statistics.parquet").unlink()
    compact_run(run_folder)
    assert (run_folder / "statistics.parquet").read_bytes() == written


def test_statistics_of_another_summary_are_not_used(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact_run(write_run(tmp_path / "longer", num_steps=9))
    shutil.copy(tmp_path / "longer" / "statistics.parquet", run_folder)
    assert not uses_its_statistics(open_run(run_folder), monkeypatch)
    compact_run(run_folder)
    assert uses_its_statistics(open_run(run_folder), monkeypatch)


def test_statistics_for_other_settings_are_not_used(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = decode_record((run_folder / "run.json").read_bytes(), RunManifest, "run.json")
    changed = manifest.model_copy(update={"warmup_steps": manifest.warmup_steps + 1})
    (run_folder / "run.json").write_bytes(encode_record(changed))
    assert not uses_its_statistics(open_run(run_folder), monkeypatch)


@pytest.mark.parametrize("changed", ["removed", "added"])
def test_statistics_of_other_ranks_are_not_used(
    run_folder: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed == "removed":
        shutil.rmtree(rank_folder(run_folder, 0, 1))
    else:
        shutil.copytree(rank_folder(run_folder, 0, 1), rank_folder(run_folder, 0, 2))
    assert not uses_its_statistics(open_run(run_folder), monkeypatch)


@pytest.mark.parametrize("damage", ["torn", "changed"])
def test_damaged_statistics_are_noted_and_computed(
    run_folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_folder / "statistics.parquet"
    expected = open_run(run_folder).statistics()
    content = bytearray(file.read_bytes())
    content[len(content) // 4] ^= 1
    file.write_bytes(content[: len(content) // 2] if damage == "torn" else content)
    run = open_run(run_folder)
    assert not uses_its_statistics(run, monkeypatch)
    assert_same_rows(run.statistics(), expected)
    assert any("statistics.parquet" in note and "compact" in note for note in run.notes)
    compact_run(run_folder)
    assert uses_its_statistics(open_run(run_folder), monkeypatch)


def test_a_rank_is_read_from_its_own_files(tmp_path: Path) -> None:
    path = write_built_run(steady_run(world_size=3, num_steps=6), tmp_path / "run")
    compact_run(path)
    expected = to_plain(measure_summary(open_run(path)))
    (path / "summary.parquet").unlink()
    assert to_plain(measure_summary(open_run(path))) == expected


def test_statistics_with_other_ranks_in_their_rows_are_refused(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_folder / "statistics.parquet"
    with file.open("rb") as source:
        contents = read_compacted(source, STATISTICS, file.name)
    table, condensed = contents.table, contents.details.condensed
    expected = open_run(run_folder).statistics()
    chosen = (table.statistic == Statistic.TYPICAL) & (table.kind == EventKind.STEP)
    wrong = {**table.columns(), "rank": np.where(chosen, table.rank + 5, table.rank)}
    write_compacted(
        file,
        STATISTICS,
        StatisticsTable.from_columns(wrong),
        covered_rows=0,
        origin=contents.details.origin,
        details={"condensed": condensed.model_dump() if condensed else {}},
    )
    run = open_run(run_folder)
    assert not uses_its_statistics(run, monkeypatch)
    assert_same_rows(run.statistics(), expected)
    assert any("other ranks" in note for note in run.notes)
