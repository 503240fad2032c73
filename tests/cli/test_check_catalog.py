"""`check --baseline-runs`: the baseline is the median of earlier runs in the catalog."""

import shutil

import pytest

from fsdp_inspect.catalog.index import index_runs
from fsdp_inspect.trace.codes import MemoryPoint
from tests.builders import RunBuilder, add_steady_step, write_run

MIB = 1 << 20


def write_sized_run(folder, run, number, peak, **manifest):
    """A run of one rank whose peak is `peak` MiB."""
    made = {"run_id": run, "created_unix_ns": 10**18 + number, "git_commit": f"{number:040x}"}
    builder = RunBuilder(world_size=1, warmup_steps=1, **{**made, **manifest})
    rank = builder.rank(0)
    for step in range(4):
        add_steady_step(rank, step, start=1000 * step)
        rank.memory(MemoryPoint.STEP_END, peak * MIB)
    rank.record["memory_from"] = "cuda_allocator"
    return write_run(builder.build(), folder / run)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Six runs of the tag main with peaks of 100 MiB, one of them 300, and others."""
    folder = tmp_path_factory.mktemp("history")
    for number in range(6):
        peak = 300 if number == 3 else 100
        write_sized_run(folder, f"main-{number}", number, peak, tags=["main"], config={"lr": 1})
    write_sized_run(folder, "old", 0, 900, tags=["main"], config={"lr": 2})
    write_sized_run(folder, "branch", 7, 900, tags=["pr"], config={"lr": 1})
    write_sized_run(folder, "new", 8, 100, tags=["pr"], config={"lr": 1, "seed": 5})
    write_sized_run(folder, "worse", 9, 120, tags=["pr"], config={"lr": 1})
    index_runs(folder)
    return folder


def check(invoke, history, run, *options):
    return invoke("check", history / run, "--baseline-runs", history, *options)


def test_the_median_of_the_tagged_runs_is_the_baseline(invoke, history):
    ended = check(invoke, history, "new", "--baseline-tag", "main")
    assert ended.code == 0, ended.out + ended.err
    assert "median of 6 runs: main-5, main-4, main-3, main-2, main-1, main-0" in ended.err
    assert "Times are not judged" in ended.err


def test_a_regression_is_found_although_one_earlier_run_was_worse(invoke, history):
    ended = check(invoke, history, "worse", "--baseline-tag", "main")
    assert ended.code == 1
    assert "peak_allocated_bytes rose by 20.0 MiB" in " ".join(ended.out.split())


def test_too_few_earlier_runs_cannot_be_judged(invoke, history):
    ended = check(invoke, history, "old", "--baseline-tag", "main")
    assert ended.code == 2
    assert "has 0 earlier complete runs with the tag 'main'" in ended.err
    assert "Expected at least 5" in ended.err
    assert check(invoke, history, "new", "--baseline-tag", "pr").code == 2
    fewer = check(invoke, history, "new", "--baseline-tag", "pr", "--baseline-last", "2")
    assert fewer.code == 0, fewer.err


def test_times_are_judged_with_five_runs_on_each_side(invoke, history, tmp_path):
    for number in range(5):
        write_sized_run(tmp_path, f"again-{number}", 20, 100, config={"lr": 1})
    ended = check(invoke, history, tmp_path, "--baseline-tag", "main")
    assert ended.code == 0, ended.out + ended.err
    assert "Times are not judged" not in ended.err
    assert "step_time_ns" in ended.out


def test_runs_that_were_removed_since_the_index_are_skipped(invoke, history, tmp_path):
    shutil.copytree(history, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "main-5")
    ended = check(invoke, tmp_path / "copy", "new", "--baseline-tag", "main")
    assert "median of 5 runs: main-4" in ended.err


def test_without_a_catalog_the_error_says_how_to_make_one(invoke, history, tmp_path):
    ended = invoke("check", history / "new", "--baseline-runs", tmp_path)
    assert ended.code == 2
    assert "fsdp-inspect store index" in ended.err
