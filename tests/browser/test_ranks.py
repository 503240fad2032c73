"""The Ranks page shows late ranks, and opens one rank with a click."""

import re

import pytest

from fsdp_inspect.analysis.stragglers.ranks import measure_ranks
from fsdp_inspect.report.ranks_wording import describe_answer, describe_rank
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SAMPLE = "hsdp-4-ranks"


@pytest.fixture(scope="module")
def ranks(recorded_runs):
    if not any(entry.id == SAMPLE for entry in list_runs(recorded_runs)):
        pytest.skip("this checkout has no samples")
    return measure_ranks(open_run(recorded_runs / SAMPLE))


def test_ranks_answers_first_and_draws_the_map(server, tab, ranks):
    dashboard = tab(server)
    dashboard.open("ranks", run=SAMPLE)
    assert dashboard.headline() == describe_answer(ranks)[0]
    assert dashboard.page.locator(".st-key-card-rank-grid canvas").count() == 1


def choose_row(dashboard, rank):
    table = dashboard.page.locator(".st-key-card-all-ranks").get_by_test_id("stDataFrame")
    table.click(position={"x": 16, "y": 52 + rank * 35})


def headline_of(dashboard, address):
    dashboard.page.wait_for_url(address)
    dashboard.settle()
    return dashboard.headline()


def test_a_row_opens_its_rank_and_leaves_the_picker_to_choose_another(server, tab, ranks):
    dashboard = tab(server)
    dashboard.open("ranks", run=SAMPLE)
    dashboard.shown = None
    choose_row(dashboard, 2)
    assert headline_of(dashboard, "**rank=2**") == describe_rank(ranks.ranks[2])
    picker = dashboard.page.get_by_role("combobox", name="Rank")
    picker.click()
    picker.press_sequentially("3")
    picker.press("Enter")
    assert headline_of(dashboard, "**rank=3**") == describe_rank(ranks.ranks[3])
    choose_row(dashboard, 1)
    assert headline_of(dashboard, "**rank=1**") == describe_rank(ranks.ranks[1])
    choose_row(dashboard, 1)
    without = re.compile(r"^(?!.*rank=)")
    assert headline_of(dashboard, without) == describe_answer(ranks)[0]


def test_the_map_shows_what_is_chosen(server, tab, ranks):
    dashboard = tab(server)
    dashboard.open("ranks", run=SAMPLE, rank="1")
    dashboard.page.get_by_role("radio", name="lateness").click()
    dashboard.page.get_by_text("Lateness by rank and step").wait_for()
    dashboard.shown = None
    dashboard.page.wait_for_url("**measure=lateness**")
