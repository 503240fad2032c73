"""A trend follows a metric over runs and names the run at which its level changed."""

import numpy as np
import pyarrow as pa
import pytest

from fsdp_inspect.catalog.tables import RUNS, to_table
from fsdp_inspect.catalog.trends import METRICS_OF_RUNS, TrendAxis, find_run_metric, measure_trend
from fsdp_inspect.metrics import METRICS


def make_runs(times: list[float | None], **columns: list[object]) -> pa.Table:
    rows = [
        {
            "run": f"run-{number:03}",
            "created": f"2026-01-01T00:{number:02}:00+00:00",
            "created_unix_ns": number,
            "model": "Decoder",
            "world_size": 8,
            "settings": [("config.lr", "0.1" if number % 2 else "0.2")],
            "step_time_ns": time,
            **{name: values[number] for name, values in columns.items()},
        }
        for number, time in enumerate(times)
    ]
    return to_table(RUNS, rows)


def noisy(level: int, count: int, seed: int = 0) -> list[int]:
    spread = np.random.default_rng(seed).uniform(0.98, 1.02, count)
    return [round(level * one) for one in spread]


def test_the_run_that_began_a_change_and_the_run_before_it_are_named() -> None:
    trend = measure_trend(make_runs([*noisy(1000, 12), *noisy(1300, 8)]), "step_time_ns")
    [change] = trend.changes
    assert (change.run_before, change.run) == ("run-011", "run-012")
    assert change.change_ratio == pytest.approx(0.3, abs=0.03)
    assert trend.series == ("Decoder, world size 8",)


def test_metrics_of_runs_have_the_labels_of_all_reports() -> None:
    labels = {name: find_run_metric(name).label for name in METRICS_OF_RUNS}
    assert labels.pop("step_time_p90_ns") == "p90 step time"
    assert labels.pop("loss") == "loss"
    assert labels == {name: METRICS[name].label for name in labels}


def test_noise_an_outlier_and_a_short_history_are_no_change() -> None:
    steady = noisy(1000, 20)
    steady[7] = 5000
    assert measure_trend(make_runs(steady), "step_time_ns").changes == ()
    assert measure_trend(make_runs([1000] * 4 + [2000] * 4), "step_time_ns").changes == ()


@pytest.mark.parametrize(
    ("times", "num_models", "num_judged"),
    [([1000] * 9, 1, 0), ([1000] * 10, 1, 1), ([1000] * 19, 2, 1), ([1000] * 18, 2, 0)],
)
def test_a_series_of_less_than_ten_points_cannot_show_a_change(times, num_models, num_judged):
    models = [f"model {number % num_models}" for number in range(len(times))]
    runs = make_runs(times, model=models)
    assert len(measure_trend(runs, "step_time_ns").judged_series) == num_judged
    assert measure_trend(runs, "step_time_ns", axis="world_size").judged_series == ()


def test_a_series_with_a_value_of_zero_is_not_judged():
    trend = measure_trend(make_runs([0] * 6 + [1000] * 6), "step_time_ns")
    assert (trend.changes, trend.judged_series) == ((), ())


def test_memory_changes_from_one_percent_on() -> None:
    peaks = [1000] * 6 + [1015] * 6
    runs = make_runs([1000] * 12, peak_allocated_bytes=peaks)
    assert [one.run for one in measure_trend(runs, "peak_allocated_bytes").changes] == ["run-006"]


def test_runs_of_other_models_and_ranks_are_separate_series() -> None:
    runs = make_runs(
        [1000, 500, 1000, 500, None], world_size=[8, 16, 8, 16, 8], model=["A", "A", "A", "B", "A"]
    )
    trend = measure_trend(runs, "step_time_ns")
    assert trend.series == ("A, world size 8", "A, world size 16", "B, world size 16")
    assert trend.num_left_out == 1


def test_commits_tags_and_ranks_have_one_point_each_with_the_median() -> None:
    commits = ["a", "a", "a", "b"]
    tags = [["x"], ["x", "y"], [], ["y"]]
    runs = make_runs([1, 2, 9, 4], git_commit=commits, tags=tags, world_size=[16, 8, 8, 8])
    by = {
        axis: [
            (point.label, point.value)
            for point in measure_trend(runs, "step_time_ns", axis=axis, split=()).points
        ]
        for axis in (TrendAxis.COMMIT, TrendAxis.TAG, TrendAxis.WORLD_SIZE)
    }
    assert by[TrendAxis.COMMIT] == [("a", 2.0), ("b", 4.0)]
    assert by[TrendAxis.TAG] == [("x", 1.5), ("y", 3.0)]
    assert by[TrendAxis.WORLD_SIZE] == [("8", 4.0), ("16", 1.0)]


def test_runs_whose_plain_steps_differ_are_named_beside_times_of_steps() -> None:
    runs = make_runs(
        [1000] * 3, plain_step_time_ns=[None, 2000, None], peak_allocated_bytes=[1] * 3
    )
    assert measure_trend(runs, "step_time_ns").other_plain_runs == ("run-001",)
    assert measure_trend(runs, "peak_allocated_bytes").other_plain_runs == ()


def test_any_setting_filters_and_splits() -> None:
    runs = make_runs([1, 2, 3, 4])
    trend = measure_trend(runs, "step_time_ns", where={"config.lr": ["0.1"]})
    assert [point.value for point in trend.points] == [2.0, 4.0]
    split = measure_trend(runs, "step_time_ns", split=["config.lr"])
    assert split.series == ("config.lr 0.1", "config.lr 0.2")


def test_an_unknown_metric_is_an_error_that_lists_the_metrics() -> None:
    with pytest.raises(ValueError, match="step_time_ns"):
        measure_trend(make_runs([1]), "run")
