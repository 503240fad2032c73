"""Test that a click on a point of a chart opens its page."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SAMPLE = "hsdp-4-ranks"
NUM_RANKS, NUM_STEPS = 2, 8
"""Of the run `recorded`."""


def address_of(dashboard):
    """The parameters of the current address."""
    dashboard.settle()
    dashboard.shown = None
    return parse_qs(urlsplit(dashboard.page.url).query)


def click_at(dashboard, key, across, down=0.5):
    """Click a chart at shares of its width and height."""
    plot = dashboard.page.locator(f".st-key-chart-{key} .chart-plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.click(position={"x": across * box["width"], "y": down * box["height"]})


def click_step(dashboard, key, step):
    """Click a chart over the steps of the run `recorded` at one of them."""
    click_at(dashboard, key, (step + 0.5) / NUM_STEPS)


@pytest.mark.parametrize(
    ("page", "card", "across", "opened"),
    [
        ("", "[data-testid=stMain]", 70, "overview"),
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
    dashboard.unfold()
    click_step(dashboard, "step-times", 5)
    dashboard.page.wait_for_url("**/timeline?**")
    shown = address_of(dashboard)
    median_rank = measure_step_times(open_run(states_folder / "recorded")).median_rank
    assert (shown["step"], shown["rank"]) == (["5"], [str(median_rank)])


def test_a_bar_opens_its_unit(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    dashboard.unfold()
    dashboard.page.locator(".st-key-chart-owners .chart-fill").first.click()
    dashboard.page.wait_for_url("**/units?**")
    assert address_of(dashboard)["unit"] == ["norm, lm_head"]
    dashboard.open("units", run="recorded", bars="compute")
    dashboard.page.locator(".st-key-chart-units .chart-row").nth(3).click()
    dashboard.page.wait_for_url("**unit=layers.2**")
    assert address_of(dashboard)["unit"] == ["layers.2"]


def test_a_rank_and_a_step_of_memory_are_shown_when_they_are_clicked(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("memory", run="recorded", rank="0")
    click_at(dashboard, "memory-ranks", 1.5 / NUM_RANKS)
    dashboard.page.wait_for_url("**rank=1**")
    assert address_of(dashboard)["rank"] == ["1"]
    click_step(dashboard, "memory-growth", 4)
    dashboard.page.wait_for_url("**step=4**")
    shown = address_of(dashboard)
    assert (shown["rank"], shown["step"]) == (["1"], ["4"])


def tip_of(dashboard, key):
    """What a chart says about the point under the pointer or the keyboard."""
    tip = dashboard.page.locator(f".st-key-chart-{key} .chart-tip")
    tip.wait_for()
    dashboard.settle()
    return tip.inner_text()


def test_the_value_under_the_pointer_is_that_of_the_table(states_server, states_folder, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    dashboard.unfold()
    plot = dashboard.page.locator(".st-key-chart-step-times .chart-plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.hover(position={"x": 5.5 / NUM_STEPS * box["width"], "y": 40})
    point = measure_step_times(open_run(states_folder / "recorded")).over_steps[5]
    assert tip_of(dashboard, "step-times").splitlines() == [
        "step 5",
        f"{format_ns(point.exposed_ns)} exposed part",
        f"{format_ns(point.step_time_ns)} step time",
    ]


def test_the_keyboard_reads_the_bars_and_opens_one(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("units", run="recorded", bars="compute")
    chart = dashboard.page.locator(".st-key-chart-units .chart")
    chart.focus()
    for _ in range(4):
        chart.press("ArrowDown")
    assert tip_of(dashboard, "units").startswith("layers.2: ")
    chart.press("Enter")
    dashboard.page.wait_for_url("**unit=layers.2**")
    assert address_of(dashboard)["unit"] == ["layers.2"]


def test_a_drag_zooms_the_axis_and_a_button_shows_all_again(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    dashboard.unfold()
    plot = dashboard.page.locator(".st-key-chart-step-times .chart-plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    mouse, middle = dashboard.page.mouse, box["y"] + box["height"] / 2
    ticks = plot.locator(".chart-x").all_inner_texts()
    mouse.move(box["x"] + 0.5 * box["width"], middle)
    mouse.down()
    mouse.move(box["x"] + 0.99 * box["width"], middle, steps=5)
    mouse.up()
    expect(plot.locator(".chart-x")).to_have_text(["step 4", "5", "6", "7"])
    view = plot.locator("svg").get_attribute("viewBox").split()
    assert (float(view[0]), float(view[2])) == pytest.approx((50, 49), abs=1)
    assert "/overview?" in dashboard.page.url
    plot.get_by_role("button", name="Whole axis").click()
    expect(plot.locator("svg")).to_have_attribute("viewBox", "0 0 100 100")
    assert ticks[0] == "step 0"
    expect(plot.locator(".chart-x").first).to_have_text(ticks[0])
