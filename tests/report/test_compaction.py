import json
from pathlib import Path

from fsdp_inspect.report.outcomes import render_compaction, render_compaction_json
from fsdp_inspect.store.compaction import CompactionResult, RankCompaction, SkippedRank
from tests.builders import steady_run
from tests.report.terminal_text import text_of

RESULT = CompactionResult(
    path=Path("runs/a"),
    compacted=[RankCompaction(attempt=0, rank=0, rows=10, bytes_before=4096, bytes_after=1024)],
    skipped=[SkippedRank(attempt=0, rank=1, reason="it still records.")],
)


def test_compaction_says_what_it_did_and_what_it_left():
    assert text_of(render_compaction(RESULT)) == (
        "1 rank compacted, 10 rows, 4.00 KiB -> 1.00 KiB: runs/a\n"
        "Rank 1 of attempt 0 was skipped: it still records."
    )


def test_programs_get_the_sums_too():
    result = json.loads(render_compaction_json(steady_run(), RESULT))
    assert list(result)[:3] == ["run_id", "source", "notes"]
    assert (result["path"], result["rows"]) == ("runs/a", 10)
    assert (result["bytes_before"], result["bytes_after"]) == (4096, 1024)
    assert result["skipped"] == [{"attempt": 0, "rank": 1, "reason": "it still records."}]
