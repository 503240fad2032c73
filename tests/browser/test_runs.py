"""The list of runs shows all runs, finds one, and opens one run or a comparison."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from fsdp_inspect_app.loading import name_runs
from playwright.sync_api import expect

from fsdp_inspect.store.folder import list_runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RUNS = (
    "recorded",
    "imported",
    "crashed",
    "partial",
    "hostile",
    "newer",
    "many-ranks",
    "long-names",
)
NAME_X, BOX_X, FIRST_ROW_Y, ROW_HEIGHT = 70, 16, 52, 35


@pytest.fixture(scope="module")
def names(states_folder):
    """The shown names of the runs by their ids."""
    return name_runs(list_runs(states_folder))


def click_row(dashboard, row, x):
    table = dashboard.page.get_by_test_id("stDataFrame").first
    table.click(position={"x": x, "y": FIRST_ROW_Y + ROW_HEIGHT * row})


def listed(dashboard):
    """The cells of the list by row, as a screen reader sees them."""
    rows = dashboard.page.get_by_test_id("stDataFrame").first.locator("tbody tr")
    rows.first.wait_for(state="attached")
    return [row.locator("td").all_text_contents() for row in rows.all()]


def address_of(dashboard):
    return parse_qs(urlsplit(dashboard.page.url).query)


def test_every_run_is_listed_with_its_status(states_server, tab, names):
    dashboard = tab(states_server)
    dashboard.open("")
    dashboard.page.wait_for_function(
        """() => {
            const rows = document.querySelector("[data-testid=stDataFrame] tbody");
            return rows?.querySelector("td") && !rows.textContent.includes("being read");
        }"""
    )
    dashboard.settle()
    assert dashboard.headline().startswith("Shortest step: ")
    assert dashboard.page.get_by_label(f"Search {len(RUNS)} runs").count() == 1
    statuses = {cells[0]: cells[1] for cells in listed(dashboard)}
    assert statuses == {
        names["recorded"]: "complete",
        names["imported"]: "imported",
        names["crashed"]: "cut off",
        names["partial"]: "partial",
        names["hostile"]: "complete",
        names["newer"]: "unreadable",
        names["many-ranks"]: "complete",
        names["long-names"]: "complete",
    }


def test_the_list_of_runs_is_found_by_its_name_with_all_that_was_asked(states_server, tab, names):
    dashboard = tab(states_server)
    dashboard.load("runs", search="imported", pin="imported")
    assert "Page not found" not in dashboard.page.locator("body").inner_text()
    assert urlsplit(dashboard.page.url).path == "/"
    asked = address_of(dashboard)
    assert (asked["search"], asked["pin"]) == (["imported"], ["imported"])
    assert [cells[0] for cells in listed(dashboard)] == [names["imported"]]
    assert dashboard.page.get_by_test_id("stSidebarNav").get_by_text("runs").count() == 1


def test_a_search_is_kept_in_the_address_and_found_by_a_colleague(states_server, tab, open_context):
    dashboard = tab(states_server)
    dashboard.open("")
    search = dashboard.page.get_by_test_id("stTextInputField")
    search.fill("imported")
    search.press("Enter")
    dashboard.page.wait_for_url("**search=imported**")
    dashboard.settle()
    colleague = open_context().new_page()
    colleague.goto(dashboard.page.url)
    rows = colleague.get_by_test_id("stDataFrame").first.locator("tbody tr")
    expect(rows).to_have_count(1)


def test_a_click_on_a_name_opens_the_run(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("", search="many-ranks")
    click_row(dashboard, 0, NAME_X)
    dashboard.page.wait_for_url("**/overview?**")
    dashboard.settle()
    assert address_of(dashboard)["run"] == ["many-ranks"]
    assert "1,024 ranks" in dashboard.page.get_by_test_id("stMain").inner_text()


def test_ticked_runs_lead_to_their_comparison(states_server, tab, names):
    dashboard = tab(states_server)
    dashboard.open("", baseline="recorded", search="bfloat16")
    assert listed(dashboard)[0][:2] == [names["recorded"], "baseline"]
    click_row(dashboard, 1, BOX_X)
    link = dashboard.page.get_by_role("link", name=re.compile("Compare 2 runs"))
    link.wait_for()
    dashboard.settle()
    other = address_of(dashboard)["with"]
    link.click()
    dashboard.page.wait_for_url("**/compare?**")
    dashboard.settle()
    shown = address_of(dashboard)
    assert (shown["baseline"], shown["with"]) == (["recorded"], other)


def test_pinned_runs_come_first_also_after_another_page(states_server, tab, names):
    dashboard = tab(states_server)
    dashboard.open("", pin="partial")
    assert listed(dashboard)[0][:2] == [names["partial"], "pinned"]
    navigation = dashboard.page.get_by_test_id("stSidebarNav")
    navigation.get_by_role("link", name="Units").click()
    dashboard.page.wait_for_url("**/units**")
    dashboard.settle()
    navigation.get_by_role("link", name="Runs").click()
    dashboard.page.get_by_test_id("stDataFrame").first.wait_for()
    dashboard.page.wait_for_url("**pin=partial**")
    dashboard.settle()
    assert listed(dashboard)[0][:2] == [names["partial"], "pinned"]
