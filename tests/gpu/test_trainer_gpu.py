"""The trainer's code for CUDA: NCCL, bfloat16, offload. It uses one rank and one GPU."""

import argparse
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SHORT = ("--steps", "3", "--data", argparse.__file__, "--no-record")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--offload", "cpu_pinned"),
        ("--checkpointing", "selective", "--microbatches", "2"),
        ("--compile", "--num-layers", "2"),
    ],
    ids=["default", "offload", "checkpointing", "compile"],
)
def test_the_trainer_trains_on_a_gpu(torchrun: Any, settings: tuple[str, ...]):
    done = torchrun("-m", "instrumented_trainer", *SHORT, *settings, num_ranks=1, timeout_s=500)
    first, *steps = done.stdout.splitlines()
    assert " on 1 cuda rank (1 shard)" in first
    losses = [float(line.split("loss ")[1].split()[0]) for line in steps]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(5.6, abs=0.3)
    assert "peak allocated" in steps[-1]


def test_a_checkpoint_resumes_on_a_gpu_to_the_last_bit(torchrun: Any, tmp_path: Any):
    saving = ("--checkpoint-dir", tmp_path, "--checkpoint-every", "2", "--steps", "3")
    whole = torchrun("-m", "instrumented_trainer", *SHORT, *saving, num_ranks=1)
    resumed = torchrun(
        "-m", "instrumented_trainer", *SHORT, *saving, "--resume", "latest", num_ranks=1
    )
    last = whole.stdout.splitlines()[-1].split("  ")[1]
    assert resumed.stdout.splitlines()[-1].split("  ")[1] == last
