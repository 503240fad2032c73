"""Does a stranger with a browser see who is late, and get to one rank with a click?"""

import pytest

from fsdp_inspect import open_run
from fsdp_inspect.analysis.ranks import measure_ranks
from fsdp_inspect.report.ranks_wording import describe_answer, describe_rank
from fsdp_inspect.store.folder import list_runs

pytestmark = pytest.mark.browser

SAMPLE = "hsdp-4-ranks/run"


@pytest.fixture(scope="module")
def ranks(recorded_runs):
    if not any(entry.id == SAMPLE for entry in list_runs(recorded_runs)):
        pytest.skip("this checkout has no samples")
    return measure_ranks(open_run(recorded_runs / SAMPLE))


def test_ranks_answers_first_and_draws_the_map(server, tab, ranks):
    dashboard = tab(server)
    dashboard.open("ranks", run=SAMPLE)
    assert dashboard.headline() == describe_answer(ranks)[0]
    assert dashboard.page.locator(".st-key-card-rank-grid .heatmaplayer image").count() == 1


def test_a_click_on_a_row_opens_the_rank(server, tab, ranks):
    dashboard = tab(server)
    dashboard.open("ranks", run=SAMPLE)
    table = dashboard.page.locator(".st-key-card-all-ranks").get_by_test_id("stDataFrame")
    table.click(position={"x": 16, "y": 52 + 2 * 35})
    dashboard.page.wait_for_url("**rank=2**")
    dashboard.settle()
    dashboard.shown = None
    assert dashboard.headline() == describe_rank(ranks.ranks[2])


def test_the_map_shows_what_is_chosen(server, tab, ranks):
    dashboard = tab(server)
    dashboard.open("ranks", run=SAMPLE, rank="1")
    dashboard.page.get_by_role("radio", name="skew").click()
    dashboard.page.get_by_text("Late by rank and step").wait_for()
    dashboard.shown = None
    assert "measure=skew" in dashboard.page.url
