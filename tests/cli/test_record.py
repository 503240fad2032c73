"""`fsdp-inspect record`: the recorder's place in a training command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from fsdp_inspect.cli.record import TORCHRUN_FLAGS, insert_recorder
from fsdp_inspect.errors import FsdpInspectError

RECORDER = "-m fsdp_inspect.record --out runs"
TRAINING = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("command", "recorded"),
    [
        (
            "torchrun --standalone --nproc-per-node 2 t.py --lr 1",
            "torchrun --standalone --nproc-per-node 2 {} t.py --lr 1",
        ),
        ("torchrun --nnodes=2 -m pkg.train -x", "torchrun --nnodes=2 {} -m pkg.train -x"),
        ("/bin/python3 -u t.py", "/bin/python3 -u {} t.py"),
        ("python -m pkg.train", "python {} -m pkg.train"),
        (
            "python -m torch.distributed.run --nnodes 2 t.py",
            "python -m torch.distributed.run --nnodes 2 {} t.py",
        ),
    ],
)
def test_the_recorder_stands_before_the_script(command: str, recorded: str) -> None:
    words = insert_recorder(command.split(), ["--out", "runs"])
    assert " ".join(words) == recorded.format(RECORDER)


@pytest.mark.parametrize("command", ["srun python t.py", "torchrun --nproc-per-node 2", "python"])
def test_a_command_without_a_known_place_is_refused(command: str) -> None:
    with pytest.raises(FsdpInspectError, match=r"Expected (torchrun or python|a training script)"):
        insert_recorder(command.split(), [])


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        (["--path", "runs/a"], "unrecognized arguments: --path"),
        (["--overhead", "x"], "argument --overhead: overhead must be a part of the step time"),
        ([__file__], "Expected the training command after --"),
    ],
)
def test_a_wrong_option_is_refused_before_the_training_starts(
    options: list[str], stated: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    command = [sys.executable, "-m", "fsdp_inspect", "record", *options, "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert stated in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_the_flags_of_torchrun_are_those_of_the_installed_torch() -> None:
    flags = [each for each in get_args_parser()._actions if each.nargs == 0]
    names = {name.replace("_", "-") for each in flags for name in each.option_strings}
    assert names - {"-h", "--help"} <= TORCHRUN_FLAGS


@pytest.mark.slow
@pytest.mark.distributed
def test_a_recorded_command_prints_where_the_run_is_and_how_to_open_it(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    ended = command(
        *("record", "--out", "kept", "--", *launcher, "--nproc-per-node", "2", "train.py"),
        cwd=tmp_path,
    )
    assert ended.code == 0, ended.err
    (manifest,) = tmp_path.glob("kept/*/run.json")
    assert json.loads(manifest.read_text())["world_size"] == 2
    shown = f"fsdp-inspect show kept/{manifest.parent.name}"
    assert f"recorded in kept/{manifest.parent.name}. To see the result: {shown}, " in ended.err
    assert command(*shown.split()[1:], cwd=tmp_path).code == 0


def test_the_options_of_the_recorder_are_shown() -> None:
    words = [sys.executable, "-m", "fsdp_inspect", "record", "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "--numerics-every" in shown.stdout
