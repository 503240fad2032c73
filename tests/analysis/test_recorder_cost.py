"""What the recorder cost a run, and what plain steps mean to the analyses."""

from __future__ import annotations

import re

import pytest

from fsdp_inspect.analysis.live.view import LiveRank
from fsdp_inspect.analysis.recorder_cost import measure_recorder_cost
from fsdp_inspect.analysis.step_selection import select_steps
from fsdp_inspect.analysis.step_times import measure_overlap, measure_step_times
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.report.text import render_summary
from fsdp_inspect.store.reduction.timed_steps import StepRules, classify_steps
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import BLOCK_OF_DETAIL, RecorderUse
from fsdp_inspect.trace.tables import DeviceTable, MemoryTable, ScalarTable
from tests.builders import (
    STEADY_EXPOSED_NS,
    STEADY_STEP_NS,
    InMemoryRun,
    RunBuilder,
    add_steady_step,
)
from tests.report.terminal_text import text_of

WARMUP = 2
PLAIN_NS = 900
"""A plain step takes a tenth less than a detailed one, of `STEADY_STEP_NS`."""
USE = RecorderUse(
    budget=0.01,
    num_steps=50,
    num_detailed=26,
    plain_ns=45,
    num_timed_plain=5,
    writer_ns=200,
    threads_ns=300,
    wall_ns=50_000,
)


def is_plain(step: int) -> bool:
    return step >= WARMUP and (step - WARMUP) // BLOCK_OF_DETAIL % 2 == 1


def run_with_plain_steps(num_steps: int = 50, use: RecorderUse | None = USE) -> InMemoryRun:
    builder = RunBuilder(world_size=2, warmup_steps=WARMUP)
    for rank in range(2):
        member, start = builder.rank(rank), 10_000 * rank
        member.record["recorder"] = use
        for number in range(num_steps):
            if is_plain(number):
                member.step(number, start, start + PLAIN_NS, is_plain=True)
                member.optimizer(start + 700, start + 800)
                start += PLAIN_NS
            else:
                add_steady_step(member, number, start=start)
                start += STEADY_STEP_NS
    return builder.build()


def test_times_and_overlap_are_those_of_detailed_steps():
    run = run_with_plain_steps()
    selection = select_steps(run)
    assert selection.timed == tuple(step for step in range(WARMUP, 50) if not is_plain(step))
    assert selection.sentence == (
        "24 of 50 completed steps are timed; left out: steps 0-1 (warm-up), 24 plain steps "
        "(recorded without units)."
    )
    assert measure_step_times(run).step_time_ns.typical == STEADY_STEP_NS
    assert {row.exposed_ns for row in measure_overlap(run).ranks} == {STEADY_EXPOSED_NS}


def test_a_step_that_is_plain_on_one_rank_is_not_timed():
    selection = classify_steps(range(6), [], StepRules(1, frozenset(), 0), plain=[3])
    assert selection.timed == (1, 2, 4, 5)
    assert selection.detailed == (0, 1, 2, 4, 5)


def test_the_course_of_steps_has_no_exposed_time_in_plain_steps():
    points = measure_step_times(run_with_plain_steps()).over_steps
    assert len(points) == 50
    for point in points:
        assert (point.exposed_ns is None) == is_plain(point.step)
        assert point.step_time_ns == (PLAIN_NS if is_plain(point.step) else STEADY_STEP_NS)


def test_the_cost_is_the_share_of_detail_and_the_fixed_parts():
    cost = measure_recorder_cost(run_with_plain_steps(num_steps=60))
    assert cost.detail.ratio == pytest.approx(STEADY_STEP_NS / PLAIN_NS - 1)
    assert cost.detail.num_blocks == 6
    assert (cost.num_detailed, cost.num_steps) == (32, 60)
    assert cost.threads_ratio == pytest.approx(0.01)
    fixed = cost.plain_ratio + cost.threads_ratio
    assert cost.ratio == pytest.approx(32 / 60 * cost.detail.ratio + fixed)
    assert "32 of 60 steps in detail" in cost.sentence
    assert "above its budget of 1%, measured in 6 blocks" in cost.sentence
    assert "at least" not in cost.sentence  # the interval begins below the value
    assert "this does not show all of the cost" in cost.sentence


def test_too_few_blocks_state_no_cost():
    cost = measure_recorder_cost(run_with_plain_steps())
    assert (cost.detail, cost.ratio, cost.interval) == (None, None, None)
    assert "26 of 50 steps in detail" in cost.sentence
    assert (
        f"Its cost is not known: {cost.num_blocks} of the 6 required blocks of detailed steps lie "
        "between plain steps."
    ) in cost.sentence
    (least,) = re.findall(r"Record at least (\d+) steps\.", cost.sentence)
    assert 50 < int(least) <= 60  # 60 are enough, see above


def test_the_summary_states_the_cost_in_words_and_in_json():
    summary = measure_summary(run_with_plain_steps())
    assert "26 of 50 steps in detail" in text_of(render_summary(summary))
    assert summary.recorder.num_detailed == 26


def test_a_short_run_has_no_plain_steps_and_no_sentence():
    cost = measure_recorder_cost(run_with_plain_steps(num_steps=6))
    assert cost.detail is None
    assert cost.ratio is None
    assert cost.sentence is None


def test_a_run_without_pairs_of_blocks_does_not_know_its_cost():
    cost = measure_recorder_cost(run_with_plain_steps(num_steps=9))
    assert cost.ratio is None
    assert "not known" in cost.sentence


def test_a_run_of_an_earlier_version_states_no_cost():
    assert measure_recorder_cost(run_with_plain_steps(use=None)) is None


def test_a_live_view_shows_the_time_of_plain_steps_and_no_overlap():
    run = run_with_plain_steps()
    live = LiveRank()
    live.add(run.events(0), MemoryTable.empty(), DeviceTable.empty(), ScalarTable.empty())
    for step in live.view().steps:
        assert (step.exposed_ratio is None) == is_plain(step.step)
        assert step.step_time_ns > 0
    recent, detailed = live.view().recent, live.view().detailed
    assert any(map(is_plain, recent.step[recent.kind == EventKind.STEP].tolist()))
    assert not any(map(is_plain, detailed.step[detailed.kind == EventKind.STEP].tolist()))
