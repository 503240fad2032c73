"""The parts of a run merge to the same run as on a shared disk."""

import shutil

import numpy as np
import pytest

from fsdp_inspect.errors import NotARunError, StoreError
from fsdp_inspect.store import merging
from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.folder import rank_folder
from fsdp_inspect.store.merging import merge_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.records import decode_record, encode_record
from fsdp_inspect.store.schema import MANIFEST_FILE, RANK_FILE
from fsdp_inspect.trace.run import RankRecord
from tests.builders import steady_run, write_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Four ranks on one disk; tests must not change it."""
    return write_run(steady_run(world_size=4), tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def split(recorded, tmp_path):
    """The same run on separate disks: `split((0, 1), (2, 3))`."""

    def make(*ranks_of_node, name="run"):
        parts = []
        for node, ranks in enumerate(ranks_of_node):
            part = tmp_path / f"node-{node}" / name
            shutil.copytree(recorded, part)
            for rank in set(range(4)) - set(ranks):
                shutil.rmtree(rank_folder(part, 0, rank))
            (part / "summary.parquet").unlink(missing_ok=True)
            parts.append(part)
        return parts

    return make


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def move_in_time(folder, *, start_s, end_s):
    record = decode_record((folder / RANK_FILE).read_bytes(), RankRecord, RANK_FILE)
    start, end = (
        record.clock_start.model_copy(update={"unix_ns": seconds * 10**9})
        for seconds in (start_s, end_s)
    )
    moved = record.model_copy(update={"clock_start": start, "clock_end": end})
    (folder / RANK_FILE).write_bytes(encode_record(moved))


def test_parts_become_the_run_that_one_disk_would_hold(split, recorded, tmp_path):
    result = merge_runs(split((0, 1), (2, 3)), tmp_path / "merged")
    merged, whole = open_run(result.path), open_run(recorded)
    assert (result.num_ranks, result.missing_ranks, result.has_run_summary) == (4, (), True)
    assert not merged.notes
    for rank in range(4):
        for name, column in whole.events(rank).columns().items():
            assert np.array_equal(getattr(merged.events(rank), name), column)
    for name, column in whole.summary().columns().items():
        assert np.array_equal(getattr(merged.summary(), name), column)


def test_black_box_stacks_and_numerics_of_each_rank_are_merged(split, tmp_path):
    parts = split((0, 1), (2, 3))
    names = ("black_box.bin", "numerics.jsonl", "stacks.txt", "crash.txt", "sigterm.txt")
    for name in names:
        (rank_folder(parts[1], 0, 3) / name).write_bytes(name.encode())

    merged = rank_folder(merge_runs(parts, tmp_path / "merged").path, 0, 3)

    assert [(merged / name).read_bytes() for name in names] == [name.encode() for name in names]


def test_parts_stay_as_they_are(split, tmp_path):
    parts = split((0, 1), (2, 3))
    before = [contents(part) for part in parts]
    merge_runs(parts, tmp_path / "merged")
    assert [contents(part) for part in parts] == before


def test_missing_ranks_are_named(split, tmp_path):
    result = merge_runs(split((0,), (3,)), tmp_path / "merged")
    assert result.missing_ranks == ((0, 1), (0, 2))
    assert open_run(result.path).notes


def test_identical_copies_of_a_rank_are_taken_once(split, tmp_path):
    result = merge_runs(split((0, 1), (1, 2, 3)), tmp_path / "merged")
    assert result.copies == ((0, 1),)
    assert result.num_ranks == 4


def test_different_recordings_of_a_rank_are_refused(split, tmp_path):
    parts = split((0, 1), (1, 2, 3))
    (rank_folder(parts[1], 0, 1) / "rank.json").write_text("{}")
    with pytest.raises(StoreError, match="Rank 1 of attempt 0 was recorded twice"):
        merge_runs(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_parts_of_different_runs_are_refused_with_what_differs(split, tmp_path):
    other = write_run(steady_run(world_size=4, run_id="other"), tmp_path / "other")
    with pytest.raises(StoreError, match="run is 'hand-made' there and 'other' now"):
        merge_runs([*split((0, 1)), other], tmp_path / "merged")


def test_ranks_that_recorded_at_different_times_are_refused_whatever_their_name(split, tmp_path):
    parts = split((0, 1), (2, 3))
    move_in_time(rank_folder(parts[0], 0, 1), start_s=0, end_s=5)
    move_in_time(rank_folder(parts[1], 0, 3), start_s=15, end_s=20)
    with pytest.raises(StoreError, match=r"rank-00003' started 10.0 s after"):
        merge_runs(parts, tmp_path / "merged")


def test_parts_of_jobs_of_another_size_are_refused(split, tmp_path):
    other = write_run(steady_run(world_size=2), tmp_path / "other")
    with pytest.raises(StoreError, match=r"2 ranks in .*4 ranks in"):
        merge_runs([*split((2, 3)), other], tmp_path / "merged")


def test_every_attempt_is_merged(split, tmp_path):
    parts = split((0, 1), (2, 3))
    shutil.copytree(parts[0] / "attempt-000", parts[0] / "attempt-001")
    result = merge_runs(parts, tmp_path / "merged")
    assert result.missing_ranks == ((1, 2), (1, 3))
    assert result.num_ranks == 2


def test_the_manifest_is_that_of_rank_0(split, tmp_path):
    parts = split((2, 3), (0, 1))
    own = (parts[1] / MANIFEST_FILE).read_bytes()
    (parts[0] / MANIFEST_FILE).unlink()
    merged = merge_runs(parts, tmp_path / "merged").path
    assert (merged / MANIFEST_FILE).read_bytes() == own


def test_parts_without_any_manifest_are_merged(split, tmp_path):
    parts = split((1,), (2, 3))
    for part in parts:
        (part / MANIFEST_FILE).unlink()
    result = merge_runs(parts, tmp_path / "merged")
    assert (result.world_size, result.num_ranks) == (4, 3)


def test_a_folder_that_is_there_is_never_merged_into(split, tmp_path):
    (tmp_path / "merged").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        merge_runs(split((0,), (1,)), tmp_path / "merged")


def test_a_place_in_a_part_is_refused(split):
    parts = split((0, 1), (2, 3))
    with pytest.raises(StoreError, match="is inside the part"):
        merge_runs(parts, parts[0] / "merged")


def test_the_only_run_of_a_folder_may_be_named_by_the_folder(split, tmp_path):
    parts = split((0, 1), (2, 3))
    assert merge_runs([part.parent for part in parts], tmp_path / "merged").num_ranks == 4


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(NotARunError, match="No ranks of a run found"):
        merge_runs([tmp_path], tmp_path / "merged")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    split, tmp_path, monkeypatch
):
    monkeypatch.setattr(merging, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(StoreError, match=r"has .* free"):
        merge_runs(split((0, 1), (2, 3)), tmp_path / "merged")


def test_an_interrupted_merge_leaves_nothing(split, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_runs(split((0, 1), (2, 3)), tmp_path / "out" / "merged", on_progress=interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def test_compacting_a_merged_run_again_changes_nothing(split, tmp_path):
    merged = merge_runs(split((0, 1), (2, 3)), tmp_path / "merged").path
    before = contents(merged)
    compact_run(merged)
    assert contents(merged) == before


@pytest.mark.parametrize("what", ["a file of a rank", "the folder of a rank", "run.json"])
def test_a_link_out_of_a_part_is_refused_and_nothing_is_written(split, tmp_path, what):
    parts = split((0, 1), (2, 3))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    link = parts[0] / "attempt-000" / "rank-00000" / "secret.json"
    if what == "the folder of a rank":
        link = parts[0] / "attempt-000" / "rank-00004"
        link.symlink_to(outside)
    elif what == "run.json":
        link = parts[0] / "run.json"
        (outside / "run.json").write_bytes(link.read_bytes())
        link.unlink()
        link.symlink_to(outside / "run.json")
    else:
        link.symlink_to(outside / "secret.json")
    with pytest.raises(StoreError, match="is a link to a place outside of the run"):
        merge_runs(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
