"""Test the default limits of the gate, and the runs that it refuses to compare."""

import dataclasses

import pytest

from fsdp_inspect import forecast_memory
from fsdp_inspect.comparison.gate.baseline import make_baseline
from fsdp_inspect.comparison.gate.check import CheckOutcome, check_run
from fsdp_inspect.comparison.gate.measurements import GateMeasurements, read_runs
from fsdp_inspect.report.check import describe_outcome
from fsdp_inspect.store.reader import open_run
from tests.comparison.gate.changed_models import build


@pytest.fixture(scope="module")
def reading(tmp_path_factory) -> GateMeasurements:
    path = forecast_memory(build, tmp_path_factory.mktemp("x") / "f", world_size=4)
    return read_runs([open_run(path)])


def changed(reading: GateMeasurements, by: float = 1.0, **manifest) -> GateMeasurements:
    memory = {name: round(amount * by) for name, amount in reading.memory.items()}
    other = reading.manifest.model_copy(update=manifest)
    return dataclasses.replace(reading, memory=memory, manifest=other)


def test_a_forecast_is_held_to_the_byte(reading):
    result = check_run(changed(reading, 1.0001), make_baseline(reading))

    assert result.outcome is CheckOutcome.REGRESSION


@pytest.mark.parametrize(("by", "outcome"), [(1.0099, "passes"), (1.02, "regression")])
def test_memory_of_a_recorded_run_may_grow_by_one_percent(reading, by, outcome):
    recorded = changed(reading, source="recorded")

    result = check_run(changed(recorded, by), make_baseline(recorded))

    assert result.outcome == outcome


def test_memory_without_a_cause_is_a_regression_beside_a_time_that_cannot_be_judged(reading):
    times = tuple(100e6 + 1e6 * run for run in range(5))
    recorded = dataclasses.replace(
        changed(reading, source="recorded"), times={"step_time_ns": times}
    )
    another = dataclasses.replace(recorded, times={"step_time_ns": (108e6,)})

    result = check_run(changed(another, 1.08), make_baseline(recorded))

    outcomes = {one.outcome for one in result.metrics}
    assert outcomes >= {CheckOutcome.UNTOLD, CheckOutcome.REGRESSION}
    assert (result.outcome, result.exit_code, result.causes) == (CheckOutcome.REGRESSION, 1, ())
    assert "step_time_ns changed" in result.reasons[0]


def test_four_more_bytes_are_no_regression_of_a_recorded_run(reading):
    recorded = changed(reading, source="recorded")
    memory = {name: amount + 4 for name, amount in recorded.memory.items()}

    result = check_run(dataclasses.replace(recorded, memory=memory), make_baseline(recorded))

    assert result.outcome is CheckOutcome.PASSES


@pytest.mark.parametrize(
    ("spread", "limit"), [(0.0, "+0.1%"), (0.001, "+0.2%"), (0.02, "+4%")], ids=str
)
def test_a_baseline_of_several_runs_learns_its_tolerance(reading, spread, limit):
    recorded = changed(reading, source="recorded")
    ranges = {name: round(amount * spread) for name, amount in recorded.memory.items()}
    repeats = dataclasses.replace(recorded, ranges=ranges, num_memory_runs=4)
    baseline = make_baseline(repeats)
    allowed = 1 + max(2 * spread, 0.001)

    within = check_run(changed(recorded, allowed - 0.0005), baseline)
    beyond = check_run(changed(recorded, allowed + 0.002), baseline)

    assert {one.limit for one in within.metrics} == {f"{limit} (4 runs)"}
    assert within.outcome is CheckOutcome.PASSES
    assert beyond.outcome is CheckOutcome.REGRESSION


def test_two_runs_do_not_teach_a_tolerance(reading):
    recorded = changed(reading, source="recorded")
    repeats = dataclasses.replace(recorded, ranges=dict(recorded.memory), num_memory_runs=2)

    result = check_run(changed(recorded, 1.02), make_baseline(repeats))

    assert result.outcome is CheckOutcome.REGRESSION


def test_a_check_that_passes_says_what_grew(reading):
    recorded = changed(reading, source="recorded")
    moments = {
        name: dataclasses.replace(
            moment,
            held={
                **moment.held,
                ("layers.0", "activation"): moment.held.get(("layers.0", "activation"), 0) + 100,
            },
        )
        for name, moment in recorded.moments.items()
    }
    memory = {name: amount + 100 for name, amount in recorded.memory.items()}
    grown = dataclasses.replace(recorded, memory=memory, moments=moments)

    result = check_run(grown, make_baseline(recorded))

    assert result.outcome is CheckOutcome.PASSES
    assert "rose by 100 B" in describe_outcome(result)
    assert "activation of layers.0 +100 B" in describe_outcome(result)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"versions": {"torch": "2.14.0"}}, "torch 2.13.0"),
        ({"device_type": "cpu"}, "device cuda"),
        ({"source": "recorded"}, "source predicted"),
    ],
    ids=["torch", "device", "source"],
)
def test_a_baseline_of_something_else_is_no_comparison(reading, manifest, words):
    result = check_run(changed(reading, 2.0, **manifest), make_baseline(reading))

    assert result.exit_code == 2
    assert words in result.reasons[0]
    assert "--update" in result.reasons[0]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"config": {"wrap": "block"}}, {"config": {"wrap": "every:2"}}, "plan changed: wrap"),
        ({}, {"mesh": {"replicate": 2, "shard": 2}}, "mesh 4"),
        ({}, {"world_size": 8}, "world size 4"),
    ],
    ids=["wrap", "mesh", "world size"],
)
def test_another_plan_is_judged_if_its_effect_is_explained(reading, before, after, words):
    baseline = make_baseline(changed(reading, **before))

    unexplained = check_run(changed(reading, 2.0, **after), baseline)
    same = check_run(changed(reading, **after), baseline)

    assert unexplained.exit_code == 2
    assert words in unexplained.reasons[0]
    assert "--update" in unexplained.reasons[0]
    assert same.exit_code == 0


@pytest.mark.parametrize("of_old_version", [False, True], ids=["new file", "old file"])
def test_a_larger_batch_that_no_setting_shows_is_a_cause(reading, of_old_version):
    baseline = make_baseline(reading)
    if of_old_version:
        kept = {name: value for name, value in baseline.run.items() if name != "memory_steps"}
        baseline = baseline.model_copy(update={"run": kept})
    observed = reading.manifest.observed
    assert "inputs" in observed
    rows, _, rest = observed["inputs"].partition(" x ")
    larger = {**observed, "inputs": f"{2 * int(rows)} x {rest}"}
    moments = {
        name: dataclasses.replace(
            moment,
            held={
                key: (1 + (key[1] in {"activation", "temporary", "input"})) * amount
                for key, amount in moment.held.items()
            },
        )
        for name, moment in reading.moments.items()
    }
    after = dataclasses.replace(changed(reading, 1.5, observed=larger), moments=moments)

    causes = check_run(after, baseline).causes

    assert len(causes) == 1
    assert causes[0].startswith(f"the batch grew: the model receives {larger['inputs']}")


def test_larger_shards_are_explained_by_the_mesh(reading):
    """Twice the bytes of shards and optimizer state, on half as many ranks to shard over."""
    was = {"sharded_parameter", "sharded_gradient", "optimizer_state"}
    doubled = [
        unit.model_copy(update={"sharded_bytes": 2 * unit.sharded_bytes})
        for unit in reading.manifest.units
    ]
    moments = {
        name: dataclasses.replace(
            moment,
            held={key: (1 + (key[1] in was)) * amount for key, amount in moment.held.items()},
        )
        for name, moment in reading.moments.items()
    }
    assert any(key[1] in was for moment in reading.moments.values() for key in moment.held)
    mesh = {"replicate": 2, "shard": 2}
    larger = dataclasses.replace(changed(reading, 1.5, mesh=mesh, units=doubled), moments=moments)

    result = check_run(larger, make_baseline(reading))

    assert result.exit_code == 1
    assert result.causes[0] == ("the mesh is 2 x 2 instead of 4: a shard is up to 2 times as large")


@pytest.mark.parametrize(
    ("times", "exit_code"),
    [
        ((1000, 1001, 1002, 1003, 1004), 0),
        ((1500, 1501, 1502, 1503, 1504), 1),
        ((990, 1000, 1350), 2),
        ((900, 1000, 1010, 1100, 1250), 2),
        ((500, 700, 800, 990, 1005), 0),
    ],
    ids=["alike", "slower", "too few", "noisy", "noisy and no slower"],
)
def test_times_hold_rise_or_cannot_be_told(reading, times, exit_code):
    before = dataclasses.replace(reading, times={"step_time_ns": (1000, 1001, 1002, 1003, 1004)})
    after = dataclasses.replace(reading, times={"step_time_ns": times})

    assert check_run(after, make_baseline(before)).exit_code == exit_code


@pytest.mark.parametrize(
    ("times", "before", "after", "exit_code"),
    [
        ((1500, 1501, 1502, 1503, 1504), 0.01, 0.30, 2),
        ((1500, 1501, 1502, 1503, 1504), 0.30, 0.01, 1),
        ((1500, 1501, 1502, 1503, 1504), 0.30, 0.33, 1),
        ((1000, 1001, 1002, 1003, 1004), 0.30, 0.01, 2),
        ((1000, 1001, 1002, 1003, 1004), 0.01, 0.30, 0),
    ],
    ids=["slower, busier", "slower, freer", "slower, as busy", "alike, freer", "alike, busier"],
)
def test_what_other_work_on_the_machine_may_have_made_is_not_judged(
    reading, times, before, after, exit_code
):
    before = dataclasses.replace(
        reading, times={"step_time_ns": (1000, 1001, 1002, 1003, 1004)}, run_delays=(before,) * 5
    )
    after = dataclasses.replace(reading, times={"step_time_ns": times}, run_delays=(after,) * 5)

    result = check_run(after, make_baseline(before))

    assert result.exit_code == exit_code
    if exit_code == 2:
        assert "had no core for" in result.reasons[0]


def test_five_runs_that_overlap_stop_no_merge(reading):
    before = dataclasses.replace(reading, times={"step_time_ns": (100, 101, 102, 103, 150)})
    after = dataclasses.replace(reading, times={"step_time_ns": (149, 151, 152, 153, 154)})

    assert check_run(after, make_baseline(before)).exit_code == 2


def test_waiting_where_nothing_was_waited_for_is_a_regression(reading):
    steps = (1000, 1001, 1002, 1003, 1004)
    before = {"step_time_ns": steps, "exposed_ns": (0, 0, 0, 0, 0)}
    after = {"step_time_ns": steps, "exposed_ns": (300, 301, 302, 303, 304)}

    result = check_run(
        dataclasses.replace(reading, times=after),
        make_baseline(dataclasses.replace(reading, times=before)),
    )

    assert result.exit_code == 1
    assert [one.name for one in result.metrics if one.outcome == "regression"] == ["exposed_ns"]


def test_a_longer_wait_is_blamed_on_its_unit_and_pass(reading):
    gather = "all_gather in backward"
    sides = [
        dataclasses.replace(
            reading,
            times={"step_time_ns": tuple(range(step, step + 5))},
            parts={"backward": 800, "exposed_all_gather": wait},
            waits={("layers.1", gather): wait, ("layers.2", gather): 7},
        )
        for step, wait in ((1000, 10), (1500, 510))
    ]

    result = check_run(sides[1], make_baseline(sides[0]))

    assert [(one.category, one.units, one.increase) for one in result.longer] == [
        ("exposed_all_gather", (), 500),
        (gather, ("layers.1",), 500),
    ]


def test_times_of_another_machine_are_no_comparison(reading):
    times = {"step_time_ns": (1000, 1001, 1002, 1003, 1004)}
    here, there = (
        dataclasses.replace(changed(reading, device_name=name), times=times)
        for name in ("this processor", "another one")
    )

    result = check_run(there, make_baseline(here))

    assert result.exit_code == 2
    assert "device cuda this processor" in result.reasons[0]
    memory_alone = dataclasses.replace(here, times={})
    assert check_run(there, make_baseline(memory_alone)).exit_code == 0


def test_a_phase_in_which_nothing_was_allocated_has_no_peak_to_judge(reading):
    before = dataclasses.replace(reading, memory={**reading.memory, "peak_optimizer_bytes": 9})
    after = {name: held for name, held in reading.memory.items() if name != "peak_optimizer_bytes"}

    result = check_run(dataclasses.replace(reading, memory=after), make_baseline(before))

    assert result.exit_code == 0
    assert "peak_optimizer_bytes" not in [one.name for one in result.metrics]


def test_memory_that_was_not_recorded_at_all_cannot_be_judged(reading):
    nothing = dataclasses.replace(reading, memory={}, moments={}, phase=None)

    result = check_run(nothing, make_baseline(reading))

    assert result.exit_code == 2
    assert "did not record it in a step after warm-up" in result.reasons[0]
