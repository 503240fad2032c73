"""The trainer as users start it: `torchrun -m instrumented_trainer`."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect import open_run

pytestmark = pytest.mark.distributed

SHORT = ("--steps", "2", "--num-layers", "2", "--data", argparse.__file__)


def test_two_ranks_train_and_record_with_one_voice_and_no_warning(torchrun: Any, tmp_path: Path):
    done = torchrun("-m", "instrumented_trainer", *SHORT, "--name", "first", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny: ")
    assert " in 4 FSDP units on 2 cpu ranks (2 shard)" in lines[0]
    assert [line[:9] for line in lines[1:3]] == ["step 1/2 ", "step 2/2 "]
    (folder,) = (tmp_path / "runs").iterdir()
    assert lines[-2:] == [
        "Look at it:    fsdp-inspect app runs",
        f"Read about it: fsdp-inspect summary runs/{folder.name}",
    ]
    assert done.stderr.startswith("What limits the step cannot be told: no step counts yet.")
    assert "warn" not in done.stderr.lower()
    assert open_run(folder).manifest.name == "first"


def test_a_bad_setting_is_said_once_at_the_top_and_at_the_end(torchrun: Any):
    done = torchrun("-m", "instrumented_trainer", "--wrap", "blok", check=False)
    assert done.returncode != 0
    first, *rest = done.stderr.splitlines()
    reason = "wrap is 'blok', and 'blok' is none of its words and no module of the model. "
    assert first.startswith(f"instrumented_trainer: {reason}Nearest: 'block'.")
    assert not any(line.startswith("instrumented_trainer: ") for line in rest)
    assert any("exitcode  : 2" in line for line in rest)
    assert reason in done.stderr[-1000:]


def test_a_risky_plan_is_warned_of_once(torchrun: Any):
    wrap = ("--wrap", "tok_embeddings, layers.0; layers.1")
    done = torchrun("-m", "instrumented_trainer", *SHORT, *wrap, "--no-record")
    assert done.stderr.count("whose input needs no gradient") == 1
