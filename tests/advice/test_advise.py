"""Advice on runs with a known answer, and on plans that actually run."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_inspect.advice.advise import Advice, PlanAdvice, give_advice
from fsdp_inspect.advice.gain_parts import say_parts
from fsdp_inspect.advice.plan_scores import PlanScorer
from fsdp_inspect.advice.plan_space import Choice
from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run, find_findings
from fsdp_inspect.analysis.context import RunContext
from fsdp_inspect.report.advice import describe_recommendation
from fsdp_inspect.simulation.policies import policies_of
from fsdp_inspect.simulation.recorded import Execution, observed_plan, simulate_step
from fsdp_inspect.simulation.scenario import make_scenario
from fsdp_inspect.simulation.schedule import Schedule
from fsdp_inspect.simulation.simulate import predicted_events, simulate_plan
from fsdp_inspect.simulation.workload import (
    Microbatch,
    Op,
    Pass,
    Piece,
    UnitPolicy,
    UnitWork,
    Workload,
    passes_of,
    reversed_tape,
    tape_of,
)
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.plan import Accumulation, Plan, UnitPlan
from fsdp_inspect.trace.run import RankRecord, RunSource
from fsdp_inspect.trace.tables import EventTable
from tests.advice.test_findings import evidence_of
from tests.builders import MIB, InMemoryRun, RunBuilder, write_run
from tests.recording.virtual_training import Replay
from tests.simulation.test_recorded import MS, US, as_run, names_of, workloads
from tests.simulation.test_recorded_streams import as_run as as_stream_run, step_ns

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-2-ranks"


@pytest.fixture(scope="module", autouse=True)
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def blocks(num: int, *, compute_ns: int, link_ns: int) -> Workload:
    """Consecutive equal blocks."""
    works = [UnitWork(gather_ns=link_ns, reduce_ns=link_ns) for _ in range(num)]
    pieces = [Piece(at, compute_ns, 2 * compute_ns) for at in range(num)]
    return Workload(works, [UnitPolicy()] * num, pieces, passes_of(tape_of(pieces)))


def latency_bound_run() -> InMemoryRun:
    """An embedding and eight blocks of 400 or 800 B: a message takes 4 ms and 1 ms for 400 B."""
    base = blocks(9, compute_ns=MS, link_ns=5 * MS)
    extra = [at % 2 * MS for at in range(9)]
    works = [
        replace(
            work,
            gather_ns=work.gather_ns + more,
            reduce_ns=work.reduce_ns + more,
            ends_with_backward=at == 0,
        )
        for at, (work, more) in enumerate(zip(base.units, extra, strict=True))
    ]
    workload = replace(base, units=works)
    names = ["embedding", *(f"layers.{at}" for at in range(8))]
    units = tuple(UnitPlan(modules=(n,), reshard_after_forward=True) for n in names)
    plan = Plan(units=(UnitPlan(modules=("",)), *units))
    builder = RunBuilder(names, plan=plan.to_dict(), source="emulated", warmup_steps=1)
    for at, name in enumerate(names):
        size = 400 * (1 + at % 2)
        numel = size // 4
        builder.unit(
            name,
            num_parameters=numel,
            num_trainable_parameters=numel,
            unsharded_bytes=size,
            sharded_bytes=size // 2,
            reduce_bytes=size,
        )
    builder.rank(0).step(0, 0, 1)
    run = builder.build()
    schedule = Schedule(workload, Execution.HOST.machine())
    steps = [schedule.simulate() for _ in range(5)]
    return replace(run, event_tables={0: predicted_events(steps, run.manifest.units, on_host=True)})


def plan_advice(run: RunSource, **request: Any) -> PlanAdvice:
    advice: Advice = advise_run(run, AdviceRequest(**request))
    assert advice.plan is not None, advice.refusal
    return advice.plan


def rules_of(advice: PlanAdvice) -> set[str]:
    return {rule for each in advice.suggestions for rule in each.rules}


# --- known answers


def test_a_link_on_which_nothing_is_exposed_gives_change_nothing():
    # Units of 400 B: larger ones have findings of their own.
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=10 * US), Execution.HOST, sizes={})
    advice = advise_run(run, AdviceRequest())
    assert "Change nothing: " in advice.answer
    assert advice.plan is not None
    assert advice.plan.suggestions == ()
    assert advice.plan.fastest.saved_ns == 0
    assert advice.chosen is not None
    assert advice.chosen.to_dict() == run.manifest.plan
    assert PlanScorer(run).network.unknown
    said = " ".join(advice.plan.remaining)
    assert "is unknown, so a plan with other messages may still save time." in said
    assert "`python -m fsdp_inspect.probe --help`" in said
    assert describe_recommendation(advice).startswith(advice.answer)


def test_the_command_writes_the_plan_of_the_run_if_no_change_is_advised(tmp_path, invoke):
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=10 * US), Execution.HOST)
    folder, plan = write_run(run, tmp_path / "run"), tmp_path / "plan.toml"
    done = invoke("advise", folder, "--write", plan)
    assert f"No change is advised: wrote the plan of the run: {plan}" in done.err
    assert "patch" not in done.err
    assert done.code == 0
    assert Plan.load(plan).to_dict() == run.manifest.plan


def test_a_gain_that_is_not_sure_is_not_denied():
    """All messages have one size, so the latency that a merge saves may be zero."""
    workload = blocks(6, compute_ns=50 * US, link_ns=6 * MS)
    workload = replace(workload, policies=[UnitPolicy(reshard_after_forward=False)] * 6)
    run = as_run(workload, Execution.BLOCKING_HOST)
    advice = give_advice(run, evidence_of(), AdviceRequest())
    assert advice.plan is not None
    assert advice.plan.suggestions == ()
    assert advice.plan.front[0].step_ns < 0.97 * advice.plan.replayed_step_ns
    assert advice.answer == (
        "Change nothing: no simulated plan surely saves more than 2.0% of a step."
    )


def test_change_nothing_names_the_time_that_no_plan_shortens():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=10 * US), Execution.HOST)
    evidence = replace(
        evidence_of(), optimizer_ns=30 * MS, exposed_by_kind_ns={"all_gather": 90 * MS}
    )
    plan = give_advice(run, evidence, AdviceRequest()).plan
    assert plan is not None
    said = " ".join(plan.remaining)
    assert "No plan shortens the optimizer, 30.0 ms of the step" in said
    assert "90.0 ms of communication are exposed. Not tried: messages in bfloat16" in said


def test_a_link_of_latency_with_small_units_gives_merging():
    advice = plan_advice(latency_bound_run())
    assert "R2" in rules_of(advice)
    assert len(advice.fastest.plan.units) < 9


def test_a_gather_that_is_issued_late_gives_explicit_prefetch():
    workload = blocks(6, compute_ns=10 * MS, link_ns=8 * MS)
    advice = plan_advice(as_run(workload, Execution.HOST))
    assert "R9" in rules_of(advice)
    assert advice.fastest.plan.forward_prefetch == 1
    policies = policies_of(advice.fastest.plan, names_of(workload))
    truth = simulate_step(replace(workload, policies=policies), Execution.HOST).duration_ns
    assert truth == pytest.approx(advice.fastest.step_ns, abs=200)
    assert truth < advice.recorded_step_ns


def test_late_gathers_of_a_slow_host_on_streams_give_no_prefetch_since_the_host_stays_slow():
    speed = {"gather_ms": 3.0, "scatter_ms": 3.0, "host_ms": 6.0}

    def prefetch(model: Any) -> None:
        for layer, after in pairwise(model.layers):
            layer.set_modules_to_forward_prefetch([after])

    recorded = Replay(**speed)
    assert step_ns(Replay(**speed, prepare=prefetch)) == step_ns(recorded)
    assert not rules_of(plan_advice(as_stream_run(recorded))) & {"R9", "R10", "R11"}


def test_a_limit_without_known_memory_is_refused_and_the_advice_by_time_is_not():
    run = latency_bound_run()
    refused = advise_run(run, AdviceRequest(memory_limit=MIB))
    assert refused.plan is None
    assert refused.answer == "Cannot tell which plan fits within 1.00 MiB."
    assert "no memory step with the passes" in (refused.refusal or "")
    assert plan_advice(run).suggestions


def test_a_tight_memory_limit_gives_the_fastest_plan_that_fits():
    free = plan_advice(open_run(SAMPLE))
    tight = plan_advice(open_run(SAMPLE), memory_limit=27 * MIB)
    assert free.fastest.peak_bytes is not None
    assert free.fastest.peak_bytes > 27 * MIB
    assert tight.fastest.peak_bytes is not None
    assert tight.fastest.peak_bytes * 1.02 <= 27 * MIB  # the error of a predicted peak
    assert free.fastest.step_ns < tight.fastest.step_ns < tight.replayed_step_ns
    kept = [u for u in tight.fastest.plan.units if u.reshard_after_forward is False]
    assert 0 < len(kept) < len(tight.fastest.plan.units)


class OnDevice(RunContext):
    """A run on a device whose memory is just above the peak of the recorded plan."""

    @property
    def ranks(self) -> list[RankRecord]:
        return [
            each.model_copy(update={"device_memory_bytes": 27 * MIB}) for each in self.source.ranks
        ]


def test_the_device_limits_the_advice_and_a_simulation_says_so():
    run = OnDevice(open_run(SAMPLE))
    advised = plan_advice(run)
    assert advised.memory_limit_bytes == 27 * MIB
    assert advised.fastest.peak_bytes is not None
    assert advised.fastest.peak_bytes * 1.02 <= 27 * MIB
    recorded = observed_plan(run)
    assert simulate_plan(run, recorded).caveats == simulate_plan(run.source, recorded).caveats
    kept = recorded.change(recorded.unit_names, reshard_after_forward=False)
    caveats = simulate_plan(run, kept).caveats
    assert any("exceeds the 27.0 MiB of a device that tensors can have" in one for one in caveats)


def test_a_limit_that_no_plan_keeps_is_said_with_the_smallest_peak():
    advice = advise_run(open_run(SAMPLE), AdviceRequest(memory_limit=MIB))
    assert advice.answer == "No simulated plan fits into 1.00 MiB."
    assert advice.plan is not None
    assert not advice.plan.fits


def test_findings_keep_the_stated_limit_of_memory():
    """Not that of the device, into which the model fits, and for which a batch may grow."""
    run = open_run(SAMPLE.parent / "emulated-8-ranks-cuda")
    for limit, is_within in ((None, True), (4 << 30, False)):
        findings = advise_run(run, AdviceRequest(memory_limit=limit)).findings
        assert ("R35" in {each.rule for each in findings}) == is_within
        steps = " ".join(step for each in findings for step in each.do)
        assert ("a larger microbatch" in steps) == is_within


def test_a_backend_that_holds_the_host_gets_prefetch_only_with_asynchronous_gathers():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.BLOCKING_HOST)
    advice = plan_advice(run)
    assert any("prefetch cannot help" in note for note in advice.notes)
    assert {"R9", "R22"} <= rules_of(advice)
    assert "R25" not in rules_of(advice)
    assert all(unit.unshard_async_op for unit in advice.fastest.plan.units)
    assert any("_set_unshard_async_op, a private method" in each for each in advice.fastest.risks)


def test_without_a_recorded_all_reduce_replicas_are_not_guessed():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.HOST)
    (note,) = (note for note in plan_advice(run).notes if note.startswith("Replicas"))
    assert "no all-reduce" in note


def test_gradients_of_several_microbatches_are_reduced_once_where_reductions_are_exposed():
    workload = blocks(6, compute_ns=10 * MS, link_ns=40 * MS)
    run = as_run(
        replace(workload, passes=passes_of(tape_of(workload.pieces), [Microbatch()] * 4)),
        Execution.HOST,
    )
    advice = plan_advice(run)
    assert advice.fastest.plan.accumulation.microbatches == 4
    assert advice.fastest.plan.accumulation.sync == "last"
    assert "R16" in rules_of(advice)


def add_optimizer_in_each_backward(run: InMemoryRun) -> InMemoryRun:
    """The run with an optimizer step right after the first unit of each backward."""
    events = run.events(0)
    first = np.flatnonzero((events.kind == EventKind.BACKWARD) & (events.unit >= 0))
    steps = events.where(first)
    columns = {"kind": EventKind.OPTIMIZER, "unit": -1, "phase": Phase.OPTIMIZER}
    changed = {name: np.full_like(getattr(steps, name), value) for name, value in columns.items()}
    optimizer = replace(steps, start_ns=steps.end_ns, **changed)
    return replace(run, event_tables={0: EventTable.concat([events, optimizer])})


@pytest.mark.parametrize("loop", ["optimizer_between", "gradients_changed"])
def test_backwards_that_do_not_accumulate_are_no_microbatches(loop: str):
    """TBPTT updates after each backward, and SAM clears the gradients of the first one."""
    workload = blocks(6, compute_ns=10 * MS, link_ns=40 * MS)
    workload = replace(workload, passes=passes_of(tape_of(workload.pieces), [Microbatch()] * 2))
    run = as_run(workload, Execution.HOST)
    if loop == "optimizer_between":
        run = add_optimizer_in_each_backward(run)
    else:
        observed = {"gradients_between_backwards": "changed"}
        run = replace(run, manifest=run.manifest.model_copy(update={"observed": observed}))
    assert observed_plan(run).accumulation == Accumulation()
    assert not {"R16", "R17"} & rules_of(plan_advice(run))


# --- laws


@given(workload=workloads())
@settings(max_examples=8, deadline=None)
def test_savings_add_up_and_no_advice_is_slower_than_the_recorded_plan(workload: Workload):
    advice = plan_advice(as_run(workload, Execution.HOST))
    saved = [each.saved_ns for each in advice.suggestions]
    assert sum(saved) == advice.fastest.saved_ns
    assert all(ns >= 0.02 * advice.replayed_step_ns for ns in saved)
    for each in advice.suggestions:
        assert each.saved_low_ns <= each.saved_ns <= each.saved_high_ns
        assert sum(each.saved_by_ns.values()) == each.saved_ns
    steps = [point.step_ns for point in advice.front]
    assert steps == sorted(steps)
    assert advice.fastest.step_ns <= advice.replayed_step_ns


CHOICES = st.builds(
    Choice,
    grouping=st.sampled_from([None, "make units of 2 blocks"]),
    reshard=st.sampled_from([None, True, False]),
    num_kept=st.sampled_from([None, 1]),
    forward_prefetch=st.sampled_from([None, 1, 3]),
    backward_prefetch=st.sampled_from([None, 2]),
    reduce_buffers=st.sampled_from([None, 2]),
    separate_reduce_group=st.sampled_from([None, True]),
)


@pytest.mark.slow
@given(workload=workloads(), choices=st.lists(CHOICES, min_size=2, max_size=6))
@settings(max_examples=12, deadline=None)
def test_plans_that_share_work_take_what_the_simulation_of_each_says(
    workload: Workload, choices: list[Choice]
):
    run = as_run(workload, Execution.HOST)
    scorer = PlanScorer(run)
    other = next(iter(scorer.space.groupings), None)
    choices = [
        each if each.grouping in scorer.space.groupings else replace(each, grouping=other)
        for each in choices
    ]
    scorer.score_all(choices)
    for choice in choices:
        plan = scorer.space.plan_of(choice)
        assert plan == Plan.from_dict(plan.to_dict())
        alone = make_scenario(scorer.work, run.manifest, plan, scorer.network).workload
        assert scorer.simulator.workload(plan) == alone
        assert scorer.score(choice) == PlanScorer(run, work=scorer.work).score(choice)
        assert scorer.score(choice).step_ns == simulate_plan(run, plan).predicted.step_time_ns


@pytest.mark.study
def test_plans_of_a_small_model_are_simulated_by_the_thousands_a_minute():
    begun = time.process_time()  # other load on the machine does not count
    advice = plan_advice(as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.HOST))
    assert advice.num_plans > 50
    assert advice.num_plans / (time.process_time() - begun) > 1000 / 60


# --- the content of a suggestion


def test_every_suggestion_can_be_judged_and_run_by_itself():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.HOST)
    advice = plan_advice(run, plan_file="new.toml", run_name="runs/a b")
    assert advice.suggestions
    for place, each in enumerate(advice.suggestions, 1):
        assert all((each.rules, each.evidence, each.rows, each.assumptions, each.snippet))
        assert each.verify[0] == f"fsdp-inspect advise 'runs/a b' --take {place} --write new.toml"
        assert each.verify[-1].startswith("fsdp-inspect verify new.prediction.json NEW_RUN")
        assert {row.kind for row in each.rows} <= {"all_gather", "reduce_scatter"}
    steps = [each.step_ns for each in advice.suggestions]
    assert steps[-1] == advice.fastest.step_ns


def test_a_gain_names_the_parts_of_the_step_that_become_shorter():
    run = as_run(blocks(6, compute_ns=10 * MS, link_ns=8 * MS), Execution.HOST)
    first = plan_advice(run).suggestions[0]
    assert first.saved_by_ns["all-gather"] > 0.9 * first.saved_ns
    assert first.evidence[0].startswith("The gain by part of the step: all-gather ")


def test_a_frozen_reference_model_is_not_gathered_again_by_backward():
    workload = blocks(6, compute_ns=10 * MS, link_ns=40 * MS)
    whole = [((Op.ENTER, at), (Op.RUN, at), (Op.LEAVE, at)) for at in range(6)]
    reference, trained = sum(whole[3:], ()), sum(whole[:3], ())
    backward = Pass(Phase.BACKWARD, reversed_tape(trained), 0, reduces=frozenset(range(3)))
    passes = (
        Pass(Phase.FORWARD, reference, 0, keeps_graph=False),
        Pass(Phase.FORWARD, trained, 0),
        backward,
    )
    run = as_run(replace(workload, passes=passes), Execution.HOST)
    said = [text for each in plan_advice(run).suggestions for text in each.evidence]
    again = [text for text in said if text.startswith("Backward gathers")]
    assert again
    # The three trained units, and the last unit of the reference: torch prefetches it.
    assert {text.split(".")[0] for text in again} == {"Backward gathers 4 units again"}


def test_a_gain_lists_its_large_parts_and_adds_up_the_small_ones():
    parts = {"all-gather": 25_200_000, "host work": 5_800_000, "copies": -1_000_000}
    assert say_parts(parts) == "all-gather 25.2 ms, host work 5.80 ms, copies -1.00 ms"
    small = {f"part {number}": 9 for number in range(20)}
    assert say_parts({"all-gather": 1000, **small}) == "all-gather 1.00 µs, other 180 ns"
    assert say_parts({"all-gather": 1000, "copies": 1}) == "all-gather 1.00 µs"
    assert say_parts({}) == ""


def test_a_simulated_run_gets_no_finding_that_only_names_a_plan():
    """One unit holds most parameters, but the simulation may advise one unit for the model."""
    run = as_run(blocks(1, compute_ns=10 * MS, link_ns=8 * MS), Execution.BLOCKING_HOST)
    sizes = [unit.model_copy(update={"num_parameters": 9}) for unit in run.manifest.units[:1]]
    units = [*sizes, *run.manifest.units[1:]]
    run = replace(run, manifest=run.manifest.model_copy(update={"units": units}))
    imported = run.manifest.model_copy(update={"source": "imported"})
    assert "R1" in {each.rule for each in find_findings(replace(run, manifest=imported))}
    assert "R1" not in {each.rule for each in find_findings(run)}
    assert "R1" not in {each.rule for each in advise_run(run, AdviceRequest()).findings}


def test_exposed_time_is_claimed_by_the_plan_or_by_one_finding():
    setting = {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    run = as_stream_run(Replay(gather_ms=1.0, scatter_ms=30.0))
    run = replace(run, manifest=run.manifest.model_copy(update=setting))
    advice = advise_run(run, AdviceRequest())
    (finding,) = (each for each in advice.findings if each.rule == "R20")
    assert advice.plan is not None
    claims = [
        each for each in advice.findings if each.effect.saved_high_ns and each.effect.is_exposed
    ]
    if advice.plan.suggestions:
        assert claims == []
        assert "No further saving: " in finding.effect.sentence
    else:
        assert claims == [finding]
