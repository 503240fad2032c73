"""Findings use the terms of the run's sharder."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_inspect.advice.evidence import SIMULATED_PLANS, Effect, Finding
from fsdp_inspect.advice.findings import in_words_of
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.analysis.units import measure_units
from fsdp_inspect.errors import MissingDataError
from fsdp_inspect.simulation.recorded import measure_work
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.run import FLAT_PARAM
from fsdp_inspect.trace.sharders import (
    DDP,
    DEEPSPEED,
    FSDP1,
    FSDP2,
    SIMPLE_FSDP,
    ZERO2,
    ZERO3,
    traits_of,
)
from tests.builders import InMemoryRun, steady_run


def finding(rule: str) -> Finding:
    effect = Effect(sentence="One all-gather becomes many.", predicted_by=SIMULATED_PLANS)
    return Finding(rule, (), "s", "e", ("Call fully_shard.",), effect=effect, snippet="fully_shard")


def run_of(sharder: str) -> InMemoryRun:
    run = steady_run()
    return replace(run, manifest=run.manifest.model_copy(update={"sharder": sharder, "plan": {}}))


def test_findings_of_fsdp2_stay_as_they_are() -> None:
    assert list(in_words_of(FSDP2, [finding("R1")])) == [finding("R1")]


def test_a_finding_of_fsdp1_names_its_own_setting_and_the_simulated_plans() -> None:
    [found] = in_words_of(FSDP1, [finding("R1")])
    assert "auto_wrap_policy=ModuleWrapPolicy" in found.snippet
    assert found.effect.predicted_by == SIMULATED_PLANS


@pytest.mark.parametrize(
    ("sharder", "rule"),
    [(FSDP1, "R27"), (FSDP1, "R11"), (DDP, "R29"), (ZERO2, "R3"), (ZERO3, "R1")],
)
def test_a_rule_without_a_counterpart_is_left_out(sharder: str, rule: str) -> None:
    assert list(in_words_of(sharder, [finding(rule)])) == []


@pytest.mark.parametrize("rule", ["R32", "R19", "R21", ""])
def test_rules_about_no_setting_of_a_sharder_stay(rule: str) -> None:
    assert list(in_words_of(DDP, [finding(rule)])) == [finding(rule)]


@pytest.mark.parametrize("sharder", [DDP, *sorted(DEEPSPEED), SIMPLE_FSDP])
def test_no_plan_of_another_sharder_is_simulated(sharder: str) -> None:
    run, title = run_of(sharder), traits_of(sharder).title
    with pytest.raises(MissingDataError, match=f": it uses {title}"):
        measure_work(run)
    advice = advise_run(run, AdviceRequest())
    assert advice.plan is None
    reason = "The buckets of run" if traits_of(sharder).has_buckets else f"it uses {title}"
    assert reason in (advice.refusal or "")
    words = " ".join(text for each in advice.findings for text in (*each.do, each.snippet))
    assert "fully_shard" not in words
    assert "reshard_after_forward" not in words


@pytest.mark.parametrize(
    ("units", "plan", "reason"),
    [
        ({}, {}, "has no observed plan"),
        ({"offload": True, "recorded_by": FLAT_PARAM}, None, "FSDP1 offloads"),
        ({"shard_group": -1, "replicate_group": 0}, None, "are replicated"),
    ],
)
def test_what_simulate_refuses_of_fsdp1_advise_refuses_in_the_same_words(
    units: dict[str, Any], plan: dict[str, Any] | None, reason: str
) -> None:
    run = steady_run()
    own = Plan(units=tuple(UnitPlan(modules=tuple(unit.modules)) for unit in run.manifest.units))
    settings = {**own.to_dict(), "fsdp1": {}} if plan is None else plan
    changed = [unit.model_copy(update=units) for unit in run.manifest.units]
    update = {"sharder": FSDP1, "plan": settings, "units": changed}
    run = replace(run, manifest=run.manifest.model_copy(update=update))
    with pytest.raises(MissingDataError, match=reason) as refused:
        measure_work(run)
    advice = advise_run(run, AdviceRequest())
    assert (advice.plan, advice.refusal) == (None, str(refused.value))


def test_a_bucket_has_no_time_of_a_pass_that_it_does_not_have() -> None:
    run = run_of(DDP)
    empty = replace(run, manifest=run.manifest.model_copy(update={"sharder": DDP}))
    assert empty.manifest.knows_fsdp is False
    assert len(measure_units(empty).units) == len(run.manifest.units)
