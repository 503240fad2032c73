"""Each choice of the user is one entry of the browser's history, and defaults are none."""

import pytest
from fsdp_inspect_app.pages import LIVE, SECTIONS

from tests.browser.conftest import Dashboard

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = [page for section in SECTIONS.values() for page in section if page.name != LIVE]
MEASURES = ("compute", "parameters", "exposed")


@pytest.fixture
def own_tab(open_context, server):
    """A new tab: a browser keeps at most 50 entries."""
    return Dashboard(open_context().new_page(), server)


def entries(dashboard) -> int:
    return int(dashboard.page.evaluate("history.length"))


def test_the_defaults_of_a_page_add_no_entry(own_tab):
    dashboard = own_tab
    dashboard.load("units")
    before = entries(dashboard)
    for number, page in enumerate(PAGES, 1):
        dashboard.load(page.address)
        assert entries(dashboard) == before + number, page.name


def test_each_choice_is_undone_by_one_step_back(own_tab):
    dashboard = own_tab
    dashboard.load("memory")
    dashboard.load("units")
    page = dashboard.page
    address, before = page.url, entries(dashboard)
    for number, measure in enumerate(MEASURES, 1):
        page.get_by_role("radio", name=measure, exact=True).click()
        page.wait_for_url(f"**bars={measure}**")
        dashboard.settle()
        assert entries(dashboard) == before + number
    for measure in (*MEASURES[-2::-1], "exposed"):
        page.go_back()
        page.wait_for_url(f"**bars={measure}**")
        page.get_by_role("radio", name=measure, exact=True, checked=True).wait_for()
        dashboard.settle()
    assert page.url == address
    page.go_back()
    page.wait_for_url("**/memory**")


def test_the_page_has_the_products_title_before_it_is_drawn(server, tab):
    dashboard = tab(server)
    shell = dashboard.page.request.get(server, headers={"Accept": "text/html"})
    assert "<title>FSDP Inspect</title>" in shell.text()
