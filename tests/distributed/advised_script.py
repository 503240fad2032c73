"""Train small models as written, and with the changes that `advise` can print.

    torchrun --nproc-per-node 2 advised_script.py FOLDER record LOOP ...
    torchrun --nproc-per-node 2 advised_script.py FOLDER train LOOP ...

`record` writes a run of each loop to FOLDER. `train` reads FOLDER/changes.json, a list of
`Advised`. Rank 0 writes the losses of the loops, and then of each change, to FOLDER/losses.json.
If a change raises, its error stands in place of its losses.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_inspect import Plan, Recorder, apply_plan
from tests.distributed.foreign_loops import tokens
from tests.distributed.loop_driver import WIDTH, Adapted, Block, Model, loss_of

STEPS = 6
MICROBATCHES = {"microbatches": 3, "clipped": 2, "no_sync": 3, "wrapped": 2, "ddp": 2}
"""Microbatches of the loops that accumulate gradients."""
LOOPS: tuple[str, ...] = (
    "plain", "microbatches", "clipped", "no_sync", "tied", "adapters", "half_adapters",
    "attention", "shared_block", "teacher", "reference", "evaluated", "probed", "wrapped", "ddp",
)  # fmt: skip
WITH_TEACHER = ("teacher", "reference")


@dataclass(frozen=True)
class Advised:
    """A change of a loop: the code that `advise` prints, or the plan that it writes."""

    loop: str
    setting: str
    """The setting of the plan that changes, or the rule of a finding."""
    code: str = ""
    plan: str = ""


class Dropping(Block):
    """A block whose backward needs the random numbers of its forward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.1)


class Distilled(nn.Module):
    """A student and its teacher, with a root each: a moving average of the student, or fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Model(), Model().requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The student's logits, pulled to those of the teacher."""
        with torch.no_grad():
            target = self.teacher(batch)
        logits = self.student(batch)
        return logits + (logits - target) ** 2


def build(loop: str) -> nn.Module:
    """The model of a loop, not sharded."""
    torch.manual_seed(0)
    if loop in WITH_TEACHER:
        return Distilled()
    model = Model()
    if loop == "plain":
        model.layers = nn.ModuleList(Dropping() for _ in range(3))
    if loop == "attention":  # it reads the weights of its output projection without calling it
        settings = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 256, "batch_first": True}
        model.layers = nn.ModuleList(nn.TransformerEncoderLayer(**settings) for _ in range(3))
    if loop == "shared_block":  # as in ALBERT
        model.repeats = 2
    if loop == "tied":
        model.head.weight = model.embedding.weight
        nn.init.normal_(model.head.weight, std=0.02)
    if "adapters" in loop:
        model.requires_grad_(requires_grad=False)
        for layer in model.layers:
            layer.up = Adapted(layer.up, is_quantized=False)  # type: ignore[assignment, arg-type]
    return model


class Sharded:
    """A model sharded by its own calls, changed as a reader of the printed code would change it."""

    def __init__(self, loop: str, change: Advised) -> None:
        self.loop, self.change = loop, change
        self.mesh = mesh()
        self.policy = MixedPrecisionPolicy()
        if loop == "half_adapters":
            self.policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        self.model = build(loop)
        if loop in ("wrapped", "ddp"):
            self.model = self._wrap()
        elif change.plan:
            apply_plan(self.model, Plan.from_toml(change.plan), self.mesh)
        else:
            self._shard()

    def _wrap(self) -> nn.Module:
        """FSDP1 or DDP: a printed call adds its arguments to those of the script."""
        name = "DistributedDataParallel" if self.loop == "ddp" else "FullyShardedDataParallel"
        wrapper = partial(DistributedDataParallel, find_unused_parameters=True)
        if self.loop == "wrapped":
            policy = ModuleWrapPolicy({Block})
            device = torch.device("cpu")
            wrapper = partial(FullyShardedDataParallel, auto_wrap_policy=policy, device_id=device)
        code = "" if self._is_in_loop else self.change.code
        lines = (line for line in code.splitlines() if not line.endswith(f"import {name}"))
        code = "\n".join(line.replace(f" {name}, ", " ") for line in lines)
        scope = self._scope(**{name: wrapper})
        exec(code, scope)
        is_wrapped = f"{name}(" in code or "fully_shard(" in code
        return scope["model"] if is_wrapped else wrapper(scope["model"])

    def _shard(self) -> None:
        code, setting = self.change.code, self.change.setting
        if setting == "checkpointing":
            exec(code, self._scope())
        new, gone = self._regrouped()
        kinds: tuple[type[nn.Module], ...] = (Block, nn.TransformerEncoderLayer)
        kinds += () if self.loop == "tied" else (nn.Embedding,)
        names = [name for name, each in self.model.named_modules() if isinstance(each, kinds)]
        for name in names:
            if name not in gone:
                self._call_changed(name, is_root=False)
        exec(new, self._scope(fully_shard=self._call))
        for name in ("student", "teacher") if self.loop in WITH_TEACHER else ("",):
            if not isinstance(self.model.get_submodule(name), FSDPModule):
                self._call_changed(name, is_root=True)
        if setting not in ("checkpointing", "grouping") and not self._is_in_loop:
            lines = [line for line in code.splitlines() if "fully_shard(" not in line]
            exec("\n".join(lines), self._scope())

    def _regrouped(self) -> tuple[str, set[str]]:
        """The printed calls of new units, and the modules whose own calls they replace."""
        code = self.change.code
        if self.change.setting != "grouping":
            return "", set()
        scope = self._scope()
        if code.startswith("# remove"):
            exec(code, scope)
            return "", set(scope["names"])
        sharded: list[nn.Module] = []

        def note(target: Any, **_: object) -> None:
            sharded.extend(target if isinstance(target, list) else [target])

        exec(code, self._scope(fully_shard=note))
        named = {name: set(each.modules()) for name, each in self.model.named_modules() if name}
        return code, {name for name, inner in named.items() if inner & set(sharded)}

    def _call_changed(self, name: str, *, is_root: bool) -> None:
        """A call of the script with the arguments of the printed call."""
        module, lines = self.model.get_submodule(name), self.change.code.splitlines()
        # torch keeps the root of a teacher unsharded, where no backward reshards it.
        own = {"reshard_after_forward": True} if name == "teacher" else {}
        scope = self._scope(module=module, block=module, fully_shard=partial(self._call, **own))
        left = lines[0].partition(" and those of ")[2] if lines else ""
        is_left = (is_root and "except the root" in self.change.code) or name in eval(left or "()")
        for at, line in enumerate(lines if self.change.setting != "grouping" else ()):
            target = re.match(r"fully_shard\((.*), mesh=mesh", line)
            if target and eval(target[1], scope) is module and not is_left:
                exec("\n".join(each for each in lines[:at] if "fully_shard(" not in each), scope)
                exec(line, scope)
                return
        self._call(module, **own)

    def _call(self, module: Any, **settings: Any) -> nn.Module:
        given = {"mesh": self.mesh, "mp_policy": self.policy, **settings}
        return fully_shard(module, **given)

    @property
    def _is_in_loop(self) -> bool:
        words = ("is_last_microbatch", "no_sync", "set_requires_gradient_sync")
        return any(word in self.change.code for word in words)

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Run the printed lines of each microbatch; without them, the loop's own."""
        found = re.search("^with (.*):", self.change.code, re.MULTILINE)
        scope = self._scope(is_last_microbatch=is_last, nullcontext=nullcontext)
        if self.loop in ("wrapped", "ddp"):
            is_within = found and ("is_last_microbatch" in found[1] or not is_last)
            return eval(found[1], scope) if is_within else nullcontext()
        if self._is_in_loop:
            exec(self.change.code, scope)
        elif self.loop == "no_sync":
            self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    def _scope(self, **names: object) -> dict[str, Any]:
        known = {"model": self.model, "mesh": self.mesh, "torch": torch, "device_type": "cpu"}
        known |= {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
        known |= {"MixedPrecisionPolicy": MixedPrecisionPolicy}
        return {**known, **names}


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def train(loop: str, change: Advised, recorder: Callable[..., Any] | None = None) -> list[float]:
    """The losses of rank 0."""
    sharded = Sharded(loop, change)
    model = sharded.model
    pairs = []
    if loop == "teacher":  # as MoCo and DINO
        pairs = list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    count, losses = MICROBATCHES.get(loop, 1), list[float]()

    def step(number: int) -> None:
        torch.manual_seed(number)
        for at in range(count):
            batch = tokens(number * count + at)
            with sharded.microbatch(is_last=at == count - 1):
                loss = loss_of(model(batch), batch)
                (loss / count).backward()
            losses.append(loss.item())
        if loop == "clipped":
            nn.utils.clip_grad_norm_(trained, 0.1)
        if loop == "probed":  # between the backward and the update
            with torch.no_grad():
                losses.append(loss_of(model(tokens(99)), tokens(99)).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for teacher, student in pairs:
                teacher.lerp_(student, 0.2)
            if loop == "evaluated":
                losses.append(loss_of(model(tokens(99)), tokens(99)).item())

    with recorder(model, optimizer=optimizer) if recorder else nullcontext() as watching:
        for number in range(STEPS):
            with watching.step() if watching else nullcontext():
                step(number)
    return losses


def record(folder: Path, loops: Iterable[str]) -> None:
    for loop in loops:
        recorder = partial(Recorder, path=folder / loop, print_verdict=False)
        train(loop, Advised(loop, ""), recorder)


def outcome_of(change: Advised) -> dict[str, Any]:
    try:
        return {"losses": train(change.loop, change)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    folder, mode, *loops = Path(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if mode == "record":
        record(folder, loops)
    else:
        listed = json.loads((folder / "changes.json").read_text())
        changes = [Advised(**each) for each in listed]
        found = [outcome_of(each) for each in (*(Advised(loop, "") for loop in loops), *changes)]
        if dist.get_rank() == 0:
            (folder / "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
