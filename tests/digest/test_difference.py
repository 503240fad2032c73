import pytest

from fsdp_inspect.digest.difference import compare_runs
from tests.builders import RunBuilder, steady_run


def run_of_step(duration, **manifest):
    builder = RunBuilder(world_size=1, **manifest)
    builder.rank(0).step(0, 0, duration)
    return builder.build()


def metrics_of(first, second):
    return {metric.name: metric for metric in compare_runs(first, second).metrics}


def test_settings_that_differ_are_listed_with_both_values():
    first = steady_run(config={"steps": 5, "sharding": {"wrap": "block", "depth": 1}})
    second = steady_run(config={"steps": 5, "sharding": {"wrap": "root"}})
    settings = compare_runs(first, second).settings
    assert [(setting.name, setting.first, setting.second) for setting in settings] == [
        ("sharding.depth", 1, None),
        ("sharding.wrap", "block", "root"),
    ]


def test_the_plan_stands_in_where_the_script_said_nothing():
    first = steady_run(plan={"reshard_after_forward": True})
    second = steady_run(plan={"reshard_after_forward": False})
    [setting] = compare_runs(first, second).settings
    assert (setting.name, setting.first, setting.second) == ("reshard_after_forward", True, False)


def test_another_version_of_torch_is_a_difference():
    first, second = steady_run(versions={"torch": "2.13"}), steady_run(versions={"torch": "2.14"})
    assert compare_runs(first, second).settings[0].name == "versions.torch"


def test_what_only_tells_the_runs_apart_is_no_difference():
    first, second = steady_run(config={"name": "a"}), steady_run(config={"name": "b"})
    assert compare_runs(first, second).settings == ()


@pytest.mark.parametrize(
    ("duration", "is_noise"),
    [
        pytest.param(109, True, id="9 % slower"),
        pytest.param(91, True, id="9 % faster"),
        pytest.param(110, False, id="10 % slower"),
    ],
)
def test_times_closer_than_ten_percent_are_noise(duration, is_noise):
    step = metrics_of(run_of_step(100), run_of_step(duration))["step_time_ns"]
    assert step.change == pytest.approx(duration / 100 - 1)
    assert step.is_noise is is_noise


def test_counts_and_bytes_are_never_noise():
    first, second = RunBuilder(world_size=1), RunBuilder(world_size=1)
    for builder, size in ((first, 100), (second, 101)):
        builder.rank(0).step(0, 0, 100)
        builder.rank(0).all_gather("layers.0", 0, 10, bytes=size)
    sent = metrics_of(first.build(), second.build())["communication_bytes"]
    assert (sent.first, sent.second, sent.is_noise) == (100, 101, False)


def test_a_missing_number_has_no_change():
    peak = metrics_of(steady_run(), steady_run())["peak_reserved_bytes"]
    assert (peak.first, peak.second, peak.change, peak.is_noise) == (None, None, None, False)


def test_a_change_from_zero_has_no_ratio():
    exposed = metrics_of(run_of_step(100), steady_run())["exposed_ns"]
    assert (exposed.first, exposed.second, exposed.change) == (0, 250, None)
