"""Properties of every subcommand: help, exit codes, errors without tracebacks."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

from fsdp_inspect.cli import INTERRUPTED, application
from fsdp_inspect.cli.sections import SECTIONS
from fsdp_inspect.version import __version__
from tests.store.run_files import write_run

COMMANDS = ("demo", "runs", "show", "plan", "app")


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
        pytest.param(["show"], id="missing argument"),
        pytest.param(["show", "a", "--nonsense"], id="no such option"),
        pytest.param(["show", "a", "nonsense"], id="no such section"),
        pytest.param(["show", "a", "memory", "--unit", "b"], id="option of another section"),
        pytest.param(["show", "a", "memory", "units", "--json"], id="two sections as JSON"),
        pytest.param(["show", "a", "units", "--rank", "-1"], id="impossible value"),
    ],
)
def test_a_wrong_command_line_exits_two(invoke, arguments):
    assert invoke(*arguments).code == 2


def test_an_error_is_one_message_without_a_traceback(command, runs_folder):
    ended = command("show", runs_folder / "nothing")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("fsdp-inspect: No run found at ")
    assert "Traceback" not in ended.err


def test_a_wrong_path_names_the_runs_nearby(invoke, runs_folder):
    ended = invoke("show", runs_folder / "nothing")
    assert str(runs_folder / "four") in ended.err
    assert str(runs_folder / "steady") in ended.err


def test_a_reader_that_goes_away_is_no_error(runs_folder):
    shell = f"{sys.executable} -m fsdp_inspect show {runs_folder / 'four'} units --json | head -n 1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_ctrl_c_exits_as_shells_expect(runs_folder):
    run = runs_folder / "four"
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_inspect", "store", "metrics", str(run), "--port", "0"],
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
        f"sys.argv = ['fsdp-inspect', 'show', {str(runs_folder / 'steady')!r}]\n"
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
        ["show"],
        ["show", "verdict"],
        ["show", "breakdown"],
        ["show", "exposed"],
        ["show", "units"],
        ["show", "memory"],
        ["show", "ranks"],
        ["advise"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_json_about_one_run_begins_alike(invoke, runs_folder, arguments):
    name, *options = arguments
    ended = invoke(name, runs_folder / "steady", *options, "--json")
    assert list(json.loads(ended.out))[:3] == ["run_id", "source", "notes"]


def test_help_has_eighteen_commands_in_four_panels_and_no_type_beside_a_flag(invoke):
    ended = invoke("--help")
    panels = re.findall(r"╭─ (\w+) ─+╮\n(.*?)╰", ended.out, re.DOTALL)
    names = {name: re.findall(r"^│ (\S+) ", text, re.MULTILINE) for name, text in panels[1:]}
    assert names == {
        "Record": ["demo", "record", "import", "equivalence"],
        "Look": ["runs", "show", "diagnose", "compare", "export"],
        "Change": ["advise", "simulate", "tune", "verify", "plan"],
        "Keep": ["check", "app", "mcp", "store"],
    }
    own = [each for listed in names.values() for each in listed if each != "record"]
    helps = [ended.out, *(invoke(each, "--help").out for each in own)]
    assert not any("<bool>" in text for text in helps)


@pytest.mark.parametrize("former", application._FORMER)
def test_a_former_name_works_and_prints_the_new_one(invoke, runs_folder, former):
    replacement = application._FORMER[former][1]
    shown = invoke(former, "--help")
    assert shown.code == 0
    if former in SECTIONS or former == "summary":
        old = invoke(former, runs_folder / "four", "--json")
        section = [former] if former in SECTIONS and former != "summary" else []
        new = invoke("show", runs_folder / "four", *section, "--json")
        assert (old.code, old.out) == (new.code, new.out)
        assert f"`{former}` is now `fsdp-inspect {replacement}`" in old.err
        assert len(old.err.splitlines()) == 1 + len(new.err.splitlines())
    words = replacement.replace("RUN", "run").split()
    assert invoke(*words, "--help").code == 0


def test_sections_follow_each_other(invoke, runs_folder):
    run = runs_folder / "steady"
    both = invoke("show", run, "units", "memory", "--rank", "1")
    alone = [invoke("show", run, name, "--rank", "1").out for name in ("units", "memory")]
    assert both.out == "\n".join(alone)


def test_show_without_a_section_is_short_and_names_the_sections(invoke, runs_folder, monkeypatch):
    monkeypatch.chdir(runs_folder)  # the number of lines depends on the length of the path
    shown = invoke("show", "steady").out
    assert "Communication is exposed for 25% of the step." in shown
    assert len(shown.splitlines()) < 36
    named = shown[shown.index("More: ") :]
    lacking = ("verdict", "kernels", "nccl", "numerics")
    assert [name for name in SECTIONS if name not in named] == [*lacking]
    for name in SECTIONS:
        if name not in lacking:
            assert invoke("show", runs_folder / "steady", name).code == 0


def test_the_attempt_before_a_restart_is_named(invoke, tmp_path):
    """Its failure has no other trace in the answer about the last attempt."""
    write_run(tmp_path, num_steps=3)
    assert "--attempt" not in invoke("diagnose", tmp_path).out
    write_run(tmp_path, num_steps=5)
    assert "--attempt 0`." in invoke("diagnose", tmp_path).out
    assert "--attempt" not in invoke("diagnose", tmp_path, "--attempt", "0").out


def test_a_run_without_any_attempt_is_diagnosed(invoke, tmp_path):
    write_run(tmp_path, num_steps=3)
    shutil.rmtree(tmp_path / "attempt-000")
    ended = invoke("diagnose", tmp_path)
    assert ended.code == 2
    assert ended.out.startswith("Cannot tell: ")


def test_next_steps_name_the_attempt_before_a_restart_in_text_and_json(invoke, tmp_path):
    for _ in range(2):
        write_run(tmp_path, num_steps=3)
    shutil.rmtree(tmp_path / "attempt-000" / "rank-00001")
    command = f"`fsdp-inspect diagnose {tmp_path} --attempt 0`"
    text = invoke("diagnose", tmp_path, "--attempt", "0").out
    assert command in " ".join(text.split())
    [step] = json.loads(invoke("diagnose", tmp_path, "--attempt", "0", "--json").out)["next"]
    assert "`fsdp-inspect diagnose RUN --attempt 0`" in step
