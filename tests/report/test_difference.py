from fsdp_inspect.digest.difference import compare_runs
from fsdp_inspect.report.difference import render_difference
from tests.builders import RunBuilder, steady_run
from tests.report.rendering import text_of


def run_of_step(duration, **manifest):
    builder = RunBuilder(world_size=1, **manifest)
    builder.rank(0).step(0, 0, duration)
    return builder.build()


def test_two_runs_read_side_by_side_settings_first():
    first = run_of_step(100, run_id="kept", config={"reshard": False})
    second = run_of_step(150, run_id="freed", config={"reshard": True})
    assert text_of(render_difference(compare_runs(first, second))).splitlines()[:6] == [
        "How they differ",
        "A  kept",
        "B  freed",
        "differs in reshard: false -> true",
        "                              A         B   change",
        "step time              100.0 ns  150.0 ns  +50.0 %",
    ]


def test_a_small_difference_of_times_is_marked_as_noise():
    shown = text_of(render_difference(compare_runs(run_of_step(100), run_of_step(104))))
    assert "+4.0 %  within noise" in shown


def test_equal_runs_are_called_equal():
    shown = text_of(render_difference(compare_runs(steady_run(), steady_run())))
    assert "Their settings are the same." in shown
    assert "388 B     388 B       =" in shown
