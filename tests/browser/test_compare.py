"""A new user chooses two runs, reads their differences and shares the page."""

import pytest
from fsdp_inspect_app.loading import name_runs

from fsdp_inspect.comparison.comparison import compare_sides
from fsdp_inspect.comparison.sides import form_sides
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.browser.settling import settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def entries(recorded_runs):
    """Two runs of one model, the older run first."""
    found = {one.id: one for one in list_runs(recorded_runs)}
    names = sorted(name for name in found if "2-ranks" in name)
    return [found[name] for name in names]


@pytest.fixture(scope="module")
def comparison(entries):
    """The comparison, whose sides have the names of the runs."""
    runs = [open_run(entry.path) for entry in entries]
    names = dict(
        zip([run.manifest.origin() for run in runs], name_runs(entries).values(), strict=True)
    )
    return compare_sides(form_sides(runs, names=names))


def said(text):
    """A sentence as Markdown shows it, with real arrows."""
    return text.replace("->", "→")


def open_comparison(dashboard, entries, **more):
    before, after = entries
    dashboard.open("compare", baseline=before.id, **{"with": after.id}, **more)


def test_the_answer_the_settings_and_both_steps_are_there(server, tab, entries, comparison):
    dashboard = tab(server)
    open_comparison(dashboard, entries)
    assert dashboard.headline() == said(comparison.headline)
    main = dashboard.page.get_by_test_id("stMain").inner_text()
    assert main.index("Different settings") < main.index("Metrics")
    canvas = dashboard.page.locator(".st-key-card-timelines canvas[data-draws]")
    canvas.wait_for()
    for name in name_runs(entries).values():
        assert name in canvas.get_attribute("aria-label")


def test_the_measure_of_units_is_in_the_address(server, tab, entries):
    dashboard = tab(server)
    open_comparison(dashboard, entries)
    dashboard.page.get_by_role("radio", name="backward", exact=True).click()
    dashboard.page.wait_for_url("**measure=backward**")
    dashboard.settle()
    card = dashboard.page.locator(".st-key-card-units")
    assert "backward of each unit" in card.inner_text()
    dashboard.shown = None


def test_the_address_opens_the_same_comparison_in_a_second_browser(
    server, tab, entries, comparison, open_context
):
    dashboard = tab(server)
    open_comparison(dashboard, entries, measure="forward")
    address = dashboard.page.url
    page = open_context().new_page()
    page.goto(address)
    page.locator(".st-key-card-units", has_text="forward of each unit").wait_for()
    settle(page)
    assert page.locator(".st-key-headline").inner_text() == said(comparison.headline)


def test_the_comparison_is_saved_as_one_html_file(server, tab, entries, comparison):
    dashboard = tab(server)
    open_comparison(dashboard, entries)
    with dashboard.page.expect_download() as download:
        dashboard.page.get_by_role("button", name="HTML report").click()
    page = download.value.path().read_text()
    assert "2 sides compared" in page
    assert "<script" not in page
