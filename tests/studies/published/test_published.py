"""Published trainings: the predicted rate and its interval, the memory, and the reasons."""

import json
import subprocess
import sys

import pytest

from tests.studies.published.replay import replay, summarize

USUAL = {
    "source": "llm-foundry", "table": "", "as_printed": {}, "model": "MPT 7b", "params": None,
    "gpu": "h100_80gb", "gpus": 8, "seq_len": 2048, "local_batch": 1, "grad_accum": 1,
    "precision": "amp_bf16 / DEFAULT", "checkpointing": "full", "compile": False,
    "sharding": "FULL_SHARD", "mesh": None, "tokens_per_s_per_gpu": None, "peak_memory": None,
    "peak_memory_unit": None, "peak_memory_kind": None, "bf16_only": True,
}  # fmt: skip
TITAN = {"source": "torchtitan-2024-12", "model": "Llama 3.1 8B", "gpu": "H100 SXM 96 GB (500 W)",
         "precision": "bf16", "checkpointing": "selective (op)", "seq_len": 8192, "local_batch": 2,
         "grad_accum": None, "gpus": 128, "mesh": "FSDP 128",
         "peak_memory_kind": "reserved, max over ranks"}  # fmt: skip
ROWS = [
    {"id": "70b", "model": "MPT 70b", "gpus": 256, "local_batch": 8, "tokens_per_s_per_gpu": 1035},
    {"id": "3b", "model": "MPT 3b", "checkpointing": "none", "local_batch": 40, "seq_len": 512,
     "grad_accum": 6, "tokens_per_s_per_gpu": 27965},
    {"id": "long", "model": "MPT 1b", "gpu": "a100_80gb", "seq_len": 65536, "grad_accum": 2,
     "tokens_per_s_per_gpu": 3044},
    {"id": "small", "model": "MPT 760m", "gpu": "a100_40gb", "gpus": 32, "local_batch": 12,
     "precision": "bf16 / PURE", "checkpointing": "none", "tokens_per_s_per_gpu": 29648},
    {**TITAN, "id": "titan", "tokens_per_s_per_gpu": 5605, "peak_memory": 67.0},
    {**TITAN, "id": "float8", "precision": "bf16 + Float8", "compile": True,
     "tokens_per_s_per_gpu": 8380},
    {**TITAN, "id": "pipeline", "model": "Llama 3.1 405B", "gpus": 512, "local_batch": 32,
     "precision": "bf16 + Float8", "compile": True, "checkpointing": "full",
     "mesh": "FSDP 8, TP 8, PP 8", "tokens_per_s_per_gpu": 128},
    {"id": "qlora", "source": "answerai-fsdp-qlora", "model": "Llama-2 70B", "gpu": "RTX 4090",
     "gpus": 2, "local_batch": 2, "precision": "QLoRA", "compile": None,
     "sharding": "FSDP1 FULL_SHARD + CPU offload", "tokens_per_s_per_gpu": 238.4},
]  # fmt: skip


@pytest.mark.parametrize("row", [{**USUAL, **row} for row in ROWS], ids=lambda row: row["id"])
def test_the_published_rate_is_inside_the_interval_and_the_training_fits(row):
    found = replay(row)

    assert found.reason is None
    assert found.low <= row["tokens_per_s_per_gpu"] <= found.high
    assert found.high / found.low <= 1.6
    assert found.verdict in ("fits", "cannot tell")
    if row["peak_memory"] is not None:
        assert found.memory_gib == pytest.approx(row["peak_memory"], rel=0.05)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"model": "DeepSeek V3 671B"}, "not a plain decoder", id="architecture"),
        pytest.param({"gpu": "TPU v5"}, "no preset", id="device"),
        pytest.param({"local_batch": None}, "local_batch is not stated", id="batch"),
        pytest.param({"tokens_per_s_per_gpu": 90_000}, "the peak of", id="rate-above-the-peak"),
    ],
)
def test_a_row_that_cannot_be_expressed_has_its_reason(change, reason):
    found = replay({**USUAL, "id": "x", **change})

    assert found.predicted is None
    assert reason in found.reason


def test_the_command_prints_each_row_the_summary_and_json(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [{**USUAL, **row} for row in ROWS]}))
    words = [sys.executable, "-m", "tests.studies.published", str(path)]

    text = subprocess.run([*words, "--out", str(tmp_path / "page.md")], check=True,
                          capture_output=True, text=True).stdout  # fmt: skip
    plain = subprocess.run([*words, "--json"], check=True, capture_output=True, text=True).stdout

    rows = json.loads(plain)["rows"]
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert all(row["low"] < row["predicted"] < row["high"] for row in rows)
    assert "source: llm-foundry" in text
    assert "llm-foundry" in (tmp_path / "page.md").read_text()
    assert len(list(summarize([replay({**USUAL, **row}) for row in ROWS]))) > 5
