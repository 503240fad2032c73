"""No page has a serious finding of axe-core, in light and in dark, on its runs of the samples."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from fsdp_inspect_app.pages import SECTIONS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = [page for section in SECTIONS.values() for page in section]
OURS = {"exclude": [["[data-testid=stSidebarNav]"]]}
"""Streamlit 1.67 wraps the entries of its navigation in `div` elements, between `ul` and `li`."""
SERIOUS = ("serious", "critical")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_axe_has_no_serious_finding(server, tab, page, scheme):
    dashboard = tab(server, scheme=scheme)
    dashboard.open(page.address)
    found = Axe().run(dashboard.page, context=OURS).response["violations"]
    serious = {
        f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for each in found
        if each["impact"] in SERIOUS
        for node in each["nodes"][:3]
    }
    assert serious == set()
