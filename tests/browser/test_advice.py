"""A new user reads the advice on the page, saves the plan and tries it."""

import pytest

from fsdp_inspect.advice.request import AdviceRequest
from fsdp_inspect.advice.run_advice import advise_run
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from fsdp_inspect.trace.plan import Plan

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def entry(recorded_runs):
    return next(one for one in list_runs(recorded_runs) if one.id.startswith("tiny"))


@pytest.fixture(scope="module")
def advice(entry):
    return advise_run(open_run(entry.path), AdviceRequest())


def test_the_plan_that_is_saved_is_the_advised_one(server, tab, entry, advice):
    dashboard = tab(server)
    dashboard.open("advice", run=entry.id)
    assert dashboard.headline() == advice.answer.replace("->", "→")
    dashboard.unfold()
    with dashboard.page.expect_download() as download:
        dashboard.page.locator(".st-key-plan-fastest button").first.click()
    assert download.value.suggested_filename == "plan.toml"
    assert Plan.load(download.value.path()) == advice.plan.fastest.plan
    with dashboard.page.expect_download() as download:
        dashboard.page.locator(".st-key-prediction-file button").first.click()
    assert advice.run_id in download.value.path().read_text()


def test_a_change_opens_in_what_if_with_the_same_number(server, tab, entry, advice):
    dashboard = tab(server)
    dashboard.open("advice", run=entry.id)
    card = dashboard.page.locator(".st-key-card-recommended")
    card.get_by_text("Open in What-if").click()
    dashboard.page.wait_for_url("**/what_if?**")
    dashboard.page.locator(".st-key-card-knobs").wait_for()
    dashboard.settle()
    first = advice.plan.suggestions[0]
    assert dashboard.page.get_by_test_id("stMetricValue").first.inner_text() == format_ns(
        first.step_ns
    )
    dashboard.shown = None


def test_evidence_is_one_click_away(server, tab, entry, advice):
    dashboard = tab(server)
    dashboard.open("advice", run=entry.id)
    dashboard.page.locator(".st-key-card-recommended").get_by_text(
        "Open timeline", exact=True
    ).click()
    dashboard.page.wait_for_url("**/timeline?**")
    dashboard.shown = None


def test_a_plan_is_chosen_at_its_point(server, tab, entry, advice):
    dashboard = tab(server)
    dashboard.open("advice", run=entry.id)
    dashboard.unfold()
    front = dashboard.page.locator(".st-key-chart-front .chart")
    front.focus()
    for _ in advice.plan.front:
        front.press("ArrowRight")
    front.press("Enter")
    dashboard.page.wait_for_url(f"**front={len(advice.plan.front) - 1}**")
    last = advice.plan.front[-1]
    words = f"Predicted: step {format_ns(last.step_ns)}"
    dashboard.page.locator(".st-key-fold-others p", has_text=words).wait_for()
    dashboard.shown = None


def test_a_memory_limit_changes_the_advice(server, tab, entry):
    dashboard = tab(server)
    dashboard.open("advice", run=entry.id)
    dashboard.unfold()
    box = dashboard.page.locator(".st-key-limit input")
    box.fill("1MiB")
    box.press("Enter")
    dashboard.page.locator(".st-key-headline", has_text="1.00 MiB").wait_for()
    dashboard.page.wait_for_url("**limit=1MiB**")
    dashboard.shown = None
