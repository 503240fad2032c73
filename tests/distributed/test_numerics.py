"""Numerics steps on two gloo ranks: exact counts, and an unchanged training."""

import json
from pathlib import Path

import pytest

from fsdp_inspect.diagnosis.diagnose import ProblemClass
from fsdp_inspect.run import open_run
from fsdp_inspect.trace.numerics import Place
from tests.conftest import Torchrun

pytestmark = [pytest.mark.distributed]

SCRIPT = """
import contextlib, copy, json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fsdp_inspect import Recorder

kind, every = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
dtype = torch.bfloat16 if kind != "nan" else torch.float32
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).to(dtype)
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))

class Container(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters := list(parameters), {})
        self.parts = [torch.optim.AdamW(parameters[i::2], lr=1e-5) for i in range(2)]

    def step(self):
        for part in self.parts:
            part.step()

make = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9), "container": Container}.get(
    kind, lambda p: torch.optim.AdamW(p, lr=1e-5))
optimizer = make(model.parameters())

locals_of = lambda: [p.to_local() for p in model.parameters()]
shadows = [nn.Parameter(p.detach().double()) for p in locals_of()]
shadow_optimizer = make(shadows)

def count_lost(before, meant):
    lost = sum(int(((p == old) & m).sum()) for p, old, m in zip(locals_of(), before, meant))
    return [lost, sum(int(m.sum()) for m in meant)]

counts, losses, norms = [], [], []
recorder = Recorder(model, optimizer=optimizer, path="run", memory_steps=(), print_verdict=False,
                    numerics_every=every) if every >= 0 else contextlib.nullcontext()
with recorder:
    for step in range(6):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(8, 32, dtype=dtype)
        if kind == "nan" and step == 3 and rank == 1:
            x[0, 0] = float("nan")
        loss = model(x).square().mean()
        loss.backward()
        before = [p.detach().clone() for p in locals_of()]
        for shadow, p in zip(shadows, model.parameters()):
            shadow.grad = p.grad.to_local().double()
        old = [shadow.detach().clone() for shadow in shadows]
        shadow_optimizer.step()
        meant = [shadow.detach() != each for shadow, each in zip(shadows, old)]
        squares = torch.tensor(sum(float(p.grad.to_local().double().square().sum())
                                   for p in model[0].parameters()), dtype=torch.float64)
        dist.all_reduce(squares)
        norms.append(float(squares) ** 0.5)
        optimizer.step()
        counts.append(count_lost(before, meant))
        optimizer.zero_grad()
        losses.append(loss.item())
json.dump({"counts": counts, "losses": losses, "norms": norms}, open(f"found-{rank}", "w"))
"""


def train(run_ranks: Torchrun, folder: Path, kind: str, every: int) -> list[dict[str, list]]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    run_ranks("train.py", kind, str(every), cwd=folder)
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "container"])
def test_lost_updates_are_those_of_a_float64_shadow(
    run_ranks: Torchrun, tmp_path: Path, kind: str
) -> None:
    """torch 2.13: an update is intended exactly if a float64 copy of the optimizer changes it."""
    found = train(run_ranks, tmp_path, kind, every=2)
    run = open_run(tmp_path / "run")

    for rank in range(2):
        steps = run.source.numerics(rank)
        assert [step.step for step in steps] == [0, 2, 4]
        for step in steps:
            counted = [
                sum(each.num_lost for each in step.updates),
                sum(each.num_meant for each in step.updates),
            ]
            assert counted == found[rank]["counts"][step.step]
    numerics = run.numerics()
    assert numerics is not None
    assert numerics.units[0].gradient_norm == pytest.approx(found[0]["norms"][4], rel=1e-6)
    assert run.steps.numerics == (2, 4)
    assert [
        (each.place, each.declared, each.actual, len(each.units)) for each in numerics.dtypes
    ] == [
        ("parameter", None, "bfloat16", 3),
        ("gathered parameter", "bfloat16", "bfloat16", 3),
        ("forward output", "bfloat16", "bfloat16", 3),
        ("gradient", "bfloat16", "bfloat16", 3),
        ("reduction", "float32", "float32", 3),
        ("reduced gradient", "bfloat16", "bfloat16", 3),
        ("optimizer state", "bfloat16", "bfloat16", 3),
    ]
    assert not set(run.steps.timed) & {0, 2, 4}


def test_losses_are_equal_to_the_bit_with_and_without(run_ranks: Torchrun, tmp_path: Path) -> None:
    with_numerics = train(run_ranks, tmp_path / "with", "adamw", every=1)
    without = train(run_ranks, tmp_path / "without", "adamw", every=-1)
    assert [each["losses"] for each in with_numerics] == [each["losses"] for each in without]


def test_the_first_value_that_is_not_finite_is_located(run_ranks: Torchrun, tmp_path: Path) -> None:
    train(run_ranks, tmp_path, "nan", every=1)
    run = open_run(tmp_path / "run")

    found = run.diagnose()

    assert (found.problem, found.ranks, found.step) == (ProblemClass.NOT_FINITE, (1,), 3)
    numerics = run.numerics()
    assert numerics is not None
    first = numerics.first_non_finite
    assert first is not None
    assert (first.fqn, first.place, first.count) == ("0", Place.OUTPUT, 32)
    assert first.last_finite_step == 2
