"""The largest batch that fits, compared with forecasts of the next sizes."""

from hypothesis import given, settings, strategies as st

from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.errors import ForecastError
from fsdp_inspect.simulation.planning.builder_predictor import (
    MOST_SEQUENCES,
    WORLD_SIZES,
    find_fit,
)
from fsdp_inspect.simulation.planning.estimates import PlannedValue, ValueOrigin


class Model:
    """A model whose memory falls with the ranks and grows with the batch; it logs the requests.

    Its need is known up to `doubt` bytes.
    """

    def __init__(self, states, activation, fixed=0, saved_by_checkpointing=0.0, doubt=0):
        self.states, self.activation, self.fixed = states, activation, fixed
        self.saved, self.doubt = saved_by_checkpointing, doubt
        self.asked = []

    def __call__(self, world_size, settings):
        self.asked.append((world_size, dict(settings)))
        batch = settings.get("batch_size", 1)
        kept = 1 - self.saved if settings.get("checkpointing") == "full" else 1
        need = round(self.states / world_size + self.activation * batch * kept + self.fixed)
        low, high = need - self.doubt, need + self.doubt
        return PlannedValue(need, low, high, ValueOrigin.FORECAST, "None.")


@settings(deadline=None)  # every batch is forecast, to know the answer
@given(
    *(st.integers(1, 10_000), st.integers(1, 500), st.integers(0, 100)),
    *(st.integers(1, 20_000), st.integers(0, 100)),
)
def test_the_answers_are_the_extremes_that_surely_fit(states, activation, fixed, limit, doubt):
    model = Model(states, activation, fixed, doubt=doubt)

    fit = find_fit(model, limit, world_size=8, accepted=["batch_size"])

    fitting = [size for size in WORLD_SIZES if model(size, {}).high <= limit]
    assert fit.smallest_world_size == min(fitting, default=0)
    batches = [n for n in range(1, MOST_SEQUENCES + 1) if model(8, {"batch_size": n}).high <= limit]
    assert fit.largest_batch_size == max(batches, default=0)
    assert fit.fits == (model(8, {}).high <= limit)


def test_a_limit_inside_the_interval_is_no_fit_and_no_refusal():
    verdicts = [
        find_fit(Model(80, 100, doubt=5), limit, world_size=8, accepted=[]).verdict
        for limit in (104, 105, 114, 115)
    ]

    assert verdicts == [
        *(FitVerdict.DEVICE, FitVerdict.UNKNOWN),
        *(FitVerdict.UNKNOWN, FitVerdict.FITS),
    ]


def test_few_forecasts_find_the_largest_batch():
    model = Model(states=800, activation=10)

    fit = find_fit(model, 1000, world_size=8, accepted=["batch_size"])

    assert fit.largest_batch_size == 90
    assert sum("batch_size" in settings for _, settings in model.asked) <= 5


def test_a_batch_that_cannot_be_forecast_is_not_asked_for_where_a_smaller_one_does_not_fit():
    model = Model(states=800, activation=10)

    def peak(world_size, settings):
        if settings.get("batch_size", 1) > 1:
            raise ForecastError("The batch is one sequence.")
        return model(world_size, settings)

    fit = find_fit(peak, 50, world_size=8, accepted=["batch_size"])

    assert fit.largest_batch_size == 0
    assert not any(line.startswith("The largest batch") for line in fit.unknown)


def test_remedies_are_tried_until_one_fits():
    model = Model(states=80, activation=100, saved_by_checkpointing=0.9)

    fit = find_fit(model, 50, world_size=8, accepted=None)

    assert not fit.fits
    assert (fit.verdict, fit.required_bytes) == (FitVerdict.DEVICE, 110)
    assert [remedy.fits for remedy in fit.remedies] == [False, False, True]
    assert fit.remedies[-1].settings == {"checkpointing": "full"}
    assert fit.remedies[-1].required_bytes == 20
    assert [remedy.saved_bytes for remedy in fit.remedies] == [0, 0, 90]


def test_what_cannot_be_set_is_not_tried_and_that_is_said():
    fit = find_fit(Model(80, 100), 50, world_size=8, accepted=[])

    assert (fit.remedies, fit.largest_batch_size) == ((), None)
    batch, change = fit.unknown
    assert batch.startswith("The largest batch is unknown: the builder has no keyword batch_size.")
    assert (
        "none of the keywords batch_size, checkpointing, offload, reshard_after_forward, wrap"
        in change
    )


def test_a_number_of_ranks_that_cannot_be_forecast_leaves_only_that_question_open():
    model = Model(states=800, activation=10)

    def peak(world_size, settings):
        if world_size != 8:
            raise ForecastError("The mesh is 2x4.")
        return model(world_size, settings)

    fit = find_fit(peak, 1000, world_size=8, accepted=None)

    assert (fit.fits, fit.largest_batch_size, fit.smallest_world_size) == (True, 90, None)
    assert fit.unknown == (
        "The fewest ranks are unknown: the forecast for 2 ranks failed. The mesh is 2x4.",
    )


def test_a_remedy_that_fails_says_why_and_the_others_are_tried():
    model = Model(states=80, activation=100, saved_by_checkpointing=0.9)

    def peak(world_size, settings):
        if settings == {"checkpointing": "selective"}:
            raise ForecastError("no such mode")
        return model(world_size, settings)

    fit = find_fit(peak, 50, world_size=8, accepted=None)

    assert [remedy.problem for remedy in fit.remedies] == [None, "no such mode", None]
    assert fit.remedies[-1].fits
