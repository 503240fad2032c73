"""The model that the launcher finds, its notes on other models, and its cleanup."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.modules import module as torch_module

from fsdp_inspect import Recorder
from fsdp_inspect.recording.discovery import NO_GRADIENTS, NOT_SHARDED, RECORDS_ITSELF, Discovery
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.sharders import DDP, FSDP1
from tests.cases import mark_slow

pytestmark = pytest.mark.usefixtures("one_rank")


class Launched:
    """A discovery with its requests to record and its messages."""

    def __init__(self, folder: Path, record: Callable[[nn.Module], Recorder] | None = None) -> None:
        self.folder = folder
        self.models: list[nn.Module] = []
        self.said: list[str] = []
        self.discovery = Discovery(record or self.record, self.said.append)

    def record(self, model: nn.Module) -> Recorder:
        self.models.append(model)
        return quiet(model, self.folder)


def quiet(model: nn.Module, folder: Path) -> Recorder:
    return Recorder(model, path=folder, device_interval_s=0, memory_steps=(), print_verdict=False)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path / "run")
    yield launched
    launched.discovery.finish(None)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def make_sharded(name: str = "Net") -> nn.Module:
    """A sharded model of a class that was never sharded before, like in a fresh process."""
    kind: type[nn.Module] = type(name, (Layers,), {})
    return fully_shard(kind())


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def traces_of_us() -> dict[str, Any]:
    """All global state that a discovery changes during its search."""
    return {
        "forward": dict(torch_module._global_forward_pre_hooks),
        "registration": dict(torch_module._global_module_registration_hooks),
        "subclass": vars(FSDPModule).get("__init_subclass__"),
        "lazy_init": FSDPParamGroup.lazy_init,
        "call": nn.Module.__call__,
        "filters": list(warnings.filters),
    }


def test_a_model_is_recorded_from_its_first_step_on(launched: Launched) -> None:
    model = make_sharded()

    train(model, steps=3)
    folder = launched.discovery.finish(None)

    assert folder == launched.folder
    run = open_run(launched.folder)
    assert launched.models == [model]
    assert run.status is RunStatus.COMPLETE
    assert run.ranks[0].num_steps == 3
    assert launched.said == []


def test_the_outermost_module_called_is_the_model(launched: Launched) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(4, 4)
            self.parts = nn.ModuleList([make_sharded("First"), make_sharded("Second")])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.teacher(x)
            return self.parts[0](x) + self.parts[1](x)

    model = Wrapper()
    train(model)

    assert launched.models == [model]
    assert launched.said == []


def test_a_recording_begins_with_the_first_forward_with_gradients(launched: Launched) -> None:
    frozen, model = make_sharded("Frozen").requires_grad_(False), make_sharded()

    with torch.no_grad():
        model(torch.ones(2, 4))
    frozen(torch.ones(2, 4))
    assert launched.models == []
    train(model)

    (models,) = launched.models
    assert dict(models.named_children()) == {"net": model, "frozen": frozen}


def test_every_model_that_exists_is_recorded(launched: Launched) -> None:
    teacher, model = make_sharded("Teacher"), make_sharded()
    dropped = make_sharded("Dropped")
    del dropped

    train(model)
    with torch.no_grad():
        teacher(torch.ones(2, 4))
    launched.discovery.finish(None)

    assert launched.said == []
    run = open_run(launched.folder)
    assert run.manifest.model.class_name == "Net + Teacher"
    assert {unit.fqn for unit in run.manifest.units} == {"net", "teacher"}


def test_a_later_model_is_said_once_and_noted_in_the_run(launched: Launched) -> None:
    train(make_sharded())
    for name in ("Second", "Third"):
        train(make_sharded(name))
    launched.discovery.finish(None)

    assert len(launched.models) == len(launched.said) == 1
    assert "Another sharded model (with FSDPSecond) runs" in launched.said[0]
    assert launched.said[0] in open_run(launched.folder).ranks[0].problems


def test_nothing_is_hooked_before_fully_shard_is_called(launched: Launched) -> None:
    hooks = dict(torch_module._global_forward_pre_hooks)

    assert hooks == {}
    make_sharded()
    assert len(torch_module._global_forward_pre_hooks) == 1


def test_nothing_is_hooked_for_long(tmp_path: Path) -> None:
    before = traces_of_us()
    launched = Launched(tmp_path / "run")
    model = make_sharded()
    assert traces_of_us() != before

    train(model)
    while_recording = traces_of_us()
    launched.discovery.finish(None)

    assert {name for name in before if while_recording[name] != before[name]} == {"lazy_init"}
    assert traces_of_us() == before


def test_a_script_that_records_itself_is_left_alone(launched: Launched, tmp_path: Path) -> None:
    model = make_sharded()

    with quiet(model, tmp_path / "own"):
        train(model, steps=2)

    assert launched.models == []
    assert launched.said == [f"nothing is recorded: {RECORDS_ITSELF}"]
    assert open_run(tmp_path / "own").ranks[0].num_steps == 2


def test_a_recorder_that_cannot_start_does_not_stop_the_script(tmp_path: Path) -> None:
    def fail(model: nn.Module) -> Recorder:
        raise MemoryError("none left")

    launched = Launched(tmp_path, fail)
    train(make_sharded())
    launched.discovery.finish(None)

    assert len(launched.said) == 1
    assert "the recorder could not start with torch" in launched.said[0]
    assert "MemoryError('none left'). The training continues" in launched.said[0]


def test_an_error_of_the_script_ends_the_recording_as_failed(launched: Launched) -> None:
    train(make_sharded())
    launched.discovery.finish(ValueError("boom"))

    run = open_run(launched.folder)
    assert run.status is RunStatus.FAILED
    assert "ValueError at step 1" in (run.ranks[0].failure or "")


# --- nothing to record


def test_a_plain_model_is_told_what_can_be_recorded(launched: Launched) -> None:
    train(nn.Linear(4, 1))
    launched.discovery.finish(None)

    assert launched.said == [f"nothing was recorded: {NOT_SHARDED}"]


@pytest.mark.parametrize(
    ("wrap", "sharder"),
    [
        (partial(FullyShardedDataParallel, device_id=torch.device("cpu")), FSDP1),
        (nn.parallel.DistributedDataParallel, DDP),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_wrapped_model_is_found_and_recorded(
    launched: Launched, wrap: Callable[[nn.Module], nn.Module], sharder: str
) -> None:
    model = wrap(nn.Linear(4, 1))
    train(model, steps=3)
    launched.discovery.finish(None)

    assert launched.models == [model]
    assert launched.said == []
    run = open_run(launched.folder)
    assert (run.manifest.sharder, run.manifest.name) == (sharder, "Linear")
    assert run.ranks[0].problems == []
    assert run.ranks[0].num_steps == 3, "the first forward runs when the recorder is attached"
    events = run.events(0)
    assert set(events.step[events.kind == EventKind.FORWARD]) == {0, 1, 2}


def test_a_model_that_never_trains_is_told_when_a_recording_begins(launched: Launched) -> None:
    with torch.no_grad():
        make_sharded()(torch.ones(2, 4))
    launched.discovery.finish(None)

    assert launched.said == [f"nothing was recorded: {NO_GRADIENTS}"]


# --- torch.compile


def compile_and_train(
    model: nn.Module, *, evaluate_first: bool, in_place: bool = False
) -> tuple[nn.Module, int]:
    """The compiled model, and its number of graphs."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    if in_place:
        model.compile(backend=backend)
    compiled = model if in_place else torch.compile(model, backend=backend)
    if evaluate_first:
        with torch.no_grad():
            compiled(torch.ones(2, 4))
    train(compiled, steps=3)
    return compiled, len(graphs)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("evaluate_first", mark_slow([False, True], but=[True]))
def test_a_compiled_model_is_found_without_a_warning_and_without_more_graphs(
    tmp_path: Path, evaluate_first: bool, in_place: bool
) -> None:
    how = {"evaluate_first": evaluate_first, "in_place": in_place}
    graphs = compile_and_train(make_sharded(), **how)[1]
    torch._dynamo.reset()  # its caches hold the model, which would be another model
    call = nn.Module.__call__
    launched = Launched(tmp_path / "run")

    compiled, graphs_launched = compile_and_train(make_sharded(), **how)
    assert nn.Module.__call__ is call
    launched.discovery.finish(None)

    assert launched.models == [compiled]
    assert launched.said == []
    assert graphs_launched == graphs > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads it
def test_a_model_in_a_compiled_function_is_found(launched: Launched) -> None:
    torch._dynamo.reset()
    model = make_sharded()
    with torch.no_grad():  # such as a function of the data
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert launched.models == []
    incomplete = nn.Module.__new__(nn.Module)
    called = torch.compile(lambda x: 2 * model(x), backend="eager")
    for _ in range(3):
        called(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    launched.discovery.finish(None)
    del incomplete

    assert launched.models == [model]
    assert open_run(launched.folder).ranks[0].num_steps == 3
