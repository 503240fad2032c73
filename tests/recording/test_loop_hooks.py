"""Data time counts on the training thread only, and an update is its outermost step."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fsdp_inspect.recording.clocks import HostClock
from fsdp_inspect.recording.loop_hooks import LoopHooks
from fsdp_inspect.recording.patches import Patches
from fsdp_inspect.recording.session import Session
from fsdp_inspect.recording.units import ProcessGroups
from fsdp_inspect.trace.codes import EventKind

_KIND, _START, _END = 3, 16, 17


SLEEP_S = 0.02


class Slow(torch.optim.AdamW):
    """Works before and after the update of its parent."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(SLEEP_S)
        loss = super().step(closure)
        time.sleep(SLEEP_S)
        return loss


class Both(torch.optim.Optimizer):
    """Steps two optimizers within its own step."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.parts = [torch.optim.SGD([each], lr=0.1) for each in parameters]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(SLEEP_S)
        for part in self.parts:
            part.step()
        time.sleep(SLEEP_S)


class Broken(torch.optim.AdamW):
    """Its first update fails."""

    has_failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise ValueError
        return super().step(closure)


class Careful(Both):
    """Steps a part that may fail, and goes on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with contextlib.suppress(ValueError):
            self.parts[0].step()


def updates_recorded(
    *optimizers: torch.optim.Optimizer, with_backward: bool = True
) -> tuple[list[int], int]:
    """The duration of each recorded update, ns, and the number of ends of updates."""
    rows: list[tuple[int, ...]] = []
    ended = list[torch.optim.Optimizer]()
    session = Session(HostClock(), rows.append, ProcessGroups())
    patches = Patches()
    LoopHooks(session, None, ended.append).attach(patches)
    try:
        for optimizer in optimizers:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            if with_backward:
                torch.autograd.backward(sum((each * each).sum() for each in parameters))
            with contextlib.suppress(ValueError):
                optimizer.step()
    finally:
        patches.undo()
    found = [row for row in rows if row[_KIND] == EventKind.OPTIMIZER]
    return [row[_END] - row[_START] for row in found], len(ended)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]


@pytest.mark.parametrize("kind", [Slow, Both])
def test_an_update_is_the_outermost_step(kind: Any) -> None:
    torch.optim.AdamW(parameters())  # from now on, torch calls the hooks of its step
    durations, num_ended = updates_recorded(kind(parameters()))
    assert num_ended == len(durations) == 1
    assert durations[0] >= 2 * SLEEP_S * 1e9


@pytest.mark.parametrize("with_backward", [True, False])
def test_an_update_that_failed_does_not_hide_the_next_one(with_backward: bool) -> None:
    """Without a backward, a script sets gradients by hand."""
    torch.optim.AdamW(parameters())
    optimizer = Broken(parameters())
    durations, num_ended = updates_recorded(optimizer, optimizer, with_backward=with_backward)
    assert num_ended == len(durations) == 1


def test_a_part_that_fails_ends_no_update_of_its_own() -> None:
    optimizer = Careful(parameters())
    optimizer.parts[0] = Broken(parameters())
    durations, num_ended = updates_recorded(optimizer, optimizer, optimizer)
    assert num_ended == len(durations) == 3


def test_an_optimizer_is_not_kept_alive() -> None:
    optimizer = Broken(parameters())
    patches, session = Patches(), Session(HostClock(), lambda row: None, ProcessGroups())
    LoopHooks(session, None, lambda optimizer: None).attach(patches)
    try:
        for each in (optimizer, both := Both(parameters())):
            with contextlib.suppress(ValueError):
                each.step()
        seen = [weakref.ref(each) for each in (optimizer, both, *both.parts)]
        del optimizer, both, each
        gc.collect()
        assert [each() for each in seen] == [None] * 4
    finally:
        patches.undo()


class Hidden(torch.optim.Optimizer):
    """Steps others that no attribute shows."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        parts = [torch.optim.SGD([each], lr=0.1) for each in parameters]
        self.list_parts = lambda: parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.list_parts():
            part.step()


class Holder(torch.optim.SGD):
    """Holds an optimizer that it does not step."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.other = torch.optim.SGD(parameters, lr=0.1)


def checked(optimizer: torch.optim.Optimizer, named: Any) -> list[list[tuple[str, Any]]]:
    """The optimizers whose updates are checked, in each of three updates."""
    calls = list[tuple[str, Any]]()

    class Checks:
        def before_update(self, each: Any, *, steps_others: bool) -> None:
            if not steps_others:
                calls.append(("before", each))

        def after_update(self, each: Any) -> None:
            calls.append(("after", each))

    session: Any = Session(HostClock(), lambda row: None, ProcessGroups())
    patches, found = Patches(), []
    LoopHooks(session, named, lambda optimizer: None).attach(patches)
    session.checks = Checks()
    try:
        for _ in range(3):
            calls.clear()
            optimizer.step()
            found.append(list(calls))
    finally:
        patches.undo()
    return found


@pytest.mark.parametrize("kind", [Both, Hidden])
@pytest.mark.parametrize("named", ["none", "outer", "inner"])
def test_an_optimizer_that_steps_others_is_not_checked_itself(kind: Any, named: str) -> None:
    """A container of torchtitan hid that its optimizers hold copies of the parameters."""
    optimizer = kind(parameters())
    parts = optimizer.parts if kind is Both else optimizer.list_parts()
    updates = checked(optimizer, {"none": None, "outer": [optimizer], "inner": parts}[named])
    of_parts = [(word, each) for each in parts for word in ("before", "after")]
    assert updates[1:] == [of_parts] * 2
    if kind is Both:
        assert updates[0] == of_parts
    else:  # the first update shows it
        assert updates[0] == [("before", optimizer), *of_parts]


def test_an_optimizer_that_is_stepped_in_a_hook_after_another_one_hides_nothing() -> None:
    first, second = torch.optim.SGD(parameters(), lr=0.1), torch.optim.SGD(parameters(), lr=0.1)
    first.register_step_post_hook(lambda *_: second.step())
    *_, last = checked(first, None)
    assert [each for word, each in last if word == "after"] == [second, first]


def test_an_optimizer_that_holds_another_one_is_checked_from_its_second_update_on() -> None:
    optimizer = Holder(parameters())
    _, *later = checked(optimizer, None)
    assert later == [[("before", optimizer), ("after", optimizer)]] * 2


def test_a_closure_that_runs_the_backward_ends_one_update() -> None:
    optimizer = torch.optim.LBFGS(parameters(), max_iter=2)

    class Closed(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for each in (optimizer, Closed(parameters(), max_iter=2)):
        values = [part for group in each.param_groups for part in group["params"]]

        def closure(values: list[torch.nn.Parameter] = values) -> torch.Tensor:
            loss = torch.stack([(part * part).sum() for part in values]).sum()
            loss.backward()
            return loss

        each.step = functools.partial(each.step, closure)  # type: ignore[method-assign]
        durations, num_ended = updates_recorded(each)
        assert num_ended == len(durations) == 1


def kinds_recorded(load: Any) -> list[int]:
    rows: list[tuple[int, ...]] = []
    session = Session(HostClock(), rows.append, ProcessGroups())
    patches = Patches()
    LoopHooks(session, None, lambda optimizer: None).attach(patches)
    try:
        load(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    finally:
        patches.undo()
    return [row[_KIND] for row in rows]


def test_loading_on_the_training_thread_is_data_time() -> None:
    assert kinds_recorded(list) == [EventKind.DATA] * 4  # three batches, and the end


def test_loading_ahead_on_another_thread_is_not() -> None:
    def load_elsewhere(loader: Any) -> None:
        thread = threading.Thread(target=list, args=(loader,))
        thread.start()
        thread.join()

    assert kinds_recorded(load_elsewhere) == []


def test_batches_and_passes_are_counted() -> None:
    session = Session(HostClock(), lambda row: None, ProcessGroups())
    patches = Patches()
    LoopHooks(session, None, lambda optimizer: None).attach(patches)
    data = TensorDataset(torch.arange(6.0))
    try:
        first, second = DataLoader(data, batch_size=2), DataLoader(data, batch_size=3)
        list(first), next(iter(second)), list(zip(first, second, strict=False))
    finally:
        patches.undo()
    counts = session.num_batches, session.num_loader_passes, session.last_ended_pass
    assert counts == (3 + 1 + 5, 4, 4)
