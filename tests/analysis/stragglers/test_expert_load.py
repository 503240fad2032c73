"""Load imbalance of experts is reported as a cause only with evidence in the messages."""

import pytest

from fsdp_inspect.analysis.stragglers.expert_load import LoadFinding, measure_expert_load
from fsdp_inspect.report.ranks_wording import describe_expert_load
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder

GROUPS = [
    ProcessGroup(index=0, name="0", ranks=[0, 1, 2, 3], role="shard"),
    ProcessGroup(index=1, name="1", ranks=[0, 1], dimension="ep"),
]


def load_of(sizes, waits, *, kind=EventKind.ALL_TO_ALL, ranks=(0, 1, 2, 3)):
    """The load of four ranks in two groups; each sends and waits once per step."""
    builder = RunBuilder(("",), world_size=4, process_groups=GROUPS)
    for rank in ranks:
        own = builder.rank(rank)
        for step in range(2):
            begin = 1000 * step
            own.step(step, begin, begin + 1000)
            own.add(
                kind, begin, begin + waits[rank], need_ns=begin, group=1, bytes=sizes[rank],
                phase=Phase.FORWARD, sequence=step,
            )  # fmt: skip
    return measure_expert_load(builder.build())


def test_the_rank_with_most_bytes_that_waits_least_is_the_cause():
    load = load_of([100, 300, 200, 200], [500, 100, 200, 200])
    assert load is not None
    assert [len(group.members) for group in load.groups] == [2, 2]
    assert load.worst.finding is LoadFinding.CAUSE
    assert load.worst.busiest_rank == 1
    assert load.worst.imbalance_ratio == pytest.approx(1.5)
    assert load.worst.extra_wait_ns == 400
    assert "Likely cause: load imbalance" in describe_expert_load(load)
    assert load.groups[1].finding is LoadFinding.NO_WAIT


@pytest.mark.parametrize(
    ("sizes", "waits", "finding", "words"),
    [
        ([200] * 4, [500, 100] * 2, LoadFinding.EQUAL, "The cause is unknown"),
        ([100, 300] * 2, [100, 500] * 2, LoadFinding.OPPOSITE, "does not explain it"),
        ([100, 300] * 2, [100] * 4, LoadFinding.NO_WAIT, "equally long"),
    ],
)
def test_without_evidence_no_cause_is_reported(sizes, waits, finding, words):
    load = load_of(sizes, waits)
    assert load is not None
    assert load.worst.finding is finding
    assert words in describe_expert_load(load)
    assert "Likely cause" not in describe_expert_load(load)


def directed_load(own, of_expert, own_waits, expert_waits, *, sizes_known=True):
    """The load of two ranks that send tokens to experts and results back in each forward."""
    builder = RunBuilder(("",), world_size=4, process_groups=GROUPS)
    for rank in range(2):
        one = builder.rank(rank)
        for step in range(2):
            begin = 1000 * step
            one.step(step, begin, begin + 1000)
            sent = [(own[rank], own_waits[rank]), (of_expert[rank], expert_waits[rank])]
            for place, (size, wait) in enumerate(sent):
                start = begin + 400 * place
                one.add(
                    EventKind.ALL_TO_ALL, start, start + wait, need_ns=start, group=1,
                    bytes=size if sizes_known else -1, phase=Phase.FORWARD,
                    sequence=2 * step + place,
                )  # fmt: skip
    return measure_expert_load(builder.build())


def test_the_results_that_a_rank_sends_back_are_the_load_of_its_experts():
    load = directed_load([200, 200], [100, 300], [10, 10], [300, 50])
    assert load is not None
    assert load.worst.finding is LoadFinding.CAUSE
    assert [row.expert_bytes for row in load.worst.members] == [100, 300]
    assert load.worst.imbalance_ratio == pytest.approx(1.5)
    assert "the experts of rank 1 send 1.50 times" in describe_expert_load(load)


def test_unequal_batches_are_no_load_of_experts():
    load = directed_load([100, 300], [200, 200], [300, 50], [10, 10])
    assert load is not None
    assert load.worst.finding is LoadFinding.OWN_TOKENS
    assert "unequal batches" in describe_expert_load(load)
    assert "load imbalance" not in describe_expert_load(load)


def test_unknown_sizes_are_not_equal_sizes():
    load = directed_load([200, 200], [100, 300], [10, 10], [300, 50], sizes_known=False)
    assert load is not None
    assert load.worst.finding is LoadFinding.NO_SIZES
    assert "sizes of their all-to-alls are unknown" in describe_expert_load(load)


def test_one_recorded_rank_tells_nothing():
    load = load_of([100, 300, 0, 0], [500, 100, 0, 0], ranks=(0,))
    assert load is not None
    assert load.worst.finding is LoadFinding.ALONE
    assert "unknown" in describe_expert_load(load)


def test_a_dimension_without_all_to_alls_exchanges_no_tokens():
    assert load_of([100] * 4, [100] * 4, kind=EventKind.ALL_REDUCE) is None
