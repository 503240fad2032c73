"""Test the late ranks of each dimension of the mesh, and the waits for them."""

from fsdp_inspect.analysis.clocks.alignment import Alignment, align_clocks
from fsdp_inspect.analysis.mesh_grid import measure_mesh_grid
from fsdp_inspect.analysis.stragglers.arrivals import find_arrivals
from fsdp_inspect.analysis.stragglers.dimension_waits import measure_dimension_waits, waits_for
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.report.ranks_wording import render_ranks
from fsdp_inspect.trace.codes import EventKind
from fsdp_inspect.trace.run import ProcessGroup
from tests.builders import RunBuilder
from tests.cube_run import cube_run
from tests.report.terminal_text import text_of

GROUPS = [
    ProcessGroup(index=0, name="0", ranks=[0, 2], role="shard"),
    ProcessGroup(index=1, name="1", ranks=[0, 1], dimension="tp"),
]
PAIRS = {0: [(0, 2), (1, 3)], 1: [(0, 1), (2, 3)]}
STEP_NS = 10_000


def run_of(*collectives, groups=GROUPS, steps=2):
    """Four ranks on a mesh of two by two.

    Each collective is its group and the arrival of each rank; it ends 10 ns after the last arrival
    in its pair. Later collectives begin 1,000 ns after the one before.
    """
    builder = RunBuilder(("",), world_size=4, process_groups=groups)
    for rank in range(4):
        own = builder.rank(rank)
        own.record = {"host": "a"}
        for step in range(steps):
            begin = STEP_NS * step
            own.step(step, begin, begin + STEP_NS)
            for place, (group, arrivals) in enumerate(collectives):
                pair = next(pair for pair in PAIRS[group] if rank in pair)
                start = begin + 1000 * place + arrivals[rank]
                end = begin + 1000 * place + max(arrivals[one] for one in pair) + 10
                own.add(
                    EventKind.ALL_REDUCE, start, end, need_ns=start, group=group, bytes=4,
                    sequence=step * len(collectives) + place,
                )  # fmt: skip
    return builder.build()


def waits_of(run, uncertainty_ns=0):
    arrivals = find_arrivals(run, range(4), [0, 1], align_clocks(run))
    return {row.dimension: row for row in measure_dimension_waits(run, arrivals, uncertainty_ns)}


LATE = [(1, (0, 0, 0, 300)), (0, (0, 0, 310, 310))]
"""Rank 3 is late in its TP group. Then both ranks of the group are late for the others."""


def test_each_dimension_has_late_ranks_of_its_own():
    waits = waits_of(run_of(*LATE))
    assert (waits["tp"].late_ranks, waits["tp"].waiting_rank) == ((3,), 2)
    assert (waits["tp"].late_wait_ns, waits["tp"].caused_ratio) == (300, 1.0)
    assert waits["tp"].late_place == "shard 1, tp 1"
    assert (waits["shard"].late_ranks, waits["shard"].late_wait_ns) == ((2, 3), 310)
    assert waits["shard"].late_place == "shard 1"
    assert waits["shard"].waiting_rank in (0, 1)


def test_a_group_that_is_late_together_is_late_across_and_not_inside():
    waits = waits_of(run_of((1, (0, 0, 300, 300)), (0, (0, 0, 310, 310))))
    assert (waits["tp"].late_wait_ns, waits["tp"].late_ranks) == (0, ())
    assert (waits["shard"].late_ranks, waits["shard"].late_place) == ((2, 3), "shard 1")


def test_ranks_that_are_late_in_turns_are_not_named():
    waits = waits_of(run_of((1, (0, 300, 0, 300)), (1, (300, 0, 300, 0))))
    assert waits["tp"].late_ranks == ()
    assert waits["tp"].late_place == ""
    assert waits["tp"].late_wait_ns == 300


def test_a_wait_below_the_uncertainty_of_the_clocks_is_none():
    waits = waits_of(run_of(*LATE), uncertainty_ns=305)
    assert (waits["tp"].late_wait_ns, waits["tp"].late_ranks) == (0, ())
    assert waits["shard"].late_wait_ns == 310


def test_the_waits_for_one_rank_are_those_where_it_is_last():
    run = run_of(*LATE)
    arrivals = find_arrivals(run, range(4), [0, 1], align_clocks(run))
    assert waits_for(run, arrivals, 3, 0) == {"shard": 310, "tp": 300}
    assert waits_for(run, arrivals, 2, 0) == {"shard": 310}
    assert waits_for(run, arrivals, 0, 0) == {}


def test_a_mesh_of_one_dimension_is_not_split():
    groups = [ProcessGroup(index=0, name="0", ranks=[0, 2], role="shard")]
    assert waits_of(run_of((0, (0, 0, 310, 310)), groups=groups)) == {}


def test_without_aligned_clocks_nothing_is_known():
    run = run_of(*LATE)
    arrivals = find_arrivals(run, range(4), [0, 1], Alignment(None, {}, {}))
    assert measure_dimension_waits(run, arrivals, 0) == ()
    assert waits_for(run, arrivals, 3, 0) == {}


def test_the_report_names_the_late_ranks_of_each_dimension():
    text = text_of(render_ranks(measure_ranks(run_of(*LATE))))
    words = " ".join(text.split())
    assert (
        "Rank 3 (shard 1, tp 1) causes 100% of the waits along tp. Rank 2 waits longest there: "
        "300 ns a step." in words
    )
    assert "Ranks 2-3 (shard 1) cause 100% of the waits along shard." in words
    assert "Waits for late ranks by mesh dimension" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_straggler_of_a_mesh_is_named_with_the_waits_for_it_by_dimension():
    ranks = measure_ranks(cube_run({5: 500}))
    assert ranks.straggler is not None, ranks.straggler_refusal
    assert (ranks.straggler.rank, ranks.straggler.cost_ns) == (5, 400)
    assert ranks.straggler.waits_ns == {"replicate": 400, "shard": 400, "tp": 400}
    assert {row.dimension: row.late_ranks for row in ranks.dimension_waits} == {
        "replicate": (4, 5, 6, 7),
        "shard": (4, 5),
        "tp": (5,),
    }


def test_the_grid_names_the_same_rank():
    run = cube_run({5: 500})
    grid = measure_mesh_grid(run, measure_ranks(run).ranks)
    assert grid.located is not None
    assert grid.located.ranks == (5,)
