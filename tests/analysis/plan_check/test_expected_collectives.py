from collections import Counter

import pytest

from fsdp_inspect.analysis.plan_check.collective_counts import (
    BackwardPasses,
    count_needed_gathers,
    count_needed_reductions,
)
from fsdp_inspect.trace.codes import EventFlag, Phase
from tests.builders import RunBuilder

F, B, E = Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION


def replay(sequence, **rules):
    """Needed gathers by phase, for consecutive passes: `[(phase, microbatch), ...]`."""
    events = passes_of(sequence)
    needed = count_needed_gathers(events, BackwardPasses.of(events), **{"reshards": True, **rules})
    by_phase = Counter()
    for (_, phase), count in needed.items():
        by_phase[phase] += count
    return by_phase


def passes_of(sequence):
    builder = RunBuilder(units=("layers.0",))
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    for place, (phase, microbatch) in enumerate(sequence):
        add = rank.backward if phase == B else rank.forward
        now, columns = 10 * place, {"microbatch": microbatch}
        add("layers.0", now, now + 5, **columns)
        rank.events[-1]["phase"] = phase
    events = builder.build().events(0)
    return events.where(events.unit == 0)


@pytest.mark.parametrize(
    ("sequence", "rules", "needed"),
    [
        pytest.param([(F, 0), (B, 0)], {}, {F: 1, B: 1}, id="reshards"),
        pytest.param([(F, 0), (B, 0)], {"reshards": False}, {F: 1}, id="keeps"),
        pytest.param([(F, 0), (F, 0), (B, 0), (B, 0)], {}, {F: 2, B: 2}, id="used twice"),
        pytest.param(
            [(F, 0), (F, 0), (B, 0), (B, 0)],
            {"reshards": False},
            {F: 1, B: 1},
            id="used twice, kept: resharded after the first backward",
        ),
        pytest.param([(E, 0), (E, 0), (F, 0)], {"reshards": False}, {E: 1}, id="after evaluation"),
        pytest.param([(E, 0), (F, 0)], {}, {E: 1, F: 1}, id="after evaluation, resharded"),
        pytest.param(
            [(F, 0), (B, 0), (F, 1), (B, 1)],
            {"reshards": False, "keeps_between": True},
            {F: 1},
            id="kept between microbatches",
        ),
        pytest.param(
            [(F, 0), (B, 0)], {"unshards_in_backward": False}, {F: 1}, id="no unshard in backward"
        ),
    ],
)
def test_a_pass_gathers_unless_the_unit_holds_its_parameters(sequence, rules, needed):
    assert replay(sequence, **rules) == needed


def test_a_forward_repeated_before_its_backward_gathers_for_both():
    """Checkpointing around a nested unit: torch reshards nothing inside backward."""
    builder = RunBuilder(units=("layers.0",))
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.forward("layers.0", 0, 10)
    again = {"phase": B, "flags": int(EventFlag.RECOMPUTE)}
    rank.forward("layers.0", 20, 30)
    rank.events[-1].update(again)
    rank.backward("layers.0", 30, 40)
    events = builder.build().events(0)
    own = events.where(events.unit == 0)
    needed = count_needed_gathers(own, BackwardPasses.of(own), reshards=True)
    assert needed == {(0, F): 1, (0, B): 1}


def test_a_forward_repeated_inside_its_own_backward_gathers_nothing():
    builder = RunBuilder(units=("layers.0",))
    rank = builder.rank(0)
    rank.step(0, 0, 100)
    rank.backward("layers.0", 20, 60)
    rank.forward("layers.0", 30, 40)
    rank.events[-1].update({"phase": B})
    events = builder.build().events(0)
    own = events.where(events.unit == 0)
    assert count_needed_gathers(own, BackwardPasses.of(own), reshards=True) == {(0, B): 1}


def test_a_unit_that_backward_did_not_reach_is_resharded_at_the_end_of_the_pass():
    builder = RunBuilder(units=("layers.0", "layers.1"))
    rank = builder.rank(0)
    for step in (0, 1):
        rank.step(step, 100 * step, 100 * step + 100)
        rank.forward("layers.0", 100 * step, 100 * step + 10)
        rank.forward("layers.1", 100 * step + 10, 100 * step + 20)
        rank.backward("layers.1", 100 * step + 20, 100 * step + 30)
    events = builder.build().events(0)
    own = events.where(events.unit == 0)
    needed = count_needed_gathers(own, BackwardPasses.of(events), reshards=False)
    assert needed == {(0, F): 1, (1, F): 1}


def test_gradients_are_reduced_once_in_a_pass_however_often_the_unit_was_used():
    events = passes_of([(F, 0), (F, 0), (B, 0), (B, 0), (F, 1), (B, 1)])
    assert count_needed_reductions(events, {(0, 0), (0, 1)}) == {0: 2}
    assert count_needed_reductions(events, {(0, 1)}) == {0: 1}


def test_passes_are_told_apart_by_microbatch_and_the_last_is_known():
    passes = BackwardPasses.of(passes_of([(F, 0), (B, 0), (F, 1), (B, 1)]))
    assert passes.end_ns.tolist() == [15, 35]
    assert passes.last_microbatch() == {0: 1}
    assert len(BackwardPasses.of(passes_of([(F, 0)])).step) == 0
