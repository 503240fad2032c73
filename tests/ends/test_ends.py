"""An end of a training is the same with and without the recorder, and is explained after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fsdp_inspect.recording.black_box_keeper import EXPLAINED_FILE, LOCK_FILE, take_lock
from tests.browser.states import write_crashed
from tests.cases import mark_slow
from tests.forked_process import ForkedProcess

from .ending_script import ENDS
from .running import (
    MOST_LATER_S,
    MOST_OUTLIVED_S,
    SCRIPT,
    JobEnd,
    Recorded,
    find_differences,
    run_end,
)

pytestmark = pytest.mark.distributed

_TRIES = 3
"""The number of tries to be equal. The machine has other work, and without the recorder a rank that
fails in backward aborts instead at times, in the threads of gloo."""
_MOST_LOAD = 0.75
"""Runnable processes for each processor before the test, above which times are not judged."""
_MOST_PRESSURE = 10.0
"""The same for the percentage of the last 10 s in which a runnable process had no processor."""
_GUARD = [("two-errors", "recorder")]
_CASES = [(name, how) for name in ENDS if name != "hang" for how in ("recorder", "launcher")]
_EXPLAINED = (
    *("exception", "exception-on-rank-0", "exception-in-first-step", "exception-in-forward"),
    *("exception-in-backward", "data-worker", "two-errors", "two-errors-on-rank-0-first"),
    *("sigkill", "abort", "hard-exit", "restart-in-vain"),
)
_TIES = ("exception-everywhere", "exit-after-training")
"""Without the recorder, torchrun named rank 0 in 6 and rank 1 in 2 of 8 runs of the first one."""


_HINT = "fsdp_inspect: The training failed. To see which rank failed first, and why"


def end_of(name: str, recorded: Recorded, folder: Path) -> JobEnd:
    folder.mkdir(parents=True)
    return run_end(name, recorded, folder)


def is_busy() -> bool:
    """Whether other work holds the processors, so that times of two ends are not comparable."""
    if os.getloadavg()[0] > _MOST_LOAD * len(os.sched_getaffinity(0)):
        return True
    try:
        pressure = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return True
    return float(pressure.split("avg10=")[1].split()[0]) > _MOST_PRESSURE


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", mark_slow(_CASES, but=_GUARD), ids=" ".join)
def test_an_end_is_as_without_the_recorder(case: tuple[str, Recorded], tmp_path: Path) -> None:
    (name, how), differences, plain_s = case, [], 0.0
    for pair in range(_TRIES):
        was_busy = is_busy()
        plain = end_of(name, "no", tmp_path / f"{pair}-plain")
        recorded = end_of(name, how, tmp_path / f"{pair}-recorded")
        found = find_differences(plain, recorded, is_tie=name in _TIES)
        plain_s = max(plain_s, plain.after_s)
        later_s = recorded.after_s - plain_s
        is_late = later_s > MOST_LATER_S and not was_busy
        if is_late and plain.code:  # a normal end waits for the verdict
            found.append(f"{later_s:.2f} s later")
        if recorded.outlived_s > MOST_OUTLIVED_S:
            found.append(f"a process outlives the job by {recorded.outlived_s:.2f} s")
        if name in _EXPLAINED:
            attempts = 1 + name.startswith("restart")
            explanations = recorded.stderr.count("fsdp_inspect: Rank")
            assert explanations <= attempts, recorded.stderr
            # Without a processor, the explanation ends 1.4 s after the job and names its command.
            hints = recorded.stderr.count(_HINT) if was_busy else 0
            if explanations + hints < attempts:
                found.append(f"{explanations} explanations: {recorded.stderr}")
        if not found:
            return
        differences += found
    pytest.fail("\n".join(differences))


def test_an_exception_is_explained_once_with_its_line_and_who_waited(tmp_path: Path) -> None:
    end = end_of("exception", "launcher", tmp_path / "end")
    text = end.stderr
    if "fsdp_inspect: Rank" not in text:  # a busy machine needs longer than the end of the job
        assert _HINT in text
        (run,) = (tmp_path / "end" / "runs").iterdir()
        command = [sys.executable, "-m", "fsdp_inspect", "diagnose", str(run), "--brief"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    text = " ".join(text.split())
    lines = SCRIPT.read_text().splitlines()
    line = 1 + lines.index("    raise ValueError(message)")
    assert (
        "Rank 1 failed with ValueError at step 4: no label "
        f"(ends/ending_script.py:{line}). 1 rank waited for it in the all-gather of 0 in forward."
    ) in text
    assert text.count("Rank 1 failed") == 1


@pytest.mark.slow
def test_no_explanation_is_printed_where_none_is_wanted(tmp_path: Path) -> None:
    end = run_end("exception", "launcher", tmp_path, launcher_options=["--no-verdict"])
    assert end.code == 1
    assert "fsdp_inspect: Rank" not in end.stderr
    assert not list(tmp_path.glob(f"runs/*/attempt-000/{EXPLAINED_FILE}"))


# --- the right to explain

_WAITS_FOR_LOCK = """
import sys, time
import torch.distributed as dist
from pathlib import Path
from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.trace.black_box import EMPTY_HEADER
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
box = BlackBoxWriter(time.perf_counter_ns)
box.write_header(EMPTY_HEADER)
run = Path(sys.argv[1])
assert box.start_keeper(run / "attempt-000" / "rank-00000" / "black_box.bin", run, None)
box.stop_keeper(1.0, has_failed=True)
"""
_HOLDS_LOCK = """
import os, sys, time
from fsdp_inspect.recording.black_box_keeper import take_lock
assert take_lock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def claimed(tmp_path: Path) -> subprocess.Popen[str]:
    """A process that has taken the right to explain a run, and prints nothing."""
    write_crashed(tmp_path / "run")
    folder = tmp_path / "run" / "attempt-000"
    command = [sys.executable, "-c", _HOLDS_LOCK, str(folder / LOCK_FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_if_the_process_that_explains_is_killed_the_next_one_explains(
    claimed: subprocess.Popen[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    waiting = wait_for_lock(run)
    time.sleep(0.5)
    assert waiting.is_running()
    assert "diagnose" not in waiting.cmdline()

    claimed.kill()

    waiting.wait(120)
    assert (run / "attempt-000" / EXPLAINED_FILE).exists()
    assert (tmp_path / "stderr").read_text().count("fsdp_inspect: ") == 1


def wait_for_lock(run: Path) -> psutil.Process:
    """The process that waits for the right to explain a run; its stderr is in a file beside it."""
    script = run.with_name("waits_for_lock.py")
    script.write_text(_WAITS_FOR_LOCK)
    with run.with_name("stderr").open("w") as stderr:
        command = [sys.executable, script, run]
        assert ForkedProcess(command, stdout=stderr, stderr=stderr).wait(120) == 0
    return _keeper_of(run)


def test_nothing_is_explained_twice(claimed: subprocess.Popen[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    waiting = wait_for_lock(run)

    (run / "attempt-000" / EXPLAINED_FILE).touch()

    waiting.wait(60)
    assert (tmp_path / "stderr").read_text() == ""


def test_a_lock_belongs_to_one_process(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert take_lock(first)
    assert not take_lock(second)
    os.close(first)
    assert take_lock(second)
    os.close(second)


def _keeper_of(run: Path) -> psutil.Process:
    return next(
        each
        for each in psutil.process_iter(["cmdline"])
        if str(run) in " ".join(each.info["cmdline"] or ())
        and any("black_box_keeper.py" in word for word in each.info["cmdline"])
    )


# --- a hang


@pytest.mark.slow
def test_a_hang_that_is_killed_while_it_is_explained_is_explained_after_it(tmp_path: Path) -> None:
    def kill_when_explained(job: int) -> None:
        """Kill the job at the moment at which the diagnosis of the hang begins."""
        while True:
            ranks = psutil.Process(job).children()
            inner = [child for rank in ranks for child in rank.children()]
            if any("diagnose" in child.cmdline() for child in inner):
                for each in (*ranks, psutil.Process(job)):
                    os.kill(each.pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    end = run_end(
        "hang", "launcher", tmp_path,
        launcher_options=["--hang-after", "1"], during=kill_when_explained,
    )  # fmt: skip

    # Twice, if the kill comes after the print and before the note that it was printed.
    assert end.stderr.count("fsdp_inspect: ") in (1, 2)
    assert "fsdp_inspect: Rank 1 never reached the all-gather" in end.stderr
