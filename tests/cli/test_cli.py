"""What holds for every subcommand: help, exit codes, errors without tracebacks."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fsdp_inspect.cli import INTERRUPTED
from fsdp_inspect.version import __version__

COMMANDS = ("demo", "runs", "summary", "units", "compact", "app")


def test_the_version_is_printed(invoke):
    ended = invoke("--version")
    assert (ended.code, ended.out) == (0, f"fsdp-inspect {__version__}\n")


def test_help_names_every_command_and_where_to_begin(invoke):
    ended = invoke("--help")
    assert ended.code == 0
    assert all(f" {name} " in ended.out for name in COMMANDS)
    assert "Start with: fsdp-inspect demo" in ended.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_teaches_by_example(invoke, name):
    ended = invoke(name, "--help")
    assert ended.code == 0
    assert f"Example: fsdp-inspect {name}" in ended.out


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["nonsense"], id="no such command"),
        pytest.param(["summary"], id="missing argument"),
        pytest.param(["summary", "a", "--nonsense"], id="no such option"),
        pytest.param(["units", "a", "--rank", "-1"], id="impossible value"),
    ],
)
def test_a_wrong_command_line_exits_two(invoke, arguments):
    assert invoke(*arguments).code == 2


def test_an_error_is_one_message_without_a_traceback(command, runs_folder):
    ended = command("summary", runs_folder / "nothing")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("fsdp-inspect: No run found at ")
    assert "Traceback" not in ended.err


def test_a_wrong_path_names_the_runs_nearby(invoke, runs_folder):
    ended = invoke("summary", runs_folder / "nothing")
    assert str(runs_folder / "four") in ended.err
    assert str(runs_folder / "steady") in ended.err


def test_a_reader_that_goes_away_is_no_error(runs_folder):
    shell = f"{sys.executable} -m fsdp_inspect units {runs_folder / 'four'} --json | head -n 1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_ctrl_c_exits_as_shells_expect(tmp_path, runs_folder):
    fifo = tmp_path / "plan.toml"
    os.mkfifo(fifo)
    run = runs_folder / "four"
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", "simulate", str(run), "--plan", str(fifo)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        writer = open_when_read(fifo)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        os.close(writer)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in err


def open_when_read(fifo, *, within_s=20):
    """Open the fifo for writing once the other process stands at reading it."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, "nobody reads"
            time.sleep(0.05)


def test_summary_of_a_run_needs_neither_torch_nor_pandas_nor_streamlit(runs_folder):
    script = (
        "import sys; from fsdp_inspect.cli import main\n"
        f"sys.argv = ['fsdp-inspect', 'summary', {str(runs_folder / 'steady')!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'streamlit', 'plotly'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["summary"],
        ["summary", "--verdict"],
        ["breakdown"],
        ["exposed"],
        ["units"],
        ["memory"],
        ["ranks"],
        ["advise"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_json_about_one_run_begins_alike(invoke, runs_folder, arguments):
    name, *options = arguments
    ended = invoke(name, runs_folder / "steady", *options, "--json")
    assert list(json.loads(ended.out))[:3] == ["run_id", "source", "notes"]
