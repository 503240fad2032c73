"""The launcher records an unmodified script, on real ranks and on two nodes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_inspect.store.compaction import compact_run
from fsdp_inspect.store.reader import StoredRun, open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus
from tests.conftest import Torchrun
from tests.forked_process import ForkedProcess

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("launched_script.py")
LAUNCHER = ("-m", "fsdp_inspect.record")
STEPS = 5


def losses(stdout: str) -> list[str]:
    return sorted(line for line in stdout.splitlines() if line.startswith("LOSS"))


def only_run(runs: Path) -> Path:
    (path,) = runs.iterdir()
    return path


class Launched:
    """A launched training: its process, and its run."""

    def __init__(self, folder: Path, process: subprocess.CompletedProcess[str]) -> None:
        self.process = process
        self.path = only_run(folder / "runs")
        self.run: StoredRun = open_run(self.path)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> Launched:
    folder = tmp_path_factory.mktemp("launched")
    options = ("--name", "my run", "--memory-steps", "none")
    return Launched(folder, torchrun(*LAUNCHER, *options, SCRIPT, "--out", "x", cwd=folder))


def test_losses_are_identical_to_the_last_bit(launched: Launched, run_ranks: Torchrun) -> None:
    plain = run_ranks(SCRIPT)

    assert len(losses(plain.stdout)) == 2 * 2 * STEPS
    assert losses(launched.process.stdout) == losses(plain.stdout)


def test_every_rank_is_recorded_to_the_end(launched: Launched) -> None:
    run = launched.run

    assert run.status is RunStatus.COMPLETE
    assert [rank.num_steps for rank in run.ranks] == [STEPS, STEPS]
    assert [rank.problems for rank in run.ranks] == [[], []]


def test_rank_0_names_the_folder_below_the_one_asked_for(launched: Launched) -> None:
    assert "-my-run-" in launched.path.name
    assert launched.run.manifest.name == "my run"


def test_the_model_is_the_module_that_the_loop_calls(launched: Launched) -> None:
    units = launched.run.manifest.units

    assert launched.run.manifest.model.class_name == "WithLoss"
    assert [unit.fqn for unit in units] == ["decoder", "decoder.layers.0", "decoder.layers.1"]


def test_a_step_ends_where_the_optimizer_steps(launched: Launched) -> None:
    events = launched.run.events(1, kinds=[EventKind.BACKWARD])
    whole = events.where(events.unit == -1)

    assert list(whole.step) == [step for step in range(STEPS) for _ in range(2)]


def test_the_run_remembers_the_scripts_own_command(launched: Launched) -> None:
    assert launched.run.manifest.command[-2:] == ["--out", "x"]


def test_the_end_says_what_limits_the_step_and_where_the_run_lies(launched: Launched) -> None:
    where = f"fsdp_inspect: recorded in runs/{launched.path.name}. "

    assert launched.process.stderr.count(where) == 1
    assert f"fsdp-inspect show runs/{launched.path.name}" in launched.process.stderr
    assert "Next:" in launched.process.stderr


@pytest.mark.slow
def test_a_script_that_fails_keeps_its_traceback_and_its_recording(
    tmp_path: Path, torchrun: Torchrun
) -> None:
    sent = tmp_path / "alert.json"
    code = f"import sys; open({str(sent)!r}, 'a').write(sys.stdin.read())"
    alert = ("--alert", shlex.join([sys.executable, "-c", code]), "--alert-if", "stall")
    launched = Launched(
        tmp_path,
        torchrun(*LAUNCHER, *alert, SCRIPT, "--fail-on-rank", "1", cwd=tmp_path, check=False),
    )
    failed = launched.run.ranks[1]

    # The process of the alerts holds the pipe of stderr: it has ended.
    [alerted] = sent.read_text().splitlines()
    assert json.loads(alerted)["run"] == launched.run.manifest.run_id
    assert json.loads(alerted)["sentence"] in {
        "A rank failed.",
        "A rank stopped without a recorded end.",
    }

    assert launched.process.returncode == 1
    assert "ValueError: no more disk for the dog pictures" in launched.process.stderr
    assert "launcher.py" not in launched.process.stderr
    assert failed.status is RunStatus.FAILED
    assert "no more disk for the dog pictures" in (failed.failure or "")
    assert failed.num_steps == 3


# --- two nodes without a shared file system


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> tuple[Path, Path]:
    """The runs folders of two nodes with one rank each, from the view of each start."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folders = (tmp_path_factory.mktemp("node0"), tmp_path_factory.mktemp("node1"))
    processes = [
        ForkedProcess(
            [sys.executable, *LAUNCHER, "--no-verdict", SCRIPT],
            cwd=folder,
            env={
                **os.environ,
                **job,
                "RANK": str(node),
                "GROUP_RANK": str(node),
                "LOCAL_RANK": "0",
            },
        )
        for node, folder in enumerate(folders)
    ]
    try:
        assert [process.wait(500) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return folders[0] / "runs", folders[1] / "runs"


def test_each_node_keeps_its_part_in_a_folder_of_the_same_name(nodes: tuple[Path, Path]) -> None:
    parts = [only_run(runs) for runs in nodes]
    ranks = [[path.name for path in part.glob("attempt-000/*")] for part in parts]

    assert parts[0].name == parts[1].name
    assert ranks == [["rank-00000"], ["rank-00001"]]


def test_a_part_opens_by_itself_and_names_the_missing_rank(nodes: tuple[Path, Path]) -> None:
    for runs, missing in zip(nodes, (1, 0), strict=True):
        run = open_run(only_run(runs))

        assert run.status is RunStatus.PARTIAL
        assert len(run.ranks) == 1
        assert f"ank {missing}" in " ".join(run.notes)


@pytest.mark.parametrize("first", [0, 1], ids=["rank 0's node last", "rank 0's node first"])
def test_parts_copied_together_are_the_whole_run(
    nodes: tuple[Path, Path], tmp_path: Path, first: int
) -> None:
    name = only_run(nodes[0]).name
    for node in (1, 0) if first == 0 else (0, 1):
        shutil.copytree(nodes[node] / name, tmp_path / name, dirs_exist_ok=True)
    compact_run(tmp_path / name)

    run = open_run(tmp_path / name)
    assert run.status is RunStatus.COMPLETE
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert set(run.summary().rank) == {0, 1}
    assert list(run.notes) == []
