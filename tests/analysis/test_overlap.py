from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.trace.codes import Phase
from tests.builders import RunBuilder, steady_run


def one_step(*, world_size=1):
    builder = RunBuilder(world_size=world_size)
    for rank in range(world_size):
        builder.rank(rank).step(0, 0, 100)
    return builder


def test_overlap_is_what_is_not_exposed():
    overlap = measure_overlap(steady_run()).run
    assert (overlap.communication_ns, overlap.exposed_ns) == (500, 250)
    assert overlap.overlap_ratio == 0.5


def test_two_collectives_at_once_count_once():
    builder = one_step()
    builder.rank(0).all_gather("layers.0", 0, 20)
    builder.rank(0).reduce_scatter("layers.1", 10, 30)
    assert measure_overlap(builder.build()).run.communication_ns == 30


def test_without_communication_the_overlap_is_unknown():
    overlap = measure_overlap(one_step().build()).run
    assert (overlap.communication_ns, overlap.overlap_ratio) == (0, None)


def test_messages_and_collectives_of_a_step_add_up():
    overlap = measure_overlap(steady_run()).run
    assert (overlap.communication_bytes, overlap.collectives_per_step) == (6 * 64 + 4, 7)


def test_collectives_of_an_evaluation_are_not_counted():
    builder = one_step()
    builder.rank(0).all_gather("layers.0", 0, 20, phase=Phase.EVALUATION)
    overlap = measure_overlap(builder.build()).run
    assert (overlap.collectives_per_step, overlap.communication_bytes) == (0, 0)


def test_ranks_come_with_their_hosts():
    builder = one_step(world_size=2)
    builder.rank(1).record["host"] = "node-b"
    assert [(row.rank, row.host) for row in measure_overlap(builder.build()).ranks] == [
        (0, ""),
        (1, "node-b"),
    ]


def test_a_run_without_a_timed_step_has_no_overlap():
    overlap = measure_overlap(steady_run(num_steps=1, warmup_steps=1))
    assert (overlap.run, overlap.ranks) == (None, ())
