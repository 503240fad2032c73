"""Comparisons of two runs, repeats and several sides, and their allowed conclusions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fsdp_inspect.comparison import conclusions
from fsdp_inspect.comparison.comparison import compare_runs
from fsdp_inspect.comparison.differences import UnitMeasure, find_unit_changes
from fsdp_inspect.comparison.noise import NoiseVerdict
from fsdp_inspect.comparison.settings import compare_settings
from fsdp_inspect.report.comparison import render_comparison
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.kernels import KernelColumns, KernelKind, KernelRecord
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import RunBuilder, steady_run
from tests.report.terminal_text import text_of


def run_of_step(duration, *, exposed=0, **manifest):
    """One step of one rank: a gather with a wait from its start, then forward."""
    builder = RunBuilder(world_size=2, **manifest)
    rank = builder.rank(0)
    rank.step(0, 0, duration)
    rank.all_gather("layers.0", 0, exposed, need=0)
    rank.forward("layers.0", exposed, duration)
    return builder.build()


def repeats(durations, **manifest):
    return [
        run_of_step(duration, run_id=f"{manifest.get('git_commit')}-{number}", **manifest)
        for number, duration in enumerate(durations)
    ]


def metric_of(comparison, name="step_time_ns"):
    return next(metric for metric in comparison.metrics if metric.name == name)


def run_with_losses(losses, **manifest):
    builder = RunBuilder(world_size=2, **manifest)
    rank = builder.rank(0)
    for step, loss in enumerate(losses):
        rank.step(step, 100 * step, 100 * step + 100)
        rank.loss(loss)
    return builder.build()


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ([5.0] * 4 + [1.0] * 16, None),
        ([1.0] * 10 + [1.04] * 10, None),
        ([5.0] * 20, "5"),
        ([1.0] * 19 + [math.nan], "not finite"),
        ([0.5, 2.0] * 10, None),
    ],
)
def test_losses_at_another_level_are_stated(losses, end):
    first, other = run_with_losses([1.0] * 30, run_id="x"), run_with_losses(losses, run_id="y")
    caveats = compare_runs(first, other).caveats
    assert caveats == (
        ()
        if end is None
        else (
            f"loss is 1 in A and {end} in B (median of 20 values up to step 19). This comparison "
            "does not show why.",
        )
    )
    assert compare_runs(other, other).caveats == ()


def test_repeats_whose_losses_lie_around_those_of_the_other_side_do_not_differ():
    low, high = (run_with_losses([loss] * 20, git_commit="old") for loss in (1.0, 2.0))
    between, above = (run_with_losses([loss] * 20, git_commit="new") for loss in (1.5, 3.0))
    assert compare_runs([low, high], between).caveats == ()
    [caveat] = compare_runs([low, high], above).caveats
    assert caveat.startswith("loss is 1.5 in A and 3 in B (median of 20 values")


def test_noisy_losses_of_one_distribution_do_not_differ():
    random = np.random.default_rng(0)
    runs = [run_with_losses(1.2 + 0.25 * random.standard_normal(60)) for _ in range(40)]
    stated = [
        compare_runs([one], [other]).caveats
        for one, other in zip(runs[:20], runs[20:], strict=True)
    ]
    assert stated == [()] * 20


def test_two_runs_are_two_sides_and_the_first_is_the_reference():
    comparison = compare_runs(run_of_step(100, run_id="x"), run_of_step(200, run_id="y"))
    assert [(side.label, side.median_run) for side in comparison.sides] == [("A", "x"), ("B", "y")]
    step = metric_of(comparison)
    assert (step.values, step.judgements[0].change) == ((100, 200), 1.0)


def test_runs_of_the_same_settings_are_repeats_of_one_side():
    comparison = compare_runs(
        run_of_step(100, run_id="1", git_commit="old"),
        run_of_step(150, run_id="2", git_commit="new"),
        run_of_step(104, run_id="3", git_commit="old"),
        run_of_step(102, run_id="4", git_commit="old"),
    )
    assert [[run.run_id for run in side.runs] for side in comparison.sides] == [
        ["1", "3", "4"],
        ["2"],
    ]
    assert comparison.sides[0].median_run == "4"
    assert metric_of(comparison).values == (102, 150)


def test_runs_that_all_have_the_same_settings_are_compared_with_each_other():
    comparison = compare_runs(*repeats([100, 101, 102]))
    assert [side.label for side in comparison.sides] == ["A", "B", "C"]
    assert comparison.conclusions[0].reasons == (
        "All recorded settings are the same: the difference is noise, or no recorded setting "
        "explains it.",
    )


def test_lists_of_runs_are_sides_as_they_are():
    comparison = compare_runs(repeats([100, 101]), repeats([120]))
    assert [len(side.runs) for side in comparison.sides] == [2, 1]


def test_five_runs_a_side_are_tested():
    before = repeats([100, 101, 102, 103, 104], git_commit="old")
    after = repeats([105, 106, 107, 108, 109], git_commit="new")
    [conclusion] = compare_runs(before, after).conclusions
    assert conclusion.verdict is NoiseVerdict.DIFFERENT
    assert conclusion.sentence == (
        "B takes 4.9% more time than A. The step takes 107 ns instead of 102 ns (95% interval "
        "+2.0% to +7.8%, p = 0.0079)."
    )


def test_one_run_a_side_below_ten_percent_cannot_be_told_and_says_what_is_missing():
    [conclusion] = compare_runs(run_of_step(100), run_of_step(107)).conclusions
    assert conclusion.verdict is NoiseVerdict.UNKNOWN
    assert conclusion.sentence == (
        "B and A do not differ significantly in step time. The step takes 107 ns instead "
        "of 100 ns: +7%. Identical processes differ by up to 10%, or by as much as the repeats "
        "here. "
        "To test the difference, record 4 more runs of A and 4 more of B."
    )


def test_a_part_that_changes_more_than_the_noise_of_a_step_is_named():
    [conclusion] = compare_runs(
        run_of_step(100, exposed=10), run_of_step(107, exposed=40)
    ).conclusions
    assert conclusion.verdict is NoiseVerdict.UNKNOWN
    assert conclusion.reasons[0] == (
        "Parts of the typical step change by more than 10% of it: exposed all-gather +30 ns, "
        "forward -23 ns."
    )


def starved(run, ratio):
    """The run with a training thread that had no core for a fraction of the time."""
    row = dict.fromkeys(DeviceTable.DTYPES, -1)
    rows = [{**row, "time_ns": time, "run_delay_ns": time * ratio} for time in (100, 1100)]
    return replace(run, device_tables={0: DeviceTable.from_rows(rows)})


@pytest.mark.parametrize(
    ("before", "after", "is_said"), [(0.3, 0.3, 1), (0, 0.2, 1), (0.1, 0.1, 0)]
)
def test_missing_cores_are_named_as_a_reason_for_other_times(before, after, is_said):
    first, second = starved(run_of_step(100), before), starved(run_of_step(120), after)
    [conclusion] = compare_runs(first, second).conclusions
    assert conclusion.verdict is NoiseVerdict.DIFFERENT
    assert (
        "may come from the machine: training threads had no CPU core" in conclusion.sentence
    ) is bool(is_said)
    assert ("than A, perhaps because of the machine." in conclusion.sentence) is bool(is_said)


def test_a_change_is_explained_by_the_part_and_the_unit_that_moved_in_it():
    slow = run_of_step(200, exposed=110, config={"reshard": True})
    [conclusion] = compare_runs(run_of_step(100, exposed=10), slow).conclusions
    assert conclusion.reasons[:3] == (
        "The typical step changes by +100 ns: exposed all-gather +100 ns.",
        "The cause of waits that changes most is floor: +100 ns.",
        "The unit with the largest change in exposed all-gather is layers.0: +100 ns per step.",
    )
    assert conclusion.reasons[-1] == (
        "The only setting that differs is reshard: the likely reason, unless the machine was "
        "busier in one of the runs."
    )


def test_one_other_setting_is_the_reason_for_counts_only():
    builder = RunBuilder(world_size=2, config={"wrap": "all"})
    rank = builder.rank(0)
    rank.step(0, 0, 400)
    rank.data(0, 200)
    for start in (200, 210):
        rank.all_gather("layers.0", start, start + 10, need=start)
    rank.forward("layers.0", 220, 400)

    [conclusion] = compare_runs(run_of_step(100), builder.build()).conclusions

    assert conclusion.reasons[-1] == (
        "The only setting that differs is wrap, so it is the likely reason for the other counts or "
        "bytes. Whether it changes the step time is not known."
    )


def test_a_part_that_moved_the_other_way_is_said_too():
    slow = run_of_step(160, exposed=110)
    [conclusion] = compare_runs(run_of_step(100, exposed=10), slow).conclusions
    assert conclusion.reasons[0] == (
        "The typical step changes by +60 ns: exposed all-gather +100 ns; in the other "
        "direction: forward -40 ns."
    )


def test_of_several_settings_none_is_called_the_reason():
    second = run_of_step(200, config={"a": 1, "b": 2})
    [conclusion] = compare_runs(run_of_step(100), second).conclusions
    assert conclusion.reasons[-1] == (
        "2 settings differ (a, b). These runs do not show which setting is the reason."
    )


def test_where_nothing_is_told_no_setting_is_called_the_reason():
    [one] = compare_runs(run_of_step(100), run_of_step(101, config={"a": 1})).conclusions
    assert one.reasons[-1] == "The only setting that differs is a."
    [two] = compare_runs(run_of_step(100), run_of_step(101, config={"a": 1, "b": 2})).conclusions
    assert two.reasons[-1] == "2 settings differ (a, b)."


def test_parts_of_the_median_steps_add_up_and_so_do_their_changes():
    comparison = compare_runs(run_of_step(100, exposed=10), steady_run())
    assert sum(part.values_ns[0] for part in comparison.parts) == 100
    assert sum(part.changes_ns[0] for part in comparison.parts) == 900


def test_the_causes_of_waits_add_up_to_the_exposed_time_of_a_typical_step():
    comparison = compare_runs(run_of_step(100, exposed=10), steady_run())
    assert sum(cause.values_ns[1] for cause in comparison.causes) == 250
    assert ("floor", (10, 150), (140,)) in [
        (cause.name, cause.values_ns, cause.changes_ns) for cause in comparison.causes
    ]


def test_counts_and_bytes_are_never_noise():
    second = run_of_step(100)
    second.event_tables[0].bytes[1] = 65
    comparison = compare_runs(run_of_step(100), second)
    sent = metric_of(comparison, "communication_bytes")
    assert (sent.values, sent.judgements[0].verdict) == ((64, 65), NoiseVerdict.DIFFERENT)
    assert comparison.conclusions[0].reasons[0] == (
        "Communication per step differs: communicated bytes 64 B -> 65 B."
    )


def run_with_more_gathers(*steps):
    """Ten steps with ten all-gathers each; one more in some of them."""
    builder = RunBuilder(("layers.0",))
    rank = builder.rank(0)
    for step in range(10):
        rank.step(step, 1000 * step, 1000 * (step + 1))
        for place in range(10 + (step in steps)):
            rank.all_gather("layers.0", 1000 * step + 10 * place, 1000 * step + 10 * place + 5)
    return builder.build()


def test_a_collective_of_some_steps_makes_no_difference():
    some, fewer = run_with_more_gathers(4, 5), run_with_more_gathers(5)
    more = run_with_more_gathers(*range(10))

    alike, other = compare_runs([some], [fewer]), compare_runs([some], [more])

    assert not any("Communication" in reason for reason in alike.conclusions[0].reasons)
    assert metric_of(alike, "collectives_per_step").values == (10, 10)
    assert metric_of(alike, "communication_bytes").judgements[0].verdict is NoiseVerdict.UNKNOWN
    assert any("collectives 10 -> 11" in reason for reason in other.conclusions[0].reasons)


def test_memory_at_the_peak_is_compared_by_category():
    runs = []
    for held in (100, 300):
        builder = RunBuilder(world_size=1)
        builder.rank(0).step(0, 0, 100)
        builder.rank(0).memory(
            MemoryPoint.PEAK, 1000 + held, phase=Phase.FORWARD, activation=1000, buffer=held
        )
        runs.append(builder.build())
    comparison = compare_runs(*runs)
    assert [(row.category, row.values, row.changes) for row in comparison.memory] == [
        ("activation", (1000, 1000), (0,)),
        ("buffer", (100, 300), (200,)),
    ]
    assert "Peak allocated is 200 B higher (at the peak: buffer +200 B)." in (
        comparison.conclusions[0].reasons
    )


def test_units_are_aligned_though_they_were_split():
    split = RunBuilder(units=("layers.0.attention", "layers.0.ffn"))
    rank = split.rank(0)
    rank.step(0, 0, 100)
    rank.all_gather("layers.0.attention", 0, 10, need=0)
    rank.all_gather("layers.0.ffn", 50, 60, need=50)
    rows = compare_runs(run_of_step(100, exposed=15), split.build()).units
    halves = next(row for row in rows if row.fqns == ("layers.0",))
    assert halves.is_regrouped
    assert halves.sides[1].fqns == ("layers.0.attention", "layers.0.ffn")
    assert (halves.sides[1].all_gather.count_per_step, halves.sides[1].exposed_ns) == (2, 20)
    assert halves.sides[1].all_gather.bytes is None
    assert halves.exposed_changes_ns == (5,)


def test_a_unit_of_one_run_only_is_listed_without_a_change():
    alone = RunBuilder(units=("head",))
    alone.rank(0).step(0, 0, 100)
    rows = compare_runs(run_of_step(100), alone.build()).units
    assert {row.exposed_changes_ns for row in rows} == {(None,)}


def test_warmup_steps_never_count():
    first = run_of_step(100)
    builder = RunBuilder(world_size=2, warmup_steps=1)
    builder.rank(0).step(0, 0, 900)
    builder.rank(0).step(1, 900, 1000)
    assert metric_of(compare_runs(first, builder.build())).values == (100, 100)


def test_a_run_without_a_timed_step_is_compared_in_settings_only():
    comparison = compare_runs(run_of_step(100), RunBuilder(config={"a": 1}).build())
    [conclusion] = comparison.conclusions
    assert conclusion.verdict is NoiseVerdict.MISSING
    assert conclusion.sentence == "The times of B and A cannot be compared. No timed step in B."
    assert comparison.settings


def test_another_world_size_is_said_before_any_number():
    comparison = compare_runs(steady_run(), steady_run(world_size=4))
    assert comparison.caveats[0].startswith("Different world size (A: 2, B: 4)")


def test_a_run_that_did_not_end_well_is_said():
    crashed = replace(run_of_step(100, run_id="broken"), status=RunStatus.CUT_OFF)
    caveats = compare_runs(run_of_step(100), crashed).caveats
    assert caveats == (
        "Run broken of B is cut off: the comparison lacks the data that it did not record.",
    )


def test_an_imported_run_without_units_is_compared_with_what_it_has():
    builder = RunBuilder(units=(), source="imported")
    builder.rank(0).step(0, 0, 150)
    comparison = compare_runs(run_of_step(100), builder.build())
    assert metric_of(comparison).values == (100, 150)
    assert comparison.caveats[-1].startswith("The only step of B is a whole imported trace")
    assert all(row.sides[1] is None for row in comparison.units)
    assert any("Different source" in caveat for caveat in comparison.caveats)


def test_a_setting_that_an_import_lacks_is_not_counted_among_more_sides_either():
    first = run_of_step(100, config={"lr": 1}, mesh={"shard": 2})
    third = run_of_step(100, config={"lr": 2}, mesh={"replicate": 2, "shard": 1})
    of_import = run_of_step(100, source="imported", mesh={})
    [alone] = compare_runs(first, of_import).conclusions
    [beside, _] = compare_runs(first, of_import, third).conclusions
    assert alone.reasons[-1] == beside.reasons[-1] == "The only setting that differs is source."


@pytest.mark.parametrize("given", [(), ([],)])
def test_one_run_is_nothing_to_compare(given):
    with pytest.raises(ValueError, match="needs at least two runs"):
        compare_runs(run_of_step(100), *given)


def test_ten_runs_have_ten_labels():
    runs = [run_of_step(100 + number, git_commit=str(number)) for number in range(30)]
    labels = [side.label for side in compare_runs(*runs).sides]
    assert labels[:3] == ["A", "B", "C"]
    assert labels[25:28] == ["Z", "A1", "B1"]


def test_a_run_against_its_twin_differs_in_nothing():
    comparison = compare_runs(steady_run(run_id="one"), steady_run(run_id="two"))
    assert comparison.settings == comparison.caveats == ()
    assert {part.changes_ns for part in (*comparison.parts, *comparison.causes)} == {(0,)}
    assert {row.exposed_changes_ns for row in comparison.units} == {(0,)}
    assert {metric.judgements[0].verdict for metric in comparison.metrics} <= {
        NoiseVerdict.EQUAL,
        NoiseVerdict.UNKNOWN,
        NoiseVerdict.MISSING,
    }


def test_several_sides_are_summarised_in_one_sentence():
    runs = [run_of_step(time, git_commit=str(time)) for time in (100, 50, 101, 200)]
    assert compare_runs(*runs).answer == (
        "Step time compared with A (100 ns). Faster: B (-50%). Slower: D (+100%). "
        "Not significant: C (+1%)."
    )


def test_two_sides_are_answered_by_their_conclusion():
    comparison = compare_runs(run_of_step(100), run_of_step(200))
    assert comparison.answer == comparison.conclusions[0].sentence


def test_changes_of_units_can_be_read_by_measure_and_size():
    first = RunBuilder(units=("a", "b", "c"))
    second = RunBuilder(units=("a", "b"))
    for builder, ends in ((first, (10, 30, 60)), (second, (20, 70))):
        rank = builder.rank(0)
        rank.step(0, 0, 100)
        for fqn, start, end in zip("abc", (0, *ends), ends, strict=False):
            rank.forward(fqn, start, end)
    units = compare_runs(first.build(), second.build()).units
    changes = find_unit_changes(units, UnitMeasure.FORWARD, 1, largest_first=True)
    assert [(one.row.fqns, one.before, one.after, one.change) for one in changes] == [
        (("b",), 20, 50, 30),
        (("a",), 10, 20, 10),
        (("c",), 30, None, None),
    ]
    memory = find_unit_changes(units, UnitMeasure.MEMORY, 1)
    assert [one.before for one in memory] == [None, None, None]


def test_causes_are_of_the_steps_whose_parts_are_compared():
    comparison = compare_runs(steady_run(), steady_run(run_id="other"))
    exposed = sum(row.values_ns[0] for row in comparison.parts if row.name.startswith("exposed"))
    assert sum(row.values_ns[0] for row in comparison.causes) == exposed == 250


def with_resharding(run, reshard):
    units = [
        unit.model_copy(update={"reshard_after_forward": reshard}) for unit in run.manifest.units
    ]
    return replace(run, manifest=run.manifest.model_copy(update={"units": units}))


def test_a_setting_is_named_on_the_slower_side_if_it_can_lengthen_the_longer_part():
    adam, sgd = ({"optimizer": name, "dropout": "none"} for name in ("AdamW()", "SGD()"))
    keeps = with_resharding(run_of_step(100, observed=adam), False)
    frees = with_resharding(run_of_step(200, exposed=100, observed=sgd), True)

    [slower] = compare_runs(keeps, frees).conclusions
    [faster] = compare_runs(frees, keeps).conclusions

    for conclusion, label in ((slower, "B"), (faster, "A")):
        [named] = [reason for reason in conclusion.reasons if reason.startswith("Settings of")]
        assert named.startswith(f"Settings of {label} that can lengthen exposed all-gather: ")
        assert "reshard_after_forward=True: backward gathers" in named
        assert "optimizer" not in named


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (-0.922, "is 12.8 times as fast as"),
        (-0.149, "takes 14.9% less time than"),
        (0.2, "takes 20% more time than"),
        (3.27, "takes 4.27 times as long as"),
    ],
)
def test_a_large_difference_is_a_factor(change, phrase):
    assert conclusions._phrase_speed(change) == phrase


def profiled(run, *rows):
    """The run with a profiled step; a row is the unit, the phase, the kind, the time, the count."""
    columns = dict(
        zip(("unit", "phase", "kind", "time_ns", "count"), zip(*rows, strict=True), strict=True)
    )
    zero = {name: [0] * len(rows) for name in KernelColumns.model_fields}
    record = KernelRecord(
        steps=[1], step_ns=[1000], names=["kernel"], columns=KernelColumns(**{**zero, **columns})
    )
    return replace(run, kernel_records={0: record})


def test_kernels_are_compared_by_kind_and_by_unit():
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    pointwise, product = KernelKind.ELEMENTWISE, KernelKind.MATRIX_PRODUCT
    before = profiled(
        run_of_step(100, run_id="x"),
        (0, forward, pointwise, 300, 6),
        (0, backward, pointwise, 50, 3),
        (0, forward, product, 200, 2),
    )
    after = profiled(
        run_of_step(90, run_id="y"),
        (0, forward, pointwise, 60, 1),
        (0, backward, pointwise, 50, 3),
        (0, forward, product, 210, 2),
    )

    found = compare_runs(before, after)

    assert [(row.kind, row.values_ns, row.changes_ns) for row in found.kernel_kinds] == [
        ("elementwise", (350, 110), (-240,)),
        ("matrix product", (200, 210), (10,)),
    ]
    assert sum(row.changes_ns[0] for row in found.kernels) == -230
    first = found.kernels[0]
    assert (first.fqn, first.phase, first.kind) == ("layers.0", "forward", "elementwise")
    assert (first.values_ns, first.counts) == ((300, 60), (6, 1))
    words = " ".join(text_of(render_comparison(found)).split())
    assert "by kind" in words
    assert "elementwise, forward, layers.0 300 ns 60 ns -240 ns 6 to 1" in words
    assert found.to_dict()["kernels"][0]["changes_ns"] == [-240]


def test_kernels_that_one_side_did_not_profile_have_no_change():
    one = profiled(run_of_step(100, run_id="x"), (0, Phase.FORWARD, KernelKind.COPY, 9, 1))
    found = compare_runs(one, run_of_step(90, run_id="y"))
    assert [(row.values_ns, row.changes_ns) for row in found.kernels] == [((9, None), (None,))]
    assert "Kernels" not in text_of(render_comparison(found))
    neither = compare_runs(run_of_step(100, run_id="x"), run_of_step(90, run_id="y"))
    assert (neither.kernels, neither.kernel_kinds) == ((), ())


def test_other_scripts_leave_no_likely_reason():
    first, other = (
        run_of_step(100, exposed=exposed, command=["python", script], observed=observed)
        for exposed, script, observed in (
            (40, "runs/one.py", {"inputs": "8 x 32 int64"}),
            (80, "two.py", {"inputs": "8 x 15 int64"}),
        )
    )
    said = compare_runs(first, other).conclusions[0].reasons
    assert any("The scripts differ (one.py and two.py)" in words for words in said)
    assert not any("likely reason" in words for words in said)


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        ((["python", "a/x.py", "--lr", "1"], ["python", "/b/x.py"]), []),
        ((["python", "x.py"], []), []),
        ((["python", "-m", "jobs.x", "a.py"], ["python", "-m", "jobs.x", "b.py"]), []),
        ((["python", "-m", "fsdp_inspect.record", "-m", "jobs.x"], ["python", "x.py"]), ["script"]),
    ],
)
def test_the_script_is_a_setting_where_both_commands_name_one(commands, names):
    manifests = [run_of_step(100, command=command).manifest for command in commands]
    assert [each.name for each in compare_settings(manifests)] == names
