"""A launched script sees the same environment as under plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fsdp_inspect.recording.launcher import parse_arguments
from fsdp_inspect.recording.recorder import DEFAULT_WARMUP_STEPS

LAUNCHER = ["-m", "fsdp_inspect.record"]
NOT_RECORDED = "fsdp_inspect: nothing was recorded: the script did not import torch in this process"
PROBE = """
'''What the script sees of itself.'''
import json, sys
main = sys.modules["__main__"]
seen = {
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": __file__,
    "doc": __doc__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "loader": type(__loader__).__name__,
    "is main": vars(main) is globals(),
    "builtins": type(__builtins__).__name__,
    "torch": "torch" in sys.modules,
}
print(json.dumps(seen, indent=1))
"""


def run(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def script_errors(done: subprocess.CompletedProcess[str]) -> str:
    """The output on stderr without the launcher's own line."""
    lines = done.stderr.splitlines()
    return "\n".join(line for line in lines if not line.startswith("fsdp_inspect: "))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The same probe as a script, behind a link, in a package, in a folder, and in an archive."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/probe.py").write_text(PROBE)
    (tmp_path / "link.py").symlink_to("scripts/probe.py")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    (tmp_path / "pkg/probe.py").write_text(PROBE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/__main__.py").write_text(PROBE)
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(["scripts/probe.py"], id="script"),
        pytest.param(["link.py"], id="link"),
        pytest.param(["-m", "pkg.probe"], id="module"),
        pytest.param(["folder"], id="folder"),
        pytest.param(["archive.pyz"], id="archive"),
    ],
)
@pytest.mark.parametrize("safe_path", [False, True], ids=["", "safe path"])
def test_a_script_sees_what_it_sees_under_plain_python(
    project: Path, target: list[str], safe_path: bool
) -> None:
    environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(project)} if safe_path else {}
    arguments = [*target, "--lr", "3e-4", "-m", "--out", "x", "--", "a b"]

    plain = run(*arguments, cwd=project, environment=environment)
    launched = run(*LAUNCHER, "--name", "n", *arguments, cwd=project, environment=environment)

    assert plain.returncode == 0, plain.stderr
    assert launched.stdout == plain.stdout
    assert script_errors(launched) == ""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param("def f():\n    return 1 / 0\nf()", 1, id="exception"),
        pytest.param("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e", 1),
        pytest.param("import sys\nsys.exit(3)", 3, id="exit code"),
        pytest.param("import sys\nsys.exit('text')", 1, id="exit text"),
        pytest.param("raise SystemExit", 0, id="clean exit"),
        pytest.param("raise KeyboardInterrupt", -2, id="interrupt"),
        pytest.param("x = 1\nx ==== 2", 1, id="syntax error"),
        pytest.param("import no_such_module", 1, id="import error"),
        pytest.param("import os\nos._exit(5)", 5, id="hard exit"),
        pytest.param(
            "import os, sys\nif os.fork() == 0:\n    sys.exit(9)\nos.wait()", 0, id="fork"
        ),
        pytest.param("import sys\nsys.excepthook = lambda *a: print('mine', *a)\n1 / 0", 1),
        pytest.param("import atexit\natexit.register(lambda: print(len(globals()) > 5))", 0),
    ],
)
def test_a_script_ends_as_it_ends_under_plain_python(tmp_path: Path, body: str, code: int) -> None:
    (tmp_path / "train.py").write_text(body)

    plain = run("train.py", cwd=tmp_path)
    launched = run(*LAUNCHER, "train.py", cwd=tmp_path)

    assert launched.returncode == plain.returncode == code
    assert script_errors(launched) == script_errors(plain)
    assert address_free(launched.stdout) == address_free(plain.stdout)


def address_free(text: str) -> str:
    return " ".join(word for word in text.split() if "0x" not in word)


def test_a_module_that_does_not_exist_is_what_python_says_it_is(tmp_path: Path) -> None:
    plain = run("-m", "no_such.module", cwd=tmp_path)
    launched = run(*LAUNCHER, "-m", "no_such.module", cwd=tmp_path)

    assert launched.returncode == plain.returncode == 1
    assert script_errors(launched) == plain.stderr.strip()


def test_spawned_processes_find_the_functions_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "def square(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [1, 2, 3]))\n"
    )

    launched = run(*LAUNCHER, "train.py", cwd=tmp_path)

    assert launched.stdout == "[1, 4, 9]\n"


@pytest.mark.slow
def test_variables_that_torch_reads_at_import_are_still_the_scripts_to_set(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n"
        "import torch\nprint(torch.get_num_threads())\n"
    )

    plain = run("train.py", cwd=tmp_path)
    launched = run(*LAUNCHER, "train.py", cwd=tmp_path)

    assert launched.stdout == plain.stdout


def test_a_script_without_torch_is_told_that_nothing_was_recorded(project: Path) -> None:
    first = run(*LAUNCHER, "link.py", cwd=project, environment={"RANK": "0"})
    second = run(*LAUNCHER, "link.py", cwd=project, environment={"RANK": "1"})

    assert first.stderr == f"{NOT_RECORDED}.\n"
    assert second.stderr == ""


# --- the command line


def test_everything_from_the_script_on_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()

    given = parse_arguments(["--no-verdict", str(script), "--out", "x", "--help", "-m", "--"])

    assert given.target.name == str(script)
    assert given.target.arguments == ("--out", "x", "--help", "-m", "--")
    assert not given.target.is_module
    assert given.out == Path("runs")
    assert given.recorder == {"print_verdict": False}


def test_options_are_read_in_front_of_the_script() -> None:
    given = parse_arguments(
        ["--out=/data", "--warmup-steps", "5", "--memory-steps", "7,9", "-m", "pkg.train", "3"]
    )

    assert given.target == ("pkg.train", ("3",), True)
    assert given.out == Path("/data")
    assert given.recorder == {"warmup_steps": 5, "memory_steps": (7, 9)}


@pytest.mark.parametrize(("text", "steps"), [("auto", "auto"), ("none", ()), ("4", (4,))])
def test_memory_steps_are_words_or_numbers(text: str, steps: object) -> None:
    given = parse_arguments(["--memory-steps", text, "-m", "train"])
    assert given.recorder["memory_steps"] == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup-steps", "-1", "-m", "t"], "Expected a whole number, 0 or more"),
        (
            ["--memory-steps", "all", "-m", "t"],
            "Expected step numbers such as 3,50, 'auto' or 'none'",
        ),
        (["--ou", "x", "-m", "t"], "unrecognized arguments"),
        (["nowhere.py"], "script not found: 'nowhere.py'. Expected a Python file"),
        ([], "required: SCRIPT"),
    ],
)
def test_a_wrong_command_line_says_what_is_expected(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(arguments)

    assert message in capsys.readouterr().err


def test_only_one_rank_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")

    with pytest.raises(SystemExit):
        parse_arguments(["nowhere.py"])

    assert capsys.readouterr().err == ""


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(["--help"])

    text = capsys.readouterr().out
    assert "torchrun --nproc-per-node 8 -m fsdp_inspect.record train.py --lr 3e-4" in text
    assert f"(default: {DEFAULT_WARMUP_STEPS})" in text
    assert "without a shared file system" in text
