"""A page is saved as one file that opens without a network, with its tables and charts."""

import pytest
from fsdp_inspect_app.loading import name_runs

from fsdp_inspect.store.folder import list_runs

pytestmark = pytest.mark.browser

DRAWN = "document.querySelectorAll('.chart svg, .chart .chart-fill').length"


def save(dashboard, path):
    with dashboard.page.expect_download() as download:
        dashboard.page.get_by_role("button", name="Download page").click()
    download.value.save_as(path)


@pytest.fixture
def open_file(open_context):
    def open_it(path):
        page = open_context(offline=True, viewport={"width": 1024, "height": 900}).new_page()
        page.asked = []
        page.on("console", lambda message: page.asked.append(message.text))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(path.as_uri())
        return page

    return open_it


def test_a_saved_page_shows_what_the_page_shows(server, tab, recorded_runs, open_file, tmp_path):
    dashboard = tab(server)
    run = list_runs(recorded_runs)[0]
    name = name_runs([run])[run.id]
    dashboard.open("overview", run=run.id)
    dashboard.unfold()
    headline, charts = dashboard.headline(), dashboard.page.locator(".chart").count()
    titles = dashboard.page.locator("[data-testid=stMain] h2").all_inner_texts()
    save(dashboard, tmp_path / "page.html")
    page = open_file(tmp_path / "page.html")
    assert page.title() == f"Overview - {name} - FSDP Inspect"
    assert page.locator("h1").inner_text() == headline
    shown = page.locator("h2").all_inner_texts()
    assert [title for title in titles if title not in shown] == []
    assert page.locator(".chart").count() == charts > 0
    assert page.evaluate(DRAWN) > charts
    assert page.locator("table").count() >= charts
    assert page.evaluate("document.documentElement.scrollWidth") <= 1024
    assert page.asked == [(tmp_path / "page.html").as_uri()]


COLOURS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


@pytest.mark.slow
def test_a_saved_page_draws_its_timeline_which_zooms(
    server, tab, recorded_runs, open_file, tmp_path
):
    dashboard = tab(server)
    dashboard.open("timeline", run=list_runs(recorded_runs)[0].id, top="0")
    shown = dashboard.page.locator("canvas[data-draws]")
    whole, pinned = (shown.get_attribute(f"data-{name}") for name in ("end-ns", "pinned"))
    save(dashboard, tmp_path / "timeline.html")
    page = open_file(tmp_path / "timeline.html")
    canvas = page.locator("canvas[data-draws]")
    assert canvas.get_attribute("data-end-ns") == whole
    assert canvas.get_attribute("data-pinned") == pinned != ""
    assert canvas.evaluate(COLOURS) > 8
    assert canvas.get_attribute("aria-label") == shown.get_attribute("aria-label")
    assert page.get_by_role("button", name="Copy link").count() == 0
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function(
        "whole => document.querySelector('.drawing > div').shadowRoot"
        ".querySelector('canvas').dataset.endNs < Number(whole)",
        arg=whole,
    )
    assert page.asked == [(tmp_path / "timeline.html").as_uri()]


@pytest.mark.slow
def test_a_saved_page_paints_its_map(server, tab, recorded_runs, open_file, tmp_path):
    dashboard = tab(server)
    dashboard.open("ranks", run=list_runs(recorded_runs)[0].id)
    save(dashboard, tmp_path / "ranks.html")
    page = open_file(tmp_path / "ranks.html")
    assert page.locator(".chart-heat canvas").first.evaluate(COLOURS) > 2
    page.locator(".chart-heat canvas").first.hover()
    assert "rank " in page.locator(".chart-tip:visible").inner_text()
    assert page.asked == [(tmp_path / "ranks.html").as_uri()]


@pytest.mark.slow
def test_a_saved_page_holds_the_current_settings_and_hostile_names(
    states_server, tab, open_file, tmp_path
):
    dashboard = tab(states_server)
    dashboard.open("what_if", run="hostile")
    titles = dashboard.page.locator("[data-testid=stMain] h2").all_inner_texts()
    box = dashboard.page.get_by_role("combobox", name="Bandwidth").first
    if box.count():
        box.click()
        dashboard.page.get_by_role("option").last.click()
        dashboard.settle()
    headline = dashboard.headline()
    save(dashboard, tmp_path / "page.html")
    page = open_file(tmp_path / "page.html")
    assert page.locator("h1").inner_text() == headline
    assert sorted(page.locator("h2").all_inner_texts()) == sorted(titles)
    assert page.locator("main img, main script").count() == 0
    assert page.asked == [(tmp_path / "page.html").as_uri()]
