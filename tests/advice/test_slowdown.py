"""The slowdown of compute that hides communication, and its cost in a plan (R24)."""

from dataclasses import replace

import pytest

from fsdp_inspect.advice.plan_scores import AS_RECORDED, PlanScorer
from fsdp_inspect.advice.plan_simulator import Paid, Slowdown, hidden_ns
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.suggestions import Narrator
from fsdp_inspect.analysis.contention import Contention
from fsdp_inspect.simulation.recorded import Execution
from fsdp_inspect.simulation.schedule import SimulatedStep, Span
from fsdp_inspect.trace.codes import EventKind, Phase
from tests.advice.test_advise import blocks
from tests.advice.test_findings import evidence_of
from tests.simulation.test_recorded import MS, as_run

CLEAR = Contention(0, 10, 1.2, 1.1, 1.4, True, None, ())


def test_a_clear_slowdown_is_charged_with_its_spread():
    slowdown = Slowdown.of(CLEAR, is_emulated=False)
    assert slowdown.is_measured
    assert slowdown.paid(1000) == Paid(200, 100, 400)
    assert slowdown.paid(-1000) == Paid(-200, -100, -400)


@pytest.mark.parametrize(
    ("contention", "is_emulated", "reason"),
    [
        (CLEAR, True, "emulated links take no resources from compute"),
        (replace(CLEAR, is_clear=False), False, "the times of single passes vary by more"),
        (replace(CLEAR, slowdown=0.9), False, "the times of single passes vary by more"),
        (replace(CLEAR, slowdown=None, reason="No pass ran alone."), False, "no pass ran alone"),
        (None, False, "no timed step exists"),
    ],
)
def test_what_is_not_clear_is_not_charged_and_the_reason_is_kept(contention, is_emulated, reason):
    slowdown = Slowdown.of(contention, is_emulated=is_emulated)
    assert not slowdown.is_measured
    assert slowdown.reason.startswith(reason)
    assert slowdown.paid(1000) == Paid()


def span(kind: EventKind, start: int, end: int) -> Span:
    return Span(kind, 0, Phase.FORWARD, 0, start, start, end)


def test_hidden_is_communication_beside_compute_each_instant_once():
    spans = [
        span(EventKind.COMPUTE, 0, 100),
        span(EventKind.ALL_GATHER, 50, 150),
        span(EventKind.REDUCE_SCATTER, 60, 90),
        span(EventKind.ALL_GATHER_COPY_OUT, 0, 20),
    ]
    assert hidden_ns(SimulatedStep(0, 150, spans)) == 50


def test_a_plan_is_charged_for_what_it_hides_more_and_the_recorded_one_is_not():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.HOST)
    choice = Choice(forward_prefetch=1)
    free, charged = PlanScorer(run), PlanScorer(run, slowdown=Slowdown(1.2, 1.1, 1.4))
    assert charged.score(AS_RECORDED) == free.score(AS_RECORDED)
    saved = free.recorded.step_ns - free.score(choice).step_ns
    paid = charged.score(choice).paid
    # The saved waits become hidden: the whole gain of the plan.
    assert paid.value_ns == pytest.approx(0.2 * saved, rel=0.02)
    assert charged.score(choice).step_ns == free.score(choice).step_ns + paid.value_ns
    low, high = charged.range_ns(choice)
    assert low <= charged.score(choice).step_ns <= high
    assert high - low >= paid.high_ns - paid.low_ns


def test_a_change_that_hides_more_is_a_risk_if_the_slowdown_is_unknown():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.BLOCKING_HOST)
    unknown = Slowdown.of(replace(CLEAR, slowdown=None, reason="No pass ran."), is_emulated=False)
    evidence = evidence_of()
    for slowdown, is_risk in ((unknown, True), (Slowdown(1.2, 1.1, 1.4), False)):
        narrator = Narrator(PlanScorer(run, slowdown=slowdown), evidence)
        hiding = narrator.proposal(Choice(async_gathers=True, forward_prefetch=1))
        waiting = narrator.proposal(Choice(reshard=False))
        assert any("may slow the compute that hides it" in each for each in hiding.risks) == is_risk
        assert not any("slow the compute" in each for each in waiting.risks)
