from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.memory.growth import (
    MIN_STEPS,
    ProcessGrowth,
    find_process_growth,
    measure_memory_growth,
)
from fsdp_inspect.analysis.trust import measure_trust
from fsdp_inspect.report.memory_wording import describe_growth, describe_process_growth
from fsdp_inspect.trace.codes import MemoryPoint
from fsdp_inspect.trace.host_work import BatchWork, HostActivity
from fsdp_inspect.trace.live_memory import LiveBytes, LiveMoment, OutOfMemoryRecord
from fsdp_inspect.trace.run import RunStatus
from fsdp_inspect.trace.tables import DeviceTable
from tests.builders import MIB, RunBuilder, steady_run
from tests.cases import examples

GIB = 1 << 30


def run_of(*ranks, warmup_steps=0, device=40 * GIB, peak_above=0):
    """A run whose ranks have these amounts allocated at the end of their steps."""
    builder = RunBuilder(world_size=len(ranks), device_type="cuda", warmup_steps=warmup_steps)
    for number, ends in enumerate(ranks):
        rank = builder.rank(number)
        rank.record.update(memory_from="cuda_allocator", device_memory_bytes=device)
        for step, amount in enumerate(ends):
            rank.step(step, step * 100, step * 100 + 100)
            rank.memory(MemoryPoint.BACKWARD_START, amount + peak_above, reserved=device // 2)
            rank.memory(MemoryPoint.STEP_END, amount, reserved=device // 2)
    return builder.build()


def test_a_leak_is_told_in_bytes_per_step_and_in_steps_until_the_device_is_full():
    run = run_of([10 * GIB + step * MIB for step in range(10)], peak_above=GIB)
    growth = measure_memory_growth(run)
    assert (growth.grows, growth.growth_bytes_per_step) == (True, MIB)
    assert growth.p_value < 0.001
    assert growth.steps_until_full == (40 - 11) * 1024 - 9


@pytest.mark.parametrize("since", [20, 55, 80, 90])
def test_a_leak_that_begins_late_has_the_slope_of_its_own_steps(since):
    ends = [10 * GIB + max(step - since, 0) * MIB for step in range(100)]
    growth = measure_memory_growth(run_of(ends))
    assert growth.grows
    assert growth.growth_bytes_per_step == MIB
    assert growth.num_steps <= 100
    assert growth.first_bytes == ends[-growth.num_steps]


@pytest.mark.parametrize("is_longer", [True, False])
def test_memory_that_grows_with_the_batches_may_be_no_leak(is_longer):
    run = run_of([10 * GIB + step * MIB for step in range(12)])
    batches = [
        BatchWork(step=step, size=100 + step * is_longer, is_tokens=True) for step in range(12)
    ]
    record = run.ranks[0].model_copy(update={"host_work": HostActivity(batches=batches)})
    run = replace(run, ranks=[record])
    growth = measure_memory_growth(run)
    assert growth.grows
    assert growth.batches_grow is is_longer
    assert ("may be no leak" in describe_growth(growth)) is is_longer
    assert bool(measure_trust(run).prediction_caveats) is not is_longer


def failed_run(resting, *, samples=2):
    """A run of one rank that ran out of memory, with the live bytes after its last steps."""
    run = run_of([10 * GIB] * samples)
    record = run.ranks[0].model_copy(update={"status": RunStatus.FAILED})
    report = OutOfMemoryRecord(run_id=run.manifest.run_id, rank=0, resting_bytes=resting)
    return replace(run, ranks=[record], failed_allocations={0: report})


def test_a_run_that_ran_out_of_memory_after_few_samples_has_the_growth_of_its_last_steps():
    run = failed_run([GIB + step * MIB for step in range(8)])
    growth = measure_memory_growth(run)
    assert (growth.grows, growth.growth_bytes_per_step, growth.num_steps) == (True, MIB, 8)
    assert growth.steps_until_full == 0
    assert describe_growth(growth).endswith("Some storages are never freed. The memory is full.")
    assert "so no plan fits for long" in measure_trust(run).prediction_caveats[0]


@pytest.mark.parametrize("resting", [[GIB] * 12, [GIB] * 3 + [2 * GIB] * 9, [GIB, 2 * GIB], []])
def test_a_run_that_ran_out_of_memory_without_a_trend_has_no_growth(resting):
    found = measure_memory_growth(failed_run(resting))
    assert found is None or not found.grows
    assert measure_trust(failed_run(resting)).prediction_caveats == ()


def test_enough_samples_count_before_the_report_of_a_failure():
    run = failed_run([GIB + step * MIB for step in range(8)], samples=10)
    assert measure_memory_growth(run).grows is False


def test_the_report_of_a_failure_names_the_line_of_growth_in_the_samples():
    run = run_of([10 * GIB + step * MIB for step in range(10)])
    kept = LiveBytes(category="activation", place="train.py:9", bytes=MIB)
    more = kept.model_copy(update={"bytes": 9 * MIB})
    report = OutOfMemoryRecord(
        run_id=run.manifest.run_id,
        rank=0,
        resting_before=LiveMoment(step=1, phase="outside", unit=-1, bytes=MIB, live=[kept]),
        resting_now=LiveMoment(step=9, phase="outside", unit=-1, bytes=9 * MIB, live=[more]),
    )
    growth = measure_memory_growth(replace(run, failed_allocations={0: report}))
    assert (growth.num_steps, growth.place) == (10, "train.py:9")
    assert measure_memory_growth(run).place == ""


def test_steady_memory_does_not_grow():
    growth = measure_memory_growth(run_of([10 * GIB] * 10))
    assert (growth.grows, growth.growth_bytes_per_step, growth.steps_until_full) == (
        False,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("num_before", "noise"), [*((place, 0) for place in range(1, 12)), (5, MIB), (6, MIB), (7, MIB)]
)
def test_a_single_rise_is_no_growth(num_before, noise):
    drawn = np.random.default_rng(num_before).integers(-noise, noise + 1, 12).tolist()
    levels = [10 * GIB] * num_before + [11 * GIB] * (12 - num_before)
    growth = measure_memory_growth(
        run_of([level + n for level, n in zip(levels, drawn, strict=True)])
    )
    assert growth.grows is False


def test_memory_that_is_kept_in_every_tenth_step_grows():
    growth = measure_memory_growth(run_of([10 * GIB + step // 10 * MIB for step in range(100)]))
    assert growth.grows is True
    assert growth.growth_bytes_per_step == pytest.approx(MIB / 10, rel=0.05)


def test_one_wild_step_hides_no_leak():
    ends = [10 * GIB + step * MIB for step in range(12)]
    ends[5] = 20 * GIB
    growth = measure_memory_growth(run_of(ends))
    assert (growth.grows, growth.growth_bytes_per_step) == (True, MIB)


def test_warmup_is_left_out():
    ends = [step * GIB for step in range(1, 10)] + [10 * GIB] * 6
    assert measure_memory_growth(run_of(ends)).grows is True
    assert measure_memory_growth(run_of(ends, warmup_steps=9)).grows is False


def test_few_steps_cannot_tell():
    growth = measure_memory_growth(run_of([step * GIB for step in range(1, MIN_STEPS)]))
    assert (growth.grows, growth.p_value) == (None, None)
    assert (growth.first_bytes, growth.last_bytes) == (GIB, 5 * GIB)
    need = f"it requires {MIN_STEPS} steps with memory after warm-up."
    assert describe_growth(growth) == f"Growth is unknown after 5 steps: {need}"
    assert describe_growth(None) == f"Growth is unknown: {need}"


def test_falling_memory_is_no_growth():
    assert measure_memory_growth(run_of([GIB - step * MIB for step in range(9)])).grows is False


def test_the_rank_that_rises_most_is_looked_at_unless_told():
    steady, leaking = [10 * GIB] * 8, [GIB + step * MIB for step in range(8)]
    run = run_of(steady, leaking, steady)
    assert measure_memory_growth(run).rank == 1
    assert measure_memory_growth(run, rank=2).grows is False
    assert measure_memory_growth(run, rank=7) is None


def test_without_a_device_there_is_no_end_to_foresee():
    growth = measure_memory_growth(run_of([step * MIB for step in range(1, 9)], device=0))
    assert (growth.grows, growth.steps_until_full) == (True, None)


def test_a_run_without_memory_has_no_growth():
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 100)
    assert measure_memory_growth(builder.build()) is None


def test_very_many_steps_are_thinned_out():
    growth = measure_memory_growth(run_of([GIB + step * MIB for step in range(3000)]))
    assert (growth.num_steps, growth.growth_bytes_per_step) == (3000, MIB)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32 - 1))
def test_a_slope_is_found_through_noise_smaller_than_it(seed):
    noise = np.random.default_rng(seed).integers(-MIB, MIB, 40)
    growth = measure_memory_growth(
        run_of([10 * GIB + step * MIB + int(noise[step]) for step in range(40)])
    )
    assert growth.grows
    assert growth.growth_bytes_per_step == pytest.approx(MIB, rel=0.2)


def process_of(*mebibytes: int) -> ProcessGrowth | None:
    """The growth of a process, by a sample of its memory in each second."""
    unknown = dict.fromkeys(DeviceTable.DTYPES, -1)
    rows = [
        {**unknown, "time_ns": second * 10**9, "process_rss": size << 20}
        for second, size in enumerate(mebibytes)
    ]
    run = replace(steady_run(), device_tables={0: DeviceTable.from_rows(rows)})
    return find_process_growth(run, 0)


def test_a_process_that_grows_is_found_on_cpu() -> None:
    found = process_of(100, 400, *range(500, 900, 50))

    assert found == ProcessGrowth(0, 500 << 20, 850 << 20, 7 * 10**9)
    grew = "The process of rank 0 grew from 500 MiB to 850 MiB in 7.00 s."
    assert describe_process_growth(found, None).startswith(f"{grew} Whether tensors did is")
    flat = measure_memory_growth(run_of([GIB] * 8))
    assert describe_process_growth(found, flat).startswith(f"{grew} Tensors did not")
    leak = measure_memory_growth(run_of([GIB + step * MIB for step in range(8)]))
    assert describe_process_growth(found, leak) == ""


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((100, 300, *[500] * 10), id="at the start"),
        pytest.param((*[500] * 8, *[900] * 8), id="a single rise"),
        pytest.param(tuple(range(500, 520)), id="a little"),
        pytest.param((100, 400, 500, 600), id="too few samples"),
        pytest.param(tuple(range(900, 500, -50)), id="it shrinks"),
        pytest.param((), id="no samples"),
    ],
)
def test_other_processes_do_not_grow(sizes: tuple[int, ...]) -> None:
    assert process_of(*sizes) is None
