"""Every page at common, large and small window sizes, light and dark, as pictures.

If `FSDP_INSPECT_SCREENSHOTS` names a folder, the pictures are saved there.
"""

import pytest
from fsdp_inspect_app.pages import SECTIONS

from fsdp_inspect.store.folder import list_runs
from tests.browser.conftest import covered_titles, fits_the_window

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = [page for section in SECTIONS.values() for page in section]
SCHEMES = (("light", (1280, 800)), ("dark", (1920,)))
"""The widths of the window: at the opening of a page, and afterwards."""
ONE_UNIT = {"unit": "layers.3"}


@pytest.fixture(scope="module")
def parameters(recorded_runs):
    """The parameters of each page's address, by page."""
    ids = sorted(entry.id for entry in list_runs(recorded_runs))
    before, after = ids[0], ids[-1]
    several = next((run for run in ids if run.startswith("hsdp")), after)
    asked = {page.name: {"run": after} for page in PAGES}
    return asked | {
        "runs": {},
        "imports": {},
        "compare": {"baseline": before, "with": after},
        "ranks": {"run": several},
        "what_if": {"run": after, "wrap": "every:2", "bandwidth": "1GB/s"},
    }


def check(dashboard, widths, screenshots, name, scheme):
    for width in widths:
        dashboard.widen(width)
        assert fits_the_window(dashboard.page), width
        assert dashboard.page.get_by_test_id("stException").count() == 0
        assert covered_titles(dashboard.page) == [], width
    picture = screenshots / f"{name}-{scheme}-{widths[0]}.png"
    dashboard.widen(widths[0])
    dashboard.screenshot(picture)
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("scheme", "widths"), SCHEMES, ids=["light", "dark"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_it_fits_the_window(server, tab, parameters, screenshots, page, scheme, widths):
    dashboard = tab(server, width=widths[0], scheme=scheme)
    show = dashboard.load if scheme == "light" else dashboard.go  # each page is loaded once
    show(page.address, **parameters[page.name])
    check(dashboard, widths, screenshots, page.name, scheme)


_CUT = """() => [".dvn-scroller", "[data-testid=stSidebar] [data-testid=stSelectbox] input"]
  .flatMap((kind) => [...document.querySelectorAll(kind)])
  .filter((one) => one.scrollWidth > one.clientWidth)
  .map((one) => one.value ?? one.closest("[class*=st-key-]").className)"""


@pytest.mark.parametrize("page", ["runs", "ranks", "units", "memory", "compare"])
def test_no_column_and_no_run_name_is_cut_at_1440(server, tab, parameters, page):
    dashboard = tab(server, width=1440)
    dashboard.load(page, **parameters[page])
    assert dashboard.page.evaluate(_CUT) == []


@pytest.mark.parametrize(("scheme", "widths"), SCHEMES, ids=["light", "dark"])
def test_the_page_of_a_unit_fits_the_window(server, tab, parameters, screenshots, scheme, widths):
    dashboard = tab(server, width=widths[0], scheme=scheme)
    dashboard.open("units", **parameters["units"], **ONE_UNIT)
    assert dashboard.headline().startswith(ONE_UNIT["unit"])
    check(dashboard, widths, screenshots, "units-one", scheme)
