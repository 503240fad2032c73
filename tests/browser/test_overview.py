"""The Overview of every kind of run answers first, and links to its evidence."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.formatting import format_ns
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.browser.settling import settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WHOLE = ("recorded", "imported", "many-ranks")
OTHERS = {
    "crashed": "Rank 1 never reached the all-gather",
    "partial": "fsdp-inspect store merge",
    "newer": "newer version of FSDP Inspect",
}


def main_text(dashboard):
    text = dashboard.page.get_by_test_id("stMain").inner_text()
    return text.replace("\N{WORD JOINER}", "")


@pytest.fixture(scope="module")
def digests(states_folder):
    return {run.id: measure_summary(open_run(run.path)) for run in list_runs(states_folder)
            if run.id in WHOLE}  # fmt: skip


@pytest.mark.parametrize("run", WHOLE)
def test_the_verdict_comes_first_and_the_numbers_are_the_digests(states_server, tab, digests, run):
    dashboard, digest = tab(states_server), digests[run]
    dashboard.open("overview", run=run)
    assert dashboard.headline() == digest.verdict.sentence
    dashboard.unfold()
    values = dashboard.page.get_by_test_id("stMetricValue").all_inner_texts()
    assert values[:2] == [format_ns(digest.step_time_ns.typical), format_ns(digest.exposed_ns)]
    bar = dashboard.page.locator(".st-key-card-breakdown").inner_text()
    for part in digest.breakdown.parts:
        assert format_ns(part.duration_ns) in bar or part.duration_ns == 0, part.name


@pytest.mark.parametrize("run", OTHERS)
def test_a_run_that_is_not_whole_says_so_and_what_to_do(states_server, tab, run):
    dashboard = tab(states_server)
    dashboard.open("overview", run=run)
    assert OTHERS[run] in main_text(dashboard)


def test_show_me_leads_to_the_timeline_at_the_unit_that_is_waited_for(states_server, tab, digests):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    dashboard.page.get_by_role("link", name="Show evidence").click()
    dashboard.page.wait_for_url("**/timeline?**")
    dashboard.settle()
    shown = parse_qs(urlsplit(dashboard.page.url).query)
    step = digests["recorded"].breakdown
    assert shown["unit"] == ["norm, lm_head"]
    assert shown["step"] == [str(step.closest_step)]
    assert str(step.rank) in shown["rank"]


def test_a_top_unit_leads_to_its_page(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    card = dashboard.page.locator(".st-key-card-worst")
    card.get_by_role("link", name=re.compile("norm, lm_head")).first.click()
    dashboard.page.wait_for_url("**/units?**")
    dashboard.settle()
    assert dashboard.headline().startswith("norm, lm_head: ")


def test_the_report_is_one_file_that_is_made_when_asked(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("overview", run="recorded")
    dashboard.page.get_by_test_id("stPopover").filter(has_text="Export").get_by_role(
        "button"
    ).click()
    with dashboard.page.expect_download() as download:
        dashboard.page.get_by_role("button", name="Report (HTML, one file)").click()
    assert download.value.suggested_filename == "recorded.html"
    assert "<html" in download.value.path().read_text()[:2000]
    dashboard.page.keyboard.press("Escape")


def test_the_address_opens_the_same_page_for_a_colleague(states_server, tab, open_context):
    dashboard = tab(states_server)
    dashboard.open("overview", run="imported")
    headline = dashboard.headline()
    colleague = open_context().new_page()
    colleague.goto(dashboard.page.url)
    settle(colleague)
    assert colleague.locator(".st-key-headline").inner_text() == headline


def test_the_pages_have_the_style_of_the_diagnosis(states_server, tab):
    dashboard = tab(states_server)
    dashboard.open("diagnosis", run="crashed")
    selectors = dashboard.page.evaluate(
        "() => [...document.styleSheets].flatMap((s) => [...s.cssRules].map((r) => r.selectorText))"
    )
    assert {".collective-grid td", ".collective-grid td.done"} <= set(selectors)
