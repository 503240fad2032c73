"""Structured logs of torchtitan become runs with the times of their spans.

The importer was also tried on three logs that torchtitan's own writer (commit b5bcd76c) wrote.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fsdp_inspect.analysis.rank_grid import measure_rank_grid
from fsdp_inspect.errors import ImportingError
from fsdp_inspect.importing.kineto import import_traces
from fsdp_inspect.run import open_run

BASE_US = 1_790_000_000_000_000


def record(rank: int, at_ms: float, name: str, step: int, **fields: object) -> str:
    """A line as `TraceJsonlFormatter` writes it."""
    values = {
        "delta_ms": 0.1, "tid": 40 + rank, "rank": rank, "global_rank": rank, "local_rank": rank,
        "source": "training", "host_name": "node3", "pid": 40 + rank, "step": step,
        "relative_step": step, "time_us": BASE_US + round(at_ms * 1000), "log_type": "event",
        "log_type_name": name, "event_name": None, "caller": "trainer.py:859:batch", "message": "",
    }  # fmt: skip
    return json.dumps({**values, **fields})


def write_log(folder: Path, rank: int, data_ms: float) -> Path:
    """Three steps of 100 ms: data, forward and backward of 60 ms, 10 ms of optimizer."""
    lines = [record(rank, 0, "training_start", 0, log_type="instant")]
    for step in range(1, 4):
        t = step * 100
        tags = {"step_tags": ["gc"]} if step == 2 else {}
        lines += [
            record(rank, t, "step_start", step),
            record(rank, t, "fetching_batch_start", step),
            record(rank, t + data_ms, "fetching_batch_end", step, value=data_ms),
            record(rank, t + data_ms, "fwd_bwd_start", step),
            record(rank, t + data_ms + 60, "fwd_bwd_end", step, value=60.0, **tags),
            record(rank, t + 85, "optim_start", step),
            record(rank, t + 95, "optim_end", step, value=10.0),
            record(rank, t + 100, "step_end", step, value=100.0, **tags),
        ]
    lines.append(record(rank, 400, "step_start", 4))
    path = folder / f"training.global_rank_{rank}.20261128-101010-ABC{rank}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_logs_become_a_run_with_steps_data_and_optimizer(tmp_path: Path, invoke) -> None:
    logs = tmp_path / "structured_logs"
    logs.mkdir()
    for rank, data_ms in ((1, 20), (0, 5)):
        write_log(logs, rank, data_ms)
    imported = import_traces(logs, tmp_path / "run")
    assert (imported.ranks, imported.num_steps) == ((0, 1), 3)
    run = open_run(tmp_path / "run")
    rows = run.breakdown(rank=1).to_pandas().set_index("part").iloc[:, 0]
    parts = {part: time for part, time in rows.items() if time}
    assert parts == {"data": 20_000_000, "optimizer": 10_000_000, "other": 70_000_000}
    assert (run.source.ranks[0].host, run.manifest.created_unix_ns) == (
        "node3", (BASE_US + 100_000) * 1000
    )  # fmt: skip
    notes = " ".join(run.notes)
    assert "fwd_bwd 180 ms" in notes
    assert "Steps with the tag gc: 2." in notes
    assert "1 spans have no end" in notes
    shown = " ".join(invoke("show", tmp_path / "run").out.split())
    assert "No conclusion" in shown
    assert "host-bound" not in shown
    assert "No rank is a straggler" not in invoke("show", tmp_path / "run", "ranks").out


def test_communication_that_a_log_cannot_show_is_unknown_and_not_0(tmp_path: Path, invoke) -> None:
    logs, run = tmp_path / "structured_logs", tmp_path / "run"
    logs.mkdir()
    for rank in (0, 1):
        write_log(logs, rank, 5)
    import_traces(logs, run)
    summary = json.loads(invoke("show", run, "--json").out)
    names = ("communication_ns", "exposed_ns", "floor_ns", "communication_bytes", "exposed")
    assert [summary[name] for name in names] == [None] * len(names)
    assert summary["breakdown"]["exposed_ns"] is None
    assert not [part for part in summary["breakdown"]["parts"] if "exposed" in part["name"]]
    assert {unit["exposed_ns"] for unit in summary["units"]} <= {None}
    for row in json.loads(invoke("show", run, "ranks", "--json").out)["ranks"]:
        assert (row["exposed_ns"], row["own_work_ns"]) == (None, None)
    assert "unknown" in invoke("show", run, "exposed").out.splitlines()[0]
    for metric in ("own_work_ns", "exposed_ns"):
        assert np.isnan(measure_rank_grid(open_run(run).source, metric=metric).values).all()
    assert "Unequal work" not in invoke("show", run, "ranks").out
    budget = tmp_path / "budget.toml"
    budget.write_text('[limits]\nexposed_ns = "10ms"\n')
    checked = invoke("check", run, "--budget", budget)
    assert checked.code == 2
    assert "exposed_ns cannot be judged: the run shows no communication." in " ".join(
        checked.out.split()
    )
    out = tmp_path / "run.prom"
    assert invoke("export", run, "openmetrics", "--out", out).code == 0
    assert "time_metrics_end_to_end_seconds" in out.read_text()
    assert "exposed" not in out.read_text()


def test_one_bad_file_among_many_is_left_out(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_log(tmp_path, rank, 5)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "bad.sqlite").write_bytes(b"SQLite format 3\x00" + bytes(100))
    imported = import_traces(tmp_path, tmp_path / "run")
    assert imported.ranks == (0, 1)
    left_out = [note for note in imported.notes if "was left out" in note]
    assert [note.split()[0] for note in left_out] == ["bad.jsonl", "bad.sqlite"]


def test_a_log_without_its_last_line_is_read(tmp_path: Path) -> None:
    path = write_log(tmp_path, 0, 5)
    path.write_text(path.read_text()[:-40])
    assert import_traces(path, tmp_path / "run").num_steps == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ('{"a": 1}\n', "line 1: Object missing required field `time_us`"),
        ("[" * 100_000, "not a structured log of torchtitan: line 1"),
        (record(0, 0, "training_start", 0, log_type="instant") + "\n", "no complete span 'step'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ImportingError, match=words):
        import_traces(path, tmp_path / "run")
