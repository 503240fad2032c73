"""A prediction follows the controls in a real browser, and its address keeps them."""

import re

import pytest

from fsdp_inspect.formatting import format_ns
from fsdp_inspect.simulation.changes import Changes, apply_changes
from fsdp_inspect.simulation.recorded import observed_plan
from fsdp_inspect.simulation.scenario import resolve_plan
from fsdp_inspect.simulation.simulate import simulate_plan
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.browser.conftest import broken_words
from tests.browser.settling import settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def entry(recorded_runs):
    """A run that can be simulated."""
    return next(one for one in list_runs(recorded_runs) if one.id.startswith("tiny"))


@pytest.fixture(scope="module")
def run(entry):
    return open_run(entry.path)


def step_of(run, **options):
    """The predicted step, by the library."""
    plan = apply_changes(resolve_plan(observed_plan(run), run.manifest), Changes())
    return format_ns(simulate_plan(run, plan, **options).predicted.step_time_ns)


def shown_step(dashboard):
    return dashboard.page.get_by_test_id("stMetricValue").first.inner_text()


def test_a_slider_changes_the_number_the_headline_and_the_address(server, tab, entry, run):
    dashboard = tab(server)
    dashboard.open("what_if", run=entry.id)
    before = shown_step(dashboard)
    assert before == step_of(run)
    dashboard.page.locator(".st-key-knobs-of-Network summary").click()
    slider = dashboard.page.locator(".st-key-bandwidth input[type=range]")
    slider.scroll_into_view_if_needed()
    slider.focus()
    slider.press("ArrowRight")
    dashboard.page.wait_for_function(
        "before => document.querySelector('[data-testid=stMetricValue]').innerText !== before",
        arg=before,
    )
    dashboard.settle()
    assert shown_step(dashboard) == step_of(run, bus_bytes_per_s=10e6)
    assert re.fullmatch(
        r"Predicted: steps [\d.]+% (longer|shorter) than with the recorded plan\.",
        dashboard.headline(),
    )
    assert "bandwidth=10MB" in dashboard.page.url
    dashboard.shown = None


def test_the_address_opens_the_same_prediction_in_a_second_browser(
    server, tab, entry, run, open_context
):
    dashboard = tab(server)
    dashboard.open("what_if", run=entry.id, bandwidth="1GB/s", wrap="every:2")
    address, headline = dashboard.page.url, dashboard.headline()
    page = open_context().new_page()
    page.goto(address)
    page.locator(".st-key-card-keep code").first.wait_for()
    settle(page)
    assert page.locator(".st-key-headline").inner_text() == headline
    command = page.locator(".st-key-card-keep code").first.inner_text()
    assert command.endswith("--wrap every:2 --bandwidth 1GB/s")


def test_the_plan_that_is_saved_is_the_one_that_is_shown(server, tab, entry):
    dashboard = tab(server)
    dashboard.open("what_if", run=entry.id, wrap="every:3")
    with dashboard.page.expect_download() as download:
        dashboard.page.get_by_role("button", name="plan.toml").click()
    text = download.value.path().read_text()
    assert '"layers.0", "layers.1", "layers.2"' in text


@pytest.mark.parametrize("width", [1440, 900])
def test_the_answer_stays_visible_beside_the_last_control(server, tab, entry, width):
    dashboard = tab(server, width=width)
    dashboard.open("what_if", run=entry.id)
    dashboard.page.locator(".st-key-reset").scroll_into_view_if_needed()
    dashboard.page.mouse.move(width - 50, 500)
    dashboard.page.mouse.wheel(0, 300)
    dashboard.settle()
    box = dashboard.page.locator(".st-key-headline").bounding_box()
    assert 0 <= box["y"] < 200
    assert dashboard.page.get_by_test_id("stMetricValue").first.is_visible()


def test_the_numbers_stay_in_one_row_of_a_narrow_window(server, tab, entry):
    dashboard = tab(server, width=900)
    dashboard.open("what_if", run=entry.id)
    tiles = dashboard.page.locator(".st-key-pinned-answer [data-testid=stMetric]").all()
    assert len(tiles) == 4
    assert len({round(tile.bounding_box()["y"]) for tile in tiles}) == 1
    assert broken_words(dashboard.page) == []
