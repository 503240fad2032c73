import pytest

from fsdp_inspect.analysis.scalars import ScalarSeries, find_loss, measure_scalars
from fsdp_inspect.analysis.summary import Loss, measure_summary
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


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["aux_loss", "Loss", "train_loss"], "Loss"),
        (["aux_loss", "eval_loss", "train/loss"], "train/loss"),
        (["loss_metrics/global_max_loss", "loss_metrics/global_avg_loss"],
         "loss_metrics/global_avg_loss"),
        (["value_loss", "retrieval_loss"], "retrieval_loss"),
        (["val_loss", "test/loss", "validation loss", "lr"], None),
    ],
)  # fmt: skip
def test_the_loss_of_the_training_is_found_by_its_name(names, found):
    loss = find_loss([ScalarSeries(name, 0, (0,), (1.0,)) for name in names])
    assert (loss and loss.name) == found


def test_a_loss_with_another_name_is_that_of_the_summary():
    builder = RunBuilder()
    rank = builder.rank(0)
    rank.record = {"scalar_names": ["val_loss", "train_loss"]}
    for step in range(3):
        rank.step(step, step * 10, step * 10 + 10)
        values = ((0, 9.0), (1, 4.0 - step))
        rank.logged += [
            {"step": step, "name": name, "time_ns": 0, "value": value} for name, value in values
        ]
    loss = measure_summary(builder.build()).loss
    assert loss == Loss(4.0, 2.0, 3, "train_loss")


def test_a_run_that_logged_nothing_has_no_series():
    assert measure_scalars(RunBuilder().build()) == ()


def test_ranks_that_log_nothing_new_are_not_read():
    run = WatchedRun(**vars(steady_run(world_size=3)))
    measure_scalars(run)
    assert run.read == [0]
