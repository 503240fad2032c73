"""The command palette opens pages, runs, units and steps with the keyboard alone."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Dashboard

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        pytest.param("memo", "/memory?", id="page"),
        pytest.param("layers.3", "unit=layers.3", id="unit"),
        pytest.param("run hsdp", "run=hsdp-4-ranks", id="run"),
        pytest.param("step 9", "step=9", id="step"),
    ],
)
def test_what_is_typed_opens(server, tab, recorded_runs, typed, address):
    dashboard: Dashboard = tab(server)
    dashboard.open("units")
    page = dashboard.page
    page.keyboard.press("Control+k")
    page.keyboard.type(typed)
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: address.replace("?", "") in url.replace("%2F", "/"))
    assert page.get_by_test_id("stException").count() == 0


def test_escape_closes_it_and_a_button_opens_it(server, tab):
    dashboard: Dashboard = tab(server)
    dashboard.open("units")
    dialog = dashboard.page.get_by_role("dialog")
    dashboard.page.get_by_role("button", name="Go to").click()
    dialog.wait_for()
    dashboard.page.keyboard.type("no such thing")
    expect(dialog).to_contain_text("No match")
    dashboard.page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
