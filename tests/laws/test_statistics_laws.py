"""Statistics of a run are the sums, percentiles and extremes over the single steps of its ranks."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.step_selection import timed_ranks
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.store.reduction.run_statistics import condense_memory, condense_run
from fsdp_inspect.store.reduction.timed_steps import StepRules
from fsdp_inspect.trace.codes import PARTS_OF_STEP, EventKind, Statistic, StepPart
from fsdp_inspect.trace.tables import SummaryTable, rows_of
from tests.cases import examples
from tests.laws.test_typical_step_laws import RANKS, build

FEW_EXAMPLES = settings(max_examples=examples(40), deadline=None)
STATISTICS = (Statistic.LOW, Statistic.MIDDLE, Statistic.HIGH)


@given(RANKS, st.integers(0, 3))
@FEW_EXAMPLES
def test_numbers_of_the_typical_step_are_those_of_the_single_steps(ranks, warmup):
    run = build(ranks)
    run = replace(run, manifest=run.manifest.model_copy(update={"warmup_steps": warmup}))
    timed, statistics = timed_ranks(run), run.statistics()
    typical = timed.typical
    assert typical.rank.tolist() == [member.rank for member in timed.members]
    for place, member in enumerate(timed.members):
        assert typical.num_timed[place] == len(member.steps)
        assert typical.closest_step[place] == member.closest_step
        assert typical.step_time_ns[place] == member.typical(member.step_time_ns)
        assert typical.exposed_ns[place] == member.typical(member.exposed_ns)
        assert typical.communication_ns[place] == member.typical(member.communication_ns)
        assert typical.means(EventKind.STEP, "count")[place] == member.typical_mean(
            member.num_collectives
        )
        for part in (*PARTS_OF_STEP, StepPart.BETWEEN_STEPS):
            assert typical.means(part)[place] == member.typical_mean(member.per_step(part))
        spread = Distribution.of(member.step_time_ns)
        found = [
            int(statistics.duration_ns[statistics.statistic == each][place]) for each in STATISTICS
        ]
        assert found == [spread.p10, spread.median, spread.p90]


AMOUNTS = st.dictionaries(st.integers(0, 6), st.integers(0, 99), max_size=6)


def memory_rows(kind, ranks):
    rows = [
        dict.fromkeys(SummaryTable.DTYPES, 0)
        | {"rank": rank, "step": step, "kind": kind, "bytes": amount}
        for rank, amounts in enumerate(ranks)
        for step, amount in sorted(amounts.items())
    ]
    return SummaryTable.from_rows(rows)


@given(st.lists(AMOUNTS, max_size=3), st.integers(0, 3))
@FEW_EXAMPLES
def test_memory_is_the_highest_and_that_of_the_last_step(ranks, first_warm):
    table = condense_memory(lambda kind: memory_rows(kind, ranks), first_warm)

    def found(statistic, kind):
        chosen = table.where((table.statistic == statistic) & (table.kind == kind))
        return dict(zip(chosen.rank.tolist(), chosen.bytes.tolist(), strict=True))

    with_any = {rank: amounts for rank, amounts in enumerate(ranks) if amounts}
    highest = {rank: max(amounts.values()) for rank, amounts in with_any.items()}
    assert found(Statistic.HIGHEST, StepPart.PEAK_ALLOCATED) == highest
    assert found(Statistic.HIGHEST, StepPart.PEAK_RESERVED) == highest
    last = {rank: amounts[max(amounts)] for rank, amounts in with_any.items()}
    assert found(Statistic.LAST, StepPart.ALLOCATED_AT_END) == last
    begin = first_warm
    if all(max(amounts) < begin for amounts in with_any.values()):
        begin = 0
    warm = {
        rank: [amounts[step] for step in sorted(amounts) if step >= begin]
        for rank, amounts in with_any.items()
    }
    several = {rank: amounts for rank, amounts in warm.items() if len(amounts) > 1}
    assert found(Statistic.FIRST_WARM, StepPart.ALLOCATED_AT_END) == {
        rank: amounts[0] for rank, amounts in several.items()
    }
    assert found(Statistic.LAST_WARM, StepPart.ALLOCATED_AT_END) == {
        rank: amounts[-1] for rank, amounts in several.items()
    }


def test_a_run_without_a_step_has_no_statistics():
    assert len(condense_run(lambda kind: SummaryTable.empty(), StepRules(0, frozenset(), 0))) == 0


def test_the_sums_of_the_groups_are_apart():
    rows = [
        dict.fromkeys(SummaryTable.DTYPES, 0) | {"kind": kind, "step": step, "group": group} | own
        for step in range(4)
        for kind, group, own in (
            (EventKind.STEP, -1, {"duration_ns": 100}),
            (StepPart.COMMUNICATION, -1, {"duration_ns": 9}),
            (StepPart.GROUP, 0, {"exposed_ns": step}),
            (StepPart.GROUP, 3, {"exposed_ns": 10}),
        )
    ]
    table = SummaryTable.from_rows(rows)
    statistics = condense_run(
        lambda kind: rows_of(table, kinds=[kind]), StepRules(0, frozenset(), 0)
    )
    groups = statistics.where(statistics.kind == StepPart.GROUP)
    assert (groups.group.tolist(), groups.exposed_ns.tolist()) == ([0, 3], [1 + 2, 20])
    assert np.all(groups.num_steps == 2)
