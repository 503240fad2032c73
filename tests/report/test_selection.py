import pytest

from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.report.selection import event_blocks, select, steps_in
from tests.builders import RunBuilder, add_steady_step, steady_run


def steps_of(run, selection, rank=0):
    blocks = event_blocks(run, selection, rank)
    return [int(events.step[0]) for block in blocks for events in steps_in(block)]


def test_everything_is_chosen_unless_said_otherwise():
    run = steady_run(world_size=3)
    chosen = select(run, ranks=None, steps=None)
    assert (chosen.ranks, chosen.steps) == ((0, 1, 2), None)
    assert steps_of(run, chosen) == [0, 1, 2, 3]


def test_long_runs_come_in_blocks_of_steps():
    run = steady_run(world_size=1, num_steps=70)
    blocks = list(event_blocks(run, select(run, ranks=None, steps=None), 0))
    assert [len(set(block.step.tolist())) for block in blocks] == [32, 32, 6]


def test_what_a_run_does_not_hold_is_refused_with_what_it_holds():
    run = steady_run()
    with pytest.raises(IncompleteRunError, match=r"Rank 7 not found.*2 ranks: 0, 1"):
        select(run, ranks=[0, 7], steps=None)
    with pytest.raises(IncompleteRunError, match=r"Steps 90 not found.*0 to 3"):
        select(run, ranks=None, steps=[90])


def test_the_unfinished_step_after_the_last_one_can_be_chosen():
    builder = RunBuilder()
    add_steady_step(builder.rank(0), 0, start=0)
    builder.rank(0)._step = 1
    builder.rank(0).forward("layers.0", 1000, 1100)
    run = builder.build()
    assert steps_of(run, select(run, ranks=None, steps=[1])) == [1]
