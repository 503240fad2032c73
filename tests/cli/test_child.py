import os
import signal
import subprocess
import sys
import time

import pytest

from fsdp_inspect.cli.child import run_child
from fsdp_inspect.errors import FsdpInspectError


def run_python(script, log):
    return run_child(
        [sys.executable, "-c", script], what="Doing it", log=log, environment=dict(os.environ)
    )


def test_a_childs_output_goes_to_its_log(tmp_path):
    log = tmp_path / "logs" / "child.log"
    assert run_python("print('all is well')", log) > 0
    assert log.read_text() == "all is well\n"


def test_a_failing_job_shows_the_first_rank_that_failed_and_its_exception(tmp_path):
    lines = ["[rank1]: Traceback", "[rank0]: Traceback", "[rank1]: ValueError: no data", "torchrun"]
    script = f"import sys; print('\\n'.join({lines})); sys.exit(1)"
    with pytest.raises(FsdpInspectError) as failure:
        run_python(script, tmp_path / "child.log")
    message = str(failure.value)
    assert "ended with exit code 1: [rank1]: ValueError: no data. Expected" in message
    assert message.endswith("[rank1]: Traceback\n[rank1]: ValueError: no data")


def test_a_failing_child_shows_the_end_of_its_output(tmp_path):
    script = "import sys; [print('line', n) for n in range(100)]; sys.exit(7)"
    with pytest.raises(FsdpInspectError) as failure:
        run_python(script, tmp_path / "child.log")
    message = str(failure.value)
    assert "Doing it ended with exit code 7. Expected exit code 0." in message
    assert str(tmp_path / "child.log") in message
    assert message.endswith("line 98\nline 99")
    assert "line 50" not in message


def test_a_progress_bar_in_the_log_is_read_as_a_terminal_shows_it(tmp_path):
    script = "import sys; print('step 1\\rstep 2\\rstep 3'); sys.exit(1)"
    with pytest.raises(FsdpInspectError, match=r"\nstep 3$"):
        run_python(script, tmp_path / "child.log")


def test_an_interrupted_child_is_ended(tmp_path):
    grandchild = tmp_path / "pid"
    sleeping = f"import os, time; open({str(grandchild)!r}, 'w').write(f'{{os.getpid()}}!'); "
    sleeping += "time.sleep(60)"
    waiting = (
        "import os, pathlib, sys; from fsdp_inspect.cli.child import run_child\n"
        f"run_child([sys.executable, '-c', {sleeping!r}], what='Sleeping', "
        f"log=pathlib.Path({str(tmp_path / 'log')!r}), environment=dict(os.environ))"
    )
    process = subprocess.Popen([sys.executable, "-c", waiting], stderr=subprocess.DEVNULL)
    try:
        pid = int(wait_for_text(grandchild).rstrip("!"))
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for_text(path, *, within_s=300):
    deadline = time.monotonic() + within_s
    while not (path.exists() and path.read_text().endswith("!")):
        assert time.monotonic() < deadline, f"nothing wrote {path}"
        time.sleep(0.05)
    return path.read_text()
