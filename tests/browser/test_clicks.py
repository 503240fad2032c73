"""Test that a click on a point of a chart opens its page."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SAMPLE = "hsdp-4-ranks/run"
NUM_RANKS, NUM_STEPS = 2, 8
"""The ranks and steps of the run `recorded`."""
_BRING_INTO_VIEW = """([marks, place]) => {
  const mark = [...document.querySelectorAll(marks)].at(place);
  if (!mark) return null;
  mark.scrollIntoView({ block: "center" });
  const box = mark.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
"""Do both immediately: a chart may be drawn again with other marks whenever its page runs again,
and a removed mark has no position."""
POINTS, BARS = ".scatterlayer .points path", ".barlayer .point path"


def address_of(dashboard):
    """The parameters of the current address."""
    dashboard.settle()
    dashboard.shown = None
    return parse_qs(urlsplit(dashboard.page.url).query)


def click_at(dashboard, key, across, down):
    """Click a chart at fractions of its width and height."""
    plot = dashboard.page.locator(f".st-key-chart-{key} .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.click(position={"x": across * box["width"], "y": down * box["height"]})


def click_mark(dashboard, key, marks, place):
    """Click the middle of one of the marks of a chart, below the element with the handler."""
    named = f".st-key-chart-{key} {marks}"
    middle = dashboard.page.wait_for_function(_BRING_INTO_VIEW, arg=[named, place])
    dashboard.page.mouse.click(*middle.json_value())


@pytest.mark.parametrize(
    ("page", "card", "across", "opened"),
    [
        ("", "[data-testid=stMain]", 70, "overview"),
        ("memory", ".st-key-card-memory-owners", 60, "units"),
        ("units", ".st-key-card-units-table", 60, "units?**unit="),
    ],
)
def test_a_row_of_a_table_opens_what_it_stands_for_and_one_can_come_back(
    server, recorded_runs, tab, page, card, across, opened
):
    if not any(entry.id == SAMPLE for entry in list_runs(recorded_runs)):
        pytest.skip("this checkout has no samples")
    dashboard = tab(server)
    dashboard.open(page, run=SAMPLE)
    before, dashboard.shown = dashboard.headline(), None
    table = dashboard.page.locator(card).get_by_test_id("stDataFrame").first
    table.click(position={"x": across, "y": 52})
    dashboard.page.wait_for_url(f"**/{opened}**")
    dashboard.settle()
    assert dashboard.headline() != before
    dashboard.page.go_back()
    dashboard.page.wait_for_url(f"**/{page}?**")
    dashboard.page.locator(".st-key-headline", has_text=before).wait_for()


def test_a_cell_of_the_map_opens_its_rank_and_step_and_the_next_cell_another(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("ranks", run="recorded")
    for rank, step in ((1, 5), (0, 2)):
        click_at(dashboard, "rank-grid", (step + 0.5) / NUM_STEPS, (rank + 0.5) / NUM_RANKS)
        dashboard.page.wait_for_url(f"**rank={rank}**")
        card = dashboard.page.locator(".st-key-card-rank-breakdown")
        card.get_by_text(re.compile(rf"Step {step}(:|, closest)")).wait_for()
        shown = address_of(dashboard)
        # The address has no step if it is the default step of the page.
        assert (shown["rank"], shown.get("step", [str(step)])) == ([str(rank)], [str(step)])
        assert dashboard.headline().startswith(f"Rank {rank} (")
        link = dashboard.page.get_by_role("link", name=f"Show step {step} in timeline")
        named = parse_qs(urlsplit(link.get_attribute("href")).query)
        assert (named["rank"], named["step"]) == ([str(rank)], [str(step)])


def test_a_cell_of_a_thousand_ranks_opens_its_rank(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("ranks", run="many-ranks")
    click_at(dashboard, "rank-grid", 0.5, 0.5)
    dashboard.page.wait_for_url("**rank=**")
    [rank] = address_of(dashboard)["rank"]
    assert abs(int(rank) - 512) <= 2


def test_a_step_of_the_trend_opens_in_the_timeline(states_server, states_folder, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    click_mark(dashboard, "step-times", POINTS, 5)
    dashboard.page.wait_for_url("**/timeline?**")
    shown = address_of(dashboard)
    median_rank = measure_step_times(open_run(states_folder / "recorded")).median_rank
    assert (shown["step"], shown["rank"]) == (["5"], [str(median_rank)])


def test_a_bar_opens_its_unit(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    click_mark(dashboard, "owners", BARS, 0)
    dashboard.page.wait_for_url("**/units?**")
    assert address_of(dashboard)["unit"] == ["norm, lm_head"]
    dashboard.open("units", run="recorded", bars="compute")
    click_mark(dashboard, "units", BARS, 3)
    dashboard.page.wait_for_url("**unit=layers.2**")
    assert address_of(dashboard)["unit"] == ["layers.2"]


def test_a_rank_and_a_step_of_memory_are_shown_when_they_are_clicked(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("memory", run="recorded", rank="0")
    click_mark(dashboard, "memory-ranks", POINTS, -1)
    dashboard.page.wait_for_url("**rank=1**")
    assert address_of(dashboard)["rank"] == ["1"]
    click_mark(dashboard, "memory-growth", POINTS, 4)
    dashboard.page.wait_for_url("**step=4**")
    shown = address_of(dashboard)
    assert (shown["rank"], shown["step"]) == (["1"], ["4"])
