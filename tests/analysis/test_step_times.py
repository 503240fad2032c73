from fsdp_inspect.analysis.step_times import RARE_PARTS, StepPoint, measure_step_times
from fsdp_inspect.report.charts.results import draw_step_times
from fsdp_inspect.statistics import Distribution
from fsdp_inspect.trace.codes import EventFlag, EventKind
from tests.builders import RunBuilder, run_on, steady_run


def run_of_durations(*durations, **manifest):
    builder, start = RunBuilder(world_size=1, **manifest), 0
    for step, duration in enumerate(durations):
        builder.rank(0).step(step, start, start + duration)
        start += duration
    return builder.build()


def test_warmup_does_not_touch_the_step_time():
    times = measure_step_times(run_of_durations(9000, 10, 30, 20, warmup_steps=1))
    assert times.step_time_ns == Distribution(typical=20, median=20, p10=12, p90=28, num_steps=3)


def test_the_step_time_is_the_mean_of_the_middle_half():
    # 10 and 40 are left out: (32 + 20) / 2 = 26. Steps 2 and 3 both differ from it by 6.
    times = measure_step_times(run_of_durations(10, 40, 32, 20))
    assert (times.step_time_ns.typical, times.step_time_ns.median) == (26, 26)
    assert times.closest_step == 2


def test_every_rank_has_its_own_step_time():
    builder = RunBuilder(world_size=2)
    builder.rank(0).step(0, 0, 100)
    builder.rank(1).step(0, 0, 150)
    ranks = measure_step_times(builder.build()).ranks
    assert [(row.rank, row.step_time_ns.typical) for row in ranks] == [(0, 100), (1, 150)]


def test_the_line_over_steps_shows_warmup_and_memory_steps_as_not_timed():
    run = run_of_durations(50, 10, 60, 20, warmup_steps=1, memory_steps=[2])
    shown = [(point.step, point.is_timed) for point in measure_step_times(run).over_steps]
    assert shown == [(0, False), (1, True), (2, False), (3, True)]


def test_a_point_carries_what_that_step_cost():
    point = measure_step_times(steady_run()).over_steps[0]
    assert point == StepPoint(0, 1000, communication_ns=500, exposed_ns=250, is_timed=False)


def test_the_communication_of_steps_is_unknown_if_an_import_shows_no_collective():
    point = measure_step_times(run_on(["a", "b"], source="imported")).over_steps[0]
    assert (point.communication_ns, point.exposed_ns) == (None, None)


def test_steps_with_a_collection_a_compilation_or_an_evaluation_are_marked_and_can_be_hidden():
    builder = RunBuilder(world_size=1)
    rank = builder.rank(0)
    for step in range(5):
        start = 1000 * step
        rank.step(step, start, start + 1000)
        rank.add(EventKind.GARBAGE_COLLECTION, start, start + (200 if step == 1 else 5))
        if step in {1, 2}:
            rank.add(EventKind.COMPILATION, start + 300, start + 500)
        if step == 3:
            rank.add(EventKind.GRAPH_CAPTURE, start, start + 100)
            rank.add(EventKind.KERNEL_LOADING, start + 100, start + 150)
        if step == 4:
            rank.add(EventKind.BETWEEN_STEPS, start, start + 400)
        # Without a duration, an allocation marks its step; a short one does not.
        flags = EventFlag.LATEST_END if step == 2 else 0
        rank.add(EventKind.DEVICE_ALLOCATION, start + 5, start + 5, flags=flags)
    times = measure_step_times(builder.build())
    assert {point.step: point.contains for point in times.over_steps if point.contains} == {
        1: ("garbage collection", "compilation"),
        2: ("compilation", "device allocation"),
        3: ("graph capture", "kernel loading"),
        4: ("evaluation or checkpoint",),
    }
    assert times.rare_parts == RARE_PARTS
    assert [each["contains"] for each in times.to_pandas().to_dict("records")][:2] == [
        "",
        "garbage collection, compilation",
    ]
    drawn = draw_step_times(times)
    assert drawn is not None
    assert all(f"{part}" in str(drawn) for part in RARE_PARTS)
    kept = times.without(["compilation"])
    assert [point.step for point in kept.over_steps] == [0, 3, 4]
    assert kept.rare_parts == ("graph capture", "kernel loading", "evaluation or checkpoint")


def test_a_run_of_warmup_only_has_steps_but_no_step_time():
    times = measure_step_times(run_of_durations(50, 60, warmup_steps=5))
    assert (times.step_time_ns, times.median_rank, times.closest_step) == (None, None, None)
    assert [point.step for point in times.over_steps] == [0, 1]


def test_a_run_without_events_has_nothing():
    times = measure_step_times(RunBuilder().build())
    assert (times.ranks, times.over_steps, times.step_time_ns) == ((), (), None)
