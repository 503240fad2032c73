"""The Units page links all units, one unit, its neighbours and its evidence."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from fsdp_inspect.store.folder import list_runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CARDS = (
    "Exposed waits by cause",
    "Collectives over steps",
    "Median duration of collectives",
    "Prefetch",
    "Memory over step",
    "Memory at the peak",
    "Parameters",
)


def address_of(dashboard):
    return parse_qs(urlsplit(dashboard.page.url).query)


@pytest.mark.parametrize("run", ["recorded", "imported", "crashed", "many-ranks"])
def test_every_unit_has_a_bar_and_a_row(states_server, states_folder, tab, run):
    dashboard = tab(states_server)
    dashboard.open("units", run=run)
    [entry] = [entry for entry in list_runs(states_folder) if entry.id == run]
    names = sorted(unit.fqn or "(root)" for unit in entry.manifest.units)
    bars = dashboard.page.locator(".st-key-card-units-bars .chart-name").all_text_contents()
    rows = dashboard.page.locator(".st-key-card-units-table tbody tr")
    assert sorted(bars) == names
    rows.first.wait_for(state="attached")
    assert sorted(row.locator("td").first.text_content() for row in rows.all()) == names


@pytest.mark.parametrize("run", ["recorded", "imported", "crashed", "many-ranks"])
def test_one_units_page_shows_all_there_is_of_it(states_server, tab, run):
    dashboard = tab(states_server)
    dashboard.open("units", run=run, unit="layers.0")
    assert dashboard.headline().startswith("layers.0: ")
    text = dashboard.page.get_by_test_id("stMain").inner_text()
    for title in CARDS:
        assert title in text


def test_no_card_of_a_unit_is_half_empty(server, tab):
    dashboard = tab(server, width=1440)
    dashboard.open("units", run="tiny-2-ranks", unit="layers.1")
    empty = dashboard.page.evaluate(
        """() => [...document.querySelectorAll("[class*='st-key-card-unit']")].map((card) => {
            const bottom = card.lastElementChild.getBoundingClientRect().bottom;
            return [card.className, card.getBoundingClientRect().bottom - bottom];
          }).filter(([, room]) => room > 60)"""
    )
    assert empty == []


def test_a_click_on_a_name_opens_the_unit_and_its_neighbours_follow(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("units", run="recorded")
    table = dashboard.page.locator(".st-key-card-units-table").get_by_test_id("stDataFrame")
    table.click(position={"x": 40, "y": 52 + 35 * 2})
    dashboard.page.wait_for_url("**unit=**")
    dashboard.settle()
    assert address_of(dashboard)["unit"] == ["layers.1"]
    dashboard.page.get_by_role("link", name=re.compile(r"Next: layers\.2")).click()
    dashboard.page.wait_for_url("**unit=layers.2**")
    dashboard.settle()
    assert dashboard.headline().startswith("layers.2: ")
    dashboard.page.go_back()
    dashboard.page.wait_for_url("**unit=layers.1**")
    dashboard.page.locator(".st-key-headline", has_text="layers.1: ").wait_for()


def test_the_longest_wait_is_shown_in_the_timeline(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("units", run="recorded", unit="norm, lm_head")
    dashboard.page.get_by_role("link", name="Show in timeline").click()
    dashboard.page.wait_for_url("**/timeline?**")
    dashboard.settle()
    assert address_of(dashboard)["unit"] == ["norm, lm_head"]
