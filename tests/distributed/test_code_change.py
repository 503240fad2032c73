"""The diff of `advise` applies to the recorded script, which then trains with exactly its plan."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fsdp_inspect
from fsdp_inspect.advice.call_edits import Change
from fsdp_inspect.advice.code_change import CodeChange, write_code_change
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest
from tests.conftest import Torchrun

pytestmark = pytest.mark.distributed

FOLDER = Path(__file__).parent
RECORD = ("-m", "fsdp_inspect.record", "--memory-steps", "none", "--no-verdict")
SCRIPT = "sharded_script.py"
MODELS = "two_sharded_models.py"


def newest(runs: Path) -> Path:
    return max(runs.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def plan_of(manifest: RunManifest) -> Plan:
    return Plan.from_dict(manifest.plan)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, run_ranks: Torchrun) -> Path:
    """A folder with the script and its run."""
    folder = tmp_path_factory.mktemp("hand-written")
    shutil.copy(FOLDER / SCRIPT, folder)
    run_ranks(*RECORD, "--name", "first", SCRIPT, cwd=folder)
    return folder


def resharded(plan: Plan) -> Plan:
    names = [unit.name for unit in plan.units if not unit.is_root and ".layers" in unit.name]
    return plan.change(names, reshard_after_forward=False)


def with_lines(plan: Plan) -> Plan:
    kept = plan.change(["decoder.layers.3"], reshard_after_forward=False)
    gathers = kept.change(plan.unit_names, unshard_async_op=True)
    return gathers.model_copy(update={"forward_prefetch": 1, "backward_prefetch": 2})


def merged(plan: Plan) -> Plan:
    return plan.merge(["decoder.layers.2", "decoder.layers.3"])


@pytest.mark.parametrize(
    ("change", "removed"),
    [
        pytest.param(resharded, 1, id="another value in the user's call", marks=pytest.mark.slow),
        pytest.param(with_lines, 0, id="lines after the calls", marks=pytest.mark.slow),
        pytest.param(merged, 8, id="the plan in place of the calls"),
    ],
)
def test_the_changed_script_trains_with_exactly_the_plan(
    recorded: Path,
    tmp_path: Path,
    run_ranks: Torchrun,
    change: Callable[[Plan], Plan],
    removed: int,
) -> None:
    manifest = open_run(newest(recorded / "runs")).manifest
    before = plan_of(manifest)
    after = change(before)
    written = write_code_change(manifest, Change(before, after))
    assert count(written, "-") == removed
    after.dump(tmp_path / "plan.toml")
    apply(written.diff, tmp_path, SCRIPT)
    run_ranks(*RECORD, SCRIPT, cwd=tmp_path)
    again = open_run(newest(tmp_path / "runs"))
    assert plan_of(again.manifest) == after
    assert again.ranks[0].num_steps == 8


@pytest.mark.slow
def test_the_advice_of_the_command_is_the_plan_that_its_diff_makes(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    torchrun: Torchrun,
    run_ranks: Torchrun,
) -> None:
    run = advisable_run(tmp_path_factory.mktemp("advisable"), torchrun)
    command("advise", run, "--write", "plan.toml", cwd=tmp_path)
    advised = json.loads(command("advise", run, "--json", cwd=tmp_path))["plan"]
    if not advised["suggestions"]:
        pytest.skip("on this machine no plan of the run is faster")
    assert (tmp_path / "plan.patch").read_text().strip() == advised["change"]["diff"].strip()
    apply((tmp_path / "plan.patch").read_text(), tmp_path, SCRIPT)
    launch = shlex.split(advised["verify"][1])
    assert launch == shlex.split(advised["change"]["launch"])
    assert launch[0] == "torchrun"
    assert launch[-3:] == ["--name", "first-advised", SCRIPT]
    start = open_run(run).manifest.code.launched_at
    run_ranks(*launch[start:], cwd=tmp_path)
    again = open_run(newest(tmp_path / "runs")).manifest
    assert again.name == "first-advised"
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan_of(again).units == plan.units
    assert plan_of(again).forward_prefetch == plan.forward_prefetch


@pytest.mark.slow
def test_several_models_take_their_parts_of_the_plan(tmp_path: Path, run_ranks: Torchrun) -> None:
    shutil.copy(FOLDER / MODELS, tmp_path)
    run_ranks(MODELS, cwd=tmp_path)
    manifest = open_run(tmp_path / "run").manifest
    before = plan_of(manifest)
    after = before.merge(["actor.0", "actor.1"]).change(["critic.0"], reshard_after_forward=False)
    written = write_code_change(manifest, Change(before, after))
    assert '.within("actor")' in written.diff
    assert '.within("critic")' in written.diff
    after.dump(tmp_path / "plan.toml")
    apply(written.diff, tmp_path, MODELS)
    shutil.rmtree(tmp_path / "run")
    run_ranks(MODELS, cwd=tmp_path)
    assert plan_of(open_run(tmp_path / "run").manifest) == after


def test_without_source_lines_the_advice_names_the_lines(
    tmp_path: Path, run_ranks: Torchrun
) -> None:
    shutil.copy(FOLDER / SCRIPT, tmp_path)
    run_ranks(*RECORD, "--no-source", SCRIPT, cwd=tmp_path)
    manifest = open_run(newest(tmp_path / "runs")).manifest
    assert manifest.code.sources == []
    before = plan_of(manifest)
    written = write_code_change(manifest, Change(before, merged(before)))
    assert not written.diff
    assert f"{SCRIPT}, lines 55" in written.where
    assert "no source lines" in written.where
    assert 'Plan.load("plan.toml").within("decoder")' in written.lines


@pytest.mark.slow
def test_the_trainer_runs_the_printed_launch_line(tmp_path: Path, run_ranks: Torchrun) -> None:
    settings = ("--wrap", "root", "--no-reshard-after-backward", "--microbatches=2")
    steps = ("--steps", "8", "--data", "text", "--record", "--runs-dir", "runs", "--name", "first")
    (tmp_path / "text").write_text("a corpus of one line " * 10_000)
    command = ["-m", "instrumented_trainer", *settings, *steps]
    run_ranks(*command, cwd=tmp_path)
    recorded = open_run(newest(tmp_path / "runs")).manifest
    launch = ["torchrun", "--nproc-per-node", "2", *command]  # as torchrun's ranks record it
    code = recorded.code.model_copy(update={"launch": launch, "launched_at": 3})
    manifest = recorded.model_copy(update={"code": code})
    before = plan_of(manifest)
    after = before.change([""], reshard_after_forward=True)
    written = write_code_change(manifest, Change(before, after))
    assert not written.diff
    assert written.launch.endswith(
        "-m instrumented_trainer --steps 8 --data text --record --runs-dir runs "
        "--name first-advised --plan plan.toml"
    )
    after.dump(tmp_path / "plan.toml")
    launch = shlex.split(written.launch)
    run_ranks(*launch[manifest.code.launched_at :], cwd=tmp_path)
    again = open_run(newest(tmp_path / "runs")).manifest
    assert again.name == "first-advised"
    assert plan_of(again).units == after.units


@pytest.mark.slow
def test_a_model_that_was_sharded_before_the_recorder_was_imported_has_no_places(
    tmp_path: Path, torchrun: Torchrun
) -> None:
    text = (FOLDER / MODELS).read_text()
    line = "from fsdp_inspect import Recorder\n"
    late = text.replace(line, "").replace("    options = {", f"    {line}    options = {{")
    (tmp_path / MODELS).write_text(late)
    torchrun(MODELS, num_ranks=1, cwd=tmp_path)
    manifest = open_run(tmp_path / "run").manifest
    assert manifest.code.calls == []
    before = plan_of(manifest)
    after = before.change(["critic.0"], reshard_after_forward=False)
    written = write_code_change(manifest, Change(before, after))
    assert "sharded before the script imported the recorder" in written.where
    assert written.launch.endswith(MODELS)


def advisable_run(folder: Path, torchrun: Torchrun) -> Path:
    """A run that can be simulated; on a busy machine, a run sometimes varies too much."""
    shutil.copy(FOLDER / SCRIPT, folder)
    for _ in range(5):
        torchrun(*RECORD, "--name", "first", SCRIPT, cwd=folder)
        run = newest(folder / "runs")
        if fsdp_inspect.open_run(run).advise().plan is not None:
            return run
    pytest.skip("every recording varied too much to be simulated")


def command(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def apply(diff: str, folder: Path, script: str) -> None:
    if not (folder / script).exists():
        shutil.copy(FOLDER / script, folder)
    (folder / "a.patch").write_text(f"{diff.rstrip()}\n")
    subprocess.run(["git", "apply", "-p0", "a.patch"], cwd=folder, check=True)


def count(written: CodeChange, sign: str) -> int:
    lines = written.diff.splitlines()
    return sum(line.startswith(sign) and line[:3] != 3 * sign for line in lines)
