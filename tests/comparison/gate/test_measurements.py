"""The measured values: no warm-up steps, and over repeats the highest and the median."""

from fsdp_inspect.comparison.gate.measurements import read_runs
from fsdp_inspect.trace.codes import MemoryPoint, Phase
from fsdp_inspect.trace.run import RunStatus
from tests.builders import InMemoryRun, RunBuilder, add_steady_step, steady_run


def run_with_memory(*highest: int, warmup_steps: int = 1, **manifest: object) -> InMemoryRun:
    """A run of one rank with a memory step for each number, which is its peak in backward."""
    builder = RunBuilder(world_size=1, warmup_steps=warmup_steps, **manifest)
    rank = builder.rank(0)
    for step, peak in enumerate(highest):
        rank.step(step, 100 * step, 100 * step + 100, is_memory_step=True)
        columns = {"unit": "layers.1", "phase": Phase.BACKWARD, "activation": peak}
        rank.memory(MemoryPoint.PEAK, peak, **columns)
        rank.memory(MemoryPoint.PHASE_PEAK, peak, **columns)
        rank.memory(MemoryPoint.STEP_END, 10, sharded_parameter=10)
    return builder.build()


def test_memory_of_a_warm_up_step_never_counts() -> None:
    reading = read_runs([run_with_memory(900, 500, 400)])

    assert reading.memory["peak_allocated_bytes"] == 500
    assert reading.memory["peak_backward_bytes"] == 500
    assert reading.memory["step_adds_bytes"] == 490
    assert reading.memory["category.activation"] == 500
    assert reading.moments["backward"].bytes == 500


def test_an_allocator_that_was_highest_while_warming_up_is_read_after_it() -> None:
    builder = RunBuilder(world_size=1, warmup_steps=1, device_type="cuda")
    rank = builder.rank(0)
    rank.record.update(memory_from="cuda_allocator", device_memory_bytes=4000)
    for step, (allocated, peak) in enumerate([(10, 900), (500, 900), (510, 900)]):
        rank.step(step, 100 * step, 100 * step + 100)
        columns = {"reserved": 1000 - step, "peak_reserved": 1000}
        rank.memory(MemoryPoint.BACKWARD_START, allocated, peak_allocated=peak, **columns)

    reading = read_runs([builder.build()])

    assert reading.memory["peak_allocated_bytes"] == 510
    assert reading.memory["peak_reserved_bytes"] == 999


def test_a_run_whose_memory_was_seen_only_while_warming_up_has_none() -> None:
    reading = read_runs([run_with_memory(900)])

    assert reading.memory == {}
    assert reading.moments == {}


def test_a_category_that_holds_nothing_at_the_peak_is_nothing_and_not_unknown() -> None:
    reading = read_runs([run_with_memory(900, 500)])

    assert reading.memory["category.optimizer_state"] == 0


def test_times_of_warm_up_and_memory_steps_never_count() -> None:
    builder = RunBuilder(world_size=1, warmup_steps=1)
    rank = builder.rank(0)
    rank.step(0, 0, 5000)
    for number in (1, 2):
        add_steady_step(rank, number, start=5000 + 1000 * number)
    rank.step(3, 8000, 16000, is_memory_step=True)

    reading = read_runs([builder.build()])

    assert reading.times["step_time_ns"] == (1000,)
    assert sum(reading.parts.values()) == 1000


def test_waits_are_kept_by_unit_collective_and_phase() -> None:
    reading = read_runs([steady_run(), steady_run(run_id="again")])

    assert reading.times["exposed_ns"] == (reading.times["exposed_ns"][0],) * 2
    assert reading.waits[("layers.1", "all_gather in forward")] == 50
    assert reading.waits[("layers.0", "reduce_scatter in backward")] == 100


def test_the_highest_of_several_repeats_counts() -> None:
    reading = read_runs([run_with_memory(0, 500), run_with_memory(0, 700, run_id="again")])

    assert reading.memory["peak_allocated_bytes"] == 700
    assert reading.problems == ()


def test_runs_of_other_settings_are_no_repeats() -> None:
    runs = [run_with_memory(0, 500, config={"batch_size": size}) for size in (1, 2)]

    (problem,) = read_runs(runs).problems
    assert "differ in 'batch_size'. Expected repeats of one program" in problem


def test_a_run_that_did_not_end_cannot_be_judged() -> None:
    builder = RunBuilder(world_size=1)
    builder.rank(0).step(0, 0, 100)

    (problem,) = read_runs([builder.build(status=RunStatus.CUT_OFF)]).problems
    assert "is cut off" in problem
