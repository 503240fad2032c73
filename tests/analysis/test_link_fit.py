import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.link_fit import fit_link
from tests.cases import examples

FACTOR = 7 / 8
SIZES = np.array([1 << 20, 4 << 20, 16 << 20] * 8)


def durations(sizes, *, latency_ns, bytes_per_s, factor=FACTOR):
    return np.rint(latency_ns + sizes * factor / bytes_per_s * 1e9).astype(np.int64)


def test_a_clean_line_is_found_again():
    times = durations(SIZES, latency_ns=50_000, bytes_per_s=20e9)
    fit = fit_link(SIZES, times, FACTOR)
    assert fit.refusal is None
    assert fit.latency_ns == pytest.approx(50_000, rel=1e-3)
    assert fit.bus_bytes_per_s == pytest.approx(20e9, rel=1e-3)
    assert fit.residual_ratio == pytest.approx(0, abs=1e-4)
    assert fit.explained_ratio == pytest.approx(1, abs=1e-3)
    assert (fit.num_events, fit.num_sizes) == (24, 3)


def test_a_prediction_interpolates_and_says_where_it_extrapolates():
    fit = fit_link(SIZES, durations(SIZES, latency_ns=50_000, bytes_per_s=20e9), FACTOR)
    expected = float(durations(np.array([8 << 20]), latency_ns=50_000, bytes_per_s=20e9)[0])
    assert fit.predict_ns(8 << 20) == pytest.approx(expected, rel=1e-3)
    assert (fit.smallest_bytes, fit.largest_bytes) == (SIZES.min(), SIZES.max())


def test_collectives_delayed_tenfold_do_not_move_the_line():
    times = durations(SIZES, latency_ns=50_000, bytes_per_s=20e9)
    times[::6] *= 10
    fit = fit_link(SIZES, times, FACTOR)
    assert fit.bus_bytes_per_s == pytest.approx(20e9, rel=0.1)
    assert fit.latency_ns == pytest.approx(50_000, rel=0.5)


def test_eight_in_ten_collectives_lie_in_the_interval_of_their_prediction():
    random = np.random.default_rng(1)
    sizes = np.repeat(SIZES, 20)
    noise = random.lognormal(0, 0.2, len(sizes))
    times = (durations(sizes, latency_ns=50_000, bytes_per_s=20e9) * noise).astype(np.int64)
    fit = fit_link(sizes, times, FACTOR)
    ratios = times / np.array([fit.predict_ns(size) for size in sizes.tolist()])
    inside = (fit.low_ratio <= ratios) & (ratios <= fit.high_ratio)
    assert np.mean(inside) == pytest.approx(0.8, abs=0.02)
    assert fit.residual_ratio == pytest.approx(0.135, abs=0.03)


@pytest.mark.parametrize(
    ("sizes", "times", "reason"),
    [
        pytest.param([64] * 3, [8, 16, 32], "All 3 messages have the same size, 64 B", id="one"),
        pytest.param([64, 64, 80], [8, 16, 30], "too similar: 64 B to 80 B", id="alike"),
        pytest.param([64, 64, 640], [16, 16, 16], "does not grow with the message", id="flat"),
        pytest.param(
            [64, 64, 640, 640, 64],
            [1, 99, 2, 198, 16],
            "The size of a message explains",
            id="scatter",
        ),
    ],
)
def test_a_latency_that_cannot_be_told_is_refused_and_the_bandwidth_stands(sizes, times, reason):
    fit = fit_link(np.array(sizes), np.array(times), 1.0)
    assert reason in fit.refusal
    assert fit.latency_ns == 0
    assert fit.predict_ns(64) == pytest.approx(16)


def test_a_ratio_below_the_limit_never_reads_as_the_limit():
    """ "only 5%" beside "at least 5%" would be false."""
    shown = set()
    for seed in range(400):
        random = np.random.default_rng(seed)
        sizes = np.repeat([64, 640, 6400], 6)
        fit = fit_link(sizes, random.integers(900, 1400, len(sizes)) + sizes // 32, 1.0)
        found = re.search(r"explains only ([\d.]+)% .* at least 5% are", fit.refusal or "")
        if found:
            assert float(found[1]) < 5
            shown.add(found[1])
    assert any("." in each for each in shown)


def test_without_bytes_and_durations_there_is_no_fit():
    assert fit_link(np.array([-1, 64]), np.array([10, 0]), 1.0) is None


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(100, 10**9)), min_size=1, max_size=20),
    st.integers(2, 100),
)
def test_slower_clocks_scale_the_line_and_never_make_it_negative(messages, scale):
    sizes, times = np.array(messages).T
    fit, slower = (fit_link(sizes, times * factor, 1.0) for factor in (1, scale))
    assert fit.latency_ns >= 0
    assert fit.bus_bytes_per_s > 0
    assert slower.predict_ns(1000) == pytest.approx(fit.predict_ns(1000) * scale, rel=1e-3)
    assert slower.residual_ratio == pytest.approx(fit.residual_ratio, abs=1e-3)
