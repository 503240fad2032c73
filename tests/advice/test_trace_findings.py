"""Findings from the run's own traffic: R7, R12, R23, R31, R33, and their exceptions."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_inspect.advice.evidence import Evidence, Finding, NodeLinks
from fsdp_inspect.advice.findings import find_first_things
from fsdp_inspect.advice.trace_findings import find_in_trace
from fsdp_inspect.analysis.contention import Contention, UnitContention
from fsdp_inspect.analysis.exposed import ExposedWait
from fsdp_inspect.analysis.optimizer_wait import DelayedGather, OptimizerWait
from fsdp_inspect.analysis.pipeline import Pipeline, RepeatedUnit
from fsdp_inspect.analysis.prefetch import GathersInFlight
from fsdp_inspect.analysis.trust import RunDelay, Trust
from fsdp_inspect.analysis.verdict import UNKNOWN
from fsdp_inspect.trace.run import UNITS_FROM_FSDP1
from tests.builders import MIB, RunBuilder

UNITS = ("layers.0", "layers.1")
LINKS = NodeLinks(2, 8, 10e9, 100e9, "measured")


def found(*, units: dict[str, Any] | None = None, device: str = "cuda", **facts: Any):
    """The findings of a run with steps of 1000 ns whose units gather 1 MiB each."""
    builder = RunBuilder(UNITS, device_type=device)
    for name in UNITS:
        builder.unit(name, **{"unsharded_bytes": MIB, **(units or {})})
    builder.rank(0).step(0, 0, 1000)
    known: dict[str, Any] = {
        "manifest": builder.build().manifest,
        "verdict": UNKNOWN,
        "plan_check": None,
        "allocator": None,
        "causes_ns": {},
        "exposed_by_kind_ns": {},
        "backward_gathers_ns": 0,
        "step_time_ns": 1000,
    }
    evidence = Evidence(**{**known, **facts})
    return list(find_in_trace(evidence) if "trust" not in facts else find_first_things(evidence))


def wait(kind: str, phase: str, exposed: int) -> ExposedWait:
    return ExposedWait(
        step=7, microbatch=0, fqn="layers.0", is_fsdp=True, kind=kind, phase=phase,
        dimension="shard", issue_ns=0, start_ns=10, need_ns=10,
        end_ns=10 + exposed, exposed_ns=exposed, median_ns=5, count=3, cause="bandwidth",
        causes_ns={"bandwidth": exposed}, ahead=None, bytes=64, group=0, sequence=1,
    )  # fmt: skip


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert finding.evidence
    assert finding.do
    assert finding.effect.sentence
    assert finding.assumptions
    return finding


def test_the_longest_waits_that_are_meant_stand_for_all_of_them():
    kinds = ("all_gather", "reduce_scatter", "all_gather", "all_gather", "all_gather")
    waits = [wait(kind, "backward", 500 - at) for at, kind in enumerate(kinds)]
    (finding,) = found(
        links=LINKS, backward_gathers_ns=60_000, step_time_ns=10**6, waits=tuple(waits)
    )
    assert [row.exposed_ns for row in finding.rows] == [500, 498, 497]
    assert finding.rows[0].what == "exposed 500 ns, the longest of 3 (median 5 ns)"


def test_a_run_without_any_of_it_is_quiet():
    assert found() == []


# --- R7


def test_gathers_across_nodes_are_told_with_what_a_node_would_take():
    waits = (wait("all_gather", "backward", 300), wait("reduce_scatter", "backward", 400))
    finding = only(found(links=LINKS, backward_gathers_ns=60_000, step_time_ns=10**6, waits=waits))
    assert (finding.rule, finding.units) == ("R7", UNITS)
    # Two units of 1 MiB x 7/8 at 100 GB/s take 18,350 ns inside the node.
    assert finding.effect.saved_low_ns == 60_000 - 18_350
    assert finding.effect.saved_high_ns == 60_000
    assert finding.effect.added_high_bytes == 2 * MIB // 8  # next to the shards, as in torch 2.13
    assert [(row.kind, row.step) for row in finding.rows] == [("all_gather", 7)]
    assert "reshard_after_forward=8" in finding.snippet


def test_a_node_whose_speed_is_not_known_says_so_and_promises_nothing():
    unknown = replace(LINKS, within_bytes_per_s=None, within_from="")
    finding = only(found(links=unknown, backward_gathers_ns=600))
    assert "is unknown" in finding.evidence
    assert finding.effect.saved_low_ns == 0


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"backward_gathers_ns": 19}, id="exposed for less than 2%"),
        pytest.param({"links": replace(LINKS, within_bytes_per_s=29e9)}, id="not 3 times as fast"),
        pytest.param({"units": {"reshard_after_forward": False}}, id="nothing gathered again"),
        pytest.param({"units": {"reshard_after_forward": 8}}, id="in the node already"),
        pytest.param({"links": None}, id="one node"),
    ],
)
def test_gathers_that_need_not_cross_nodes_are_not_told(facts: dict[str, Any]):
    assert found(**{"links": LINKS, "backward_gathers_ns": 600, **facts}) == []


# --- R12

FLIGHT = GathersInFlight(0, 5, 3, "forward", 40, 500, 250, ("a", "b", "c", "d", "e"))


def test_fsdp1_that_runs_ahead_is_told_with_the_memory_that_two_would_leave():
    fsdp1 = {"recorded_by": UNITS_FROM_FSDP1}
    finding = only(found(units=fsdp1, in_flight=FLIGHT))
    assert (finding.rule, finding.units) == ("R12", FLIGHT.fqns)
    assert (finding.effect.added_low_bytes, finding.effect.added_high_bytes) == (-250, 0)
    assert finding.effect.saved_high_ns is None
    assert "No time is predicted" in finding.effect.sentence
    assert found(units=fsdp1, in_flight=replace(FLIGHT, most=2)) == []


def test_fsdp2_needs_no_limit():
    assert found(in_flight=FLIGHT) == []


# --- R23


def contention(slowdown: float, *, is_clear: bool = True) -> Contention:
    unit = UnitContention(
        0, "layers.0", "forward", 8, 8, 1000, 0.5, slowdown, 1.1, 1.3, "itself", None
    )
    return Contention(0, 10, slowdown, 1.1, 1.3, is_clear, None, (unit,))


def test_compute_that_communication_slows_is_told_with_what_it_costs():
    finding = only(found(contention=contention(1.25)))
    assert finding.rule == "R23"
    assert "by 25%, 100 ns of the step" in finding.sentence  # 500 ns x (1 - 1 / 1.25)
    assert finding.effect.saved_low_ns == 0
    assert finding.effect.saved_high_ns == 115  # 500 ns x (1 - 1 / 1.3)
    assert not finding.effect.is_exposed


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"contention": contention(1.04)}, id="less than 5%"),
        pytest.param({"contention": contention(1.25, is_clear=False)}, id="within the spread"),
        pytest.param({"contention": contention(1.25), "device": "cpu"}, id="no NVLink on a CPU"),
        pytest.param({"contention": contention(1.25), "step_time_ns": 10**5}, id="below 2%"),
    ],
)
def test_a_slowdown_that_no_buffer_mends_is_not_told(facts: dict[str, Any]):
    assert found(**facts) == []


# --- R31

PIPELINE = Pipeline(0, 8, 4, (RepeatedUnit("layers.0", 4, 8, 3 * MIB),), 7, 120, 100)


def test_a_pipeline_that_gathers_for_each_microbatch_is_told_before_all_plans():
    finding = only(found(pipeline=PIPELINE))
    assert (finding.rule, finding.units, finding.limits) == ("R31", ("layers.0",), True)
    assert (finding.effect.saved_low_ns, finding.effect.saved_high_ns) == (0, 100)
    assert (finding.effect.added_low_bytes, finding.effect.added_high_bytes) == (0, 3 * MIB)
    assert any("Do not rely on the plans" in step for step in finding.do)


def test_any_pipeline_warns_of_the_plans_and_claims_no_time():
    quiet = replace(PIPELINE, units=(), repeated_exposed_ns=0)
    (finding,) = found(pipeline=quiet)
    assert finding.limits
    assert "Do not rely on the plans" in finding.do[0]
    assert finding.effect.saved_high_ns is None


# --- R33

GATHER = DelayedGather(5, "", -300, 30, 90, -100, 130, 60, 0)
WAIT = OptimizerWait(0, 130, 60, 50, 70, (GATHER,))


def test_work_behind_the_optimizer_is_told_with_what_an_event_would_save():
    finding = only(found(optimizer_wait=WAIT))
    assert finding.rule == "R33"
    assert (finding.effect.saved_low_ns, finding.effect.saved_high_ns) == (50, 70)
    assert (finding.rows[0].step, finding.rows[0].start_ns) == (5, 30)
    assert "set_post_optim_event(event)" in finding.snippet
    assert found(optimizer_wait=replace(WAIT, gain_ns=19)) == []


def test_the_least_gain_on_a_machine_without_free_cores_is_lower():
    """Threads lack a core for 25%: 20% of the step beyond the 5% of a quiet machine."""
    wait = replace(WAIT, gain_low_ns=370, gain_high_ns=402)
    trust = Trust(run_delay=RunDelay(0, 0.25))
    finding = next(each for each in found(optimizer_wait=wait, trust=trust) if each.rule == "R33")
    assert (finding.effect.saved_low_ns, finding.effect.saved_high_ns) == (170, 402)
    assert finding.effect.sentence.endswith(
        "It may be up to 200 ns less, because training threads had no CPU core for 25% of the "
        "recording."
    )
