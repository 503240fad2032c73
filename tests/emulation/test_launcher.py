"""An unmodified script runs as rank 0 of many and is recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_inspect.emulation.launcher import parse_emulation_arguments
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus

SCRIPT = Path(__file__).parents[1] / "distributed" / "launched_script.py"
LINK = ("--world-size", "16", "--gpus-per-node", "8", "--bandwidth", "9GB/s")


def launch(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fsdp_inspect.emulate", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of a script, and its run."""
    folder = tmp_path_factory.mktemp("launched")
    options = (*LINK, "--inter-bandwidth", "1GB/s", "--memory-steps", "none")
    done = launch(*options, SCRIPT, "--out", "x", cwd=folder)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return done.stderr, run


def test_a_script_that_asks_for_gloo_runs_as_rank_0_of_16(launched: tuple[str, Path]):
    manifest = open_run(launched[1]).manifest

    assert (manifest.world_size, manifest.source, manifest.backend) == (16, "emulated", "fake")
    assert manifest.emulation["inter"]["bandwidth_bytes_per_s"] == 1e9


def test_it_is_recorded_to_the_end(launched: tuple[str, Path]):
    run = open_run(launched[1])
    gathers = run.events(0, steps=[3], kinds=[EventKind.ALL_GATHER])

    assert run.status is RunStatus.COMPLETE
    assert run.ranks[0].num_steps == 5
    assert len(gathers) > 0


def test_what_is_printed_says_that_the_ranks_were_emulated(launched: tuple[str, Path]):
    errors, _ = launched

    assert "fsdp_inspect: emulated: 16 ranks, 9.00 GB/s" in errors
    assert "the loss is meaningless" in errors
    assert "Emulated, not real ranks (16 ranks" in errors


def test_the_script_keeps_its_arguments():
    given = parse_emulation_arguments(
        [*LINK, "--inter-bandwidth", "1GB/s", "-m", "json.tool", "--name", "x"]
    )

    assert given.recording.target.arguments == ("--name", "x")
    assert given.recording.target.is_module
    assert given.specification.gpus_per_node == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--world-size", "16"), ["bandwidth is missing", "bandwidth=50GB/s"]),
        (("--preset", "h200"), ["unknown preset 'h200'", "Nearest: 'h200-ib400'"]),
        (("--bandwidth", "9GB/s", "--world-size", "x"), ["world_size is 'x'"]),
        (("--preset", "h100-nvlink", "--world-size", "16"), ["16 ranks do not fit"]),
    ],
)
def test_a_bad_option_ends_before_the_script_runs(
    options: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        parse_emulation_arguments([*options, str(SCRIPT)])

    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert all(word in errors for word in words)


def test_help_names_every_preset_with_its_source(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse_emulation_arguments(["--help"])

    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "h200-ib400" in text
    assert "https://github.com/NVIDIA/nccl-tests/issues/290" in text
