"""The outcome of a merge states the present and the missing parts."""

from pathlib import Path

from fsdp_inspect.report.outcomes import render_merge
from fsdp_inspect.store.compaction import SkippedRank
from fsdp_inspect.store.merging import MergeResult
from tests.report import terminal_text as rendering


def result(**changes):
    whole = {
        "path": Path("merged"),
        "run_id": "job",
        "world_size": 8,
        "num_ranks": 8,
        "missing_ranks": (),
        "copies": (),
        "skipped": (),
        "bytes": 2048,
        "has_run_summary": True,
    }
    return MergeResult(**{**whole, **changes})


def shown(**changes):
    return " ".join(rendering.text_of(render_merge(result(**changes))).split())


def test_a_whole_run_is_one_line():
    assert shown() == "Run job: 8 of 8 ranks, 2.00 KiB copied: merged"


def test_what_is_missing_is_said_with_what_to_do():
    text = shown(num_ranks=6, missing_ranks=((0, 2), (0, 3)), copies=((0, 1),))
    assert "Missing in attempt 0: ranks 2-3. Merge again with the parts" in text
    assert "Several parts contain identical copies of the ranks 1." in text


def test_damaged_ranks_are_said():
    text = shown(skipped=(SkippedRank(0, 5, "it is torn"),), has_run_summary=False)
    assert "Rank 5 of attempt 0 was copied without changes: it is torn" in text
    assert "The run has no summary" in text
