"""The pages show the library's numbers of the samples."""

import re

import pytest
from playwright.sync_api import expect

from fsdp_inspect.analysis.summary import measure_summary
from fsdp_inspect.formatting import format_bytes, format_count, format_ns, format_ratio
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="session")
def entry(recorded_runs):
    """The run that the tests read and the pictures show."""
    return min(list_runs(recorded_runs), key=lambda entry: entry.id)


@pytest.fixture(scope="session")
def digest(entry):
    return measure_summary(open_run(entry.path))


def test_runs_lists_the_recorded_runs_and_a_click_opens_one(server, tab, recorded_runs):
    dashboard = tab(server)
    dashboard.open("")
    runs = list_runs(recorded_runs)
    expect(dashboard.page.locator(".st-key-headline")).to_have_text(re.compile("^Shortest step: "))
    dashboard.settle()
    assert dashboard.page.get_by_label(f"Search {len(runs)} runs").count() == 1
    table = dashboard.page.get_by_test_id("stDataFrame").first
    table.click(position={"x": 70, "y": 52})
    dashboard.page.wait_for_url("**/overview?**")
    dashboard.settle()
    name = runs[0].id
    assert name in dashboard.page.get_by_test_id("stMain").inner_text()
    assert dashboard.page.title() == f"Overview - {name} - FSDP Inspect"


def test_overview_shows_the_verdict_and_the_numbers_of_the_digest(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("overview", run=entry.id)
    assert dashboard.headline() == digest.verdict.sentence
    dashboard.unfold()
    values = dashboard.page.get_by_test_id("stMetricValue").all_inner_texts()
    step, exposed = format_ns(digest.step_time_ns.typical), format_ns(digest.exposed_ns)
    peak = format_bytes(digest.peak_allocated_bytes)
    assert values[:3] == [step, exposed, peak]
    assert values[-6:] == [
        step,
        exposed,
        format_ratio(digest.overlap_ratio),
        peak,
        format_count(digest.throughput.tokens_per_s),
        format_ratio(digest.goodput_ratio),
    ]


def test_overviews_bar_names_every_part_of_the_step(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("overview", run=entry.id)
    shown = dashboard.page.locator(".st-key-card-breakdown").inner_text()
    for part in digest.breakdown.parts:
        assert format_ns(part.duration_ns) in shown or part.duration_ns == 0, part.name


def test_units_shows_a_bar_and_a_row_for_each_unit(server, tab, entry, digest):
    dashboard = tab(server)
    dashboard.open("units", run=entry.id)
    names = dashboard.page.locator(".st-key-card-units-bars .chart-name").all_text_contents()
    assert names == [unit.fqn or "(root)" for unit in digest.units]
    top = max(unit.exposed_ns for unit in digest.units)
    assert format_ns(top) in dashboard.headline()
