"""The change that `advise` writes for a framework works in the script of its run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_inspect.advice.call_edits import Change
from fsdp_inspect.advice.code_change import write_code_change
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.trace.run import RunManifest

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
RECORD = ("-m", "fsdp_inspect.record", "--memory-steps", "none", "--no-verdict", "--out", "runs")


def train(name: str, folder: Path) -> RunManifest:
    """Record the driver in a folder; returns the manifest of its run."""
    script = f"{name}_driver.py"
    if not (folder / script).exists():
        shutil.copy(FOLDER / script, folder)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *RECORD]
    done = subprocess.run(
        [*words, script, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-9000:]
    (run,) = (folder / "runs").iterdir()
    return open_run(run).manifest


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunManifest]:
    """The first run of each framework."""
    known: dict[str, RunManifest] = {}

    def record(name: str) -> RunManifest:
        pytest.importorskip(name)
        if name not in known:
            known[name] = train(name, tmp_path_factory.mktemp(name))
        return known[name]

    return record


def prefetching(plan: Plan) -> Plan:
    return plan.model_copy(update={"forward_prefetch": 1})


def merged(plan: Plan) -> Plan:
    return plan.merge(["model.layers.0", "model.layers.1"])


def resharded(plan: Plan) -> Plan:
    names = [name for name in plan.unit_names if "layers" in name or "embed" in name]
    return plan.change(names, reshard_after_forward=False)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("accelerate", prefetching, id="accelerate, lines after prepare"),
        pytest.param("accelerate", merged, id="accelerate, the plan before prepare"),
        pytest.param("lightning", merged, id="lightning, the plan in configure_model"),
        pytest.param("lightning", resharded, id="lightning, the calls of configure_model"),
    ],
)
def test_the_changed_script_trains_with_exactly_the_plan(
    recorded: Callable[[str], RunManifest],
    tmp_path: Path,
    name: str,
    change: Callable[[Plan], Plan],
) -> None:
    first = recorded(name)
    before = Plan.from_dict(first.plan)
    after = change(before)
    empty = set(before.unit_names) - {unit.fqn for unit in first.units}
    written = write_code_change(first, Change(before, after, without=empty))
    after.dump(tmp_path / "plan.toml")
    text = (FOLDER / f"{name}_driver.py").read_text()
    if "fsdp_auto_wrap_policy: NO_WRAP" in written.settings:
        text = text.replace('"transformer_based_wrap"', '"no_wrap"')
    (tmp_path / f"{name}_driver.py").write_text(text)
    (tmp_path / "a.patch").write_text(f"{written.diff}\n")
    subprocess.run(["git", "apply", "-p0", "a.patch"], cwd=tmp_path, check=True)
    assert Plan.from_dict(train(name, tmp_path).plan) == after


def test_accelerate_keeps_units_sharded_by_its_own_setting(
    recorded: Callable[[str], RunManifest], tmp_path: Path
) -> None:
    first = recorded("accelerate")
    assert first.code.frameworks[0] == "accelerate"
    assert first.code.settings["transformer_cls_names_to_wrap"] == ["LlamaDecoderLayer"]
    before = Plan.from_dict(first.plan)
    after = resharded(before)
    written = write_code_change(first, Change(before, after))
    assert "  fsdp_reshard_after_forward: false" in written.settings
    assert not written.plan_file
    text = (FOLDER / "accelerate_driver.py").read_text()
    changed = text.replace(
        "fsdp_version=version,", "fsdp_version=version, reshard_after_forward=False,"
    )
    assert changed != text
    (tmp_path / "accelerate_driver.py").write_text(changed)
    assert Plan.from_dict(train("accelerate", tmp_path).plan) == after


def test_the_trainer_of_transformers_gets_the_place_and_the_lines(
    recorded: Callable[[str], RunManifest],
) -> None:
    first = recorded("transformers")
    before = Plan.from_dict(first.plan)
    written = write_code_change(first, Change(before, prefetching(before)))
    assert written.where.startswith("Transformers shards the model in transformers/distributed/")
    assert "called from transformers_driver.py:" in written.where
    assert "set_modules_to_forward_prefetch" in written.lines
    replaced = write_code_change(first, Change(before, merged(before)))
    assert "Build the model unsharded and apply the plan" in replaced.where
    assert "apply_plan(model, plan)" in replaced.lines
