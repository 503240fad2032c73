"""The order in which steps of ZeRO-3 use parameters is kept once some steps are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdp_inspect.recording.sharders import zero3
from fsdp_inspect.recording.sharders.zero3 import UseTracer, Zero3
from fsdp_inspect.recording.torch_api.deepspeed_zero import ModuleHandle
from fsdp_inspect.trace.codes import NO_UNIT, UseEvent
from fsdp_inspect.trace.run import ModuleUse

BEGIN, ENTER, LEAVE = UseEvent.BEGIN, UseEvent.ENTER_FORWARD, UseEvent.LEAVE_FORWARD
GRADIENT = UseEvent.GRADIENT


class Tracing:
    """A tracer on a clock that the test advances."""

    def __init__(self, num_engines: int = 1) -> None:
        self.now = 0
        self.kept: list[tuple[list[Any], list[tuple[UseEvent, int, int]]]] = []
        session: Any = SimpleNamespace(clock=SimpleNamespace(host_now=lambda: self.now))
        sharder: Any = SimpleNamespace(engines=[None] * num_engines, keep_order=self._keep)
        self.tracer = UseTracer(session, sharder)

    def _keep(self, modules: Iterable[Any], events: Sequence[tuple[UseEvent, int, int]]) -> None:
        self.kept.append(([*modules], [*events]))

    def step(self, module: str, ns: int) -> None:
        """A step with one module, whose forward takes some time after a fetch of 1,000 ns."""
        self.tracer.note(BEGIN)
        self.tracer.note_module(ENTER, module)
        self.now += 1_000
        self.tracer.settle()
        self.now += ns
        self.tracer.note_module(LEAVE, module)
        self.tracer.end_step()


def test_three_equal_steps_keep_the_order_with_the_shortest_times() -> None:
    tracing = Tracing()
    for ns in (70, 50, 60, 10):
        tracing.step("block", ns)
    [(modules, events)] = tracing.kept
    assert modules == ["block"]
    assert events == [(BEGIN, 0, 0), (ENTER, 0, 0), (LEAVE, 0, 50)]
    assert tracing.tracer.is_over


def test_another_order_begins_the_count_again() -> None:
    tracing = Tracing()
    for module in ("a", "a", "b", "a", "a"):
        tracing.step(module, 5)
    assert not tracing.kept
    tracing.step("a", 5)
    assert len(tracing.kept) == 1


def test_no_order_is_kept_of_changing_or_huge_steps_and_of_several_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changing = Tracing()
    for number in range(40):
        changing.step("ab"[number % 2], 5)
    assert changing.tracer.is_over
    monkeypatch.setattr(zero3, "_MOST_EVENTS", 2)
    huge, several = Tracing(), Tracing(num_engines=2)
    for _ in range(4):
        huge.step("a", 5)
        several.step("a", 5)
    assert not changing.kept + huge.kept + several.kept


class Model(nn.Module):
    """A linear layer and a head with the same weight, as an engine marks them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)
        self.head.weight = self.first.weight
        for number, parameter in enumerate(self.parameters()):
            parameter.ds_id = 7 - number  # type: ignore[attr-defined]
        for module in self.modules():
            module.ds_external_parameters = lambda: ()  # type: ignore[assignment]


def test_modules_have_the_numbers_of_parameters_in_the_order_of_deepspeed() -> None:
    model = Model()
    handles = [
        ModuleHandle(engine=None, module=module, name=name, names=(), parameters=tuple(own))
        for name, module, own in (
            ("first", model.first, model.first.parameters()),
            ("head", model.head, [model.head.bias]),
        )
    ]
    sharder = Zero3.__new__(Zero3)
    sharder.units, sharder.num_changes = handles, 0
    sharder.keep_order([model.first, model.act, model.head], [(BEGIN, 0, 1), (GRADIENT, 6, 2)])
    assert sharder.uses is not None
    assert sharder.num_changes == 1
    assert sharder.uses.events == [(BEGIN, 0, 1), (GRADIENT, 1, 2)]
    assert sharder.uses.modules == [
        ModuleUse(unit=0, parameters=[1, 0]),
        ModuleUse(unit=NO_UNIT, parameters=[]),
        ModuleUse(unit=1, parameters=[2, 0]),
    ]
