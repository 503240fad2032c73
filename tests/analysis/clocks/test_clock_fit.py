"""The fitted line of two clocks meets every bound; its uncertainty covers every such line."""

import numpy as np

from fsdp_inspect.analysis.clocks.clock_fit import MAX_DRIFT, LinearClock, OffsetBounds, fit_clock


def bounds(*collectives: tuple[int, int, int, int]) -> OffsetBounds:
    """The bounds from collectives, given as (start_a, end_a, start_b, end_b)."""
    return OffsetBounds.of(*(np.array(column) for column in zip(*collectives, strict=True)))


def test_one_collective_leaves_the_offset_uncertain_by_its_duration():
    fit = fit_clock(bounds((0, 100, 50, 150)), (0, 100))
    assert fit is not None
    assert fit.clock.offset_ns == 50
    assert 100 <= fit.uncertainty_ns <= 103


def test_uncertainty_grows_with_the_time_that_no_bound_covers():
    fit = fit_clock(bounds((0, 100, 50, 150)), (0, 1_000_000))
    assert fit is not None
    assert fit.uncertainty_ns >= MAX_DRIFT * 1_000_000


def test_contradicting_bounds_have_no_fit():
    assert fit_clock(bounds((0, 100, 0, 100), (200, 300, 900, 1000)), (0, 300)) is None


def test_the_fitted_line_satisfies_every_bound():
    starts = np.arange(0, 10**10, 10**7)
    drifted = starts + 5_000 + (starts * 5e-5).astype(np.int64)
    late = np.where(np.arange(len(starts)) % 2, 30_000, 0)
    given = OffsetBounds.of(starts, starts + 40_000, drifted + late, drifted + 40_000)
    fit = fit_clock(given, (0, 10**10))
    assert fit is not None
    at_high = fit.clock.from_reference(given.at_high_ns) - given.at_high_ns
    at_low = fit.clock.from_reference(given.at_low_ns) - given.at_low_ns
    assert (at_high <= given.high_ns + 2).all()
    assert (at_low >= given.low_ns - 2).all()


def test_a_clock_maps_there_and_back():
    clock = LinearClock(anchor_ns=10**15, offset_ns=-(10**14), drift=1e-4)
    times = 10**15 + np.arange(0, 10**12, 10**10)
    assert np.abs(clock.to_reference(clock.from_reference(times)) - times).max() <= 1


def test_a_clock_behind_another_is_seen_through_it():
    near = LinearClock(anchor_ns=0, offset_ns=1_000, drift=1e-4)
    far = LinearClock(anchor_ns=500_000, offset_ns=-70, drift=-5e-5)
    times = np.arange(0, 10**9, 10**7)
    through = far.seen_through(near).from_reference(times)
    assert np.abs(through - far.from_reference(near.from_reference(times))).max() <= 2
