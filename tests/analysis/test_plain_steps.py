import numpy as np
import pytest

from fsdp_inspect.analysis.drift import measure_drift
from fsdp_inspect.analysis.lifetime import measure_lifetime
from fsdp_inspect.analysis.plain_steps import find_other_plain_steps
from fsdp_inspect.analysis.run_list import measure_key_numbers
from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.comparison.comparison import compare_runs
from fsdp_inspect.comparison.gate.check import check_run
from fsdp_inspect.comparison.gate.limits import parse_limits
from fsdp_inspect.comparison.gate.measurements import read_runs
from fsdp_inspect.diagnosis.diagnose import ProblemClass, diagnose
from fsdp_inspect.report.diagnosis import describe_diagnosis
from fsdp_inspect.report.ranks_wording import describe_answer
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.tables import DeviceTable
from tests.analysis.test_drift import noisy
from tests.boxes import Call, make_box
from tests.builders import InMemoryRun, RunBuilder

STEPS, CHANGE = 180, 70
SENTENCE = (
    "These figures describe detailed steps of 100 ms, but the 136 plain steps from step 20 on "
    "typically take 200 ms."
)


def is_plain(step: int) -> bool:
    """20 detailed steps, then six pairs of four plain and four detailed steps, then plain ones."""
    return step >= 20 and (step >= 68 or (step - 20) % 8 < 4)


def run_of(
    times_ms: np.ndarray, *, data: float = 0.0, late_data: bool = False, **run: object
) -> InMemoryRun:
    """Two ranks; a detailed step waits 10 ms.

    `data`: the part of what exceeds 100 ms in which each step waits for data. `late_data`: rank 1
    waits for all of it.
    """
    builder = RunBuilder(world_size=2)
    for number in (0, 1):
        rank, now = builder.rank(number), 0
        for step, time in enumerate((times_ms * 1e6).astype(np.int64).tolist()):
            rank.step(step, now, now + time, is_plain=is_plain(step))
            if waits := 1.0 if late_data and number == 1 else data:
                rank.data(now, now + round(waits * (time - 100_000_000)))
            if not is_plain(step):
                begin = now + time - 10_000_000
                rank.all_gather("layers.0", begin, now + time, need=begin)
            now += time
    return builder.build(**run)


def changing(after_ms: float = 200.0) -> np.ndarray:
    times = np.full(STEPS, 100.0)
    times[CHANGE:] = after_ms
    return times


def noise(
    seed: int, *, spread: float = 0.1, memory: float = 0.5, outliers: float = 0.05
) -> np.ndarray:
    """Steps of 100 ms with autocorrelated noise, and outliers of up to six times."""
    return noisy(seed, STEPS, spread=spread, memory=memory, outlier_ratio=outliers) / 1e6


def compare(times_ms: np.ndarray):
    steps = np.arange(STEPS)
    return find_other_plain_steps(
        steps, (times_ms * 1e6).astype(np.int64), np.array([is_plain(step) for step in steps])
    )


def test_steady_steps_with_noise_and_outliers_do_not_differ():
    assert [compare(noise(seed)) for seed in range(50)] == [None] * 50


@pytest.mark.parametrize("factor", [0.4, 1.3, 2.0])
def test_a_change_after_the_detailed_steps_is_found_in_noise(factor):
    for seed in range(20):
        times = noise(seed, outliers=0.02)
        times[68:] *= factor
        found = compare(times)
        assert "plain steps from step 20 on typically take" in found.sentence
        assert found.are_longer is (factor > 1)


def test_what_the_detail_costs_is_no_difference():
    times = np.array([100.0 if is_plain(step) else 140.0 for step in range(STEPS)])
    assert compare(times) is None
    assert measure_drift(run_of(times)).changes == ()


def test_plain_steps_after_an_evaluation_are_left_out():
    builder = RunBuilder(world_size=1)
    rank, now = builder.rank(0), 0
    for step in range(STEPS):
        end = now + (200 if is_plain(step) else 100)
        rank.step(step, now, end, is_plain=is_plain(step))
        if is_plain(step):
            rank.add(EventKind.BETWEEN_STEPS, now, now + 10, phase=Phase.EVALUATION)
        now = end
    assert measure_trust(builder.build()).other_plain_steps is None


def test_the_verdict_and_the_ranks_state_what_the_figures_describe():
    run = run_of(changing())
    assert measure_summary(run).verdict.why.endswith(SENTENCE)
    assert measure_ranks(run).trust.time_caveat == SENTENCE
    assert measure_trust(run_of(np.full(STEPS, 100.0))).time_caveat is None


def test_a_comparison_and_a_gate_state_that_most_steps_are_longer():
    steady, slower = run_of(np.full(STEPS, 100.0)), run_of(changing())
    assert compare_runs([steady], [slower]).caveats[-1] == f"Run hand-made of B: {SENTENCE}"
    assert compare_runs([steady], [steady]).caveats == ()
    limits = parse_limits({"step_time_ns": "150 ms"})
    checked = {
        run: check_run(read_runs([each]), None, limits)
        for run, each in (("steady", steady), ("slower", slower))
    }
    assert checked["steady"].exit_code == 0
    assert checked["slower"].reasons == (
        f"step_time_ns cannot be judged. {SENTENCE} Record all steps in detail: "
        "Recorder(overhead=None).",
    )


def test_the_key_numbers_state_the_plain_steps_where_they_differ():
    steady, slower = (measure_key_numbers(run_of(t)) for t in (np.full(STEPS, 100.0), changing()))
    assert (steady.step_time_ns, steady.plain_step_time_ns) == (100_000_000, None)
    assert (slower.step_time_ns, slower.plain_step_time_ns) == (100_000_000, 200_000_000)


def test_drift_uses_plain_steps_and_their_parts_with_the_waits_in_them():
    (change,) = measure_drift(run_of(changing())).changes
    assert (change.step, change.before_ns, change.after_ns) == (CHANGE, 100_000_000, 200_000_000)
    assert change.accounted_by == ("other with its waits: 100 ms to 200 ms",)
    assert not change.are_parts_known


def test_data_accounts_for_a_change_that_only_plain_steps_have():
    (change,) = measure_drift(run_of(changing(), data=1.0)).changes
    assert change.accounted_by == ("data: 0 ns to 100 ms",)


def test_data_of_another_rank_is_named_that_only_plain_steps_have():
    (change,) = measure_drift(run_of(changing(), late_data=1.0)).changes
    assert change.accounted_by == ()
    assert change.coincident == ("data of rank 1: 0 ns to 100 ms",)


def test_longer_plain_steps_may_have_a_straggler():
    said, unsaid = (
        describe_answer(measure_ranks(run_of(times)))[0]
        for times in (changing(), np.full(STEPS, 100.0))
    )
    assert said.startswith("It is unknown whether there is a straggler: plain steps take longer")
    assert "plain steps" not in unsaid


def test_a_diagnosis_does_not_exclude_parts_that_plain_steps_lack():
    boxes = {rank: make_box([Call(0)], (0, 1)) for rank in (0, 1)}
    found = diagnose(run_of(changing(), data=0.5, black_boxes=boxes))
    assert found.problem is ProblemClass.DRIFT
    assert describe_diagnosis(found).detail.endswith(
        "at step 70 and stayed slower: 100 ms to 200 ms. Too few detailed steps show which part of "
        "the step became slower."
    )


def exposed_ns(run: InMemoryRun) -> int:
    (part,) = (each for each in measure_lifetime(run).training_parts if each.phase == "exposed")
    return part.duration_ns


def test_waits_are_scaled_by_number_where_plain_steps_differ():
    run = run_of(changing())
    assert exposed_ns(run) == 179 * 10_000_000
    assert "all of them by their number, because plain" in measure_lifetime(run).notes[-1]
    assert "by their number" not in measure_lifetime(run_of(np.full(STEPS, 100.0))).notes[-1]


def refilled(every: int, long_ms: float = 350.0, *, first: int = 25) -> np.ndarray:
    times = np.full(STEPS, 100.0)
    times[first::every] = long_ms
    return times


def test_rare_long_steps_are_counted_with_their_part_and_distance():
    run = run_of(refilled(25), data=1.0)
    drift = measure_drift(run)
    assert drift.changes == ()
    assert drift.long_steps.steps == (25, 50, 75, 100, 125, 150, 175)
    assert drift.long_steps.cost_ratio == pytest.approx(7 * 250 / (180 * 100 + 7 * 250))
    assert drift.long_steps.sentence == (
        "7 of 180 steps take 3.5 times as long as usual (data: 0 ns to 250 ms), most of them every "
        "25 steps. They cost 8.9% of the time of all steps, and the typical step leaves them out."
    )
    assert drift.long_steps.sentence in measure_summary(run).verdict.why


def test_a_save_of_each_fifth_step_is_long_and_not_typical():
    """From the first step on, that is one step more than a fifth of them."""
    run = run_of(refilled(5, first=0))
    assert measure_drift(run).long_steps.distance == 5
    sentence = measure_drift(run).long_steps.sentence
    assert sentence in measure_trust(run).prediction_caveats


def test_the_rank_whose_data_makes_steps_long_is_named():
    found = measure_drift(run_of(refilled(25), late_data=True)).long_steps
    assert found.accounted_by == ("data of rank 1: 0 ns to 250 ms",)


def test_long_steps_around_a_change_are_compared_with_the_steps_beside_them():
    times = changing(200.0)
    times[[30, 50, 100, 130]] *= 5
    found = measure_drift(run_of(times)).long_steps
    assert (found.steps, found.usual_ratio, found.distance) == ((30, 50, 100, 130), 5.0, None)


def test_irregular_long_steps_are_not_stated_where_cores_are_missing():
    times = changing(200.0)
    times[[30, 50, 100, 130]] *= 5
    row = dict.fromkeys(DeviceTable.DTYPES, -1)
    rows = [{**row, "time_ns": time, "run_delay_ns": time // 10} for time in range(0, 10**9, 10**8)]
    table = DeviceTable.from_rows(rows)
    assert measure_drift(run_of(times, device_tables={0: table, 1: table})).long_steps is None


@pytest.mark.parametrize(
    "times", [refilled(90), refilled(3), refilled(25, 190.0), refilled(25, 220.0)[:60], noise(0)]
)
def test_few_frequent_or_cheap_long_steps_are_not_stated(times):
    assert measure_drift(run_of(times)).long_steps is None
