"""Record each sharder and mesh with plain steps, with all ranks alike and with ranks apart.

    torchrun ... -m tests.distributed.plain_steps_script FOLDER CASE ...

For each case, FOLDER/<case> receives the runs `whole` (each step in detail), `alike` (the ranks
have the same plain steps) and `apart` (in each step, one half of the ranks is plain). `seen.json`
has what each rank saw: losses without and with the recorder, and the collectives of its black box.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_inspect import Recorder
from fsdp_inspect.recording.overhead import DetailSchedule
from fsdp_inspect.recording.torch_api.process_groups import release_process_groups
from tests.distributed import dimension_driver
from tests.distributed.dimension_driver import BATCH, LAYOUTS, WIDTH, Training
from tests.distributed.profiled_sharders import SHARDERS

NUM_STEPS = 14
FIRST_PLAIN = 4
BLOCK = 2
EVALUATED = (4, 6)
"""Steps after which the model is evaluated: a plain and a detailed one begins then."""
EVALUATING = ("fsdp2", "fsdp1", "ddp")


def is_detailed(step: int) -> bool:
    """Whether a step of the run `alike` is detailed."""
    return step < FIRST_PLAIN or (step - FIRST_PLAIN) // BLOCK % 2 == 1


class _Chosen(DetailSchedule):
    """A schedule that the test chooses."""

    def __init__(self, choice: Callable[[int], bool]) -> None:
        super().__init__(num_first=0, budget=1.0)
        self._choice = choice

    def is_detailed(self, step: int) -> bool:
        return self._choice(step)


def train(training: Training, recorder: Recorder | None, *, evaluates: bool) -> list[float]:
    """Train, with an evaluation after some steps if asked; returns the losses."""
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(NUM_STEPS):
        losses.append(training.step(torch.randn(BATCH, WIDTH, generator=generator)))
        if recorder is not None:
            recorder.log(loss=losses[-1])
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and step in EVALUATED:
            with torch.no_grad():
                training.model(torch.randn(BATCH, WIDTH, generator=generator))
    return losses


def watch(
    make: Callable[[], Training], folder: Path, chosen: Callable[[int], bool], *, evaluates: bool
) -> Any:
    """Record a training whose detailed steps are chosen; returns losses, notes and collectives."""
    torch.manual_seed(0)
    training = make()
    with Recorder(training.model, path=folder, print_verdict=False, memory_steps=()) as recorder:
        attachment = recorder._attachment
        assert attachment is not None
        assert attachment._control is not None
        attachment._control.schedule = _Chosen(chosen)
        losses = train(training, recorder, evaluates=evaluates)
        box = attachment.session.black_box
        assert box is not None
        orders = sorted((each.group.ranks, each.count, each.last) for each in box.orders)
        problems = recorder.problems
    return {"losses": losses, "orders": orders, "problems": problems}


def fail(folder: Path) -> None:
    """Raise in the forward of a layer in a plain step, on all ranks."""
    training = SHARDERS["fsdp2"]()
    layer = training.model.layers[1]  # type: ignore[index]

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("planted")

    with (
        contextlib.suppress(ArithmeticError),
        Recorder(training.model, path=folder, print_verdict=False, memory_steps=()) as recorder,
    ):
        attachment = recorder._attachment
        assert attachment is not None
        assert attachment._control is not None
        attachment._control.schedule = _Chosen(is_detailed)
        optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01)
        for step in range(NUM_STEPS):
            if step == FIRST_PLAIN + 1:
                layer.forward = types.MethodType(forward, layer)
            training.step(torch.randn(BATCH, WIDTH))
            optimizer.step()
            optimizer.zero_grad()


def main(folder: Path, *cases: str) -> None:
    """Run this rank's part of every case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dimension_driver.SLOW_S = 0.0
    rank = dist.get_rank()
    for case in cases:
        make = SHARDERS[case] if case in SHARDERS else LAYOUTS[case]
        torch.manual_seed(0)
        runs: dict[str, Callable[[int], bool]] = {
            "whole": lambda step: True,
            "alike": is_detailed,
            "apart": lambda step: step < FIRST_PLAIN or (step + rank) % 2 == 0,
        }
        evaluates = case in EVALUATING
        seen = {"none": {"losses": train(make(), None, evaluates=evaluates)}}
        for name, chosen in runs.items():
            seen[name] = watch(make, folder / case / name, chosen, evaluates=evaluates)
        (folder / case / f"seen{rank}.json").write_text(json.dumps(seen))
        dist.barrier()
    if "fsdp2" in cases:
        fail(folder / "failed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    release_process_groups()
