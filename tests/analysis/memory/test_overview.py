import pytest

from fsdp_inspect.analysis.memory.overview import measure_memory_overview
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import MemoryPoint
from fsdp_inspect.trace.run import FailedRequest
from tests.builders import MIB, RunBuilder, steady_run


def two_ranks():
    """Rank 0 has the higher peak; rank 1 grows."""
    builder = RunBuilder(device_type="cuda")
    for number in range(2):
        rank = builder.rank(number)
        rank.record.update(memory_from="cuda_allocator", device_memory_bytes=900 * MIB)
        for step in range(8):
            rank.step(step, step * 10, step * 10 + 10)
            ends = (100 + number * step) * MIB
            peak = (500 - 300 * number) * MIB
            rank.memory(MemoryPoint.FORWARD_END, peak, active=peak, reserved=600 * MIB)
            rank.memory(MemoryPoint.STEP_END, ends, active=ends, reserved=600 * MIB)
    return builder.build()


def test_the_rank_with_the_highest_peak_is_shown_and_the_one_that_grows_is_named():
    digest = measure_memory_overview(two_ranks())
    assert (digest.rank.rank, digest.allocator.rank, digest.growth.rank) == (0, 0, 1)
    assert digest.rank.device_ratio == pytest.approx(600 / 900)
    assert digest.growth.growth_bytes_per_step == MIB


def test_everything_is_about_a_rank_that_is_asked_for():
    digest = measure_memory_overview(two_ranks(), rank=0)
    assert (digest.rank.rank, digest.growth.rank, digest.growth.grows) == (0, 0, False)


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 5 not found"):
        measure_memory_overview(two_ranks(), rank=5)


def test_a_run_without_memory_has_nothing_to_show():
    digest = measure_memory_overview(steady_run())
    assert (digest.rank, digest.allocator, digest.growth) == (None, None, None)


def test_the_unit_of_a_failed_request_has_its_name():
    run = two_ranks()
    failed = FailedRequest(requested_bytes=1, device_free_bytes=0, unit=1)
    run.ranks[1] = run.ranks[1].model_copy(update={"failed_request": failed})
    assert measure_memory_overview(run).failed_unit == "layers.1"
