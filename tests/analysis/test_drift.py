from dataclasses import replace

import numpy as np
import pytest

from fsdp_inspect.analysis.drift import find_change_points, measure_drift
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.trace.codes import EventKind, Phase
from fsdp_inspect.trace.host_work import BatchWork, HostActivity
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import InMemoryRun, RunBuilder

STEPS = 100
CHANGE = 50


def noisy(
    seed: int,
    num_steps: int = 400,
    *,
    spread: float = 0.03,
    memory: float = 0.0,
    outlier_ratio: float = 0.02,
) -> np.ndarray:
    """Step times of 100 ms with autocorrelated noise and outliers, in ns."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal(num_steps)
    for step in range(1, num_steps):
        noise[step] = memory * noise[step - 1] + noise[step] * np.sqrt(1 - memory**2)
    times = 1e8 * np.exp(spread * noise)
    outliers = random.random(num_steps) < outlier_ratio
    times[outliers] *= random.uniform(1.5, 6, int(outliers.sum()))
    return times.astype(np.int64)


def test_fifty_steady_runs_have_no_change_point():
    found = [find_change_points(noisy(seed, 250, memory=0.5)) for seed in range(50)]
    assert found == [[]] * 50


@pytest.mark.study
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("spread", [0.01, 0.08, 0.2])
def test_steady_steps_have_no_change_point(spread, memory):
    found = [
        find_change_points(noisy(seed, 60 + 40 * seed, spread=spread, memory=memory))
        for seed in range(50)
    ]
    assert found == [[]] * 50


@pytest.mark.parametrize("factor", [0.5, 0.85, 1.15, 2.0])
def test_a_lasting_change_is_found_at_its_step(factor):
    for seed in range(20):
        times = noisy(seed)
        times[200:] = times[200:] * factor
        (step,) = find_change_points(times)
        assert abs(step - 200) <= 5


@pytest.mark.parametrize("is_ramp", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_steady_growth_is_told_from_a_change_at_one_step(seed, is_ramp):
    factors = np.linspace(1, 1.5, 160) if is_ramp else np.repeat([1, 1.3], [100, 60])
    builder = RunBuilder()
    rank, at = builder.rank(0), 0
    for step, length in enumerate((noisy(seed, 160) * factors).astype(int).tolist()):
        rank.step(step, at, at + length)
        at += length
    run = builder.build()
    changes = measure_drift(run).changes
    assert changes
    assert all(change.is_gradual is is_ramp for change in changes)
    [caveat] = [each for each in measure_trust(run).prediction_caveats if "time changes" in each]
    assert max(changes, key=lambda each: each.change_ratio).sentence in caveat


def test_several_changes_are_found():
    times = noisy(0, 600)
    times[200:] *= 2
    times[400:] //= 2
    assert find_change_points(times) == pytest.approx([200, 400], abs=5)


def test_a_short_run_has_no_change_point():
    assert find_change_points(np.array([100] * 30 + [200] * 20)) == []
    assert find_change_points(np.array([], np.int64)) == []


def test_a_million_steps_are_searched_by_blocks():
    times = noisy(0, 1_000_000)
    times[500_000:] *= 2
    assert find_change_points(times) == pytest.approx([500_000], abs=1000)


def changing_run(*, data: bool = False, late: bool = False, **run: object) -> InMemoryRun:
    """Two ranks; from step 50, steps take 150 ns instead of 100 ns.

    `data`: both wait for data. `late`: rank 1 works longer, and rank 0 waits for it.
    """
    builder = RunBuilder(world_size=2)
    for number in (0, 1):
        rank, now = builder.rank(number), 0
        for step in range(STEPS):
            extra = 50 if step >= CHANGE else 0
            end = now + 100 + extra
            rank.step(step, now, end)
            rank.data(now, now + 10 + (extra if data else 0))
            waits = 20 + (extra if late and number == 0 else 0)
            rank.all_gather("layers.0", end - waits, end, need=end - waits)
            now = end
    return builder.build(**run)


def test_a_part_that_grew_by_the_same_time_accounts_for_the_change():
    (change,) = measure_drift(changing_run(data=True)).changes
    assert (change.step, change.before_ns, change.after_ns) == (50, 100, 150)
    assert change.change_ratio == 0.5
    assert change.accounted_by == ("data: 10 ns to 60 ns",)


def test_a_rank_that_works_longer_is_named():
    drift = measure_drift(changing_run(late=True))
    (change,) = drift.changes
    rank = 1 - drift.rank
    words = change.accounted_by + change.coincident
    assert any("exposed all-gather" in word for word in words) or drift.rank == 1
    if rank == 1:
        [word] = [word for word in change.coincident if word.startswith("own work of rank 1")]
        assert word == "own work of rank 1: 80 ns to 130 ns (other: 70 ns to 120 ns)"


def test_samples_and_evaluations_are_stated_as_coincidence():
    row = dict.fromkeys(DeviceTable.DTYPES, -1)
    samples = [
        {
            **row,
            "time_ns": time,
            "process_rss": (1 << 30) * (1 if time < 5000 else 2),
            "gpu_sm_clock_mhz": 1980 if time < 5000 else 1200,
            "run_delay_ns": 0 if time < 5000 else time - 5000,
        }
        for time in range(0, 12_500, 100)
    ]
    table = DeviceTable.from_rows(samples)
    run = changing_run(data=True, device_tables={0: table, 1: table})
    events = run.event_tables
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(CHANGE, 0, 1)
    builder.rank(0).add(EventKind.BETWEEN_STEPS, 5000, 5001, phase=Phase.EVALUATION)
    between = builder.build().events(0, kinds=[EventKind.BETWEEN_STEPS])
    joined = {rank: type(table).concat([table, between]) for rank, table in events.items()}
    run = InMemoryRun(run.manifest, run.ranks, joined, device_tables=run.device_tables)
    (change,) = measure_drift(run).changes
    assert change.coincident == (
        "wait for a core: 0% to 100% of the time",
        "process memory: 1.00 GiB to 2.00 GiB",
        "GPU clock: 1980 MHz to 1200 MHz",
        "evaluation or checkpoint before step 50",
    )


def test_the_tokens_of_both_sides_are_stated():
    batches = [
        BatchWork(step=step, size=256 if step < CHANGE else 512, is_tokens=True)
        for step in range(0, STEPS, 9)
    ]
    run = changing_run(data=True)
    work = {"host_work": HostActivity(batches=batches)}
    run = replace(run, ranks=[each.model_copy(update=work) for each in run.ranks])
    (change,) = measure_drift(run).changes
    assert change.coincident == ("tokens of a step: 256 to 512",)


def test_what_costs_less_time_than_before_is_not_beside_a_slowdown():
    row = dict.fromkeys(DeviceTable.DTYPES, -1)
    table = DeviceTable.from_rows(
        [
            {**row, "time_ns": time, "run_delay_ns": min(time, 5000)}
            for time in range(0, 12_500, 100)
        ]
    )
    run = changing_run(data=True, device_tables={0: table, 1: table})
    (change,) = measure_drift(run).changes
    assert change.coincident == ()


def test_what_the_samples_of_a_late_rank_show_is_stated():
    row = dict.fromkeys(DeviceTable.DTYPES, -1)
    hot = [
        {
            **row,
            "time_ns": time,
            "gpu_temperature_c": 61 if time < 5000 else 88,
            "gpu_clock_limits": 0 if time < 5000 else 0x20 | 0x40,
            "process_swap": 0 if time < 5000 else 1 << 30,
            "major_faults": 0 if time < 5000 else time,
        }
        for time in range(0, 12_500, 100)
    ]
    run = changing_run(late=True, device_tables={1: DeviceTable.from_rows(hot)})
    drift = measure_drift(run)
    (change,) = drift.changes
    of_rank = "" if drift.rank == 1 else " of rank 1"
    stated = [each for each in change.coincident if not each.startswith("own work")]
    assert [each.partition(":")[0] for each in stated] == [
        f"pages that the process{of_rank} reads from a disk",
        f"process memory in swap{of_rank}",
        f"GPU temperature{of_rank}",
        f"GPU clock{of_rank} limited by heat",
    ]
    assert f"GPU temperature{of_rank}: 61 °C to 88 °C" in stated


@pytest.mark.parametrize("collects", [50, 10])
def test_garbage_collections_account_for_a_change_of_their_time(collects):
    builder = RunBuilder(world_size=1)
    rank, now = builder.rank(0), 0
    for step in range(STEPS):
        end = now + (150 if step >= CHANGE else 100)
        rank.step(step, now, end)
        if step >= CHANGE:
            rank.add(EventKind.GARBAGE_COLLECTION, now, now + collects)
        now = end
    (change,) = measure_drift(builder.build()).changes
    if collects == 50:
        assert "garbage collection: 0 ns to 50 ns" in change.accounted_by
    else:
        assert "garbage collection: 0 ns to 10 ns a step" in change.coincident


def test_a_run_without_a_timed_step_has_no_drift():
    drift = measure_drift(RunBuilder(world_size=1).build())
    assert (drift.rank, drift.changes, drift.is_long_enough) == (None, (), False)
