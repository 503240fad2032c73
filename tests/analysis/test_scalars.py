from fsdp_inspect.analysis.scalars import measure_scalars
from tests.builders import InMemoryRun, RunBuilder, steady_run


class WatchedRun(InMemoryRun):
    """A run that notes the ranks whose scalars were read."""

    read = ()

    def scalars(self, rank):
        vars(self)["read"] = [*self.read, rank]
        return super().scalars(rank)


def test_the_loss_is_a_series_over_steps():
    [series] = measure_scalars(steady_run(num_steps=3))
    assert (series.name, series.rank) == ("loss", 0)
    assert (series.steps, series.values) == ((0, 1, 2), (4.0, 3.0, 2.0))


def test_the_lowest_rank_that_logged_speaks_for_the_run():
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 10)
    builder.rank(1).step(0, 0, 10)
    builder.rank(1).loss(0.5)
    [series] = measure_scalars(builder.build())
    assert (series.rank, series.values) == (1, (0.5,))


def test_a_step_logged_twice_keeps_the_last_value():
    builder = RunBuilder()
    builder.rank(0).step(4, 0, 10)
    builder.rank(0).loss(9.0)
    builder.rank(0).loss(1.0)
    [series] = measure_scalars(builder.build())
    assert (series.steps, series.values) == ((4,), (1.0,))


def test_a_run_that_logged_nothing_has_no_series():
    assert measure_scalars(RunBuilder().build()) == ()


def test_ranks_that_log_nothing_new_are_not_read():
    run = WatchedRun(**vars(steady_run(world_size=3)))
    measure_scalars(run)
    assert run.read == [0]
