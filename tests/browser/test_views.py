"""A saved view restores the page with its choices, also in a new tab, and can be deleted."""

import re

import pytest

from tests.browser.conftest import Dashboard

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("page", "parameters", "asked"),
    [
        pytest.param("units", {"bars": "parameters"}, "bars=parameters", id="choice"),
        pytest.param("", {"search": "hsdp", "pin": "hsdp-4-ranks"}, "search=hsdp", id="runs"),
    ],
)
def test_a_view_is_saved_opened_and_deleted(server, tab, open_context, page, parameters, asked):
    dashboard = tab(server)
    dashboard.load(page, **parameters)
    address, headline = dashboard.page.url, dashboard.headline()
    dashboard.page.get_by_role("button", name=re.compile("^Views")).click()
    dashboard.page.get_by_role("textbox", name="Save this page as").fill("mine")
    dashboard.page.get_by_role("button", name="Save view").click()
    dashboard.page.get_by_role("button", name="Views: 1").wait_for()

    other = Dashboard(open_context().new_page(), dashboard.address)
    other.load("memory")
    other.page.get_by_role("button", name="Views: 1").click()
    other.page.get_by_role("link", name="mine").click()
    other.page.wait_for_url(f"**{asked}**")
    other.settle()
    assert (other.page.url, other.headline()) == (address, headline)

    other.page.keyboard.press("Control+k")
    other.page.keyboard.type("memory")
    other.page.keyboard.press("Enter")
    other.page.wait_for_url("**/memory?**")
    other.settle()
    other.page.keyboard.press("Control+k")
    other.page.keyboard.type("view mine")
    other.page.keyboard.press("Enter")
    other.page.wait_for_url(f"**{asked}**")
    other.settle()
    assert other.headline() == headline

    delete = other.page.get_by_role("button", name="Delete")
    if not delete.is_visible():  # the list of views stays open after a click on a view
        other.page.get_by_role("button", name="Views: 1").click()
    delete.click()
    other.page.get_by_role("button", name="Views", exact=True).wait_for()
