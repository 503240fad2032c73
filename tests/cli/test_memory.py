import json
from pathlib import Path

import pytest

from fsdp_inspect.importing.snapshot import import_snapshot
from tests.importing.snapshots import FakeAllocator, train

SAMPLES = sorted(path.parent for path in (Path(__file__).parents[2] / "samples").glob("*/run.json"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_memory_of_a_sample_is_told(invoke, sample):
    ended = invoke("show", sample, "memory")
    assert ended.code == 0
    assert "Peak allocated: " in ended.out


def test_json_has_the_same_numbers(invoke):
    shown = json.loads(invoke("memory", SAMPLES[0], "--rank", 1, "--json").out)
    peak = shown["memory"]["peak"]
    assert shown["rank"]["rank"] == peak["rank"] == 1
    assert shown["rank"]["peak_allocated_bytes"] == peak["bytes"]
    assert peak["bytes"] == sum(row["bytes"] for row in peak["categories"])


def test_an_imported_snapshot_is_a_run_like_any_other(invoke, tmp_path):
    import_snapshot(train(FakeAllocator()).dump(tmp_path / "a.pickle"), tmp_path / "run")
    assert "Peak allocated: 158 KiB" in invoke("memory", tmp_path / "run").out
    assert "imported" in invoke("summary", tmp_path / "run").out


def test_a_rank_that_is_not_there_is_refused(invoke):
    ended = invoke("memory", SAMPLES[0], "--rank", 99)
    assert ended.code == 1
    assert "Rank 99 not found" in ended.err


def test_snapshots_are_compared_in_memory_without_empty_tables(invoke, tmp_path):
    for name, leak in (("a", 0), ("b", 4096)):
        dumped = train(FakeAllocator(), num_steps=3, leak=leak).dump(tmp_path / f"{name}.pickle")
        import_snapshot(dumped, tmp_path / name)
    said = " ".join(invoke("compare", tmp_path / "a", tmp_path / "b").out.split())
    assert "The times of B and A cannot be compared. No timed step in A and B." in said
    assert "unattributed 0 B 12.0 KiB +12.0 KiB" in said
    assert "Units:" not in said
