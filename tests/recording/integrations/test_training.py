"""The common parts of all integrations: options, refusals, missing libraries."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_inspect.recording.integrations.training import RecordedTraining
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    dist.destroy_process_group()


def recorded(folder: Path) -> RecordedTraining:
    options: dict[str, Any] = {"path": folder, "device_interval_s": 0, "print_verdict": False}
    return RecordedTraining(options, "With this library: shard it.")


def train_microbatch(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_an_option_that_the_recorder_lacks_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"invalid keyword of the recorder: 'warmup'.*warmup_steps"):
        RecordedTraining({"path": tmp_path, "warmup": 3}, "")


def test_a_model_that_is_not_sharded_is_a_warning_with_what_to_do(tmp_path: Path) -> None:
    training = recorded(tmp_path / "run")

    with pytest.warns(RuntimeWarning, match="Linear is not sharded.*With this library: shard it"):
        training.begin(nn.Linear(2, 2), {}, is_first_rank=True)
    training.begin_step()
    training.log({"loss": 1.0})
    training.end_step()
    training.close()

    assert training.recorder is None
    assert not (tmp_path / "run").exists()


def test_only_the_first_rank_warns(tmp_path: Path) -> None:
    recorded(tmp_path / "run").begin(nn.Linear(2, 2), {}, is_first_rank=False)


def test_values_that_are_no_numbers_are_not_logged(model: nn.Module, tmp_path: Path) -> None:
    training = recorded(tmp_path / "run")
    training.begin(model, {}, is_first_rank=True)
    training.begin_step()
    training.log({"loss": torch.tensor(2.0), "name": "a", "flag": True, "rows": torch.ones(3)})
    training.end_step()
    training.close()

    assert open_run(tmp_path / "run").ranks[0].scalar_names == ["loss"]


def test_a_step_without_an_optimizer_step_is_no_step(model: nn.Module, tmp_path: Path) -> None:
    training = recorded(tmp_path / "run")
    training.begin(model, {}, is_first_rank=True)
    for _ in range(2):
        training.begin_step()
        train_microbatch(model)
    training.end_step()
    training.begin_step()
    train_microbatch(model)
    training.close()

    run = open_run(tmp_path / "run")
    assert run.status is RunStatus.COMPLETE
    assert list(run.events(0, kinds=[EventKind.STEP]).step) == [0]


def test_a_training_that_begins_anew_closes_the_one_before_as_failed(
    model: nn.Module, tmp_path: Path
) -> None:
    training = recorded(tmp_path / "run")
    training.begin(model, {}, is_first_rank=True)
    training.begin_step()
    training.begin(model, {}, is_first_rank=True)
    training.close()

    attempts = sorted((tmp_path / "run").glob("attempt-*/rank-00000/rank.json"))
    statuses = [json.loads(path.read_text())["status"] for path in attempts]
    assert (statuses[0], statuses[1]) == ("failed", "complete")
    assert "a new training began before the previous one ended" in attempts[0].read_text()


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("transformers", ["transformers"], "fsdp-inspect[record,hf]"),
        ("lightning", ["lightning.pytorch", "pytorch_lightning"], "fsdp-inspect[record,lightning]"),
        ("trl", ["trl"], "fsdp-inspect[record,trl]"),
        ("torchtitan", ["torchtitan"], "fsdp-inspect[record,torchtitan]"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, missing: list[str], extra: str
) -> None:
    name = f"fsdp_inspect.recording.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for library in missing:
        monkeypatch.setitem(sys.modules, library, None)

    def use() -> Any:
        return import_module(name).FsdpInspectCallback()

    with pytest.raises(ImportError, match="installed") as caught:
        use()

    assert f"pip install '{extra}'" in str(caught.value)


@pytest.mark.parametrize(
    "module", ["", ".transformers", ".trl", ".accelerate", ".lightning", ".torchtitan"]
)
def test_examples_in_the_docstrings_are_python(module: str) -> None:
    path = f"fsdp_inspect/recording/integrations{module.replace('.', '/') or '/__init__'}.py"
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    examples = re.findall(r"(?:^(?: {4}.*)?\n)+", f"{docstring}\n", flags=re.MULTILINE)
    code = [textwrap.dedent(example) for example in examples if " import " in example]

    assert code
    for example in code:
        compile(example, path, "exec")


class Container(torch.optim.Optimizer):
    """Several optimizers as one, like in torchtitan."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([each for one in optimizers for each in one.param_groups[0]["params"]], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_container_of_optimizers_is_one_step_with_the_states_of_all(
    model: nn.Module, tmp_path: Path
) -> None:
    first, second = (torch.optim.AdamW(model[place].parameters()) for place in (0, 2))
    training = recorded(tmp_path / "run")
    optimizer = Container([first, second])
    training.begin(model, {}, is_first_rank=True, optimizer=optimizer)
    for _ in range(4):
        train_microbatch(model)
        optimizer.step()
    training.close()

    run = open_run(tmp_path / "run")
    memory = run.memory(0)
    assert list(run.events(0, kinds=[EventKind.STEP]).step) == [0, 1, 2, 3]
    assert len(run.events(0, kinds=[EventKind.OPTIMIZER])) == 4
    states = [*first.state.values(), *second.state.values()]
    held = sum(value.nbytes for state in states for value in state.values())
    assert memory.optimizer_state.max() == held


def test_a_wrapper_that_the_library_keeps_is_found(model: nn.Module, tmp_path: Path) -> None:
    inner = nn.Linear(4, 1)
    wrapper = nn.parallel.DistributedDataParallel(inner)
    training = recorded(tmp_path / "run")
    training.begin(inner, {}, is_first_rank=True)
    training.begin_step()
    train_microbatch(wrapper)
    training.end_step()
    training.close()
    assert open_run(tmp_path / "run").manifest.sharder == "ddp"
