"""Slow nodes, TP groups and replicas, distinguished from single slow ranks and from noise."""

from dataclasses import replace

import pytest

from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.verdict import Limit
from fsdp_inspect.report.ranks_wording import describe_answer
from fsdp_inspect.trace.tables import DeviceTable
from tests.cube_run import cube_run

TWO_NODES = ("a",) * 4 + ("b",) * 4


def slow(*ranks, work=500):
    return dict.fromkeys(ranks, work)


@pytest.mark.parametrize(
    ("work", "hosts", "names", "ranks"),
    [
        pytest.param(slow(2, 3), ("a",) * 8, ("tp group of rank 2",), (2, 3), id="tp group"),
        pytest.param(slow(4, 5, 6, 7), ("a",) * 8, ("replicate 1",), (4, 5, 6, 7), id="replica"),
        pytest.param(slow(2, 3, 6, 7), ("a",) * 8, ("shard 1",), (2, 3, 6, 7), id="shard"),
        pytest.param(
            {2: 500, 3: 620}, ("a",) * 8, ("tp group of rank 2",), (2, 3), id="alike, not equal"
        ),
    ],
)
def test_a_slow_group_is_named_with_its_cost(work, hosts, names, ranks):
    found = measure_ranks(cube_run(work, hosts=hosts))
    assert found.straggler is None
    assert (found.slow_group.names, found.slow_group.ranks) == (names, ranks)
    assert found.slow_group.cost_ns == 400
    assert (found.slow_group.busiest_ratio, found.slow_group.bound_because) == (1.0, "")
    assert found.slow_group.meanwhile == "forward"


def test_a_node_that_is_always_late_is_named_although_its_clock_cannot_be_aligned():
    found = measure_ranks(cube_run(slow(4, 5, 6, 7), hosts=TWO_NODES))
    assert "rank 4 cannot be aligned" in found.refusals[0]
    assert found.slow_group.names == ("node b", "replicate 1")
    assert (found.slow_group.cost_ns, found.slow_group.last_ratio) == (400, 1.0)
    assert found.slow_group.bound_because == "the clocks of the ranks cannot be aligned"


@pytest.mark.parametrize(
    ("work", "straggler"),
    [
        pytest.param(slow(5), 5, id="one rank"),
        pytest.param({4: 150, 5: 500}, 5, id="one rank, and a little on its neighbour"),
        pytest.param(slow(0, 7), None, id="two ranks without a common place"),
        pytest.param(slow(0, 1, 2, 3, 4, 5), None, id="most ranks"),
        pytest.param({}, None, id="equal ranks"),
        pytest.param([slow(0, 1), slow(2, 3)] * 4, None, id="groups in turns"),
        pytest.param([slow(2), slow(3)] * 4, None, id="ranks of a group in turns"),
    ],
)
def test_no_slow_group_is_named_without_evidence(work, straggler):
    found = measure_ranks(cube_run(work))
    assert found.slow_group is None
    assert (found.straggler and found.straggler.rank) == straggler


def test_a_group_without_cores_is_not_slow():
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [{**unknown, "time_ns": at, "run_delay_ns": at // 2} for at in (0, 1000)]
    run = replace(
        cube_run(slow(4, 5, 6, 7), hosts=TWO_NODES),
        device_tables={5: DeviceTable.from_rows(samples)},
    )
    found = measure_ranks(run)
    assert found.slow_group is None
    assert found.straggler is None
    assert "rank 5 has no CPU core for 50% of the time" in found.straggler_refusal


def test_one_step_cannot_distinguish_a_slow_group_from_chance():
    found = measure_ranks(cube_run(slow(2, 3), steps=1))
    assert found.slow_group is None
    assert "each of ranks 2-3 works longer" in found.straggler_refusal
    assert "Record at least 2 timed steps." in found.straggler_refusal


def test_the_verdict_names_the_slow_group_and_its_other_name():
    summary = measure_summary(cube_run(slow(4, 5, 6, 7), hosts=TWO_NODES))
    verdict = summary.verdict
    assert verdict.limit is Limit.SLOW_GROUP
    assert verdict.sentence == "Node b is slow: it costs at most 75.5% of the step."
    assert verdict.because == (
        "Each of ranks 4-7 works longer than every other rank in 100% of the steps."
    )
    assert "The same ranks are replicate 1: the run cannot show which" in verdict.why
    assert verdict.numbers["slow_group_cost_ns"] == 400
    sentences = [each.sentence for each in summary.rank_verdicts]
    assert sentences[3:5] == ["This rank waits for node b.", "The other ranks wait for node b."]


def test_the_command_states_the_group_first():
    answer = describe_answer(measure_ranks(cube_run(slow(2, 3))))
    assert answer[0] == ("Ranks 2-3 (tp group of rank 2) are a slow group and cost 400 ns a step.")
    assert "The last rank is one of them at 100% of the collectives with other ranks" in answer[2]
