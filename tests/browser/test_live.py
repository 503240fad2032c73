"""The Live page updates while a run is recorded, and reports a dead rank."""

import time

import pytest

from fsdp_inspect.store.folder import create_run
from fsdp_inspect.trace.run import RunStatus
from tests.analysis.live.test_feed import AHEAD_S, append_steps, write_steps
from tests.browser.conftest import serve
from tests.browser.test_every_page import check_every_page
from tests.store.run_files import make_manifest

pytestmark = pytest.mark.browser

NO_PROCESS = 2**22 + 1


@pytest.fixture
def live(tmp_path, free_port):
    """A server, and the writers of the two ranks of its run."""
    create_run(tmp_path / "runs" / "now", make_manifest(run_id="now"))
    writers = [write_steps(tmp_path / "runs" / "now", rank, run_id="now") for rank in (0, 1)]
    with serve(tmp_path / "runs", free_port(), tmp_path / "log") as address:
        yield address, writers
    for writer in writers:
        writer.close(RunStatus.COMPLETE)


@pytest.mark.slow
def test_a_run_is_followed_until_a_rank_dies(live, tab, screenshots):
    address, writers = live
    dashboard = tab(address)
    dashboard.open("live", run="now")
    headline = dashboard.page.locator(".st-key-headline")
    assert headline.inner_text().startswith("Step 2 took 1.00 µs")
    later_ns = time.monotonic_ns() + AHEAD_S * 10**9
    for writer in writers:
        append_steps(writer, range(3, 6), begun_ns=later_ns)
    headline.get_by_text("Step 5 took").wait_for()
    dashboard.screenshot(screenshots / "live-light-1280.png")
    check_every_page(dashboard, "now")
    dashboard.open("live", run="now")
    writers[1].update(pid=NO_PROCESS)
    writers[1].flush()
    headline.get_by_text("Rank 1 stopped without a recorded end.").wait_for()


@pytest.mark.slow
def test_an_open_figure_stays_while_the_run_grows(live, tab):
    address, writers = live
    dashboard = tab(address)
    dashboard.open("overview", run="now")
    dashboard.page.get_by_role("button", name="Explore").first.click()
    figure = dashboard.page.locator("[role=dialog] .js-plotly-plot")
    figure.wait_for()
    later_ns = time.monotonic_ns() + AHEAD_S * 10**9
    for writer in writers:
        append_steps(writer, range(3, 6), begun_ns=later_ns)
    dashboard.page.wait_for_timeout(12_000)  # two looks at the run
    assert figure.is_visible()
    dashboard.page.keyboard.press("Escape")
    dashboard.page.get_by_role("dialog").wait_for(state="detached")


@pytest.mark.slow
def test_the_actions_are_in_one_row_of_a_narrow_window(live, tab, tmp_path):
    address, _ = live
    create_run(tmp_path / "runs" / "plain", make_manifest(run_id="plain"))
    writer = write_steps(tmp_path / "runs" / "plain", 0, num_plain=2, run_id="plain")
    dashboard = tab(address, width=900)
    dashboard.open("live", run="plain")
    buttons = dashboard.page.locator(".st-key-live-actions").get_by_role("button").all()
    assert len(buttons) >= 3
    assert len({round(button.bounding_box()["y"]) for button in buttons}) == 1
    writer.close(RunStatus.COMPLETE)
