"""A new user turns a trace of the folder into a run and opens it."""

import pytest

from tests.browser.conftest import serve
from tests.importing.kineto_traces import TraceWriter, fsdp2_step

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NAME = "<img src=x onerror=document.title='owned'>"


@pytest.fixture
def traces(tmp_path, free_port):
    """A server of a folder with two traces; the name of one contains markup."""
    trace = TraceWriter()
    fsdp2_step(trace)
    (tmp_path / "runs" / "traces").mkdir(parents=True)
    trace.write(tmp_path / "runs" / "traces" / "rank0.json.gz")
    trace.write(tmp_path / "runs" / f"{NAME}.json")
    with serve(tmp_path / "runs", free_port(), tmp_path / "log") as address:
        yield address


def test_a_trace_becomes_a_run_that_opens_with_a_click(traces, tab, screenshots):
    dashboard = tab(traces)
    dashboard.open("imports", source="traces/rank0.json.gz")
    assert dashboard.headline() == "2 profiler traces can become runs."
    dashboard.page.get_by_role("button", name="Import", exact=True).click()
    dashboard.page.get_by_text("is now the run").wait_for()
    dashboard.screenshot(screenshots / "imports-light-1280.png")
    dashboard.page.get_by_text("Open the run").click()
    dashboard.page.wait_for_url("**/overview?**")
    dashboard.settle()
    assert "run=imported%2Frank0" in dashboard.page.url
    assert "imported" in dashboard.page.get_by_test_id("stMain").inner_text()


def test_names_of_files_are_shown_and_never_obeyed(traces, tab):
    dashboard = tab(traces)
    dashboard.open("imports", source=f"{NAME}.json")
    dashboard.page.get_by_role("button", name="Import", exact=True).click()
    dashboard.page.get_by_text("is now the run").wait_for()
    assert NAME in dashboard.page.get_by_test_id("stAlert").inner_text()
    assert dashboard.page.locator("img[src='x']").count() == 0
    assert dashboard.page.title() != "owned"
