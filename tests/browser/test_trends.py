"""Trends shows where a metric changes over the runs, and leads to the comparison of two runs."""

from urllib.parse import parse_qs, urlsplit

import pytest

from tests.browser.conftest import serve
from tests.browser.nightly_runs import FIRST_SLOW, name_night, write_nights

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def nights(free_port, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nights")
    with serve(write_nights(folder / "runs"), free_port(), folder / "log") as address:
        yield address


@pytest.mark.slow
def test_a_slower_night_is_a_change_point_that_opens_its_comparison(nights, tab):
    dashboard = tab(nights)
    dashboard.open("trends", metric="step_time_ns")
    page = dashboard.page
    assert dashboard.headline().startswith("Step time changed by +")
    assert name_night(FIRST_SLOW) in dashboard.headline()
    assert page.locator(".chart-dots").count() >= 1
    page.get_by_role("combobox", name="Metric").click()
    page.get_by_role("option", name="Overlap", exact=False).first.click()
    dashboard.settle()
    assert "no change point in 14 runs" in dashboard.headline()
    page.go_back()
    dashboard.settle()
    page.get_by_role("link", name="Compare with the run before").first.click()
    page.wait_for_url("**/compare?*")
    chosen = parse_qs(urlsplit(page.url).query)
    assert chosen["baseline"] == [name_night(FIRST_SLOW - 1)]
    assert chosen["with"] == [name_night(FIRST_SLOW)]
