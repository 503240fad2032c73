"""Properties of every subcommand: help, exit codes, errors without tracebacks."""

import json
import signal
import subprocess
import sys

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
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_ctrl_c_exits_as_shells_expect(runs_folder):
    run = runs_folder / "four"
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", "metrics", str(run), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "Ctrl-C" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in err


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
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
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
