"""The findings that precede the plan, and findings that never appear."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_inspect.advice.evidence import AND_HOST_WORK, Effect, Evidence, Finding
from fsdp_inspect.advice.findings import find_first_things
from fsdp_inspect.advice.gain_parts import attribute_gains
from fsdp_inspect.analysis.memory.allocator import AllocatorUse
from fsdp_inspect.analysis.plan_check.check import check_plan
from fsdp_inspect.analysis.verdict import StepFacts, Straggler, give_verdict
from fsdp_inspect.analysis.verdict.facts import OtherPart
from fsdp_inspect.trace.plan import Plan, UnitPlan
from fsdp_inspect.trace.sharders import DDP, ZERO3
from tests.builders import RunBuilder

FACTS = StepFacts(
    step_time_ns=100,
    compute_ns=95,
    data_ns=0,
    host_bound_ns=0,
    exposed_ns=5,
    floor_ns=5,
    other_ns=0,
)
STRAGGLER = Straggler(
    rank=3,
    host="",
    cost_ns=20,
    cost_low_ns=20,
    cost_high_ns=20,
    last_ratio=0.9,
    late_ns=5,
    phase="backward",
    meanwhile="forward",
    meanwhile_ns=4,
    like_rank=0,
    cost_ratio=0.2,
    waits_ns={},
)
UNITS = ("layers.0", "layers.1", "layers.2")
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def findings(
    facts: StepFacts = FACTS,
    *,
    units: dict[str, dict[str, Any]] | None = None,
    allocator: AllocatorUse | None = None,
    **manifest: Any,
) -> tuple[Finding, ...]:
    return find_first_things(evidence_of(facts, units=units, allocator=allocator, **manifest))


def evidence_of(
    facts: StepFacts = FACTS,
    *,
    units: dict[str, dict[str, Any]] | None = None,
    allocator: AllocatorUse | None = None,
    **manifest: Any,
) -> Evidence:
    builder = RunBuilder(UNITS, **manifest)
    for name, changes in (units or {}).items():
        builder.unit(name, **changes)
    builder.rank(0).step(0, 0, 100)
    run = builder.build()
    return Evidence(
        manifest=run.manifest,
        verdict=give_verdict(facts),
        plan_check=check_plan(run),
        allocator=allocator,
        causes_ns={},
        exposed_by_kind_ns={"reduce_scatter": 5},
        backward_gathers_ns=0,
    )


def rules(found: tuple[Finding, ...]) -> list[str]:
    """The rules of the findings, without those of every built unit: padding, float32."""
    return [each.rule for each in found if each.rule not in ("R30", "R14")]


def test_a_run_without_fault_has_no_finding():
    assert rules(findings()) == []


def test_a_straggler_comes_first_and_a_starved_input_beside_it_is_named_too():
    found = findings(replace(FACTS, straggler=STRAGGLER, data_ns=12, compute_ns=60))
    assert "straggler: it costs 20% of the step" in found[0].sentence
    assert (found[0].rule, found[0].limits) == ("R32", True)
    assert "Waiting for the next batch takes 12 ns" in found[1].sentence


def test_checkpoints_beside_another_limit_are_named():
    found = findings(replace(FACTS, straggler=STRAGGLER, between_ns=20))
    assert found[0].rule == "R32"
    assert "Checkpoints, evaluation or generation before each step take 20 ns" in found[1].sentence


def test_a_starved_host_is_the_first_finding():
    found = findings(replace(FACTS, host_bound_ns=30, compute_ns=65))
    assert rules(found) == ["R19"]
    assert found[0].limits


def test_one_connection_is_named_on_cuda_only():
    setting = {"environment": ONE_CONNECTION}
    assert rules(findings(device_type="cuda", **setting)) == ["R20"]
    assert rules(findings(device_type="cpu", **setting)) == []


def test_a_unit_with_most_parameters_is_named():
    large = findings(units={"layers.1": {"num_parameters": 900}})
    found = next(each for each in large if each.rule == "R1")
    assert found.units == ("layers.1",)
    assert "81.8% of the parameters" in found.sentence
    block = {"num_parameters": 900, "parameters": {"layers.1.weight": [900]}}
    assert "R1" not in rules(findings(units={"layers.1": block}))


@pytest.mark.parametrize(("ratio", "expected"), [(0.3, ["R21"]), (0.05, []), (None, [])])
def test_fragmentation_is_named_above_a_tenth(ratio: float | None, expected: list[str]):
    use = AllocatorUse(0, 3, 600, 700, 1000, ratio, None, 0, 0, None, None)
    assert rules(findings(allocator=use)) == expected


@pytest.mark.parametrize(("offload", "expected"), [("cpu", ["R26"]), ("cpu_pinned", [])])
def test_pageable_offload_is_named(offload: Any, expected: list[str]):
    plan = Plan(units=tuple(UnitPlan(modules=(name,), offload=offload) for name in UNITS))
    assert rules(findings(device_type="cuda", plan=plan.to_dict())) == expected


def test_a_unit_of_several_times_the_median_is_named_with_what_it_gathers_at_once():
    found = findings(units={"layers.1": {"unsharded_bytes": 8_000_000}})
    (large,) = (each for each in found if each.rule == "R3")
    assert large.units == ("layers.1",)
    assert "times as much as the median unit" in large.sentence


@pytest.mark.parametrize(("num_tensors", "expected"), [(8, True), (2, True), (1, False)])
def test_a_large_unit_that_is_one_large_tensor_cannot_be_split(num_tensors: int, *, expected: bool):
    weight = {f"head.{at}": [2_000_000 // num_tensors] for at in range(num_tensors)}
    small = {"num_parameters": 200_000, "unsharded_bytes": 800_000, "param_dtype": "float32"}
    units = {name: small for name in UNITS if name != "layers.1"}
    units["layers.1"] = {**small, "unsharded_bytes": 8_000_000, "parameters": weight}
    assert ("R3" in rules(findings(units=units))) == expected


@pytest.mark.parametrize(("device", "expected"), [("cuda", 1), ("cpu", 0)])
def test_gathers_in_full_precision_are_named_on_a_device(device: str, expected: int):
    found = findings(device_type=device)
    assert sum(each.sentence.startswith("Every unit gathers in float32") for each in found) == (
        expected
    )


@pytest.mark.parametrize(("trained", "expected"), [(1, ["R29"]), (50, []), (0, [])])
def test_a_frozen_base_is_named_where_something_else_is_trained(trained: int, expected: list[str]):
    frozen = {"num_parameters": 100, "num_trainable_parameters": 0}
    units = {"layers.0": frozen, "layers.1": frozen, "layers.2": {**frozen}}
    units["layers.2"]["num_trainable_parameters"] = trained
    assert [each.rule for each in findings(units=units) if each.rule == "R29"] == expected


def test_retries_of_the_allocator_are_named_once_fragmented_or_not():
    for ratio, words in ((0.05, "retried an allocation 2 times"), (0.3, "of fragmentation")):
        use = AllocatorUse(0, 3, 600, 700, 1000, ratio, None, 2, 0, None, None)
        (found,) = (each for each in findings(allocator=use) if each.rule == "R21")
        assert words in found.sentence


def test_one_connection_that_costs_nothing_is_not_named():
    found = find_first_things(
        replace(evidence_of(device_type="cuda", environment=ONE_CONNECTION), step_time_ns=1000)
    )
    assert "R20" not in rules(found)


def test_what_a_limit_costs_is_the_most_that_it_can_save():
    (found, *_) = findings(replace(FACTS, host_bound_ns=30, compute_ns=65))
    assert (found.effect.saved_low_ns, found.effect.saved_high_ns) == (0, 30)
    assert not found.effect.is_exposed


def test_a_large_unit_is_named_only_where_it_matters_for_the_peak():
    large = {"layers.1": {"unsharded_bytes": 8_000_000}}
    small = replace(evidence_of(units=large), peak_bytes=10**9, peak_unit="layers.0")
    assert "R3" not in rules(find_first_things(small))
    (found,) = (
        each for each in find_first_things(replace(small, peak_bytes=10**8)) if each.rule == "R3"
    )
    assert "peak of the memory step is in layers.0" in found.evidence
    assert found.effect.added_low_bytes == -(8_000_000 - 64)


def test_padding_is_named_where_it_is_two_hundredths_of_what_is_gathered():
    sized = {"num_parameters": 90, "num_trainable_parameters": 90, "unsharded_bytes": 400}
    others = {"num_parameters": 10_000, "num_trainable_parameters": 1, "unsharded_bytes": 40_000}
    alone = findings(units=dict.fromkeys(UNITS, sized))
    beside = findings(units={"layers.0": sized, "layers.1": others, "layers.2": others})
    assert [each.rule for each in alone if each.rule == "R30"] == ["R30"]
    assert [each.rule for each in beside if each.rule == "R30"] == []


MANY_GATHERS = {"exposed_by_kind_ns": {"all_gather": 20}, "step_time_ns": 100}


@pytest.mark.parametrize(
    ("num_bytes", "is_gathered", "is_found"),
    [
        pytest.param(64 << 10, True, True, id="tiny"),
        pytest.param(64 << 20, True, False, id="large"),
        pytest.param(64 << 10, False, False, id="persistent"),
    ],
)
def test_tiny_gathers_of_zero_3_are_named(num_bytes, is_gathered, is_found):
    sizes = {"unsharded_bytes": num_bytes, "reshard_after_forward": is_gathered}
    evidence = evidence_of(units=dict.fromkeys(UNITS, sizes), sharder=ZERO3)
    found = find_first_things(replace(evidence, **MANY_GATHERS))
    assert ("R37" in rules(found)) == is_found


def test_the_threshold_of_zero_3_is_the_largest_parameter_of_a_tiny_module():
    """DeepSpeed compares each parameter with it, not the sum of a module."""
    tiny = {"unsharded_bytes": 4000, "num_parameters": 1000, "parameters": {"w": [900], "b": [100]}}
    large = {
        "unsharded_bytes": 4 << 20, "num_parameters": 1 << 20,
        "parameters": {"w": [(1 << 20) - 500], "b": [500]},
    }  # fmt: skip
    units = {"layers.0": tiny, "layers.1": tiny, "layers.2": large}
    evidence = evidence_of(units=units, sharder=ZERO3, mesh={"shard": 2})
    found = find_first_things(replace(evidence, **MANY_GATHERS))
    (finding,) = (each for each in found if each.rule == "R37")
    assert "raise stage3_param_persistence_threshold to 900," in finding.do[1]
    assert finding.snippet == '"zero_optimization": {"stage3_param_persistence_threshold": 900}'
    assert finding.effect.added_high_bytes == 4 * (1000 + 1000 + 500) // 2


def test_the_blocks_of_tiny_modules_are_named_for_set_z3_leaf_modules():
    run = RunBuilder(("embed", "layers.0.q", "layers.0.k", "layers.1.q", "head"), sharder=ZERO3)
    evidence = replace(evidence_of(), manifest=run.build().manifest)
    found = find_first_things(replace(evidence, **MANY_GATHERS))
    (finding,) = (each for each in found if each.rule == "R37")
    assert 'model, [type(model.get_submodule("layers.0"))]' in finding.snippet


OBSERVED = {"find_unused_parameters": "True", "unused_parameters": "none", "static_graph": "False"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unused_parameters": "some"},
        {"find_unused_parameters": "False"},
        {"static_graph": "True"},
    ],
)
def test_a_search_for_unused_parameters_is_named_if_there_are_none(changes):
    evidence = evidence_of(sharder=DDP, observed=OBSERVED | changes)
    found = find_first_things(replace(evidence, unused_map_ns=277_000))
    assert ("R36" in rules(found)) == (not changes)
    texts = [each.evidence for each in found if each.rule == "R36"]
    assert all("map of the used parameters" in text and "277 µs" in text for text in texts)


@pytest.mark.parametrize(
    ("ranks", "is_found", "of_others"),
    [(("none", "none"), True, False), (("none", ""), True, True), (("none", "some"), False, False)],
)
def test_a_search_that_another_rank_needs_is_not_named(ranks, is_found, of_others):
    evidence = replace(evidence_of(sharder=DDP, observed=OBSERVED), unused_by_rank=ranks)
    found = [each for each in find_first_things(evidence) if each.rule == "R36"]
    assert bool(found) == is_found
    assert any("of other ranks" in each.assumptions[0] for each in found) == of_others


@pytest.mark.parametrize("limits", [True, False])
def test_a_fix_that_stands_before_the_plan_keeps_its_saving(limits: bool) -> None:
    late = Finding(
        rule="R32",
        units=(),
        sentence="Rank 3 is a straggler.",
        evidence="",
        do=("Balance the ranks.",),
        limits=limits,
        effect=Effect(
            sentence="Saves at most 102 ms a step.",
            saved_low_ns=0,
            saved_high_ns=102_000_000,
            is_exposed=True,
        ),
    )
    [settled] = attribute_gains([late], can_simulate=True, has_changes=True)
    assert settled.effect.saved_high_ns is None
    assert settled.effect.sentence == (
        "Saves at most 102 ms a step. The changes of the plan may save the same time, so the two "
        "do not add up."
        if limits
        else "No further saving: at most 102 ms a step are exposed here, and the changes of the "
        "plan may already save them."
    )


def test_communication_outside_fsdp_is_a_finding_beside_the_plan():
    part = OtherPart(
        kind="all_gather", phase="outside", dimension="shard", exposed_ns=14, total_ns=14
    )
    exposed = replace(
        FACTS, exposed_ns=40, other_part=part, exposed_by_kind_ns={"all_gather": 26, "other": 14}
    )
    found = [each for each in find_first_things(evidence_of(exposed)) if "outside" in each.sentence]
    assert [each.effect.saved_high_ns for each in found] == [14]
    assert found[0].effect.sentence == f"Saves up to 14 ns of waits a step{AND_HOST_WORK}"
    assert "full_tensor()" in found[0].do[0]
    small = replace(exposed, other_part=replace(part, exposed_ns=3, total_ns=3))
    assert not any("outside" in each.sentence for each in find_first_things(evidence_of(small)))


def test_waits_for_the_script_s_own_collectives_are_no_bound_of_the_saving():
    """The calls that a fix removes also take host time, which is part of other times."""
    part = OtherPart(
        kind="all_gather", phase="outside", dimension="shard", exposed_ns=40, total_ns=40
    )
    exposed = replace(FACTS, exposed_ns=40, other_part=part, exposed_by_kind_ns={"other": 40})
    limit = find_first_things(evidence_of(exposed))[0]
    assert limit.effect.sentence == f"Saves up to 40 ns of waits a step{AND_HOST_WORK}"
    assert limit.effect.saved_high_ns == 40


def test_it_is_not_claimed_that_no_rank_costs_time():
    evidence = replace(evidence_of(replace(FACTS, exposed_ns=40)), causes_ns={"straggler": 30})
    [late] = [each for each in find_first_things(evidence) if each.rule == "R32"]
    assert "No single rank or group is known to cost 5% of the step." in late.evidence


def test_a_straggler_keeps_its_gain_if_no_plan_is_credited_with_its_waits():
    effect = Effect(sentence="Saves at most 9 ns.", saved_high_ns=9, is_exposed=True)
    late = Finding("R32", (), "Rank 3 is a straggler.", "", ("Balance.",), effect=effect)
    settings = {"can_simulate": True, "has_changes": True}
    assert attribute_gains([late], **settings, keeps_late_waits=True) == (late,)
    assert attribute_gains([late], **settings) != (late,)


def test_frozen_parameters_are_left_out_and_no_unit_is_kept_as_it_was():
    """A unit that is never resharded would not gather the updates of its adapters."""
    frozen = {"num_parameters": 100, "num_trainable_parameters": 2, "unsharded_bytes": 400}
    evidence = evidence_of(units={name: {**frozen, "sharded_bytes": 200} for name in UNITS})
    [found] = [each for each in find_first_things(evidence) if each.rule == "R29"]
    assert "ignored_params=frozen" in found.snippet
    assert "reshard" not in found.snippet
    assert found.effect.added_high_bytes == round(len(UNITS) * 200 * 0.98)
