"""The HTML report works without a network, at any width, in light and dark, on paper."""

import pytest

from fsdp_inspect.report.html import (
    read_comparison,
    read_contents,
    render_comparison_page,
    render_run,
)
from fsdp_inspect.store.folder import list_runs
from fsdp_inspect.store.reader import open_run
from tests.builders import RunBuilder, steady_run
from tests.cases import mark_slow

pytestmark = pytest.mark.browser

WINDOWS = [(800, "dark"), (1280, "light"), (1920, "dark")]
HOSTILE = (
    "\"><img src=x onerror=document.title='owned'><script>document.title='owned'</script>\u202e"
)


@pytest.fixture(scope="module")
def pages(recorded_runs, tmp_path_factory):
    """A report and a comparison of recorded runs, as files."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [open_run(entry.path) for entry in sorted(list_runs(recorded_runs), key=lambda e: e.id)]
    report, comparison = folder / "report.html", folder / "comparison.html"
    report.write_text(render_run(read_contents(runs[0])))
    sides = runs[:3] if len(runs) > 1 else [runs[0], steady_run()]
    comparison.write_text(render_comparison_page(read_comparison(sides)))
    return {"report": report, "comparison": comparison}


@pytest.fixture
def open_page(open_context):
    """Open a file without a network; the requests and errors of the browser are logged."""

    def open_it(path, *, width=1280, scheme="light"):
        viewport = {"width": width, "height": 900}
        page = open_context(offline=True, color_scheme=scheme, viewport=viewport).new_page()
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.complaints.append(request.url))
        page.goto(path.as_uri())
        assert page.complaints.pop(0) == path.as_uri()
        return page

    return open_it


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("window", mark_slow(WINDOWS, but=WINDOWS[:1]), ids=str)
def test_a_report_fits_its_window_and_asks_for_nothing(pages, open_page, screenshots, name, window):
    width, scheme = window
    page = open_page(pages[name], width=width, scheme=scheme)
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.screenshot(path=screenshots / f"{name}-{width}-{scheme}.png", full_page=True)
    assert wide <= width
    assert page.complaints == []


@pytest.mark.slow
def test_bars_are_as_long_as_their_shares(pages, open_page):
    page = open_page(pages["report"])
    widths = page.evaluate(
        """[...document.querySelectorAll('.chart-track .chart-fill')].map(
             part => part.getBoundingClientRect().width)"""
    )
    whole = page.evaluate("document.querySelector('.chart-track').getBoundingClientRect().width")
    assert sum(widths) == pytest.approx(whole, rel=0.01)


@pytest.mark.slow
def test_dark_and_light_differ_and_paper_is_light(pages, open_page):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = open_page(pages["report"], scheme="dark")
    on_screen = background(dark)
    assert on_screen != background(open_page(pages["report"]))
    dark.emulate_media(media="print", color_scheme="dark")
    assert background(dark) == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_a_report_prints(pages, open_page, tmp_path):
    path = tmp_path / "report.pdf"
    open_page(pages["report"]).pdf(path=path, format="A4")
    assert path.read_bytes().startswith(b"%PDF")


def test_hostile_names_run_nothing_and_are_shown(open_page, tmp_path):
    builder = RunBuilder(units=(HOSTILE,), run_id=HOSTILE, config={HOSTILE: HOSTILE})
    for number in range(2):
        rank = builder.rank(number)
        rank.record["host"] = HOSTILE
        rank.step(0, 0, 100)
        rank.all_gather(HOSTILE, 0, 50, need=0)
    run = builder.build(notes=[HOSTILE])
    for name, text in (
        ("run.html", render_run(read_contents(run))),
        ("two.html", render_comparison_page(read_comparison([run, steady_run()]))),
    ):
        (tmp_path / name).write_text(text)
        page = open_page(tmp_path / name)
        assert page.title() != "owned"
        assert page.locator("img").count() == 0
        assert "onerror=document.title" in page.locator("main").inner_text()
        assert page.complaints == []
