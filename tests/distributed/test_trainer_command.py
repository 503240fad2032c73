"""The trainer as users start it: `torchrun -m instrumented_trainer`."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from fsdp_inspect.store.reader import open_run

pytestmark = pytest.mark.distributed

SHORT = ("--steps", "2", "--num-layers", "2", "--data", argparse.__file__)


@pytest.mark.slow
def test_two_ranks_train_and_record_with_one_voice_and_no_warning(torchrun: Any, tmp_path: Path):
    done = torchrun("-m", "instrumented_trainer", *SHORT, "--name", "first", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny: ")
    assert " in 4 FSDP units on 2 cpu ranks (2 shard)" in lines[0]
    assert [line[:9] for line in lines[1:3]] == ["step 1/2 ", "step 2/2 "]
    (folder,) = (tmp_path / "runs").iterdir()
    place, verdict = done.stderr.splitlines()[:2]
    assert place == (
        f"fsdp_inspect: recorded in runs/{folder.name}. To see the result: fsdp-inspect show "
        f"runs/{folder.name}, or in the browser: fsdp-inspect app runs"
    )
    assert verdict.startswith("The limit is unknown: the run has no timed step.")
    assert "warn" not in done.stderr.lower()
    manifest = open_run(folder).manifest
    assert manifest.name == "first"
    assert manifest.code.launch[0] == "torchrun"
    asked = ["-m", "instrumented_trainer", *SHORT, "--name", "first"]
    assert manifest.code.launch[manifest.code.launched_at :] == asked


@pytest.mark.slow
def test_a_bad_setting_is_said_once_at_the_top_and_at_the_end(torchrun: Any):
    done = torchrun("-m", "instrumented_trainer", "--wrap", "blok", check=False)
    assert done.returncode != 0
    first, *rest = done.stderr.splitlines()
    reason = "wrap is 'blok', but 'blok' is neither a keyword nor a module of the model. "
    assert first.startswith(f"instrumented_trainer: {reason}Nearest: 'block'.")
    assert not any(line.startswith("instrumented_trainer: ") for line in rest)
    assert any("exitcode  : 2" in line for line in rest)
    assert reason in done.stderr[-1000:]


def test_a_risky_plan_is_warned_of_once(run_ranks: Any):
    wrap = ("--wrap", "tok_embeddings, layers.0; layers.1")
    done = run_ranks("-m", "instrumented_trainer", *SHORT, *wrap, "--no-record")
    assert done.stderr.count("whose input needs no gradient") == 1


def test_no_thread_of_the_process_group_outlives_it(tmp_path: Path, run_python: Any):
    """With torch 2.13, such a thread may abort the process while the interpreter ends."""
    script = tmp_path / "watched_trainer.py"
    script.write_text(_WATCHED_TRAINER)
    done = run_python(script, *SHORT, "--no-record")
    before, after = (line for line in done.stdout.splitlines() if line.startswith("gloo: "))
    assert (before, after) == ("gloo: True", "gloo: False")


_WATCHED_TRAINER = """
import atexit
import contextlib
import time
from pathlib import Path

from instrumented_trainer import runtime
from instrumented_trainer.__main__ import main


def does_gloo_run():
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread ends meanwhile
            if path.read_text().strip() == "pt_gloo_runloop":
                return True
    return False


def say_whether_gloo_runs():
    print("gloo:", does_gloo_run(), flush=True)


def say_when_gloo_has_ended():
    while does_gloo_run():  # for some time, the kernel also lists a thread that was joined
        time.sleep(0.01)
    say_whether_gloo_runs()


def destroy(destroy=runtime.dist.destroy_process_group):
    say_whether_gloo_runs()
    destroy()


runtime.dist.destroy_process_group = destroy
atexit.register(say_when_gloo_has_ended)
raise SystemExit(main())
"""
