import pytest

from fsdp_inspect.analysis.contention import MIN_PASSES, measure_contention
from fsdp_inspect.errors import IncompleteRunError
from fsdp_inspect.trace.codes import EventKind, Method, Stream
from tests.builders import RunBuilder, steady_run


def run_of(*passes, units=("layers.0", "layers.1"), kernels=False):
    """One forward per step: `(unit, duration, communicated)`; it communicates from its start."""
    builder = RunBuilder(units, world_size=2)
    rank = builder.rank(0)
    for step, (unit, duration, communicated) in enumerate(passes):
        begin = 1000 * step
        rank.step(step, begin, begin + 1000)
        rank.forward(unit, begin, begin + duration)
        if communicated:
            rank.all_gather("layers.1", begin, begin + communicated)
        if kernels:
            rank.add(EventKind.COMPUTE, begin, begin + duration, stream=Stream.COMPUTE)
    return builder.build()


def forward_of(run, fqn="layers.0"):
    units = measure_contention(run).units
    return next(unit for unit in units if (unit.fqn, unit.phase) == (fqn, "forward"))


ALONE = [("layers.0", 100, 0)] * MIN_PASSES
SLOWED = [("layers.0", 110, 60)] * MIN_PASSES
"""10 of 60 ns with communication are lost, because the same work alone takes 50 ns."""


@pytest.mark.parametrize("kernels", [False, True], ids=["recorded", "kernels"])
def test_the_slowdown_is_of_the_time_beside_communication(kernels):
    contention = measure_contention(run_of(*ALONE, *SLOWED, kernels=kernels))
    assert contention.slowdown == pytest.approx(60 / 50)
    assert contention.is_clear
    row = forward_of(run_of(*ALONE, *SLOWED, kernels=kernels))
    assert (row.num_alone, row.num_beside, row.compared_with) == (MIN_PASSES, MIN_PASSES, "itself")
    assert row.beside_ratio == pytest.approx(60 / 210)


def test_a_pass_wholly_beside_communication_is_compared_as_a_whole():
    covered = [("layers.0", 130, 200)] * MIN_PASSES
    assert measure_contention(run_of(*ALONE, *covered)).slowdown == pytest.approx(1.3)


def test_units_of_the_same_class_and_size_stand_in_for_one_that_never_ran_alone():
    alike = [("layers.1", 100, 0)] * MIN_PASSES
    row = forward_of(run_of(*alike, *SLOWED))
    assert (row.slowdown, row.compared_with) == (pytest.approx(1.2), "alike")


def test_a_unit_of_another_size_does_not_stand_in():
    builder = RunBuilder(world_size=2)
    builder.unit("layers.1", num_parameters=7)
    run = run_of(*[("layers.1", 100, 0)] * MIN_PASSES, *SLOWED)
    run = type(run)(**{**vars(run), "manifest": builder.build().manifest})
    assert forward_of(run).slowdown is None
    assert forward_of(run).reason.startswith("Only 0 passes of this unit and of similar units ran")


def test_too_few_passes_on_either_side_are_refused_with_the_number():
    row = forward_of(run_of(*ALONE, *SLOWED[1:]))
    assert (row.slowdown, row.low, row.compared_with) == (None, None, "")
    assert row.reason == "Communication ran during 4 of its passes. At least 5 are required."


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        pytest.param(ALONE, "No communication ran during the compute of a unit.", id="blocking"),
        pytest.param(SLOWED, "No unit ran the same compute both", id="always"),
    ],
)
def test_a_run_without_variation_has_a_reason_and_no_number(passes, reason):
    contention = measure_contention(run_of(*passes))
    assert contention.slowdown is None
    assert reason in contention.reason


def test_a_slowdown_within_the_scatter_of_single_passes_is_not_clear():
    scattered = [("layers.0", duration, 60) for duration in (80, 90, 100, 110, 120)]
    contention = measure_contention(run_of(*ALONE, *scattered))
    assert contention.low < 1 < contention.high
    assert not contention.is_clear


def test_nested_units_copies_and_waits_are_no_compute_of_a_unit():
    builder = RunBuilder(("", "layers.0"), world_size=2)
    rank = builder.rank(0)
    rank.step(0, 0, 1000)
    rank.forward("", 0, 500)
    rank.forward("layers.0", 100, 300)
    rank.copy_out("layers.0", 300, 320)
    rank.add(EventKind.ALL_GATHER_WAIT, 320, 330, unit="layers.0")
    rank.all_gather("layers.0", 400, 450, need=400, method=Method.HOST_BLOCKING)
    run = builder.build()
    assert forward_of(run, "").compute_ns == 500 - 200 - 20 - 10 - 50
    assert forward_of(run, "").beside_ratio == 0


def test_a_run_without_passes_says_so():
    builder = RunBuilder()
    builder.rank(0).step(0, 0, 10)
    contention = measure_contention(builder.build())
    assert contention.units == ()
    assert "No forward or backward" in contention.reason
    assert measure_contention(RunBuilder().build()) is None


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(IncompleteRunError, match="Rank 9 not found"):
        measure_contention(steady_run(), rank=9)
