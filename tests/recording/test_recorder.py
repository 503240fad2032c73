"""The recorder under misuse, when training fails, and when it fails itself."""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect import Recorder
from fsdp_inspect.errors import RecordingError
from fsdp_inspect.recording import instruments, unit_hooks
from fsdp_inspect.recording.black_box import BlackBoxWriter
from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.failure import describe_allocated
from fsdp_inspect.recording.instruments import Instruments
from fsdp_inspect.recording.memory import AllocatorReading, MemoryProbe
from fsdp_inspect.recording.order_check import SHORTEST_INTERVAL_S
from fsdp_inspect.recording.overhead import FIRST_DETAILED
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.sharders.find import find_sharder
from fsdp_inspect.recording.sharders.fsdp2 import Fsdp2
from fsdp_inspect.recording.units import ProcessGroups, describe_model
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.store.schema import SIGTERM_FILE
from fsdp_inspect.store.writer import RankWriter
from fsdp_inspect.trace.codes import NO_UNIT, EventFlag, EventKind, Phase, Source
from fsdp_inspect.trace.run import RunStatus
from tests.torch_versions import needs_pinned_torch, needs_torch

WORLD_SIZE = 4
PLAIN_STEP = FIRST_DETAILED + 6


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def sharded_model() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    return model


def train(model: nn.Module, recorder: Recorder, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with recorder.step():
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def quiet(model: nn.Module, path: Path, **options: Any) -> Recorder:
    return Recorder(model, path=path, print_verdict=False, device_interval_s=0, **options)


# --- plain steps


def run_steps(
    model: nn.Module, runs: Sequence[tuple[bool, Callable[[], None]]]
) -> tuple[list[bool], BlackBoxWriter]:
    """Record runs, each in detail or not; whether each update ended a step."""
    sharder = Fsdp2.find(model)
    assert sharder is not None
    clock = HostClock()
    box = BlackBoxWriter(clock.host_now)
    session = Session(clock, lambda row: None, ProcessGroups(), black_box=box)
    probe, ended = MemoryProbe(session, lambda row: None, None), []

    def end_step(optimizer: torch.optim.Optimizer) -> None:
        ended.append(session.ends_with_optimizer)
        if ended[-1]:
            session.end_step()

    hooks = Instruments(session, sharder, probe, None, end_step)
    hooks.attach()
    for is_detailed, run in runs:
        hooks.choose_detail(is_detailed)
        run()
    hooks.detach()
    assert not session.problems
    return ended, box


def test_a_plain_step_of_another_unit_ends_with_the_optimizer(fake_ranks: None) -> None:
    """A loop that drops layers at random may drop the units whose hooks a plain step keeps."""
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    middle = Fsdp2.find(model).units[1].group  # type: ignore[union-attr]
    are_wrapped = []

    def train_layers(layers: nn.Module) -> None:
        are_wrapped.append(bool(vars(middle).keys() & {*unit_hooks.WRAPPED_METHODS}))
        layers(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    runs = [(True, model), (False, model), (False, model[1:2])]
    ended, box = run_steps(
        model, [(detail, partial(train_layers, layers)) for detail, layers in runs]
    )
    assert are_wrapped == [True, False, False]
    assert ended == [True, True, True]
    assert box.num_finished == box.num_issued > 0


def test_an_update_of_another_model_ends_no_step(fake_ranks: None) -> None:
    """As of a critic that learns from what the recorded generator makes without gradients."""
    model, critic = sharded_model(), nn.Linear(8, 1)
    own, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))

    def train_both() -> None:
        for _ in range(2):
            with torch.no_grad():
                made = model(torch.ones(2, 8))
            critic(made).sum().backward()
            other.step()
        critic(model(torch.ones(2, 8))).sum().backward()
        own.step()

    ended, _ = run_steps(model, [(is_detailed, train_both) for is_detailed in (True, False)])
    assert ended == [False, False, True] * 2


def test_in_a_plain_step_the_position_is_the_unit_that_torch_runs(
    one_rank: None, tmp_path: Path
) -> None:
    model, seen = sharded_model(), list[tuple[int, int]]()
    with quiet(model, tmp_path / "run", overhead="1%", memory_steps=()) as recorder:
        train(model, recorder, PLAIN_STEP)
        session = recorder._attachment.session  # type: ignore[union-attr]
        model[1].register_forward_hook(lambda *_: seen.append(session.position()), prepend=True)
        model[2].register_full_backward_hook(lambda *_: seen.append(session.position()))
        train(model, recorder, 1)
        seen.append(session.position())
    assert seen == [(1, Phase.FORWARD), (2, Phase.BACKWARD), (NO_UNIT, Phase.OUTSIDE)]


def test_parameters_that_a_forward_has_gathered_count_once(fake_ranks: None) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(2, 8))
    sharder = Fsdp2.find(model)
    assert sharder is not None
    assert describe_model(model, sharder.units).num_parameters == 3 * (8 * 8 + 8)


def test_parameters_that_a_checkpoint_replaces_count_once(fake_ranks: None) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    model[1].requires_grad_(requires_grad=False)
    copies = {name: each.detach().clone() for name, each in model.state_dict().items()}
    model.load_state_dict(copies, assign=True)
    sharder = Fsdp2.find(model)
    assert sharder is not None
    found = describe_model(model, sharder.units)
    assert found.num_parameters == 3 * (8 * 8 + 8)
    assert found.num_trainable_parameters == 2 * (8 * 8 + 8)


# --- objects of the script


class Kept:
    """An object that the script deletes: a state dict, logits, a batch."""


def _alive_after_deletion(path: Path, **options: Any) -> set[int | str]:
    """The steps after which an object is alive that this function has deleted."""
    before, alive = Kept(), set[int | str]()
    model = sharded_model()
    seen = [weakref.ref(before)]
    with quiet(model, path, overhead="1%", **options) as recorder:
        del before
        if seen[0]() is not None:
            alive.add("before")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(PLAIN_STEP + 1):
            with recorder.step():
                logits = model(torch.ones(2, 8))
                loss = logits.sum()
                loss.backward()
                if step == PLAIN_STEP:
                    time.sleep(4 * SHORTEST_INTERVAL_S)  # the watchdog looks at this rank
                optimizer.step()
                seen = [weakref.ref(each) for each in (logits, loss, model[0].weight.grad)]
                optimizer.zero_grad()
                del logits, loss
                if any(each() is not None for each in seen):
                    alive.add(step)
    return alive


@pytest.mark.parametrize("numerics_every", [0, 4])
def test_the_recorder_keeps_no_object_that_the_script_deletes(
    one_rank: None, tmp_path: Path, numerics_every: int
) -> None:
    memory_steps = (3, 9) if numerics_every else ()
    options = {"numerics_every": numerics_every, "memory_steps": memory_steps}
    assert not _alive_after_deletion(tmp_path / "run", **options)
    steps = open_run(tmp_path / "run").events(0, kinds=[EventKind.STEP])
    assert steps.flags[PLAIN_STEP] & EventFlag.PLAIN_STEP or numerics_every


def wrapped_model() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # one rank shards nothing
        return FullyShardedDataParallel(
            nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu")
        )


@pytest.mark.parametrize("make", [sharded_model, wrapped_model])
def test_a_closed_recorder_keeps_no_model(
    one_rank: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
) -> None:
    monkeypatch.setattr(instruments, "_SAVES", {"a_package_that_no_script_imports": ("save",)})
    finders = [*sys.meta_path]

    def record() -> weakref.ref[nn.Module]:
        model = make()
        with quiet(model, tmp_path / "run") as recorder:
            train(model, recorder)
        return weakref.ref(model)

    seen = record()
    gc.collect()
    assert seen() is None
    assert sys.meta_path == finders


def test_methods_of_tensors_are_pickled_as_without_the_recorder(
    fake_ranks: None, tmp_path: Path
) -> None:
    model = sharded_model()
    names = ("item", "tolist", "__getitem__", "backward")
    with quiet(model, tmp_path / "run") as recorder:
        train(model, recorder, 1)
        packed = pickle.dumps([getattr(torch.Tensor, name) for name in names])
    assert pickle.loads(packed) == [getattr(torch.Tensor, name) for name in names]


def test_an_error_that_the_script_catches_keeps_no_variable(one_rank: None, tmp_path: Path) -> None:
    def handle() -> bool:
        big, model = Kept(), sharded_model()
        seen = weakref.ref(big)
        try:
            with quiet(model, tmp_path / "run", overhead="1%", memory_steps=()) as recorder:
                train(model, recorder, PLAIN_STEP)
                with recorder.step():
                    raise ArithmeticError
        except ArithmeticError:
            del big
        return seen() is not None

    assert not handle()


# --- refusals


def test_a_plain_model_is_refused_with_the_remedy(fake_ranks: None, tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"Linear is not sharded: fully_shard was never"):
        Recorder(nn.Linear(2, 2), path=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_composable_replica_is_refused_with_its_name(one_rank: None, tmp_path: Path) -> None:
    from torch.distributed._composable import replicate

    model = replicate(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(RecordingError, match="composable replicate, which is unsupported"):
        Recorder(model, path=tmp_path / "run").__enter__()


def test_models_of_two_sharders_are_refused(one_rank: None, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    models = [fully_shard(nn.Linear(2, 2)), wrapped]
    with pytest.raises(RecordingError, match=r"units of FSDP2 and FSDP1. Expected one sharder"):
        Recorder(models, path=tmp_path / "run")


def test_a_missing_process_group_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"init_process_group\(\) first"):
        Recorder(nn.Linear(2, 2), path=tmp_path / "run")


def test_a_second_recorder_on_a_model_is_refused_until_the_first_is_closed(
    fake_ranks: None, tmp_path: Path
) -> None:
    model = sharded_model()
    with quiet(model, tmp_path / "first") as first:
        with pytest.raises(RecordingError, match=r"into '.*/first'.*close it first"):
            quiet(model[1], tmp_path / "second")
        train(model, first)
    assert not (tmp_path / "second").exists()
    assert open_run(tmp_path / "first").ranks[0].num_steps == 3
    with quiet(model, tmp_path / "third") as third:
        train(model, third)
    assert open_run(tmp_path / "third").ranks[0].num_steps == 3


def test_two_models_of_a_process_are_recorded_at_once(fake_ranks: None, tmp_path: Path) -> None:
    with (
        quiet(sharded_model(), tmp_path / "one") as one,
        quiet(sharded_model(), tmp_path / "two") as two,
    ):
        assert one.is_recording
        assert two.is_recording


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_recorders_leave_torch_as_it_was(
    first_ends_first: bool, fake_ranks: None, tmp_path: Path
) -> None:
    before = own_functions_in_torch()
    recorders = [quiet(sharded_model(), tmp_path / name) for name in "ab"]
    for recorder in recorders:
        recorder.__enter__()
    assert own_functions_in_torch() != before
    for recorder in recorders if first_ends_first else reversed(recorders):
        recorder.__exit__(None, None, None)
    assert own_functions_in_torch() == before


def own_functions_in_torch() -> list[str]:
    """The attributes of torch's modules and classes that are functions of this package."""
    found = []
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] == "torch"]:
        classes = [each for each in vars(module).values() if issubclass(type(each), type)]
        for owner in (module, *classes):
            found += [
                f"{owner.__name__}.{name}"
                for name, value in list(vars(owner).items())
                if type(value) is FunctionType and "/fsdp_inspect/" in value.__code__.co_filename
            ]
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more, got -1"),
        ({"flush_interval_s": 0}, "flush_interval_s must be above 0, got 0"),
        ({"device_interval_s": -1}, "device_interval_s must be 0"),
    ],
    ids=["warmup", "flush", "devices"],
)
def test_impossible_arguments_are_named(
    fake_ranks: None, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Recorder(sharded_model(), path=tmp_path / "run", **options)


def test_values_are_logged_by_keyword_or_as_a_mapping(one_rank: None, tmp_path: Path) -> None:
    """A loop that was written for another tracker passes a mapping, or a value without a name."""
    model = fully_shard(nn.Linear(64, 64))
    with quiet(model, tmp_path / "run") as recorder:
        for _ in range(2):
            with recorder.step():
                loss = model(torch.ones(8, 64)).sum()
                loss.backward()
            recorder.log({"train/loss": loss}, rate=0.5)
            recorder.log(loss)  # type: ignore[arg-type]
            recorder.log()
    run = open_run(tmp_path / "run")
    assert run.ranks[0].scalar_names == ["train/loss", "rate"]
    assert len(run.scalars(0)) == 4
    assert any("without a name" in note for note in run.notes)


@pytest.mark.parametrize(
    ("number", "has_gradients", "is_noted"), [(3, True, True), (2, True, False), (6, False, False)]
)
def test_updates_without_a_forward_of_the_model_are_noted(
    fake_ranks: None, tmp_path: Path, number: int, has_gradients: bool, is_noted: bool
) -> None:
    """As after Accelerate has wrapped the model again: the recorder is on the first wrapper."""
    model = sharded_model()
    recorder = quiet(model, tmp_path / "run")
    train(model, recorder)
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    for _ in range(number):
        loss = other.square().sum()
        if has_gradients:
            loss = loss + sum(each.to_local().square().sum() for each in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    found = any(
        f"gradients in {number} updates" in note for note in open_run(tmp_path / "run").notes
    )
    assert found is is_noted


class WithSparse(nn.Linear):
    """Returns a sparse tensor, too."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.bias.sum() * torch.eye(4).to_sparse()


def test_the_size_of_a_sparse_output_is_unknown(fake_ranks: None, tmp_path: Path) -> None:
    model = fully_shard(WithSparse(8, 8))
    with quiet(model, tmp_path / "run", memory_steps=[1]) as recorder:
        for _ in range(3):
            with recorder.step():
                dense, sparse = model(torch.ones(2, 8))
                (dense.sum() + sparse.to_dense().sum()).backward()
    run = open_run(tmp_path / "run")
    assert run.status is RunStatus.COMPLETE
    assert run.ranks[0].output_bytes == {"0": 0}


def test_disabled_it_does_nothing(tmp_path: Path) -> None:
    recorder = Recorder(nn.Linear(2, 2), path=tmp_path / "run", enabled=False)
    with recorder.step(), recorder.data(), recorder.between_steps():
        recorder.log(loss=1.0)
    recorder.close()
    assert not (tmp_path / "run").exists()
    assert recorder.run_folder is None


# --- its own failures


def test_a_bug_of_the_recorder_stops_the_recording_and_not_the_training(
    fake_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharded_model()

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(unit_hooks.UnitHooks, "_close_forward", broken)
    recorder = quiet(model, tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="recording stopped at step 0.*planted") as caught:
        train(model, recorder)
    recorder.close()
    assert len(caught) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any("planted" in note for note in open_run(tmp_path / "run").notes)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        pytest.param("_settle", None, id="settling"),
        pytest.param("_write_manifest", None, id="manifest"),
        pytest.param("_release", None, id="release"),
        pytest.param("_describe_failure", KeyError("training"), id="failure"),
    ],
)
def test_a_bug_at_the_end_costs_the_rest_of_the_recording_and_leaves_no_hook(
    fake_ranks: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: Exception | None,
) -> None:
    def num_hooks() -> int:
        return sum(len(each._forward_hooks | each._forward_pre_hooks) for each in model.modules())

    model = sharded_model()
    before = num_hooks()
    recorder = quiet(model, tmp_path / "run")
    train(model, recorder)
    monkeypatch.setattr(recorder._attachment, place, lambda *_: 1 / 0)
    with pytest.warns(RuntimeWarning, match="finishing the recording .* failed: ZeroDivisionError"):
        recorder.close(error)
    assert num_hooks() == before
    assert open_run(tmp_path / "run").events(0).step.max() >= 0
    assert open_run(tmp_path / "run").status is not RunStatus.RUNNING


def test_where_warnings_are_errors_its_failure_still_does_not_reach_the_training(
    fake_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharded_model()
    recorder = quiet(model, tmp_path / "run")
    assert recorder._attachment is not None
    monkeypatch.setattr(Session, "end_step", lambda _: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, recorder)
    assert not recorder.is_recording
    recorder.close()


def test_a_folder_that_cannot_be_made_costs_the_recording_only(
    fake_ranks: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    model = sharded_model()
    with quiet(model, tmp_path / "file" / "run") as recorder:
        train(model, recorder)
    first, last = caplog.messages
    assert "Training continues" in first
    # Garbage collections are events too, and the sampler's thread adds rows of memory in time.
    assert re.fullmatch(r"Rank 0 dropped (9[3-9]|1\d\d) rows of events, 5\d rows of memory\.", last)


# --- failures of the training


def test_a_failed_training_says_where_it_stood(fake_ranks: None, tmp_path: Path) -> None:
    model = sharded_model()

    def train_into_failure() -> None:
        with quiet(model, tmp_path / "run") as recorder:
            train(model, recorder)
            model[1].forward = lambda x: 1 / 0
            train(model, recorder)

    with pytest.raises(ZeroDivisionError):
        train_into_failure()
    run = open_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert run.ranks[0].failure == "ZeroDivisionError at step 3, forward of 1: division by zero"
    assert run.ranks[0].num_steps == 3


def test_a_rank_that_is_killed_while_it_closes_after_an_error_has_failed_with_it(
    fake_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends the other ranks as soon as one has failed."""
    monkeypatch.setattr(RankWriter, "close", lambda *_, **__: None)
    model = sharded_model()

    def train_into_failure() -> None:
        with quiet(model, tmp_path / "run", flush_interval_s=3600) as recorder:
            train(model, recorder)
            raise ValueError("no label")

    with pytest.raises(ValueError, match="no label"):
        train_into_failure()
    deadline = time.monotonic() + 60
    while open_run(tmp_path / "run").ranks[0].failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_run(tmp_path / "run").ranks[0].failure == "ValueError at step 3: no label"


_TERMINATED_WHILE_IT_CLOSES = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from fsdp_inspect import Recorder
from fsdp_inspect.store.writer import RankWriter

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 4))
RankWriter.close = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
with Recorder(model, path=sys.argv[1]):
    model(torch.ones(1, 4)).sum().backward()
    raise ValueError("lost a peer")
"""


@pytest.mark.distributed
def test_a_launcher_s_sigterm_leaves_stacks_until_the_recording_is_closed(tmp_path: Path) -> None:
    """Otherwise the rank looks as if it had been killed silently."""
    command = [sys.executable, "-c", _TERMINATED_WHILE_IT_CLOSES, str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == -signal.SIGTERM
    (file,) = tmp_path.glob(f"run/attempt-000/rank-00000/{SIGTERM_FILE}")
    assert "most recent call first" in file.read_text()


def test_running_out_of_memory_names_unit_and_phase(fake_ranks: None, tmp_path: Path) -> None:
    model = sharded_model()

    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    def train_into_failure() -> None:
        with quiet(model, tmp_path / "run", memory_steps=[]) as recorder:
            train(model, recorder, steps=1)
            inner = model[1].forward
            model[1].forward = lambda x: Hungry.apply(inner(x))
            train(model, recorder, steps=1)

    with pytest.raises(torch.OutOfMemoryError):
        train_into_failure()
    failure = open_run(tmp_path / "run").ranks[0].failure
    assert failure == "OutOfMemoryError at step 1, backward of 1: tried to allocate 2 GiB"


class Counters:
    """An allocator with given counters."""

    def read(self) -> AllocatorReading:
        return 10_000, 20_000, 10_000, 12_000, 20_000, 512, 0, 0, 0


def test_what_fills_memory_is_told_largest_first(fake_ranks: None) -> None:
    model = sharded_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    sharder = find_sharder(model)
    units = sharder.describe_units(ProcessGroups())
    model[0].unshard()
    # On this rank a layer has 2 x 8 weights and 2 biases, 72 bytes; Adam also keeps 2 counters.
    assert describe_allocated(sharder.units, units, [optimizer], Counters()) == (
        "Allocated 9.77 KiB (peak 11.7 KiB, reserved 19.5 KiB): "
        "activations, buffers and temporaries 8.62 KiB, optimizer state 456 B, "
        "unsharded parameters of 1 of 3 units 288 B, sharded parameters 216 B, "
        "sharded gradients 216 B."
    )


# --- folders, attempts


def record_twice(path: Path, **options: Any) -> None:
    for _ in range(2):
        model = sharded_model()
        with quiet(model, path, **options) as recorder:
            train(model, recorder)


def test_a_second_recording_is_a_run_of_its_own(
    fake_ranks: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_twice(tmp_path / "run")
    assert list(open_run(tmp_path / "run").attempts) == [0]
    assert open_run(tmp_path / "run-2").ranks[0].num_steps == 3
    assert "contains a complete run" in caplog.text
    assert "Recorder(resume=True)" in caplog.text


def test_a_resumed_run_has_another_attempt(fake_ranks: None, tmp_path: Path) -> None:
    record_twice(tmp_path / "run", resume=True)
    run = open_run(tmp_path / "run")
    assert list(run.attempts) == [0, 1]
    assert open_run(tmp_path / "run", attempt=0).ranks[0].num_steps == 3


def test_addresses_in_the_configuration_do_not_separate_a_resumed_run(
    fake_ranks: None, tmp_path: Path
) -> None:
    """As in torchtitan's: `<function zeros_ at 0x...>`, as an object or as text."""
    made = [lambda: None for _ in range(2)]
    for each in made:
        model, config = sharded_model(), {"init": each, "text": str(each), "name": "at 0x12"}
        with quiet(model, tmp_path / "run", resume=True, config=config) as recorder:
            train(model, recorder)
    run = open_run(tmp_path / "run")
    assert list(run.attempts) == [0, 1]
    config = run.manifest.config
    assert config["name"] == "at 0x12"
    assert config["init"] == config["text"]
    assert "at 0x" not in config["text"]


def test_another_model_is_recorded_beside_the_run_that_is_there(
    fake_ranks: None, tmp_path: Path
) -> None:
    model = sharded_model()
    quiet(model, tmp_path / "run").close()
    other = nn.Sequential(nn.Linear(4, 4))
    fully_shard(other)
    with pytest.warns(RuntimeWarning, match="Recording into a new folder next to it"):
        recorder = quiet(other, tmp_path / "run")
    recorder.close()
    assert recorder.run_folder == tmp_path / "run-2"


def test_runs_under_a_fake_process_group_are_marked_emulated(
    fake_ranks: None, tmp_path: Path
) -> None:
    model = sharded_model()
    with quiet(model, tmp_path / "run") as recorder:
        train(model, recorder)
    run = open_run(tmp_path / "run")
    assert run.manifest.source == "emulated"
    assert set(run.events(0).source.tolist()) == {Source.EMULATED}


# --- the rest


def test_one_rank_has_units_and_no_collectives(one_rank: None, tmp_path: Path) -> None:
    needs_torch("2.11", "issues collectives on one rank, too")
    model = sharded_model()
    with quiet(model, tmp_path / "run") as recorder:
        train(model, recorder)
    events = open_run(tmp_path / "run").events(0)
    kinds = set(events.kind.tolist())
    assert {EventKind.FORWARD, EventKind.BACKWARD, EventKind.ALL_GATHER_COPY_OUT} <= kinds
    assert not {EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER} & kinds


def test_detaching_twice_is_detaching_once(fake_ranks: None, tmp_path: Path) -> None:
    model = sharded_model()
    recorder = quiet(model, tmp_path / "run")
    train(model, recorder)
    recorder.detach()
    recorder.detach()
    recorder.close()
    train(model, recorder)
    assert open_run(tmp_path / "run").ranks[0].num_steps == 3


def test_the_recorder_does_not_keep_the_model_alive(fake_ranks: None, tmp_path: Path) -> None:
    model = sharded_model()
    with quiet(model, tmp_path / "run") as recorder:
        train(model, recorder)
    attachment = recorder._attachment
    assert attachment is not None
    assert attachment._sharder.units == []


def test_data_and_evaluation_that_the_script_names_are_recorded(
    fake_ranks: None, tmp_path: Path
) -> None:
    model = sharded_model()
    with quiet(model, tmp_path / "run") as recorder:
        train(model, recorder, steps=1)
        with recorder.between_steps("checkpoint"):
            pass
        with recorder.data():
            pass
        train(model, recorder, steps=1)
    events = open_run(tmp_path / "run").events(0, steps=[1])
    assert (events.kind == EventKind.DATA).sum() == 1
    assert (events.kind == EventKind.BETWEEN_STEPS).sum() == 1


class HeadApart(nn.Module):
    """A chunked loss as in torchtitan: the head runs outside of the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = (nn.Linear(8, 8) for _ in range(3))
        fully_shard([self.norm, self.head])
        fully_shard(self.body)
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def test_a_unit_that_an_evaluation_leaves_open_is_opened_anew_by_the_training(
    fake_ranks: None, tmp_path: Path
) -> None:
    """torch ends such a forward in the next pass, because no backward follows the evaluation."""
    needs_torch("2.13", "itself fails in this loop, also without the recorder")
    model = HeadApart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet(model, tmp_path / "run", memory_steps=()) as recorder:
        for _ in range(2):
            with torch.no_grad():
                model.head(model(torch.ones(2, 8)))
            with recorder.step():
                hidden = model(torch.ones(2, 8))
                model.head(hidden.detach().requires_grad_()).sum().backward()
                hidden.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    events = open_run(tmp_path / "run").events(0, steps=[1], kinds=[EventKind.FORWARD])
    names = [unit.fqn for unit in open_run(tmp_path / "run").manifest.units]
    own = events.where(events.unit == names.index("norm, head"))
    whole = events.where((events.unit == -1) & (events.phase == Phase.FORWARD))
    assert Phase.FORWARD in own.phase
    in_training = own.where(own.phase == Phase.FORWARD)
    assert (in_training.start_ns >= whole.start_ns[0]).all()


def test_a_data_loader_is_timed_without_cooperation(fake_ranks: None, tmp_path: Path) -> None:
    model = sharded_model()
    loader = torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=4)
    with quiet(model, tmp_path / "run") as recorder:
        for batch in loader:
            with recorder.step():
                model(batch).sum().backward()
    events = open_run(tmp_path / "run").events(0, kinds=[EventKind.DATA])
    assert events.step.tolist() == [0, 1, 2, 3][: len(events)]
    assert len(events) >= 3


def test_torch_keeps_the_names_that_the_recorder_attaches_to() -> None:
    """If this fails, check the recorder with the new torch version."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    needs_pinned_torch()
    assert all(callable(getattr(FSDPParamGroup, name)) for name in unit_hooks.WRAPPED_METHODS)
    assert hasattr(torch.utils.checkpoint, "_recomputation_hook")
    assert callable(torch.utils.data.dataloader._BaseDataLoaderIter.__next__)


@pytest.mark.parametrize(("fails", "timeout_s"), [(False, 10.0), (True, 0.3)])
def test_the_end_waits_for_the_device_and_only_briefly_behind_an_error(
    fake_ranks: None, tmp_path: Path, fails: bool, timeout_s: float
) -> None:
    recorder = quiet(sharded_model(), tmp_path / "run")
    journal = recorder._attachment.session.journal  # type: ignore[union-attr]
    settled: list[float] = []
    journal.settle = lambda timeout: settled.append(timeout) or 0  # type: ignore[assignment]
    with contextlib.suppress(ValueError), recorder:
        if fails:
            raise ValueError("the training's own error")
    assert settled == [pytest.approx(timeout_s, rel=0.5)]
