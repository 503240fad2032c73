"""Every page answers for every kind of run: recorded, imported, crashed, of 1,024 ranks."""

import pytest
from fsdp_inspect_app.pages import SECTIONS

from tests.browser.conftest import fits_the_window

pytestmark = [pytest.mark.browser, pytest.mark.slow]

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
