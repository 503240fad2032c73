"""Code of the user that torch calls for its own classes of tensors notices no recorder."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from fsdp_inspect import Recorder
from fsdp_inspect.analysis.correctness import check_training
from fsdp_inspect.recording.accumulation_watch import state_of
from fsdp_inspect.recording.torch_api.autograd import versions_of
from fsdp_inspect.store.reader import open_run

STEPS = 8


class Listed(torch.Tensor):
    """A class that lists the functions of torch that receive its tensors."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(getattr(func, "__qualname__", func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Strict(torch.Tensor):
    """A class that allows the functions of its table, and no other one."""

    TABLE = {  # noqa: RUF012
        torch.Tensor.item: lambda tensor: 42.0,
        torch.Tensor.__bool__: lambda tensor: True,
        torch.Tensor.__getitem__: lambda tensor, key: "an element",
        torch.Tensor.nonzero: lambda tensor: "places",
        torch.Tensor.__format__: lambda tensor, form: "a text",
    }

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.TABLE[func](*args, **(kwargs or {}))


def batches() -> Iterator[dict[str, torch.Tensor]]:
    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack(rows), "attention_mask": torch.ones(2, 6).as_subclass(Listed)}

    rows = [torch.randint(0, 16, (6,)).as_subclass(Listed) for _ in range(2 * STEPS)]
    yield from DataLoader(rows, batch_size=2, collate_fn=collate)


def train(path: Path | None) -> tuple[list[str], list[float]]:
    """The functions that saw tensors of the class, and the losses; `path`: the recording."""
    torch.manual_seed(0)
    Listed.calls.clear()
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    fully_shard(model[1])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    recorder = None if path is None else Recorder(model, path=path, numerics_every=2)
    losses = []
    with contextlib.nullcontext() if recorder is None else recorder:
        for batch in batches():
            with contextlib.nullcontext() if recorder is None else recorder.step():
                logits = model(batch["x"]).clone()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["x"].flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                assert loss[loss > 0].sum()
                losses.append(loss.item())
                if recorder is not None:
                    recorder.log(loss=loss)
    return list(Listed.calls), losses


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a class's output is a view
def test_a_class_of_tensors_sees_the_same_calls_as_without_the_recorder(
    one_rank: None, tmp_path: Path
) -> None:
    plain, recorded = train(None), train(tmp_path / "run")
    assert recorded == plain
    assert len(plain[0]) > 10 * STEPS
    assert open_run(tmp_path / "run").notes == []


def test_parameters_of_a_class_see_the_same_calls(one_rank: None, tmp_path: Path) -> None:
    def use(path: Path | None) -> list[str]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Listed))
        assert type(model[0].weight) is Listed
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        Listed.calls.clear()
        recorder = None if path is None else Recorder(model, path=path, numerics_every=3)
        with contextlib.nullcontext() if recorder is None else recorder:
            for _ in range(STEPS):
                with contextlib.nullcontext() if recorder is None else recorder.step():
                    model(torch.ones(2, 8)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return list(Listed.calls)

    plain = use(None)
    assert len(plain) > STEPS
    assert use(tmp_path / "run") == plain


def test_a_class_whose_values_torch_cannot_read_is_looked_at_without_them() -> None:
    """As the weights of torchao's float8 are."""
    weight = nn.Parameter(torch.ones(4).as_subclass(Listed))
    assert len(state_of(weight)) == len(versions_of(weight))
    assert len(state_of(nn.Parameter(torch.ones(4)))) > len(versions_of(weight))


def test_a_table_of_methods_finds_them_while_the_recorder_is_attached(
    one_rank: None, tmp_path: Path
) -> None:
    def use() -> list[Any]:
        tensor = torch.ones(2).as_subclass(Strict)
        return [tensor.item(), bool(tensor), tensor[0], tensor.nonzero(), f"{tensor:.2}"]

    model = nn.Linear(4, 4)
    fully_shard(model)
    expected = use()
    with Recorder(model, path=tmp_path / "run") as recorder:
        for _ in range(3):
            with recorder.step():
                model(torch.ones(2, 4)).sum().backward()
                assert use() == expected
    with pytest.raises(KeyError):
        torch.ones(2).as_subclass(Strict).sum()


def test_a_default_device_of_the_script_is_not_that_of_the_recorders_own_tensors(
    one_rank: None, tmp_path: Path
) -> None:
    model = nn.Linear(8, 4)
    fully_shard(model)
    # AdamW of torch 2.9 and 2.11 reads a value of a tensor on the default device.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 8)
    torch.set_default_device("meta")
    try:
        assert torch.empty(1).is_meta
        with Recorder(model, path=tmp_path / "run", numerics_every=4) as recorder:
            for _ in range(STEPS):
                with recorder.step():
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        torch.set_default_device(None)

    run = open_run(tmp_path / "run")
    assert run.notes == []
    assert "gradients" not in check_training(run).not_checked
    [record] = run.ranks
    assert record.training is not None
    assert all(None not in each.weighted for each in record.training.updates)


class Operators(TorchDispatchMode):
    """Counts all operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts all functions that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(getattr(func, "__qualname__", func))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Operators, Functions])
def test_a_mode_of_the_script_sees_the_same_calls(
    kind: type[Operators | Functions], one_rank: None, tmp_path: Path
) -> None:
    def use(path: Path | None) -> Counter[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(12 * STEPS, 8), batch_size=2)  # 22 steps are in detail
        recorder = None if path is None else Recorder(model, path=path, overhead="1%")
        with contextlib.nullcontext() if recorder is None else recorder, kind() as mode:
            for batch in loader:
                with contextlib.nullcontext() if recorder is None else recorder.step():
                    loss = model(batch).square().mean()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        return mode.counts

    plain = use(None)
    assert sum(plain.values()) > 100 * STEPS
    assert use(tmp_path / "run") == plain
    found = open_run(tmp_path / "run")
    memory = "Step 2 is not a memory step: another torch dispatch mode was active when it began."
    assert [memory in note for note in found.notes] == [True] * (kind is Operators)
    assert check_training(found) is not None
