"""The trainer as users start it: `torchrun -m instrumented_trainer`."""

import argparse
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

SHORT = ("--steps", "2", "--num-layers", "2", "--data", argparse.__file__, "--no-record")


def test_two_ranks_train_with_one_voice_and_no_warning(torchrun: Any):
    done = torchrun("-m", "instrumented_trainer", *SHORT, "--compile", "false")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny: ")
    assert " in 4 FSDP units on 2 cpu ranks (2 shard)" in lines[0]
    assert [line[:9] for line in lines[1:]] == ["step 1/2 ", "step 2/2 "]
    assert done.stderr == ""


def test_a_bad_setting_is_said_once_at_the_top_and_at_the_end(torchrun: Any):
    done = torchrun("-m", "instrumented_trainer", "--wrap", "blok", check=False)
    assert done.returncode != 0
    first, *rest = done.stderr.splitlines()
    reason = "wrap is 'blok', and 'blok' is none of its words and no module of the model. "
    assert first.startswith(f"instrumented_trainer: {reason}Nearest: 'block'.")
    assert not any(line.startswith("instrumented_trainer: ") for line in rest)
    assert any("exitcode  : 2" in line for line in rest)
    assert reason in done.stderr[-1000:]
