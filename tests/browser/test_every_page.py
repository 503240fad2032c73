"""Every page answers for every kind of run: recorded, imported, crashed, of 1,024 ranks."""

import pytest
from fsdp_inspect_app.pages import SECTIONS

from tests.browser.conftest import fits_the_window

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NARROWEST = 150
WIDTHS = """() => [...document.querySelectorAll('[data-testid=stMain] .chart-track')]
  .map((track) => track.getBoundingClientRect().width)"""
"""The widths of the bars' places, in pixels."""
PAGES = [page.name for page in SECTIONS["This run"]]


def check_every_page(dashboard, run):
    """Each page has an answer, shows no exception, and fits the window."""
    for name in (*PAGES, "compare"):
        dashboard.go(name, run=run)
        assert dashboard.headline().strip(), name
        assert dashboard.page.get_by_test_id("stException").count() == 0, name
        assert fits_the_window(dashboard.page), name


@pytest.mark.parametrize("run", ["recorded", "imported", "crashed", "many-ranks"])
def test_every_page_opens_it(states_server, tab, run):
    check_every_page(tab(states_server), run)


def test_names_of_400_letters_squeeze_no_chart(states_server, tab):
    dashboard = tab(states_server, width=1024)
    for name in ("runs", *PAGES, "compare"):
        dashboard.go("" if name == "runs" else name, run="long-names")
        assert fits_the_window(dashboard.page), name
        widths = dashboard.page.evaluate(WIDTHS)
        assert min(widths, default=NARROWEST) >= NARROWEST, (name, widths)


def test_charts_of_a_comparison_lie_below_each_other_in_a_narrow_window(states_server, tab):
    dashboard = tab(states_server, width=900)
    dashboard.open("compare", baseline="recorded", **{"with": "imported"})
    widths = dashboard.page.evaluate(WIDTHS)
    assert min(widths) >= 2 * NARROWEST, widths
